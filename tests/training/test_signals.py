"""Signals reach the run wherever it is, and a process that does not leave is made to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megatron_moe.io.program import INTERRUPTED
from megatron_moe.training.signals import SAVING, StopSignals, signal_name

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


def test_sigterm_asks_to_stop_and_does_not_end_the_process():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(save=True) as stop:
        assert not stop.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one is harmless
        assert stop.stop_requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_first_of_several_signals_is_the_reason():
    before = [signal.getsignal(number) for number in SAVING]
    with StopSignals(save=True) as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert signal_name(stop.stop_signal) == "SIGUSR1"
    assert [signal.getsignal(number) for number in SAVING] == [handler or signal.SIG_DFL for handler in before]


def test_sigterm_ends_the_process_without_the_flag_after_its_last_words():
    code = textwrap.dedent("""
        import os, signal, time
        from megatron_moe.training.signals import StopSignals
        with StopSignals(save=False) as stop:
            stop.before_end = lambda number: os.write(1, signal.Signals(number).name.encode())
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=600)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"SIGTERM")


def test_ctrl_c_raises_in_the_main_thread():
    with pytest.raises(KeyboardInterrupt):
        with StopSignals(save=False) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    assert stop.interrupted


def test_a_second_ctrl_c_does_not_disturb_the_way_out():
    with StopSignals(save=False):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)


def wait_until_asleep(pid: int) -> None:
    """Until the main thread has used no processor time for half a second: it printed, and now waits in C."""
    used, quiet = -1.0, 0
    while quiet < 5:
        time.sleep(0.1)
        times = psutil.Process(pid).cpu_times()
        quiet, used = (quiet + 1, used) if times.user + times.system == used else (0, times.user + times.system)


def test_ctrl_c_ends_a_process_whose_main_thread_is_stuck_in_c():
    # Locking a mutex twice stands for a collective that waits: C code that no signal brings back to Python.
    code = textwrap.dedent("""
        import ctypes, os
        from megatron_moe.training.signals import StopSignals
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        with StopSignals(save=False, grace_seconds=0.3) as stop:
            stop.before_end = lambda number: os.write(1, b"stopped by %d" % number)
            libc.pthread_mutex_init(mutex, None)
            libc.pthread_mutex_lock(mutex)
            print("ready", flush=True)
            libc.pthread_mutex_lock(mutex)
    """)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        wait_until_asleep(child.pid)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=120) == INTERRUPTED
        assert child.stdout.read() == b"stopped by %d" % signal.SIGINT
    finally:
        child.kill()
        child.wait()
