"""Signals reach the run wherever it is, and a process that does not leave is made to."""

import ctypes
import os
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest

from megatron_moe.io.program import DONE, INTERRUPTED, StoppedEarly
from megatron_moe.training.signals import SAVING, StopSignals, signal_name
from tests.helpers.ranks import Child


def test_the_first_of_several_signals_asks_to_stop_and_does_not_end_the_process():
    before = [signal.getsignal(number) for number in SAVING]
    with StopSignals(save=True) as stop:
        stop.loop_looks = True
        assert not stop.stop_signal
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):  # a second one is harmless
            os.kill(os.getpid(), number)
        assert stop.stop_signal and signal_name(stop.stop_signal) == "SIGUSR1"
    assert [signal.getsignal(number) for number in SAVING] == [handler or signal.SIG_DFL for handler in before]


def test_no_thread_is_left_that_would_free_the_runs_tensors_when_the_interpreter_ends():
    for _ in range(20):
        before = set(threading.enumerate())
        with StopSignals(save=True):
            assert len(threading.enumerate()) > len(before)
        assert set(threading.enumerate()) == before


def test_before_the_first_step_a_signal_that_saves_ends_the_program_at_once_and_a_second_one_is_harmless():
    with StopSignals(save=True) as stop:
        with pytest.raises(StoppedEarly) as early:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGTERM)
    assert (early.value.code, early.value.reason, stop.stop_signal) == (DONE, "by SIGUSR1", False)


def test_a_time_limit_ends_the_start_and_is_left_to_the_loop_afterwards():
    with StopSignals(save=False, limit_minutes=0.005) as stop, pytest.raises(StoppedEarly) as early:
        time.sleep(60)
    assert (early.value.code, early.value.reason) == (DONE, "(--exit-duration-in-mins 0.005)")
    with StopSignals(save=True, limit_minutes=0.005) as stop:
        stop.loop_looks = True
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.stop_signal == signal.SIGUSR1


def stopped_by(number: int) -> None:
    from megatron_moe.training.run import _before_end

    trainer = MagicMock(watchdog=None, saver=SimpleNamespace(latest="a/iter_0000005"))
    trainer.progress.iteration, trainer.run.training.exit_signal_handler = 7, False
    with StopSignals(save=False) as stop:
        stop.before_end = partial(_before_end, trainer)
        os.kill(os.getpid(), number)
        time.sleep(600)


@pytest.mark.parametrize("number", SAVING)
def test_a_signal_ends_the_process_without_the_flag_after_its_last_words(rank_parent, tmp_path, number):
    pids = rank_parent.fork([Child("tests.training.test_signals:stopped_by", number, str(tmp_path / "log"))])
    assert rank_parent.statuses(pids, 300.0) == [-number]
    said = "after iteration 7; the last checkpoint is a/iter_0000005 (--exit-signal-handler saves one first)"
    assert (tmp_path / "log").read_text() == f"stopped by {signal_name(number)} {said}\n"


def test_ctrl_c_raises_in_the_main_thread_and_a_second_one_does_not_disturb_the_way_out():
    with StopSignals(save=False) as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
    assert stop.interrupted


def wait_until_asleep(pid: int) -> None:
    """Until the main thread has used no processor time for half a second: it printed, and now waits in C."""
    used, quiet = -1.0, 0
    while quiet < 5:
        time.sleep(0.1)
        times = psutil.Process(pid).cpu_times()
        quiet, used = (quiet + 1, used) if times.user + times.system == used else (0, times.user + times.system)


def stuck_in_c(save: bool) -> None:
    """Locking a mutex twice stands for a collective that waits: C code that no signal brings back to Python."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    with StopSignals(save=save, grace_seconds=0.3) as stop:
        stop.before_end = lambda reason: os.write(1, f"stopped {reason}".encode())  # type: ignore[assignment]
        libc.pthread_mutex_init(mutex, None)
        libc.pthread_mutex_lock(mutex)
        os.write(1, b"ready ")
        libc.pthread_mutex_lock(mutex)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, DONE)])
def test_a_signal_ends_a_process_whose_main_thread_is_stuck_in_c(rank_parent, tmp_path, number, status):
    log = tmp_path / "log"
    child = Child("tests.training.test_signals:stuck_in_c", number == signal.SIGTERM, str(log))
    pids = rank_parent.fork([child])
    while not (log.exists() and "ready" in log.read_text()) and rank_parent.statuses(pids) == [None]:
        time.sleep(0.05)
    wait_until_asleep(pids[0])
    os.kill(pids[0], number)
    assert rank_parent.statuses(pids, 300.0) == [status]
    word = "pretrain_moe.py: interrupted\n" if number == signal.SIGINT else ""
    assert log.read_text() == f"ready stopped by {signal_name(number)}{word}"
