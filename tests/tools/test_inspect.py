"""megatron-moe inspect tells the truth about steps, and exits with 0 only where all is well."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.checkpoint import lock as writer_lock
from megatron_moe.io.files import new_file
from megatron_moe_tools import inspect as tool
from megatron_moe_tools.convert.native import append_block, write_index
from megatron_moe_tools.inspect import main
from tests.checkpoint.checkpoint_steps import contents, flip, make_step, put_step, seal, tensors_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def inspect(capsys, tmp_path_factory):
    """`inspect(command, ...)`: exit status, what was printed, and the JSON file."""

    def run(*argv: object) -> tuple[int, str, dict[str, Any]]:
        path = tmp_path_factory.mktemp("json") / "out.json"
        status = main([*map(str, argv), "--json", str(path)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err, json.loads(path.read_text()) if path.exists() else {}

    return run


@pytest.fixture
def root(tmp_path):
    for iteration in (50, 100, 150):
        make_step(tmp_path, iteration, seed=iteration)
    return tmp_path


def test_list_tells_of_each_step_what_it_is_and_of_one_that_is_being_written(inspect, root):
    status, text, result = inspect("list", root)
    assert status == 0 and text.count("complete") == 3 and "200 samples" in text and "torch" in text
    (found,) = result["folders"]
    assert [step["step"] for step in found["steps"]] == [50, 100, 150]
    step = found["steps"][0]
    assert step["files"] == 9 and step["bytes"] == manifest.read(root / "iter_0000050").total_bytes
    assert step["defect"] is None and step["layout"] == {"world_size": 2} and "verified" not in step
    folder.staging_dir(root, 200).mkdir()
    (root / "iter_0000050.bad").mkdir()
    status, text, result = inspect("list", root)
    assert status == 0 and ".iter_0000200.saving" in text and result["folders"][0]["hidden"] == [".iter_0000200.saving"]
    assert "put aside" in text and result["folders"][0]["put_aside"] == ["iter_0000050.bad"]


def test_list_is_not_well_where_a_step_is_damaged_or_the_pointer_is_wrong(inspect, root):
    (root / folder.LATEST).write_text("100\n")
    status, text, _ = inspect("list", root)
    assert status == 1 and "names step 100; the newest complete step is 150" in text
    (root / folder.LATEST).write_text("150\n")
    (root / "iter_0000100" / "common.pt").unlink()
    status, text, _ = inspect("list", root)
    assert status == 1 and "DAMAGED: common.pt is missing" in text


def test_only_verifying_finds_a_flipped_bit_and_a_file_that_is_not_listed(inspect, root):
    flip(root / "iter_0000100" / "__1_0.distcp")
    assert inspect("list", root)[0] == 0
    status, text, result = inspect("list", "--verify", root)
    assert status == 1 and "DAMAGED: __1_0.distcp does not hold what was saved" in text
    assert [step["verified"] for step in result["folders"][0]["steps"]] == [True, False, True]
    status, text, result = inspect("verify", root)
    assert status == 1 and "iter_0000100: DAMAGED: __1_0.distcp" in text and text.count("good: 9 files") == 2
    assert inspect("verify", root / "iter_0000050", root / "iter_0000150")[0] == 0
    files = contents(200)
    del files["__1_0.distcp"]
    put_step(root, 200, files)
    status, text, _ = inspect("verify", root / "iter_0000200")
    assert status == 1 and "__1_0.distcp, which manifest.json does not list" in text


def test_a_folder_without_a_step_is_not_well_and_one_of_something_else_is_a_mistake(inspect, tmp_path):
    (tmp_path / folder.OWNER).touch()
    assert inspect("list", tmp_path)[0] == 1 and inspect("verify", tmp_path)[0] == 1
    (tmp_path / "other").mkdir()
    status, text, _ = inspect("list", tmp_path / "other")
    assert status == 2 and "is not a checkpoint folder" in text


def test_config_shows_the_flags_and_what_differs_between_two_steps(inspect, root):
    status, text, result = inspect("config", root)
    assert status == 0 and "iter_0000150" in text and result["config"] == {"lr": 0.001, "seed": 1234}
    step = root / "iter_0000100"
    (step / "config.json").write_text('{"lr": 0.5, "bf16": true}')
    seal(step, 100)
    status, text, result = inspect("config", root / "iter_0000050", step)
    assert status == 1 and "lr: 0.001 -> 0.5" in text
    assert result["differing"] == {"bf16": [None, True], "lr": [0.001, 0.5], "seed": [1234, None]}
    assert inspect("config", step, step)[0] == 0
    flip(step / "config.json")
    assert inspect("config", step)[0] == 1
    assert inspect("config", step, step, step)[0] == 2


def test_stats_are_those_of_the_tensors_and_a_damaged_step_is_read_only_on_demand(inspect, root):
    status, _, result = inspect("stats", root)
    expected = tensors_of(150)
    assert status == 0 and {row["key"] for row in result["tensors"]} == set(expected)
    for row in result["tensors"]:
        tensor = expected[row["key"]].double()
        assert row["shape"] == list(tensor.shape) and (row["nan"], row["inf"]) == (0, 0)
        for name, value in (("min", tensor.min()), ("max", tensor.max()), ("mean", tensor.mean())):
            assert row[name] == pytest.approx(float(value), abs=1e-12)
        assert row["std"] == pytest.approx(float(tensor.std(correction=0)), abs=1e-12)
    flip(root / "iter_0000150" / "__0_0.distcp")
    status, text, result = inspect("stats", root)
    assert status == 1 and "__0_0.distcp does not hold what was saved" in text and result == {}
    assert "NOT VERIFIED" in inspect("stats", root, "--no-verify")[1]


def test_a_number_that_is_not_finite_is_not_well(inspect, tmp_path):
    tensors = tensors_of(0)
    tensors["embedding.word_embeddings.weight"][3, 3] = torch.nan
    tensors["embedding.word_embeddings.weight"][9, :2] = -torch.inf
    make_step(tmp_path, 50, tensors=tensors)
    status, text, result = inspect("stats", tmp_path, "--match", "embedding")
    assert status == 1 and "1 NaN, 2 INF" in text and len(result["tensors"]) == 1
    assert inspect("stats", tmp_path, "--match", "bias")[0] == 0


def test_boxes_of_differently_split_tensors_meet(tmp_path):
    """Rows split over two ranks against columns split over two: the same boxes are cut out of both."""
    value = torch.arange(24.0).reshape(4, 6)

    def step(name: str, content: torch.Tensor, dim: int) -> Any:
        target = tmp_path / name
        target.mkdir()
        with new_file(target / "__0_0.distcp") as file:
            starts = [(0, 0), (2, 0) if dim == 0 else (0, 3)]
            parts = [append_block(file, "x", *one) for one in zip(starts, content.chunk(2, dim))]
        index = write_index(target, {"x": ("float32", (4, 6))}, parts, ())
        manifest.write(target, 50, {"__0_0.distcp": file.entry(), ".metadata": index})
        return tool.opened(target)

    rows = step("rows", value, 0)
    assert tool.diff(rows, step("columns", value, 1), "x") == {"key": "x", "equal": True}
    found = tool.diff(rows, step("zeros", torch.zeros(4, 6), 1), "x")
    assert (found["different"], found["max_difference"]) == (23, 23.0)


def test_diff_tells_how_far_steps_differ_and_what_is_missing(inspect, tmp_path):
    same = {"b": torch.tensor([torch.nan, -0.0]), "h": torch.zeros(3, 0)}
    first = {"a": torch.zeros(4), "c": torch.ones(4), "d": torch.ones(2), "e": torch.zeros(2), "g": torch.ones(6, 4)}
    second = {
        "a": torch.tensor([0.0, 0.25, 0.0, -1.5]), "c": torch.ones(4).bfloat16(), "e": torch.tensor([0.0, torch.nan]),
        "f": torch.ones(1), "g": torch.ones(5, 4),
    }  # fmt: skip
    for name, tensors in {"0": first, "1": second, "2": first}.items():
        make_step(tmp_path / name, 50, tensors={**same, **tensors})
    assert inspect("diff", tmp_path / "0", tmp_path / "2")[0] == 0
    status, text, result = inspect("diff", tmp_path / "0", tmp_path / "1")
    rows = {row["key"]: row for row in result["tensors"]}
    assert status == 1 and "2 tensors are equal to the bit, 6 are not" in text and "g: shapes [[6, 4], [5, 4]]" in text
    assert (rows["a"]["different"], rows["a"]["max_difference"]) == (2, 1.5)
    assert rows["b"]["equal"] and rows["c"]["dtypes"] == ["float32", "bfloat16"] and rows["c"]["max_difference"] == 0
    assert rows["d"]["only_in"].endswith("0/iter_0000050") and rows["f"]["only_in"].endswith("1/iter_0000050")
    assert rows["e"]["max_difference"] == "inf"


def test_prune_keeps_the_last_ones_and_multiples(inspect, root):
    for iteration in (200, 250):
        make_step(root, iteration)
    status, text, result = inspect("prune", root, "--keep-last", 2, "--keep-every", 100, "--dry-run")
    assert status == 0 and result["go"] == [50] and folder.steps(root) == [50, 100, 150, 200, 250]
    assert "would go: 50" in text
    assert inspect("prune", root, "--keep-last", 2, "--keep-every", 100)[0] == 0
    assert folder.steps(root) == [100, 150, 200, 250]
    assert inspect("prune", root, "--keep-last", 1)[0] == 0
    assert folder.steps(root) == [250] and not list(root.glob(".iter_*"))
    assert inspect("prune", root, "--keep-last", 1)[0] == 0 and folder.steps(root) == [250]


def test_prune_never_takes_a_damaged_step_for_a_good_one(inspect, root):
    flip(root / "iter_0000150" / "__0_0.distcp")
    (root / "iter_0000100" / "common.pt").unlink()
    status, text, result = inspect("prune", root, "--keep-last", 1)
    assert status == 1 and folder.steps(root) == [50, 100, 150]
    assert result["stay"] == [50] and result["go"] == [] and set(result["damaged"]) == {"100", "150"}
    assert "stays, damaged: step 150: __0_0.distcp" in text
    flip(root / "iter_0000050" / "__0_0.distcp")
    make_step(root, 10)
    flip(root / "iter_0000010" / ".metadata")
    status, text, _ = inspect("prune", root, "--keep-last", 1)
    assert status == 1 and "no step that can be loaded, so nothing is removed" in text
    assert folder.steps(root) == [10, 50, 100, 150]


def test_a_folder_that_a_job_writes_to_is_not_pruned(inspect, root):
    lock, _ = writer_lock.acquire(root)
    with lock:
        status, text, _ = inspect("prune", root, "--keep-last", 1)
    assert status == 2 and "another job writes there" in text and folder.steps(root) == [50, 100, 150]


def test_progress_is_told_while_much_is_read(root, monkeypatch, capsys):
    monkeypatch.setattr(tool, "_BETWEEN_LINES", 0.0)
    assert tool.damage(root / "iter_0000150") is None
    lines = capsys.readouterr().err.splitlines()
    assert lines and "iter_0000150: " in lines[0] and "s left" in lines[0]


def test_all_but_reading_tensors_works_without_torch_and_the_engine(root):
    program = (
        "import sys\n"
        "from megatron_moe_tools.inspect import main\n"
        "commands = [['list'], ['config'], ['verify'], ['prune', '--keep-last', '1', '--dry-run']]\n"
        f"status = max(main([*command, {str(root)!r}]) for command in commands)\n"
        "print([name for name in ('torch', 'numpy', 'megatron.core') if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "[]\n")
