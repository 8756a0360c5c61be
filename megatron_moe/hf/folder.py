"""Opens an untrusted folder in Hugging Face's format and checks it before any weight is read. Loads no torch.

Files are read as data, whatever they are called: configuration and headers within limits, weights from .safetensors
files. Python files are copied along and not run.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.safetensors_file import (
    FileIdentity,
    FormatError,
    Header,
    TensorLocation,
    identity_of,
    parse_object,
    read_header,
    read_small,
    shortened,
)
from megatron_moe.io.texts import hub_hint

CONFIG = "config.json"
CERTIFICATE = "conversion_certificate.json"
ALLOW = "--allow-suspicious-weights"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
"""Suffix of a weight's name for the scales of its blocks, where it is stored in fp8."""
PACKED, PACKED_SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors in which gpt-oss' folders have a weight in MXFP4."""
MXFP4, MXFP4_BLOCK = "float4_e2m1fn_x2", 32
"""The dtype of such a weight, two numbers to a byte, and how many have a scale together."""
BLOCK = (128, 128)
"""Rows and columns of such a block where the configuration does not say."""

LARGEST_CONFIG = 4 * 2**20
LARGEST_INDEX = 24 * 2**20
"""Kimi-K2, the largest of the supported families, has an index of 13 MB."""
LARGEST_HEADERS = 64 * 2**20
"""Bytes of all headers together."""
LARGEST_COMPANION = 64 * 2**20
LARGEST_COMPANIONS = 512 * 2**20
MOST_FILES = 10_000

# The files that are copied along: tokenizers, templates, configurations, the model's code, licences and descriptions.
_COMPANION = re.compile(
    r".*\.(json|jsonl|txt|model|tiktoken|jinja|py|md|ya?ml)|(?i:.*licen[cs]e.*|notice.*|use_policy.*|readme.*)",
    re.ASCII,
)
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors", re.ASCII)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FOREIGN = (*_PICKLED, ".gguf", ".ggml", ".h5", ".msgpack", ".npz", ".onnx", ".nemo")
_WEIGHTS = ("bfloat16", "float16", "float32", "float8_e4m3fn")
_SCALE_DTYPES = ("float32", "bfloat16", "float16")
"""DeepSeek's scales are float32, those of some Qwen models bfloat16 or float16, which are widened exactly."""


@dataclass(frozen=True)
class HFFolder:
    """A folder that has been checked: each tensor is stored once, where the headers and the index say.

    Attributes:
        path: the folder.
        config: the content of config.json.
        tensors: the stored tensors by name, including scales. A weight in MXFP4, which is stored as NAME_blocks, has
            the name and the shape that it is computed with.
        companions: files to copy along, by plain name.
        notes: what a user should know although it is not an error.
        scales: weight stored in fp8 or MXFP4 -> the tensor with its blocks' scales.
        block: rows and columns of a block.
        identities: file of weights or companion -> its identity when the folder was opened.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorLocation]
    companions: dict[str, Path]
    notes: list[str] = field(default_factory=list)
    scales: dict[str, str] = field(default_factory=dict)
    block: tuple[int, int] = BLOCK
    identities: dict[str, FileIdentity] = field(default_factory=dict)

    @staticmethod
    def open(path: Path, flag: str = "--load") -> HFFolder:
        """Check a folder by its headers, config.json and index; weights are not read.

        Args:
            flag: the flag that named the folder, for messages.

        Raises:
            ConfigError: something is not as it has to be; the message names the file or the tensor.
        """
        if hint := hub_hint(str(path)):
            raise ConfigError(f"{flag} {path}: there is no such folder{hint}")
        try:
            return _checked(path)
        except FormatError as error:
            raise ConfigError(f"{flag} {path}: {error}") from error
        except OSError as error:
            raise ConfigError(f"{flag} {path}: cannot be read: {error.strerror or error}") from error

    def companion(self, name: str) -> bytes:
        """Return the content of a companion file.

        Raises:
            ConfigError: the file cannot be read any more, or changed since the folder was opened.
        """
        return read_small(self.companions[name], LARGEST_COMPANION, self.identities[name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor except the scales of weights, in the order of files and bytes."""
        scales = set(self.scales.values())
        return {name: stored.shape for name, stored in self.tensors.items() if name not in scales}

    def stored_names(self) -> set[str]:
        """Return the names of all tensors in the files."""
        return {name + PACKED if stored.dtype == MXFP4 else name for name, stored in self.tensors.items()}


def configuration_alone(path: Path) -> dict[str, Any] | None:
    """Return the content of a folder's config.json where there are no weights; None where it is for `HFFolder.open`."""
    try:
        files, _ = _listing(path)
        if CONFIG not in files or any(name.endswith((".safetensors", *_FOREIGN)) for name in files):
            return None
        return parse_object(read_small(files[CONFIG], LARGEST_CONFIG), CONFIG)
    except (FormatError, OSError):
        return None  # which finds the same mistake, and names it


def _checked(path: Path) -> HFFolder:
    files, notes = _listing(path)
    if CONFIG not in files:
        works = f"a folder with {CONFIG}, .safetensors files and a tokenizer works"
        if snapshots := sorted(path.glob(f"snapshots/*/{CONFIG}")):  # a folder of the hub's cache
            works = f"the snapshot in it is {snapshots[-1].parent}"
        raise FormatError(f"{CONFIG} is missing; {works}")
    config = parse_object(read_small(files[CONFIG], LARGEST_CONFIG), CONFIG)
    headers = _headers(files, notes)
    tensors = {name: stored for header in headers.values() for name, stored in header.tensors.items()}
    if not tensors:
        raise FormatError(f"{', '.join(headers)} contains no tensor")
    tensors, packed = _with_unpacked(tensors)
    for name, stored in tensors.items():
        if name in packed or name in packed.values():
            continue
        if stored.dtype not in _WEIGHTS:  # packed integers would be read as numbers
            raise FormatError(
                f"tensor {shortened(name)} in {stored.file} is {stored.dtype}; weights in {', '.join(_WEIGHTS)} are "
                "read: dequantise the model first"
            )
    quantization, block = config.get("quantization_config"), BLOCK
    stored_in_fp8 = any(stored.dtype == "float8_e4m3fn" for stored in tensors.values())
    if quantization is None and stored_in_fp8:
        notes.append(f"{CONFIG} has no quantization_config; blocks of fp8 are taken to be {BLOCK[0]} x {BLOCK[1]}")
    elif quantization is not None:
        if not isinstance(quantization, dict):
            raise FormatError(f"{CONFIG}: quantization_config is {shortened(quantization)}; an object is expected")
        if not stored_in_fp8 and quantization.get("quant_method") == "fp8":
            notes.append(f"{CONFIG} has a quantization_config of fp8, and no tensor is stored in it")
        size = quantization.get("weight_block_size", list(BLOCK))
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 2**31 for n in size):
            block = (size[0], size[1])
        elif stored_in_fp8 or size is not None:
            raise FormatError(
                f"{CONFIG}: quantization_config.weight_block_size is {shortened(size)}; [rows, columns] of a block "
                "are expected"
            )
    scales = {**_scales(tensors, block), **packed}
    companions = _companions(files, notes)
    identities = {name: identity_of(file.stat()) for name, file in companions.items()}
    identities.update({file: header.identity for file, header in headers.items()})
    return HFFolder(path, config, tensors, companions, notes, scales, block, identities)


def _listing(path: Path) -> tuple[dict[str, Path], list[str]]:
    """Return every plain file of the folder by name, following links of a hub cache, and notes on what is left out."""
    if not path.exists():
        raise FormatError("there is no such folder")
    if not path.is_dir():
        raise FormatError("it is a file; the folder with config.json and the .safetensors files is expected")
    entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    if not entries:
        raise FormatError("the folder is empty")
    if len(entries) > MOST_FILES:
        raise FormatError(f"it contains {len(entries)} files; a folder of one model has fewer than {MOST_FILES}")
    # A link may lead into the folder itself, and in a hub's cache (snapshots/REVISION) into the blobs.
    real = Path(os.path.realpath(path))
    allowed = [real, real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [real]
    files: dict[str, Path] = {}
    folders = []
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_symlink():
            target = Path(os.path.realpath(entry.path))
            if target.parent not in allowed:
                raise FormatError(
                    f"{shortened(entry.name)} is a link to {target}, outside of the folder; copy the file, or name a "
                    "snapshot of the hub's cache, whose links lead to the blobs of the same cache"
                )
            if not target.exists():
                raise FormatError(f"{shortened(entry.name)} is a link to {target}, which is not there")
        mode = entry.stat().st_mode
        if stat.S_ISREG(mode):
            files[entry.name] = Path(entry.path)
        elif stat.S_ISDIR(mode) and not (entry.name.endswith(".safetensors") or _COMPANION.fullmatch(entry.name)):
            folders.append(entry.name)
        else:
            raise FormatError(f"{shortened(entry.name)} is not a regular file")
    return files, [f"folders that are left behind: {', '.join(folders)}"] if folders else []


def _companions(files: dict[str, Path], notes: list[str]) -> dict[str, Path]:
    companions: dict[str, Path] = {}
    left, total = [], 0
    for name, path in files.items():
        if name.endswith(".safetensors") or name.endswith(".safetensors.index.json"):
            continue
        if not _COMPANION.fullmatch(name) or name.endswith(".bin.index.json"):
            left.append(name)
            continue
        if not name.isprintable():
            raise FormatError(f"{shortened(name)} is not the name of a file to copy along")
        size = path.stat().st_size
        total += size
        if size > LARGEST_COMPANION or total > LARGEST_COMPANIONS:
            raise FormatError(
                f"{name} has {size} bytes; files next to the weights may have {LARGEST_COMPANION} each "
                f"and {LARGEST_COMPANIONS} together: move away what is not the tokenizer's or the configuration's"
            )
        companions[name] = path
    if left:
        notes.append(f"files that are left behind: {', '.join(shortened(name) for name in left)}")
    return companions


def _headers(files: dict[str, Path], notes: list[str]) -> dict[str, Header]:
    """Return the header of every file of weights, checked against the index where there is one."""
    if "adapter_config.json" in files:
        raise FormatError("adapter_config.json: the folder contains an adapter; merge it into the weights first")
    present = {name for name in files if name.endswith(".safetensors")}
    if INDEX in files:
        file_of, total = _index(files[INDEX])
        wanted = set(file_of.values())
        if SINGLE in present - wanted:
            raise FormatError(f"{SINGLE} and {INDEX}: two sets of weights; remove the one that is not meant")
    elif SINGLE in present:
        file_of, total, wanted = None, None, {SINGLE}
    else:
        foreign = [name for name in files if name.endswith(_FOREIGN)]
        listed = ", ".join(shortened(name) for name in (sorted(present) or foreign)[:5])
        if present:
            raise FormatError(f"neither {INDEX} nor {SINGLE} is there, but {listed}; several files need their index")
        if any(name.endswith(_PICKLED) for name in foreign):
            raise FormatError(
                f"weights as pickles only ({listed}), which can run code when they are read; save the model with "
                "safetensors where you trust it"
            )
        if foreign:
            raise FormatError(f"{shortened(foreign[0])}: weights in another format; .safetensors files are read")
        raise FormatError(f"no weights: neither {SINGLE} nor {INDEX} is there")
    for name in sorted(wanted - present):
        raise FormatError(f"{name} is missing, which {INDEX} names; {len(wanted & present)} of {len(wanted)} are there")
    strays = sorted(present - wanted)
    for name in strays:
        if _SHARD.fullmatch(name):
            raise FormatError(f"{name} belongs to no set of weights: {INDEX if file_of else SINGLE} does not name it")
    if strays:
        notes.append(f"weights that are not read: {', '.join(shortened(name) for name in strays)}")
    headers: dict[str, Header] = {}
    length, owner = 0, dict[str, str]()
    for file in sorted(wanted):
        header = headers[file] = read_header(files[file])
        length += header.length
        if length > LARGEST_HEADERS:
            raise FormatError(f"{file}: the headers up to it have {length} bytes; at most {LARGEST_HEADERS} are read")
        for name in header.tensors:
            if name in owner:
                raise FormatError(f"tensor {shortened(name)} is in {owner[name]} and in {file}")
            owner[name] = file
    for name, file in (file_of or {}).items():
        if owner.get(name) != file:
            where = f"it is in {owner[name]}" if name in owner else "it is in none of the files"
            raise FormatError(f"{INDEX}: tensor {shortened(name)} should be in {file}; {where}")
    unnamed = [] if file_of is None else [name for name in owner if name not in file_of]
    if unnamed:
        shown = ", ".join(f"{shortened(name)} in {owner[name]}" for name in unnamed[:5])
        raise FormatError(f"{INDEX} does not name {len(unnamed)} tensors that the files contain: {shown}")
    found = sum(stored.end - stored.begin for header in headers.values() for stored in header.tensors.values())
    if total is not None and total != found:
        notes.append(f"{INDEX} has the total_size {shortened(total)}, the tensors have {found} bytes; not an error")
    return headers


def _index(path: Path) -> tuple[dict[str, str], Any]:
    """Return the file of every tensor, and the total size, as the index has them."""
    content = parse_object(read_small(path, LARGEST_INDEX), INDEX)
    file_of, metadata = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(file_of, dict) or not file_of:
        raise FormatError(f"{INDEX}: weight_map is {shortened(file_of)}; tensor to file is expected")
    for name, file in file_of.items():
        plain = isinstance(file, str) and re.fullmatch(r"[^./\\][^/\\]*\.safetensors", file) and file.isprintable()
        if not plain:
            raise FormatError(
                f"{INDEX}: tensor {shortened(name)} should be in {shortened(file)}; the plain name of a "
                ".safetensors file of the folder is expected"
            )
    if not isinstance(metadata, dict):
        raise FormatError(f"{INDEX}: metadata is {shortened(metadata)}; an object is expected")
    return file_of, metadata.get("total_size")


def _with_unpacked(tensors: dict[str, TensorLocation]) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """Return the tensors with weights in MXFP4 by their own names, and weight -> scales.

    Blocks [E, N, K / 32, 16] and scales [E, N, K / 32], in bytes, are a weight [E, K, N].
    """
    found, scales = dict[str, TensorLocation](), dict[str, str]()
    for name, stored in tensors.items():
        if stored.dtype == "uint8" and name.endswith(PACKED_SCALES):
            blocks = tensors.get(name.removesuffix(PACKED_SCALES) + PACKED)
            if blocks is None or blocks.dtype != "uint8":
                needed = shortened(name.removesuffix(PACKED_SCALES) + PACKED)
                raise FormatError(f"tensor {shortened(name)} needs {needed}, uint8, which is {_described(blocks)}")
        if stored.dtype != "uint8" or not name.endswith(PACKED):
            found[name] = stored
            continue
        weight = name.removesuffix(PACKED)
        scale, shape = tensors.get(weight + PACKED_SCALES), stored.shape
        if len(shape) != 4 or shape[3] * 2 != MXFP4_BLOCK or weight in tensors:
            raise FormatError(
                f"tensor {shortened(name)} is {list(shape)}; [experts, rows, blocks, {MXFP4_BLOCK // 2}] is expected, "
                f"and no {shortened(weight)} beside it"
            )
        if scale is None or scale.dtype != "uint8" or scale.shape != shape[:3]:
            raise FormatError(
                f"tensor {shortened(name)}, uint8 {list(shape)}, needs {shortened(weight + PACKED_SCALES)}, uint8 "
                f"{list(shape[:3])}, which is {_described(scale)}"
            )
        shape = (shape[0], shape[2] * MXFP4_BLOCK, shape[1])
        found[weight] = TensorLocation(stored.file, MXFP4, shape, stored.begin, stored.end)
        scales[weight] = weight + PACKED_SCALES
    return found, scales


def _described(stored: TensorLocation | None) -> str:
    if stored is None:
        return "missing"
    return f"{stored.dtype} {list(stored.shape)}"


def _scales(tensors: dict[str, TensorLocation], block: tuple[int, int]) -> dict[str, str]:
    """Return weight in fp8 -> its scales, after checking their shape and dtype."""
    scales: dict[str, str] = {}
    for name, stored in tensors.items():
        if stored.dtype != "float8_e4m3fn":
            continue
        scale = tensors.get(name + SCALE)
        if scale is None:
            raise FormatError(f"tensor {shortened(name)} is stored in fp8 and {shortened(name + SCALE)} is missing")
        if len(stored.shape) != 2:
            raise FormatError(
                f"tensor {shortened(name)} is stored in fp8 with the shape {list(stored.shape)}, no matrix"
            )
        expected = tuple(-(-size // edge) for size, edge in zip(stored.shape, block))
        if scale.shape != expected or scale.dtype not in _SCALE_DTYPES:
            raise FormatError(
                f"tensor {shortened(name + SCALE)} is {scale.dtype} {list(scale.shape)}; float32 {list(expected)} is "
                f"expected, one number for each {block[0]} x {block[1]} block of {list(stored.shape)}"
            )
        scales[name] = name + SCALE
    used = set(scales.values())
    for name in tensors:
        if name.endswith(SCALE) and name not in used:
            weight = name.removesuffix(SCALE)
            wrong = f"stored as {tensors[weight].dtype}, not in fp8" if weight in tensors else "missing"
            raise FormatError(f"tensor {shortened(name)} scales {shortened(weight)}, which is {wrong}")
    return scales
