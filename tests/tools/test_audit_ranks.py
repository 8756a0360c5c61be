"""--audit-precision in a run: every rank traces, rank 0 reports for all, and the numbers stay what they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.config.schema import Run, replace

FLAGS = {"audit_precision": True, "train_iters": 2}


def traced_step(folder: str, fail_on: int | None = None) -> list[str]:
    """One matrix product under the audit; rank 1's is followed by a promotion."""
    from megatron_moe_tools.audit.step import auditing

    rank = torch.distributed.get_rank()
    told: list[str] = []
    model = torch.nn.Linear(4, 4, bias=False).bfloat16()
    run = replace(Run(), **FLAGS, audit_precision_output=f"{folder}/found")
    try:
        with auditing(run, [model], told.append):
            out = model(torch.ones(4, 4, dtype=torch.bfloat16))
            if rank == 1:
                out = out * torch.ones(4, 4)
            if rank == fail_on:
                raise ArithmeticError("planted")
            out.sum().backward()
    except ArithmeticError:
        told.append("raised")
    return told


def test_what_only_rank_1_mixes_stands_in_the_report_of_rank_0(gloo, tmp_path):
    told = gloo.run(2, traced_step, folder=str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] and found["ranks"] == 2 and found["unintended_promotions"] > 0
    assert {one["rank"] for one in found["unintended_promotion_list"]} == {1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.html", "found.json", "found.txt"]
    assert told[1] == [] and len(told[0]) == 1
    assert told[0][0].startswith(f"wrote {tmp_path}/found.txt") and "FAILED" in told[0][0]


def test_a_rank_whose_step_fails_writes_what_it_saw_and_fails(gloo, tmp_path):
    told = gloo.run(1, traced_step, folder=str(tmp_path), fail_on=0)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["error"]["type"] == "ArithmeticError" and found["failed"]
    assert told[0][-1] == "raised" and told[0][0].startswith("wrote")


def steps(folder: Path, **flags: Any) -> list[dict[str, Any]]:
    from megatron_moe.config import rules
    from megatron_moe.training.run import pretrain
    from megatron_moe_tools import compat
    from megatron_moe_tools.audit.step import auditing

    words = "--preset tiny --mock-data --vocab-size 100 --bf16 --seq-length 16 --global-batch-size 2 --eval-iters 0"
    metrics = folder / f"{len(flags)}.jsonl"
    run = replace(compat.parse([*words.split(), "--metrics-file", str(metrics)]), **{"train_iters": 3, **flags})
    rules.check(run, 1)
    pretrain(run, audit=auditing)
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.usefixtures("one_process")
def test_the_audit_changes_no_number_of_a_run_and_is_left_out_where_one_step_is_left(tmp_path, capsys):
    prefix, checkpoints = str(tmp_path / "deep" / "audit"), str(tmp_path / "checkpoints")
    audit = {"audit_precision": True, "audit_precision_output": prefix}
    plain, audited = steps(tmp_path), steps(tmp_path, **audit, save=checkpoints, save_interval=2)
    assert f"wrote {prefix}.txt, {prefix}.json, {prefix}.html: clean" in capsys.readouterr().out
    numbers = [
        [(one["iteration"], one["loss"], one["grad_norm"]) for one in run if "grad_norm" in one]
        for run in (plain, audited)
    ]
    assert len(numbers[0]) == 3 and numbers[0] == numbers[1]
    found = Path(f"{prefix}.json")
    assert json.loads(found.read_text())["flags"]["audit_precision"] is True
    found.unlink()
    steps(tmp_path, **audit, load=checkpoints, ckpt_step=2)
    assert "only one is left: no audit" in capsys.readouterr().out
    assert not found.exists()
