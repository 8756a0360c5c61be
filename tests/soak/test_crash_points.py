"""R2 and R3: every crash point of one save, every refusal of one, and disks that hold k twentieths of a step."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint import crash_points
from tests.helpers import object_store
from tests.helpers.object_store import ObjectStore
from tests.helpers.ranks import RankParent

MODES = {
    "first save": (2, {}),
    "first save, async": (2, {"async_save": True}),
    "with retention": (4, {"keep_last_k": 1}),
    "with retention, async": (4, {"keep_last_k": 1, "async_save": True}),
}
DISK_LEVELS = 21
FILE_LIMITS = (0, 1000, 20_000, 100_000, 200_000)


@pytest.fixture(scope="module")
def trials(rank_parent: RankParent) -> Iterator[crash_points.Trials]:
    with crash_points.Trials(rank_parent) as trials:
        yield trials


@pytest.fixture(scope="module")
def reference(trials: crash_points.Trials, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an undisturbed run leaves."""
    root = tmp_path_factory.mktemp("reference")
    assert trials.run({"save": str(root)}) == 0, trials.output()
    return crash_points.content(root, 6)


FAULTS = {
    "signal=KILL": ("R2 crash points", crash_points.CALLS, MODES),
    "error=EIO": ("R3 refused calls", ("fsync", "rename", "mkdir"), list(MODES)[2:]),
    "error=ENOSPC": ("R3 refused calls", ("mkdir", "rename"), list(MODES)[2:]),
}


@pytest.mark.parametrize(("what", "mode"), [(what, mode) for what, (*_, modes) in FAULTS.items() for mode in modes])
def test_after_a_crash_or_a_refusal_at_any_point_of_a_save_a_whole_step_loads(
    trials, reference, tmp_path, what, mode, scaled, figure
):
    if reason := crash_points.strace_is_missing():
        pytest.skip(reason)
    (name, calls, _), (stop_at, flags) = FAULTS[what], MODES[mode]
    there = trials.calls({**flags, "save": str(tmp_path / "counted")}, stop_at)
    points = [crash_points.Fault(call, number + 1, what) for call in calls for number in range(there.get(call, 0))]
    chosen = points[:: max(1, len(points) // scaled(len(points)))]
    wrong = []
    for point in chosen:
        folder = tmp_path / f"{point.call}{point.number}"
        wrong += crash_points.trial(trials, folder, flags, stop_at, point)
        if crash_points.content(folder, 6) != reference:
            wrong.append(f"{point}: what was trained afterwards is not what an undisturbed run trains")
        shutil.rmtree(folder)
    figure(name, mode=mode, fault=what, trials=len(chosen), failures=len(wrong))
    assert wrong == []


@pytest.mark.parametrize("mode", list(MODES)[2:])
def test_after_a_kill_at_any_request_of_a_save_to_a_store_a_whole_step_loads(rank_parent, mode, scaled, figure):
    stop_at, flags = MODES[mode]
    wrong = []
    with ObjectStore() as store, crash_points.Trials(rank_parent, store) as trials:
        root = store.bucket(f"undisturbed{len(mode)}")
        assert trials.run({**flags, "save": str(root)}) == 0, trials.output()
        reference = crash_points.content(root, 6)
        counted = store.bucket(f"counted{len(mode)}")
        assert trials.run({**flags, "save": str(counted)}, stop_at=stop_at) == 0, trials.output()
        points = [object_store.Fault(number // 2, carried_out=number % 2 > 0) for number in range(2 * store.asked)]
        chosen = points[:: max(1, len(points) // scaled(len(points)))]
        for point in chosen:
            root = store.bucket(f"trial{len(mode)}-{point.number}-{int(point.carried_out)}")
            wrong += crash_points.trial(trials, root, flags, stop_at, point)
            if crash_points.content(root, 6) != reference:
                wrong.append(f"{point}: what was trained afterwards is not what an undisturbed run trains")
    figure("R2 requests to a store", mode=mode, trials=len(chosen), failures=len(wrong))
    assert wrong == []


@contextlib.contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be made here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_on_a_disk_of_any_size_a_step_is_whole_or_refused_with_the_numbers(trials, tmp_path, background, figure):
    measured = tmp_path / "measured"
    assert trials.run({"save": str(measured), "train_iters": 2}) == 0
    step = sum(path.stat().st_size for path in measured.rglob("*") if path.is_file()) // 1024
    failures, refused = [], 0
    for level in range(DISK_LEVELS):
        # Room for the first step, what file systems add to files, and k twentieths of the second.
        with disk(tmp_path / f"disk{level}", step + 120 + step * level // 20) as root:
            flags = {"save": str(root / "c"), "async_save": background, "train_iters": 4}
            status = trials.run(flags)
            wrong = crash_points.what_is_wrong(root / "c", 2 if status else 4)
            said = trials.output()
            if status == crash_points.REFUSED:
                refused += 1
                if "the step takes" not in said or "are free at" not in said:
                    wrong.append("the message does not say what is needed and free")
            elif status:
                wrong.append(f"status {status}\n{said}")
            failures += [f"{level} twentieths: {words}" for words in wrong]
    figure("R3 disk levels", background=background, trials=DISK_LEVELS, refused=refused, failures=len(failures))
    assert failures == [] and 0 < refused < DISK_LEVELS


@pytest.mark.parametrize("limit", FILE_LIMITS)
def test_a_limit_on_the_size_of_files_refuses_the_step_and_leaves_the_one_before(trials, tmp_path, limit):
    root = tmp_path / "c"
    assert trials.run({"save": str(root)}, stop_at=4, file_limit=limit) == crash_points.REFUSED, trials.output()
    assert crash_points.what_is_wrong(root, 2) == [] and "File too large" in trials.output()
