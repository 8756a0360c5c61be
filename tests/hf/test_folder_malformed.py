"""Folders of Hugging Face's form that are wrong: each is refused, what is wrong is named, nothing is left behind."""

import json
import random
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_moe.config.errors import ConfigError
from megatron_moe.hf import folder as hf_folder
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.tensors import TensorReader
from megatron_moe_tools.convert.cli import main as convert
from tests.helpers.conversions import words
from tests.helpers.rows import rows
from tests.hf import small_folders
from tests.hf.malformed import CASES
from tests.hf.small_folders import INDEX, SHARDS, sound, write_json

MEMORY = 300 * 2**20
"""Bytes that a folder may cost beyond what the process has had before: none of them has more than a few kilobytes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sound folders; the code in them would make the file `sentinel` beside them."""
    root = tmp_path_factory.mktemp("folders")
    sound(root / "bf16", root / "sentinel")
    sound(root / "fp8", root / "sentinel", fp8=True)
    return root


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_folder_is_neither_opened_nor_converted(folders, tmp_path, capsys, name):
    wrong = CASES[name]
    folder = shutil.copytree(folders / ("fp8" if wrong.fp8 else "bf16"), tmp_path / "model")
    wrong.damage(folder)
    (tmp_path / "out").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if wrong.opens:
        HFFolder.open(folder)
    else:
        with pytest.raises(ConfigError) as caught:
            HFFolder.open(folder, "--load-hf")
        message = str(caught.value)
        assert message.startswith(f"--load-hf {folder}: ") and "\n" not in message and len(message) < 1500
        assert [part for part in wrong.named if part not in message] == [], message
    assert convert(words("hf", "native", folder, tmp_path / "out" / "native")) == 2
    said = capsys.readouterr()
    assert said.err.count("error: ") == 1 and "Traceback" not in said.err and len(said.err) < 8000
    assert [part for part in wrong.named if part not in said.err] == [], said.err
    assert str(folder) in said.err
    assert list((tmp_path / "out").iterdir()) == [] and sorted(path.name for path in tmp_path.iterdir()) == before
    assert not (folders / "sentinel").exists()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 < MEMORY


@pytest.mark.parametrize(("seed", "trials"), rows([(7, 40), (8, 150)], test=[(7, 40)]))
def test_a_folder_changed_at_random_converts_or_is_refused(folders, tmp_path, capsys, seed, trials):
    """Bits flipped and values put into JSON: nothing else comes of it, above all no traceback."""
    rng, statuses = random.Random(seed), []
    values = [b"null", b"true", b"-1", b"1e400", b"[]", b"{}", b'""', b"99999999999999999999", b",", b'"', b"\xff"]
    for trial in range(trials):
        folder = tmp_path / "model"
        shutil.copytree(folders / rng.choice(["bf16", "fp8"]), folder)
        file = folder / rng.choice(["config.json", "config.json", INDEX, *SHARDS])
        data = bytearray(file.read_bytes())
        end = 8 + int.from_bytes(data[:8], "little") if file.suffix == ".safetensors" else len(data)
        at = rng.randrange(end)
        if trial % 2:
            data[at] ^= 1 << rng.randrange(8)
        else:
            data[at : min(end, at + rng.randrange(6))] = rng.choice(values)
        file.write_bytes(data)
        statuses.append(convert(words("hf", "native", folder, tmp_path / "native")))
        said = capsys.readouterr().err
        assert statuses[-1] == 0 or (said.count("error: ") == 1 and str(folder) in said), said
        assert {path.name for path in tmp_path.iterdir()} <= {"model"} | ({"native"} if statuses[-1] == 0 else set())
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
    assert set(statuses) == {0, 2} and not (folders / "sentinel").exists()


def test_not_even_a_comparison_with_transformers_runs_a_folders_code(folders, tmp_path):
    assert convert(words("hf", "native", folders / "bf16", tmp_path / "native", "--verify")) == 0
    assert convert(words("native", "hf", tmp_path / "native", tmp_path / "back")) == 0
    assert not (folders / "sentinel").exists()
    carried = (tmp_path / "back" / "modeling_deepseek.py").read_text()
    assert carried == (folders / "bf16" / "modeling_deepseek.py").read_text()
    exec(carried)
    (folders / "sentinel").unlink()  # the code would have shown that it ran


# ---- what is not an error


@pytest.fixture
def model(folders: Path, tmp_path: Path) -> Path:
    """A copy of a sound folder."""
    return shutil.copytree(folders / "bf16", tmp_path / "model")


def test_a_wrong_total_size_and_a_word_of_fp8_without_fp8_are_notes(folders, model):
    content = json.loads((model / INDEX).read_text())
    write_json(model / INDEX, {**content, "metadata": {"total_size": 12345}})
    shutil.copy(folders / "fp8" / "config.json", model / "config.json")
    opened = HFFolder.open(model)
    size, fp8 = opened.notes
    total = sum(stored.end - stored.begin for stored in opened.tensors.values())
    assert "12345" in size and str(total) in size and "quantization_config of fp8" in fp8


def test_what_is_left_behind_is_told(model):
    for name in ("figures", "inference", ".git"):
        (model / name).mkdir()
    (model / "training_args.bin").write_bytes(b"x")
    save_file({"x": torch.ones(1)}, model / "consolidated.safetensors")
    opened = HFFolder.open(model)
    assert opened.notes == [
        "folders that are left behind: figures, inference",
        "weights that are not read: 'consolidated.safetensors'",
        "files that are left behind: 'training_args.bin'",
    ]
    assert len(opened.tensors) == len(small_folders.weights())


KEPT = """
config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
tokenizer.model tiktoken.model vocab.json merges.txt vocab.txt qwen.tiktoken chat_template.jinja chat_template.json
configuration_deepseek.py modeling_deepseek.py tokenization_kimi.py tokenization_deepseek_fast.py
README.md LICENSE LICENSE.txt LICENSE-CODE LICENSE-MODEL MODEL_LICENSE Notice.txt NOTICE THIRD_PARTY_NOTICES.md
USE_POLICY.md
""".split()
LEFT = "optimizer.pt training_args.bin events.out.tfevents.1 logo.png report.pdf model.gguf".split()
LEFT.append("pytorch_model.bin.index.json")


def test_all_that_a_model_needs_is_carried_along(model):
    for path in model.iterdir():
        if path.name not in (*SHARDS, INDEX, "config.json"):
            path.unlink()
    for name in [*KEPT[1:], *LEFT]:
        (model / name).write_text("x")
    assert set(HFFolder.open(model).companions) == set(KEPT)


def test_a_snapshot_of_the_hubs_cache_is_links_to_the_blobs_beside_it(folders, tmp_path):
    repository = tmp_path / "models--someone--model"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted((folders / "bf16").iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    assert convert(words("hf", "native", snapshot, tmp_path / "native")) == 0
    carried = tmp_path / "native" / "iter_0000000" / "hf" / "README.md"
    assert not carried.is_symlink() and carried.read_bytes() == b"# A model\n"
    elsewhere = tmp_path / "by-another-name"
    elsewhere.symlink_to(snapshot)
    for way in (snapshot, elsewhere):
        opened = HFFolder.open(way)
        assert opened.notes == [] and opened.companion("README.md") == b"# A model\n"
        with TensorReader(opened) as reader:
            assert len(reader.read("model.norm.weight")) == small_folders.HIDDEN
    (tmp_path / "outside.md").write_text("private")
    (snapshot / "README.md").unlink()
    (snapshot / "README.md").symlink_to("../../blobs/../../outside.md")
    with pytest.raises(ConfigError, match=r"'README.md' is a link to"):
        HFFolder.open(snapshot)


@pytest.mark.parametrize(
    ("limit", "value", "says"),
    [
        ("LARGEST_HEADERS", 3000, rf"{SHARDS[1]}: the headers up to it have \d+ bytes; at most 3000"),
        ("LARGEST_COMPANIONS", 1000, r"has \d+ bytes; files next to the weights may have \d+ each and 1000 together"),
        ("LARGEST_COMPANION", 700, r"config.json has \d+ bytes; files next to the weights may have 700 each"),
        ("MOST_FILES", 5, "a folder of one model has fewer than 5"),
    ],
)
def test_limits_hold_for_all_files_together(folders, monkeypatch, limit, value, says):
    monkeypatch.setattr(hf_folder, limit, value)
    with pytest.raises(ConfigError, match=says):
        HFFolder.open(folders / "bf16")


def test_a_companion_that_changed_is_not_carried_along(model):
    opened = HFFolder.open(model)
    (model / "README.md").unlink()
    (model / "README.md").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match=r"README.md changed since it was opened"):
        opened.companion("README.md")
