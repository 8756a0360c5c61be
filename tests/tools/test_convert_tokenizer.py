"""Which tokenizer an exported folder gets, found before torch is loaded; and what is no tokenizer of the model."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron_moe.checkpoint import folder, manifest
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build, flatten
from megatron_moe.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron_moe.hf.families import FAMILIES
from megatron_moe.io.files import write_bytes, write_json
from megatron_moe_tools.convert.exported_files import AS_IT_CAME, exported_tokenizer, generation_ids, model_card
from megatron_moe_tools.models.source import locate
from tests.config.refused import refused

BYTES = {"type": "ByteTokenizer", "sha256": ByteTokenizer.sha256, "eod": 256, "bos": None}
MADE_UP = {"type": "NullTokenizer", "sha256": "0" * 64, "eod": 299, "bos": None}
IMPORTED = {"family": "deepseek-v3", "copies": [], "dropped": []}


def words(path: Path, *names: str) -> Path:
    """A tokenizer.json of a token per word, and the end of a document."""
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(("</s>", *names))}, unk_token=names[0])
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.decoder = tokenizers.decoders.Fuse()
    model.add_special_tokens(["</s>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(str(path))
    return path


def named(path: Path | str) -> dict[str, str]:
    """The flags that name a tokenizer of Hugging Face's."""
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(path)}


def facts(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {"type": "HuggingFaceTokenizer", "sha256": digest, "eod": 0, "bos": None}


def a_step(root: Path, trained_with: dict[str, Any], came: dict[str, bytes], imported: bool = False, **config: Any):
    """The small files of a step: what it was trained with, and what came with an imported model."""
    step = root / "iter_0000003"
    (step / "hf").mkdir(parents=True)
    state = {"iteration": 3, "tokenizer": trained_with, "vocab_size": 300, "has_optimizer": True}
    if imported:
        state["hf"] = IMPORTED
    files = {f"hf/{name}": write_bytes(step / "hf" / name, content) for name, content in came.items()}
    files[folder.CONFIG] = write_json(step / folder.CONFIG, {"seq_length": 64, **config})
    files[folder.STATE] = write_json(step / folder.STATE, state)
    manifest.write(step, 3, files)
    (root / folder.OWNER).touch()
    return step


def test_the_tokenizer_of_the_run_is_written_with_its_ids(tmp_path):
    step = a_step(tmp_path, BYTES, {}, tokenizer_type="ByteTokenizer")
    found = exported_tokenizer(step, {}, False)
    assert found.files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    assert found.ids == {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    # Batches of prompts are filled up with something, while no row of the embedding stops to be trained for it.
    assert generation_ids(found.ids) == {"eos_token_id": 256, "pad_token_id": 256}
    without = exported_tokenizer(step, {}, True)
    assert without.files == {} and without.ids == found.ids and without.words.startswith("none")
    # ids without a text have an end where a flag names the tokenizer whose last one it is; made-up ones have none
    trained_with = NullTokenizer(300).facts()
    for name, config in {"named": {"tokenizer_type": "NullTokenizer"}, "made up": {"mock_data": True}}.items():
        step, eos = a_step(tmp_path / name, trained_with, {}, vocab_size=300, **config), {"named": 299}.get(name)
        found = exported_tokenizer(step, {}, False)
        assert found.files == {} and found.ids == {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
        assert len(found.notes) == 1 and f"eos_token_id is {eos or 'null'}" in found.notes[0]
        assert exported_tokenizer(step, {}, True).ids == found.ids


def test_a_run_that_names_no_number_of_positions_keeps_those_that_the_model_came_with(tmp_path):
    came = {"config.json": b'{"max_position_embeddings": 128}'}
    for run, positions in ((None, 128), (32, 32), (256, 256)):
        step = a_step(tmp_path / f"{run}", {}, came, imported=True, max_position_embeddings=run, num_experts=4)
        assert locate(step).run.derived.max_position_embeddings == positions


def test_what_came_with_a_model_goes_out_again_unless_it_was_trained_with_another(tmp_path):
    came, other = words(tmp_path / "came.json", "a", "b"), words(tmp_path / "other.json", "b", "a")
    files = {"tokenizer.json": came.read_bytes(), "tokenizer_config.json": b"{}", "LICENSE": b"free"}
    for name, trained_with in {"converted": {}, "same": facts(came), "made up": MADE_UP}.items():
        step = a_step(tmp_path / name, trained_with, files, imported=True)
        assert exported_tokenizer(step, {}, False) is AS_IT_CAME, name
    step = a_step(tmp_path / "other", facts(other), files, imported=True, tokenizer_model=str(other))
    with pytest.raises(ConfigError, match=r"another tokenizer.*--tokenizer-model"):
        exported_tokenizer(step, {}, False)
    found = exported_tokenizer(step, named(other), False)
    assert found.files["tokenizer.json"] == other.read_bytes()
    assert found.left_out == {"tokenizer.json", "tokenizer_config.json"}  # and not the licence
    assert exported_tokenizer(step, {}, True).left_out == found.left_out


def test_a_model_that_came_without_a_tokenizer_says_so_and_takes_one_that_is_named(tmp_path):
    file = words(tmp_path / "own.json", "a", "b")
    step = a_step(tmp_path, {}, {"config.json": b"{}"}, imported=True)
    found = exported_tokenizer(step, {}, False)
    assert found.files == {} and found.ids is None and len(found.notes) == 1
    assert exported_tokenizer(step, named(file), False).files["tokenizer.json"] == file.read_bytes()


REFUSED = {
    "gone": ({"tokenizer_model": "gone.json"}, {}, False, ("--tokenizer-model gone.json", "--no-tokenizer")),
    "changed": ({}, {}, False, ("SHA-256", "--tokenizer-model", "--no-tokenizer")),
    "another given": ({}, {"tokenizer_model": "CHANGED"}, False, ("SHA-256", "--no-tokenizer")),
    "both": ({}, {"tokenizer_model": "x"}, True, ("--no-tokenizer", "--tokenizer-model")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_gone_or_have_changed_are_refused(tmp_path, case):
    config, given, without, parts = REFUSED[case]
    file = words(tmp_path / "own.json", "a", "b")
    trained_with = facts(file)
    words(file, "b", "a")
    step = a_step(tmp_path, trained_with, {}, **{**named(file), **config})
    named_now = {name: value.replace("CHANGED", str(file)) for name, value in given.items()}
    refused(lambda: exported_tokenizer(step, named_now, without), *parts)


def test_a_tokenizer_with_more_ids_than_the_model_and_none_at_all_are_refused(tmp_path):
    file = words(tmp_path / "large.json", *(f"w{i}" for i in range(300)))
    step = a_step(tmp_path, {}, {})
    with pytest.raises(ConfigError, match=r"--tokenizer-type is missing.*--no-tokenizer"):
        exported_tokenizer(step, {}, False)
    with pytest.raises(ConfigError, match="has 301 ids, the model 300"):
        exported_tokenizer(step, named(file), False)


def test_a_model_card_says_what_the_checkpoint_knows_and_no_place_of_this_machine():
    run = build({**PRESETS["tiny"], "vocab_size": 300, "lr": 3e-4, "bf16": True})
    family = FAMILIES["deepseek-v3"]
    data = {"/secret/place/books": {".bin": {"sha256": "ab12"}, ".idx": {"sha256": "cd"}}}
    state = {"iteration": 10, "skipped_iterations": 1, "consumed_samples": 80, "data": data, "versions": {"torch": "2"}}
    card = model_card(run, family, "bfloat16", flatten(run), state, "none: x")
    assert card.startswith("---\nlibrary_name: transformers\n") and "\n---\n" in card[3:]
    count, used = run.derived.parameter_count(300), run.derived.active_parameter_count(300)
    numbers = (f"{count:,}", f"{used:,}", "| optimizer steps | 9 |", f"| tokens | {80 * 64:,} |")
    assert all(fact in card for fact in (*numbers, "bf16", "`books`", "ab12"))
    assert "/secret" not in card and "AutoTokenizer.from_pretrained" not in card
    assert "AutoTokenizer.from_pretrained" in model_card(run, family, "bfloat16", flatten(run), state, "ByteTokenizer")
    edited = model_card(run, family, "bfloat16", flatten(run), {**state, "from_memory": True}, "none: x")
    assert "may have changed the weights" in edited and "## Training of the checkpoint it comes from" in edited
