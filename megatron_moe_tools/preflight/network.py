"""Checks that all ranks make together: the same software, clocks, the GPUs' speed, the network's bandwidth."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_moe import platform
from megatron_moe.config.errors import MachineError
from megatron_moe.config.schema import flatten
from megatron_moe.platform import probes
from megatron_moe.training.node_files import blind_ranks, shared_folders
from megatron_moe_tools.preflight.findings import FAIL, IMPOSSIBLE, PASS, Finding, Place

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
_MEASURED_SECONDS = 1.0
_TIMEOUT = timedelta(seconds=60)
_SLOWEST_SHARE = 0.85
_LARGEST_SKEW = 5.0
_SHOWN_DIFFERENCES = 4
# Settings that have to be the same on every rank; launchers set others for each rank.
_SETTINGS = ("NCCL_", "CUBLAS_", "NVTE_", "PYTORCH_", "OMP_", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_", "MEGATRON_MOE_")
_HASHED = ("megatron_moe", "megatron.core")


def same_software(place: Place) -> Finding:
    """Check that all ranks have the same Python, packages, code, settings and flags; names the nodes that differ."""
    everything: list[tuple[str, dict[str, str]]] = [("", {})] * place.world_size
    dist.all_gather_object(everything, (place.host, fingerprint(place)))
    differences = differing(everything)
    if differences:
        more = len(differences) - _SHOWN_DIFFERENCES
        shown = "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
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
    found |= {f"${name}": value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    found |= {f"--{name.replace('_', '-')}": str(value) for name, value in flatten(place.run).items()}
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
    for name in sorted({name for _, have in everything for name in have}):
        values = [have.get(name, "missing") for _, have in everything]
        usual = statistics.mode(values)
        for other in dict.fromkeys(value for value in values if value != usual):
            ranks = [rank for rank, value in enumerate(values) if value == other]
            hosts = ", ".join(dict.fromkeys(everything[rank][0] for rank in ranks))
            numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            lines.append(f"{name} is {other} on {hosts} (rank {numbers}) and {usual} elsewhere")
    return lines


def clock_skew(place: Place) -> Finding:
    """Check that the nodes' clocks agree, by which locks of checkpoints and logs are ordered."""
    times: list[tuple[str, float]] = [("", 0.0)] * place.world_size
    dist.barrier()
    dist.all_gather_object(times, (place.host, time.time()))
    return judged_clocks(times)


def judged_clocks(times: list[tuple[str, float]]) -> Finding:
    """Return the finding for each rank's host and time, which were read at the same moment but for the network."""
    middle = statistics.median(moment for _, moment in times)
    host, moment = max(times, key=lambda one: abs(one[1] - middle))
    apart = abs(moment - middle)
    figures = {"seconds": round(apart, 3)}
    if apart > _LARGEST_SKEW:
        found = f"the clock of {host} is {apart:.1f} s {'ahead of' if moment > middle else 'behind'} the others'"
        return Finding(FAIL, found, "let chronyd or ntpd set the clocks of all nodes", figures)
    return Finding(PASS, f"clocks are within {_LARGEST_SKEW:g} s of one another", figures=figures)


def gpu_speed(place: Place) -> Finding:
    """Check that no GPU multiplies more slowly than the others: the slowest one sets the speed of a job."""
    speed = probes.matmul_tflops() if platform.has_cuda() else 0.0
    speeds: list[tuple[str, float]] = [("", 0.0)] * place.world_size
    dist.all_gather_object(speeds, (place.host, speed))
    if not all(one for _, one in speeds):
        return Finding(IMPOSSIBLE, "not every rank has a CUDA device")
    return judged_speeds(speeds)


def judged_speeds(speeds: list[tuple[str, float]]) -> Finding:
    """Return the finding for each rank's host and TFLOP/s."""
    usual = statistics.median(speed for _, speed in speeds)
    slow = [
        f"rank {rank} on {host}: {speed:.0f}"
        for rank, (host, speed) in enumerate(speeds)
        if speed < _SLOWEST_SHARE * usual
    ]
    figures = {"least_tflops": round(min(speed for _, speed in speeds), 1), "median_tflops": round(usual, 1)}
    if slow:
        found = f"slow in a bf16 product of 4096 x 4096, TFLOP/s: {', '.join(slow[:8])}; the median is {usual:.0f}"
        return Finding(FAIL, found, f"drain nodes with less than {_SLOWEST_SHARE:.0%} of the median", figures)
    return Finding(
        PASS, f"all ranks reach {_SLOWEST_SHARE:.0%} of the median, {usual:.0f} TFLOP/s in bf16", figures=figures
    )


# ---- bandwidth


def bandwidth_inside(place: Place) -> Finding:
    """Check all-reduce and all-to-all among the ranks of each node."""
    if isinstance(hosts := _hosts(place), Finding):
        return hosts
    groups = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    if max(map(len, groups)) == 1:
        return Finding(IMPOSSIBLE, "there is one rank on each node")
    return _judged_groups(place, groups, hosts, place.thresholds.inside, INSIDE)


def shared(place: Place) -> Finding:
    """Check that all nodes see what rank 0 writes to the folders of checkpoints and of the data's index cache."""
    if place.nodes == 1:
        return Finding(IMPOSSIBLE, "all ranks are on one node")
    folders = list(shared_folders(place.run))
    for flag, folder in folders:
        if blind := blind_ranks(folder, place.rank):
            found = f"{flag}: ranks {_range(blind)} do not see what rank 0 writes there"
            return Finding(FAIL, found, "name a folder on a file system that all nodes share")
    if not folders:
        return Finding(IMPOSSIBLE, "no --save and no data among the flags")
    return Finding(PASS, f"all nodes see what rank 0 writes: {', '.join(str(folder) for _, folder in folders)}")


def bandwidth_across(place: Place) -> Finding:
    """Check all-reduce and all-to-all over the nodes: rank i of each node with the others' rank i, all i at once.

    So each GPU's own network adapter is measured, and a slow group names its number.
    """
    if isinstance(hosts := _hosts(place), Finding):
        return hosts
    if len(set(hosts)) == 1:
        return Finding(IMPOSSIBLE, "all ranks are on one node")
    numbers = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    groups = [[rank for rank, other in enumerate(numbers) if other == number] for number in sorted(set(numbers))]
    return _judged_groups(place, groups, hosts, place.thresholds.across, ACROSS)


def _hosts(place: Place) -> list[str] | Finding:
    """Return each rank's host, or a finding where not all ranks can use the same backend: the others would wait."""
    try:
        backend = platform.backend()
    except MachineError:
        backend = "none"
    everything: list[tuple[str, str]] = [("", "")] * place.world_size
    dist.all_gather_object(everything, (place.host, backend))
    if len({backend for _, backend in everything}) > 1 or backend == "none":
        without = [rank for rank, (_, backend) in enumerate(everything) if backend != "nccl"]
        found = f"not measured: ranks {_range(without)} have no CUDA device that works"
        return Finding(FAIL, found, "see what the check named driver says")
    return [host for host, _ in everything]


def _judged_groups(place: Place, groups: list[list[int]], hosts: list[str], given: float | None, kind: int) -> Finding:
    """Measure all groups at once and judge the slowest, by what was given or by the table's figure of that kind."""
    everything: list[Any] = [None] * place.world_size
    dist.all_gather_object(everything, _measured(groups))
    expected = given if given is not None else expected_bandwidth(probes.device_name(), kind)
    dist.broadcast_object_list(shared := [expected])
    return judged_bandwidth(everything, groups, hosts, shared[0], place.thresholds.least_share)


def expected_bandwidth(device: str | None, kind: int) -> float | None:
    """Return the table's GB/s of a device, INSIDE a node or ACROSS nodes; None for a device that is not in it."""
    return next((links[kind] for name, links in LINKS.items() if device is not None and name in device), None)


def _measured(groups: list[list[int]]) -> dict[str, float] | None:
    """Return the bus bandwidth of the collectives in this rank's group in GB/s, as nccl-tests define it."""
    backend = platform.backend()
    probes.bind()
    made = [dist.new_group(ranks, backend=backend, timeout=_TIMEOUT) for ranks in groups]
    mine = next((group for group, ranks in zip(made, groups) if dist.get_rank() in ranks), None)
    size = 1 if mine is None else mine.size()
    figures = None
    if size > 1:
        given = torch.zeros(_ELEMENTS[backend] // size * size, device=platform.device())
        taken = torch.empty_like(given)
        share = {"all_reduce": 2 * (size - 1) / size, "all_to_all": (size - 1) / size}
        work = {
            "all_reduce": lambda: dist.all_reduce(given, group=mine),
            "all_to_all": lambda: dist.all_to_all_single(taken, given, group=mine),
        }
        num_bytes = given.numel() * given.element_size()
        figures = {name: share[name] * num_bytes / _seconds_together(work[name], mine) / 1e9 for name in work}
    dist.barrier()
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return figures


def _seconds_together(work: Any, group: Any) -> float:
    """Return the mean seconds of a collective. All ranks of the group make as many calls: a clock cannot decide."""
    work()
    platform.synchronize()
    began = time.perf_counter()
    work()
    platform.synchronize()
    calls = torch.tensor([max(2.0, min(50.0, _MEASURED_SECONDS / (time.perf_counter() - began)))])
    calls = calls.to(platform.device())
    dist.all_reduce(calls, dist.ReduceOp.MIN, group=group)
    count = int(calls.item())
    began = time.perf_counter()
    for _ in range(count):
        work()
    platform.synchronize()
    return (time.perf_counter() - began) / count


def judged_bandwidth(
    measured: list[dict[str, float] | None],
    groups: list[list[int]],
    hosts: list[str],
    expected: float | None,
    least: float,
) -> Finding:
    """Return the finding for each rank's figures: of each collective the slowest group decides.

    Args:
        expected: GB/s per rank; None where nobody knows it.
        least: the share of it below which a collective fails.
    """
    slowest = {}
    for name in ("all_reduce", "all_to_all"):
        slowest[name] = min((figures[name], rank) for rank, figures in enumerate(measured) if figures is not None)
    texts, failed = [], False
    for name, (rate, rank) in slowest.items():
        group = next(ranks for ranks in groups if rank in ranks)
        slow = expected is not None and rate < least * expected
        where = (
            f" among ranks {_range(group)} on {', '.join(dict.fromkeys(hosts[one] for one in group))}" if slow else ""
        )
        texts.append(f"{name.replace('_', '-')} {rate:.3g} GB/s{where}")
        failed = failed or slow
    figures = {f"{name}_gb_per_s": round(rate, 3) for name, (rate, _) in slowest.items()}
    if expected is None:
        found = f"{', '.join(texts)}; what to expect of this device is not known"
        return Finding(IMPOSSIBLE, found, "give --inside or --across to have it judged", figures)
    found = f"{', '.join(texts)}; expected {expected:g}, at least {least:.0%} of it"
    if failed:
        return Finding(
            FAIL,
            found,
            "look for a link that is down (nvidia-smi nvlink --status, ibstat), NCCL_DEBUG=INFO shows which network "
            "NCCL takes; --least-share and --inside or --across change what is expected",
            figures,
        )
    return Finding(PASS, found, figures=figures)


def _range(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
