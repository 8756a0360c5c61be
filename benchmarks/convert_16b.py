"""Time and memory of megatron-moe convert on a model of 16 billion parameters: DeepSeek-V2-Lite's shapes.

Run from the repository's root, where the disk has room for twice 31.4 GB:

    python -m benchmarks.convert_16b --folder /scratch/x
    python -m benchmarks.convert_16b --folder /scratch/x --layers 14      # half of the layers, half of the room

Random bfloat16 weights are written as a Hugging Face folder in shards of 5 GB, converted to a step, and the step back.
Each conversion is the real tool in a process of its own, whose address space may not grow beyond --limit; told are its
wall time, its processor time and the most memory it held (what the system's file cache holds is not the process's).
The first folder is removed before the way back, and the second is held against the first by the hashes of its tensors.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.hf.config import config_of
from megatron_moe.hf.families import FAMILIES
from megatron_moe.hf.mapping import mapping
from megatron_moe.hf.safetensors_file import StreamedFile, bytes_of

ROOT = Path(__file__).resolve().parents[1]
FAMILY = FAMILIES["deepseek-v2"]
SHARD = 5 * 10**9
GIB = 2**30
# A process starts with the peak of its parent on record, so a small interpreter is put between, which has hardly any.
_BETWEEN = """
import json, resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([status, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024], file)
"""


def model(layers: int) -> Run:
    """DeepSeek-V2-Lite with this many of its 27 layers; the first is dense."""
    run = build({**PRESETS["deepseek-v2-lite"], "vocab_size": 102400})
    return replace(run, num_layers=layers, moe_layer_freq=f"[0]+[1]*{layers - 1}")


def make(run: Run, folder: Path) -> int:
    """A folder of random weights. Returns the bytes of all tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(run, FAMILY, "bfloat16"), indent=2))
    shapes = {
        name: shape
        for piece in mapping(run, FAMILY.names).pieces
        for name, shape in zip(piece.hf, piece.transform.hf_shapes)
    }
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    for name, shape in shapes.items():
        held = sum(bytes_of(*layout) for layout in shards[-1].values())
        if shards[-1] and held + bytes_of("bfloat16", shape) > SHARD:
            shards.append({})
        shards[-1][name] = ("bfloat16", shape)
    largest = max(bytes_of("bfloat16", shape) for shape in shapes.values())
    # sixteen random bits, but with an exponent below that of infinity
    noise = numpy.random.default_rng(1).integers(0, 1 << 16, largest, dtype=numpy.uint16) & numpy.uint16(0xBF7F)
    raw, places, total = memoryview(noise).cast("B"), {}, 0
    for number, layout in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with StreamedFile(folder / name, layout) as file:
            for tensor, (dtype, shape) in layout.items():
                size, start = bytes_of(dtype, shape), total % largest // 2 * 2
                file.write(tensor, raw[start : start + size])
                places[tensor], total = name, total + size
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def converted(origin: str, load: Path, save: Path, limit: int) -> dict[str, Any]:
    """Run the tool and measure it."""
    target = "native" if origin == "hf" else "hf"
    command = [sys.executable, "-m", "megatron_moe", "convert", "--from", origin, "--to", target]
    command += ["--load", str(load), "--save", str(save)]
    with tempfile.NamedTemporaryFile() as told:
        between = [sys.executable, "-I", "-S", "-c", _BETWEEN, told.name, *command]
        started = time.monotonic()
        subprocess.run(
            between, cwd=ROOT, check=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        )
        seconds = time.monotonic() - started
        status, processor_seconds, peak_bytes = json.load(told)
    if status != 0:
        raise SystemExit(f"the conversion ended with {status}")
    return {
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor_seconds, 1),
        "peak_gib": round(peak_bytes / GIB, 2),
    }


def hashes(save: Path) -> dict[str, str]:
    """Of every tensor of the folder, by name, as the certificate has them."""
    content = json.loads((save / "conversion_certificate.json").read_text())
    return {entry["name"]: entry["sha256"] for row in content["tensors"] for entry in row["hf"]}


def main() -> None:
    """Measure both ways and print a JSON object."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", type=Path, required=True, help="made for this, and removed afterwards")
    p.add_argument("--layers", type=int, default=27)
    p.add_argument("--limit", type=float, default=12.0, help="GiB of address space of a conversion")
    words = p.parse_args()
    folder, limit = words.folder, int(words.limit * GIB)
    folder.mkdir()
    try:
        size = make(model(words.layers), folder / "hf")
        result: dict[str, Any] = {"layers": words.layers, "gigabytes": round(size / 1e9, 2), "limit_gib": words.limit}
        result["hf to native"] = converted("hf", folder / "hf", folder / "native", limit)
        shutil.rmtree(folder / "hf")
        result["native to hf"] = converted("native", folder / "native", folder / "back", limit)
        result["equal"] = hashes(folder / "native") == hashes(folder / "back")
        print(json.dumps(result, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
