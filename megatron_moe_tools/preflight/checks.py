"""The checks that all ranks make together, the list of all checks, and how they run.

`run_checks` is the library's door: `megatron-moe preflight` prints what it returns, other programs read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError, MachineError
from megatron_moe.config.schema import Run, flatten
from megatron_moe.training.node_files import blind_ranks, shared_folders
from megatron_moe_tools.preflight import node
from megatron_moe_tools.preflight.cli import (
    CHECKS,
    DEFAULTS,
    FAIL,
    IMPOSSIBLE,
    NODE,
    PASS,
    WORLD,
    Finding,
    Place,
    Thresholds,
    check,
    merged,
    shortened,
)

# Device name -> GB/s per GPU and direction: of the links inside a node, and of the network adapter that a GPU has to
# itself in the vendor's reference system. The first name that a device's name contains decides: longer ones first.
# Sources: NVIDIA's data sheets of these GPUs (NVLink's total is twice this) and user guides of DGX A100 (200 Gb/s
# adapters), DGX H100, H200 and B200 (400 Gb/s), DGX B300 (800 Gb/s). Cards on PCIe alone are not in it: --inside says.
LINKS = {
    "GB300": (900.0, 100.0),
    "B300": (900.0, 100.0),
    "GB200": (900.0, 50.0),
    "B200": (900.0, 50.0),
    "GH200": (450.0, 50.0),
    "H200": (450.0, 50.0),
    "H800": (200.0, 50.0),
    "H20": (450.0, 50.0),
    "H100 80GB HBM3": (450.0, 50.0),
    "A800-SXM": (200.0, 25.0),
    "A100-SXM": (300.0, 25.0),
}
INSIDE, ACROSS = 0, 1
_ELEMENTS = {"nccl": 64 << 20, "gloo": 1 << 20}
"""Elements of fp32 that a rank gives into a collective: 256 MiB, from which on NCCL is near its best, or 4 MiB."""
T = TypeVar("T")
_MEASURED_SECONDS = 1.0
_TIMEOUT = timedelta(seconds=60)
_MATMUL_SIZE, _MATMUL_SECONDS = 4096, 0.5
_SLOWEST_SHARE = 0.85
_LARGEST_SKEW = 5.0
_SHOWN_DIFFERENCES = 4
# Settings that have to be the same on every rank; launchers set others for each rank.
_SETTINGS = ("NCCL_", "CUBLAS_", "NVTE_", "PYTORCH_", "OMP_", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_", "MEGATRON_MOE_")
_HASHED = ("megatron_moe", "megatron_moe_tools", "megatron.core")


@check(WORLD)
def same_software(place: Place) -> Finding:
    """Check that all ranks have the same Python, packages, code, settings and flags; names the nodes that differ."""
    everything = _of_all_ranks((place.host, fingerprint(place)))
    differences = differing(everything)
    if differences:
        shown, more = "; ".join(differences[:_SHOWN_DIFFERENCES]), len(differences) - _SHOWN_DIFFERENCES
        if more > 0:
            shown += f"; and {more} more"
        return Finding(FAIL, shown, "install the same image or environment, and start the same command, on every node")
    names = everything[0][1]
    return Finding(PASS, f"{len(names)} packages, sources and settings are the same on {place.world_size} ranks")


def fingerprint(place: Place) -> dict[str, str]:
    """Return what all ranks have to agree on: name -> version, hash or value."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    # setuptools puts packages of its own onto the path of a process that has imported it, which not all ranks have.
    path = [folder for folder in sys.path if Path(folder).name != "_vendor"]
    for distribution in importlib.metadata.distributions(path=path):
        found.setdefault(f"package {distribution.name}", distribution.version)  # the first one is what is imported
    for module in _HASHED:
        found[f"code of {module}"] = code_hash(module)
    for name, value in os.environ.items():
        if name.startswith(_SETTINGS):
            found[f"${name}"] = value
    for name, value in flatten(place.run).items():
        found[f"--{name.replace('_', '-')}"] = str(value)
    return found


def code_hash(module: str) -> str:
    """Return a short hash of the sources of a package, as they are on this node's disk; "none" where it is missing."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return "none"
    root, digest = Path(spec.origin).parent, hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def differing(everything: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Return one line for each thing that not all ranks have in common, with who differs from most of them.

    Args:
        everything: of each rank its host and fingerprint.
    """
    lines = []
    for name in sorted(set().union(*(have for _, have in everything))):
        values = [have.get(name, "missing") for _, have in everything]
        usual = statistics.mode(values)
        differing_ranks: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            if value != usual:
                differing_ranks.setdefault(value, []).append(rank)
        for value, ranks in differing_ranks.items():
            hosts = ", ".join(dict.fromkeys(everything[rank][0] for rank in ranks))
            lines.append(f"{name} is {value} on {hosts} (rank {shortened(ranks)}) and {usual} elsewhere")
    return lines


def _of_all_ranks(value: T) -> list[T]:
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@check(WORLD)
def clock_skew(place: Place) -> Finding:
    """Check that the nodes' clocks agree, by which locks of checkpoints and logs are ordered."""
    dist.barrier()
    hosts, moments = zip(*_of_all_ranks((place.host, time.time())))  # at the same moment, but for the network
    middle = statistics.median(moments)
    aparts = [abs(moment - middle) for moment in moments]
    apart = max(aparts)
    figures = {"seconds": round(apart, 3)}
    if apart > _LARGEST_SKEW:
        rank = aparts.index(apart)
        where = "ahead of" if moments[rank] > middle else "behind"
        found = f"the clock of {hosts[rank]} is {apart:.1f} s {where} the others'"
        return Finding(FAIL, found, "let chronyd or ntpd set the clocks of all nodes", figures)
    return Finding(PASS, f"clocks are within {_LARGEST_SKEW:g} s of one another", figures=figures)


@check(WORLD, "shared_folders")
def shared(place: Place) -> Finding:
    """Check that all nodes see what rank 0 writes to the folders of checkpoints and of the data's index cache."""
    if place.nodes == 1:
        return Finding(IMPOSSIBLE, "all ranks are on one node")
    folders = list(shared_folders(place.run))
    for flag, folder in folders:
        if blind := blind_ranks(folder, place.rank):
            found = f"{flag}: ranks {shortened(blind)} do not see what rank 0 writes there"
            return Finding(FAIL, found, "name a folder on a file system that all nodes share")
    if not folders:
        return Finding(IMPOSSIBLE, "no --save and no data among the flags")
    return Finding(PASS, f"all nodes see what rank 0 writes: {', '.join(str(folder) for _, folder in folders)}")


@check(WORLD)
def gpu_speed(place: Place) -> Finding:
    """Check that no GPU multiplies more slowly than the others: the slowest one sets the speed of a job."""
    speed = 0.0
    if platform.has_cuda():
        left = torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device=platform.device()).to(torch.bfloat16)
        speed = 2 * _MATMUL_SIZE**3 / _seconds_of(lambda: torch.mm(left, left), _MATMUL_SECONDS, 10_000) / 1e12
    hosts, speeds = zip(*_of_all_ranks((place.host, speed)))
    if not all(speeds):
        return Finding(IMPOSSIBLE, "not every rank has a CUDA device")
    usual = statistics.median(speeds)
    slow = []
    for rank, speed in enumerate(speeds):
        if speed < _SLOWEST_SHARE * usual:
            slow.append(f"rank {rank} on {hosts[rank]}: {speed:.0f}")
    figures = {"least_tflops": round(min(speeds), 1), "median_tflops": round(usual, 1)}
    if slow:
        found = f"slow in a bf16 product of 4096 x 4096, TFLOP/s: {', '.join(slow[:8])}; the median is {usual:.0f}"
        return Finding(FAIL, found, f"drain nodes with less than {_SLOWEST_SHARE:.0%} of the median", figures)
    found = f"all ranks reach {_SLOWEST_SHARE:.0%} of the median, {usual:.0f} TFLOP/s in bf16"
    return Finding(PASS, found, figures=figures)


# ---- bandwidth


@check(WORLD)
def bandwidth_inside(place: Place) -> Finding:
    """Check all-reduce and all-to-all among the ranks of each node."""
    if isinstance(hosts := _hosts(place), Finding):
        return hosts
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    if len(ranks_of) == len(hosts):
        return Finding(IMPOSSIBLE, "there is one rank on each node")
    return _judged_groups(place, list(ranks_of.values()), hosts, place.thresholds.inside, INSIDE)


@check(WORLD)
def bandwidth_across(place: Place) -> Finding:
    """Check all-reduce and all-to-all over the nodes: rank i of each node with the others' rank i, all i at once.

    So each GPU's own network adapter is measured, and a slow group names its number.
    """
    if isinstance(hosts := _hosts(place), Finding):
        return hosts
    if len(set(hosts)) == 1:
        return Finding(IMPOSSIBLE, "all ranks are on one node")
    groups: list[list[int]] = []
    for rank, host in enumerate(hosts):
        number = hosts[:rank].count(host)  # on its node
        if number == len(groups):
            groups.append([])
        groups[number].append(rank)
    return _judged_groups(place, groups, hosts, place.thresholds.across, ACROSS)


def _hosts(place: Place) -> list[str] | Finding:
    """Return each rank's host, or a finding where not all ranks can use the same backend: the others would wait."""
    try:
        backend = platform.backend()
    except MachineError:
        backend = "none"
    backends = _of_all_ranks(backend)
    if len(set(backends)) > 1 or backend == "none":
        without = [rank for rank, other in enumerate(backends) if other != "nccl"]
        found = f"not measured: ranks {shortened(without)} have no CUDA device that works"
        return Finding(FAIL, found, "see what the check named driver says")
    return _of_all_ranks(place.host)


def _judged_groups(place: Place, groups: list[list[int]], hosts: list[str], given: float | None, kind: int) -> Finding:
    """Measure all groups at once and judge the slowest, by what was given or by the table's figure of that kind."""
    measured = _of_all_ranks(_measured(groups))
    of_rank_zero = [expected_bandwidth(node.device_name(), kind) if given is None else given]
    dist.broadcast_object_list(of_rank_zero)
    expected, least = of_rank_zero[0], place.thresholds.least_share
    texts, failed = [], False
    figures: dict[str, float] = {}
    for name in ("all_reduce", "all_to_all"):
        rate, rank = min((found[name], rank) for rank, found in enumerate(measured) if found is not None)
        figures[f"{name}_gb_per_s"] = round(rate, 3)
        text = f"{name.replace('_', '-')} {rate:.3g} GB/s"
        if expected is not None and rate < least * expected:
            failed = True
            for group in groups:
                if rank in group:
                    its_hosts = dict.fromkeys(hosts[one] for one in group)
                    text += f" among ranks {shortened(group)} on {', '.join(its_hosts)}"
        texts.append(text)
    if expected is None:
        found = f"{', '.join(texts)}; what to expect of this device is not known"
        return Finding(IMPOSSIBLE, found, "give --inside or --across to have it judged", figures)
    found = f"{', '.join(texts)}; expected {expected:g}, at least {least:.0%} of it"
    if failed:
        advice = (
            "look for a link that is down (nvidia-smi nvlink --status, ibstat), NCCL_DEBUG=INFO shows which network "
            "NCCL takes; --least-share and --inside or --across change what is expected"
        )
        return Finding(FAIL, found, advice, figures)
    return Finding(PASS, found, figures=figures)


def expected_bandwidth(device: str | None, kind: int) -> float | None:
    """Return the table's GB/s of a device, INSIDE a node or ACROSS nodes; None for a device that is not in it."""
    for name, links in LINKS.items():
        if device is not None and name in device:
            return links[kind]
    return None


def _measured(groups: list[list[int]]) -> dict[str, float] | None:
    """Return the bus bandwidth of the collectives in this rank's group in GB/s, as nccl-tests define it."""
    backend = platform.backend()
    node.bind()
    made = []
    mine, size = None, 1
    for ranks in groups:
        made.append(dist.new_group(ranks, backend=backend, timeout=_TIMEOUT))
        if dist.get_rank() in ranks:
            mine, size = made[-1], len(ranks)
    figures = None
    if size > 1:
        given = torch.zeros(_ELEMENTS[backend] // size * size, device=platform.device())
        taken = torch.empty_like(given)
        once = (size - 1) / size * given.nbytes / 1e9
        reducing = _seconds_of(lambda: dist.all_reduce(given, group=mine), _MEASURED_SECONDS, 50, mine)
        exchanging = _seconds_of(lambda: dist.all_to_all_single(taken, given, group=mine), _MEASURED_SECONDS, 50, mine)
        figures = {"all_reduce": 2 * once / reducing, "all_to_all": once / exchanging}
    dist.barrier()
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return figures


def _seconds_of(work: Callable[[], object], seconds: float, most: int, group: dist.ProcessGroup | None = None) -> float:
    """Return the mean seconds of a call, over those of so many seconds but two that do not count.

    All ranks of a group make as many calls, `most` at most: a clock cannot decide.
    """
    work()
    platform.synchronize()
    began = time.perf_counter()
    work()
    platform.synchronize()
    calls = torch.tensor([max(2.0, min(most, seconds / (time.perf_counter() - began)))], device=platform.device())
    if group is not None:
        dist.all_reduce(calls, dist.ReduceOp.MIN, group=group)
    count = int(calls.item())
    began = time.perf_counter()
    for _ in range(count):
        work()
    platform.synchronize()
    return (time.perf_counter() - began) / count


_MEETING = timedelta(seconds=60)
_MEETING_ADVICE = (
    "open the port of torchrun's --rdzv-endpoint (MASTER_ADDR, MASTER_PORT) between all nodes, name the interface in "
    "GLOO_SOCKET_IFNAME, and start the same command on every node"
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
    names = [one.name for one in CHECKS]
    unknown = sorted(set(only).difference(names))
    if unknown:
        raise ConfigError(f"--only {' '.join(unknown)}: no such check; there are {', '.join(names)}")
    own_group, why_not = False, ""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        try:
            dist.init_process_group("gloo", timeout=_MEETING)
            own_group = True
        except Exception as error:  # the store's or gloo's own
            why_not = f"the ranks did not meet within {_MEETING.seconds} s: {_one_line(error)}"
    place = _place(run, thresholds, connected=dist.is_initialized())
    found = []
    if why_not:
        found.append(_named(Finding(FAIL, why_not, _MEETING_ADVICE), "ranks_meet", place))
    try:
        for one in CHECKS:
            if only and one.name not in only:
                continue
            started(one.name)
            if one.where == NODE and place.local_rank != 0:
                continue
            if one.where != WORLD or place.connected:
                try:
                    finding = one.look(place)
                except Exception as error:  # a finding, so that one broken part does not hide the others
                    why_not = f"the check itself failed: {_one_line(error)}"
                    finding = Finding(FAIL, why_not, "repair what the message names")
            elif place.world_size == 1:
                finding = Finding(IMPOSSIBLE, "one process alone: start this under torchrun or Slurm to compare ranks")
            else:
                finding = Finding(IMPOSSIBLE, "the ranks did not meet")
            found.append(_named(finding, one.name, place))
        findings = merged(_of_all_ranks(found) if place.connected else [found])
        finished(findings)
        if own_group:
            with contextlib.suppress(RuntimeError):  # the rank that reports could not, and says so itself
                dist.barrier()
        return findings
    finally:
        if own_group:
            dist.destroy_process_group()


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


def _named(finding: Finding, name: str, place: Place) -> Finding:
    return dataclasses.replace(finding, check=name, ranks=(place.rank,), hosts=(place.host,))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
