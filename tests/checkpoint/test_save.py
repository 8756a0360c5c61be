"""Saving, at once and in the background: the same bits, nothing torn, and a refusal that all ranks learn of."""

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint import lock as writer_lock
from megatron_moe.checkpoint.save import changed_by_updates
from megatron_moe.config.schema import Run, replace
from tests.helpers import trained_steps
from tests.helpers.rows import rows
from tests.helpers.trained_steps import OPTIMIZERS, SMALL, differing, tensors

EVERY = {**SMALL, "train_iters": 4, "save_interval": 2}
THREE = {"train_iters": 3, "save_interval": 1}


def trained(
    flags: dict[str, Any], slow_rank: int | None = None, delay: float = 0.0, copying: float = 0.0
) -> dict[str, Any]:
    """A run on this case's ranks, one of which is slow to write, and all are slow to copy what is left for later.

    Returns its summary, what was told, and how many tensors were left for later.
    """
    from megatron_moe.checkpoint import writer
    from megatron_moe.report.reporter import Reporter

    told: list[str] = []
    left: list[int] = []
    write, event, copy_rest = writer.write, Reporter.event, writer.Staged.copy_rest

    def slowly(*args: Any) -> writer.Written:
        if torch.distributed.get_rank() == slow_rank:
            time.sleep(delay)
        return write(*args)

    def copied_slowly(self: writer.Staged) -> None:
        left.append(len(self.rest))
        time.sleep(copying)
        copy_rest(self)

    def heard(self: Reporter, kind: str, text: str, **facts: Any) -> None:
        told.append(text)
        event(self, kind, text, **facts)

    with (
        mock.patch.object(writer, "write", slowly),
        mock.patch.object(Reporter, "event", heard),
        mock.patch.object(writer.Staged, "copy_rest", copied_slowly),
    ):
        return {**trained_steps.trained({**EVERY, **flags}), "told": told, "left": left}


def defect(step: Path) -> str | None:
    return manifest.structure_defect(step) or manifest.content_defect(step, manifest.read(step).files)


@pytest.mark.engine
@pytest.mark.parametrize("optimizer", rows(OPTIMIZERS, test=["bf16, distributed"]))
def test_what_is_saved_in_the_background_is_the_state_of_its_step_and_not_of_a_later_one(gloo, tmp_path, optimizer):
    flags = {**OPTIMIZERS[optimizer], "expert_model_parallel_size": 2}
    gloo.run(2, trained, flags={**flags, "save": str(tmp_path / "at once")})
    # Step 3 is ready to be applied before step 2 is copied; the second rank writes step 2 while 3 and 4 are trained.
    later = {**flags, "async_save": True, "save": str(tmp_path / "later")}
    result, _ = gloo.run(2, trained, flags=later, slow_rank=1, delay=2.0, copying=1.0)
    for number in (2, 4):
        there, here = (folder.step_folder(tmp_path / name, number) for name in ("at once", "later"))
        assert differing(tensors(there), tensors(here)) == []
        assert defect(there) is None and defect(here) is None
        for name in ("rng/rank_00000.pt", "rng/rank_00001.pt", "common.pt"):
            assert (there / name).read_bytes() == (here / name).read_bytes(), name
        first, second = (json.loads((step / folder.STATE).read_text()) for step in (there, here))
        assert (first["iteration"], first["scheduler"]) == (second["iteration"], second["scheduler"])
    assert len(result["left"]) == 2 and min(result["left"]) > 10
    saved = [text for text in result["told"] if text.startswith("saved ")]
    assert len(saved) == 2 and "iter_0000002" in saved[0] and "of which training waited" in saved[0]
    assert result["checkpoint"] == str(tmp_path / "later" / "iter_0000004")
    holds_what_is_needed(tmp_path / "at once" / "iter_0000002")


def holds_what_is_needed(step: Path) -> None:
    """A step has all to go on, and to know where it is from."""
    state = json.loads((step / folder.STATE).read_text())
    assert {"iteration", "consumed_samples", "skipped_iterations", "scheduler", "layout", "data"} <= state.keys()
    assert {"python", "torch", "megatron-core"} <= state["versions"].keys()
    assert state["tokenizer"]["type"] == "ByteTokenizer" and len(state["tokenizer"]["sha256"]) == 64
    assert json.loads((step / folder.CONFIG).read_text())["num_layers"] == 2
    assert {".metadata", "common.pt", "metadata.json"} <= manifest.read(step).files.keys()
    keys = tensors(step).keys()
    for kind in ("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "decoder."):
        assert any(key.startswith(kind) for key in keys), kind
    assert any(key.endswith("expert_bias") for key in keys)
    assert not (step.parent / ".writer.lock").exists()


def refused(flags: dict[str, Any], number: int, bad_rank: int, where: str) -> dict[str, Any]:
    """What became of a run that saves each step; the system refuses one rank's first write of `number`, or its copy."""
    from megatron_moe.checkpoint import writer
    from megatron_moe.checkpoint.errors import SaveError

    write, replace_text, copy_rest = writer.write, folder.replace_text, writer.Staged.copy_rest
    mark = folder.staging_dir(Path(flags["save"]), number)

    def full(staged: writer.Staged, hidden: Path) -> writer.Written:
        if torch.distributed.get_rank() == bad_rank and hidden == mark:
            raise OSError(errno.ENOSPC, "No space left on device", str(hidden / "__0_0.distcp"))
        return write(staged, hidden)

    def broken(path: Path, text: str, **options: bool) -> None:
        if text == f"{number}\n":
            raise OSError(errno.EIO, "Input/output error", str(path))
        replace_text(path, text, **options)

    def uncopied(staged: writer.Staged) -> None:
        copies.append(len(staged.rest))
        if torch.distributed.get_rank() == bad_rank and len(copies) == number:
            raise OSError(errno.ENOMEM, "Cannot allocate memory", "copy")
        copy_rest(staged)

    copies: list[int] = []
    patches = {
        "write": mock.patch.object(writer, "write", full),
        "copy": mock.patch.object(writer.Staged, "copy_rest", uncopied),
        "publish": mock.patch.object(folder, "replace_text", broken),
    }
    with patches[where]:
        try:
            return trained(flags)
        except SaveError as error:
            return {"error": str(error)}


@pytest.mark.parametrize(
    ("where", "background"),
    rows(
        [("write", False), ("publish", True), ("write", True), ("publish", False)],
        test=[("write", False), ("publish", True)],
    ),
)
def test_a_refused_step_stops_all_ranks_with_the_reason_and_leaves_the_step_before(gloo, tmp_path, where, background):
    flags = {**THREE, "async_save": background, "save": str(tmp_path)}
    first, second = gloo.run(2, refused, flags=flags, number=2, bad_rank=1, where=where)
    assert first["error"] == second["error"] and "step 2 was not saved" in first["error"]
    if where == "write":
        for words in ("rank 1", "__0_0.distcp", "the step takes", "are free at"):
            assert words in first["error"]
    assert folder.steps(tmp_path) == [1] and (tmp_path / folder.LATEST).read_text() == "1\n"
    assert not folder.staging_dir(tmp_path, 2).exists()
    assert defect(tmp_path / "iter_0000001") is None


@pytest.mark.parametrize(
    ("background", "where"),
    rows([(False, "write"), (True, "write"), (True, "copy")], test=[(False, "write"), (True, "copy")]),
)
def test_a_run_may_go_on_without_the_step_that_was_refused(gloo, tmp_path, background, where):
    flags = {**THREE, "async_save": background, "on_save_error": "continue", "save": str(tmp_path)}
    first, _ = gloo.run(2, refused, flags=flags, number=2, bad_rank=1, where=where)
    reason = "No space left on device" if where == "write" else "Cannot allocate memory"
    assert folder.steps(tmp_path) == [1, 3] and first["checkpoint"] == str(tmp_path / "iter_0000003")
    assert any(text.startswith(f"CHECKPOINT ERROR: step 2 was not saved: rank 1: {reason}") for text in first["told"])


def waited(flags: dict[str, Any]) -> tuple[str, int]:
    """A run of which one rank writes for longer than a collective may take; how often it was told of its progress."""
    from megatron_moe.checkpoint import save as save_file
    from megatron_moe.training.watchdog import Watchdog

    told: list[str] = []
    _set_pg_timeout(timedelta(seconds=1))
    at = Watchdog.at

    def noted(self: Watchdog, mark: str, limited: bool = True) -> None:
        told.append(mark)
        at(self, mark, limited)

    with mock.patch.object(save_file, "ROUND_SECONDS", 0.2), mock.patch.object(Watchdog, "at", noted):
        return trained(flags, slow_rank=1, delay=2.5)["checkpoint"], told.count("waiting for a checkpoint")


def test_a_rank_may_write_for_longer_than_a_collective_may_take(gloo, tmp_path):
    flags = {"save": str(tmp_path), "train_iters": 1}
    for checkpoint, progress in gloo.run(2, waited, flags=flags):
        assert checkpoint == str(tmp_path / "iter_0000001") and progress >= 2


def beside_nccl(flags: dict[str, Any]) -> list[bool]:
    """Of each exchange of objects in a run's save: whether it goes through a group beside the ranks' own.

    gloo stands for NCCL, whose exchanges would go through the memory of GPUs.
    """
    from megatron_moe.parallel import groups
    from megatron_moe.training.callbacks import checkpointing

    beside: list[bool] = []
    names = ("all_gather_object", "gather_object", "broadcast_object_list")
    exchanges = {name: getattr(torch.distributed, name) for name in names}
    require_unchanged = checkpointing.require_unchanged_data

    def noting(name: str) -> Callable[..., Any]:
        def exchange(*args: Any, group: Any = None, **more: Any) -> Any:
            beside.append(group not in (None, torch.distributed.group.WORLD))
            return exchanges[name](*args, group=group, **more)

        return exchange

    def first_of_a_save(*args: Any) -> None:
        for name in names:
            saving.enter_context(mock.patch.object(torch.distributed, name, noting(name)))
        require_unchanged(*args)

    with ExitStack() as saving:
        saving.enter_context(mock.patch.object(groups.dist, "get_backend", lambda *_: "nccl"))
        saving.enter_context(mock.patch.object(checkpointing, "require_unchanged_data", first_of_a_save))
        trained(flags)
    return beside


def test_objects_of_a_save_do_not_go_through_gpus(gloo, tmp_path):
    for beside in gloo.run(2, beside_nccl, flags={"save": str(tmp_path), "train_iters": 1}):
        assert len(beside) > 5 and all(beside)


def test_the_last_step_is_never_lost_without_an_error(gloo, tmp_path):
    flags = {**THREE, "on_save_error": "continue", "async_save": True, "save": str(tmp_path)}
    for result in gloo.run(2, refused, flags=flags, number=3, bad_rank=0, where="write"):
        assert "step 3 was not saved" in result["error"]


@contextmanager
def after_step(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Let a rank act when it has counted that step."""
    from megatron_moe.training.callbacks.reporting import Reporting

    told = Reporting.after_step

    def acting(reporting: Any, step: Any, result: Any) -> None:
        told(reporting, step, result)
        if step.iteration == number:
            act()

    with mock.patch.object(Reporting, "after_step", acting):
        yield


def stopped(flags: dict[str, Any], iteration: int) -> dict[str, Any]:
    """A run whose first rank gets SIGTERM after `iteration` steps while another step is being written."""

    def terminate() -> None:
        if torch.distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    with after_step(iteration, terminate):
        return trained(flags, slow_rank=1, delay=1.0)


def test_sigterm_waits_for_the_step_that_is_being_written_and_saves_its_own(gloo, tmp_path):
    flags = {"train_iters": 50, "async_save": True, "exit_signal_handler": True, "save": str(tmp_path)}
    gloo.run(2, stopped, flags=flags, iteration=3)
    assert folder.steps(tmp_path) == [2, 3]
    assert [defect(folder.step_folder(tmp_path, number)) for number in (2, 3)] == [None, None]


def test_retention_keeps_what_the_flags_say_and_the_step_the_run_started_from(gloo, tmp_path):
    flags = {"save_interval": 1, "keep_last_k": 1, "save": str(tmp_path)}
    gloo.run(1, trained, flags={**flags, "train_iters": 2})
    assert folder.steps(tmp_path) == [2]
    gloo.run(1, trained, flags={**flags, "train_iters": 4, "async_save": True, "load": str(tmp_path)})
    assert folder.steps(tmp_path) == [2, 4]
    gloo.run(1, trained, flags={**flags, "train_iters": 5, "load": str(tmp_path)})
    assert folder.steps(tmp_path) == [4, 5]


def disturbed(flags: dict[str, Any], how: str) -> str:
    """What a job is told that loses its folder after step 3 or in the save of step 4: to another job, or by a move."""
    from megatron_moe.checkpoint import writer
    from megatron_moe.checkpoint.errors import SaveError

    root, finish = Path(flags["save"]), writer.finish

    def overtake() -> None:
        lock = root / ".writer.lock"
        lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "far", "token": "other"}))
        folder.staging_dir(root, 4).mkdir(exist_ok=True)
        (folder.staging_dir(root, 4) / "theirs").touch()

    def finish_too_late(*args: Any) -> Any:
        overtake()
        return finish(*args)

    if how == "while it writes":
        disturbing = mock.patch.object(writer, "finish", finish_too_late)
    else:
        disturbing = after_step(3, overtake if how == "before" else lambda: root.rename(root.with_name("elsewhere")))
    with disturbing, pytest.raises(SaveError) as error:
        trained(flags)
    return str(error.value)


@pytest.mark.parametrize("when", ["before", "while it writes"])
def test_a_job_that_lost_its_folder_leaves_alone_what_the_other_one_writes(gloo, tmp_path, when):
    (message,) = gloo.run(1, disturbed, flags={"save": str(tmp_path), "save_interval": 4}, how=when)
    assert "was taken over by process" in message and "on far" in message
    assert (folder.staging_dir(tmp_path, 4) / "theirs").exists() and (tmp_path / ".writer.lock").exists()
    assert folder.steps(tmp_path) == []


def test_a_folder_that_is_moved_is_not_made_anew_and_goes_on_where_it_is(gloo, tmp_path):
    (message,) = gloo.run(1, disturbed, flags={"save": str(tmp_path / "c")}, how="moved")
    assert "moved or deleted while this job ran" in message
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    here = str(tmp_path / "elsewhere")
    lock = tmp_path / "elsewhere" / ".writer.lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "pid": 2**22 + 1}))  # that process has ended since
    (summary,) = gloo.run(1, trained, flags={"load": here, "save": here})
    assert folder.steps(tmp_path / "elsewhere") == [2, 4] and summary["iterations"] == 4
    assert any("that process is dead" in text for text in summary["told"])


def read_only(flags: dict[str, Any]) -> str:
    """What a job is told whose folder cannot be written, which only rank 0 tries."""
    refusal = OSError(errno.EROFS, "Read-only file system", flags["save"])
    with mock.patch.object(folder, "claim_root", side_effect=refusal):
        return trained_steps.refusal(flags)


def test_a_folder_that_is_anothers_or_cannot_be_written_is_told_on_all_ranks_before_anything_is_built(gloo, tmp_path):
    flags = {**EVERY, "save": str(tmp_path)}
    for message in gloo.run(2, read_only, flags=flags):
        assert f"--save {tmp_path}: cannot be written" in message and "Read-only file system" in message
    with writer_lock.acquire(tmp_path)[0]:
        for message in gloo.run(2, trained_steps.refusal, flags=flags):
            assert "another job writes there: process" in message and writer_lock.NAME in message


def test_what_changes_before_the_update_is_copied_at_once():
    weight, moment, mean, bias = (torch.zeros(4) for _ in range(4))
    chunk = SimpleNamespace(parameters=lambda: [weight], buffers=[bias])
    half = SimpleNamespace(param_groups=[{"params": [moment]}], state={0: {"exp_avg": moment, "step": 3}})
    both = SimpleNamespace(chained_optimizers=[half, SimpleNamespace(param_groups=[], state={})])
    average = SimpleNamespace(weights=[SimpleNamespace(values=mean)])
    trained = SimpleNamespace(model=[chunk], optimizer=both, average=average)

    def later(**flags):
        addresses = changed_by_updates(replace(Run(), **flags), trained)
        return [tensor.untyped_storage().data_ptr() in addresses for tensor in (weight, moment, mean, bias)]

    assert later() == [True, True, True, False]
    assert later(overlap_param_gather=True) == [False, True, True, False]  # the next forward pass gathers the weights
