"""Ways in which a folder's files are wrong: each a change to the sound one, and what a message names.

`malformed_models.py` has those in which the model is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.hf.small_folders import GATE, INDEX, SHARDS, read_raw, write_json, write_raw

FIRST, SECOND = SHARDS
SINGLE = "model.safetensors"
HUGE = 4 * 2**40


@dataclass(frozen=True)
class Malformed:
    """A change to a sound folder, and strings that the message holds.

    opens: whether the folder can still be opened, because only what the weights are made into shows that it is wrong.
    fp8: whether the sound folder's weights are in fp8.
    """

    damage: Callable[[Path], Any]
    named: tuple[str, ...]
    opens: bool = False
    fp8: bool = False


CASES: dict[str, Malformed] = {}


def case(name: str, *named: str, opens: bool = False, fp8: bool = False) -> Callable[..., Any]:
    """Enter a function that damages a folder into the table."""

    def enter(damage: Callable[[Path], Any]) -> Callable[[Path], Any]:
        assert name not in CASES
        CASES[name] = Malformed(damage, named, opens, fp8)
        return damage

    return enter


def change_json(path: Path, changes: dict[str, Any]) -> None:
    """Set keys of a JSON file, or remove those that are to be `...`."""
    content = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: value for key, value in content.items() if value is not ...})


def change_index(folder: Path, changes: dict[str, Any]) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"] = {k: v for k, v in {**content["weight_map"], **changes}.items() if v is not ...}
    write_json(folder / INDEX, content)


def change_header(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = GATE) -> None:
    """Change what the header of the second file says about a tensor."""
    header, numbers = read_raw(folder / SECOND)
    change(header[name])
    write_raw(folder / SECOND, header, numbers)


def replace_header(folder: Path, header: bytes, length: int | None = None) -> None:
    write_raw(folder / SECOND, header, b"", length)


def only(folder: Path, name: str, content: bytes = b"x") -> None:
    """Nothing but one file of weights, and what lay beside them."""
    for file in (*SHARDS, INDEX):
        (folder / file).unlink()
    (folder / name).write_bytes(content)


def put_link(folder: Path, name: str, target: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


# ---- files that are not there, or are something else

case("missing shard", SECOND, INDEX)(lambda folder: (folder / SECOND).unlink())
case("no weights", SINGLE, INDEX)(lambda folder: [(folder / file).unlink() for file in (*SHARDS, INDEX)])
case("shards without an index", FIRST, INDEX)(lambda folder: (folder / INDEX).unlink())
case("a shard of another set", "model-00003-of-00009.safetensors")(
    lambda folder: save_file({"x": torch.ones(1)}, folder / "model-00003-of-00009.safetensors")
)
case("two sets of weights", SINGLE, INDEX)(lambda folder: save_file({"x": torch.ones(1)}, folder / SINGLE))
case("an adapter", "adapter_config.json")(lambda folder: (folder / "adapter_config.json").write_text("{}"))
case("pickled weights", "pytorch_model.bin", "pickle")(lambda folder: only(folder, "pytorch_model.bin"))
case("a .pt file only", "model.pt", "pickle")(lambda folder: only(folder, "model.pt"))
case("GGUF only", "model.gguf")(lambda folder: only(folder, "model.gguf", b"GGUF"))
case("config.json missing", "config.json")(lambda folder: (folder / "config.json").unlink())


@case("an empty folder", "empty")
def _(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@case("no folder", "no such folder")
def _(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


@case("a file in place of the folder", "is a file")
def _(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.write_text("{}")


@case("a pipe in place of weights", SECOND, "not a regular file")
def _(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)


@case("a pipe in place of a tokenizer", "tokenizer.json", "not a regular file")
def _(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


@case("a folder in place of a tokenizer", "tokenizer.json", "not a regular file")
def _(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()


@case("a file without a tensor", SINGLE, "no tensor")
def _(folder: Path) -> None:
    only(folder, SINGLE)
    write_raw(folder / SINGLE, b"{}", b"")


case("a device in place of weights", SECOND, "/dev/zero")(lambda folder: put_link(folder, SECOND, "/dev/zero"))
case("a link to nothing", SECOND, "not there")(lambda folder: put_link(folder, SECOND, "model-9.safetensors"))
case("a link to itself", SECOND)(lambda folder: put_link(folder, SECOND, SECOND))


# ---- paths outside of the folder


def outside(folder: Path) -> Path:
    """A sound file of weights that is not the folder's."""
    target = folder.with_name("outside.safetensors")
    (folder / SECOND).rename(target)
    return target


case("an index that names a path upwards", INDEX, "plain name", "../outside.safetensors")(
    lambda folder: change_index(folder, {GATE: f"../{outside(folder).name}"})
)
case("an index that names an absolute path", INDEX, "plain name", "/outside.safetensors")(
    lambda folder: change_index(folder, {GATE: str(outside(folder))})
)
case("an index that names a hidden file", INDEX, "plain name", ".model.safetensors")(
    lambda folder: change_index(folder, {GATE: ".model.safetensors"})
)
case("an index that names a pickle", INDEX, "plain name", "pytorch_model.bin")(
    lambda folder: change_index(folder, {GATE: "pytorch_model.bin"})
)
case("weights that are a link elsewhere", SECOND, "outside.safetensors")(
    lambda folder: put_link(folder, SECOND, str(outside(folder)))
)
case("a tokenizer that is a link elsewhere", "tokenizer.json", "/etc/passwd")(
    lambda folder: put_link(folder, "tokenizer.json", "/etc/passwd")
)
case("a licence that is a link elsewhere", "LICENSE-MODEL", "/etc/hostname")(
    lambda folder: put_link(folder, "LICENSE-MODEL", "/etc/hostname")
)


# ---- the index

case("an index of a tensor that no file holds", INDEX, "ghost.weight", SECOND)(
    lambda folder: change_index(folder, {"ghost.weight": SECOND})
)
case("a tensor that the index does not name", INDEX, GATE, SECOND)(lambda folder: change_index(folder, {GATE: ...}))
case("a tensor in another file than the index says", INDEX, GATE, FIRST)(
    lambda folder: change_index(folder, {GATE: FIRST})
)
case("an index that names a number as file", INDEX, GATE, "7")(lambda folder: change_index(folder, {GATE: 7}))
case("an index without a map", INDEX, "weight_map")(lambda folder: write_json(folder / INDEX, {"metadata": {}}))
case("an index that is a list", INDEX, "list")(lambda folder: write_json(folder / INDEX, []))
case("an index with a key twice", INDEX, "'a' is in it twice")(
    lambda folder: (folder / INDEX).write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
)
case("an index of many gigabytes", INDEX, str(HUGE))(lambda folder: os.truncate(folder / INDEX, HUGE))


@case("a tensor in two files", GATE, FIRST, SECOND)
def _(folder: Path) -> None:
    tensors = load_file(folder / FIRST)
    save_file({**tensors, GATE: load_file(folder / SECOND)[GATE]}, folder / FIRST)


# ---- headers


@case("a tensor twice in a header", SECOND, GATE, "twice")
def _(folder: Path) -> None:
    header, numbers = read_raw(folder / SECOND)
    entry = json.dumps(header[GATE])
    write_raw(folder / SECOND, f'{{"{GATE}": {entry}, {json.dumps(header)[1:]}'.encode(), numbers)


case("a truncated file", SECOND, "cut off")(
    lambda folder: os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 1)
)
case("a file cut within its header", SECOND, "header")(lambda folder: os.truncate(folder / SECOND, 100))
case("a file of no bytes", SECOND, "0 bytes")(lambda folder: os.truncate(folder / SECOND, 0))
case("bytes behind the tensors", SECOND, "nobody")(
    lambda folder: os.truncate(folder / SECOND, (folder / SECOND).stat().st_size + 8)
)
case("a sparse file of terabytes", SECOND, "nobody")(lambda folder: os.truncate(folder / SECOND, HUGE))
case("a header of 2^63 bytes", SECOND, str(2**63))(lambda folder: replace_header(folder, b"{}", 2**63))
case("a header longer than the file", SECOND, "header")(lambda folder: replace_header(folder, b"{}", 3))
case("a header of no bytes", SECOND, "header")(lambda folder: replace_header(folder, b"{}", 0))
case("a header that is not JSON", SECOND, "JSON")(lambda folder: replace_header(folder, b"{'a': 1}"))
case("a header that is not UTF-8", SECOND, "UTF-8")(lambda folder: replace_header(folder, b'{"\xff\xfe": {}}'))
case("a header that is a list", SECOND, "list")(lambda folder: replace_header(folder, b"[]"))
case("a header nested deeply", SECOND, "nested too deeply")(
    lambda folder: replace_header(folder, b'{"a":' + b"[" * 99999)
)
case("a tensor with a name of thousands of letters", SECOND, "1 to 512")(
    lambda folder: save_file({"x" * 5000: torch.ones(1)}, folder / SECOND)
)
case("a tensor with a line break in its name", SECOND, "1 to 512")(
    lambda folder: save_file({"x\ny": torch.ones(1)}, folder / SECOND)
)
case("metadata that is no string", SECOND, "__metadata__")(
    lambda folder: replace_header(folder, b'{"__metadata__": {"format": 1}}')
)


@case("a header of gigabytes", SECOND, "header has 4294967296 bytes")
def _(folder: Path) -> None:
    replace_header(folder, b"{}", 2**32)
    os.truncate(folder / SECOND, HUGE)


@case("a tensor of terabytes", SECOND, "ghost", str(HUGE))
def _(folder: Path) -> None:
    entry = {"ghost": {"dtype": "F32", "shape": [HUGE // 4], "data_offsets": [0, HUGE]}}
    write_raw(folder / SECOND, entry, b"")
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size + HUGE)


def _entry(name: str, key: str, value: Any, *named: str) -> None:
    """A case that is one thing a header says about a tensor, which is named."""
    case(name, SECOND, GATE, *named)(lambda folder: change_header(folder, lambda entry: entry.update({key: value})))


_entry("an unknown dtype", "dtype", "F4", "'F4'")
_entry("a dtype that is a number", "dtype", 7, "dtype")
_entry("a dtype that is a list", "dtype", ["BF16"], "dtype")
_entry("a negative shape", "shape", [-8, -16], "shape")
_entry("a shape that is no list", "shape", "8x16", "shape")
_entry("a shape of fractions", "shape", [8.0, 16], "shape")
_entry("a shape of truths", "shape", [True, 128], "shape")
_entry("a nested shape", "shape", [[8, 16]], "shape")
_entry("a shape whose product overflows", "shape", [2**62, 2**62, 4], "takes")
_entry("a shape of 2^64", "shape", [2**64, 16], "shape")
_entry("a shape of many dimensions", "shape", [8, 16, *[1] * 1000], "shape")
_entry("a shape of no size", "shape", [0, 16], "takes 0 bytes")
_entry("a shape that takes other bytes", "shape", [8, 17], "takes")
_entry("offsets that go backwards", "data_offsets", [256, 0], "data_offsets")
_entry("offsets that are strings", "data_offsets", ["0", "256"], "data_offsets")
_entry("offsets that are negative", "data_offsets", [-256, 0], "data_offsets")
_entry("one offset", "data_offsets", [0], "data_offsets")
_entry("a key that the format has not", "compressed", "zstd", "compressed")


def _shift(folder: Path, by: int) -> None:
    """Move where a tensor is said to lie."""
    change_header(folder, lambda entry: entry.update(data_offsets=[at + by for at in entry["data_offsets"]]))


case("overlapping offsets", SECOND, "overlaps")(lambda folder: _shift(folder, -2))
case("a hole between tensors", SECOND, "nobody")(lambda folder: _shift(folder, 2))


# ---- config.json

case("config.json that is not JSON", "config.json", "JSON")(lambda folder: (folder / "config.json").write_text("{"))
case("config.json that is a list", "config.json", "list")(lambda folder: (folder / "config.json").write_text("[]"))
case("config.json with NaN", "config.json", "NaN")(
    lambda folder: (folder / "config.json").write_text('{"rms_norm_eps": NaN}')
)
case("config.json with a number beyond fp64", "config.json", "1e999")(
    lambda folder: (folder / "config.json").write_text('{"rms_norm_eps": 1e999}')
)
case("config.json with a key twice", "config.json", "'n_group' is in it twice")(
    lambda folder: (folder / "config.json").write_text('{"n_group": 1, "n_group": 2}')
)
case("config.json nested deeply", "config.json", "nested too deeply")(
    lambda folder: (folder / "config.json").write_text('{"a":' + "[" * 99999)
)
case("config.json of terabytes", "config.json", str(HUGE))(lambda folder: os.truncate(folder / "config.json", HUGE))
case("a tokenizer of terabytes", "tokenizer.json", str(HUGE))(
    lambda folder: os.truncate(folder / "tokenizer.json", HUGE)
)
