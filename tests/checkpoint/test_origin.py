"""Every step of a model that was imported keeps what it was imported with, so that it can be exported."""

from pathlib import Path

import pytest

from megatron_moe.checkpoint import folder, manifest, origin
from megatron_moe.checkpoint.origin import Provenance
from megatron_moe.checkpoint.plan import CheckpointSource
from megatron_moe.config.errors import ConfigError
from megatron_moe.io.files import write_json

STATE = {"family": "mixtral", "copies": ["lm_head.weight"], "dropped": []}
FILES = {"config.json": b"{}", "tokenizer.model": bytes(range(256)), "chat template.jinja": b"{{ x }}"}


def published(root, about: Provenance):
    root.mkdir(parents=True, exist_ok=True)
    hidden = folder.open_hidden(root, 3)
    files = {name: write_json(hidden / name, {}) for name in (folder.CONFIG, folder.STATE)}
    return folder.publish(root, 3, {**files, **about.write(hidden)})


def test_the_files_go_into_a_step_and_come_back(tmp_path):
    step = published(tmp_path, Provenance(STATE, FILES))
    assert manifest.structure_defect(step) is None
    assert manifest.content_defect(step, manifest.read(step).files) is None
    assert origin.of_step(step, {"hf": STATE}) == (Provenance(STATE, FILES), [])
    (step / "hf" / "config.json").write_text("{.")
    assert "hf/config.json" in (manifest.content_defect(step, manifest.read(step).files) or "")
    other = published(tmp_path / "not imported", Provenance())
    assert not (other / "hf").exists()
    assert origin.of_step(other, {}) == (Provenance(), [])


def test_what_is_kept_is_bounded_and_what_is_not_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(origin, "LARGEST", 300)
    files = {**FILES, "large.json": bytes(290)}
    kept, notes = origin.read({name: len(content) for name, content in files.items()}, files.__getitem__, tmp_path)
    assert kept == FILES
    assert notes == [f"{tmp_path / 'large.json'} is not carried along: 290 bytes of files"]


def test_files_that_are_gone_or_changed_and_a_state_that_is_none_are_errors(tmp_path):
    step = published(tmp_path / "changed", Provenance(STATE, FILES))
    (step / "hf" / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"hf/config\.json: is not what was saved"):
        origin.of_step(step, {"hf": STATE})
    (step / "hf" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"hf/config\.json: cannot be read"):
        origin.of_step(step, {"hf": STATE})
    with pytest.raises(ConfigError, match="no object"):
        origin.of_step(published(tmp_path, Provenance(STATE, FILES)), {"hf": "mixtral"})
    with pytest.raises(ConfigError, match=r"manifest.json"):
        origin.of_step(tmp_path, {"hf": STATE})


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"hf": STATE, "has_optimizer": False}, True),
        ({"hf": STATE, "has_optimizer": True, "scheduler": {}}, False),
        ({"hf": STATE, "has_optimizer": False, "scheduler": {}}, False),
        ({"has_optimizer": False}, False),
    ],
)
def test_a_converted_step_is_told_from_one_that_training_saved(state, expected):
    assert CheckpointSource(Path(), {}, state).weights_only is expected
