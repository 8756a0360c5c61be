"""Every family with odd settings computes what transformers computes, and errors that are planted in it are seen."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_moe.hf.config import settings
from megatron_moe.hf.folder import HFFolder
from tests.helpers import tiny_models
from tests.helpers.rows import rows
from tests.hf import imported_cases as cases
from tests.hf import odd_configurations as odd
from tests.hf.test_mapping_ranks import Difference, Reference, difference, reference, require_untouched

pytestmark = pytest.mark.engine

SEEDS = (11, 12, 13, 14)
ONE_OF_EACH_CLASS = {kind: case for case, (kind, _) in reversed(tiny_models.CASES.items())}.values()


def odd_reference(case: str, name: str, seed: int, folder: Path) -> Reference:
    changes = odd.odd_settings(case)[name]
    if name == "bfloat16":
        found = reference(case, seed, folder, torch.bfloat16, **changes)
        return replace(found, tensors={key: value.float() for key, value in found.tensors.items()})
    found = reference(case, seed, folder, **changes)
    if name == "the hub's spelling":
        path = Path(found.folder) / "config.json"
        path.write_text(json.dumps(tiny_models.hub_spelling(json.loads(path.read_text()))))
    return found


def is_right(found: Difference) -> bool:
    return found.choices == [] and found.logits < 1e-4 and found.loss < 1e-5 and found.gradient < 1e-4


def with_norms_in_place(rank: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """What a rank saw, by the names that norms of heads have in the right model, wherever the wrong one has them."""
    if not right["qk_layernorm_after_rotation"]:
        return rank
    named = partial(re.sub, r"self_attention\.([qk]_layernorm)", r"self_attention.core_attention.\1")
    return {**rank, "gradients": {named(key): value for key, value in rank["gradients"].items()}}


@pytest.mark.parametrize("case", rows(tiny_models.CASES, test=["glm4-moe"]))
def test_odd_settings_of_a_family_compute_what_transformers_computes(
    gloo: Any, tmp_path: Path, case: str, request: pytest.FixtureRequest
) -> None:
    every = request.config.getoption("--all")
    names, every = list(odd.odd_settings(case)), request.config.getoption("--all")
    assert len(names) >= 12
    # Each with one seed, in turn; make test computes three of five.
    drawn = [(name, SEEDS[place % 4]) for place, name in enumerate(names) if every or place % 5 < 3]
    expected = {(name, seed): odd_reference(case, name, seed, tmp_path / f"{name}-{seed}") for name, seed in drawn}
    folders = [one.folder for one in expected.values()]
    seen = gloo.run_within(1200, 1, cases.imported, folders=folders, layout={})[0]
    wrong = {}
    for which, rank, wanted in zip(expected, seen, expected.values(), strict=True):
        found = difference([rank], wanted, {})
        if not is_right(found):
            wrong[which] = found
        require_untouched([rank], wanted, {})
    assert wrong == {}


@pytest.mark.parametrize("case", rows(ONE_OF_EACH_CLASS, test=["deepseek-v3"]))
def test_every_planted_error_is_seen(gloo: Any, tmp_path: Path, case: str) -> None:
    expected = reference(case, 21, tmp_path, **odd.telling(case))
    right = Path(expected.folder)
    described = settings(HFFolder.open(right).config, has_prediction_layers=False, where=str(right))
    planted: dict[str, tuple[str, dict[str, Any]]] = {"none": (expected.folder, {})}
    text = odd.text_of(tiny_models.config(case, **odd.telling(case)).to_dict())
    for error, tensors in odd.wrong_tensors(expected.tensors, described.family.names, text).items():
        folder = shutil.copytree(right, tmp_path / error)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        planted[error] = str(folder), {}
    for error, changes in odd.wrong_settings(described.flat).items():
        planted[f"settings: {error}"] = expected.folder, changes
    seen = gloo.run_within(1200, 1, cases.mistaken, folders=list(planted.values()))[0]
    unseen, refused = [], []
    for error, found in zip(planted, seen, strict=True):
        if isinstance(found, str):
            refused.append(error)
            continue
        placed = with_norms_in_place(found, described.flat)
        if placed["gradients"].keys() == seen[0]["gradients"].keys() and is_right(difference([placed], expected, {})):
            unseen.append(error)
    assert unseen == ["none"]
    assert len(planted) > 20 and len(planted) - len(refused) > 12, (len(planted), refused)
