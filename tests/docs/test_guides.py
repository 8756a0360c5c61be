"""Each guide's commands, typed in as it has them, do what it shows: at the size that guides.yaml makes of them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from tests.data.test_chat import CHATML
from tests.docs import guides
from tests.helpers.ranks import RankParent
from tests.helpers.rows import rows
from tests.helpers.tiny_tokenizers import published

TABLE = yaml.safe_load((Path(__file__).parent / "guides.yaml").read_text())
WRITTEN = (guides.ROOT / "README.md", *guides.DOCS.glob("start/*.md"), *guides.DOCS.glob("guides/*.md"))
PAGES = {path.stem: path for path in WRITTEN}
GUIDES = sorted(name for name, path in PAGES.items() if "```bash" in path.read_text(encoding="utf-8"))


def corpus(path: Path) -> None:
    """Forty short documents that differ."""
    texts = [f"def area_{i}(width, height):\n    return width * height + {i}\n" * 8 for i in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def imported(folder: Path) -> None:
    """A small model of DeepSeek-V2's architecture."""
    published("deepseek-v2", 6, folder, torch.bfloat16)


def sparse_family(folder: Path) -> None:
    """A small model of gpt-oss' or OLMoE's architecture, as the folder is called."""
    published("gpt-oss" if "oss" in folder.name else "olmoe", 6, folder, torch.bfloat16)


def chats(path: Path) -> None:
    """Forty questions, each with an answer; the last one has none."""
    asked = [[{"role": "user", "content": f"What is {i} + 1?"}] for i in range(41)]
    for i, messages in enumerate(asked[:40]):
        messages.append({"role": "assistant", "content": f"It is {i + 1}."})
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in asked))


def with_template(folder: Path) -> None:
    """A small model of Qwen3's architecture that takes conversations."""
    published("qwen3-moe", 6, folder, torch.bfloat16)
    (folder / "chat_template.jinja").write_text(CHATML)


def launch_script(path: Path) -> None:
    """A launch script of Megatron-LM."""
    model = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --moe-router-topk 2 --swiglu "
    model += "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
    path.write_text(
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {model} --seq-length 64 --max-position-embeddings 64 "
        "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 10 "
        "--expert-model-parallel-size 2 --tokenizer-type NullTokenizer --vocab-size 128 --mock-data\n"
    )


def trainer_to_check(path: Path) -> None:
    """The example of a trainer."""
    shutil.copy(guides.ROOT / "examples" / path.name, path)


INPUTS = {
    "examples/trainer_to_check.py": trainer_to_check,
    "train.sh": launch_script,
    "chats.jsonl": chats,
    "models/Qwen3-30B-A3B": with_template,
    "corpus.jsonl": corpus,
    "models/DeepSeek-V2-Lite": imported,
    "models/theirs": imported,
    "models/gpt-oss-20b": sparse_family,
    "models/OLMoE-1B-7B-0924": sparse_family,
}


@pytest.mark.parametrize("name", rows(GUIDES, test=["first_run", "in_docker", "slurm"]))
def test_a_guide_does_what_it_shows(name: str, tmp_path: Path, rank_parent: RankParent) -> None:
    made_small = TABLE.get(name, {})
    page = guides.substituted(PAGES[name].read_text(encoding="utf-8"), made_small.get("replace", {}))
    folder = tmp_path / "empty"
    folder.mkdir()
    for needed in made_small.get("inputs", []):
        (folder / needed).parent.mkdir(parents=True, exist_ok=True)
        INPUTS[needed](folder / needed)
    before = set(os.listdir(folder))
    with guides.shell(folder, tmp_path / "shell", rank_parent) as run:
        for step in guides.steps(page):
            status, printed = run(step)
            assert status == 0, f"{step.commands}\n{printed[-3000:]}"
            lost = guides.missing(step.shown, printed)
            assert not (step.verified and lost), f"{step.commands}\nshown and not printed: {lost}\n{printed[-3000:]}"
    assert set(os.listdir(folder)) >= before
