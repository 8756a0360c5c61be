"""Audit one pass under the tracer: forward and backward of any torch module, or a training step of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_moe import platform
from megatron_moe.config.schema import Run, flatten
from megatron_moe.data.batches import batch_iterators
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.io.files import replace_text
from megatron_moe.model.build import build_model
from megatron_moe.optim.optimizer import build_optimizer, build_scheduler
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.report.run_info import versions
from megatron_moe.training.batch_size import batch_schedule
from megatron_moe.training.state_checks import optimizer_dtypes
from megatron_moe.training.step import connect, train_step
from megatron_moe_tools.audit.findings import COUNTED, FINDING_LISTS, TOP_COUNTS, Audit, summary_line
from megatron_moe_tools.audit.report import html_report, json_report, text_report
from megatron_moe_tools.audit.tracer import Tracer


def audit_module(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    about: dict[str, Any] | None = None,
) -> Audit:
    """Trace one forward and backward pass of `module(*args, **kwargs)` and return the audit.

    The backward pass starts from the output's `loss` if it has one, else from the sum, in fp32, of all outputs that
    have a graph. What the module raises is in the audit's `error`; KeyboardInterrupt and the like are passed on.

    Args:
        module: any torch module.
        args: positional arguments of its forward pass.
        kwargs: keyword arguments of its forward pass.
        about: facts for the report's head, such as `subject` and `dtype`.
    """
    tracer = Tracer(module, about)
    try:
        with tracer:
            output = module(*args, **(kwargs or {}))
            loss = getattr(output, "loss", None)
            outputs = [loss] if loss is not None else [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            total = [value.float().sum() for value in outputs if value.requires_grad]
            if total:
                torch.stack(total).sum().backward()
    except Exception:  # recorded by the tracer: the report says what was raised, and where
        assert tracer.audit.error is not None
    return tracer.audit


# A run: one training step, by itself or inside a training process.


def audit_run(run: Run, report: Callable[[str], None] = print) -> Audit:
    """Build the run's model in this process and trace one training step of it.

    Args:
        run: a run that has passed `config.rules.check` for one rank.
        report: called with lines of progress.

    Returns:
        The audit; an exception of the step is in its `error`.
    """
    schedule = batch_schedule(run, 1)
    tokenizer = build_tokenizer(run.data, run.model.vocab_size)
    vocab_size = run.model.vocab_size or tokenizer.vocab_size
    vocabulary = run.derived.padded_vocab_size(vocab_size)
    clean = False
    try:
        pg_collection = groups.initialize(run)
        seed_everything(run)
        report(f"building {run.derived.parameter_count(vocabulary):,} parameters in {run.derived.params_dtype_name}")
        model = build_model(run, pg_collection, vocab_size)
        optimizer = build_optimizer(run, model, pg_collection)
        scheduler = build_scheduler(run, optimizer)
        dataset, _, _ = build_datasets(run, tokenizer, 2 * schedule.final, 0, 0, pg_collection=pg_collection)
        batches = batch_iterators(dataset, run, consumed_samples=0, pg_collection=pg_collection)
        connect(model, optimizer)
        micro_batches = schedule.num_micro_batches(0)
        report(
            f"tracing the second of two steps: {micro_batches} micro-batches of {run.training.micro_batch_size} x "
            f"{run.model.seq_length} tokens"
        )
        step = partial(
            train_step,
            model,
            optimizer,
            scheduler,
            batches,
            num_micro_batches=micro_batches,
            micro_batch_size=run.training.micro_batch_size,
            seq_length=run.model.seq_length,
            pg_collection=pg_collection,
        )
        # The first step pays for what a process does once, which would count as the cost of the operation that comes
        # first. If this step fails, the traced one fails in the same way and is reported.
        with suppress(Exception):
            step()
        tracer = Tracer(model, facts(run), lambda: optimizer_dtypes(run, model, optimizer))
        try:
            with tracer:
                result = step()
            tracer.audit.about["step_committed"] = result.committed
        except Exception:  # recorded by the tracer
            assert tracer.audit.error is not None
        clean = tracer.audit.error is None
        return tracer.audit
    finally:
        groups.destroy(abort=not clean)


@contextmanager
def auditing(run: Run, model: list[torch.nn.Module], report: Callable[[str], None]) -> Iterator[None]:
    """Trace the step in this context and write the report of all ranks to `--audit-precision-output`.

    Every rank traces. Counts are summed and findings gathered over ranks; modules, cast list and shares are rank 0's.
    A rank whose step fails writes its own report, since the others may not answer any more, and raises the error.

    Args:
        run: the run that is trained.
        model: its model chunks on this rank.
        report: called with a line about the files that were written.
    """
    tracer = Tracer(model, facts(run))
    prefix = run.precision.audit_precision_output
    try:
        with tracer:
            yield
    except Exception:
        rank = dist.get_rank()
        paths = write(tracer.audit.as_dict(), f"{prefix}.rank{rank}" if rank else prefix)
        report(f"wrote {', '.join(map(str, paths))}: the traced step failed")
        raise
    merged = merge(tracer.audit)
    if dist.get_rank() == 0:
        paths = write(merged, prefix)
        report(f"wrote {', '.join(map(str, paths))}: {merged['verdict']}")


def merge(audit: Audit) -> dict[str, Any]:
    """Return, on every rank, this rank's report with the counts and findings of all ranks."""
    own = audit.as_dict()
    world = dist.get_world_size()
    reports: list[Any] = [None] * world
    dist.all_gather_object(reports, {name: own[name] for name in ("counts", "failed", *FINDING_LISTS)})
    totals = {name: sum(report["counts"][name] for report in reports) for name in COUNTED}
    merged = {
        **own,
        "ranks": world,
        "failed": any(report["failed"] for report in reports),
        **{name: totals[name] for name in own if name in TOP_COUNTS},
        "counts": totals,
    }
    for name in FINDING_LISTS:
        merged[name] = [{**entry, "rank": rank} for rank, report in enumerate(reports) for entry in report[name]]
    return {**merged, "verdict": summary_line(merged)}


def write(report: dict[str, Any], prefix: str) -> list[Path]:
    """Write PREFIX.txt, PREFIX.json and PREFIX.html, each in one atomic step."""
    texts = {".txt": text_report(report), ".json": json_report(report), ".html": html_report(report)}
    paths = []
    for suffix, text in texts.items():
        paths.append(Path(prefix + suffix))
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        replace_text(paths[-1], text)
    return paths


def facts(run: Run) -> dict[str, Any]:
    """Return the report's head: what was traced, with which flags and versions."""
    flags, defaults = flatten(run), flatten(Run())
    return {
        "subject": "one training step of megatron_moe",
        "dtype": run.derived.params_dtype_name,
        "device": str(platform.device()),
        "flags": {name: value for name, value in flags.items() if value != defaults[name]},
        "versions": versions(),
    }
