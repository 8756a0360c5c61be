"""Ways in which a folder is wrong: each a change to the sound one, and what a message names."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.hf.small_folders import ATTENTION, BIAS, GATE, INDEX, SHARDS, read_raw, write_json, write_raw

FIRST, SECOND = SHARDS
SINGLE = "model.safetensors"
OUTSIDE = "../outside.safetensors"
HUGE = 4 * 2**40
Tensor = torch.Tensor
Damage = Callable[[Path], Any]


class Malformed(NamedTuple):
    """A change to a sound folder, and strings that the message holds.

    opens: whether the folder can still be opened, because only what the weights are made into shows that it is wrong.
    fp8: whether the sound folder's weights are in fp8.
    """

    damage: Damage
    named: tuple[str, ...]
    opens: bool
    fp8: bool


def wrong(damage: Damage, *named: str, opens: bool = False, fp8: bool = False) -> Malformed:
    return Malformed(damage, named, opens, fp8)


# ---- changes


def change_json(path: Path, changes: dict[str, Any]) -> None:
    """Set keys of a JSON file, or remove those that are to be `...`."""
    content = {**json.loads(path.read_text()), **changes}
    write_json(path, {key: value for key, value in content.items() if value is not ...})


def config(**changes: Any) -> Damage:
    return lambda folder: change_json(folder / "config.json", changes)


def text(name: str, content: str) -> Damage:
    return lambda folder: (folder / name).write_text(content)


def resized(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / name, size)


def grown(by: int) -> Damage:
    return lambda folder: os.truncate(folder / SECOND, (folder / SECOND).stat().st_size + by)


def change_index(folder: Path, changes: dict[str, Any]) -> None:
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"] = {k: v for k, v in {**content["weight_map"], **changes}.items() if v is not ...}
    write_json(folder / INDEX, content)


def indexed(name: str, file: Any) -> Damage:
    return lambda folder: change_index(folder, {name: file})


def header(content: bytes, length: int | None = None) -> Damage:
    """The second file is nothing but this header."""
    return lambda folder: write_raw(folder / SECOND, content, b"", length)


def said(key: str, change: Callable[[Any], Any]) -> Damage:
    """Another thing that a header says about a tensor."""

    def damage(folder: Path) -> None:
        content, numbers = read_raw(folder / SECOND)
        content[GATE][key] = change(content[GATE].get(key))
        write_raw(folder / SECOND, content, numbers)

    return damage


def entry(key: str, value: Any, *named: str) -> Malformed:
    """Another thing that a header says about a tensor, which is named."""
    return wrong(said(key, lambda _: value), SECOND, GATE, *(named or (key,)))


def shifted(by: int) -> Damage:
    """A tensor is said to lie elsewhere."""
    return said("data_offsets", lambda offsets: [at + by for at in offsets])


def only(name: str, content: bytes = b"x") -> Damage:
    """Nothing but one file of weights, and what lay beside them."""
    return both(gone(*SHARDS, INDEX), lambda folder: (folder / name).write_bytes(content))


def gone(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink(missing_ok=True) for name in names]


def instead(name: str, make: Callable[[Path], Any]) -> Damage:
    return both(gone(name), lambda folder: make(folder / name))


def link(name: str, target: str) -> Damage:
    return instead(name, lambda path: path.symlink_to(target))


def moved_out(folder: Path) -> None:
    """A sound file of weights lies beside the folder."""
    (folder / SECOND).rename(folder / OUTSIDE)


def extra(tensors: dict[str, Tensor], file: str = SECOND) -> Damage:
    """Further tensors in a file, which the index names."""

    def damage(folder: Path) -> None:
        save_file({**(load_file(folder / file) if (folder / file).exists() else {}), **tensors}, folder / file)
        change_index(folder, dict.fromkeys(tensors, file))

    return damage


def alone(tensors: dict[str, Tensor], file: str) -> Damage:
    """A file of weights that the index does not name."""
    return lambda folder: save_file(tensors, folder / file)


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """A tensor replaced or removed, in its file; the index follows."""

    def damage(folder: Path) -> None:
        file = json.loads((folder / INDEX).read_text())["weight_map"][name]
        tensors = load_file(folder / file)
        new = change(tensors.pop(name))
        save_file(tensors if new is None else {**tensors, name: new}, folder / file, {"format": "pt"})
        change_index(folder, {name: ... if new is None else file})

    return damage


def number(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.reshape(-1)[1] = value
        return tensor

    return change


def nothing(tensor: Tensor) -> None:
    return None


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


def elsewhere(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


# ---- cases

ONE = {"x": torch.ones(1)}
FILES = {
    "missing shard": wrong(gone(SECOND), SECOND, INDEX),
    "no weights": wrong(gone(*SHARDS, INDEX), SINGLE, INDEX),
    "shards without an index": wrong(gone(INDEX), FIRST, INDEX),
    "a shard of another set": wrong(alone(ONE, "model-00003-of-00009.safetensors"), "model-00003-of-00009.safetensors"),
    "two sets of weights": wrong(alone(ONE, SINGLE), SINGLE, INDEX),
    "an adapter": wrong(text("adapter_config.json", "{}"), "adapter_config.json"),
    "pickled weights": wrong(only("pytorch_model.bin"), "pytorch_model.bin", "pickle"),
    "GGUF only": wrong(only("model.gguf", b"GGUF"), "model.gguf"),
    "config.json missing": wrong(gone("config.json"), "config.json"),
    "an empty folder": wrong(lambda folder: [path.unlink() for path in folder.iterdir()], "empty"),
    "no folder": wrong(elsewhere, "no such folder"),
    "a file in place of the folder": wrong(both(elsewhere, lambda folder: folder.write_text("{}")), "is a file"),
    "a pipe in place of weights": wrong(instead(SECOND, os.mkfifo), SECOND, "not a regular file"),
    "a pipe in place of a tokenizer": wrong(instead("vocab.json", os.mkfifo), "vocab.json", "not a regular file"),
    "a folder in place of a tokenizer": wrong(instead("vocab.json", os.mkdir), "vocab.json", "not a regular file"),
    "a file without a tensor": wrong(only(SINGLE, bytes([2, *[0] * 7]) + b"{}"), SINGLE, "no tensor"),
    "a device in place of weights": wrong(link(SECOND, "/dev/zero"), SECOND, "/dev/zero"),
    "a link to nothing": wrong(link(SECOND, "model-9.safetensors"), SECOND, "not there"),
    # paths outside of the folder
    "an index that names a path upwards": wrong(both(moved_out, indexed(GATE, OUTSIDE)), INDEX, "plain name", OUTSIDE),
    "an index that names a hidden file": wrong(indexed(GATE, f".{SINGLE}"), INDEX, "plain name", f".{SINGLE}"),
    "weights that are a link elsewhere": wrong(both(moved_out, link(SECOND, OUTSIDE)), SECOND, "outside.safetensors"),
    # the index
    "an index of a tensor that no file holds": wrong(indexed("ghost.weight", SECOND), INDEX, "ghost.weight", SECOND),
    "a tensor that the index does not name": wrong(indexed(GATE, ...), INDEX, GATE, SECOND),
    "a tensor in another file than the index says": wrong(indexed(GATE, FIRST), INDEX, GATE, FIRST),
    "an index that names a number as file": wrong(indexed(GATE, 7), INDEX, GATE, "7"),
    "an index without a map": wrong(text(INDEX, '{"metadata": {}}'), INDEX, "weight_map"),
    "an index with a key twice": wrong(text(INDEX, '{"weight_map": {"a": 1, "a": 2}}'), INDEX, "'a' is in it twice"),
    "an index of many gigabytes": wrong(resized(INDEX, HUGE), INDEX, str(HUGE)),
    "a tensor in two files": wrong(extra({GATE: torch.ones(8, 16).bfloat16()}, FIRST), GATE, FIRST, SECOND),
    # config.json
    "config.json with NaN": wrong(text("config.json", '{"rms_norm_eps": NaN}'), "config.json", "NaN"),
    "config.json with a number beyond fp64": wrong(text("config.json", '{"x": 1e999}'), "config.json", "1e999"),
}
GHOST = {"ghost": {"dtype": "F32", "shape": [HUGE // 4], "data_offsets": [0, HUGE]}}
HEADERS = {
    "a tensor twice in a header": wrong(header(f'{{"{GATE}": {{}}, "{GATE}": {{}}}}'.encode()), SECOND, GATE, "twice"),
    "a truncated file": wrong(grown(-1), SECOND, "cut off"),
    "a file cut within its header": wrong(resized(SECOND, 100), SECOND, "header"),
    "a file of no bytes": wrong(resized(SECOND, 0), SECOND, "0 bytes"),
    "bytes behind the tensors": wrong(grown(8), SECOND, "nobody"),
    "a header of 2^63 bytes": wrong(header(b"{}", 2**63), SECOND, str(2**63)),
    "a header of no bytes": wrong(header(b"{}", 0), SECOND, "header"),
    "a header that is not JSON": wrong(header(b"{'a': 1}"), SECOND, "JSON"),
    "a header that is not UTF-8": wrong(header(b'{"\xff\xfe": {}}'), SECOND, "UTF-8"),
    "a header that is a list": wrong(header(b"[]"), SECOND, "list"),
    "a header nested deeply": wrong(header(b'{"a":' + b"[" * 99999), SECOND, "nested too deeply"),
    "a header of gigabytes": wrong(
        both(header(b"{}", 2**32), resized(SECOND, HUGE)), SECOND, "header has 4294967296 bytes"
    ),
    "a tensor with a name of thousands of letters": wrong(alone({"x" * 5000: torch.ones(1)}, SECOND), SECOND, "1 to 5"),
    "a tensor with a line break in its name": wrong(alone({"x\ny": torch.ones(1)}, SECOND), SECOND, "1 to 512"),
    "metadata that is no string": wrong(header(b'{"__metadata__": {"format": 1}}'), SECOND, "__metadata__"),
    "a tensor of terabytes": wrong(both(header(json.dumps(GHOST).encode()), grown(HUGE)), SECOND, "ghost", str(HUGE)),
    "an unknown dtype": entry("dtype", "F4", "'F4'"),
    "a dtype that is a list": entry("dtype", ["BF16"]),
    "a negative shape": entry("shape", [-8, -16]),
    "a shape of truths": entry("shape", [True, 128]),
    "a shape whose product overflows": entry("shape", [2**62, 2**62, 4], "takes"),
    "a shape of many dimensions": entry("shape", [8, 16, *[1] * 1000]),
    "a shape that takes other bytes": entry("shape", [8, 17], "takes"),
    "offsets that go backwards": entry("data_offsets", [256, 0]),
    "offsets that are negative": entry("data_offsets", [-256, 0]),
    "one offset": entry("data_offsets", [0]),
    "a key that the format has not": entry("compressed", "zstd"),
    "overlapping offsets": wrong(shifted(-2), SECOND, "overlaps"),
    "a hole between tensors": wrong(shifted(2), SECOND, "nobody"),
}

# What one key of config.json may not be by itself is in test_config.py.
UP = "model.layers.1.mlp.experts.3.up_proj.weight"
FIFTH = "model.layers.1.mlp.experts.4.gate_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
AHEAD = {"model.layers.2.enorm.weight": torch.ones(16).bfloat16()}
MODELS = {
    "more layers than tensors": wrong(config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight", opens=True),
    "another hidden size": wrong(config(hidden_size=32), "model.embed_tokens.weight", opens=True),
    "more experts than tensors": wrong(config(n_routed_experts=8), "experts.4.gate_proj.weight", opens=True),
    "a vocabulary without end": wrong(config(vocab_size=10**15), "vocab_size", opens=True),
    "prediction without end": wrong(config(num_nextn_predict_layers=10**9), "num_nextn_predict_layers", opens=True),
    "an unknown rotary scaling": wrong(config(rope_scaling={"type": "x", "factor": 4.0}), "rope_scaling", opens=True),
    "a quantisation that is a list": wrong(config(quantization_config=[1]), "quantization_config"),
    # tensors
    "a tensor missing": wrong(changed(ATTENTION, nothing), ATTENTION, opens=True),
    "an expert missing": wrong(changed(UP, nothing), UP, opens=True),
    "a tensor transposed": wrong(changed(ATTENTION, lambda t: t.T.contiguous()), ATTENTION, "[12, 16]", opens=True),
    "a tensor in integers": wrong(changed(ATTENTION, torch.Tensor.int), ATTENTION, "int32"),
    "a tensor in the other fp8": wrong(changed(ATTENTION, lambda t: t.to(torch.float8_e5m2)), ATTENTION, "float8_e5m2"),
    "a tensor in another dtype": wrong(changed(ATTENTION, torch.Tensor.half), ATTENTION, "float16", opens=True),
    "a tensor of no size": wrong(changed(ATTENTION, lambda t: t[:0]), ATTENTION, opens=True),
    "a tensor nobody knows": wrong(extra({FIFTH: torch.ones(8, 16).bfloat16()}), FIFTH, opens=True),
    "a layer beyond the last": wrong(extra(AHEAD), "num_nextn_predict_layers", "beyond num_hidden_layers", opens=True),
    "multi-token prediction in part": wrong(
        both(extra(AHEAD), config(num_nextn_predict_layers=1)), "model.layers.2.hnorm.weight", "missing", opens=True
    ),
    "NaN in an expert": wrong(changed(GATE, number(torch.nan)), GATE, opens=True),
    "NaN in a router's bias": wrong(changed(BIAS, number(torch.nan)), BIAS, opens=True),
}
SCALE = f"{GATE}_scale_inv"


def blocks(size: Any) -> Damage:
    return config(quantization_config={"quant_method": "fp8", "weight_block_size": size})


FP8 = {
    "fp8 without its scales": wrong(changed(SCALE, nothing), SCALE, fp8=True),
    "scales of another shape": wrong(changed(SCALE, lambda t: torch.ones(2, 2)), SCALE, "[1, 2]", fp8=True),
    "one scale for a whole tensor": wrong(changed(SCALE, lambda t: torch.tensor(1.0)), SCALE, fp8=True),
    "scales in integers": wrong(changed(SCALE, torch.Tensor.int), SCALE, "int32", fp8=True),
    "scales of nothing": wrong(changed(GATE, nothing), SCALE, GATE, fp8=True),
    "scales of a tensor that is not in fp8": wrong(changed(GATE, torch.Tensor.bfloat16), SCALE, "bfloat16", fp8=True),
    "a vector in fp8": wrong(
        both(changed(NORM, lambda t: t.to(torch.float8_e4m3fn)), extra({f"{NORM}_scale_inv": torch.ones(2)})),
        NORM,
        "no matrix",
        fp8=True,
    ),
    "a scale that is not a number": wrong(changed(SCALE, number(torch.nan)), SCALE, "nan", opens=True, fp8=True),
    "a scale that is infinite": wrong(changed(SCALE, number(torch.inf)), SCALE, "inf", opens=True, fp8=True),
    "a scale of zero": wrong(changed(SCALE, number(0.0)), SCALE, "holds 0 ", opens=True, fp8=True),
    "a scale that is negative": wrong(changed(SCALE, number(-1.0)), SCALE, "-1.0", opens=True, fp8=True),
    "fp8 that is not a number": wrong(changed(GATE, number(torch.nan)), GATE, opens=True, fp8=True),
    "fp8 with a block of no rows": wrong(blocks([0, 8]), "weight_block_size", fp8=True),
    "fp8 with a block of one size": wrong(blocks([8]), "weight_block_size", fp8=True),
    "fp8 with blocks that the scales do not have": wrong(blocks([128, 128]), "_scale_inv", fp8=True),
}


def packed(*named: str, blocks: Tensor | None, scales: Tensor | None) -> Malformed:
    """A weight in MXFP4 besides, of which a message says what is wrong; None: it is not there."""
    tensors = {"packed_blocks": blocks, "packed_scales": scales}
    return wrong(extra({name: tensor for name, tensor in tensors.items() if tensor is not None}), *named)


BLOCKS, SCALES = torch.ones(4, 8, 2, 16, dtype=torch.uint8), torch.ones(4, 8, 2, dtype=torch.uint8)
MXFP4 = {
    "mxfp4 without its scales": packed("packed_scales", "is missing", blocks=BLOCKS, scales=None),
    "mxfp4 without its blocks": packed("packed_blocks", "is missing", blocks=None, scales=SCALES),
    "mxfp4 of fewer experts than its scales": packed("[4, 8, 2]", "[3, 8, 2]", blocks=BLOCKS[:3], scales=SCALES),
    "mxfp4 with numbers as scales": packed("packed_scales", "float32", blocks=BLOCKS, scales=SCALES.float()),
    "mxfp4 with blocks as numbers": packed("packed_blocks", "float32", blocks=BLOCKS.float(), scales=SCALES),
    "mxfp4 in blocks of another size": packed("[4, 8, 2, 8]", blocks=BLOCKS[..., :8].contiguous(), scales=SCALES),
}
CASES: dict[str, Malformed] = {**FILES, **HEADERS, **MODELS, **FP8, **MXFP4}
