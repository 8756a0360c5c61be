"""A researcher's own metric and sink, in a tiny training from outside the package."""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_moe.config.schema import build
from megatron_moe.report import Metric, Sink, StepFacts, register_metric, unregister_metric
from tests.helpers.trained_steps import SMALL, TINY
from tests.report.steps import scalars


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


def trained(names: list[str], flags: dict[str, Any], **broken: Exception) -> tuple[list[tuple[str, Any]], str, str]:
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
    (seen, error, text), (nothing, other_error, _) = gloo.run(2, trained, names=names, flags=flags)
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
    (_, error, _), (_, other, _) = gloo.run(2, trained, names=["failing"], flags={"metrics_file": str(path)})
    assert error == other and "metric failing failed at iteration 3: ZeroDivisionError" in error
    assert len(path.read_text().splitlines()) == 2, "the steps before it are reported"


@pytest.mark.parametrize("broken", ["start", "close"])
def test_what_a_sink_raises_ends_the_run_on_all_ranks(gloo: Any, broken: str) -> None:
    (seen, error, _), (_, other, _) = gloo.run(
        2, trained, names=[], flags={}, **{f"{broken}.side_effect": KeyError("mine")}
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
