"""The demo's stages: each runs once, again when its command changes, and never over a trained model."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_moe.config import rules
from megatron_moe_tools import compat
from megatron_moe_tools.prepare import preprocess as prepare
from tests.helpers.ranks import ROOT, alive
from tools import demo


class Stages:
    """Stand-ins for the five stages: each appends its name to a file and writes its output."""

    def __init__(self, folder, valid_loss=2.0, commands=None):
        self.folder, self.ran, self.valid_loss = folder, folder.parent / "ran", valid_loss
        self.commands = commands or {}

    def __call__(self, folder, extra):
        summary = {"valid_loss": self.valid_loss, "unigram_entropy": 5.0, "iterations": 3, "train_seconds": 1.0}
        summary |= {"tokens_per_second": 10.0, "sample": "def f():\n\x1b[2J", "checkpoint": "iter_3"}
        return [self.stage("corpus", "text", extra), self.stage("train", json.dumps(summary), extra)]

    def stage(self, name, content, extra):
        output = self.folder / ("summary.json" if name == "train" else name)
        write = (
            "import pathlib, sys\nran, name, output, content = sys.argv[1:5]\n"
            "open(ran, 'a').write(name + ' ')\nout = pathlib.Path(output)\n"
            "out.parent.mkdir(parents=True, exist_ok=True)\nout.write_text(content)\n"
        )
        code = self.commands.get(name, write)
        command = (sys.executable, "-SE", "-c", code, str(self.ran), name, str(output), content, *extra)
        return demo.Stage(name, f"stage {name}", command, (output,))

    def names(self):
        return self.ran.read_text().split() if self.ran.exists() else []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    previous = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "demo"
    signal.signal(signal.SIGTERM, previous)


def run(monkeypatch, stages, *flags):
    monkeypatch.setattr(demo, "stages", stages)
    return demo.main(["--folder", str(stages.folder), *flags])


def test_a_stage_runs_again_only_when_its_output_is_gone_or_its_flags_change_and_so_do_those_after_it(
    folder, monkeypatch, capfd
):
    stages = Stages(folder)
    assert run(monkeypatch, stages) == 0
    assert run(monkeypatch, stages) == 0
    assert stages.names() == ["corpus", "train"]
    output = capfd.readouterr().out
    assert output.count("validation loss  2.000") == 2 and "done before" in output and "report.html" in output
    (folder / "corpus").unlink()
    assert run(monkeypatch, stages) == 0
    assert run(monkeypatch, stages, "--train-iters", "5") == 0
    assert stages.names() == ["corpus", "train"] * 3
    # Data is not made anew under a trained model.
    (folder / "checkpoints").mkdir()
    (folder / "corpus").unlink()
    assert run(monkeypatch, stages, "--train-iters", "5") == 2
    assert "start over with --fresh" in capfd.readouterr().out and stages.names() == ["corpus", "train"] * 3
    assert run(monkeypatch, stages, "--train-iters", "5", "--fresh") == 0
    assert not (folder / "checkpoints").exists()


def test_fresh_never_removes_a_folder_that_is_not_the_demos(folder, monkeypatch):
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match="it is not removed"):
        run(monkeypatch, Stages(folder), "--fresh")
    assert (folder / "thesis.tex").exists()


def test_a_stage_that_fails_or_leaves_no_output_ends_the_demo_and_runs_again(folder, monkeypatch, capfd):
    stages = Stages(folder, commands={"corpus": "import sys; sys.exit(7)"})
    assert run(monkeypatch, stages) == 7
    stages.commands = {"corpus": "pass"}
    assert run(monkeypatch, stages) == 1 and "did not write" in capfd.readouterr().out
    stages.commands = {}
    assert run(monkeypatch, stages) == 0 and stages.names() == ["corpus", "train"]


@pytest.mark.parametrize(("loss", "status"), [(3.9, 0), (4.1, 1), (float("nan"), 1)])
def test_the_loss_has_to_be_a_nat_below_the_unigram_entropy(folder, monkeypatch, capfd, loss, status):
    assert run(monkeypatch, Stages(folder, valid_loss=loss)) == status
    shown = capfd.readouterr().out
    assert ("FAILED" in shown) is bool(status)
    assert "\x1b" not in shown, "the generated text could move the cursor"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_demo_that_is_stopped_or_killed_takes_its_command_along(tmp_path, number, status):
    program = (
        f"import sys, pathlib\nfrom tools import demo\nfolder = pathlib.Path({str(tmp_path)!r})\n"
        "child = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "stage = demo.Stage('corpus', 'corpus', (sys.executable, '-c', child), (folder / 'out',))\n"
        "demo.stages = lambda folder, extra: [stage]\n"
        "sys.exit(demo.main(['--folder', str(folder)]))\n"
    )
    # Whoever runs the tests in the background has told them, and with them the demo, to ignore Ctrl-C.
    heard = lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGINT, signal.SIGTERM)]  # noqa: E731
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=heard)
    child = next(int(line) for line in iter(process.stdout.readline, "") if line.strip().isdigit())
    process.send_signal(number)
    assert process.wait(300) == status
    deadline = time.monotonic() + 300
    while alive(child):
        assert time.monotonic() < deadline, "the command outlived the demo"
        time.sleep(0.05)


def test_the_demos_own_stages_are_commands_that_the_programs_accept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = {stage.name: stage for stage in demo.stages(Path("runs/demo"), ["--train-iters", "400"])}
    assert list(stages) == ["corpus", "tokenizer", "valid", "test", "train"]
    for name in ("tokenizer", "valid", "test"):
        prepare.parser().parse_args(stages[name].command[2:])
    words = stages["train"].command
    configuration = compat.parse(words[words.index("pretrain_moe.py") + 1 :])
    assert configuration.logging.report_file == "runs/demo/report.html"
    rules.check(configuration, demo.RANKS)
    assert configuration.training.train_iters == 400
    data = configuration.data
    needed = {f"{prefix[0]}.bin" for prefix in (data.train_data_path, data.valid_data_path)}
    needed |= {data.tokenizer_model, configuration.logging.summary_file}
    assert needed <= {str(path) for stage in stages.values() for path in stage.outputs}
    shown = demo.shown(words)
    assert shown.startswith("torchrun --standalone --nproc-per-node 2 pretrain_moe.py --preset demo")
    assert "'    def __init__(self, name'" in shown
