"""Process groups and seeds: joins the ranks that a launcher started, builds a layout's groups, seeds every rank.

The groups are built by megatron-core's `parallel_state`, which keeps them in globals, where its schedules and optimizer
read them; our code gets them passed in, as the `ProcessGroups` that `initialize` returns.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError, MachineError
from megatron_moe.config.schema import Run, flatten
from megatron_moe.engine.layers import model_parallel_cuda_manual_seed
from megatron_moe.engine.schedules import ProcessGroupCollection, groups_of_one_rank, parallel_state
from megatron_moe.io import launched
from megatron_moe.io.program import note
from megatron_moe.platform import numerics
from megatron_moe.platform.protocols import ProcessGroups

_SIDE_TIMEOUT = timedelta(seconds=10)
_POLL_SECONDS = 0.2
_STORE_SECONDS = 10.0
NCCL_BEHIND_WATCHDOG = timedelta(minutes=2)
"""How much longer than our watchdog NCCL waits, so that our report comes first: NCCL aborts the process."""
_NCCL_HEARTBEAT = timedelta(minutes=8)  # torch's own patience with a thread of NCCL's that does not answer
_NCCL_RECORDER_ENTRIES = 2000
# What is set, and the names that a user may have set it by.
_RECORDER_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@dataclass(frozen=True)
class RankFacts:
    """The ranks of a process: its rank in the world and along every axis of the layout, with the axes' sizes."""

    rank: int
    world_size: int
    local_rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int

    def __str__(self) -> str:
        axes = ("tp", "pp", "cp", "dp", "ep", "etp")
        return (
            f"rank {self.rank}/{self.world_size} ("
            + ", ".join(f"{axis} {getattr(self, f'{axis}_rank')}/{getattr(self, f'{axis}_size')}" for axis in axes)
            + ")"
        )


def initialize(run: Run, fault_folder: Path | None = None) -> ProcessGroups:
    """Join the other ranks and build the groups of the layout in `run.parallel`.

    Under torchrun the world is torchrun's; otherwise it is this process alone, and no port is opened. A default process
    group that exists already is used as it is. `run` has passed `config.rules.check` for this world size.

    The process then computes with the switches of `platform.numerics`, until `destroy`; after an error it has its own.

    Args:
        fault_folder: where NCCL writes its flight recorder, should its own timeout come.

    Returns:
        The engine's collection with all of its groups: tp, pp, cp, dp, dp_cp, tp_cp, tp_dp_cp, mp, ep, expt_tp,
        expt_dp, tp_ep, tp_ep_pp, embd and pos_embd (None on a stage without embeddings), and the optimizer's.

    Raises:
        ConfigError: the requested backend cannot work here, the ranks were given different flags, or the environment
            contradicts `--deterministic-mode`.
    """
    # Before NCCL and cuBLAS start, which read their variables then.
    numerics.apply(run.training.deterministic_mode, run.precision.allow_tf32)
    sockets_before = _sockets().keys()
    try:
        if not dist.is_initialized():
            backend = platform.backend(run.parallel.distributed_backend)
            timeout = collective_timeout(run, backend)
            if backend == "nccl":
                prepare_nccl(timeout, fault_folder)
            _init_distributed(backend, timeout)
        _make_host_group(collective_timeout(run, dist.get_backend()))
        # Ranks that were not given the same flags would hang in collectives, or mix fp16 with bf16.
        runs: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(runs, flatten(run), group=host_group())
        for rank, other in enumerate(runs):
            differing = [name for name in other if other[name] != runs[0][name]]
            if differing:
                shown = "; ".join(
                    f"--{name.replace('_', '-')} is {other[name]} on rank {rank} and {runs[0][name]} on rank 0"
                    for name in differing[:5]
                )
                raise ConfigError(f"all ranks need the same flags: {shown}; start every node with the same command")
        built = _build(run)
        if dist.get_backend() == "gloo":
            _connections.update(_sockets().keys() - sockets_before)
        return built
    except BaseException:
        numerics.restore()
        raise


def collective_timeout(run: Run, backend: str) -> timedelta:
    """Return the time after which a collective fails: the run's; under NCCL and our watchdog, which names it, a longer.

    gloo raises an error then, which the watchdog reads; NCCL aborts the process.
    """
    timeout = timedelta(minutes=run.parallel.distributed_timeout_minutes)
    return timeout + NCCL_BEHIND_WATCHDOG if backend == "nccl" and run.faults.watchdog else timeout


def fake_world(run: Run, rank: int, world_size: int, machine: int | None = None) -> ProcessGroups:
    """Build the groups of rank `rank` of `world_size` in this process alone, to lay out a run without running it.

    Collectives over these groups return immediately and move nothing. `destroy` removes the groups.

    Args:
        machine: what `ranks_of_machine` returns until then; None: what the launcher says.

    Raises:
        RuntimeError: there is a default process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a fake world needs a process that is in no process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    if machine is not None:
        pretend_machines(machine)
    with groups_of_one_rank(rank):
        return _build(run)


def _build(run: Run) -> ProcessGroups:
    layout, timeout = run.parallel, collective_timeout(run, dist.get_backend())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=run.derived.virtual_pipeline_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=run.derived.expert_tensor_parallel_size,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        get_embedding_ranks=functools.partial(_ranks_with_tables, run),
        # Twice the groups otherwise, for a checkpoint format that is not used.
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


_host_groups: list[dist.ProcessGroup] = []


def host_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks for what is in host memory: gloo's, where the ranks' own group is NCCL's."""
    return _host_groups[0] if _host_groups else dist.group.WORLD


def _make_host_group(timeout: timedelta) -> None:
    """Make the group of `host_group`. Collective.

    Raises:
        MachineError: the ranks cannot reach one another by the network interface that gloo chose.
    """
    if dist.get_backend() != "nccl" or _host_groups:
        return
    sockets_before = _sockets().keys()
    try:
        _host_groups.append(dist.new_group(backend="gloo", timeout=timeout))
    except RuntimeError as error:
        raise MachineError(
            f"gloo, by which the ranks exchange what is in host memory, does not connect them: {error}; set "
            "GLOO_SOCKET_IFNAME to the network interface that all nodes share"
        ) from error
    _connections.update(_sockets().keys() - sockets_before)


def _ranks_with_tables(run: Run, ranks: Sequence[int], *_: Any) -> list[int]:
    """Return, of the ranks of a pipeline, those whose embedding or tied output layer are one table; or both its ends.

    The engine adds up the table's gradients over them.
    """
    predictions = run.derived.predictions_pipeline_rank
    if predictions is None:
        return [ranks[0], ranks[-1]] if len(ranks) > 1 else [ranks[0]]
    places = [0, predictions] if run.model.untie_embeddings_and_output_weights else [0, predictions, len(ranks) - 1]
    return [ranks[place] for place in places]


def partition(group: dist.ProcessGroup, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's part of a group, `size` neighbours, and the ranks of the same place in all parts.

    Collective over the group; its size is a multiple of `size`. Equal parts are made once.
    """
    ranks = dist.get_process_group_ranks(group)
    part, place = divmod(group.rank(), size)
    inside = tuple(ranks[part * size : (part + 1) * size])
    across = tuple(ranks[place::size])
    return _group_of(inside), _group_of(across)


_parts: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if ranks not in _parts:
        before = _sockets().keys()
        _parts[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        _connections.update(_sockets().keys() - before)
    return _parts[ranks]


_pretended: int | None = None


def pretend_machines(ranks: int) -> None:
    """Have `ranks_of_machine` return this number until `destroy`, also where one machine has all ranks."""
    global _pretended
    _pretended = ranks


def ranks_of_machine() -> int:
    """Return how many ranks the launcher has started on this machine; all, where it does not say."""
    return _pretended or int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def neighbours(ranks: Sequence[int], machine: int) -> int:
    """Return how many ranks of a group are on one machine; all of them where its machines have unequally many.

    Args:
        ranks: the group's, of the world.
        machine: ranks of the world on each machine, which are numbered machine by machine.
    """
    machines = [rank // machine for rank in ranks]
    size = machines.count(machines[0])
    parts = [machines[first : first + size] for first in range(0, len(machines), size)]
    return size if all(part == [part[0]] * size for part in parts) else len(machines)


def rank_facts() -> RankFacts:
    """Return the ranks of this process in the layout that `initialize` built."""
    return RankFacts(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=platform.local_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def side_store() -> dist.Store | None:
    """Return a separate connection to the store through which the launched ranks met; None where there is none.

    A connection serves one call at a time, and collectives may occupy the default one for as long as they wait.
    """
    if dist.get_world_size() == 1 or "MASTER_ADDR" not in os.environ:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_SIDE_TIMEOUT)
    return dist.PrefixStore(_meeting(), store)


def collectives_record() -> Callable[[], dict[str, Any]] | None:
    """Return what reads NCCL's flight recorder in this process; None with another backend."""
    return nccl_record if dist.get_backend() == "nccl" else None


def abort_collectives() -> None:
    """Let collectives fail that wait for other ranks, so that the main thread can leave; callable from any thread.

    gloo has no call for that, and its connections live as long as anybody has a group: what is shut down are the TCP
    connections that came up with the groups, where the system lists them (Linux). The store's stay.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        for group in list(c10d._world.pg_map):
            group.abort()
    store_port = int(os.environ.get("MASTER_PORT", "0"))
    for name, descriptor in _sockets().items():
        if name in _connections:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if store_port not in (connection.getpeername()[1], connection.getsockname()[1]):
                    connection.shutdown(socket.SHUT_RDWR)


_connections: set[str] = set()
"""Names of the sockets that were opened while gloo's groups were built."""


def _sockets() -> dict[str, int]:
    """Return this process's sockets, name -> file descriptor; none where the system does not list them."""
    found = {}
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            if (name := os.readlink(entry)).startswith("socket:"):
                found[name] = int(entry.name)
    return found


def destroy(abort: bool = False) -> None:
    """Leave all groups, if there are any, and put back the switches that `initialize` set.

    Args:
        abort: whether to abort collectives that are still waiting for other ranks. Needed after an error, when the
            others may be gone: NCCL would wait for them, gloo does not.
    """
    global _pretended
    numerics.restore()
    _pretended = None
    _parts.clear()
    _host_groups.clear()
    _connections.clear()
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    if abort and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # What DTensor has found for a mesh holds its groups, and is taken for any mesh of this shape in a later run.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


_meetings = 0
"""How often this process has met other ranks: a program's runs follow one another."""


def _meeting() -> str:
    """Return a prefix for the keys of these ranks: a launcher's store outlives ranks that it restarts, and runs."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_meetings}"


def _init_distributed(backend: str, timeout: timedelta) -> None:
    """Create the default process group."""
    global _meetings
    if backend == "nccl":
        # Without `device_id`, as in Megatron-LM. With it each `new_group` splits the world's communicator at once, for
        # which every rank has to come: thousands of times in a large layout, and never for groups that their members
        # make alone (`_group_of`), which would hang. A pipeline's sends and receives would share one communicator.
        torch.cuda.set_device(platform.device())
    if "WORLD_SIZE" in os.environ:
        with _watched_rendezvous():
            # Under a prefix: torch names the groups of a program's next run alike, and would meet at the old addresses.
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            store = dist.PrefixStore(_meeting(), store)
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
        _meetings += 1
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


# ---- Rendezvous: rank 0 says which ranks are still waited for while the process group is created.
#
# torch waits without a word until all ranks are there. A thread of each rank counts it as arrived in the store through
# which the ranks meet, and rank 0's says how many are missing. It changes nothing about the rendezvous: where the store
# cannot be reached, torch's error becomes one line.


@contextmanager
def _watched_rendezvous() -> Iterator[None]:
    """Count this rank as arrived, and on rank 0 say what is waited for, until the block ends.

    Raises:
        MachineError: the store's port is taken, or the ranks could not meet there.
    """
    met = threading.Event()
    thread = threading.Thread(target=_count_arrivals, args=(met,), name="rendezvous", daemon=True)
    if os.environ["WORLD_SIZE"] != "1":
        thread.start()
    try:
        yield
    except dist.DistError as error:
        # The thread is left: a program that is no store and holds the port may never answer it.
        where = f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}"
        raise MachineError(launched.not_met(where, error)) from error
    finally:
        met.set()
    if thread.is_alive():
        thread.join()


def _count_arrivals(met: threading.Event) -> None:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    key = f"arrived/{_meeting()}"
    waiting, store = launched.Waiting(), None
    with suppress(RuntimeError):  # of the store, as which torch's own call fails too
        while not met.is_set():
            if store is None:
                with suppress(OSError):
                    # Only where somebody listens: torch's connection would wait for it, with lines on the screen.
                    socket.create_connection((address, port), timeout=_STORE_SECONDS).close()
                    timeout = timedelta(seconds=_STORE_SECONDS)
                    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
                    store.add(key, 1)
            if store is not None and rank != 0:
                return
            if store is not None and waiting.is_due():
                missing = world_size - store.add(key, 0)
                if missing > 0:
                    note(
                        f"{launched.name()}: waiting for {missing} of {world_size} ranks, which meet at "
                        f"{address}:{port}, for {waiting.seconds:.0f} s"
                    )
            met.wait(_POLL_SECONDS)


# ---- NCCL: its settings by environment variables, and its record of the collectives of this process.


def prepare_nccl(timeout: timedelta, folder: Path | None) -> None:
    """Set what NCCL reads when its first group is made, but nothing that the user has set.

    TORCH_NCCL_ASYNC_ERROR_HANDLING stays torch's: an error that NCCL finds ends the process at once, where the run
    would otherwise stand still until its timeout.

    Args:
        timeout: of the groups.
        folder: where torch writes the recorder of each rank when its own timeout has passed; None: its own choice.
    """
    # The thread that is watched may be stuck in the same call of CUDA as the run, and is ended behind the timeout.
    heartbeat = max(_NCCL_HEARTBEAT, timeout + NCCL_BEHIND_WATCHDOG)
    values = {
        _RECORDER_SIZE: str(_NCCL_RECORDER_ENTRIES),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",): str(int(heartbeat.total_seconds())),
    }
    if folder is not None:
        values[_RECORDER_FILE] = str(folder.resolve() / "nccl_trace_rank_")
    for names, value in values.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def nccl_record() -> dict[str, Any]:
    """Return the dump of the flight recorder with the members of all groups; see `training/hang_report.py`.

    Where the recorder is off, it holds how many collectives each group has begun.
    """
    bindings: Any = torch._C._distributed_c10d
    # As JSON, without frames, which would have to be read from the hanging interpreter.
    dump: dict[str, Any] = json.loads(bindings._dump_nccl_trace_json(includeCollectives=True, onlyActive=False))
    world: Any = c10d._world
    for group, name in world.pg_names.items():
        config = dump["pg_config"].setdefault(name, {"name": name, "desc": group.group_desc, "ranks": "[]"})
        config["ranks"] = sorted(world.pg_group_ranks[group])
        if not dump.get("entries"):
            dump["pg_status"][name] = {"last_enqueued_collective": group._get_sequence_number_for_group()}
    dump["pg_config"] = {name: config for name, config in dump["pg_config"].items() if config["name"]}
    return dump


# ---- Seeds: the random streams of every rank, from the seed of the run.
#
# Weights do not depend on these streams (`model/initialize.py` has its own, by tensor); dropout does. Seeding goes
# through megatron-core's random state tracker.


# The engine adds at most a few thousand for TP, EP and ETP ranks; streams this far apart cannot meet.
_STRIDE = 1 << 16


def seed_everything(run: Run, iteration: int = 0) -> None:
    """Seed Python, NumPy, torch and the engine's tracker for this rank, after `groups.initialize`.

    A run that resumes at `iteration` without the random states of its ranks, because those are of another layout,
    begins new streams: those of --seed would repeat what the first iterations drew.

    Ranks that have different tokens or different layers draw differently: every pipeline stage and every rank of
    DP x CP has its own stream. Ranks of one tensor-parallel group share it, because they drop the same activations,
    and the tracker splits it where they have different ones.
    """
    facts = rank_facts()
    stream = facts.pp_rank + facts.pp_size * (facts.cp_rank + facts.cp_size * facts.dp_rank)
    seed = run.training.seed
    if iteration:
        seed = int.from_bytes(hashlib.sha256(f"{seed} {iteration}".encode()).digest()[:4], "little")
    seed += _STRIDE * stream
    random.seed(seed)
    numpy.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
