"""The doctor on ranks: layouts that agree, and errors that are planted in a copy of the package.

The errors are of the kinds that trained models have been lost to: a reduction that is missing or over a wrong group, a
mark that the engine reads, a scale that depends on the layout, a mask that is off by one.
"""

import json
import shutil
from typing import Any, NamedTuple

import pytest

from megatron_moe_tools.doctor import cli, measure
from megatron_moe_tools.doctor.compare import rounding_error
from megatron_moe_tools.doctor.layouts import model
from tests.helpers.ranks import ROOT
from tests.tools.forked_doctor import KEPT, ForkedRanks


@pytest.fixture(autouse=True)
def package(rank_parent, tmp_path, monkeypatch):
    """The doctor's ranks are forked, and run the copy of the package that a test puts into this folder."""

    def ranks(*_: Any, seconds: float, **__: Any) -> ForkedRanks:
        copied = (tmp_path / "megatron_moe").exists()
        return ForkedRanks(rank_parent, seconds, tmp_path, package=tmp_path if copied else None)

    monkeypatch.setattr(measure, "LocalRanks", ranks)
    return tmp_path


def test_layouts_that_agree_are_told_one_by_one_and_end_in_zero(tmp_path, capsys):
    model = "--preset tiny --mtp-num-layers 1 --num-attention-heads 8"
    flags = f"{model} --tensor-model-parallel-size 8 --sequence-parallel --layouts tp2 dp2 --steps 2 --json"
    code, out = cli.main([*flags.split(), str(tmp_path / "report.json")]), capsys.readouterr().out
    assert code == 0, out
    assert "the layout in use (TP 8), at size 2" in out
    assert "[1/2] tp2" in out and "[2/2] dp2" in out and out.count("agrees: loss") == 2
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] is False and [layout["agrees"] for layout in report["layouts"]] == [True, True]
    errors = report["layouts"][0]["largest_errors"]
    assert errors["loss of multi-token prediction"] < 1e-5 and errors["gradient"] < 1e-4
    assert report["shrunk"]["hidden_size"] == [64, 32]
    assert report["oracles"][0]["smallest_margin"] > 0


def test_an_overflow_of_fp16_is_skipped_as_the_oracle_skips_it_and_samples_are_picked_clear(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cli, "_CANDIDATES", 128)
    code = cli.main(["--layouts", "dp2-ep2+fp16", "--steps", "3", "--json", str(tmp_path / "report.json")])
    assert code == 0, capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    (layout,), (oracle,) = report["layouts"], report["oracles"]
    assert (oracle["dtype"], layout["agrees"]) == ("float16", True)
    applied, scales = oracle["steps_applied"], [16384, *oracle["loss_scales"]]
    assert applied[0] is False and True in applied
    assert all(after == before / 2 for before, after, good in zip(scales, scales[1:], applied) if not good)
    assert oracle["smallest_margin"] > rounding_error(model("fp16")[1])
    assert {"fp16", "grouped-query attention"} <= set(layout["features"])
    assert 1e-7 < layout["largest_errors"]["gradient"] < layout["tolerances"]["gradient"]


class Plant(NamedTuple):
    """`right` in `file` becomes `wrong`. Then `layout` has a difference of each quantity in `named` and of none in
    `spared`, and the report contains each of `says`."""

    file: str
    right: str
    wrong: str
    layout: str
    named: tuple[str, ...]
    says: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()


# The flags of a visit, and errors of which each is one in its own layout alone.
VISITS: dict[str, tuple[str, dict[str, Plant]]] = {
    "weights": ("--preset tiny", {
        "the router's weight is not summed over TP": Plant(
            "moe/router.py", "self.weight.sequence_parallel = config.sequence_parallel",
            "self.weight.sequence_parallel = False", "tp2", ("gradient, step 1", "mlp.router.weight"),
            ("only router weights are off: their sum over TP",),
        ),
        "all EP ranks start with the same experts": Plant(
            "moe/experts.py", 'name = f"expert{self.first_expert + local}"', 'name = f"expert{local}"', "dp2-ep2",
            ("initial weight", "mlp.experts.weight1"), ("(routed experts only) differ before the first step",),
        ),
    }),
    "sums": ("--preset tiny", {
        "the gradient norm leaves experts out": Plant(
            "moe/experts.py", "parameter.tensor_model_parallel = True", "parameter.tensor_model_parallel = False",
            "tp2", ("gradient norm",), ("every gradient agrees, their norm does not", "squares are counted"),
        ),
        "counts are summed over the ranks of a micro-batch": Plant(
            "training/finalize_model_grads.py",
            "group = found[0].groups.tp_dp_cp\n    if group.size() > 1:\n        dist.all_reduce(total, group=group)",
            "group = found[0].groups.tp_cp\n    if group.size() > 1:\n        dist.all_reduce(total, group=group)",
            "dp2", (), ("TokenCountError", "tokens of the global batch"),
        ),
    }),
    # What follows is found by the default layouts.
    "parts of a sequence": ("", {
        "an expert's capacity is that of a rank's tokens": Plant(
            "moe/routing.py", "size = capacity(gathered.shape[0], ", "size = capacity(num_tokens, ", "cp2+capacity",
            ("dropped choices decoder.layers.1",),
        ),
        "multi-token prediction looks ahead within a rank's part of the sequence": Plant(
            "parallel/sequence.py", "whole = all_gather_sequence(x.t(), group, places).t()",
            "whole = torch.cat([x] * group.size(), dim=1)", "cp2-ep2+mtp", ("loss of multi-token prediction depth 1",),
        ),
    }),
    # In fp32 the second and the third are no errors: nothing is scaled, and every dtype is fp32.
    "scales and dtypes": ("", {
        "seq_aux_loss counts twice under TP": Plant(
            "moe/load_balance.py", "value = balance_share(", "value = self.groups.tp_cp.size() * balance_share(",
            "tp2+mtp",
            ("seq aux loss decoder.layers.1", "gradient, step 1 decoder.layers.1.mlp.router.weight"),
            spared=("z loss",),
        ),
        "gradients are not divided by the loss scale": Plant(
            "optim/optimizer.py", "return self._scaler.inv_scale",
            "return self._scaler.inv_scale * self._scaler.scale", "fp16-against-fp32",
            ("gradient norm", "gradient, step 1"), ("every gradient is 2048 times the oracle's",), spared=("loss",),
        ),
        "expert_bias is rounded to the model's dtype": Plant(
            "training/finalize_model_grads.py",
            "(updated_expert_bias(bias, requested, rate, center))",
            "(updated_expert_bias(bias, requested, rate, center).to(router.weight.dtype))",
            "bf16-against-fp32", ("expert_bias decoder.layers.0", "expert_bias decoder.layers.1"),
            spared=("token counts", "gradient"),
        ),
    }),
}  # fmt: skip


@pytest.mark.parametrize("visit", VISITS)
def test_planted_errors_are_found_and_named(visit, package, capsys):
    """The doctor visits a copy with errors in it, and reports what the plants describe."""
    (flags, plants), saved = VISITS[visit], package / "report.json"
    # Byte code comes along, so that a start takes no longer.
    for name in ("megatron_moe", "megatron_moe_tools"):
        shutil.copytree(ROOT / name, package / name)
    for plant in plants.values():
        assert plant.file.split("/")[0] not in KEPT, "ranks that are forked do not take this file from a copy"
        file = package / "megatron_moe" / plant.file
        text = file.read_text()
        assert text.count(plant.right) == 1, f"{plant.file} no longer holds the text that the error replaces"
        file.write_text(text.replace(plant.right, plant.wrong))
    layouts = [plant.layout for plant in plants.values()]
    code = cli.main([*flags.split(), "--layouts", *layouts, "--steps", "1", "--json", str(saved)])
    told = capsys.readouterr().out
    assert code == cli.DIFFERENT, told
    found = {layout["layout"]: layout for layout in json.loads(saved.read_text())["layouts"]}
    assert found.keys() == set(layouts)
    for name, plant in plants.items():
        layout = found[plant.layout]
        differing = [f"{one['quantity']} {one['name']}" for one in layout.get("differences", [])]
        assert not layout["agrees"], name
        assert all(any(quantity in one for one in differing) for quantity in plant.named), (name, told)
        assert all(words in told for words in plant.says), (name, told)
        # and nothing is named that the error does not touch
        assert not [one for one in differing if one.startswith(("tokens of the batch", "step applied"))], (name, told)
        assert not [one for one in differing if any(quantity in one for quantity in plant.spared)], (name, told)
