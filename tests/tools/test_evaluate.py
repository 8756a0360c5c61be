"""`megatron-moe evaluate`: one process's losses on every layout, from the step alone, which stays as it is."""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.data.index_file import MASK
from megatron_moe.io.files import replace_json
from megatron_moe_tools import evaluate
from megatron_moe_tools.models.load_model import load_model
from megatron_moe_tools.models.source import locate
from tests.data import prepared
from tests.helpers import tiny_models
from tests.helpers.conversions import convert
from tests.helpers.rows import rows
from tests.helpers.tiny_tokenizers import byte_level
from tests.helpers.trained_steps import trained

LENGTH = 16
APART = "--packing best-fit --reset-attention-mask --reset-position-ids"


def tool(words: list[str]) -> int:
    with mock.patch.object(evaluate, "require_rendezvous"):  # these ranks have met
        return evaluate.main(words)


def text(folder: Path, name: str, sizes: list[int]) -> str:
    """A dataset of documents of so many bytes and an end; its prefix."""
    source = folder / f"{name}.jsonl"
    words = [(f"{name} {number} is a text of letters, " * 9)[:size] for number, size in enumerate(sizes)]
    source.write_text("".join(json.dumps({"text": each}) + "\n" for each in words))
    return prepared.run([source], folder / name)


@pytest.fixture(scope="module")
def made(gloo, tmp_path_factory) -> Path:
    """A folder with a run's steps, and files of validation sets: whole sequences, and packed ones with a chat."""
    there: Path = tmp_path_factory.mktemp("evaluated")
    odd, one, part = (
        text(there, name, sizes) for name, sizes in (("odd", [29, 30, 52]), ("one", [20]), ("part", [99]))
    )
    chat = text(there, "chat", [9, 3, 14, 5, 11])
    side = json.loads(Path(f"{chat}.json").read_text())
    mask = bytes(number % 3 > 0 for number in range(side["tokens"]))
    Path(f"{chat}{MASK}").write_bytes(mask)
    facts = {"mask_sha256": hashlib.sha256(mask).hexdigest(), "chat": {"template": "x", "train_on": "answers"}}
    replace_json(Path(f"{chat}.json"), side | facts)
    unused = f"sources: {{gone: {{path: '{there}/gone_*', weight: 1}}}}\n"
    sets = (
        f"{unused}validation:\n  odd: {{path: {odd}}}\n  one: {{path: {one}}}\n  part: {{path: {part}, batches: 1}}\n"
    )
    (there / "whole.yaml").write_text(sets)
    (there / "apart.yaml").write_text(f"{sets}  chat: {{path: {chat}}}\n")
    (there / "train.yaml").write_text(f"sources: {{odd: {{path: {odd}, weight: 1}}}}\n")
    (there / "ids.yaml").write_text(f"validation: {{ids: {{path: {prepared.ids(there, 'ids', [[1] * 40], 40)}}}}}\n")
    flags = {"mock_data": False, "data_config": str(there / "train.yaml"), "seq_length": LENGTH, "lr": 3e-3}
    flags |= {"num_experts": 8, "use_distributed_optimizer": True, "save": str(there / "steps"), "save_interval": 2}
    gloo.run(2, trained, flags=flags)
    return there


def found(gloo: Any, made: Path, ranks: int, *words: str) -> dict[str, Any]:
    output = made / "found.json"
    step = [] if words and not words[0].startswith("--") else [str(made / "steps")]
    assert gloo.run(ranks, tool, words=[*step, *words, "--output", str(output)]) == [0] * ranks
    content: dict[str, Any] = json.loads(output.read_text())
    return content


@pytest.fixture(scope="module")
def wanted(gloo, made) -> dict[str, Any]:
    """What one process finds."""
    return {documents: found(gloo, made, 1, *words_of(made, documents))["sets"] for documents in ("whole", "apart")}


def words_of(made: Path, documents: str) -> list[str]:
    return ["--data-config", str(made / f"{documents}.yaml"), *(APART.split() if documents == "apart" else ())]


def content(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


TP2, PP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
EP2, CP2 = "--expert-model-parallel-size 2", "--context-parallel-size 2"
ZERO = "--data-parallel-sharding-strategy"
LAYOUTS = {
    "TP2": (2, TP2),
    "TP2, ETP1": (2, f"{TP2} {EP2} --expert-tensor-parallel-size 1"),
    "PP2": (2, PP2),
    "VPP": (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "CP2": (2, CP2),
    "EP2": (2, EP2),
    "DP2": (2, ""),
    "DP4": (4, "--micro-batch-size 1"),
    "ZeRO 1": (2, "--use-distributed-optimizer"),
    "ZeRO 2": (2, f"{ZERO} optim_grads"),
    "ZeRO 3": (2, f"{ZERO} optim_grads_params"),
    "TP2, PP2": (4, f"{TP2} {PP2}"),
    "CP2, EP2": (4, f"{CP2} {EP2}"),
}


@pytest.mark.parametrize(
    ("layout", "documents"),
    rows(
        [(layout, documents) for layout in LAYOUTS for documents in ("whole", "apart")],
        test=[("VPP", "whole"), ("CP2", "apart"), ("DP4", "whole"), ("ZeRO 3", "apart")],
    ),
)
def test_the_losses_of_every_layout_are_those_of_one_process(gloo, made, wanted, layout, documents):
    ranks, flags = LAYOUTS[layout]
    sets = found(gloo, made, ranks, *words_of(made, documents), *flags.split())["sets"]
    assert sets.keys() == wanted[documents].keys() and "valid/odd" in sets
    for name, values in sets.items():
        one = wanted[documents][name]
        assert values["tokens"] == one["tokens"] and values["bits_per_byte"] is not None
        for number in ("loss", "bits_per_byte"):
            assert values[number] == pytest.approx(one[number], rel=1e-6)


def test_the_losses_are_the_mean_over_every_predicted_token_and_the_step_stays_as_it_was(gloo, made):
    before = content(made / "steps")
    sets = found(gloo, made, 1, *words_of(made, "whole"))["sets"]
    assert content(made / "steps") == before
    assert [sets[f"valid/{name}"]["tokens"] for name in ("odd", "one", "part")] == [112, 16, 64]
    with load_model(locate(made / "steps")) as model:
        ids = torch.tensor([list(("one 0 is a text of letters, " * 9)[:20].encode()) + [256]])[:, : LENGTH + 1]
        logits = model.model(ids[:, :-1], torch.arange(LENGTH)[None], None)[0, :, :257].detach().double()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert sets["valid/one"]["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert sets["valid/one"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert sets["valid/one"]["bits_per_byte"] == pytest.approx(float(loss) / 0.6931471805599453, rel=1e-6)


def test_an_earlier_step_one_of_an_old_version_and_a_published_folder_are_evaluated(gloo, made, wanted, tmp_path):
    def losses(*words: str) -> dict[str, float]:
        sets = found(gloo, made, 1, *words)["sets"]
        return {name: one["loss"] for name, one in sets.items()}

    words = words_of(made, "whole")
    earlier = losses(*words, "--ckpt-step", "2")
    assert earlier == losses(str(made / "steps" / "iter_0000002"), *words)
    assert earlier["valid/odd"] != wanted["whole"]["valid/odd"]["loss"]
    with tarfile.open(Path(__file__).parents[1] / "checkpoint" / "old_step.tar.xz") as archive:
        archive.extractall(tmp_path / "old", filter="data")
    ids = ["--data-config", str(made / "ids.yaml"), "--tokenizer-type", "NullTokenizer"]
    assert 0 < losses(str(tmp_path / "old"), *ids)["valid/ids"] < 10
    byte_level(tmp_path / "hf", tiny_models.VOCABULARY)
    tiny_models.make("qwen3-moe", 1, tmp_path / "hf")
    convert("hf", "native", tmp_path / "hf", tmp_path / "native")
    kind = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "hf")}
    data = prepared.run([made / "odd.jsonl"], tmp_path / "odd", **kind)
    (tmp_path / "data.yaml").write_text(f"validation: {{odd: {{path: {data}}}}}\n")
    words = ["--data-config", str(tmp_path / "data.yaml"), "--seq-length", "16"]
    assert losses(str(tmp_path / "hf"), *words) == losses(str(tmp_path / "native"), *words)


@pytest.mark.test_all(instead="tests/tools/test_evaluate.py::test_the_losses_of_every_layout_are_those_of_one_process")
@pytest.mark.parametrize("launcher", ["-m torch.distributed.run --nproc-per-node 2 -m megatron_moe evaluate", "own"])
def test_the_command_starts_ranks_and_prints_a_table(made, wanted, launcher):
    words = "-m megatron_moe evaluate --nproc-per-node 2" if launcher == "own" else launcher
    command = [sys.executable, *words.split(), str(made / "steps"), *words_of(made, "whole"), *PP2.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(wanted["whole"])
    assert done.stdout.split()[-1] == "64" and "nothing is trained" in done.stderr


REFUSED = {
    "no section": (["--data-config", "train.yaml"], r"train\.yaml: has no sets"),
    "nothing asked for": ([], "--data-config is missing"),
    "no such step": (["--data-config", "whole.yaml", "--ckpt-step", "9"], "there is no such step"),
    "no such folder": (["--data-config", "whole.yaml"], "gone: is not there"),
    "too long": (["--data-config", "whole.yaml", "--seq-length", "64"], "--max-position-embeddings 16: the sequence"),
    "another model": (
        ["--data-config", "whole.yaml", "--hidden-size", "8"],
        "--hidden-size 8 .there: 64.: contradicts",
    ),
    "another tokenizer": (["--data-config", "ids.yaml"], "was written with NullTokenizer .* has --tokenizer-type Byte"),
    "a flag of training": (["--data-config", "whole.yaml", "--save", "x"], "--save: is a flag of training"),
    "a flag of tasks": (["--data-config", "whole.yaml", "--limit", "2"], "add --tasks"),
    "output": (["--data-config", "whole.yaml", "--output", "steps/x.json"], "is left as it is"),
    "a batch": (
        ["--data-config", "whole.yaml", "--micro-batch-size", "3"],
        "--global-batch-size 4, --micro-batch-size 3",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_mistakes_are_told_before_anything_is_loaded(made, monkeypatch, capsys, words, message):
    monkeypatch.chdir(made)
    assert evaluate.main(["gone" if "gone" in message else "steps", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
