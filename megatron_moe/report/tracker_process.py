"""The process that hands a run to Weights & Biases or MLflow, and imports their package: `python -m` starts it.

It reads lines of JSON from its standard input, as `tracker.TrackerSink` writes them, and answers on its standard output
with lines of `kind` and `text`, events for the run's log. The package may raise, wait for a server, or crash here: the
training waits for nothing. The last line has `ending`; the input of a trainer that was killed ends without it.

A run that goes back to a checkpoint repeats iterations, and neither service takes values back. What came out the same
to the bit, and is there already, is not written again; other values are, and `attempt` says which came later.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, TextIO

SECONDS_TO_FINISH = 60.0
"""The process ends so long after its input, at the latest."""
_SECONDS_TO_REACH_WANDB = 20.0
RETRY_SECONDS = (5.0, 30.0, 120.0, 600.0, 1800.0)
"""Waits between attempts to reach an MLflow server, which does not keep values by itself as W&B's process does."""
RUN_TAG = "megatron_moe.run_id"
"""The tag of an MLflow run that has our run_id."""
_MOST_MESSAGES = 10_000
_MOST_OF_MLFLOW = {"metrics": 1000, "params": 100, "tags": 100}
_LONGEST_OF_MLFLOW = {"params": 6000, "tags": 8000}
_SECRETS = ("KEY", "TOKEN", "PASSWORD", "SECRET")

Message = dict[str, Any]


class _Wandb:
    """A run of W&B whose id is our run_id: online, or offline where WANDB_MODE says so or no server answers."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._run: Any = None
        self._shift = 0
        self._there = 0

    def open(self, opened: Message) -> None:
        """Start the run, or continue it."""
        import wandb

        about = opened["about"]
        # Its console capture and its own messages are for the process that trains, which this is not.
        own = {"console": "off", "silent": True, "x_stats_pid": os.getppid()}
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            own["init_timeout"] = _SECONDS_TO_REACH_WANDB
        known = {name: value for name, value in own.items() if hasattr(wandb.Settings(), name)}
        settings: Message = {
            **opened["asked"],
            "id": about["run_id"],
            "resume": "allow",
            "config": {**about["all_flags"], **{name: about[name] for name in about if name not in _NO_CONFIG}},
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
            self._say("warning", f"{_text(error)}; the run is recorded offline: `wandb sync {self._folder}` uploads it")
        else:
            where = self._run.url or f"offline, `wandb sync {self._folder}` uploads it"
            self._say("message", f"W&B run: {'disabled by WANDB_MODE' if self._run.disabled else where}")
        # W&B drops values of a step below its last one. Its own count goes on where iterations are repeated.
        self._shift = max(0, self._run.step - opened["start_iteration"])
        self._there = self._run.summary.get("iteration") or 0
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    @property
    def _folder(self) -> str:
        return os.path.dirname(self._run.dir)

    def write(self, messages: list[Message]) -> None:
        """Log steps and evaluations, and keep the last event of each kind in the summary."""
        for message in messages:
            if "values" in message:
                if not _is_there(message, self._there):
                    iteration = message["iteration"]
                    self._run.log({**message["values"], "iteration": iteration}, step=iteration + self._shift)
                continue
            self._run.summary[f"last_{message['kind']}"] = message["text"]
            if message["kind"] == "fault":
                self._run.alert(f"fault at iteration {message['iteration']}", message["text"], level="ERROR")

    def finish(self, ending: str) -> None:
        """End the run: its state is finished, failed, or preempted after a stop."""
        self._run.summary["ending"] = ending
        if ending.startswith("stopped"):
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "finished" else 1)


_NO_CONFIG = {"flags", "all_flags", "attempts", "data", "run_id"}
"""What metrics.run.json has that is in W&B's config in another way, or is too long for it."""


class _Mlflow:
    """A run of MLflow, found again by the tag of our run_id."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._client: Any = None
        self._id = ""
        self._there = 0

    def open(self, opened: Message) -> None:
        """Start the run, or continue it."""
        for name, value in (
            ("MLFLOW_ALLOW_FILE_STORE", "true"),  # a folder was asked for, which MLflow 3 discourages
            ("MLFLOW_HTTP_REQUEST_TIMEOUT", "20"),
            ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),  # it is tried again here
        ):
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        asked, about = opened["asked"], opened["about"]
        self._client = MlflowClient(asked["uri"])
        name = asked["experiment"]
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
            run = self._client.create_run(number, tags=tags, run_name=asked["name"])
            self._id = run.info.run_id
        if not found or not found[0].data.params:  # they do not change
            self._log("params", _params(about))
        self._say("message", f"MLflow run: {self._id} of experiment {name}")

    def write(self, messages: list[Message]) -> None:
        """Log steps and evaluations, and keep the last event of each kind as a tag."""
        from mlflow.entities import Metric

        metrics, tags = [], {}
        for message in messages:
            if "values" not in message:
                tags[f"megatron_moe.last_{message['kind']}"] = message["text"]
            elif not _is_there(message, self._there):
                at, step = round(datetime.fromisoformat(message["time"]).timestamp() * 1000), message["iteration"]
                values = {**message["values"], "iteration": step}
                metrics += [Metric(name, float(value), at, step) for name, value in values.items()]
        for part in _parts(metrics, "metrics"):
            self._client.log_batch(self._id, metrics=part)
        self._log("tags", tags)

    def finish(self, ending: str) -> None:
        """End the run: its status is FINISHED, FAILED, or KILLED after a stop or a kill."""
        self._log("tags", {"megatron_moe.ending": ending})
        status = "FINISHED" if ending == "finished" else "FAILED" if ending.startswith("failed") else "KILLED"
        self._client.set_terminated(self._id, status)

    def _log(self, kind: str, values: dict[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        make = {"params": Param, "tags": RunTag}[kind]
        for part in _parts([make(name, _cut(value, kind)) for name, value in values.items()], kind):
            self._client.log_batch(self._id, **{kind: part})


def _params(about: Message) -> dict[str, str]:
    """Return an MLflow run's parameters: the flags that differ from their defaults, layout and versions."""
    return {
        **{name: str(value) for name, value in about["flags"].items()},
        **{f"layout.{name}": str(value) for name, value in about["layout"].items()},
        **{f"versions.{name}": value for name, value in about["versions"].items()},
    }


def _cut(text: str, kind: str) -> str:
    longest = _LONGEST_OF_MLFLOW[kind]
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _parts(values: list[Any], kind: str) -> Iterator[list[Any]]:
    """Yield the values in parts that MLflow takes at once."""
    most = _MOST_OF_MLFLOW[kind]
    for first in range(0, len(values), most):
        yield values[first : first + most]


def _is_there(message: Message, last: int) -> bool:
    """Return whether a service that has values up to iteration `last` has the same ones of this step."""
    return bool(message["again"]) and message["iteration"] <= last


def _text(error: BaseException) -> str:
    """Return the first line of an error, without what the environment keeps secret."""
    text = str(error).strip().partition("\n")[0][:300].rstrip(".") or type(error).__name__
    for name, value in os.environ.items():
        if name.endswith(_SECRETS) and len(value) > 3:
            text = text.replace(value, f"${name}")
    return re.sub(r"://[^/@\s]+@", "://...@", text)


_TRACKERS: dict[str, type[_Wandb | _Mlflow]] = {"W&B": _Wandb, "MLflow": _Mlflow}


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
        while taken[-1] is not None:
            try:
                taken.append(self._messages.get_nowait())
            except queue.Empty:
                break
        return taken


def _patiently(act: Callable[[], None], say: Callable[[str, str], None], at_end: threading.Event) -> None:
    """Call `act` until it works, with the waits of `RETRY_SECONDS`, the first failure being reported.

    At the end of the input it is tried once more, at once.
    """
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

    source, tracker = _Input(lines, on_end), _TRACKERS[service](say)
    ending, messages = "killed", source.take()
    opened = messages.pop(0)
    if opened is None:
        return

    def act(call: Callable[..., None], *values: Any) -> None:
        if service == "W&B":
            call(*values)
        else:
            _patiently(lambda: call(*values), say, source.at_end)

    try:
        act(tracker.open, opened)
        while True:
            ending = next((message["ending"] for message in messages if message and "ending" in message), ending)
            values = [message for message in messages if message and "ending" not in message]
            if values:
                act(tracker.write, values)
            if messages and messages[-1] is None:
                break
            messages = source.take()
        act(tracker.finish, ending)
        say("done", "")
    except Exception as error:
        say("failed", _text(error))


def _limit() -> None:
    limit = threading.Timer(SECONDS_TO_FINISH, os._exit, (1,))
    limit.daemon = True
    limit.start()


def main() -> None:
    """Serve the trainer that has started this process, whose signals are its own business."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a package prints is no answer
    track(sys.argv[1], sys.stdin, replies, _limit)


if __name__ == "__main__":
    main()
