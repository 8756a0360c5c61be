"""The doctor finds what is planted: a copy of the package with ONE error, and the doctor's ranks run that copy.

The errors are of the kinds that trained models have been lost to: a reduction that is missing or over a wrong group, a
mark that the engine reads, a scale that depends on the layout, a mask that is off by one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_moe.doctor import cli, launch

ROOT = Path(__file__).resolve().parents[2]


class Plant(NamedTuple):
    """`right` in `file` becomes `wrong`. Then `flags` have to end in a difference of each quantity in `named`, and the
    report has to contain each of `says`."""

    file: str
    right: str
    wrong: str
    flags: str
    named: tuple[str, ...]
    says: tuple[str, ...] = ()


PLANTS = {
    "the router's weight is not summed over TP": Plant(
        "moe/router.py",
        "self.weight.sequence_parallel = config.sequence_parallel",
        "self.weight.sequence_parallel = False",
        "--preset tiny --layouts tp2",
        ("gradient, step 1", "mlp.router.weight"),
        ("only router weights are off: their sum over TP",),
    ),
    "all EP ranks start with the same experts": Plant(
        "moe/experts.py",
        'name = f"expert{self.first_expert + local}"',
        'name = f"expert{local}"',
        "--preset tiny --layouts dp2-ep2",
        ("initial weight", "mlp.experts.weight1"),
        ("(routed experts only) differ before the first step",),
    ),
    "the gradient norm leaves experts out": Plant(
        "moe/experts.py",
        "parameter.tensor_model_parallel = True",
        "parameter.tensor_model_parallel = False",
        "--preset tiny --layouts tp2",
        ("gradient norm",),
        ("every gradient agrees, their norm does not", "squares are counted"),
    ),
    "a chunk of queries does not see the key before it": Plant(
        "model/context_parallel.py",
        "slice(0, number * length)",
        "slice(0, number * length - 1)",
        "--preset tiny --layouts cp2",
        ("loss", "gradient, step 1", "self_attention.linear_kv_down_proj.weight"),
    ),
    "an auxiliary loss weighs its rank's tokens, not the batch's": Plant(
        "training/global_batch.py",
        "    torch.distributed.all_reduce(tokens)\n",
        "",
        "--preset tiny --layouts dp2 --calculate-per-token-loss --moe-router-load-balancing-type seq_aux_loss"
        " --moe-aux-loss-coeff 0.1",
        ("gradient, step 1", "mlp.router.weight"),
    ),
    "an auxiliary loss is scaled by nothing, on any layout": Plant(
        "moe/aux_losses.py",
        "value * coeff * weight)",
        "value * coeff)",
        "--preset demo --layouts micro-batches-of-1",
        ("gradient, step 1", "mlp.router.weight"),
        ("the loss does not differ, gradients do", "is not weighed per token of the global batch"),
    ),
    "an auxiliary loss of DeepSeek-V3's size counts twice under TP": Plant(
        "moe/aux_losses.py",
        "value * coeff * weight)",
        "value * coeff * weight * self.groups.tp_cp.size())",
        "--preset deepseek-v3 --layouts tp2",
        ("gradient, step 1", "mlp.router.weight"),
    ),
    "counts are summed over the ranks of a micro-batch": Plant(
        "training/finalize_model_grads.py",
        "    group = found[0].groups.tp_dp_cp\n    if group.size() > 1:\n        dist.all_reduce(local, group=group)",
        "    group = found[0].groups.tp_cp\n    if group.size() > 1:\n        dist.all_reduce(local, group=group)",
        "--preset tiny --layouts dp2",
        (),
        ("LostTokens", "tokens of the global batch"),
    ),
    "a weight that TP ranks share does not get all their gradients": Plant(
        "parallel/collectives.py",
        "        dist.all_reduce(total, group=ctx.group)\n        return total, None",
        "        return total, None",
        "--multi-latent-attention --q-lora-rank 32 --layouts tp2",
        ("gradient, step 1", "self_attention.linear_kv_down_proj.weight"),
    ),
}


def planted(plant: Plant, folder: Path) -> Path:
    """A copy of the package with the error in it; byte code comes along, so that a start takes no longer."""
    shutil.copytree(ROOT / "megatron_moe", folder / "megatron_moe")
    file = folder / "megatron_moe" / plant.file
    text = file.read_text()
    assert text.count(plant.right) == 1, f"{plant.file} no longer holds the text that the error replaces"
    file.write_text(text.replace(plant.right, plant.wrong))
    return folder


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_error_is_found_and_named(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    plant = PLANTS[name]
    monkeypatch.setattr(launch, "PACKAGE_ROOT", planted(plant, tmp_path))
    code = cli.main([*plant.flags.split(), "--steps", "1", "--json", str(tmp_path / "report.json")])
    told = capsys.readouterr().out
    assert code == cli.DIFFERENT, told
    report = json.loads((tmp_path / "report.json").read_text())
    (layout,) = report["layouts"]
    differing = [f"{one['quantity']} {one['name']}" for one in layout.get("differences", [])]
    assert not [quantity for quantity in plant.named if not any(quantity in one for one in differing)], told
    assert not [words for words in plant.says if words not in told], told
    # and nothing is named that the error does not touch
    assert not [one for one in differing if one.startswith(("tokens of the batch", "step applied"))]
