"""Errors planted in the import: the coverage of the table or the comparison with transformers notices each kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.apps.convert.parity import Parity, compare_with
from megatron_moe.apps.convert.reference_model import ReferenceResult, run_model
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf import opened as opening
from megatron_moe.hf import source
from megatron_moe.hf.mapping import Mapping, Piece
from megatron_moe.hf.opened import opened
from megatron_moe.hf.source import locate
from megatron_moe.hf.tensors import TensorReader
from megatron_moe.hf.transforms import QueryKeyValue
from megatron_moe.model import mla
from megatron_moe.parallel import groups
from tests.helpers import tiny_models
from tests.helpers.rows import rows

Break = Callable[[pytest.MonkeyPatch], None]

EXPERTS, WEIGHTS = "tokens go to other experts", "weights of the same experts differ"
EITHER = f"{EXPERTS}|logits differ by"
UNUSED, MISSING = "unexpected: ", "missing: "

# ---- ways to break the import until the test is over


def replaced(owner: Any, name: str, value: Any) -> Break:
    return lambda patch: patch.setattr(owner, name, value)


def table(edit: Callable[[Piece], Piece | None]) -> Break:
    """Pieces of the table edited, or left out where None is returned."""
    original = source.mapping

    def broken(*arguments: Any) -> Mapping:
        found = original(*arguments)
        edited = [edit(piece) for piece in found.pieces]
        return replace(found, pieces=tuple(piece for piece in edited if piece is not None))

    return replaced(source, "mapping", broken)


def renamed(pattern: str, new: Callable[[re.Match[str]], str]) -> Break:
    """The table names other tensors of the folder."""
    return table(lambda piece: replace(piece, hf=tuple(re.sub(pattern, new, name) for name in piece.hf)))


def swapped(one: str, other: str, before: str = "", behind: str = "") -> Break:
    """Two parts of names exchanged, where they stand between two others."""
    return renamed(f"(?<={before})({one}|{other})(?={behind})", lambda match: other if match[0] == one else one)


def without(pattern: str) -> Break:
    return table(lambda piece: None if re.search(pattern, piece.hf[0]) else piece)


def settings(**changes: Any) -> Break:
    """config.json translated otherwise."""
    original = source.settings_of

    def broken(*arguments: Any) -> Any:
        told = original(*arguments)
        return replace(told, flat={**told.flat, **changes})

    return replaced(source, "settings_of", broken)


def numbers(pattern: str, change: Callable[[Tensor], Tensor]) -> Break:
    """Tensors of the folder changed while they are read."""
    original = TensorReader.read

    def broken(self: TensorReader, name: str, *rest: Any) -> Tensor:
        tensor = original(self, name, *rest)
        return change(tensor.clone()) if re.search(pattern, name) else tensor

    return replaced(TensorReader, "read", broken)


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


def element(at: int, value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return change


def one_behind_the_other(self: QueryKeyValue, tensors: list[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


# ---- one error of each kind: what it is, the model, how, and what the comparison says

COMPUTED: list[tuple[str, str, Break, str]] = [
    ("gate and up of experts swapped", "deepseek-v3", swapped("gate", "up", r"experts\.\d\.", "_proj"), EITHER),
    ("norms of queries and keys swapped", "qwen3-moe", swapped("q_norm", "k_norm"), EITHER),
    ("experts rotated", "qwen2-moe", renamed(r"(?<=experts\.)\d", lambda m: str((int(m[0]) + 1) % 8)), EITHER),
    ("router biases swapped", "glm4-moe", swapped("1", "3", r"layers\.", ".*correction_bias"), EXPERTS),
    ("q, k and v in turn", "mixtral", replaced(QueryKeyValue, "to_native", one_behind_the_other), EITHER),
    ("the router's bias rounded", "moonlight", numbers("correction_bias", rounded), EXPERTS),
    ("the router rounded", "deepseek-v2", numbers(r"gate\.weight", rounded), f"{EITHER}|{WEIGHTS}"),
    ("one element", "deepseek-v2", numbers(r"layers\.0\..*o_proj", element(100, 0.5)), EITHER),
    # too small to be seen in the logits of random tokens: told by the constants themselves
    ("hardly another epsilon", "mixtral", settings(norm_epsilon=1.0001e-5), "epsilon of"),
    ("hardly another rotary base", "glm4-moe", settings(rotary_base=1000500.0), "rotary frequencies differ"),
    ("hardly another factor", "deepseek-v3", settings(rotary_scaling_factor=40.002), "rotary frequencies differ"),
    ("another mscale", "deepseek-v2-grouped", settings(mscale=1.0), "rotary amplitude is"),
    ("half of the rotary factor", "glm4-moe", settings(rotary_percent=0.25), "rotary frequencies: 3 pairs here, 6"),
    ("another latent epsilon", "moonlight", replaced(mla, "LATENT_NORM_EPSILON", 1e-2), "epsilon of"),
    # routing
    ("groups by the sum of two", "deepseek-v2-grouped", settings(moe_router_group_score="top2"), EXPERTS),
    ("groups by their best", "deepseek-v3", settings(moe_router_group_score="max"), EXPERTS),
    ("an expert too few", "glm4-moe", settings(moe_router_topk=2), "2 experts per token here, 3 there"),
    ("no scaling factor", "moonlight", settings(moe_router_topk_scaling_factor=None), WEIGHTS),
    ("weights normalised", "qwen2-moe", settings(moe_router_norm_topk_prob=True), WEIGHTS),
    ("softmax for sigmoid", "moonlight", settings(moe_router_score_function="softmax"), EXPERTS),
]
COVERED: list[tuple[str, str, Break, str]] = [
    ("a norm left out", "qwen3-moe", without("q_norm"), f"{UNUSED}.*q_norm"),
    (
        "an expert read twice",
        "deepseek-v3",
        renamed(r"experts\.3\.", lambda m: "experts.2."),
        rf"{UNUSED}.*experts\.3",
    ),
    ("a NaN", "qwen3-moe", numbers(r"experts\.3\.up_proj", element(5, torch.nan)), "up_proj.* contains NaN"),
    ("no dense layer", "deepseek-v2", settings(moe_layer_freq=1), MISSING),
    (
        "two tables taken for one",
        "mixtral",
        settings(untie_embeddings_and_output_weights=False),
        "lm_head.weight differs from model.embed_tokens",
    ),
]


@dataclass(frozen=True)
class Baseline:
    """A folder, tokens, and what transformers computes on them."""

    folder: Path
    tokens: Tensor
    reference: ReferenceResult

    def compared(self) -> Parity:
        with opened(locate(self.folder)) as found:
            return compare_with(self.reference, found, self.tokens)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Baseline]:
    @cache
    def made(case: str) -> Baseline:
        folder = tmp_path_factory.mktemp(case) / "hf"
        model = tiny_models.make(case, 5, folder)
        tokens = torch.randint(0, tiny_models.VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(5))
        return Baseline(folder, tokens, run_model(model, tokens))

    return made


@pytest.fixture(scope="module", autouse=True)
def one_set_of_groups() -> Iterator[None]:
    """The groups of one process for all models of this file: starting them takes longer than a model."""
    collection = groups.initialize(Run())
    same = SimpleNamespace(initialize=lambda run: collection, destroy=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "groups", same)
        patch.setattr(opening, "dist", SimpleNamespace(is_initialized=lambda: False))
        yield
    groups.destroy()


@pytest.mark.parametrize("case", rows(tiny_models.CASES, test=["deepseek-v2-grouped", "qwen2-moe", "glm4-moe"]))
def test_without_an_error_every_family_agrees_with_transformers(baseline: Any, case: str) -> None:
    result = baseline(case).compared()
    assert result.passed, result.failures
    assert result.logit_difference < 1e-4
    assert sum(one.tokens for one in result.choices.values()) >= 2 * 64
    assert all(one.equal == one.tokens for one in result.choices.values())


@pytest.mark.parametrize(("case", "breaks", "reason"), [row[1:] for row in COMPUTED], ids=[row[0] for row in COMPUTED])
def test_the_comparison_notices_another_model(
    case: str, breaks: Break, reason: str, baseline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = baseline(case)
    breaks(monkeypatch)
    result = sound.compared()
    assert not result.passed
    assert re.search(reason, "\n".join(result.failures)), result.failures


@pytest.mark.parametrize(("case", "breaks", "reason"), [row[1:] for row in COVERED], ids=[row[0] for row in COVERED])
def test_coverage_notices_tensors_that_are_not_the_models(
    case: str, breaks: Break, reason: str, baseline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = baseline(case)
    breaks(monkeypatch)
    with pytest.raises(ConfigError, match=f"(?s){reason}"):
        sound.compared()
