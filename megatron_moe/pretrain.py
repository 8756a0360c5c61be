"""The entry of a training run: read the command line, refuse what cannot work, train.

    torchrun --nproc-per-node 2 -m megatron_moe.pretrain --preset tiny --mock-data --vocab-size 1000 --train-iters 20

Exit status: 0 done, or stopped and saved on request; 1 a fault of the run, printed once; 2 a mistake in the flags or
files, printed once; 130 Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_moe.config import cli, rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import launched_world, local_world_size, rank_that_prints, require_rendezvous
from megatron_moe.config.schema import Run, replace
from megatron_moe.engine import defects
from megatron_moe.hf.config import filled_in
from megatron_moe.io import launched
from megatron_moe.io.program import DONE, end_interrupted, run_program, say, stage
from megatron_moe.platform import env_vars
from megatron_moe.precision import table
from megatron_moe.report.console import legend_text
from megatron_moe.training.signals import die_with_launcher

if TYPE_CHECKING:
    from megatron_moe.report.reporter import MakePageSink
    from megatron_moe.training.callbacks.checks import StepAudit


Parse = Callable[[list[str], int], Run]
"""Reads a command line for a number of ranks."""


def parse(argv: list[str], world_size: int) -> Run:
    """Return the run of a command line in our own flags."""
    return cli.parse(argv, filled_in)


def main(
    argv: list[str],
    parse: Parse = parse,
    load_audit: Callable[[], StepAudit] | None = None,
    page_sink: MakePageSink | None = None,
) -> int:
    """Run one rank and return the exit status; every rank of a run calls this with the same arguments.

    Args:
        parse: may read other flags, too.
        load_audit: loads what traces a step for `--audit-precision`, which the trainer has not.
        page_sink: makes the sink of `--report-file`, which the trainer has not.
    """
    die_with_launcher()
    return run_program(launched.name(), lambda flags: _main(flags, parse, load_audit, page_sink), argv)


def _main(
    argv: list[str], parse: Parse, load_audit: Callable[[], StepAudit] | None, page_sink: MakePageSink | None
) -> int:
    try:
        rank, world_size = launched_world()
        run = checked(argv, world_size, local_world_size(world_size), parse)
        if run is None:
            return DONE
        require_rendezvous(world_size)
        env_vars.let_segments_grow()
        ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
        # The launcher has said what it starts.
        stage("loading torch and the engine" if launched.folder() else f"{ranks}, loading torch and the engine")
        from megatron_moe.training.run import pretrain

        if run.faults.warm_restarts is not None:
            from megatron_moe.training.warm_restart import supervised

            if (status := supervised(run, rank, world_size)) is not None:
                return status
            die_with_launcher()
            run = replace(run, warm_restarts=None)
        audit = load_audit() if load_audit is not None and run.precision.audit_precision else None
        pretrain(run, audit=audit, stage=stage, page_sink=page_sink)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_interrupted()
    return DONE


def checked(argv: list[str], world_size: int, ranks_here: int | None, parse: Parse = parse) -> Run | None:
    """Return the run of a command line that can work on so many ranks, without loading torch, which takes seconds.

    `ranks_here` is how many of them this machine has, None where that is not known.

    None: the flags ask for a table or a list, which rank 0 has printed.

    Raises:
        ConfigError: a mistake in the flags, or in files or settings of this machine.
    """
    run = parse(argv, world_size)
    if run.logging.log_legend:
        if rank_that_prints() == 0:
            say(legend_text())
        return None
    if run.precision.print_precision or run.logging.list_advisories:
        rules.check_model(run, world_size)
        if rank_that_prints() == 0:
            asked_for_table = run.precision.print_precision
            say(table.text(run) if asked_for_table else defects.text(run, defects.engine_version()))
        return None
    rules.check(run, world_size)
    if run.training.skip_train and not run.training.eval_iters:  # a program may have callbacks that look at the model
        raise ConfigError(
            "--skip-train, --eval-iters 0: nothing would be trained or evaluated; use --eval-iters 10, or drop "
            "--skip-train"
        )
    from megatron_moe.training.plan import check_start

    check_start(run, world_size, ranks_here)
    return run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
