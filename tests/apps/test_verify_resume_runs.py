"""tools/verify_resume.py replays what a run recorded, on ranks that it starts itself."""

from __future__ import annotations

import json
import math

import pytest

from megatron_moe.apps.verify_resume import cli
from megatron_moe.io.program import USER_ERROR
from tests.helpers import reshard_cases as cases

pytestmark = pytest.mark.engine


def test_recorded_steps_are_replayed_to_the_bit_and_a_wrong_bit_is_found(gloo, tmp_path, capsys, monkeypatch):
    save, report = tmp_path / "steps", tmp_path / "verified.json"
    flags = {"data_path": (cases.corpus(tmp_path),), "train_iters": 4, "save_interval": 2, "hidden_dropout": 0.1}
    gloo.run(1, cases.trained, flags={**flags, "bf16": True, "save": str(save), "rampup_batch_size": (4, 4, 8)})
    before = sorted(path.name for path in save.rglob("*"))

    # the ranks of a replay know nothing of this process's
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    replays = []
    replay = cli.records_of
    monkeypatch.setattr(cli, "records_of", lambda *given: replays.append(replay(*given)) or replays[-1])
    assert cli.main([str(save), "--json", str(report)]) == cli.EQUAL
    assert "2 steps after step 2, compared to the bit: all agree" in capsys.readouterr().out
    told = json.loads(report.read_text())
    assert told["agrees"] and told["to_the_bit"] and [step["iteration"] for step in told["steps"]] == [3, 4]
    assert sorted(path.name for path in save.rglob("*")) == before

    off = dict(replays[0][1])
    off["loss_hex"] = math.nextafter(float.fromhex(off["loss_hex"]), 0.0).hex()
    monkeypatch.setattr(cli, "records_of", lambda *given: [replays[0][0], off])
    assert cli.main([str(save)]) == cli.DIFFERENT
    assert "WRONG: loss" in capsys.readouterr().out
    assert cli.main([str(tmp_path / "none")]) == USER_ERROR
    assert cli.main([str(save), "--steps", "0"]) == USER_ERROR
    # a flag that the run would refuse is refused before anything starts
    assert cli.main([str(save), "--moe-router-topk", "99"]) == USER_ERROR
    assert cli.main([str(save), "--no-such-flag"]) == USER_ERROR
