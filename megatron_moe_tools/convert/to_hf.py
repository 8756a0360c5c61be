"""Convert a native step to a Hugging Face folder; the optimizer's state is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_moe.checkpoint import folder, manifest, origin
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import replace
from megatron_moe.data.transformers_files import json_bytes
from megatron_moe.hf import folder as hf_folder
from megatron_moe.hf.config import config_of, differences, settings
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.mapping import Mapping, Piece, mapping
from megatron_moe.hf.safetensors_file import StreamedFile, bytes_of, parse_object, read_small
from megatron_moe.hf.tensors import TensorReader, dtype_name, sha256, write_tensor
from megatron_moe.hf.transforms import Shape, Vocabulary
from megatron_moe.io.files import write_bytes
from megatron_moe.io.hashing import FileEntry, sha256_of_file
from megatron_moe.moe.grouped_gemm_fp8 import E4M3 as FP8
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row, expected
from megatron_moe_tools.convert.convert import (
    Advance,
    Conversion,
    ConversionOptions,
    OutputFile,
    Record,
    model_words,
    reader_of,
)
from megatron_moe_tools.convert.exported_tokenizer import AS_IT_CAME, GENERATION, ExportedTokenizer, generation_ids
from megatron_moe_tools.convert.fp8_weights import quantization_config, rounded, uneven_blocks
from megatron_moe_tools.convert.fp8_weights import summary as fp8_summary
from megatron_moe_tools.convert.model_card import NAME as CARD
from megatron_moe_tools.convert.model_card import NAME_OF_THE_FIRST as CARD_OF_THE_FIRST
from megatron_moe_tools.convert.model_card import model_card
from megatron_moe_tools.convert.to_native import copy_file
from megatron_moe_tools.models.source import ModelSource

_EMBEDDING, _TIED = "embedding.word_embeddings.weight", "lm_head.weight"
_OPTIMIZER = "optimizer."


class _Written(NamedTuple):
    """An item of a file: the tensors of a piece, or one that is a copy of a piece's."""

    piece: Piece
    copy: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return self.piece.hf if self.copy is None else (self.copy,)


class ToHF(Conversion):
    """A conversion from native to Hugging Face.

    Raises:
        ConfigError: the step's tensors are not those of its configuration, or its family is not known.
    """

    direction: ClassVar[str] = "native to Hugging Face"

    def __init__(
        self, source: ModelSource, options: ConversionOptions, tokenizer: ExportedTokenizer = AS_IT_CAME
    ) -> None:
        super().__init__(source.path, options)
        self.tokenizer = tokenizer
        self.notes = [*source.notes, *tokenizer.notes]
        self.reader = reader_of(source.path, options)
        self.family = source.required_family
        self.companions = {name: path for name, path in source.companions.items() if name not in tokenizer.left_out}
        self.state = folder.read_json(source.path / folder.STATE)
        self.run = self._with_stored_padding(source)
        self.table: Mapping = mapping(self.run, self.family.names)
        if options.fp8:
            self.notes += uneven_blocks(self.table.pieces)
        self._require_tensors()
        self.copies = self._copies()
        self.contents = {**tokenizer.files, hf_folder.CONFIG: self._config(), **self._generation(), **self._card()}
        replaced = self.contents.keys() - {CARD}
        self.companions = {name: path for name, path in self.companions.items() if name not in replaced}
        self.files = manifest.read(source.path).files
        self.inputs = {name: source.path / name for name in self.files}
        self.units = self._planned()
        self.summary = model_words(self.run, self.family.name, self._dtype_words())

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "tokenizer": self.tokenizer.facts()}

    def wanted_inputs(self) -> dict[str, FileEntry] | None:
        return self.files

    def _with_stored_padding(self, source: ModelSource) -> Any:
        """Return the run with the vocabulary padded as in the step; the padding depends on the run's layout."""
        table = self.reader.index.tensors.get(_EMBEDDING)
        vocab_size = source.run.model.vocab_size
        if table is None or len(table.shape) != 2 or vocab_size is None or table.shape[0] < vocab_size:
            found = "no" if table is None else list(table.shape)
            raise ConfigError(f"--load {self.source}: {_EMBEDDING}: {found}, for a vocabulary of {vocab_size} tokens")
        run = replace(source.run, padded_vocab_size=table.shape[0], tensor_model_parallel_size=1)
        if self.options.drop_mtp and run.model.mtp_num_layers:
            run = replace(run, mtp_num_layers=None)
        return run

    def _require_tensors(self) -> None:
        shapes = {
            key: value.shape for key, value in self.reader.index.tensors.items() if not key.startswith(_OPTIMIZER)
        }
        self.dropped = sorted(key for key in shapes if self.options.drop_mtp and key.startswith("mtp."))
        shapes = {key: shape for key, shape in shapes.items() if key not in self.dropped}
        if self.dropped:
            self.notes.append(f"--drop-mtp: {len(self.dropped)} tensors of multi-token prediction are left out")
        wrong = [f"missing: {key}" for key in sorted(self.table.shapes.keys() - shapes.keys())]
        wrong += [
            f"{self.family.name} has no tensor for it: {key}" for key in sorted(shapes.keys() - self.table.shapes)
        ]
        wrong += [
            f"{key}: shape {list(shape)}, its configuration says {list(self.table.shapes[key])}"
            for key, shape in sorted(shapes.items())
            if key in self.table.shapes and shape != self.table.shapes[key]
        ]
        if wrong:
            head = f"--load {self.source}: its tensors are not those of a {self.family.name} of its configuration:"
            raise ConfigError(listing(head, wrong))
        for piece in self.table.pieces:
            stored = self.reader.dtype(piece.key)
            if piece.fp32 and stored != torch.float32:
                self.warnings.append(
                    f"PRECISION WARNING: {piece.key} is {dtype_name(stored)} in {self.source}, must be float32: it was "
                    "rounded before it was saved; written as it is, in float32"
                )

    def _copies(self) -> list[str]:
        """Return the names of copies to write: those that the source had, or that readers of the family need."""
        kept = self.state.get("hf") or {}
        needed = [name for name in self.table.copies if name != _TIED or self.family.served_untied]
        wanted = kept.get("copies", needed)
        if self.options.drop_mtp:
            wanted = [name for name in wanted if name in self.table.copies]
        unknown = [name for name in wanted if name not in self.table.copies]
        if unknown:
            raise ConfigError(f"--load {self.source}: state.json names copies that the model has not: {unknown[:5]}")
        return list(wanted)

    # Configuration.

    def _dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of the weights as they are written, the narrowest first."""
        found = {self._dtype(piece) for piece in self.table.pieces if not piece.fp32}
        return sorted(found, key=lambda dtype: (dtype.itemsize, str(dtype)))

    def _dtype_words(self) -> str:
        first = f"{dtype_name(FP8)} in blocks of 128 x 128 and " if self.options.fp8 else ""
        return first + " and ".join(dtype_name(dtype) for dtype in self._dtypes())

    def _dtype(self, piece: Piece) -> torch.dtype:
        return torch.float32 if piece.fp32 else self.options.dtype or self.reader.dtype(piece.key)

    def _config(self) -> bytes:
        """Return config.json: the source's own, byte for byte where nothing in it changes, or a new one."""
        dtypes = self._dtypes()
        dtype = dtype_name(dtypes[0])
        if len(dtypes) > 1:
            self.notes.append(f"weights stay in {self._dtype_words()}, as the run kept them; --dtype writes all in one")
        path = self.companions.pop(hf_folder.CONFIG, None)
        if path is None or self.options.family is not None:
            return json_bytes({**config_of(self.run, self.family, dtype), **self._added()})
        data = read_small(path, hf_folder.LARGEST_CONFIG)
        config = parse_object(data, str(path))
        has_depths = self.run.model.mtp_num_layers is not None
        described = settings(config, has_prediction_layers=has_depths, where=str(path))
        if wrong := differences(self.run, described.flat):
            head = (
                f"--load {self.source}: the run is no longer the model that its hf/config.json describes; --family "
                f"{self.family.name} writes a new one:"
            )
            raise ConfigError(listing(head, wrong))
        changed = self._changed(config, dtype)
        return data if changed == config else json_bytes(changed)

    def _added(self) -> dict[str, Any]:
        """Return keys of config.json about the tokenizer and the dtype that no setting of the model decides."""
        quantization = {"quantization_config": quantization_config(self.family, self.table.pieces)}
        return {**(self.tokenizer.ids or {}), **(quantization if self.options.fp8 else {})}

    def _generation(self) -> dict[str, bytes]:
        """Return generation_config.json where its ids are the tokenizer's; otherwise it stays as it came."""
        ids = self.tokenizer.ids
        if ids is None:
            return {}
        came = self.companions.get(GENERATION)
        before = {} if came is None else parse_object(read_small(came, hf_folder.LARGEST_CONFIG), str(came))
        kept = {name: value for name, value in before.items() if name not in ids}
        return {GENERATION: json_bytes({**kept, **generation_ids(ids)})}

    def _card(self) -> dict[str, bytes]:
        """Return the model card. A model that was converted and not trained here keeps the one that it came with."""
        if not self.state.get("iteration"):
            return {}
        config = folder.read_json(self.source / folder.CONFIG)
        words = self._dtype_words()
        card = model_card(self.run, self.family, words, config, self.state, self.tokenizer.words)
        return {CARD: card.encode()}

    def _changed(self, config: dict[str, Any], dtype: str) -> dict[str, Any]:
        changed = dict(config)
        if changed.pop("quantization_config", None) is not None and not self.options.fp8:
            self.notes.append(f"quantization_config is left out of config.json: the weights are written in {dtype}")
        named: list[str] = [key for key in ("torch_dtype", "dtype") if key in config]
        for key in named or ("torch_dtype",):
            if changed.get(key) != dtype:
                self.notes.append(f"config.json: {key} {changed.get(key)!r} is {dtype!r} now")
                changed[key] = dtype
        dropped = self.dropped or (self.state.get("hf") or {}).get("dropped")
        if dropped and self.run.model.mtp_num_layers is None:
            for key in ("num_nextn_predict_layers", "num_mtp_layers"):
                if changed.get(key):
                    self.notes.append(f"config.json: {key} is 0 now: these layers were dropped")
                    changed[key] = 0
        return {**changed, **self._added()}

    # Files.

    def _planned(self) -> list[OutputFile]:
        of = {name: piece for piece in self.table.pieces for name in piece.hf}
        items = [_Written(piece, None) for piece in self.table.pieces]
        items += [_Written(of[self.table.copies[name]], name) for name in self.copies]
        shards: list[list[_Written]] = [[]]
        filled = 0
        for item in items:
            size = self._bytes(item)
            if shards[-1] and filled + size > self.options.max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(item)
            filled += size
        return [
            OutputFile(_shard_name(number, len(shards)), sum(self._bytes(item) + 256 for item in shard), tuple(shard))
            for number, shard in enumerate(shards, 1)
        ]

    def _layout(self, item: _Written) -> Iterator[tuple[str, tuple[str, Shape]]]:
        """Yield name, dtype and shape of the tensors that are stored for an item; scales follow their weights."""
        shapes = item.piece.transform.hf_shapes
        in_fp8 = self._in_fp8(item.piece)
        dtype = dtype_name(FP8 if in_fp8 else self._dtype(item.piece))
        for name, shape in zip(item.names, shapes if item.copy is None else shapes[:1], strict=True):
            yield name, (dtype, shape)
            if in_fp8:
                blocks = tuple(-(-size // edge) for size, edge in zip(shape, hf_folder.BLOCK))
                yield name + hf_folder.SCALE, ("float32", blocks)

    def _in_fp8(self, piece: Piece) -> bool:
        return self.options.fp8 and piece.is_linear

    def _bytes(self, item: _Written) -> int:
        return sum(bytes_of(dtype, shape) for _, (dtype, shape) in self._layout(item))

    def write(self, unit: OutputFile, output: Path, advance: Advance) -> Record:
        layout = dict(stored for item in unit.content for stored in self._layout(item))
        rows: list[Row] = []
        copies: list[Row] = []
        with StreamedFile(output / unit.name, layout) as file:
            for item in unit.content:
                if self._in_fp8(item.piece):
                    rows.append(self._write_rounded(item.piece, file))
                else:
                    row, tensors = self._read(item.piece)
                    for name, tensor in zip(item.names, tensors):
                        entry = certificate.hf_entry(name, tensor.shape, tensor.dtype, write_tensor(file, name, tensor))
                        (row["hf"] if item.copy is None else copies).append(entry)
                    if item.copy is None:
                        rows.append(row)
                advance(self._bytes(item) + 256)
        path = output / unit.name
        whole = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path))
        return {"entry": whole, "rows": rows, "copies": copies}

    def _write_rounded(self, piece: Piece, file: StreamedFile) -> Row:
        """Write the weights of a piece in FP8, each followed by its scales, and return the row of the certificate."""
        block, native = self._block(piece)
        entries, values = [], []
        for name, tensor in zip(piece.hf, piece.transform.to_hf(block), strict=True):
            weight = rounded(tensor)
            digest = write_tensor(file, name, weight.numbers)
            scale = {"name": name + hf_folder.SCALE}
            scale["sha256"] = write_tensor(file, scale["name"], weight.scales)
            entry = certificate.hf_entry(name, tensor.shape, FP8, digest)
            entries.append({**entry, "scale": scale, "rounding": weight.error})
            values.append(weight.values)
        native["sha256_as_written"] = sha256(piece.transform.to_native(values))
        cast = certificate.cast_name(native["dtype"], dtype_name(FP8))
        return {"native": native, "transform": piece.transform.name, "cast": cast, "hf": entries}

    def _block(self, piece: Piece) -> tuple[Tensor, Row]:
        block = self.reader.read(piece.key, piece.start, piece.transform.native_shape)
        certificate.require_finite(block, piece.key, str(self.source))
        return block, certificate.native_entry(piece.key, piece.start, block)

    def _read(self, piece: Piece) -> tuple[Row, list[Tensor]]:
        block, native = self._block(piece)
        before, dtype = native["dtype"], self._dtype(piece)
        block = certificate.cast(block, dtype, piece.key)
        padding = block[piece.transform.size :] if isinstance(piece.transform, Vocabulary) else None
        if padding is not None and bool(padding.any()):
            block[block.shape[0] - len(padding) :] = 0  # rows of no token; reading back pads with zeros
        if padding is not None or before != dtype_name(dtype):
            native["sha256_as_written"] = sha256(block)
        cast = certificate.cast_name(before, dtype_name(dtype))
        row: Row = {"native": native, "transform": piece.transform.name, "cast": cast, "hf": []}
        return row, piece.transform.to_hf(block)

    def coverage(self, records: list[Record]) -> None:
        rows = [row for record in records for row in record["rows"]]
        names = [name for piece in self.table.pieces for name in piece.hf]
        shapes = {
            key: tensor.shape
            for key, tensor in self.reader.index.tensors.items()
            if not key.startswith(_OPTIMIZER) and key not in self.dropped
        }
        certificate.require_coverage(rows, names, shapes, str(self.source))

    def finish(self, output: Path, records: list[Record]) -> dict[str, FileEntry]:
        files: dict[str, FileEntry] = {record["name"]: record["entry"] for record in records}
        if len(records) > 1:
            weight_map = {
                name: unit.name for unit in self.units for item in unit.content for name, _ in self._layout(item)
            }
            total = sum(self._bytes(item) for unit in self.units for item in unit.content)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            files[hf_folder.INDEX] = write_bytes(output / hf_folder.INDEX, json_bytes(index))
        for name, content in sorted(self.contents.items()):
            files[name] = write_bytes(output / name, content)
        for name in sorted(self.companions):
            known = self.files[f"{origin.FOLDER}/{name}"]
            target = CARD_OF_THE_FIRST if name == CARD and CARD in self.contents else name
            files[target] = copy_file(self.companions[name], output / target, known)
        return files

    def check(self, output: Path, records: list[Record], advance: Advance) -> None:
        written = HFFolder.open(output, "--save")
        names = {name for unit in self.units for item in unit.content for name, _ in self._layout(item)}
        if wrong := sorted(names ^ written.tensors.keys()):
            raise ConfigError(f"{output}: its tensors are not those of the model: {wrong[:5]}; nothing was published")
        rounded = [n for p in self.table.pieces if p.fp32 for n in p.hf if written.tensors[n].dtype != "float32"]
        if rounded:
            raise ConfigError(f"{output}: {rounded[0]} is not float32, which it always is; nothing was published")
        pieces = {(piece.key, piece.start): piece for piece in self.table.pieces}
        with TensorReader(written) as back:
            for row in (row for record in records for row in record["rows"]):
                native = row["native"]
                tensors = []
                for entry in row["hf"]:
                    tensor, digests = back.read_hashed(entry["name"])
                    found = digests[entry["name"]]
                    certificate.require_same(found, entry["sha256"], entry["name"], "it reads otherwise than written")
                    if scale := entry.get("scale"):
                        certificate.require_same(digests[scale["name"]], scale["sha256"], scale["name"], "it does too")
                    tensors.append(tensor)
                    advance(tensor.nbytes)
                block = pieces[native["key"], tuple(native["start"])].transform.to_native(tensors)
                certificate.require_same(sha256(block), expected(native), native["key"], "it is made back into another")
            hashes = {
                entry["name"]: entry["sha256"] for record in records for row in record["rows"] for entry in row["hf"]
            }
            for copy in self.copies:
                original = self.table.copies[copy]
                certificate.require_same(back.digest(copy), hashes[original], copy, f"it is no copy of {original}")

    def facts(self, records: list[Record]) -> dict[str, Any]:
        return {
            "family": self.family.name,
            "dtype": self._dtype_words(),
            "copies": {name: self.table.copies[name] for name in self.copies},
            "dropped": self.dropped,
            "ignored": [key for key in self.reader.index.tensors if key.startswith(_OPTIMIZER)],
            "tokenizer": self.tokenizer.facts(),
            "rounding": self._rounding(records),
        }

    def _rounding(self, records: list[Record]) -> dict[str, Any] | None:
        if not self.options.fp8:
            return None
        entries = [entry for record in records for row in record["rows"] for entry in row["hf"]]
        return fp8_summary(entry["rounding"] for entry in entries if "rounding" in entry)


def _shard_name(number: int, count: int) -> str:
    return hf_folder.SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
