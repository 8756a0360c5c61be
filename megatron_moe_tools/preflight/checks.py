"""The list of checks, and how they run: on every rank, once on every node, or by all ranks together.

`run_checks` is the library's door: `megatron-moe preflight` prints what it returns, other programs read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe_tools.preflight import kernels, network, node, software
from megatron_moe_tools.preflight.findings import DEFAULTS, FAIL, IMPOSSIBLE, Finding, Place, Thresholds, merged

RANK, NODE, WORLD = "rank", "node", "world"
_MEETING = timedelta(seconds=60)


class Check(NamedTuple):
    """A check: `where` is RANK (every rank looks), NODE (one rank of each node) or WORLD (all together)."""

    name: str
    where: str
    look: Callable[[Place], Finding]


CHECKS = (
    Check("driver", RANK, software.driver),
    Check("torch", NODE, software.torch_build),
    Check("engine", NODE, software.engine),
    Check("transformer_engine", NODE, software.transformer_engine),
    Check("apex", NODE, software.apex),
    Check("compiler", NODE, software.compiler),
    Check("triton", NODE, software.triton),
    Check("attention", RANK, kernels.attention),
    Check("grouped_product", RANK, kernels.grouped_product),
    Check("reductions", RANK, kernels.reductions),
    Check("gpu_clocks", NODE, node.gpu_clocks),
    Check("gpu_temperature", NODE, node.gpu_temperature),
    Check("gpu_memory_errors", NODE, node.gpu_memory_errors),
    Check("gpu_in_use", NODE, node.gpu_in_use),
    Check("cpu_cores", RANK, node.cpu_cores),
    Check("memlock", NODE, node.memlock),
    Check("shared_memory", NODE, node.shared_memory),
    Check("disk_space", NODE, node.disk_space),
    Check("disk_speed", NODE, node.disk_speed),
    Check("same_software", WORLD, network.same_software),
    Check("clock_skew", WORLD, network.clock_skew),
    Check("shared_folders", WORLD, network.shared),
    Check("gpu_speed", WORLD, network.gpu_speed),
    Check("bandwidth_inside", WORLD, network.bandwidth_inside),
    Check("bandwidth_across", WORLD, network.bandwidth_across),
)


def run_checks(
    run: Run,
    thresholds: Thresholds = DEFAULTS,
    *,
    only: Collection[str] = (),
    started: Callable[[str], object] = lambda name: None,
    finished: Callable[[list[Finding]], object] = lambda findings: None,
) -> list[Finding]:
    """Check the machine of this process, or of all ranks that torchrun started, for a run.

    Under torchrun it is collective: every rank calls it with the same arguments. The ranks meet over gloo in a default
    process group of their own, which is left at the end; one that exists already is used and kept.

    Args:
        run: what is to be trained; `Run()` leaves out what depends on a model's sizes.
        thresholds: what is expected of the machine.
        only: names of CHECKS; empty for all.
        started: called with a check's name before it runs.
        finished: called with the findings. No rank leaves before it has returned on all: a launcher ends every rank as
            soon as one has failed, and the rank that reports would be cut off.

    Returns:
        The findings of all ranks, the same list on every rank, in the order of CHECKS. A check that itself fails is a
        finding too.

    Raises:
        ConfigError: `only` names no check.
    """
    chosen = _chosen(only)
    own_group, why_not = _meet()
    place = _place(run, thresholds, connected=dist.is_initialized())
    found = [] if why_not is None else [_named(Finding(FAIL, why_not, _MEETING_ADVICE), "ranks_meet", place)]
    try:
        for check in chosen:
            started(check.name)
            if check.where != NODE or place.local_rank == 0:
                found.append(_named(_looked(check, place), check.name, place))
        findings = merged(_of_all(found, place))
        finished(findings)
        if own_group:
            with contextlib.suppress(RuntimeError):  # the rank that reports could not, and says so itself
                dist.barrier()
        return findings
    finally:
        if own_group:
            dist.destroy_process_group()


_MEETING_ADVICE = (
    "open the port of torchrun's --rdzv-endpoint (MASTER_ADDR, MASTER_PORT) between all nodes, name the interface in "
    "GLOO_SOCKET_IFNAME, and start the same command on every node"
)


def _chosen(only: Collection[str]) -> list[Check]:
    unknown = sorted(set(only) - {check.name for check in CHECKS})
    if unknown:
        names = ", ".join(check.name for check in CHECKS)
        raise ConfigError(f"--only {' '.join(unknown)}: no such check; there are {names}")
    return [check for check in CHECKS if not only or check.name in only]


def _meet() -> tuple[bool, str | None]:
    """Join the launched ranks over gloo; returns whether a group was made here, and why not all ranks could meet."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False, None
    try:
        dist.init_process_group("gloo", timeout=_MEETING)
    except Exception as error:  # the store's or gloo's own
        return False, f"the ranks did not meet within {_MEETING.seconds} s: {_one_line(error)}"
    return True, None


def _place(run: Run, thresholds: Thresholds, *, connected: bool) -> Place:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return Place(
        run=run,
        has_model=(run.model, run.moe) != (Run().model, Run().moe),
        thresholds=thresholds,
        rank=int(os.environ.get("RANK", "0")),
        world_size=world_size,
        local_rank=platform.local_rank(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        host=socket.gethostname(),
        connected=connected,
    )


def _looked(check: Check, place: Place) -> Finding:
    """Run a check. What it raises is a finding, so that one broken part does not hide the others."""
    if check.where == WORLD and not place.connected:
        alone = "one process alone: start this under torchrun or Slurm to compare ranks"
        return Finding(IMPOSSIBLE, alone if place.world_size == 1 else "the ranks did not meet")
    try:
        return check.look(place)
    except Exception as error:
        return Finding(FAIL, f"the check itself failed: {_one_line(error)}", "repair what the message names")


def _named(finding: Finding, name: str, place: Place) -> Finding:
    return dataclasses.replace(finding, check=name, ranks=(place.rank,), hosts=(place.host,))


def _of_all(found: list[Finding], place: Place) -> list[list[Finding]]:
    """Return the findings of every rank; those of this rank alone where the ranks are not connected."""
    if not place.connected:
        return [found]
    gathered: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    return gathered


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
