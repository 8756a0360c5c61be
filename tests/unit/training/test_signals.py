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

from megatron_moe.training.signals import INTERRUPTED, StopSignals

ROOT = Path(__file__).resolve().parents[3]


def test_sigterm_asks_to_stop_and_does_not_end_the_process():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(save_on_sigterm=True) as stop:
        assert not stop.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one is harmless
        assert stop.stop_requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_is_left_alone_without_the_flag():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(save_on_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_raises_in_the_main_thread():
    with pytest.raises(KeyboardInterrupt):
        with StopSignals(save_on_sigterm=False) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    assert stop.interrupted


def test_a_second_ctrl_c_does_not_disturb_the_way_out():
    with StopSignals(save_on_sigterm=False):
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
        import ctypes
        from megatron_moe.training.signals import StopSignals
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        with StopSignals(save_on_sigterm=False, grace_seconds=0.3):
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
        assert child.wait(timeout=20) == INTERRUPTED
    finally:
        child.kill()
        child.wait()
