"""Weights & Biases and MLflow: a sink that hands a run to a process of its own, and that process.

The process, `python -m megatron_moe.report.tracker`, imports the service's package, which may raise, wait for a server,
or crash there: the training waits for nothing. It reads lines of JSON from its standard input and answers with lines of
`kind` and `text`, events for the run's log. The last line has `ending`; the input of a trainer that was killed ends
without it. docs/internals/decisions.md says why this is no thread.

A run that goes back to a checkpoint repeats iterations, and neither service takes values back. What came out the same
to the bit, and is there already, is not written again; other values are, and `attempt` says which came later.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TextIO
from urllib.parse import urlsplit

from megatron_moe.config.errors import ConfigError, MissingPackage
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
SECONDS_TO_FINISH = 60.0
"""The process ends so long after its input, at the latest."""
RETRY_SECONDS = (5.0, 30.0, 120.0, 600.0, 1800.0)
"""Waits between attempts to reach an MLflow server, which does not keep values by itself as W&B's process does."""
RUN_TAG = "megatron_moe.run_id"
"""The tag of an MLflow run that has our run_id."""

_EVENTS = ("fault", "warning", "slow", "stop")
_PACKAGES = {"wandb_project": ("wandb", "wandb"), "mlflow_experiment": ("mlflow", "mlflow-skinny")}
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SECONDS_TO_REACH_WANDB = 20.0
_MOST_MESSAGES = 10_000
_MOST_OF_MLFLOW = {"metrics": 1000, "params": 100, "tags": 100}
_LONGEST_OF_MLFLOW = {"params": 6000, "tags": 8000}
_NO_CONFIG_OF_WANDB = {"flags", "all_flags", "attempts", "data", "run_id"}
"""What metrics.run.json has that is in W&B's config in another way, or is too long for it."""
_SECRETS = ("KEY", "TOKEN", "PASSWORD", "SECRET")

Message = dict[str, Any]
Say = Callable[[str, str], None]
"""Takes the kind and the text of an event."""


def require_trackers(run: Run) -> None:
    """Refuse a service whose package is missing, by a ConfigError with the flag; nothing is imported."""
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


# In the trainer.


class TrackerSink(Sink):
    """Hands a run to the process of a service. Only `close` waits; a process that is gone is one warning.

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
        report: Say,
    ) -> None:
        self._service, self._options = SERVICES[flag], run.logging
        self._start_iteration, self._info = start_iteration, info
        self._abandoned, self._report = abandoned, report
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: tuple[IO[bytes], IO[bytes]] | None = None
        """The process's standard input and output; None where it gets no more."""
        self._unsent, self._unread = bytearray(), bytearray()
        self._lock, self._closing = threading.RLock(), False
        self._seconds_to_close = SECONDS_TO_CLOSE_INTERRUPTED

    def start(self, facts: dict[str, Any]) -> None:
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_moe.report.tracker", self._service],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                bufsize=0,
                start_new_session=True,  # a signal for the training is not for it
            )
        except OSError as error:
            self._give_up(f"its process could not be started: {error}")
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._send({"start_iteration": self._start_iteration, "about": self._info.values})

    def step(self, record: StepRecord) -> None:
        if self._pipes is None or record.iteration % self._options.tensorboard_log_interval:
            return
        values = dict(step_scalars(record, self._options), consumed_samples=float(record.consumed_samples))
        before = self._abandoned.get(record.iteration)
        self._send_values(record, values, again=before is not None and before == exact(record))

    def evaluation(self, record: EvalRecord) -> None:
        self._send_values(record, dict(evaluation_scalars(record, self._options)), again=False)

    def _send_values(self, record: StepRecord | EvalRecord, values: dict[str, float], *, again: bool) -> None:
        values["attempt"] = self._info.values["attempt"]
        self._send({"iteration": record.iteration, "time": record.time, "values": values, "again": again})

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
        if self._lock.acquire(timeout=1.0):
            if fault is not None:
                self._unsent += _line({"iteration": 0, "kind": "fault", "text": fault})
            self._unsent += _line({"ending": ending})
            self._write()
            self._lock.release()

    def close(self, summary: dict[str, Any] | None) -> None:
        until = time.monotonic() + self._seconds_to_close
        with self._lock:
            self._closing = True
            self._exchange()
            while self._pipes is not None:
                if time.monotonic() > until:
                    self._give_up(f"had not taken the last values after {self._seconds_to_close:g} s")
                    return
                time.sleep(0.02)
                self._exchange()

    def _send(self, message: Message) -> None:
        with self._lock:
            if self._pipes is None or self._closing:
                return
            self._unsent += _line(message)
            if len(self._unsent) > MOST_BYTES:
                self._give_up(f"{len(self._unsent) >> 20} MiB of values wait for it")
            else:
                self._exchange()

    def _exchange(self) -> None:
        """Write what the process takes now, and report what it has said."""
        with self._lock:
            if self._pipes is None:
                return
            self._write()
            has_ended = False
            with suppress(BlockingIOError):
                while data := os.read(self._pipes[1].fileno(), 2**16):
                    self._unread += data
                has_ended = True
            *lines, rest = bytes(self._unread).split(b"\n")
            self._unread = bytearray(rest)
            replies = [json.loads(line) for line in lines]
            last = replies[-1] if replies else {"kind": ""}
            if last["kind"] == "failed":
                self._give_up(last["text"])
            elif last["kind"] == "done":
                self._let_go()
            elif has_ended:
                self._give_up("its process has ended")
            for reply in replies:  # last, as what is reported comes back here as an event
                if reply["kind"] == "message":
                    self._report("message", reply["text"])
                elif reply["kind"] == "warning":
                    self._report("warning", f"{self._service}: {reply['text']}")

    def _write(self) -> None:
        if self._pipes is None:
            return
        pipe = self._pipes[0]
        # Where the process has ended, its last answer says why.
        with suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                del self._unsent[: os.write(pipe.fileno(), self._unsent[: 2**16])]
        if self._closing and not self._unsent:
            pipe.close()

    def _give_up(self, why: str) -> None:
        """Report once that the service gets no more, and leave its process to its own end."""
        self._let_go()
        self._report("warning", f"{self._service} gets no more of this run: {why}")

    def _let_go(self) -> None:
        if self._process is not None and self._pipes is not None:
            for pipe in self._pipes:
                pipe.close()
            self._process.poll()
        self._pipes = None
        self._unsent.clear()


def _line(message: Message) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"


# In the process of its own.


class _Wandb:
    """A run of W&B whose id is our run_id: online, or offline where WANDB_MODE says so or no server answers."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._run: Any = None
        self._shift = 0
        self._there = 0

    def open(self, about: Message, start_iteration: int) -> None:
        """Start the run, or continue it."""
        import wandb

        flags = about["all_flags"]
        # Its console capture and its own messages are for the process that trains, which this is not.
        own = {"console": "off", "silent": True, "x_stats_pid": os.getppid()}
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            own["init_timeout"] = _SECONDS_TO_REACH_WANDB
        known = {name: value for name, value in own.items() if hasattr(wandb.Settings(), name)}
        config = {name: value for name, value in about.items() if name not in _NO_CONFIG_OF_WANDB}
        settings: Message = {
            "project": flags["wandb_project"],
            "entity": flags["wandb_entity"],
            "name": flags["wandb_exp_name"],
            "dir": flags["wandb_save_dir"] or flags["save"],  # in which W&B makes its folder wandb
            "id": about["run_id"],
            "resume": "allow",
            "config": {**flags, **config},
            "allow_val_change": True,
            "settings": wandb.Settings(**known),
        }
        try:
            self._run = wandb.init(**settings)
        except Exception as error:
            if os.environ.get("WANDB_MODE", "online") != "online":
                raise
            wandb.teardown()  # what has failed holds the id
            self._run = wandb.init(**settings, mode="offline")
            folder = os.path.dirname(self._run.dir)
            self._say("warning", f"{_text(error)}; the run is recorded offline: `wandb sync {folder}` uploads it")
        else:
            where = self._run.url or f"offline, `wandb sync {os.path.dirname(self._run.dir)}` uploads it"
            self._say("message", f"W&B run: {'disabled by WANDB_MODE' if self._run.disabled else where}")
        # W&B drops values of a step below its last one. Its own count goes on where iterations are repeated.
        self._shift = max(0, self._run.step - start_iteration)
        self._there = self._run.summary.get("iteration") or 0
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, messages: list[Message]) -> None:
        """Log steps and evaluations, and keep the last event of each kind in the summary."""
        for message in messages:
            iteration = message["iteration"]
            if "kind" in message:
                self._run.summary[f"last_{message['kind']}"] = message["text"]
                if message["kind"] == "fault":
                    self._run.alert(f"fault at iteration {iteration}", message["text"], level="ERROR")
            elif not (message["again"] and iteration <= self._there):
                self._run.log({**message["values"], "iteration": iteration}, step=iteration + self._shift)

    def finish(self, ending: str) -> None:
        """End the run: its state is finished, failed, or preempted after a stop."""
        self._run.summary["ending"] = ending
        if ending.startswith("stopped"):
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == FINISHED else 1)


class _Mlflow:
    """A run of MLflow, found again by the tag of our run_id."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._client: Any = None
        self._id = ""
        self._there = 0

    def open(self, about: Message, start_iteration: int) -> None:
        """Start the run, or continue it."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder was asked for, which MLflow 3 discourages
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # it is tried again here
        from mlflow.tracking import MlflowClient

        flags = about["all_flags"]
        self._client = MlflowClient(flags["mlflow_tracking_uri"])
        name = flags["mlflow_experiment"]
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([number], f"tags.`{RUN_TAG}` = '{about['run_id']}'", max_results=1)
        tags = {
            RUN_TAG: about["run_id"],
            "megatron_moe.attempt": str(about["attempt"]),
            "mlflow.source.name": _cut(about["command"], "tags"),
            "mlflow.source.type": "JOB",
        }
        if about["git"]:
            tags["mlflow.source.git.commit"] = about["git"]["commit"]
        if found:
            self._id = found[0].info.run_id
            self._there = int(found[0].data.metrics.get("iteration", 0))
            self._client.update_run(self._id, status="RUNNING")
            self._log("tags", tags)
        else:
            run = self._client.create_run(number, tags=tags, run_name=flags["mlflow_run_name"])
            self._id = run.info.run_id
        if not found or not found[0].data.params:  # they do not change
            params = dict(about["flags"])
            params.update((f"layout.{axis}", size) for axis, size in about["layout"].items())
            params.update((f"versions.{package}", version) for package, version in about["versions"].items())
            self._log("params", params)
        self._say("message", f"MLflow run: {self._id} of experiment {name}")

    def write(self, messages: list[Message]) -> None:
        """Log steps and evaluations, and keep the last event of each kind as a tag."""
        from mlflow.entities import Metric

        metrics, tags = [], {}
        for message in messages:
            step = message["iteration"]
            if "kind" in message:
                tags[f"megatron_moe.last_{message['kind']}"] = message["text"]
            elif not (message["again"] and step <= self._there):
                at = round(datetime.fromisoformat(message["time"]).timestamp() * 1000)
                for name, value in {**message["values"], "iteration": step}.items():
                    metrics.append(Metric(name, float(value), at, step))
        self._send("metrics", metrics)
        self._log("tags", tags)

    def finish(self, ending: str) -> None:
        """End the run: its status is FINISHED, FAILED, or KILLED after a stop or a kill."""
        self._log("tags", {"megatron_moe.ending": ending})
        statuses = {FINISHED: "FINISHED", "failed": "FAILED"}
        self._client.set_terminated(self._id, statuses.get(ending.partition(":")[0], "KILLED"))

    def _log(self, kind: str, values: Mapping[str, object]) -> None:
        from mlflow.entities import Param, RunTag

        make = {"params": Param, "tags": RunTag}[kind]
        self._send(kind, [make(name, _cut(str(value), kind)) for name, value in values.items()])

    def _send(self, kind: str, values: list[Any]) -> None:
        most = _MOST_OF_MLFLOW[kind]  # that it takes at once
        for first in range(0, len(values), most):
            self._client.log_batch(self._id, **{kind: values[first : first + most]})


def _cut(text: str, kind: str) -> str:
    longest = _LONGEST_OF_MLFLOW[kind]
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _text(error: BaseException) -> str:
    """Return the first line of an error, without what the environment keeps secret."""
    text = str(error).strip().partition("\n")[0][:300].rstrip(".") or type(error).__name__
    for name, value in os.environ.items():
        if name.endswith(_SECRETS) and len(value) > 3:
            text = text.replace(value, f"${name}")
    return re.sub(r"://[^/@\s]+@", "://...@", text)


class _Input:
    """Reads messages in a thread, so that what has come in the meantime is written at once."""

    def __init__(self, lines: Iterable[str], on_end: Callable[[], None]) -> None:
        self._messages: queue.Queue[Message | None] = queue.Queue(_MOST_MESSAGES)
        self._parent, self._on_end = os.getppid(), on_end
        self.at_end = threading.Event()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        # A process that the trainer has forked holds the pipe open for as long as it lives: its end says nothing.
        for line in lines:
            if not line.endswith("\n"):  # the trainer was killed while it wrote
                break
            message = json.loads(line)
            self._messages.put(message)
            if "ending" in message:
                break
        self._end()

    def _end(self) -> None:
        self.at_end.set()
        self._on_end()
        self._messages.put(None)

    def take(self) -> list[Message | None]:
        """Return all messages that are there, and wait for the first; None is the end of all."""
        taken: list[Message | None] = []
        while not taken:
            try:
                taken.append(self._messages.get(timeout=5.0))
            except queue.Empty:
                if os.getppid() != self._parent and not self.at_end.is_set():
                    self._end()
        with suppress(queue.Empty):
            while taken[-1] is not None:
                taken.append(self._messages.get_nowait())
        return taken


def _patiently(act: Callable[[], None], say: Say, at_end: threading.Event) -> None:
    """Call `act` until it works, with waits of `RETRY_SECONDS`, and once more at the end; report the first failure."""
    for number, seconds in enumerate(RETRY_SECONDS):
        try:
            return act()
        except Exception as error:
            if number == 0:
                say("warning", f"{_text(error)}; trying again for up to {sum(RETRY_SECONDS) / 60:.0f} min")
            if at_end.wait(seconds):
                break
    act()


def track(service: str, lines: Iterable[str], replies: TextIO, on_end: Callable[[], None]) -> None:
    """Hand a run to a service, until the lines end, when `on_end` is called; what the service raises is answered."""

    def say(kind: str, text: str) -> None:
        with suppress(OSError):  # the trainer is gone, and what it has sent is handed over all the same
            replies.write(json.dumps({"kind": kind, "text": text}) + "\n")
            replies.flush()

    def act(call: Callable[..., None], *given: Any) -> None:
        if service == "W&B":
            call(*given)
        else:
            _patiently(lambda: call(*given), say, source.at_end)

    source = _Input(lines, on_end)
    tracker: _Wandb | _Mlflow = _Wandb(say) if service == "W&B" else _Mlflow(say)
    ending, messages = "killed", source.take()
    opening = messages.pop(0)
    if opening is None:
        return
    try:
        act(tracker.open, opening["about"], opening["start_iteration"])
        while True:
            values = []
            for message in filter(None, messages):
                if "ending" in message:
                    ending = message["ending"]
                else:
                    values.append(message)
            if values:
                act(tracker.write, values)
            if messages and messages[-1] is None:
                break
            messages = source.take()
        act(tracker.finish, ending)
        say("done", "")
    except Exception as error:
        say("failed", _text(error))


def main() -> None:
    """Serve the trainer that has started this process, whose signals are its own business."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a package prints is no answer
    limit = threading.Timer(SECONDS_TO_FINISH, os._exit, (1,))
    limit.daemon = True
    track(sys.argv[1], sys.stdin, replies, limit.start)


if __name__ == "__main__":
    main()
