"""What a run says at its start of how its flags were read, and of sharding flags that change nothing."""

from __future__ import annotations

import json

import pytest

from megatron_moe.config import cli
from megatron_moe.report import Sink
from megatron_moe.training.build import _sharding_notes
from megatron_moe.training.run import pretrain

pytestmark = pytest.mark.engine

TINY = "--preset tiny --mock-data --vocab-size 256 --train-iters 1 --eval-iters 0".split()


class Messages(Sink):
    """Keeps the messages of a run, in their order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def message(self, text: str) -> None:
        self.seen.append(text)


@pytest.mark.usefixtures("one_process")
def test_the_notes_of_a_deepspeed_file_are_reported_once_and_first(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"seed": 7, "gradient_clipping": 0.5, "zero_optimization": {"overlap_comm": True}}))
    run = cli.parse([*TINY, "--deepspeed-config", str(path), "--clip-grad", "0.25"], world_size=1)
    sink = Messages()
    pretrain(run, also=[sink])
    assert len(run.notes) == 3 and sink.seen[:3] == list(run.notes)
    assert sum(text.startswith("ds.json") for text in sink.seen) == 3
    assert "overlap_comm" in sink.seen[2] and "--clip-grad 0.25" in sink.seen[1]


def test_a_dry_run_shows_the_notes_too(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"seed": 7, "aio": {}}))
    pretrain(cli.parse([*TINY, "--deepspeed-config", str(path), "--dry-run"], world_size=1))
    assert "ds.json sets --seed 7" in capsys.readouterr().out


def test_a_dry_run_shows_what_the_letters_give_each_rank(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    letters = "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|t|t||t|||L"
    batch = "--micro-batch-size 1 --global-batch-size 4"
    pretrain(cli.parse([*TINY, *letters.split(), *batch.split(), "--dry-run"], world_size=4))
    assert "0: Et | t, 1-2: t | -, 3: - | L" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "fragments"),
    [
        ("", []),
        ("--expert-model-parallel-size 4", []),
        ("--use-torch-fsdp2", []),
        ("--use-torch-fsdp2 --zero-hpz-partition-size 2", []),
        ("--use-torch-fsdp2 --expert-model-parallel-size 4", ["ZeRO stage 3: there is one copy of each expert"]),
        ("--use-torch-fsdp2 --zero-hpz-partition-size 4", ["--zero-hpz-partition-size 4: these are all ranks"]),
    ],
)
def test_a_sharding_flag_without_an_effect_is_named(flags, fragments):
    notes = _sharding_notes(cli.parse([*TINY, *flags.split()]), 4)
    assert len(notes) == len(fragments)
    for note, fragment in zip(notes, fragments):
        assert fragment in note
