"""One rank of the doctor: a process that measures one layout after another, until its standard input ends.

A task is one line of JSON on standard input: number, rank, ranks, store, seconds, result, flags, and request, the rest
of a `Request`. The answer is one line of JSON on standard output: the number, and the error's traceback or null. The
record goes to the file that the task names.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, TextIO


def main() -> None:
    """Serve. What libraries print goes to standard error, with this process's stack whenever SIGUSR1 asks for it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    import torch

    import megatron_moe.apps.doctor.measure  # noqa: F401  the costly import, before the first task is timed

    torch.set_num_threads(1)
    _tell(answers, {"ready": os.getpid()})
    for line in sys.stdin:
        task = json.loads(line)
        error = None
        try:
            _work(task)
        except Exception:
            error = traceback.format_exc()
        _tell(answers, {"number": task["number"], "error": error})


def _work(task: dict[str, Any]) -> None:
    import torch

    from megatron_moe.apps.doctor.measure import Request, join, measure
    from megatron_moe.config.schema import build

    join(task["store"], task["rank"], task["ranks"], task["seconds"])
    torch.save(measure(Request(build(task["flags"]), **task["request"])), task["result"])


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _end_with(parent: int) -> None:
    """End this process when the doctor is gone, whatever it is waiting for."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
