"""The converter's memory is that of a layer and not of the model, there and back."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.convert_16b import ROOT, hashes, make, model
from benchmarks.measured_process import Measured, measured
from megatron_moe.config.schema import replace

MIB = 2**20


def converted(origin: str, load: Path, save: Path, *flags: str) -> Measured:
    target = "native" if origin == "hf" else "hf"
    command = [sys.executable, "-W", "ignore", "tools/convert_checkpoint.py", "--from", origin, "--to", target]
    ran = measured([*command, "--load", str(load), "--save", str(save), *flags], ROOT)
    assert ran.status == 0, ran.stderr
    return ran


def test_a_conversion_holds_at_most_two_layers_of_a_model_of_eight(tmp_path):
    run = replace(model(8), hidden_size=1024, ffn_hidden_size=2048, vocab_size=8000)
    run = replace(run, moe_ffn_hidden_size=176, num_experts=16, moe_router_topk=4)
    size = make(run, tmp_path / "hf")
    libraries = converted("hf", tmp_path / "hf", tmp_path / "native", "--dry-run").peak_bytes
    assert libraries > 100 * MIB
    there = converted("hf", tmp_path / "hf", tmp_path / "native")
    back = converted("native", tmp_path / "native", tmp_path / "back")
    layer = max(path.stat().st_size for path in (tmp_path / "native").glob("iter_*/__0_*.distcp"))
    assert size > 7 * layer
    assert max(there.peak_bytes, back.peak_bytes) - libraries < 2 * layer + 32 * MIB
    assert hashes(tmp_path / "native") == hashes(tmp_path / "back")
