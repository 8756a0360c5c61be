"""What is told about a step."""

import contextlib
import gc
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.data.batches import NOTHING
from megatron_moe.report import Metric, Sink, StepFacts, register_metric, unregister_metric
from megatron_moe.report.jsonl import read_evaluations, read_steps
from megatron_moe.report.records import SourceStep
from megatron_moe.training.finalize_model_grads import RouterUpdate
from megatron_moe.training.metrics import NO_EXPERT_LOAD, Meter, expert_load
from megatron_moe.training.step import StepResult
from tests.helpers.trained_steps import SMALL, TINY, trained
from tests.report import steps
from tests.report.steps import scalars

UPDATE = RouterUpdate(
    layer_numbers=(2, 3),
    tokens_per_expert=(torch.tensor([2, 2, 2, 2]), torch.tensor([6, 2, 0, 0])),
    expert_bias=(torch.tensor([0.1, -0.4, 0.0, 0.2]), None),
    aux_losses=({"aux_loss": torch.tensor(1.0)}, {"aux_loss": torch.tensor(3.0), "z_loss": torch.tensor(5.0)}),
    dropped_per_expert=(None, torch.tensor([3, 1, 0, 0])),
    bias_error=(torch.tensor(0.25), None),
)
ONE_STAGE = SimpleNamespace(pp=SimpleNamespace(size=lambda: 1))
RUN = build({**PRESETS["tiny"], "train_iters": 100, "peak_tflops": 2.0})


NUMBERS: dict[str, Any] = {"loss_sum": 2.5 * 512, "token_sum": 512, "grad_norm": 1.5, "learning_rate": 1e-3}
NUMBERS |= {"loss_scale": 1.0, "next_loss_scale": 1.0, "overflows": 0, "non_finite_ranks": 0, "damaged_ranks": 0}
NUMBERS |= {"sample_words": NOTHING, "bias_words": NOTHING, "mtp_sums": ()}
RESULT = StepResult(router_update=UPDATE, **NUMBERS)


SAMPLES = {"consumed_samples": 8, "global_batch_size": 8}


def record(meter: Meter, iteration: int, seconds: float):
    return meter.record(RESULT, NO_EXPERT_LOAD, iteration=iteration, seconds=seconds, **SAMPLES)


def test_expert_load_tells_the_worst_layer_the_empty_experts_and_the_largest_bias():
    load = expert_load(UPDATE, ONE_STAGE)
    assert load.tokens_per_expert == {2: [2, 2, 2, 2], 3: [6, 2, 0, 0]}
    assert (load.worst, load.empty) == (3.0, 2)
    assert load.expert_bias_max == pytest.approx(0.4)
    assert load.aux_losses == {"aux_loss": 2.0, "z_loss": 5.0}
    assert load.dropped_per_expert == {3: [3, 1, 0, 0]}
    assert (NO_EXPERT_LOAD.worst, NO_EXPERT_LOAD.empty) == (None, None)


def staged() -> list[dict]:
    """Rank 0 holds layer 2, rank 1 layer 3, as two pipeline stages do."""
    rank = torch.distributed.get_rank()
    mine = RouterUpdate(*(tuple(field[rank : rank + 1]) for field in vars(UPDATE).values()))
    load = expert_load(mine, SimpleNamespace(pp=torch.distributed.group.WORLD))
    return [
        load.tokens_per_expert,
        load.expert_bias_max,
        load.aux_losses,
        load.dropped_per_expert,
        load.expert_bias_error,
    ]


def test_the_layers_of_all_pipeline_stages_are_told(gloo):
    whole = expert_load(UPDATE, ONE_STAGE)
    expected = [whole.tokens_per_expert, whole.expert_bias_max, whole.aux_losses, whole.dropped_per_expert, 0.25]
    assert gloo.run(2, staged) == [expected, expected]


def test_rates_are_the_jobs_and_flops_the_devices():
    meter = Meter(RUN, world_size=4, padded_vocab_size=384)
    step = record(meter, 1, seconds=0.5)
    assert (step.tokens, step.tokens_per_second) == (8 * 64, 1024.0)
    tflops = RUN.derived.flops_per_token(384) * 1024.0 / 4 / 1e12
    assert step.model_tflops == pytest.approx(tflops) and step.mfu == pytest.approx(tflops / 2.0)
    for length in (64, 16):  # 512 tokens in equally long documents
        of_documents = replace(RESULT, attended_pairs=512 * (length + 1) / 2)
        step = meter.record(of_documents, NO_EXPERT_LOAD, iteration=1, seconds=0.5, **SAMPLES)
        tflops = RUN.derived.flops_per_token(384, length / 2) * 1024.0 / 4 / 1e12
        assert step.model_tflops == pytest.approx(tflops)
    padded = meter.record(replace(of_documents, padding=128), NO_EXPERT_LOAD, iteration=1, seconds=0.5, **SAMPLES)
    assert (padded.tokens, padded.tokens_per_second) == (384, 768.0)
    assert RUN.derived.flops_per_token(384) == RUN.derived.flops_per_token(384, 32) > tflops * 1e12 * 4 / 1024


def test_a_source_without_a_token_in_the_step_has_no_loss():
    result = replace(RESULT, source_sums=(3.0, 0.0, 2.0, 0.0))
    passes = {"web": 0.5, "rare": 1.25}
    step = Meter(RUN, world_size=1, padded_vocab_size=384).record(
        result, NO_EXPERT_LOAD, iteration=1, seconds=0.5, epochs=passes, **SAMPLES
    )
    assert step.sources == {"web": SourceStep(1.5, 2, 0.5), "rare": SourceStep(None, 0, 1.25)}


def test_a_slow_first_step_does_not_count_for_the_time_left():
    meter = Meter(RUN, world_size=1, padded_vocab_size=384)
    assert record(meter, 1, seconds=10.0).seconds_left == pytest.approx(990.0)
    assert record(meter, 2, seconds=1.0).seconds_left == pytest.approx(98.0)
    assert record(meter, 3, seconds=2.0).seconds_left == pytest.approx(97 * 1.5)
    assert record(meter, 100, seconds=1.0).seconds_left == 0.0


# ---- reports that Megatron-LM's flags ask for: TensorBoard's tags, profiles, and Python's collector by hand


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


def by_tag(folder: Path) -> dict[str, dict[int, float]]:
    return {tag: dict(points) for tag, points in steps.scalars(folder).items()}


def test_what_megatrons_flags_ask_for_is_in_tensorboard_under_its_tags(gloo: Any, tmp_path: Path) -> None:
    files = {"metrics_file": str(tmp_path / "m.jsonl"), "tensorboard_dir": str(tmp_path / "events")}
    gloo.run(2, run, flags={**files, **REPORTS, **PROFILE, "bf16": True, "use_precision_aware_optimizer": True})
    found, taken = by_tag(tmp_path / "events"), {one.iteration: one for one in read_steps(tmp_path / "m.jsonl")}
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
    assert by_tag(tmp_path)["optimizer/clipped_heads"] == counted
    assert all((one.max_attention_logit > 1e-6) == (one.clipped_heads > 0) for one in taken)


def test_without_the_flags_there_is_none_of_it(gloo: Any, tmp_path: Path) -> None:
    (ran,) = gloo.run(1, run, flags={"tensorboard_dir": str(tmp_path)})
    assert ran == {"collections": [], "on": [True] * 4, "after": True}
    found = by_tag(tmp_path)
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


# ---- a researcher's own metric and sink, in a tiny training from outside the package


def top_share(facts: StepFacts) -> float | None:
    """The share of the tokens' choices that the most loaded expert of any layer got."""
    shares = [max(counts) / sum(counts) for counts in facts.load.tokens_per_expert.values()]
    return max(shares, default=None)


def failing(facts: StepFacts) -> float:
    """Fails at step 3, on rank 1 where there is one."""
    import torch

    own_turn = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    return 1.0 / 0.0 if facts.iteration == 3 and own_turn else 1.0


COMPUTED = {"top_share": top_share, "failing": failing, "not_a_number": lambda facts: float("nan")}


KEPT: dict[str, Callable[..., Any]] = {
    "start": lambda facts: facts["train_iters"],
    "step": lambda record: (record.iteration, getattr(record, "top_share", None)),
    "close": lambda summary: None if summary is None else summary["iterations"],
}
"""What is kept of an event of a sink, by its name."""


def run_with(names: list[str], flags: dict[str, Any], **broken: Exception) -> tuple[list[tuple[str, Any]], str, str]:
    """A run with metrics of its own and a sink: what the sink got, the error that ended it, and what it prints."""
    from megatron_moe.config.errors import RunFault
    from megatron_moe.training.run import pretrain

    for name in names:
        shown = {"console": name + " {:.3f}", "tensorboard": f"own/{name}"}
        register_metric(Metric(name, unit="share", compute=COMPUTED[name], **shown))
    sink, stream, error = mock.Mock(spec=Sink, **broken), io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(stream):
            short = {"train_iters": 4, "eval_iters": 1, "log_interval": 2}
            pretrain(build({**TINY, **SMALL, **short, **flags}), also=[sink])
    except RunFault as fault:
        error = str(fault)
    finally:
        for name in names:
            unregister_metric(name)
    seen = [(name, KEPT[name](*given) if name in KEPT else None) for name, given, _ in sink.mock_calls]
    return seen, error, stream.getvalue()


def test_a_metric_and_a_sink_of_a_program_get_what_a_run_does(gloo: Any, tmp_path: Path) -> None:
    files = {"metrics_file": str(tmp_path / "metrics.jsonl"), "tensorboard_dir": str(tmp_path / "events")}
    flags = {**files, "save": str(tmp_path / "checkpoints")}
    names = ["top_share", "not_a_number"]
    (seen, error, text), (nothing, other_error, _) = gloo.run(2, run_with, names=names, flags=flags)
    assert error == other_error == "" and nothing == [], "a sink gets the events on rank 0"

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["tokens_per_expert"]]
    assert [line["iteration"] for line in counted] == [2, 4], "counts are gathered at logged steps"
    for line in lines:
        layers = line["tokens_per_expert"].values()
        assert line["top_share"] == max((max(counts) / sum(counts) for counts in layers), default=None)
        assert line["not_a_number"] is None

    shares = [(line["iteration"], line["top_share"]) for line in lines]
    assert [what for kind, what in seen if kind == "step"] == shares
    kinds = [kind for kind, _ in seen]
    assert kinds[0] == "start" and kinds[-1] == "close" and {"evaluation", "flush"} <= set(kinds)
    assert seen[0] == ("start", 4) and seen[-1] == ("close", 4)

    logged = [line for line in text.splitlines() if " iteration " in line]
    assert len(logged) == 3 and "top_share" not in logged[0]
    for of_step, line in zip(logged[1:], counted, strict=True):
        assert f"| top_share {line['top_share']:.3f} |" in of_step

    assert scalars(tmp_path / "events")["own/top_share"] == [
        (line["iteration"], pytest.approx(line["top_share"])) for line in counted
    ]


def test_a_metric_that_fails_on_one_rank_ends_the_run_on_all_by_its_name(gloo: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    (_, error, _), (_, other, _) = gloo.run(2, run_with, names=["failing"], flags={"metrics_file": str(path)})
    assert error == other and "metric failing failed at iteration 3: ZeroDivisionError" in error
    assert len(path.read_text().splitlines()) == 2, "the steps before it are reported"


@pytest.mark.parametrize("broken", ["start", "close"])
def test_what_a_sink_raises_ends_the_run_on_all_ranks(gloo: Any, broken: str) -> None:
    (seen, error, _), (_, other, _) = gloo.run(
        2, run_with, names=[], flags={}, **{f"{broken}.side_effect": KeyError("mine")}
    )
    assert error == other == f"the sink's Mock.{broken} failed: KeyError: 'mine' (rank 0)" and seen[-1][0] == broken


def documented(line: str) -> str:
    """What the program of docs/reference/metrics.md prints, with another command line."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    (program,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pretrain(" in code)
    stream = io.StringIO()
    try:
        with contextlib.redirect_stdout(stream):
            exec(re.sub(r'parse\(".*?"', f'parse("{line}"', program), {"__name__": "documented"})
    finally:
        unregister_metric("top_share")
    return stream.getvalue()


def test_the_program_of_the_documentation_runs(gloo: Any) -> None:
    small = "--preset tiny --mock-data --vocab-size 100 --seq-length 16 --train-iters 2 --eval-iters 0 --log-interval 1"
    (text,) = gloo.run(1, documented, line=small)
    logged = [line for line in text.splitlines() if " iteration " in line]
    assert len(logged) == 2 and all("| top 0." in line for line in logged)
    assert [line.split()[0] for line in text.splitlines() if line[:2] in ("1 ", "2 ")] == ["1", "2"]
