"""Run the command blocks of a guide as they are written, and compare what they print with what the guide shows.

`megatron-moe` and `python` of the blocks are small programs that ask this process for a fork of one that has imported
torch and the engine already; everything else is bash.
"""

import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path

from tests.helpers.ranks import ROOT, Child, RankParent, rank_environment

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
ASK = """#!{python} -SE
import os, sys
from multiprocessing.connection import Client
asked = Client({address!r})
asked.send([os.path.basename(sys.argv[0]), os.getcwd(), sys.argv[1:]])
printed, status = asked.recv()
sys.stdout.write(printed)
sys.exit(status)
"""


@dataclass
class Step:
    """A block of commands, whether it is run, and the output that the guide shows below it, if it does."""

    commands: str
    verified: bool
    shown: str


def steps(text: str) -> list[Step]:
    """Return the ```bash blocks of a page in order, each with the ```text block that follows it."""
    found: list[Step] = []
    for reason, language, body in BLOCK.findall(text):
        if language == "bash":
            found.append(Step(body, not reason, ""))
        elif language == "text" and found:
            found[-1].shown = body
    return found


def substituted(text: str, replacements: Mapping[str, str]) -> str:
    """Return a page with its commands made small. Each replacement has to match exactly once, or it says nothing."""
    commands = "".join(step.commands for step in steps(text))
    for old in replacements:
        assert commands.count(old) == 1, f"{old!r} is {commands.count(old)} times in the guide's commands"

    def made_small(block: re.Match[str]) -> str:
        lines = block[0]
        for old, new in replacements.items() if block[2] == "bash" else ():
            lines = lines.replace(old, new)
        return lines

    return BLOCK.sub(made_small, text)


def masked(line: str) -> str:
    """Return a line with `#` for each number and one space for each gap."""
    return " ".join(NUMBER.sub("#", line).split())


def missing(shown: str, printed: str) -> list[str]:
    """Return the shown lines that did not come, in their order, in this form.

    A line `...` stands for lines that are left out, and `...` at the end of a line for the rest of it.
    """
    left = iter([masked(line) for line in printed.splitlines()])
    lost = []
    for line in shown.splitlines():
        wanted = masked(line)
        if wanted in ("", "..."):
            continue
        whole = not wanted.endswith("...")
        start = wanted.removesuffix("...").rstrip()
        if not any(came == start if whole else came.startswith(start) for came in left):
            lost.append(line)
            left = iter([masked(line) for line in printed.splitlines()])
    return lost


@contextmanager
def shell(folder: Path, scratch: Path, parent: RankParent) -> Iterator[Callable[[Step], tuple[int, str]]]:
    """Give a function that runs a block in a folder, to the first command that fails, and returns status and output.

    `megatron-moe` and `python` are forks of `parent`. Of a block that cannot be run here, only the syntax is checked.
    """
    programs = scratch / "bin"
    programs.mkdir(parents=True)
    address = str(scratch / "asked")
    for name in ("megatron-moe", "python"):
        (programs / name).write_text(ASK.format(python=sys.executable, address=address))
        (programs / name).chmod(0o755)
    environment = {**rank_environment(), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}

    def run(step: Step) -> tuple[int, str]:
        command = ["bash", "-euo" if step.verified else "-neuo", "pipefail", "-c", step.commands]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=folder, env=environment, timeout=600, **output)
        return done.returncode, done.stdout

    with Listener(address) as listening:
        answering = threading.Thread(target=_answer, args=(listening, scratch / "log", parent), daemon=True)
        answering.start()
        yield run
        Client(address).send(None)
        answering.join()


def _answer(listening: Listener, log: Path, parent: RankParent) -> None:
    targets = {"megatron-moe": "megatron_moe_tools.console:main", "python": "tests.docs.guides:script"}
    while True:
        with listening.accept() as asking:
            if (asked := asking.recv()) is None:  # the shell is closed
                return
            program, folder, argv = asked
            log.unlink(missing_ok=True)
            pids = parent.fork([Child(targets[program], argv, str(log), folder)])
            while (status := parent.statuses(pids, 10.0)[0]) is None:
                pass
            asking.send((log.read_text(), status))


def script(argv: list[str]) -> int:
    sys.argv[:] = argv
    runpy.run_path(argv[0], run_name="__main__")
    return 0
