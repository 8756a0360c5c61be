"""The programs of examples/python print what they promise, and the notebook runs in a kernel."""

import re
from pathlib import Path

import pytest

from tests.helpers.launchers import Forked
from tests.helpers.ranks import RankParent
from tests.helpers.rows import rows
from tests.helpers.sources import ROOT

FOLDER = ROOT / "examples" / "python"
PRINTED = {
    "train": r"the last layer's tokens per expert: \[.*\ncontinued: \[\d+(, \d+){7}\]",
    "own_dataset": r"loss 4\.\d+ -> [0-3]\.\d+, validation [0-3]\.\d+\n10 13 16 -> \[.*\]",
    "own_stream": r"loss of the answers: 2\.\d+ -> [0-2]\.\d+",
    "own_loss": r"first loss: 5\.\d+ plain, 5\.\d+ smoothed",
    "own_callback": r"\d+ steps; router gradients of the last one: \[.*\]",
    "own_optimizer": r"loss after 30 steps: AdamW [0-5]\.\d+, Lion [0-5]\.\d+",
    "sweep": r"lr=0.003, bf16=True +\d\.\d+ +\d\.\d+ +\d\.\d+",
    "to_transformers": r"the largest difference of a logit is \d\.\de-0[5-9]",
    "load_and_generate": r"the largest gradient is in \w+",
    "on_two_ranks": r"2 ranks: loss 5\.\d+, saved in .*iter_0000005",
}


def test_every_example_has_its_row_and_at_most_sixty_lines() -> None:
    programs = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert programs.keys() == PRINTED.keys()
    assert {name for name, text in programs.items() if len(text.splitlines()) > 60} == set()


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory, rank_parent: RankParent) -> Path:
    """A saved step with a tokenizer."""
    folder = tmp_path_factory.mktemp("step")
    flags = (
        "--preset tiny --mock-data --tokenizer-type ByteTokenizer --seq-length 32 --train-iters 1 --eval-iters 0 "
        "--micro-batch-size 1 --global-batch-size 1 --save steps"
    )
    job = Forked(rank_parent)
    job.start(flags.split(), 1, folder, folder / "log")
    assert job.wait(300) == 0, (folder / "log").read_text()
    return folder / "steps"


@pytest.mark.parametrize("name", rows(PRINTED, test=["own_stream", "load_and_generate", "on_two_ranks"]))
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path, rank_parent: RankParent, step: Path) -> None:
    arguments = {"to_transformers": [str(tmp_path / "hf")], "load_and_generate": [str(step), "def main():"]}
    job = Forked(rank_parent, "tests.docs.guides:script")
    log = tmp_path / "log"
    job.start([str(FOLDER / f"{name}.py"), *arguments.get(name, [])], 1 + (name == "on_two_ranks"), tmp_path, log)
    assert job.wait(300) == 0, log.read_text()[-3000:]
    assert re.search(PRINTED[name], log.read_text()), log.read_text()[-3000:]


@pytest.mark.test_all(instead="tests/docs/test_python_examples.py::test_an_example_prints_what_it_promises")
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / "first_steps.ipynb", as_version=4)
    done = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [cell.outputs for cell in done.cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for output in outputs[2])
    assert "torch.Size([3, 256])" in str(outputs[-1]) and "largest bias" in str(outputs[3])
