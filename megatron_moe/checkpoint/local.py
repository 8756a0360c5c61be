"""Local steps (`--local-save`): every rank's own state on its node, with a copy on the next node.

    DIR/RUN/rank_00003/iter_0000110/
      state.bin                   every shard of the rank, one after the other
      shards.json                 their names, boxes and dtypes
      common.pt, config.json, state.json, rng/, hf/, manifest.json    as in a step of --save

RUN is a token that the folder of `--save` keeps, so that no other run's state is taken. A rank's folder is written,
published and verified as a step of `--save` is, by the same functions, and so is its copy on another node. A start
takes the newest local step of which every rank's part verifies, on its own node or from a copy, and which is newer than
the step of `--load`; all ranks decide together. A local step fits only the layout and the settings that saved it.
"""

from __future__ import annotations

import json
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe.checkpoint import folder, manifest, writer
from megatron_moe.checkpoint.errors import (
    ROUND_SECONDS,
    all_gather_object,
    attempted,
    gathered,
    in_rounds,
    on_rank_zero,
)
from megatron_moe.checkpoint.plan import CheckpointPlan, CheckpointSource, unlike
from megatron_moe.checkpoint.save import CheckpointSave, Saver, SaveTarget, collected, state_facts
from megatron_moe.checkpoint.sharded import Shard
from megatron_moe.checkpoint.state import TrainingProgress, TrainState, layout
from megatron_moe.checkpoint.step_reader import COMMON
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.io.files import new_file, replace_text, write_bytes, write_json
from megatron_moe.io.hashing import FileEntry
from megatron_moe.io.object_storage import location
from megatron_moe.io.texts import size_text
from megatron_moe.parallel.groups import host_group, rank_facts

TOKEN = ".local_steps"
"""The file in the folder of `--save` that names the run's folder of local steps on every node."""
KEPT = 2
"""Local steps that stay: the newest, and the one before, in case that a rank dies while it writes."""
_PIECE = 32 * 2**20
_DATA, _SHARDS = "state.bin", "shards.json"
_START = "local_start"
"""The entry of a local step's state that says which start of the run saved it: parts of two are not one state."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run, as far as they see one another's local folders.

    home: this rank's folder of local steps. ranks: of each node, in ascending order. start: a token of this start of
    the run, which its local steps keep. group: for copies alone, so that a thread can send them.
    """

    home: Path
    ranks: list[list[int]]
    start: str
    group: ProcessGroup | None = None

    def of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def keeper(self, rank: int) -> int:
        """Return the rank on the next node that keeps a copy of a rank's state."""
        here = self.of(rank)
        others = self.ranks[(here + 1) % len(self.ranks)]
        return others[self.ranks[here].index(rank) % len(others)]

    def root(self, rank: int) -> Path:
        """Return where this node has the steps of a rank."""
        return self.home / f"rank_{rank:05d}"


def meet(run: Run) -> tuple[Nodes, list[str]]:
    """Make the folder of local steps on every node, and find out which ranks share one. Collective.

    Returns:
        The nodes, and notes: there is no other node for copies, other runs' steps take room.

    Raises:
        ConfigError: on every rank, where one cannot write there.
    """
    save, rank = location(run.checkpoint.save or ""), torch.distributed.get_rank()

    def token() -> str:
        kept = save / TOKEN
        if not kept.exists():
            replace_text(kept, f"{uuid.uuid4().hex[:12]}\n", sole_writer=True)
        return kept.read_text(encoding="utf-8").strip()

    names = [on_rank_zero(token), uuid.uuid4().hex[:8]]
    torch.distributed.broadcast_object_list(names, src=0, group=host_group())
    top = Path(run.checkpoint.local_save or "")
    home = top / str(names[0])
    mark = f".seen_{names[1]}_"

    def claimed() -> None:
        try:
            folder.claim_root(home / f"rank_{rank:05d}")
            (home / f"{mark}{rank}").touch()
        except OSError as error:
            raise ConfigError(f"--local-save {top}: cannot be written: {error}; name a folder of each node") from None

    gathered(*attempted(claimed), str)
    seen = sorted(int(path.name.removeprefix(mark)) for path in home.glob(f"{mark}*"))
    ranks = sorted(set(map(tuple, all_gather_object(seen))))
    (home / f"{mark}{rank}").unlink()
    nodes, notes = Nodes(home, [list(node) for node in ranks], str(names[1])), []
    if len(ranks) > 1:
        nodes = replace(nodes, group=torch.distributed.new_group(backend="gloo"))
    else:
        notes.append(f"--local-save {top}: all ranks see one folder: no copy is kept, and a lost node loses its steps")
    others = sorted(path.name for path in top.iterdir() if path != home and any(path.glob("rank_*/iter_*")))
    if others:
        notes.append(f"--local-save {top}: other runs left local steps, which take room: {', '.join(others)}")
    return nodes, notes


# Saving


@dataclass
class LocalSave(CheckpointSave):
    """One local step that is being saved: this rank's state here, and copies from the ranks whose keeper it is."""

    nodes: Nodes = field(kw_only=True)
    indices: list[dict[str, Any]] = field(kw_only=True)
    """What `shards.json` says."""

    def _roots(self) -> list[Path]:
        return [self.target.root, *map(self.nodes.root, self._kept())]

    def _kept(self) -> list[int]:
        if self.nodes.group is None:
            return []
        return [rank for ranks in self.nodes.ranks for rank in ranks if self.nodes.keeper(rank) == self.rank]

    def _write(self) -> writer.Written:
        step, failure = attempted(self._write_own)
        if self.nodes.group is not None:
            transfer(self.nodes, [(self.nodes.keeper(self.rank), step)], self._kept())
        if failure is not None:
            raise failure
        return writer.Written()

    def _write_own(self) -> Path:
        try:
            self.staged.copy_rest()
        finally:
            self.copied.set()
        _forget(self.target.root, self.iteration)
        hidden = folder.open_hidden(self.target.root, self.iteration, self.num_bytes)
        with new_file(hidden / _DATA) as file:
            for shard in self.staged.shards.values():
                file.write(_bytes(shard.values.to(shard.dtype)))
        files = {_DATA: file.entry(), _SHARDS: write_json(hidden / _SHARDS, self.indices)}
        assert self.staged.common is not None, "every rank keeps it"
        files[COMMON] = write_bytes(hidden / COMMON, self.staged.common)
        files |= self._write_random_states() | self._write_small_files()
        return folder.publish(self.target.root, self.iteration, files)

    def publish(self) -> None:
        """Remove older steps of this rank and of those whose copies it keeps. Not collective."""
        for root in self._roots():
            self.notes += folder.remove_surplus(root, self.target.rule, (), published=self.iteration)

    def discard(self) -> None:
        """Remove what this rank has of the step, which some rank could not save."""
        for root in self._roots():
            folder.discard(root, self.iteration)
            shutil.rmtree(folder.step_folder(root, self.iteration), ignore_errors=True)


class LocalSaver(Saver):
    """The saver of a run's local steps. What is saved is not reported: it is too much."""

    def __init__(self, run: Run, where: SaveTarget, report: Callable[..., None], nodes: Nodes) -> None:
        def told(kind: str, text: str, **facts: Any) -> None:
            if kind != "saved":
                report(kind, text, **facts)

        super().__init__(run, where, told, begin_step=partial(begin, nodes=nodes))
        self._nodes = nodes

    def clear(self) -> None:
        """Remove all local steps of the run: its end is saved, and they take memory. Not collective."""
        shutil.rmtree(self._nodes.home, ignore_errors=True)


def _forget(root: Path, iteration: int) -> None:
    """Remove steps from this one on: of an earlier start, which the run has not gone on from."""
    for number in folder.steps(root):
        if number >= iteration:
            folder.remove_step(folder.step_folder(root, number))


def begin(
    run: Run,
    trained: TrainState,
    progress: TrainingProgress,
    where: SaveTarget,
    *,
    facts: dict[str, Any],
    memory: writer.Buffers | None = None,
    nodes: Nodes,
) -> LocalSave:
    """Begin to save a local step: copy this rank's state to host memory, but for what only an update changes.

    Not collective. The arguments are those of `save.begin`.
    """
    shards, common, *movable = collected(run, trained)
    staged = writer.staged_alone(shards, common, {} if memory is None else memory, *movable)
    rank = rank_facts().rank
    return LocalSave(
        replace(where, root=nodes.root(rank), rule=folder.Retention(KEPT), lock=None),
        progress.iteration,
        staged,
        *state_facts(run, trained, progress, where, {**facts, _START: nodes.start}),
        rank,
        staged.num_bytes + where.origin.num_bytes,
        nodes=nodes,
        indices=[_index(shard) for shard in shards],
    )


def _index(shard: Shard) -> dict[str, Any]:
    return {
        "key": shard.key,
        "start": list(shard.start),
        "shape": list(shard.values.shape),
        "dtype": str(shard.dtype).removeprefix("torch."),
    }


def _bytes(values: Tensor) -> memoryview:
    return memoryview(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# Copies


def transfer(nodes: Nodes, outgoing: Sequence[tuple[int, Path | None]], sources: Sequence[int]) -> None:
    """Send steps to other ranks, each with its receiver, and receive steps from the ranks in `sources`.

    Both at the same time, for the ranks of a ring would wait for one another. Where there is no step to send, its
    receiver learns that.

    Raises:
        OSError: one could not be written here, or did not arrive as it was sent. RuntimeError: a rank is gone.
    """

    def send() -> None:
        for to, step in outgoing:
            _send(step, to, nodes.group)

    sent: list[Exception | None] = []
    sender = threading.Thread(target=lambda: sent.append(attempted(send)[1]), name="local copies", daemon=True)
    sender.start()
    failures = [attempted(partial(_receive, nodes, source))[1] for source in sources]
    sender.join()
    if failure := next((one for one in (*failures, *sent) if one is not None), None):
        raise failure


def _send(step: Path | None, to: int, group: ProcessGroup | None) -> None:
    """Send the size of a step's manifest, the manifest, then every file in pieces; a size of 0 where there is none."""
    about = b"" if step is None else (step / manifest.NAME).read_bytes()
    owner = -1 if step is None else int(step.parent.name.removeprefix("rank_"))
    torch.distributed.send(torch.tensor([len(about), owner]), to, group=group)
    if step is None:
        return
    torch.distributed.send(_tensor(about), to, group=group)
    for name in json.loads(about)["files"]:
        with open(step / name, "rb") as file:
            while block := file.read(_PIECE):
                torch.distributed.send(_tensor(block), to, group=group)


def _receive(nodes: Nodes, source: int) -> None:
    """Receive a step and publish it on this node, if it arrives as its manifest says.

    After an error the rest is received all the same: its sender would wait for ever.
    """
    head = torch.empty(2, dtype=torch.int64)
    torch.distributed.recv(head, source, group=nodes.group)
    size, owner = head.tolist()
    if not size:
        return
    about = torch.empty(size, dtype=torch.uint8)
    torch.distributed.recv(about, source, group=nodes.group)
    told = json.loads(about.numpy().tobytes())
    root, iteration, arrived = nodes.root(owner), int(told["iteration"]), dict[str, FileEntry]()
    buffer = torch.empty(_PIECE, dtype=torch.uint8)

    def pieces(left: int) -> Iterator[Tensor]:
        while left:
            piece = buffer[: min(left, _PIECE)]
            torch.distributed.recv(piece, source, group=nodes.group)
            left -= len(piece)
            yield piece

    def opened() -> Path:
        folder.claim_root(root)
        _forget(root, iteration)
        return folder.open_hidden(root, iteration, sum(entry["bytes"] for entry in told["files"].values()))

    hidden, failure = attempted(opened)
    for name, entry in told["files"].items():
        arriving = pieces(entry["bytes"])
        if failure is None and hidden is not None:
            written, failure = attempted(partial(_put, hidden / name, arriving))
            arrived[name] = written or {"bytes": 0, "sha256": ""}
        for _ in arriving:
            pass
    if failure is None and arrived != told["files"]:
        failure = OSError(f"{root}: step {iteration} did not arrive as rank {source} sent it")
    if failure is not None:
        folder.discard(root, iteration)
        raise failure
    folder.publish(root, iteration, arrived)


def _put(path: Path, pieces: Iterator[Tensor]) -> FileEntry:
    path.parent.mkdir(exist_ok=True)
    with new_file(path) as file:
        for piece in pieces:
            file.write(_bytes(piece))
    return file.entry()


# Starting from one


def newest(run: Run, found: CheckpointPlan, nodes: Nodes, report: Callable[[str], None]) -> CheckpointPlan:
    """Return the plan with the newest local step that is sound on all ranks, if it is newer than the one found.

    Collective. Each rank's part is looked for on its own node, then among the copies; every file is hashed. The notes
    say what was taken, what was damaged or missing, and how many iterations are lost by that.
    """
    rank, world, after = torch.distributed.get_rank(), torch.distributed.get_world_size(), found.start_iteration
    there = {int(path.name[5:]): folder.steps(path) for path in nodes.home.glob("rank_*")}
    listings = all_gather_object(there)
    numbers = {number for listing in listings for steps in listing.values() for number in steps if number > after}
    notes: list[str] = []
    for iteration in sorted(numbers, reverse=True):
        bad, sound = set[tuple[int, int]](), dict[tuple[int, int], str]()
        while True:
            holders = _holders(nodes, listings, iteration, world, bad)
            missing = [number for number, holder in enumerate(holders) if holder is None]
            if missing:
                ranks = ", ".join(map(str, missing))
                notes.append(f"{folder.WARNING}local step {iteration} is passed over: no sound part of rank {ranks}")
                break
            held = [(number, nodes.of(holder)) for number, holder in enumerate(holders)]
            unknown = [number for number, node in held if holders[number] == rank and (number, node) not in sound]
            starts, defects = _checked(run, nodes, unknown, iteration, report)
            sound |= {held[number]: start for number, start in starts.items()}
            if not defects and len({sound[part] for part in held}) > 1:
                notes.append(f"{folder.WARNING}local step {iteration} is passed over: its parts are of several starts")
                break
            if not defects:
                defects = _fetched(nodes, holders, iteration)
            for number, why in defects.items():
                bad.add((number, nodes.of(holders[number])))
                where = f"rank {number}'s part on the node of rank {holders[number]}"
                notes.append(f"{folder.WARNING}local step {iteration}, {where}: {why}")
            if not defects:
                return _taken(run, found, nodes, iteration, notes, max(numbers))
    if numbers:
        start = f"step {after} of --load" if found.source else "the beginning"
        notes.append(
            f"{folder.WARNING}no local step can be taken, the newest was {max(numbers)}: the run goes on from {start}"
        )
    return replace(found, notes=(*found.notes, *notes))


def _holders(
    nodes: Nodes, listings: list[dict[int, list[int]]], iteration: int, world: int, bad: set[tuple[int, int]]
) -> list[Any]:
    """Return for each rank the rank that reads its part, on its own node where that has it; None: no node has it."""
    found: list[int | None] = []
    for rank in range(world):
        own = nodes.of(rank)
        order = sorted(range(len(nodes.ranks)), key=lambda node: node != own)
        able = (
            rank if node == own else nodes.ranks[node][0]
            for node in order
            if (rank, node) not in bad and iteration in listings[nodes.ranks[node][0]].get(rank, [])
        )
        found.append(next(able, None))
    return found


def _checked(
    run: Run, nodes: Nodes, ranks: list[int], iteration: int, report: Callable[[str], None]
) -> tuple[dict[int, str], dict[int, str]]:
    """Hash the parts of these ranks here, and learn of the others. Collective.

    Returns:
        For the ranks whose parts are sound, the start of the run that saved them; for the others what is wrong.
    """
    starts, found, done = dict[int, str](), dict[int, str](), 0

    def hashed() -> Iterator[None]:
        nonlocal done
        for rank in ranks:
            step = folder.step_folder(nodes.root(rank), iteration)
            reason = manifest.structure_defect(step)
            if reason is None:
                for outcome in manifest.checked_content(step, manifest.read(step).files):
                    if isinstance(outcome, str):
                        reason = outcome
                    else:
                        done += outcome
                    yield
            reason = reason or _unfit(run, step)
            if reason is None:
                starts[rank] = folder.read_json(step / folder.STATE)[_START]
            else:
                found[rank] = reason

    for read, seconds in in_rounds(hashed(), lambda: done, nodes.home):
        if seconds > ROUND_SECONDS and torch.distributed.get_rank() == 0:
            report(f"verifying local step {iteration}: {size_text(read)} so far")
    for others_starts, others_found in all_gather_object((starts, found)):
        starts |= others_starts
        found |= others_found
    return starts, found


def _unfit(run: Run, step: Path) -> str | None:
    """Return why a local step cannot go on as this run, in words that follow "it"."""
    state, config = folder.read_json(step / folder.STATE), folder.read_json(step / folder.CONFIG)
    if _START not in state or state.get("layout") != layout(rank_facts()):
        return f"it is of another layout, {state.get('layout')}"
    differing = unlike(run, config)
    return f"it was saved with other settings: {', '.join(differing)}" if differing else None


def _fetched(nodes: Nodes, holders: list[int], iteration: int) -> dict[int, str]:
    """Bring parts that only another node has to the ranks; return whose parts did not come. Collective."""
    rank = torch.distributed.get_rank()
    if all(holder == number for number, holder in enumerate(holders)):
        return {}
    outgoing: list[tuple[int, Path | None]] = [
        (to, folder.step_folder(nodes.root(to), iteration))
        for to, holder in enumerate(holders)
        if holder == rank and to != rank
    ]
    sources = [] if holders[rank] == rank else [holders[rank]]
    _, failure = attempted(lambda: transfer(nodes, outgoing, sources))
    failures = all_gather_object(None if failure is None else str(failure))
    return {number: why for number, why in enumerate(failures) if why is not None and holders[number] != number}


def _taken(
    run: Run, found: CheckpointPlan, nodes: Nodes, iteration: int, notes: list[str], newest_known: int
) -> CheckpointPlan:
    step = folder.step_folder(nodes.root(torch.distributed.get_rank()), iteration)
    source = CheckpointSource(step, folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE), True)
    text = f"local step {iteration} of all ranks verified; the step of --load is {found.start_iteration}"
    if newest_known > iteration:
        text += f"; {newest_known - iteration} iterations after it are lost"
    kept = [note for note in found.notes if note.startswith(folder.WARNING)]
    return replace(found, source=source, start_iteration=iteration, continues=False, notes=(*kept, *notes, text))


def read(step: Path, shards: Sequence[Shard]) -> None:
    """Fill a rank's shards from its part of a local step. Collective, for all ranks raise or none.

    Raises:
        ConfigError: the step has other shards than the run.
    """

    def filled() -> None:
        saved = json.loads((step / _SHARDS).read_bytes())
        if saved != [_index(shard) for shard in shards]:
            raise ConfigError(f"{step}: holds other tensors than this run; remove {step.parents[2]} on every node")
        with open(step / _DATA, "rb", buffering=0) as file:
            for shard in shards:
                values = torch.empty(shard.values.shape, dtype=shard.dtype)
                view = _bytes(values)
                while view and (count := file.readinto(view)):
                    view = view[count:]
                shard.values.copy_(values)

    gathered(*attempted(filled), str)
