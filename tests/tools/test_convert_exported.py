"""Models trained here and imported ones, exported: transformers alone loads the folder and generates what we do."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.hf.families import FAMILIES
from megatron_moe.training.run import pretrain
from megatron_moe_tools import generate
from megatron_moe_tools.convert import cli
from megatron_moe_tools.convert.hugging_face import HuggingFaceSink
from megatron_moe_tools.models.load_model import load_model
from megatron_moe_tools.models.source import locate
from megatron_moe_tools.prepare.preprocess import train_sentencepiece
from tests.helpers.conversions import convert, words
from tests.helpers.rows import rows
from tests.helpers.tiny_tokenizers import TEXTS, byte_level, published
from tests.helpers.trained_steps import tensors

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "lm_eval"
PROMPT = "def area_7(width"
NEW = 12


def pieces(file: Path) -> Path:
    train_sentencepiece(TEXTS, file, 330)
    return file


MADE = {
    "HuggingFaceTokenizer": (byte_level, "tiny"),
    "SentencePieceTokenizer": (pieces, "tiny-gqa"),
    "ByteTokenizer": (None, "tiny"),
}


def trained(preset: str, flags: dict[str, Any]) -> None:
    """Four steps of a preset on this case's rank, saved."""
    steps = {"mock_data": True, "global_batch_size": 2, "train_iters": 4, "eval_iters": 0, "lr": 5e-3}
    pretrain(build({**PRESETS[preset], **steps, **flags}))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "conversion_certificate.json"}


def ours(capsys: Any, load: Path, *flags: str) -> str:
    capsys.readouterr()
    argv = ["--load", str(load), "--prompt", PROMPT, "--max-new-tokens", str(NEW), *flags]
    assert generate.main(argv) == 0
    return capsys.readouterr().out.removesuffix("\n")


def theirs(folder: Path) -> tuple[str, Any, Any]:
    """The text that transformers generates from the folder alone, greedily, and what it loaded."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model, about = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(made[0], skip_special_tokens=True), tokenizer, model


def loglikelihoods(logits_of: Callable[[torch.Tensor], torch.Tensor], tokenizer: Any) -> list[float]:
    """The log-likelihood of every choice of the example's task, cut from its text as lm-evaluation-harness does."""
    task = yaml.safe_load((EXAMPLE / "python_lines.yaml").read_text())
    found = []
    for line in (EXAMPLE.parents[1] / task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines():
        row = json.loads(line)
        start = len(tokenizer(row["code"].rstrip())["input_ids"])
        for choice in row["choices"]:
            ids = tokenizer(row["code"] + choice)["input_ids"]
            scores = logits_of(torch.tensor([ids])).float().log_softmax(-1)
            found.append(sum(float(scores[0, at - 1, ids[at]]) for at in range(start, len(ids))))
    return found


def same_loglikelihoods(run: Path, tokenizer: Any, model: Any) -> None:
    with torch.no_grad(), load_model(locate(run)) as found:

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            return found.model(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), None)[..., : found.vocab_size]

        theirs = loglikelihoods(lambda tokens: model(tokens).logits, tokenizer)
        assert len(theirs) > 10 and loglikelihoods(logits, tokenizer) == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("kind", rows(MADE, test=["HuggingFaceTokenizer"]))
def test_transformers_generates_from_an_exported_folder_what_we_do(gloo, capsys, tmp_path, kind):
    make, preset = MADE[kind]
    file = None if make is None else make(tmp_path / "tokenizer.model")
    flags = {"tokenizer_type": kind, "tokenizer_model": None if file is None else str(file)}
    gloo.run(1, trained, preset=preset, flags={**flags, "save": str(tmp_path / "run")})
    folder = tmp_path / "hf"
    convert("native", "hf", tmp_path / "run", folder)
    text, tokenizer, model = theirs(folder)
    assert text == ours(capsys, tmp_path / "run") == ours(capsys, folder) and len(text) > len(PROMPT)
    eod = json.loads((tmp_path / "run" / "iter_0000004" / "state.json").read_text())["tokenizer"]["eod"]
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == eod
    table = tensors(tmp_path / "run" / "iter_0000004")["output_layer.weight"]
    size = model.config.vocab_size
    assert torch.equal(model.lm_head.weight, table[:size]) and len(table) > size  # without what pads the vocabulary
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.pad_token_id is not None
    assert set(tokenizer(PROMPT)) == {"input_ids", "attention_mask"} and eod not in tokenizer(PROMPT)["input_ids"]
    card = (folder / "README.md").read_text()
    for fact in (model.config.architectures[0], f"{model.num_parameters():,}", "| optimizer steps | 4 |", kind):
        assert fact in card
    assert str(tmp_path) not in card  # what is published names no folder of this machine
    if kind == "HuggingFaceTokenizer":
        assert (folder / "chat_template.jinja").read_bytes() == (file / "chat_template.jinja").read_bytes()
        same_loglikelihoods(tmp_path / "run", tokenizer, model)
        assert tokenizer.pad_token == "<pad>" and "auto_map" not in (folder / "tokenizer_config.json").read_text()
    if kind == "SentencePieceTokenizer":
        assert (folder / "tokenizer.model").read_bytes() == file.read_bytes()

    if file is not None:  # the files went elsewhere, as on another machine
        shutil.move(file, tmp_path / "moved")
        assert cli.main(words("native", "hf", tmp_path / "run", tmp_path / "again")) == 2
        assert not (tmp_path / "again").exists()
        message = capsys.readouterr().err
        assert "--tokenizer-model" in message and str(file) in message and "--no-tokenizer" in message
        convert("native", "hf", tmp_path / "run", tmp_path / "again", "--tokenizer-model", str(tmp_path / "moved"))
        assert files(folder) == files(tmp_path / "again")


def test_an_imported_model_is_exported_with_what_it_came_with(capsys, tmp_path):
    model = published("qwen3-moe", 3, tmp_path / "hf")
    native, folder = tmp_path / "native", tmp_path / "back"
    convert("hf", "native", tmp_path / "hf", native)
    shutil.move(tmp_path / "hf", tmp_path / "gone")
    convert("native", "hf", native, folder)
    for path in (tmp_path / "gone").iterdir():
        assert path.suffix == ".safetensors" or (folder / path.name).read_bytes() == path.read_bytes(), path.name
    # The folder's own post-processor begins a text.
    text, tokenizer, loaded = theirs(folder)
    assert tokenizer(PROMPT)["input_ids"][0] == tokenizer.bos_token_id
    assert text == ours(capsys, native) == ours(capsys, folder) != ours(capsys, folder, "--no-add-bos")
    convert("native", "hf", native, tmp_path / "without", "--no-tokenizer")
    assert not [path.name for path in (tmp_path / "without").iterdir() if "token" in path.name or "chat" in path.name]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_tied_model_has_its_output_layer_where_those_who_serve_it_read_one():
    table, options = SimpleNamespace(copies={"lm_head.weight": "the table"}), SimpleNamespace(drop_mtp=False)
    for served_untied in (True, False):
        family = replace(FAMILIES["mixtral"], served_untied=served_untied)
        given = SimpleNamespace(state={}, table=table, options=options, family=family)
        assert HuggingFaceSink._copies(given) == (table.copies if served_untied else {})
