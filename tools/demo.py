#!/usr/bin/env python3
"""Train a small DeepSeek-V3 from scratch on this machine's own Python sources, as `make demo` does.

    python tools/demo.py                    run, or continue where it stopped
    python tools/demo.py --fresh            start over
    python tools/demo.py --train-iters 600  other flags go to pretrain_moe.py

The stages are corpus, tokenizer and training tokens, validation tokens, test tokens, and training; each is a command
that could be typed by hand and is shown before it runs. A stage that is complete is skipped; training continues from
its last checkpoint. Exit status: 0 when the validation loss is at least one nat below the unigram entropy of the same
tokens, 1 when it is not, 2 for a mistake in the flags, 130 after Ctrl-C, otherwise that of the command that failed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Import the package of this checkout, even if another one is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_moe.io.files import replace_json
from megatron_moe.io.program import say

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
VOCAB_SIZE = 4096
MARGIN = 1.0
"""Nats per token by which the validation loss has to be below the unigram entropy."""
PROMPT = "    def __init__(self, name"
_STAMPS = "stages"


@dataclass(frozen=True)
class Stage:
    """A command and the files that it writes; complete when its stamp has the same command and the files exist."""

    name: str
    title: str
    command: tuple[str, ...]
    outputs: tuple[Path, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def stamp(self, folder: Path) -> Path:
        """Return the path of the file that records its completion."""
        return folder / _STAMPS / f"{self.name}.json"

    def is_complete(self, folder: Path) -> bool:
        """Return whether the same command has been completed here before."""
        try:
            done = json.loads(self.stamp(folder).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return done.get("command") == list(self.command) and all(output.exists() for output in self.outputs)

    def complete(self, folder: Path, seconds: float) -> None:
        """Write the stamp in one atomic step."""
        stamp = self.stamp(folder)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        replace_json(stamp, {"command": list(self.command), "seconds": seconds})


def stages(folder: Path, extra: Sequence[str]) -> list[Stage]:
    """Return the stages with their commands; paths stay as they are given, relative to the repository."""
    corpus, data, model = folder / "corpus", folder / "data", folder / "tokenizer" / "python.model"
    text = {split: str(corpus / f"{split}.jsonl") for split in ("train", "valid", "test")}
    preprocess = (sys.executable, "tools/preprocess_data.py", "--append-eod", "--overwrite")
    trained = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model))
    result = [
        Stage(
            "corpus",
            "text: the source files of Python's standard library",
            (sys.executable, "tools/corpus.py", str(corpus)),
            (corpus / "corpus.json",),
        ),
        Stage(
            "tokenizer",
            "tokenizer from the training text, and the training tokens",
            (*preprocess, "--input", text["train"], "--output-prefix", str(data / "train"), "--train-tokenizer")
            + ("--tokenizer-vocab-size", str(VOCAB_SIZE), "--tokenizer-model", str(model)),
            (model, *_dataset(data, "train")),
        ),
    ]
    for split in ("valid", "test"):
        command = (*preprocess, "--input", text[split], "--output-prefix", str(data / split), *trained)
        result.append(Stage(split, f"{split} tokens", command, _dataset(data, split)))
    result.append(
        Stage(
            "train",
            "training",
            training_command(folder, extra),
            (folder / "summary.json",),
            # One thread per core, shared by the ranks; a waiting thread leaves its core to the others.
            (("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // RANKS))), ("OMP_WAIT_POLICY", "passive")),
        )
    )
    return result


def _dataset(data: Path, split: str) -> tuple[Path, ...]:
    return tuple(data / f"{split}_text_document.{suffix}" for suffix in ("bin", "idx", "json"))


def training_command(folder: Path, extra: Sequence[str]) -> tuple[str, ...]:
    """Return the torchrun command line; `extra` flags come last and override the others."""
    data, model = folder / "data", folder / "tokenizer" / "python.model"
    flags: dict[str, Any] = {
        "--preset": "demo",
        "--expert-model-parallel-size": RANKS,
        "--tokenizer-type": "SentencePieceTokenizer",
        "--tokenizer-model": model,
        "--train-data-path": data / "train_text_document",
        "--valid-data-path": data / "valid_text_document",
        "--test-data-path": data / "test_text_document",
        "--data-cache-path": data / "cache",
        "--save": folder / "checkpoints",
        "--load": folder / "checkpoints",
        "--save-interval": 50,
        "--eval-interval": 50,
        "--log-interval": 5,
        "--metrics-file": folder / "metrics.jsonl",
        "--tensorboard-dir": folder / "tensorboard",
        "--plot-file": folder / "plot.png",
        "--report-file": folder / "report.html",
        "--summary-file": folder / "summary.json",
        "--sample-prompt": PROMPT,
    }
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    words = [str(word) for pair in flags.items() for word in pair]
    return (*launcher, "pretrain_moe.py", *words, *extra)


def shown(command: Sequence[str]) -> str:
    """Return a command as one would type it, with torchrun and python by their names, broken into lines at flags."""
    words = list(command)
    words[0] = "python"
    if words[1:3] == ["-m", "torch.distributed.run"]:
        words[:3] = ["torchrun"]
    lines = [""]
    for word in words:
        if word.startswith("--") and len(lines[-1]) > 70:
            lines.append("   ")
        lines[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(line if number else line.strip() for number, line in enumerate(lines))


def main(argv: Sequence[str]) -> int:
    """Run the stages that are not complete, print the result and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="demo.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="remove what an earlier demo left, and start over")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="where everything goes (%(default)s)")
    flags, extra = parser.parse_known_args(list(argv))
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which raises KeyboardInterrupt
    folder = flags.folder
    if flags.fresh and folder.exists():
        if any(folder.iterdir()) and not (folder / _STAMPS).is_dir():
            raise SystemExit(f"demo: {folder} was not made by this program; it is not removed. Name another --folder")
        shutil.rmtree(folder)
    plan = stages(folder, extra)
    started = time.monotonic()
    try:
        for number, stage in enumerate(plan, 1):
            heading = f"[{number}/{len(plan)}] {stage.title}"
            if stage.is_complete(folder):
                say(f"{heading}: done before")
                continue
            status = _run_stage(stage, heading, folder, plan[number:])
            if status:
                say(f"demo: {stage.name} ended with status {status}")
                return status
    except KeyboardInterrupt:
        say("\ndemo: interrupted; run it again to continue from here")
        return 130
    say(f"\nall stages complete after {time.monotonic() - started:.0f} s")
    return _print_result(folder)


def _run_stage(stage: Stage, heading: str, folder: Path, later: Sequence[Stage]) -> int:
    checkpoints = folder / "checkpoints"
    if stage.name != "train" and checkpoints.exists():
        say(
            f"demo: stage {stage.name} has to run again, but {checkpoints} holds a model that was trained on the data "
            "it would replace; start over with --fresh (make demo FRESH=1)"
        )
        return 2
    for other in later:
        other.stamp(folder).unlink(missing_ok=True)
    say(f"\n{heading}\n  {shown(stage.command)}\n")
    started = time.monotonic()
    # The demo runs this checkout, even if another version of the package is installed.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    status = _run(stage.command, {**os.environ, "PYTHONPATH": paths, **dict(stage.environment)})
    seconds = time.monotonic() - started
    if status == 0:
        missing = [str(output) for output in stage.outputs if not output.exists()]
        if missing:
            say(f"demo: {stage.name} did not write {', '.join(missing)}")
            return 1
        stage.complete(folder, seconds)
        say(f"{heading}: done in {seconds:.1f} s")
    return status


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command on this terminal and wait; it is stopped when this process is interrupted or dies."""
    child = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
    try:
        return child.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Ctrl-C from the terminal has reached it already; any other interrupt is passed on.
        for number, patience in ((None, 2), (signal.SIGINT, 10), (signal.SIGTERM, 10), (signal.SIGKILL, None)):
            if number is not None:
                child.send_signal(number)
            try:
                child.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        raise


def _end_with_parent() -> None:
    """Have Linux send SIGTERM to the child that calls this when the demo dies without stopping it."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):  # not Linux
        return


def _print_result(folder: Path) -> int:
    """Print the result and the paths of all outputs; return the exit status."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    loss, entropy = summary["valid_loss"], summary["unigram_entropy"]
    below = entropy - loss
    say(
        f"\nvalidation loss  {loss:.3f} nats per token\n"
        f"unigram entropy  {entropy:.3f} nats per token of the same tokens: "
        f"the model is {abs(below):.3f} {'below' if below >= 0 else 'ABOVE'}\n"
        f"training         {summary['iterations']} iterations in {summary['train_seconds']:.0f} s, "
        f"{summary['tokens_per_second']:,.0f} tokens/s\n\nwhat the model makes of a line of Python:\n"
    )
    say("\n".join(f"    {line}" for line in _printable(summary["sample"]).splitlines()))
    paths = {
        "text, tokens": f"{folder / 'corpus'}, {folder / 'data'}",
        "tokenizer": folder / "tokenizer" / "python.model",
        "checkpoint": summary["checkpoint"],
        "report": folder / "report.html",
        "picture": folder / "plot.png",
        "every step": folder / "metrics.jsonl",
        "TensorBoard": f"tensorboard --logdir {folder / 'tensorboard'}",
        "summary": folder / "summary.json",
    }
    say("\n" + "\n".join(f"{name:<13} {path}" for name, path in paths.items()))
    if not below >= MARGIN:
        say(
            f"\nFAILED: the validation loss {loss:.3f} is not at least {MARGIN:g} nat below the unigram entropy "
            f"{entropy:.3f}"
        )
        return 1
    return 0


def _printable(text: str) -> str:
    """Return generated text with control characters and what the terminal cannot show as escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    visible = ""
    for character in text:
        shown_as_is = character.isprintable() or character in "\n\t"
        visible += character if shown_as_is else character.encode("unicode_escape").decode()
    return visible.encode(encoding, errors="backslashreplace").decode(encoding)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
