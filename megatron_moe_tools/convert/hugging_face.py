"""Hugging Face folders as source and as sink."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.checkpoint import origin
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.module_names import is_inside, kept_in_fp32, patterns_of
from megatron_moe.config.schema import build, flatten, replace
from megatron_moe.data.hugging_face_folder import SETTINGS
from megatron_moe.data.transformers_files import json_bytes
from megatron_moe.hf import folder as hf_folder
from megatron_moe.hf.config import (
    carried_note,
    config_of,
    differences,
    settings,
    settings_of,
    with_positions,
    with_rotation,
)
from megatron_moe.hf.family import DEEPSEEK
from megatron_moe.hf.folder import BLOCK, HFFolder
from megatron_moe.hf.mapping import MappedBlock, mapping, require_tensors
from megatron_moe.hf.safetensors_file import StreamedFile, bytes_of, parse_object, read_small
from megatron_moe.hf.tensors import FP4_VALUES, TensorReader, dtype_name, sha256, write_tensor
from megatron_moe.hf.transforms import Shape, Vocabulary
from megatron_moe.hf.weight_check import WeightCheck, refusal
from megatron_moe.io.files import write_bytes
from megatron_moe.io.hashing import FileEntry, sha256_of_file
from megatron_moe.io.program import note
from megatron_moe.moe.grouped_gemm_fp8 import E4M3 as FP8
from megatron_moe.moe.grouped_gemm_fp8 import Tiles
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row, expected, require_same
from megatron_moe_tools.convert.exported_files import (
    CARD,
    CARD_OF_THE_FIRST,
    FROM_MEMORY,
    GENERATION,
    ExportedTokenizer,
    generation_ids,
    model_card,
)
from megatron_moe_tools.convert.native import NativeSource, copy_file, native_state
from megatron_moe_tools.convert.pipeline import (
    EXPERTS,
    Advance,
    Block,
    ConversionOptions,
    ConversionSink,
    ConversionSource,
    OutputFile,
    Record,
    model_words,
)
from megatron_moe_tools.models.source import PRECISION_FLAGS, ModelSource

_TIED = "lm_head.weight"
_DROPPED = "--drop-mtp: {count} tensors of multi-token prediction are left out"
Layout = tuple[str, Shape]
"""Dtype and shape of a stored tensor."""
_PER_TENSOR = 256
"""Bytes of a header's entry, at most."""


# ---- The source.


class HuggingFaceSource(ConversionSource):
    """A Hugging Face folder. Raises ConfigError where its tensors are not those of its configuration."""

    kind: ClassVar[str] = "Hugging Face"

    def __init__(self, found: HFFolder, options: ConversionOptions) -> None:
        super().__init__(found.path, options)
        self.reader = TensorReader(found)
        where = f"--load {found.path}"
        described = settings_of(found, where)
        self.family = described.family
        self.notes += [*found.notes, *described.notes]
        stored = self.reader.folder.shapes()
        self.table = mapping(build(described.flat), self.family.names)
        copies, self.ignored = require_tensors(self.table, stored, where)
        left_out = self.table.left_out(self.ignored)
        self.carried = left_out["carried"]
        self.notes += map("{} follows from the configuration and is left out".format, left_out["dropped"])
        self.notes += carried_note(self.carried)
        flat = dict(described.flat)
        self.dropped: list[str] = []
        if options.drop_mtp:
            flat["mtp_num_layers"] = None
            whole, self.table = self.table, mapping(build(flat), self.family.names)
            kept = self.table.hf_shapes.keys() | self.table.copies.keys()
            gone = (whole.hf_shapes.keys() | whole.copies.keys()) - kept
            self.dropped = sorted(gone & stored.keys())
            self.notes.append(_DROPPED.format(count=len(self.dropped)))
        self.copies = {name: self.table.copies[name] for name in copies if name in self.table.copies}
        wide: list[str] = []
        self.dtype = options.dtype or self._narrowest_dtype(where, wide)
        self.run = build({**flat, **PRECISION_FLAGS[dtype_name(self.dtype)]})
        if wide:
            patterns = patterns_of(self.run, wide)
            self.run = replace(self.run, keep_fp32=patterns)
            self.notes.append(f"fp32 weights stay in fp32: --keep-fp32 {' '.join(patterns)}, which a run needs too")
        self.shapes, self._pieces = self.table.shapes, self.table.by_place
        self.names = set(stored) - {*copies, *self.ignored, *self.dropped}
        self.weights = WeightCheck(self.reader, self.table)
        for tensor in found.tensors.values():
            self.inputs[tensor.file] = found.path / tensor.file
        for name, path in sorted(found.companions.items()):
            if name != hf_folder.CERTIFICATE:
                self.inputs[name] = path
                self.companions[f"{origin.FOLDER}/{name}"] = name
        if (found.path / hf_folder.INDEX).exists():
            self.inputs[hf_folder.INDEX] = found.path / hf_folder.INDEX
        self.summary = model_words(self.run, self.family.name, dtype_name(self.dtype))

    def _narrowest_dtype(self, where: str, wide: list[str]) -> torch.dtype:
        """Return the dtype of the weights; append the keys of those that are fp32 beside it to `wide`."""
        dtypes: dict[torch.dtype, list[MappedBlock]] = {}
        for piece in self.table.pieces:
            for name in piece.hf:
                if not piece.fp32:
                    dtypes.setdefault(self.reader.dtype(name), []).append(piece)
        narrow = list(dtypes.keys() - {torch.float32})
        if len(narrow) > 1 or not {*map(dtype_name, dtypes)} <= PRECISION_FLAGS.keys():
            examples = "; ".join(f"{dtype_name(dtype)}: {len(of)}, {of[0].hf[0]}" for dtype, of in dtypes.items())
            raise ConfigError(
                f"{where}: its weights are of {len(dtypes)} dtypes ({examples}), and a model here has bf16 or fp16, "
                "and fp32 beside it; give the one that all are to have: --dtype {bf16,fp16,fp32}"
            )
        if not narrow:
            return torch.float32
        wide += dict.fromkeys(map(operator.attrgetter("key"), dtypes.get(torch.float32, ())))
        return narrow[0]

    def read(self, block: Block) -> tuple[Tensor, Row]:
        piece = self._pieces[block.place]
        tensors, entries = [], []
        for name in piece.hf:
            tensor, digests = self.reader.read_hashed(name, torch.float32 if block.dtype == torch.float32 else None)
            self.weights.require_certified(digests)
            stored = self.reader.folder.tensors[name]
            entry: Row = {"name": name, "shape": list(stored.shape), "dtype": stored.dtype, "sha256": digests[name]}
            tensors.append(certificate.taken(tensor, block.dtype, entry, name, str(self.path)))
            if doubt := self.weights.doubt(name, tensor, digests[name]):
                if not self.options.allow_suspicious_weights:
                    raise refusal(doubt)
                entry["suspicious"] = doubt
            for scale in self.reader.sources(name)[1:]:
                entry["scale"] = {"name": scale, "sha256": digests[scale]}
            entries.append(entry)
        values = piece.transform.to_native(tensors)
        row = {
            "native": certificate.native_entry(block.key, block.start, values),
            "transform": piece.transform.name,
            "cast": certificate.cast_name(entries, values.dtype),
            "hf": entries,
        }
        return values, row

    def require_coverage(self, rows: list[Row]) -> None:
        hashes = {}
        for row in rows:
            for entry in row["hf"]:
                hashes[entry["name"]] = (entry["sha256"], entry["dtype"])
                if "suspicious" in entry:
                    self.warnings.append(f"WARNING: {entry['suspicious']}: taken as it is")
                    note(self.warnings[-1])
        for copy, original in self.copies.items():
            if (self.reader.digest(copy), self.reader.folder.tensors[copy].dtype) != hashes[original]:
                raise ConfigError(f"{self.path}: {copy} differs from {original}: the model has one tensor for both")

    def require_made_back(self, row: Row, block: Tensor) -> None:
        native = row["native"]
        transform = self._pieces[native["key"], tuple(native["start"])].transform
        for tensor, entry in zip(transform.to_hf(block), row["hf"], strict=True):
            require_same(sha256(tensor), expected(entry), entry["name"], f"{native['key']} gives another one")

    def step_blocks(self) -> list[Block]:
        in_fp32, blocks = kept_in_fp32(self.run), []
        for piece in self.table.pieces:
            dtype = torch.float32 if piece.fp32 or is_inside(piece.key, in_fp32) else self.dtype
            blocks.append(Block(piece.key, piece.start, piece.transform.native_shape, dtype))
            for name in piece.hf:
                if piece.fp32:
                    kept = "converted as it is and kept in float32 from now on"
                    self.warn_if_rounded(name, self.reader.dtype(name), kept)
        return blocks

    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        about = {"family": self.family.name, "copies": list(self.copies), "dropped": self.dropped}
        about["carried"] = self.carried
        return flatten(self.run), {**native_state(self.run, self.warnings), origin.FOLDER: about}

    def facts(self) -> dict[str, Any]:
        return {
            "family": self.family.name,
            "dtype": dtype_name(self.dtype),
            "copies": self.copies,
            "dropped": self.dropped,
            "ignored": self.ignored,
            "carried": len(self.carried),
        }


# ---- The sink.


class HuggingFaceSink(ConversionSink):
    """A Hugging Face folder of a native step's weights, with a tokenizer.

    Raises ConfigError: the step's tensors are not those of its configuration, or its family is not known.
    """

    kind: ClassVar[str] = "Hugging Face"

    def __init__(self, source: NativeSource, model: ModelSource, tokenizer: ExportedTokenizer) -> None:
        super().__init__(source)
        self.source: NativeSource = source
        self.carried_hashes: dict[str, str] = {}
        self.options, self.state, self.tokenizer = source.options, source.state, tokenizer
        source.identity = {"tokenizer": tokenizer.facts()}
        source.notes += tokenizer.notes
        self.family = model.family
        self.run = source.with_stored_padding(model.run)
        if self.options.drop_mtp and self.run.model.mtp_num_layers:
            self.run = replace(self.run, mtp_num_layers=None)
        self.table = mapping(self.run, self.family.names)
        source.names = set(self.table.hf_shapes)
        self._pieces = self.table.by_place
        self.packed: str | None = None
        if self.options.fp8 or self.options.mxfp4:
            self.packed = "fp8" if self.options.fp8 else "mxfp4"
        if self.packed is not None and (self.packed == "mxfp4") != self.family.names.interleaved:
            raise ConfigError(f"--dtype {self.packed}: {self.family.name} is not published in it; use --dtype bf16")
        if self.packed == "mxfp4":
            self._require_whole_blocks()
        if self.options.fp8 and (self.family.names.stacked is not None or "{e}" not in self.family.names.experts):
            raise ConfigError(f"--dtype fp8: {self.family.name} has all experts in one tensor, and blocks are of one")
        if self.options.fp8:
            source.notes += uneven_blocks(self.table.pieces)
        self.dropped: list[str] = []
        source.shapes = {}
        for key, shape in sorted(source.weights.items()):
            if self.options.drop_mtp and key.startswith("mtp."):
                self.dropped.append(key)
            else:
                source.shapes[key] = shape
        if self.dropped:
            source.notes.append(_DROPPED.format(count=len(self.dropped)))
        head = f"--load {source.path}: its tensors are not those of a {self.family.name} of its configuration:"
        unknown = f"{self.family.name} has no tensor for it"
        certificate.require_shapes(source.shapes, self.table.shapes, head, unknown)
        dtypes = set()
        for piece in self.table.pieces:
            if piece.fp32:
                source.warn_if_rounded(piece.key, source.reader.dtype(piece.key), "written as it is, in float32")
            else:
                dtypes.add(self._dtype(piece))
        self._dtypes = sorted(dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)))
        words = list(map(dtype_name, self._dtypes))
        if self.options.fp8:
            words.insert(0, f"{dtype_name(FP8)} in blocks of 128 x 128")
        if self.options.mxfp4:
            words.insert(0, "MXFP4")
        self.dtype_words = " and ".join(words)
        self.copies = self._copies()
        companions = dict(model.companions)
        self.carried = self._carried(companions)
        for name in tokenizer.left_out:
            companions.pop(name, None)
        self.contents = {**tokenizer.files, hf_folder.CONFIG: self._config(companions)}
        self._set_tokenizer_limit(companions)
        if tokenizer.ids is not None:  # otherwise generation_config.json stays as it came
            generation, came = {}, companions.get(GENERATION)
            if came is not None:
                generation = parse_object(read_small(came, hf_folder.LARGEST_CONFIG), str(came))
            for name in tokenizer.ids:
                generation.pop(name, None)
            self.contents[GENERATION] = json_bytes({**generation, **generation_ids(tokenizer.ids)})
        # A model that was converted, and neither trained here nor in a program's hands, keeps the card that it has.
        if self.state.get("iteration") or self.state.get(FROM_MEMORY):
            card = model_card(self.run, self.family, self.dtype_words, source.config, self.state, tokenizer.words)
            self.contents[CARD] = card.encode()
        for name in self.contents.keys() - {CARD}:
            companions.pop(name, None)
        self.companions = companions
        self.files = self.planned()
        self.summary = model_words(self.run, self.family.name, self.dtype_words)

    def _require_whole_blocks(self) -> None:
        for piece in self.table.pieces:
            if self._is_packed(piece) and piece.transform.hf_shapes[0][1] % hf_folder.MXFP4_BLOCK:
                shape = list(piece.transform.hf_shapes[0])
                raise ConfigError(
                    f"--dtype mxfp4: {piece.hf[0]} is {shape}, whose rows are not of whole blocks of "
                    f"{hf_folder.MXFP4_BLOCK}; use --dtype bf16"
                )

    def _copies(self) -> dict[str, str]:
        """Return copies to write, with what they are of: those that the source had, or that readers need."""
        wanted = (self.state.get("hf") or {}).get("copies", self.table.copies)
        found, unknown = {}, []
        for name in wanted:
            if name not in self.table.copies:
                unknown.append(name)
            elif wanted is not self.table.copies or name != _TIED or self.family.served_untied:
                found[name] = self.table.copies[name]
        if unknown and not self.options.drop_mtp:
            raise ConfigError(
                f"--load {self.source.path}: state.json names copies of nothing that is here: {unknown[:3]}"
            )
        return found

    def _carried(self, companions: dict[str, Path]) -> dict[str, Layout]:
        """Return the tensors to take from the folder of `--carry-from`, and open it.

        Raises ConfigError: it is missing, or another model's, or nothing is taken from it.
        """
        path, options = self.options.carry_from, self.options
        imported = self.state.get("hf") or {}
        names = imported.get("carried", []) if imported.get("family") == self.family.name else []
        if options.drop_mtp:
            layers = (f"{self.family.names.model}layers.{self.run.model.num_layers + depth}." for depth in range(99))
            names = list(itertools.filterfalse(operator.methodcaller("startswith", tuple(layers)), names))
            names = [] if self.family.carries_predictions else names
        if not names:
            if path is not None:
                raise ConfigError(f"--carry-from {path}: {self.source.path} has all tensors of a {self.family.name}")
            return {}
        if path is None:
            without = "--drop-mtp" if self.family.carries_predictions else f"--family {self.family.without}"
            raise ConfigError(
                f"--load {self.source.path}: {len(names)} tensors of the folder that it was imported from ({names[0]}, "
                f"...) are of parts that the model here does not have: name the folder with --carry-from DIR, or write "
                f"the model without them with {without}"
            )
        if options.fp8:
            raise ConfigError(f"--dtype fp8, --carry-from {path}: carried tensors are not rounded; use --dtype bf16")
        found = HFFolder.open(Path(path), "--carry-from")
        came = parse_object(read_small(companions[hf_folder.CONFIG], hf_folder.LARGEST_CONFIG), hf_folder.CONFIG)
        if found.config != came or not found.shapes().keys() >= set(names):
            raise ConfigError(f"--carry-from {path}: is not the folder that {self.source.path} was imported from")
        self.carrier = TensorReader(found)
        self.source.notes.append(f"{len(names)} tensors ({names[0]}, ...) are taken from {path} as they are")
        shapes, dtypes = found.shapes(), map(self.carrier.dtype, names)
        self.source.identity["carried from"] = {
            name: list(found.identities[found.tensors[name].file]) for name in names
        }
        return {name: (dtype_name(dtype), shapes[name]) for name, dtype in zip(names, dtypes, strict=True)}

    def _dtype(self, piece: MappedBlock) -> torch.dtype:
        if piece.fp32:
            return torch.float32
        return self.options.dtype or self.source.reader.dtype(piece.key)

    def _config(self, companions: dict[str, Path]) -> bytes:
        """Return config.json: the source's own, byte for byte where nothing in it changes, or a new one."""
        dtype, notes = dtype_name(self._dtypes[0]), self.source.notes
        if len(self._dtypes) > 1:
            notes.append(f"weights stay in {self.dtype_words}, as the run kept them; --dtype writes all in one")
        added: dict[str, Any] = dict(self.tokenizer.ids or {})
        if self.options.fp8:
            quantization: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
            added["quantization_config"] = quantization
            quantization["weight_block_size"] = list(BLOCK)
            if self.family.names is not DEEPSEEK:  # whose code knows which matrices stay as they are
                names: list[str] = []
                for piece in self.table.pieces:
                    if not piece.is_linear and len(piece.transform.hf_shapes[0]) == 2:
                        for name in piece.hf:
                            names.append(name.removesuffix(".weight"))
                names.remove("model.embed_tokens")
                quantization["modules_to_not_convert"] = names
        if self.options.mxfp4:
            kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            added["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        path = companions.get(hf_folder.CONFIG)
        if path is None or self.options.family is not None:
            return json_bytes({**config_of(self.run, self.family, dtype), **added})
        data = read_small(path, hf_folder.LARGEST_CONFIG)
        config = parse_object(data, str(path))
        has_depths = self.run.model.mtp_num_layers is not None
        before = settings(config, has_prediction_layers=has_depths, where=str(path)).flat
        changed, rotated = with_rotation(config, before, self.run)
        notes += rotated
        if wrong := differences(
            self.run, settings(changed, has_prediction_layers=has_depths, where=str(path)).flat if rotated else before
        ):
            head = (
                f"--load {self.source.path}: the run is no longer the model that its hf/config.json describes; "
                f"--family {self.family.name} writes a new one:"
            )
            raise ConfigError(listing(head, wrong))
        # the context, dtype and layers of what is written
        changed, said = with_positions(changed, self._positions)
        notes += said
        if changed.pop("quantization_config", None) is not None and self.packed is None:
            notes.append(f"quantization_config is left out of config.json: the weights are written in {dtype}")
        named: list[str] = [key for key in ("torch_dtype", "dtype") if key in config]
        for key in named or ["torch_dtype"]:
            if changed.get(key) != dtype:
                notes.append(f"config.json: {key} {changed.get(key)!r} is {dtype!r} now")
                changed[key] = dtype
        if (self.dropped or (self.state.get("hf") or {}).get("dropped")) and not has_depths:
            for key in ("num_nextn_predict_layers", "num_mtp_layers"):
                if changed.get(key):
                    notes.append(f"config.json: {key} is 0 now: these layers were dropped")
                    changed[key] = 0
        changed |= added
        return data if changed == config else json_bytes(changed)

    @property
    def _positions(self) -> int:
        return self.run.model.max_position_embeddings or self.run.derived.max_position_embeddings

    def _set_tokenizer_limit(self, companions: dict[str, Path]) -> None:
        """Let a tokenizer that came with the model cut texts at the new number of positions if it did at the old."""
        paths = companions.get(hf_folder.CONFIG), companions.get(SETTINGS)
        if SETTINGS in self.contents or paths[0] is None or paths[1] is None:
            return
        config, limits = (parse_object(read_small(path, hf_folder.LARGEST_CONFIG), str(path)) for path in paths if path)
        before, after = config.get("max_position_embeddings"), self._positions
        if limits.get("model_max_length") == before != after:
            self.contents[SETTINGS] = json_bytes({**limits, "model_max_length": after})
            self.source.notes.append(f"{SETTINGS}: model_max_length {before} is {after} now")

    def planned(self) -> list[OutputFile]:
        """Return the files: pieces in the table's order, then the copies, cut where a file is full."""
        blocks, first = [], {}
        for piece in self.table.pieces:
            # What is packed is rounded from the numbers of the step.
            dtype = self.source.reader.dtype(piece.key) if self._is_packed(piece) else self._dtype(piece)
            blocks.append(Block(piece.key, piece.start, piece.transform.native_shape, dtype))
            first.update(dict.fromkeys(piece.hf, blocks[-1]))
        blocks += [dataclasses.replace(first[original], copy=name) for name, original in self.copies.items()]
        shards: list[list[Block | str]] = [[]]
        filled = 0
        every: list[Block | str] = [*blocks, *self.carried]
        for block in every:
            size = self._bytes([block])
            if shards[-1] and filled + size > self.options.max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(block)
            filled += size
        files = []
        for number, shard in enumerate(shards, 1):
            name = hf_folder.SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            files.append(OutputFile(name, self._bytes(shard) + _PER_TENSOR * len(shard), tuple(shard)))
        return files

    def _is_packed(self, piece: MappedBlock) -> bool:
        """Return whether a piece is written in fp8, or in MXFP4, in which gpt-oss' experts are alone."""
        return piece.is_linear and (self.options.fp8 or (self.options.mxfp4 and piece.key.endswith(EXPERTS)))

    def _layout(self, blocks: Iterable[Block | str]) -> dict[str, tuple[str, Shape]]:
        """Return dtype and shape of the tensors that are stored for blocks; scales follow their weights."""
        layout: dict[str, tuple[str, Shape]] = {}
        for block in blocks:
            if isinstance(block, str):
                layout[block] = self.carried[block]
                continue
            piece = self._pieces[block.place]
            dtype = dtype_name(self._dtype(piece))
            for name, shape in zip(_names(piece, block), piece.transform.hf_shapes):
                if not self._is_packed(piece):
                    layout[name] = (dtype, shape)
                elif self.options.fp8:
                    layout[name] = (dtype_name(FP8), shape)
                    layout[name + hf_folder.SCALE] = ("float32", tuple(-(-n // edge) for n, edge in zip(shape, BLOCK)))
                else:
                    scales = (shape[0], shape[2], shape[1] // hf_folder.MXFP4_BLOCK)
                    layout[name + hf_folder.PACKED] = ("uint8", (*scales, hf_folder.MXFP4_BLOCK // 2))
                    layout[name + hf_folder.PACKED_SCALES] = ("uint8", scales)
        return layout

    def _bytes(self, blocks: Iterable[Block | str]) -> int:
        return sum(itertools.starmap(bytes_of, self._layout(blocks).values()))

    def write(self, file: OutputFile, output: Path, advance: Advance) -> Record:
        rows: list[Row] = []
        carried: dict[str, str] = {}
        with StreamedFile(output / file.name, self._layout(file.content)) as opened:
            for block in file.content:
                if isinstance(block, str):
                    carried[block] = write_tensor(opened, block, self.carrier.read(block))
                else:
                    row = self._write_block(opened, block)
                    if block.copy is None:
                        rows.append(row)
                advance(self._bytes([block]) + _PER_TENSOR)
        path = output / file.name
        entry = FileEntry(bytes=path.stat().st_size, sha256=sha256_of_file(path))
        return {"entry": entry, "rows": rows, "carried": carried}

    def _write_block(self, opened: StreamedFile, block: Block) -> Row:
        """Write a block's tensors and return its row; none of them is held while the next block is read."""
        values, row = self.source.read(block)
        piece, entries, rounded_values = self._pieces[block.place], [], []
        transform, native = piece.transform, row["native"]
        if isinstance(transform, Vocabulary):
            values[transform.size :] = 0  # rows of no token; reading back pads with zeros
            native["sha256_as_written"] = sha256(values)
        for name, tensor in zip(_names(piece, block), transform.to_hf(values)):
            entry: Row = {"name": name, "shape": list(tensor.shape)}
            if self._is_packed(piece):  # each weight followed by its scales
                if self.options.fp8:
                    weight, stored, kind, suffix = rounded(tensor), name, dtype_name(FP8), hf_folder.SCALE
                else:
                    weight, stored, kind = packed(tensor), name + hf_folder.PACKED, hf_folder.MXFP4
                    suffix = hf_folder.PACKED_SCALES
                rounded_values.append(weight.values)
                entry |= {"dtype": kind, "sha256": write_tensor(opened, stored, weight.numbers)}
                scale = {"name": name + suffix}
                scale["sha256"] = write_tensor(opened, scale["name"], weight.scales)
                entry |= {"scale": scale, "rounding": weight.error}
            else:
                entry |= {"dtype": dtype_name(tensor.dtype), "sha256": write_tensor(opened, name, tensor)}
            entries.append(entry)
        if rounded_values:
            native["sha256_as_written"] = sha256(transform.to_native(rounded_values))
            row["cast"] = f"{native['dtype']} -> {entries[0]['dtype']}"
        return {"native": native, "transform": transform.name, "cast": row["cast"], "hf": entries}

    def finish(self, output: Path, records: list[Record], inputs: dict[str, FileEntry]) -> dict[str, FileEntry]:
        files: dict[str, FileEntry] = {record["name"]: record["entry"] for record in records}
        for record in records:
            self.carried_hashes |= record["carried"]
        if len(records) > 1:
            weight_map: dict[str, str] = {}
            total = 0
            for file in self.files:
                weight_map |= dict.fromkeys(self._layout(file.content), file.name)
                total += self._bytes(file.content)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            files[hf_folder.INDEX] = write_bytes(output / hf_folder.INDEX, json_bytes(index))
        for name, content in sorted(self.contents.items()):
            files[name] = write_bytes(output / name, content)
        for name, path in sorted(self.companions.items()):
            target = CARD_OF_THE_FIRST if name == CARD and CARD in self.contents else name
            files[target] = copy_file(path, output / target, inputs[f"{origin.FOLDER}/{name}"])
        return files

    def read_again(self, output: Path, rows: list[Row]) -> Iterator[tuple[Row, Tensor]]:
        written = HFFolder.open(output, "--save")
        wanted = set[str]().union(*(self._layout(file.content) for file in self.files))
        if wrong := sorted(wanted ^ written.stored_names()):
            raise ConfigError(f"{output}: its tensors are not those of the model: {wrong[:5]}; nothing was published")
        for piece in self.table.pieces:
            for name in piece.hf:
                if piece.fp32 and written.tensors[name].dtype != "float32":
                    raise ConfigError(f"{output}: {name} is not float32, which it always is; nothing was published")
        hashes: dict[str, str] = {}
        with TensorReader(written) as reader:
            for row in rows:
                yield row, self._made_back(reader, row, hashes)
            for copy, original in self.copies.items():
                require_same(reader.digest(copy), hashes[original], copy, f"it is no copy of {original}")
            for name, carried in self.carried_hashes.items():
                require_same(reader.digest(name), carried, name, "it reads otherwise than written")

    def _made_back(self, reader: TensorReader, row: Row, hashes: dict[str, str]) -> Tensor:
        """Return a block made of what was written; check its hashes, and put those of its tensors into `hashes`."""
        native, tensors = row["native"], []
        for entry in row["hf"]:
            tensor, digests = reader.read_hashed(entry["name"])
            hashes |= digests
            for one in (entry, entry.get("scale", entry)):
                require_same(digests[one["name"]], one["sha256"], one["name"], "it reads otherwise than written")
            tensors.append(tensor)
        block = self._pieces[native["key"], tuple(native["start"])].transform.to_native(tensors)
        require_same(sha256(block), expected(native), native["key"], "it is made back into another")
        return block

    def facts(self, rows: list[Row]) -> dict[str, Any]:
        rounding: dict[str, Any] | None = None
        if self.packed is not None:
            rounding = {"weights": 0, "largest": 0.0, "relative_rms": 0.0}
            for row in rows:
                for entry in row["hf"]:
                    if error := entry.get("rounding"):
                        rounding["weights"] += 1
                        rounding["largest"] = max(rounding["largest"], error["largest"])
                        rounding["relative_rms"] = max(rounding["relative_rms"], error["relative_rms"])
            rounding |= {"block": list(BLOCK), "dtype": "float8_e4m3fn"}
            if self.options.mxfp4:
                rounding |= {"block": [hf_folder.MXFP4_BLOCK], "dtype": hf_folder.MXFP4}
        return {
            "family": self.family.name,
            "dtype": self.dtype_words,
            "copies": self.copies,
            "dropped": self.dropped,
            "ignored": [key for key in self.source.reader.index.tensors if key not in self.source.weights],
            "carried": self.carried_hashes,
            "tokenizer": self.tokenizer.facts(),
            "rounding": rounding,
        }


def _names(piece: MappedBlock, block: Block) -> tuple[str, ...]:
    return piece.hf if block.copy is None else (block.copy,)


# ---- FP8, as DeepSeek publishes models: e4m3 numbers, and a scale for each 128 x 128 block.
#
# The rounding is that of training in FP8 (`moe/grouped_gemm_fp8.py`): the scale is the block's largest magnitude / 448.


@dataclass(frozen=True)
class RoundedWeight:
    """A weight [M, N] in FP8, or [E, K, N] in MXFP4.

    numbers: [M, N] float8_e4m3fn; or [E, N, K / 32, 16] uint8, two codes a byte. scales: [ceil(M / 128), ceil(N / 128)]
    fp32, by which they are multiplied; or [E, N, K / 32] uint8, exponents of two plus 127. values: numbers times scales
    in bfloat16, as an importer has them. error: how much the rounding changed.
    """

    numbers: Tensor
    scales: Tensor
    values: Tensor
    error: dict[str, float]


def rounded(weight: Tensor) -> RoundedWeight:
    """Round a weight [M, N] of any floating dtype to FP8, from the values that it has."""
    high, wide = BLOCK
    tiles = Tiles.of(weight, high, wide, FP8)
    exact, original = tiles.exact(), weight.float()
    error = _error(exact, original)
    rows, columns = weight.shape
    numbers = tiles.numbers[:rows, :columns].contiguous()
    return RoundedWeight(numbers, tiles.scales.contiguous(), exact.to(torch.bfloat16), error)


def _error(exact: Tensor, original: Tensor) -> dict[str, float]:
    difference, size = (exact - original).abs(), float(original.norm())
    largest = float(original.abs().max())
    relative = float(difference.norm()) / size if size else 0.0
    return {"largest": float(difference.max()), "largest_number": largest, "relative_rms": relative}


_BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""The middles between neighbouring magnitudes of e2m1; what is in the middle is rounded to the even code."""
_BETWEEN[1::2] = torch.nextafter(_BETWEEN[1::2], torch.zeros(3))


def packed(weight: Tensor) -> RoundedWeight:
    """Round a weight [E, K, N] of any floating dtype to MXFP4, in blocks of 32 along K, as OpenAI publishes gpt-oss.

    A block's scale is the least power of two with which none of its numbers is above 6, the largest of e2m1. So
    numbers that came from MXFP4 are kept.
    """
    codes, scales, exact = [], [], torch.empty(weight.shape)
    for expert, own in enumerate(weight.float()):
        blocks = own.t().unflatten(1, (-1, hf_folder.MXFP4_BLOCK))  # [N, K / 32, 32]
        fraction, exponent = torch.frexp(blocks.abs().amax(-1))
        exponent = (exponent - 2 - (fraction <= 0.75).int()).clamp(-127, 127)
        scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
        code = torch.bucketize(scaled.abs().contiguous(), _BETWEEN)  # torch warns of a copy that it would make
        magnitude = torch.ldexp(FP4_VALUES[code], exponent.unsqueeze(-1))
        exact[expert] = torch.where(scaled.signbit(), -magnitude, magnitude).flatten(1).t()
        code = (code + 8 * scaled.signbit()).to(torch.uint8).unflatten(-1, (-1, 2))
        codes.append(code[..., 0] | code[..., 1] << 4)
        scales.append((exponent + 127).to(torch.uint8))
    error = _error(exact, weight.float())
    return RoundedWeight(torch.stack(codes), torch.stack(scales), exact.to(torch.bfloat16), error)


def uneven_blocks(pieces: Iterable[MappedBlock]) -> list[str]:
    """Return a note where weights end within a block; the format has scales for the rest of one, as our importer.

    transformers 5.23 divides a weight evenly among its scales instead: 192 rows of two scales become blocks of 96.
    """
    uneven = []
    for piece in pieces:
        for name, shape in zip(piece.hf, piece.transform.hf_shapes):
            if piece.is_linear and any(size > edge and size % edge for size, edge in zip(shape, BLOCK, strict=True)):
                uneven.append(name)
    if not uneven:
        return []
    return [
        f"{len(uneven)} weights in fp8, such as {uneven[0]}, end within a block of {BLOCK[0]} x {BLOCK[1]}: "
        "transformers up to 5.23 dequantises these to wrong numbers or refuses them; for it, export in bf16"
    ]
