"""Parity with transformers: what a tie is and what is none, what is not covered, and what is refused."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.families import FAMILIES
from megatron_moe.hf.folder import HFFolder
from megatron_moe.hf.mapping import MappedBlock, Mapping
from megatron_moe.hf.tensors import TensorReader
from megatron_moe.hf.transforms import QueryKeyValue
from megatron_moe.model import mla
from megatron_moe.moe.routing import choose_experts
from megatron_moe_tools.convert import parity
from megatron_moe_tools.convert.parity import TIE, choice_margin, compare, compare_with, load_reference, run_model
from megatron_moe_tools.models import source
from megatron_moe_tools.models.load_model import load_model, one_process
from megatron_moe_tools.models.source import locate
from tests.helpers import tiny_models
from tests.helpers.conversions import convert, main, words
from tests.tools.test_convert_file_errors import Break, replaced

EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


def margin(scores: list[float], wanted: list[int], **options: Any) -> float:
    groups = {"num_groups": None, "group_topk": None, "group_score": "top2", **options}
    return float(choice_margin(torch.tensor([scores]), None, SimpleNamespace(**groups), torch.tensor([wanted])))


def test_a_choice_is_as_far_from_the_best_as_scores_would_have_to_change():
    scores = [0.1, 0.5, 0.4, 0.3]
    assert margin(scores, [1, 2]) == 0.0
    assert margin(scores, [2, 1]) == 0.0
    assert margin(scores, [1, 3]) == pytest.approx(0.1)
    assert margin(scores, [0, 1]) == pytest.approx(0.3)


def test_a_choice_within_groups_is_measured_by_groups_and_within_them():
    scores = [0.9, 0.1, 0.5, 0.52, 0.3, 0.2]  # groups of two: best 0.9, 0.52, 0.3; sums 1.0, 1.02, 0.5
    by_best = {"num_groups": 3, "group_topk": 1, "group_score": "max"}
    assert margin(scores, [0], **by_best) == 0.0
    assert margin(scores, [1], **by_best) == pytest.approx(0.8)
    assert margin(scores, [3], **by_best) == pytest.approx(0.38)
    by_sum = {**by_best, "group_score": "top2"}
    assert margin(scores, [3], **by_sum) == 0.0
    assert margin(scores, [0], **by_sum) == pytest.approx(0.02)  # the group is worse by so much, the expert better
    assert margin(scores, [0, 3], num_groups=3, group_topk=2) == 0.0
    assert margin(scores, [3, 2], num_groups=3, group_topk=2) == pytest.approx(0.4)  # leaves out the best
    # all groups are in: each offers its experts, the worst one too
    assert margin([0.9, 0.1, 0.5, 0.52, 0.3, 0.8], [0, 3], num_groups=3, group_topk=3) == pytest.approx(0.28)


def test_the_margin_of_our_own_choice_is_zero_whatever_the_groups():
    generator = torch.Generator().manual_seed(0)
    for groups, topk, score in (
        (4, 2, "top2"), (4, 3, "max"), (4, 4, "max"), (2, 1, "top2"), (2, 1, "megatron"), (None, None, "max")
    ):  # fmt: skip
        options: Any = SimpleNamespace(num_groups=groups, group_topk=topk, group_score=score, topk=4)
        scores, bias = torch.rand(200, 16, generator=generator), torch.rand(16, generator=generator)
        chosen = choose_experts(scores, bias, options)
        assert float(choice_margin(scores, bias, options, chosen).max()) == 0.0
        other = (chosen + 1) % 16
        differs = (other.sort().values != chosen.sort().values).any(-1)
        assert float(choice_margin(scores, bias, options, other)[differs].min()) > 0.0


class Case:
    """A folder, tokens and transformers' answer."""

    def __init__(self, folder: Path, case: str, edit: Any = lambda model: None) -> None:
        model = tiny_models.make(case, 9, folder / "made")
        with torch.no_grad():
            edit(model)
        self.folder = folder / "hf"
        model.save_pretrained(self.folder)
        self.tokens = torch.randint(0, 131, (2, 24), generator=torch.Generator().manual_seed(1))
        self.reference = run_model(model, self.tokens)

    def compared(self, **changes: Any) -> parity.Parity:
        with load_model(locate(self.folder)) as found:
            return compare_with(replace(self.reference, **changes), found, self.tokens)


def twins(model: Any) -> None:
    """In layer 1 experts 2 e and 2 e + 1 score alike: which of the two is taken is a matter of the last bit."""
    gate = model.model.layers[1].mlp.gate.weight
    gate[1::2] = gate[::2]


@pytest.mark.engine
def test_ties_are_followed_and_counted_and_other_choices_are_errors(tmp_path):
    case = Case(tmp_path, "qwen3-moe", twins)
    sound = case.compared()
    assert sound.passed, sound.failures
    experts = case.reference.experts[1]
    # Of three experts one at least is there without its twin; now that one is in its place. Where ours took the first
    # it differs now, where it took the other it did before.
    alone = ~(experts.unsqueeze(-1) == (experts ^ 1).unsqueeze(-2)).any(-1)
    assert alone.any(-1).all()
    moved = {**case.reference.experts, 1: torch.where(alone, experts ^ 1, experts)}
    result = case.compared(experts=moved)
    choice = result.choices[1]
    assert choice.ties + sound.choices[1].ties >= choice.tokens == choice.equal + choice.ties
    assert choice.largest_margin <= TIE
    assert not any(failure.startswith("layer 1: ") and "other experts" in failure for failure in result.failures)
    result = case.compared(experts={**case.reference.experts, 1: (experts + 1) % 8})
    assert any(failure.startswith("layer 1: ") and "go to other experts" in failure for failure in result.failures)
    assert result.choices[1].largest_margin > TIE


def test_logits_that_no_token_changes_show_nothing(tmp_path):
    case = Case(tmp_path, "mixtral", lambda model: model.lm_head.weight.zero_())
    (failure,) = case.compared().failures
    assert "logits are the same for all tokens (0)" in failure and "--allow-suspicious-weights" in failure
    with load_model(locate(case.folder)) as found:
        assert compare_with(case.reference, found, case.tokens, allow_constant=True).passed


def test_a_nan_is_no_agreement(tmp_path):
    case = Case(tmp_path, "mixtral")
    poisoned = case.reference.logits.clone()
    poisoned[0, 3, 5] = torch.nan
    result = case.compared(logits=poisoned)
    assert not result.passed and result.logit_difference == torch.inf


EXPERTS, WEIGHTS = "tokens go to other experts", "weights of the same experts differ"
EITHER = f"{EXPERTS}|logits differ by"


def table(edit: Callable[[MappedBlock], MappedBlock | None]) -> Break:
    """Pieces of the table edited, or left out where None is returned."""
    original = source.mapping

    def broken(*arguments: Any) -> Mapping:
        found = original(*arguments)
        edited = [edit(piece) for piece in found.pieces]
        return replace(found, pieces=tuple(piece for piece in edited if piece is not None))

    return replaced(source, "mapping", broken)


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
        return change(tensor) if re.search(pattern, name) else tensor

    return replaced(TensorReader, "read", broken)


def element(at: int, value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.view(-1).index_fill(0, torch.tensor(at), value).view_as(tensor)


def up_first(piece: MappedBlock) -> MappedBlock:
    return replace(piece, hf=piece.hf[::-1]) if piece.key.endswith("experts.weight1") else piece


def without_last_norm(piece: MappedBlock) -> MappedBlock | None:
    return None if piece.hf == ("model.norm.weight",) else piece


PACKED_IN_TURN = replaced(QueryKeyValue, "to_native", lambda self, tensors: torch.cat(list(tensors)))
PLANTED: dict[str, tuple[str, Break, str]] = {
    "gate and up of experts swapped": ("deepseek-v3", table(up_first), EITHER),
    "q, k and v in turn": ("mixtral", PACKED_IN_TURN, EITHER),
    "the router's bias rounded": ("moonlight", numbers("correction_bias", lambda t: t.bfloat16().float()), EXPERTS),
    "one element": ("deepseek-v2", numbers(r"layers\.0\..*o_proj", element(100, 0.5)), EITHER),
    # too small to be seen in the logits of random tokens: told by the constants themselves
    "hardly another epsilon": ("mixtral", settings(norm_epsilon=1.0001e-5), "epsilon of"),
    "another latent epsilon": ("moonlight", replaced(mla, "LATENT_NORM_EPSILON", 1e-2), "epsilon of"),
    "hardly another rotary base": ("glm4-moe", settings(rotary_base=1000500.0), "rotary frequencies differ"),
    "another mscale": ("deepseek-v2-grouped", settings(mscale=1.0), "rotary amplitude is"),
    "half of the rotary factor": ("glm4-moe", settings(rotary_percent=0.25), "rotary frequencies: 3 pairs here, 6"),
    "groups by the sum of two": ("deepseek-v2-grouped", settings(moe_router_group_score="top2"), EXPERTS),
    "an expert too few": ("glm4-moe", settings(moe_router_topk=2), "2 experts per token here, 3 there"),
    "no scaling factor": ("moonlight", settings(moe_router_topk_scaling_factor=None), WEIGHTS),
    # told before anything is computed
    "a norm left out": ("qwen2-moe", table(without_last_norm), "unexpected: model.norm.weight"),
    "no dense layer": ("deepseek-v2", settings(moe_layer_freq=1), "missing: "),
    "a NaN": ("mixtral", numbers(r"experts\.3\.w3", element(5, torch.nan)), "experts.3.w3.* contains NaN"),
    "one table": ("mixtral", settings(untie_embeddings_and_output_weights=False), "lm_head.weight differs from"),
}


@cache
def sound(folder: Path, name: str) -> Case:
    """A case of `tiny_models`, which agrees with transformers."""
    case = Case(folder / name, name)
    result = case.compared()
    assert result.passed and result.logit_difference < 1e-4, result.failures
    assert all(one.equal == one.tokens for one in result.choices.values()) and len(result.choices) >= 2
    return case


@pytest.mark.parametrize(("case", "breaks", "reason"), PLANTED.values(), ids=PLANTED)
def test_another_model_is_noticed(case, breaks, reason, folder, monkeypatch):
    right = sound(folder, case)
    breaks(monkeypatch)
    try:
        told = right.compared().failures
    except ConfigError as error:
        told = (str(error),)
    assert re.search(reason, "\n".join(told), re.DOTALL), told


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    tiny_models.make("deepseek-v3", 9, folder / "hf")
    convert("hf", "native", folder / "hf", folder / "bf16", "--dtype", "bf16")
    return folder


@pytest.mark.engine
def test_a_checkpoint_that_was_rounded_is_compared_with_a_model_that_is_rounded_too(deepseek):
    result = compare(deepseek / "hf", deepseek / "bf16")
    assert result.passed, result.failures
    assert json.loads(json.dumps(result.as_dict()))["passed"] is True
    assert "passed" in result.lines()[0]


def test_a_folder_that_was_rounded_is_compared_with_a_checkpoint_that_is_rounded_too(tmp_path):
    tiny_models.make("qwen2-moe", 9, tmp_path / "hf")
    convert("hf", "native", tmp_path / "hf", tmp_path / "native")
    convert("native", "hf", tmp_path / "native", tmp_path / "bf16", "--dtype", "bf16")
    result = compare(tmp_path / "bf16", tmp_path / "native", length=16)
    assert result.passed, result.failures


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.norm.weight", "finds no weights in .*: model.norm.weight"), (EXPERT, "does not load .* as DeepseekV3")],
)
def test_a_folder_without_a_tensor_is_no_reference(deepseek, tmp_path, name, message):
    tensors = load_file(deepseek / "hf" / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((deepseek / "hf" / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        load_reference(HFFolder.open(tmp_path), FAMILIES["deepseek-v3"])


def test_the_first_layers_alone_are_compared_and_the_rest_is_said_to_be_left_out(deepseek):
    result = compare(deepseek / "hf", deepseek / "bf16", layers=2, batch=1, length=2)
    assert result.passed and list(result.choices) == [1], result.failures
    assert "layers 2 to 3: left out by --verify-layers 2" in result.not_covered
    assert any("of 16 experts, which none of the tokens chose" in line for line in result.not_covered)


def test_what_cannot_be_compared_is_refused_with_what_helps(deepseek, monkeypatch, capsys):
    for layers in (0, 1, 5):
        with pytest.raises(ConfigError, match=f"--verify-layers {layers}: the model has 4 layers, .* between 2 and 4"):
            compare(deepseek / "hf", deepseek / "bf16", layers=layers)
    monkeypatch.setattr(parity, "load_reference", lambda *_, **__: pytest.fail("was loaded"))
    three = 4 * one_process(locate(deepseek / "hf").run, layers=3).derived.parameter_count(256)
    monkeypatch.setattr(parity.platform, "available_memory_bytes", lambda: 2**28 + three)
    with pytest.raises(ConfigError, match="--verify-layers 2 compares as many as fit"):
        compare(deepseek / "hf", deepseek / "bf16", batch=1, length=2)
    monkeypatch.setattr(parity.platform, "available_memory_bytes", lambda: 2**20)
    with pytest.raises(ConfigError, match="1.0 MB are free on this machine .*: not even the first 2 layers would fit"):
        compare(deepseek / "hf", deepseek / "bf16", length=8)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(words("hf", "native", deepseek / "hf", deepseek / "x", "--verify")) == 2
    assert "transformers, which is not installed" in capsys.readouterr().err


def test_a_model_that_transformers_does_not_have_is_refused_before_it_is_converted(tmp_path, capsys):
    tiny_models.make("bailing-moe-v2", 9, tmp_path / "hf")
    assert main(words("hf", "native", tmp_path / "hf", tmp_path / "native", "--verify")) == 2
    told = capsys.readouterr().err
    assert "has no BailingMoeV2ForCausalLM to compare with; leave it out" in told and "converted" not in told


def test_a_model_type_that_transformers_does_not_know_is_compared_by_its_class(deepseek, tmp_path):
    content = json.loads((deepseek / "hf" / "config.json").read_text())
    content |= {"model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "modeling.py").write_text("raise SystemExit('was run')\n")
    (tmp_path / "model.safetensors").write_bytes((deepseek / "hf" / "model.safetensors").read_bytes())
    result = compare(tmp_path, deepseek / "bf16", length=16)
    assert result.passed, result.failures


@pytest.mark.parametrize("case", ["qwen3-vl-moe", "kimi-k25"])
def test_a_language_model_is_compared_without_the_norms_of_what_sees(tmp_path, case):
    tiny_models.make(case, 1, tmp_path / "hf")
    convert("hf", "native", tmp_path / "hf", tmp_path / "native")
    assert compare(tmp_path / "hf", tmp_path / "native", length=8).failures == ()
