"""Reports that Megatron-LM's flags ask for: TensorBoard's tags, profiles, and Python's collector by hand."""

import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_moe.report.jsonl import read_evaluations, read_steps
from tests.helpers.trained_steps import SMALL, trained
from tests.report import steps

FLAGS = {**SMALL, "num_layers": 1, "moe_layer_freq": "[1]", "train_iters": 4, "log_interval": 2}
FLAGS |= {"eval_interval": 3, "eval_iters": 1}
TO_TENSORBOARD = [f"log_{what}_to_tensorboard" for what in ("timers", "memory", "validation_ppl", "world_size")]
MEASURED = ["log_params_norm", "log_num_zeros_in_grad", "log_max_attention_logit"]
REPORTS = {"tensorboard_log_interval": 2, "timing_log_level": 1, **dict.fromkeys(TO_TENSORBOARD + MEASURED, True)}
PROFILE = {"profile": True, "use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 3}
PROFILE |= {"profile_ranks": (1,)}


def run(flags: dict[str, Any]) -> dict[str, Any]:
    """A whole run on this rank: its collections as (steps done, generation), and whether Python's collector is on."""
    from megatron_moe.training import loop

    collections: list[tuple[int, Any]] = []
    done, on = [], []
    train_step = loop.train_step

    def counted(*args: Any, **named: Any) -> Any:
        on.append(gc.isenabled())
        result = train_step(*args, **named)
        done.append(result)
        return result

    with (
        mock.patch.object(loop, "train_step", counted),
        mock.patch.object(gc, "collect", lambda generation=2: collections.append((len(done), generation)) or 0),
    ):
        trained({**FLAGS, **flags})
    return {"collections": collections, "on": on, "after": gc.isenabled()}


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    return {tag: dict(points) for tag, points in steps.scalars(folder).items()}


def test_what_megatrons_flags_ask_for_is_in_tensorboard_under_its_tags(gloo: Any, tmp_path: Path) -> None:
    files = {"metrics_file": str(tmp_path / "m.jsonl"), "tensorboard_dir": str(tmp_path / "events")}
    gloo.run(2, run, flags={**files, **REPORTS, **PROFILE, "bf16": True, "use_precision_aware_optimizer": True})
    found, taken = scalars(tmp_path / "events"), {one.iteration: one for one in read_steps(tmp_path / "m.jsonl")}
    assert [n for n, one in taken.items() if (one.params_norm or 0) > 1 and one.num_zeros] == [2, 4]
    for tag, of in {
        "params-norm": lambda one: one.params_norm,
        "num-zeros": lambda one: one.num_zeros,
        "max_attention_logit": lambda one: one.max_attention_logit,
        "world-size": lambda one: 2,
        "iteration-time": lambda one: one.seconds,
        "throughput": lambda one: one.model_tflops,
        "optimizer-time": lambda one: one.timers["optimizer"],
        "mem-max-allocated-bytes": lambda one: one.memory_bytes,
        "loss/train": lambda one: one.loss,
    }.items():
        assert found[tag] == pytest.approx({n: of(taken[n]) for n in (2, 4)}, rel=1e-6), tag
    assert 0 < found["optimizer-time"][2] < found["iteration-time"][2] + found["iteration-time"][4] + taken[1].seconds
    perplexity = {one.iteration: 2.718281828459045**one.loss for one in read_evaluations(tmp_path / "m.jsonl")}
    assert found["lm loss validation ppl"] == pytest.approx(perplexity, rel=1e-6) and len(perplexity) == 2
    # The profile: steps 2 and 3, of rank 1 alone.
    (trace,) = (tmp_path / "events").glob("*.pt.trace.json")
    assert trace.name == "rank1.steps2-3.pt.trace.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("station: commit") == 2 and "station: route" in names


def test_heads_that_qk_clip_scales_are_counted_where_it_is_on(gloo: Any, tmp_path: Path) -> None:
    clip = {"optimizer": "muon", "qk_clip": True, "qk_clip_threshold": 1e-6, "tensorboard_dir": str(tmp_path)}
    gloo.run(1, run, flags={**clip, "metrics_file": str(tmp_path / "m.jsonl")})
    taken = list(read_steps(tmp_path / "m.jsonl"))
    counted = {one.iteration: one.clipped_heads for one in taken}
    assert counted[1] == 4 and len(counted) == 4
    assert scalars(tmp_path)["optimizer/clipped_heads"] == counted
    assert all((one.max_attention_logit > 1e-6) == (one.clipped_heads > 0) for one in taken)


def test_without_the_flags_there_is_none_of_it(gloo: Any, tmp_path: Path) -> None:
    (ran,) = gloo.run(1, run, flags={"tensorboard_dir": str(tmp_path)})
    assert ran == {"collections": [], "on": [True] * 4, "after": True}
    found = scalars(tmp_path)
    assert all("/" in tag for tag in found) and set(found["loss/train"]) == {1, 2, 3, 4}
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("flags", "collections"),
    [({"manual_gc_interval": 3}, [(0, 2), (3, 2), (3, 2), (3, 0)]), ({"manual_gc_eval": False}, [(0, 2)])],
)
def test_python_collects_where_the_flags_say(gloo: Any, flags: dict[str, Any], collections: list[Any]) -> None:
    (ran,) = gloo.run(1, run, flags={"manual_gc": True, **flags})
    # And around the evaluation at the end, which Megatron-LM's flag is about too.
    at_end = [(4, 2), (4, 0)] if flags.get("manual_gc_eval", True) else []
    assert ran == {"collections": [*collections, *at_end], "on": [False] * 4, "after": True}
