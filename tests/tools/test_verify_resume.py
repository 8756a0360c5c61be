"""Which recorded steps are replayed, when a replay agrees with its record, and one that a run has recorded."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe.io.files import write_json
from megatron_moe.io.program import USER_ERROR
from megatron_moe.io.source_version import source_version
from megatron_moe_tools import verify_resume as tool
from megatron_moe_tools.verify_resume import compare, plan_replay, report_lines
from tests.checkpoint import reshard_cases as cases

RUN = replace(Run(), mock_data=True, vocab_size=99, train_iters=9, micro_batch_size=2, save="x", metrics_file="m.jsonl")


def record(iteration: int, **changes: Any) -> dict[str, Any]:
    return {
        "iteration": iteration, "consumed_samples": 8 * iteration, "global_batch_size": 8, "skipped": False,
        "loss_hex": (5.0 - iteration / 10).hex(), "grad_norm_hex": (1.5).hex(), "learning_rate_hex": (1e-3).hex(),
        "loss_scale_hex": (1.0).hex(), "data_hash": f"{iteration:016x}", "expert_bias_hash": f"{iteration:08x}" * 2,
        **changes,
    }  # fmt: skip


def save(root: Path, iteration: int, run: Run = RUN, ranks: int = 4, records: list[dict] | None = None) -> Path:
    """A step with nothing but its small files, whose run has recorded every step."""
    step = folder.step_folder(root, iteration)
    step.mkdir(parents=True)
    kept = [record(number) for number in range(1, iteration + 1)] if records is None else records
    state = {"iteration": iteration, "layout": {"world_size": ranks}, "device": "cpu", "versions": {}, "records": kept}
    files = {
        name: write_json(step / name, said) for name, said in ((folder.CONFIG, flatten(run)), (folder.STATE, state))
    }
    manifest.write(step, iteration, files)
    return step


def test_the_newest_step_with_records_behind_it_is_replayed_as_its_run_was(tmp_path):
    for iteration in (3, 5, 8):
        save(tmp_path, iteration)
    replay = plan_replay(tmp_path)
    assert (replay.begin, replay.steps, replay.ranks, sorted(replay.recorded)) == (5, 3, 4, [6, 7, 8])
    assert replay.differences == ()
    run = replay.run
    assert (run.checkpoint.load, run.checkpoint.ckpt_step, run.training.exit_interval) == (str(tmp_path), 5, 8)
    # nothing is written, and a batch that followed from the ranks is theirs
    assert (run.checkpoint.save, run.logging.metrics_file, run.training.eval_iters) == (None, None, 0)
    assert run.training.global_batch_size == 2 * 4
    assert plan_replay(tmp_path / "iter_0000003").steps == 5
    assert plan_replay(tmp_path, begin=3, steps=2).recorded.keys() == {4, 5}


def test_a_step_that_is_damaged_is_neither_replayed_nor_believed(tmp_path):
    for iteration in (3, 5, 8):
        save(tmp_path, iteration)
    state = tmp_path / "iter_0000008" / folder.STATE
    state.write_bytes(state.read_bytes().replace(b"8", b"9", 1))
    assert plan_replay(tmp_path).begin == 3


def test_what_cannot_be_verified_is_refused_by_name(tmp_path):
    def refused(match: str, **asked: int) -> None:
        with pytest.raises(ConfigError, match=match):
            plan_replay(tmp_path, **asked)

    refused("no complete checkpoint")
    save(tmp_path, 3)
    refused("--metrics-file")
    save(tmp_path, 5)
    refused("no step after 5 is recorded", begin=5)
    refused("no complete step", begin=4)
    refused("only 2 steps after step 3", begin=3, steps=3)
    save(tmp_path, 7, records=[record(5, loss_hex=(1.0).hex())])
    refused("record step 5 otherwise: loss_hex")


def test_a_replay_ends_where_another_run_went_on(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 5)
    save(tmp_path, 8, replace(RUN, lr=0.5))
    assert plan_replay(tmp_path, begin=3).recorded.keys() == {4, 5}
    # a longer run is not another one
    save(tmp_path, 9, replace(RUN, lr=0.5, train_iters=12))
    assert plan_replay(tmp_path, begin=5).recorded.keys() == {6, 7, 8, 9}


def test_a_changed_layout_is_told_and_a_run_that_draws_cannot_change_it(tmp_path):
    for iteration in (3, 5):
        save(tmp_path, iteration)
    replay = plan_replay(tmp_path, ranks=2, changes={"tensor_model_parallel_size": 2, "micro_batch_size": 2})
    assert replay.differences == ("--tensor-model-parallel-size: 1 -> 2", "ranks: 4 -> 2")
    save(tmp_path, 7, replace(RUN, hidden_dropout=0.1))
    assert plan_replay(tmp_path).begin == 5
    with pytest.raises(ConfigError, match="--hidden-dropout 0.1, which draws other numbers with ranks: 4 -> 2"):
        plan_replay(tmp_path, ranks=2)
    # which draws the same numbers
    assert plan_replay(tmp_path, changes={"deterministic_mode": True}).differences == (
        "--deterministic-mode: False -> True",
    )


@pytest.fixture
def replay(tmp_path):
    for iteration in (3, 5):
        save(tmp_path, iteration)
    return plan_replay(tmp_path)


@pytest.mark.parametrize("name", sorted(set(record(4)) - {"iteration"}))
def test_one_other_bit_in_any_value_is_found_on_the_same_layout(replay, name):
    wrong = {"loss_hex": math.nextafter(4.6, 5).hex(), "grad_norm_hex": "nan", "skipped": True}
    changed = record(4, **{name: wrong.get(name, record(6)[name] if name.endswith("hash") else (7.0).hex())})
    good, bad = compare(replay, [record(4), record(5)], []), compare(replay, [changed, record(5)], [])
    assert [finding.wrong for finding in good] == [[], []]
    assert [len(finding.wrong) for finding in bad] == [1, 0]
    assert "WRONG" in "\n".join(report_lines(replay, bad, [])) and "1 DIFFER" in report_lines(replay, bad, [])[-1]


def test_on_another_layout_sums_may_differ_by_rounding_and_data_may_not(replay):
    rounded = {"loss_hex": (4.6 * (1 + 1e-7)).hex(), "grad_norm_hex": (1.5 * (1 + 1e-6)).hex()}
    near = compare(replay, [record(4, **rounded, expert_bias_hash="other"), record(5)], ["ranks"])
    assert not any(finding.wrong for finding in near)
    assert "within tolerances, because of ranks: all agree" in report_lines(replay, near, ["ranks"])[-1]
    for far in ({"loss_hex": (4.6001).hex()}, {"grad_norm_hex": (1.51).hex()}, {"loss_hex": "nan"}, {"data_hash": "0"}):
        assert compare(replay, [record(4, **far), record(5)], ["ranks"])[0].wrong, far
    assert compare(replay, [record(4)], ["ranks"])[1].wrong == ["was not replayed"]


def test_not_a_number_is_equal_to_itself(tmp_path):
    skipped = record(4, loss_hex="nan", grad_norm_hex="nan", skipped=True, expert_bias_hash=None)
    save(tmp_path, 3)
    save(tmp_path, 4, records=[skipped])
    replay = plan_replay(tmp_path)
    assert not any(compare(replay, [skipped], difference)[0].wrong for difference in ([], ["ranks"]))
    assert compare(replay, [record(4)], ["ranks"])[0].wrong


def test_on_cuda_bits_are_compared_with_the_deterministic_mode_alone_and_other_versions_excuse_other_bits():
    state = {"versions": {"torch": "2.1", "numpy": "2.0"}}
    now = {"torch": "2.2", "numpy": "2.0", "python": "3.11"}
    assert tool.version_differences({"versions": {**state["versions"], **source_version()}}, now) == [
        "torch 2.1 -> 2.2"
    ]
    (ours, _) = tool.version_differences(state, now)  # of a version that did not record itself
    assert ours.startswith("another version: megatron-moe unknown (no commit on record) -> ")
    settings = {"device": "H100", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    recorded = {"arithmetic": settings}
    assert tool.arithmetic_differences(recorded, settings, deterministic=True) == []
    assert tool.arithmetic_differences(recorded, settings, deterministic=False) == ["CUDA without --deterministic-mode"]
    other = {**settings, "device": "H200", "NCCL_ALGO": "Tree"}
    told = ["device: H100 -> H200", "NCCL_ALGO: Ring -> Tree"]
    assert tool.arithmetic_differences(recorded, other, deterministic=True) == told
    assert tool.arithmetic_differences({}, settings, deterministic=True)[0] == "device: unknown -> H100"


@pytest.mark.engine
def test_recorded_steps_are_replayed_to_the_bit_and_a_wrong_bit_is_found(gloo, tmp_path, capsys, monkeypatch):
    save, report = tmp_path / "steps", tmp_path / "verified.json"
    flags = {"data_path": (cases.corpus(tmp_path),), "train_iters": 4, "save_interval": 2, "hidden_dropout": 0.1}
    gloo.run(1, cases.trained, flags={**flags, "bf16": True, "save": str(save), "rampup_batch_size": (4, 4, 8)})
    before = sorted(path.name for path in save.rglob("*"))

    # the ranks of a replay know nothing of this process's
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    replays = []
    replay = tool.records_of
    monkeypatch.setattr(tool, "records_of", lambda *given: replays.append(replay(*given)) or replays[-1])
    assert tool.main([str(save), "--json", str(report)]) == tool.EQUAL
    assert "2 steps after step 2, compared to the bit: all agree" in capsys.readouterr().out
    told = json.loads(report.read_text())
    assert told["agrees"] and told["to_the_bit"] and [step["iteration"] for step in told["steps"]] == [3, 4]
    assert sorted(path.name for path in save.rglob("*")) == before

    off = dict(replays[0][1])
    off["loss_hex"] = math.nextafter(float.fromhex(off["loss_hex"]), 0.0).hex()
    monkeypatch.setattr(tool, "records_of", lambda *given: [replays[0][0], off])
    assert tool.main([str(save)]) == tool.DIFFERENT
    assert "WRONG: loss" in capsys.readouterr().out
    # a flag that the run would refuse is refused before anything starts
    for words in ([tmp_path / "none"], [save, "--steps", 0], [save, "--moe-router-topk", 99], [save, "--no-such-flag"]):
        assert tool.main([*map(str, words)]) == USER_ERROR
