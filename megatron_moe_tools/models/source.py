"""Reads a model from a checkpoint of any kind: a run's folder, one step of it, or a Hugging Face folder.

`locate` finds out what a folder is and returns a `ModelSource`, which yields the model's tensors block by block. No
torch is loaded before the first block is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_moe.checkpoint import folder, manifest, origin
from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields, from_file
from megatron_moe.config.schema import Run
from megatron_moe.data.tokenizer_choice import build_tokenizer, tokenizer_of_folder, tokenizer_of_step
from megatron_moe.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megatron_moe.hf.config import family_of_run, settings_of
from megatron_moe.hf.families import FAMILIES
from megatron_moe.hf.family import Family
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.mapping import mapping, require_tensors
from megatron_moe.hf.transforms import Shape

if TYPE_CHECKING:  # what a folder is, is found out before torch is loaded
    from torch import Tensor

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_OPTIMIZER = "optimizer."
_COMPANIONS = f"{origin.FOLDER}/"
PRECISION_FLAGS: dict[str, dict[str, bool]] = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True}}
"""The flags that a run has whose weights are of a dtype."""


@dataclass(frozen=True)
class BlockValues:
    """A box of one of the model's tensors.

    key: the tensor's. start: the box's first element in the tensor. values: in the dtype in which they are stored.
    name: the stored tensors that they were made of, as messages show it.
    """

    key: str
    start: Shape
    values: Tensor
    name: str


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint that can be opened; its small files have been read.

    path: the step, or the folder. run: the model's settings, including `vocab_size`. family: its family at Hugging
    Face. companions: files other than weights of its Hugging Face folder, by name. notes: notes for the user.
    blocks: returns the tensors of a model with these settings, which may have fewer layers; each is read when it is
    yielded.
    """

    path: Path
    run: Run
    family: Family
    companions: dict[str, Path]
    notes: tuple[str, ...]
    blocks: Callable[[Run], Iterator[BlockValues]]
    dtype: str
    """The widest dtype of its weights as they are stored; weights in fp8 count as bfloat16."""


def locate(path: Path, ckpt_step: int | None = None, family: str | None = None) -> ModelSource:
    """Find out what a folder is: a run's, one step of it, or a Hugging Face folder.

    ckpt_step: which step of a run's folder; default: the newest undamaged one. family: the one that a model that was
    trained here is to have. Raises ConfigError: it is none of these, or damaged.
    """
    found = folder.step_of(path, ckpt_step)
    if found is not None:
        return _native(*found, family)
    if not (path / "config.json").exists():
        raise ConfigError(
            f"--load {path}: is no checkpoint: it has neither steps (iter_*) nor the config.json of a Hugging Face "
            f"folder{folder.steps_below(path)}"
        )
    if ckpt_step is not None:
        raise ConfigError(f"--ckpt-step {ckpt_step}: --load {path} is a Hugging Face folder, which has no steps")
    if family is not None:
        raise ConfigError(f"--family {family}: --load {path} is a Hugging Face folder, whose config.json says which")
    opened = HFFolder.open(path)
    architecture = settings_of(opened, f"--load {path}")
    hf_family, run = architecture.family, schema.build(architecture.flat)
    notes, scales, dtypes = (*opened.notes, *architecture.notes), set(opened.scales.values()), set[str]()
    for name, stored in opened.tensors.items():
        if any(part in name for part in hf_family.names.carried):
            continue
        if name in opened.scales:
            dtypes.add("bfloat16")
        elif name not in scales and not name.endswith(".e_score_correction_bias"):
            dtypes.add(stored.dtype)
    dtype = min(dtypes)
    if "float32" in dtypes:
        dtype = "float32"
    return ModelSource(
        opened.path, run, hf_family, opened.companions, notes, lambda cut: _pieces(opened, hf_family, run, cut), dtype
    )


def _native(step: Path, notes: list[str], family: str | None) -> ModelSource:
    config, state = folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE)
    fields = all_fields()
    wanted = (*architecture_keys(), "seq_length", "max_position_embeddings", "moe_router_dtype")
    flat = {name: from_file(fields[name], config[name], f"{step}: {name}") for name in wanted if name in config}
    if flat.get("vocab_size") is None:
        # A run that takes its tokenizer's vocabulary; without that count, padding and tokens cannot be distinguished.
        flat["vocab_size"] = state.get("vocab_size")
        if not isinstance(flat["vocab_size"], int):
            rows = flat["vocab_size"] = state.get("padded_vocab_size")
            notes.append(f"{step}: does not say how many of its {rows} rows are tokens: all are used")
    if not isinstance(flat["vocab_size"], int):
        raise ConfigError(f"{step / folder.STATE}: padded_vocab_size {flat['vocab_size']!r} is no count")
    content = manifest.read(step)
    companions = {}
    for file in content.files:
        if file.startswith(_COMPANIONS):
            companions[file.removeprefix(_COMPANIONS)] = step / file
    run = schema.build(flat)
    if flat.get("max_position_embeddings") is None and "config.json" in companions:
        # A run that did not say leaves an imported model the positions that it came with.
        came_with = folder.read_json(companions["config.json"]).get("max_position_embeddings")
        if isinstance(came_with, int):
            run = schema.replace(run, max_position_embeddings=max(came_with, run.model.seq_length))
    name = family or (state.get("hf") or {}).get("family")
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"--family {name}: is none of {', '.join(FAMILIES)}")
    known = family_of_run(run) if name is None else FAMILIES[name]
    dtype = "float32"
    if config.get("bf16") and not config.get("keep_fp32"):
        dtype = "bfloat16"
    elif config.get("fp16") and not config.get("keep_fp32"):
        dtype = "float16"
    return ModelSource(step, run, known, companions, tuple(notes), lambda cut: _parts(step, run, cut), dtype)


def _parts(step: Path, whole: Run, run: Run) -> Iterator[BlockValues]:
    """Yield the boxes of a step's tensors without the optimizer's. Files are hashed before they are used."""
    from megatron_moe.checkpoint.step_reader import StepReader

    reader, tensors = StepReader(step), {}
    cut = run.model.num_layers < whole.model.num_layers
    for key, tensor in reader.index.tensors.items():
        layer = _LAYER.match(key)
        beyond = key.startswith("mtp.") or (layer is not None and int(layer[1]) >= run.model.num_layers)
        if not key.startswith(_OPTIMIZER) and not (cut and beyond):
            tensors[key] = tensor
    files = sorted({part.place.file for tensor in tensors.values() for part in tensor.parts})
    defect = manifest.content_defect(step, files)
    if defect is not None:
        raise ConfigError(f"{step}: is damaged: {defect}; load another step with --ckpt-step")
    for key, tensor in tensors.items():
        for part in tensor.parts:
            yield BlockValues(key, part.start, reader.read(key, part.start, part.shape), key)


def _pieces(found: HFFolder, family: Family, whole: Run, run: Run) -> Iterator[BlockValues]:
    """Yield the blocks of our tensors, made of a folder's. Copies of a tensor in the folder have to be equal."""
    from megatron_moe.hf.tensors import TensorReader

    with TensorReader(found) as reader:
        table = mapping(whole, family.names)
        copies, _ = require_tensors(table, found.shapes(), str(found.path))
        for copy in copies:
            if reader.digest(copy) != reader.digest(table.copies[copy]):
                raise ConfigError(
                    f"{found.path}: {copy} differs from {table.copies[copy]}, which it has to be a copy of: the model "
                    "has one tensor for both"
                )
        for piece in mapping(run, family.names).pieces:
            tensors = list(map(reader.read, piece.hf))
            yield BlockValues(piece.key, piece.start, piece.transform.to_native(tensors), " and ".join(piece.hf))


def companions_folder(source: ModelSource) -> Path:
    """Return the folder of the files that came with a model beside its weights."""
    return source.path / origin.FOLDER if (source.path / folder.STATE).is_file() else source.path


def tokenizer_of_model(source: ModelSource, chosen: Mapping[str, Any] | None = None) -> Tokenizer:
    """Return the tokenizer of the flags, else the one that came with a model, else the one that it was trained with.

    chosen: the tokenizer flags that were given, by field. Raises ConfigError: there is none, or its files are gone or
    have changed.
    """
    if chosen:
        return build_tokenizer(schema.build(dict(chosen)).data, source.run.model.vocab_size)
    there = companions_folder(source)
    came_along = tokenizer_of_folder(there, source.companions)
    if came_along is not None:
        return came_along
    config = {}
    if there != source.path:
        config = folder.read_json(source.path / folder.CONFIG)
    if not any(
        config.get(name) for name in ("tokenizer_type", "mock_data", "program_data")
    ):  # made-up tokens need none
        raise ConfigError(
            f"--load {source.path}: holds neither tokenizer.json nor tokenizer.model nor tiktoken.model; name one with "
            "--tokenizer-type and --tokenizer-model"
        )
    trained_with = folder.read_json(source.path / folder.STATE).get("tokenizer") or {}
    return tokenizer_of_step(config, trained_with, {}, source.run.model.vocab_size or 0, f"--load {source.path}")[0]


def beginning_of_text(source: ModelSource, tokenizer: Tokenizer, wanted: bool | None = None) -> list[int]:
    """Return the tokens that come before a text's own: the begin-of-sequence token or none.

    wanted: --add-bos. If it is None, the files that came with an imported model decide: `add_bos_token`, and where that
    is not there the post-processor of `tokenizer.json`, as in transformers. Raises ConfigError: the token is wanted and
    the tokenizer has none.
    """
    file = companions_folder(source) / "tokenizer_config.json"
    if wanted and tokenizer.bos is None:
        raise ConfigError(f"--add-bos: {tokenizer.name} has no begin-of-sequence token; leave the flag out")
    if wanted is None and tokenizer.name in ("HuggingFaceTokenizer", "SentencePieceTokenizer") and file.is_file():
        wanted = folder.read_json(file).get("add_bos_token")
        if not isinstance(wanted, bool):
            wanted = isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.begins_with_bos()
    if wanted and tokenizer.bos is not None:
        return [tokenizer.bos]
    return []


def text_of_flag(flag: str, path: str | None, text: str) -> str:
    """Return a flag's text, or all of the UTF-8 file of `flag`-file. Raises ConfigError: it can't be read."""
    where = flag
    try:
        if path is not None:
            where = f"{flag}-file {path}"
            text = Path(path).read_text(encoding="utf-8")
        text.encode("utf-8")
        return text
    except UnicodeError as error:
        raise ConfigError(f"{where}: is not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
