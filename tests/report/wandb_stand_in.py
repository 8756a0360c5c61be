"""A package `wandb` for tests: what megatron_moe calls of W&B's, with a server that is a file.

`install` writes it into a folder. It does as wandb 0.31.0 with a server: a run that is resumed goes on after its last
step, and what is logged at a step below that is dropped. WANDB_STAND_IN says how it misbehaves.
"""

import json
from pathlib import Path
from typing import Any

PROGRAM = """
import json, os, sys, time

SERVER = {server!r}
MISBEHAVES = os.environ.get("WANDB_STAND_IN", "")
with open(SERVER + ".pid.new", "w") as file:
    file.write(str(os.getpid()))
os.replace(SERVER + ".pid.new", SERVER + ".pid")


class Settings:
    init_timeout = 90.0

    def __init__(self, **values):
        self.__dict__.update(values)
        assert set(values) <= {{"console", "silent", "init_timeout"}}, values


class Run:
    offline = disabled = False

    def __init__(self, values, mode):
        self.state = json.load(open(SERVER)) if os.path.exists(SERVER) and mode is None else {{}}
        self.state.setdefault("rows", {{}})
        self.state.setdefault("summary", {{}})
        self.state.update(opened=values, mode=mode, dropped=0, alerts=[], preempting=False, exit_code=None)
        self.step = max(map(int, self.state["rows"]), default=-1) + 1
        self.summary = self.state["summary"]
        self.url, self.dir = "https://wandb.invalid/run", values["dir"] + "/run/files"

    def define_metric(self, name, step_metric=None):
        self.state.setdefault("metrics", {{}})[name] = step_metric

    def log(self, values, step):
        if MISBEHAVES == "raises":
            raise RuntimeError("no room for key " + os.environ["WANDB_API_KEY"] + "\\nmore")
        if MISBEHAVES == "dies":
            os._exit(3)
        if step < self.step:
            self.state["dropped"] += 1
            return
        self.step = step
        self.state["rows"].setdefault(str(step), {{}}).update(values)
        self.summary.update(values)

    def alert(self, title, text, level):
        self.state["alerts"].append([title, text, level])

    def mark_preempting(self):
        self.state["preempting"] = True

    def finish(self, exit_code):
        self.state["exit_code"] = exit_code
        with open(SERVER + ".new", "w") as file:
            json.dump(self.state, file)
        os.replace(SERVER + ".new", SERVER)


def init(mode=None, settings=None, **values):
    print("this is no answer")
    if MISBEHAVES == "hangs":
        time.sleep(600)
    if MISBEHAVES == "away" and mode != "offline":
        raise TimeoutError("no server")
    return Run(values, mode)


def teardown():
    pass
"""


def install(folder: Path) -> Path:
    server = folder / "server.json"
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / "__init__.py").write_text(PROGRAM.format(server=str(server)))
    return server


def rows(server: Path) -> dict[int, dict[str, Any]]:
    return {int(step): row for step, row in json.loads(server.read_text())["rows"].items()}
