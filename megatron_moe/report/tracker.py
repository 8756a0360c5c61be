"""Sinks for Weights & Biases and MLflow: each writes to a process of its own, which the training never waits for."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_moe.config.errors import ConfigError, MissingPackage
from megatron_moe.config.run_flags import LoggingConfig
from megatron_moe.config.schema import Run
from megatron_moe.report.records import EvalRecord, EventRecord, StepRecord, exact
from megatron_moe.report.run_info import FINISHED, RunInfo
from megatron_moe.report.sink import Sink, evaluation_scalars, step_scalars

SERVICES = {"wandb_project": "W&B", "mlflow_experiment": "MLflow"}
"""The flag that asks for a service -> the service."""
MOST_BYTES = 64 * 2**20
"""Bytes of values that wait for a process that does not read; one that falls behind further is given up."""
SECONDS_TO_CLOSE = 30.0
"""How long the end of a run that has finished waits for a process to hand over its last values."""
SECONDS_TO_CLOSE_INTERRUPTED = 5.0
"""The same of a run that was stopped, which its launcher gives half a minute, or has failed."""

_EVENTS = ("fault", "warning", "stop")
_PACKAGES = {"wandb_project": ("wandb", "wandb"), "mlflow_experiment": ("mlflow", "mlflow-skinny")}
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def require_trackers(run: Run) -> None:
    """Refuse a service whose package is missing, before anything is allocated; nothing is imported.

    Raises:
        ConfigError: the message names the flag.
    """
    flags = run.logging
    for flag, (module, package) in _PACKAGES.items():
        given = getattr(flags, flag)
        if given is not None and not _is_installed(module):
            raise MissingPackage(
                f"--{flag.replace('_', '-')} {given}: needs the {module} package; install it with "
                f"`pip install {package}`, or drop the flag"
            )
    if flags.mlflow_experiment is None:
        return
    place = flags.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not place:
        raise ConfigError(
            f"--mlflow-experiment {flags.mlflow_experiment}: needs a place for its runs; add --mlflow-tracking-uri "
            "http://HOST:PORT or file:FOLDER, or set MLFLOW_TRACKING_URI"
        )
    if urlsplit(place).scheme.partition("+")[0] in _DATABASES and not _is_installed("sqlalchemy"):
        raise MissingPackage(
            f"--mlflow-experiment {flags.mlflow_experiment}: MLflow needs the sqlalchemy package for a database; "
            "install it with `pip install mlflow`, or use --mlflow-tracking-uri file:FOLDER"
        )


def _is_installed(module: str) -> bool:
    # A folder of this name, as W&B makes one for its runs, is found as a package without a file.
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


class TrackerSink(Sink):
    """Hands a run to a service, by lines of JSON to `tracker_process`; see there for what the service gets.

    Nothing here waits but `close`, for a bounded time, and nothing raises for the service's sake: where its process is
    gone, or takes no more, that is one warning and the sink is off.

    Args:
        flag: the flag that asks for the service, a key of `SERVICES`.
        info: what the run is; its `facts` are complete when `start` is called.
        abandoned: iteration -> exact record, of steps after `start_iteration` that an earlier attempt has reported.
        report: takes the kind and text of an event.
    """

    def __init__(
        self,
        flag: str,
        run: Run,
        start_iteration: int,
        info: RunInfo,
        abandoned: Mapping[int, dict[str, Any]],
        report: Callable[[str, str], None],
    ) -> None:
        self._service = SERVICES[flag]
        self._run, self._start_iteration, self._info = run, start_iteration, info
        self._abandoned, self._report = abandoned, report
        self._options: LoggingConfig = run.logging
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent, self._unread = bytearray(), bytearray()
        self._lock, self._closing = threading.RLock(), False
        self._seconds_to_close = SECONDS_TO_CLOSE_INTERRUPTED

    def start(self, facts: dict[str, Any]) -> None:
        package = Path(__file__).resolve().parents[2]
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_moe.report.tracker_process", self._service],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                bufsize=0,
                start_new_session=True,  # a signal for the training is not for it
            )
        except OSError as error:
            self._warn(f"its process could not be started: {error}")
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._send(
            {
                "asked": _asked(self._service, self._run),
                "start_iteration": self._start_iteration,
                "about": self._info.values,
            }
        )

    def step(self, record: StepRecord) -> None:
        if self._process is None or record.iteration % self._options.tensorboard_log_interval:
            return
        again = self._abandoned.get(record.iteration) == exact(record) if self._abandoned else False
        self._send_values(record, dict(step_scalars(record, self._options)), again)

    def evaluation(self, record: EvalRecord) -> None:
        self._send_values(record, dict(evaluation_scalars(record, self._options)))

    def event(self, record: EventRecord) -> None:
        if record.kind in _EVENTS:
            self._send({"iteration": record.iteration, "kind": record.kind, "text": record.text})

    def flush(self) -> None:
        self._exchange()

    def end(self, ending: str) -> None:
        if ending == FINISHED:
            self._seconds_to_close = SECONDS_TO_CLOSE
        self._send({"ending": ending})

    def on_abort(self, ending: str, fault: str | None) -> None:
        lines = [{"iteration": 0, "kind": "fault", "text": fault}] if fault is not None else []
        if self._process is not None and self._lock.acquire(timeout=1.0):
            self._unsent += _lines(*lines, {"ending": ending})
            self._write()
            self._lock.release()

    def close(self, summary: dict[str, Any] | None) -> None:
        until = time.monotonic() + self._seconds_to_close
        with self._lock:
            self._closing = True
            self._exchange()
            while self._process is not None:
                left = until - time.monotonic()
                if left <= 0:
                    self._warn(f"had not taken the last values after {self._seconds_to_close:g} s")
                    return
                self._wait(left)
                self._exchange()

    def _wait(self, seconds: float) -> None:
        """Wait until the process takes or says something."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if self._unsent:
                ready.register(self._process.stdin, selectors.EVENT_WRITE)
            ready.select(seconds)

    def _send_values(self, record: StepRecord | EvalRecord, values: dict[str, float], again: bool = False) -> None:
        if isinstance(record, StepRecord):
            values = {**values, "consumed_samples": float(record.consumed_samples)}
        values["attempt"] = self._info.values["attempt"]
        self._send({"iteration": record.iteration, "time": record.time, "values": values, "again": again})

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._process is None or self._closing:
                return
            self._unsent += _lines(message)
            if len(self._unsent) > MOST_BYTES:
                self._warn(f"{len(self._unsent) >> 20} MiB of values wait for it")
                return
            self._exchange()

    def _exchange(self) -> None:
        """Write what the process takes now, and report what it has said."""
        with self._lock:
            if self._process is None:
                return
            self._write()
            replies, ended = self._read()
            said = {reply["kind"]: reply["text"] for reply in replies}
            if "failed" in said:
                self._warn(said["failed"])
            elif "done" in said:
                self._let_go()
            elif ended:
                self._warn("its process has ended")
            for reply in replies:  # last, as what is reported comes back here as an event
                if reply["kind"] == "message":
                    self._report("message", reply["text"])
                elif reply["kind"] == "warning":
                    self._report("warning", f"{self._service}: {reply['text']}")

    def _write(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        pipe = self._process.stdin
        # Where the process has ended, its last answer says why.
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                del self._unsent[: os.write(pipe.fileno(), self._unsent[: 2**16])]
        if self._closing and not self._unsent:
            pipe.close()

    def _read(self) -> tuple[list[dict[str, str]], bool]:
        """Return what the process has said, and whether it has ended."""
        assert self._process is not None and self._process.stdout is not None
        ended = False
        with suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 2**16):
                self._unread += data
            ended = True
        *lines, rest = bytes(self._unread).split(b"\n")
        self._unread = bytearray(rest)
        return [json.loads(line) for line in lines], ended

    def _warn(self, why: str) -> None:
        """Report once that the service gets no more, and leave its process to its own end."""
        self._let_go()
        self._report("warning", f"{self._service} gets no more of this run: {why}")

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            process.poll()
        self._unsent.clear()


def _lines(*messages: dict[str, Any]) -> bytes:
    return "".join(json.dumps(message, default=str) + "\n" for message in messages).encode()


def _asked(service: str, run: Run) -> dict[str, str | None]:
    """Return where the run goes, by what `tracker_process` calls it."""
    flags = run.logging
    if service == "MLflow":
        return {
            "experiment": flags.mlflow_experiment,
            "name": flags.mlflow_run_name,
            "uri": flags.mlflow_tracking_uri,
        }
    return {
        "project": flags.wandb_project,
        "entity": flags.wandb_entity,
        "name": flags.wandb_exp_name,
        "dir": flags.wandb_save_dir or run.checkpoint.save,  # in which W&B makes its folder wandb
    }
