"""The benchmark compares equals: everyone gets the same problem, and a wrong answer does not race."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import expert_parallel, moe_layer, whole_step
from benchmarks import problem as problems
from benchmarks.problem import Shape, make_problem, relative_error
from tests.helpers.rows import rows

REPO = Path(__file__).resolve().parents[2]
BUDGET = json.loads((REPO / "tests/docs/operation_budget.json").read_text())
"""Contestant and dtype -> torch operations of one step of the layer, those of torch's form."""
RACE = "tests/docs/test_benchmark.py::test_every_contestant_matches_the_oracle_or_says_why_it_cannot_race"
SMALL = ["--tokens", "48", "--hidden", "64", "--experts", "8", "--topk", "2", "--ffn", "32", "--shared", "32"]


@pytest.mark.parametrize("dtype", rows(["bf16", "fp32"], test=["fp32"]))
def test_every_contestant_matches_the_oracle_or_says_why_it_cannot_race(tmp_path, dtype, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_MOE_CPU_HALF_PRODUCTS", "native")  # whose operations are counted
    always = set("bound ours ours_loop engine_alltoall engine_fused engine_allgather".split())
    others = set("engine_grouped hf_grouped_mm hf_eager torchtitan".split())
    others |= {"plain"} if dtype == "bf16" else set()  # it is compiled, which takes longer than all else
    flags = [*SMALL, "--dtype", dtype, "--threads", "1", "--rounds", "2", "--warmup", "0"]
    flags += ["--contestants", *sorted(always | others - {"bound"})]
    files = {"--json": "out.json", "--history": "history.jsonl", "--plot": "bench.png"}
    written = [word for flag, name in files.items() for word in (flag, str(tmp_path / name))]
    assert moe_layer.main([*flags, *written]) == 0
    result, output = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    raced = {row["name"] for row in result["results"]}
    assert always <= raced
    assert raced | set(result["skipped"]) == always | others
    for name in raced - {"bound"}:
        assert set(result["errors"][name]) == {"y", "dx", "drouter", "dw1", "dw2", "dshared_w1", "dshared_w2"}
    for name, reason in result["skipped"].items():
        assert f"{name:<17} skipped: {reason}" in output
    assert all(len(result["seconds"][name]) == 2 for name in raced)
    for row in result["results"]:
        if (most := BUDGET.get(row["name"], {}).get(dtype)) is not None:
            assert row["operations"] <= most, f"{row['name']}: fewer is better; more wants a reason"
        assert row["forward_ms"] + row["backward_ms"] == pytest.approx(row["min_ms"])
    assert json.loads((tmp_path / "history.jsonl").read_text())["results"] == result["results"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.test_all(instead=RACE)
def test_expert_parallel_contestants_match_the_oracle_too(capsys):
    flags = [*SMALL, "--rounds", "2", "--warmup", "0", "--dtype", "fp32"]
    assert expert_parallel.main(flags) == 0  # 1 if one of them gives a wrong answer
    rows = [line for line in capsys.readouterr().out.splitlines() if "e-" in line or "e+" in line]
    assert [float(row.split()[-1]) > 0 for row in rows] == [False, True, True]  # the bound computes no layer


@pytest.mark.test_all(instead=RACE)
def test_a_whole_step_trains_what_transformers_trains_or_does_not_race(capsys, monkeypatch):
    flags = ["--tokens", "64", "--seq-length", "32", "--vocab", "512", "--rounds", "2", "--threads", "1"]
    assert whole_step.main(flags) == 0
    assert "transformers, fp32     " in capsys.readouterr().out
    # Where transformers' gradients are clipped they get the wrong sign; Adam does not see another scale.
    turned = lambda parameters, *_: [one.grad.neg_() for one in parameters]  # noqa: E731
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", turned)
    assert whole_step.main(flags) == 1


def test_no_token_is_a_close_call_the_problem_is_the_same_every_time_and_shapes_have_to_agree():
    shape = Shape(tokens=512, hidden=16, experts=8, topk=2, ffn=4, shared=4)
    first, second = (make_problem(shape, torch.bfloat16, torch.device("cpu"), seed=3) for _ in range(2))
    assert torch.equal(first.x, second.x) and torch.equal(first.w1, second.w1)
    assert not problems._is_close_call(first.x, first.router, 2).any()
    assert Shape().flops == pytest.approx(48.7e9, rel=1e-3)  # as published
    truth = torch.ones(4)
    assert relative_error(torch.full((4,), 1.1), truth) == pytest.approx(0.1, rel=1e-5)
    with pytest.raises(AssertionError):
        relative_error(torch.ones(2, 2), truth)
