"""Experts that are pruned, merged or drawn anew by the load on given tokens: router and bias follow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe_tools.convert.cli import main
from megatron_moe_tools.convert.expert_changes import ChangedExperts, ExpertChange, members
from tests.helpers import tiny_models
from tests.helpers.conversions import convert, words
from tests.helpers.dense_steps import step_of

EXPERTS = {
    "num_experts": 8, "moe_ffn_hidden_size": 16, "moe_router_topk": 2, "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid", "moe_router_num_groups": 2, "moe_router_group_topk": 1,
    "moe_layer_freq": "[0,1,1]", "mtp_num_layers": 1,
}  # fmt: skip
LAYER = "decoder.layers.1.mlp."


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A step with eight experts in two groups, and a file of tokens beside it."""
    root = tmp_path_factory.mktemp("experts")
    tokens = torch.randint(0, 131, (4, 48), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": tokens}, root / "tokens.safetensors")
    return step_of(root / "moe", **EXPERTS)


def changed(experts: Path, save: Path, *flags: str) -> tuple[dict[str, Any], StepReader, StepReader]:
    """The certificate of a change, the step before and the one after."""
    given = [*flags, "--tokens", str(experts.parent / "tokens.safetensors")]
    content = convert("native", "native", experts, save, *given)
    return content, StepReader(next(experts.glob("iter_*"))), StepReader(save / "iter_0000000")


def test_the_most_loaded_experts_of_each_group_stay_with_their_rows_and_biases(experts, tmp_path):
    content, before, after = changed(experts, tmp_path / "fewer", "--prune-experts", "4")
    plan = content["change of experts"]
    assert [layer["layer"] for layer in plan["layers"]] == [1, 2, 3]
    for layer in plan["layers"]:
        load, kept = layer["load"], [one[0][0] for one in layer["experts"]]
        # two of four choices each token makes in the layer; the last depth predicts one token less
        assert sum(load) == (4 * 48 - 4 * (layer["layer"] == 3)) * 2
        for group, here in ((range(4), kept[:2]), (range(4, 8), kept[2:])):
            assert set(here) == set(sorted(group, key=lambda one: (-load[one], one))[:2])
        key = "mtp.layers.0.transformer_layer." if layer["layer"] == 3 else f"decoder.layers.{layer['layer']}."
        for name in ("experts.weight1", "experts.weight2", "router.weight", "router.expert_bias"):
            assert torch.equal(after.read(f"{key}mlp.{name}"), before.read(f"{key}mlp.{name}")[kept])
    found = content["verification"]
    assert found["change"] == pytest.approx(found["loss"] - found["loss_before"]) and found["change"] != 0
    assert found["tokens"] == 192


def test_merged_experts_are_means_by_load_and_have_the_row_of_the_most_loaded(experts, tmp_path):
    content, before, after = changed(experts, tmp_path / "merged", "--merge-experts", "4")
    made = content["change of experts"]["layers"][0]["experts"]
    assert sorted(expert for one in made for expert, _ in one) == list(range(8))
    weights, old = after.read(f"{LAYER}experts.weight1"), before.read(f"{LAYER}experts.weight1")
    for number, one in enumerate(made):
        assert sum(weight for _, weight in one) == pytest.approx(1)
        expected = sum(weight * old[expert].double() for expert, weight in one)
        assert torch.equal(weights[number], expected.float())
    first = [one[0][0] for one in made]
    assert torch.equal(after.read(f"{LAYER}router.weight"), before.read(f"{LAYER}router.weight")[first])
    assert torch.equal(after.read(f"{LAYER}router.expert_bias"), before.read(f"{LAYER}router.expert_bias")[first])


def test_experts_of_little_load_are_drawn_anew_and_the_others_stay(experts, tmp_path):
    content, before, after = changed(experts, tmp_path / "new", "--reinit-experts", "0.5")
    layer = content["change of experts"]["layers"][0]
    new = [expert for expert, load in enumerate(layer["load"]) if load < 0.5 * sum(layer["load"]) / 8]
    assert 0 < len(new) < 8 and [number for number, one in enumerate(layer["experts"]) if not one] == new
    old = [expert for expert in range(8) if expert not in new]
    for name, std in (("experts.weight1", 0.02), ("experts.weight2", 0.02 / 6**0.5), ("router.weight", 0.02)):
        now, was = after.read(LAYER + name), before.read(LAYER + name)
        assert torch.equal(now[old], was[old]) and abs(float(now[new].std()) / std - 1) < 0.2
    bias, was = after.read(f"{LAYER}router.expert_bias"), before.read(f"{LAYER}router.expert_bias")
    assert torch.equal(bias[old], was[old]) and torch.allclose(bias[new], was[old].mean())


def test_an_expert_joins_the_one_it_is_most_like():
    load, cosine = torch.tensor([5, 1, 0, 9]), torch.eye(4)
    cosine[1, 0], cosine[1, 3], cosine[2, 3] = 0.2, 0.1, 0.9
    assert members(ExpertChange("merge", 2), load, cosine, 1) == [((0, 5 / 6), (1, 1 / 6)), ((3, 1.0), (2, 0.0))]
    assert members(ExpertChange("prune", 2), load, cosine, 2) == [((0, 1.0),), ((3, 1.0),)]
    assert members(ExpertChange("reinit", 0.3), load, cosine, 1) == [((0, 1.0),), (), (), ((3, 1.0),)]


RECIPE = ChangedExperts.recipe


def wrong(fault: str) -> Any:
    """A `recipe` with a fault."""

    def recipe(source: ChangedExperts, block: Any) -> Any:
        from dataclasses import replace

        found = RECIPE(source, block)
        if fault == "rows" and block.key.endswith("router.weight"):
            return replace(found, rows=(found.rows[1], found.rows[0], *found.rows[2:]))
        if fault == "bias" and block.key.endswith("expert_bias"):
            return replace(found, rows=tuple(range(4)))
        if fault == "twice" and block.key.endswith(("weight1", "weight2")) and block.start[0] == 1:
            return RECIPE(source, replace(block, start=(0, *block.start[1:])))
        return found

    return recipe


@pytest.mark.parametrize("fault", ["rows", "bias", "twice"])
def test_a_router_of_other_experts_is_found_and_nothing_is_published(experts, tmp_path, capsys, monkeypatch, fault):
    monkeypatch.setattr(ChangedExperts, "recipe", wrong(fault))
    tokens = str(experts.parent / "tokens.safetensors")
    line = words("native", "native", experts, tmp_path / "x", "--prune-experts", "4", "--tokens", tokens)
    assert main(line) == 2
    assert "experts and router are not of the same experts" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--prune-experts 8 --tokens T", "--prune-experts 8: "),
        ("--prune-experts 1 --tokens T", "2 to 7 can be left"),
        ("--merge-experts 3 --tokens T", "4 leaves as many in each"),
        ("--merge-experts 2 --tokens T", "--moe-router-topk"),
        ("--reinit-experts 1.5 --tokens T", "is a share of an even load"),
        ("--reinit-experts 1e-9 --tokens T", "there is nothing to draw anew"),
        ("--prune-experts 4", "either --tokens or --text-file"),
        ("--prune-experts 4 --merge-experts 4 --tokens T", "do one after the other"),
        ("--tokens T", "--tokens: is for --prune-experts"),
        ("--prune-experts 4 --tokens T --seed 3", "--seed: is for --upcycle or --reinit-experts"),
        ("--prune-experts 4 --tokens T --verify-layers 2", "the loss is that of all layers"),
        ("--prune-experts 4 --tokens T --num-experts 4", "unexpected argument '--num-experts'"),
    ],
)
def test_what_cannot_be_done_to_experts_is_refused_before_anything_is_written(
    experts, tmp_path, capsys, flags, message
):
    given = flags.replace(" T", f" {experts.parent / 'tokens.safetensors'}").split()
    assert main(words("native", "native", experts, tmp_path / "x", *given)) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_experts_with_biases_are_not_changed(experts, tmp_path, capsys):
    tiny_models.make("gpt-oss", 1, tmp_path / "hf")
    flags = ("--prune-experts", "5", "--tokens", str(experts.parent / "tokens.safetensors"))
    assert main(words("hf", "native", tmp_path / "hf", tmp_path / "x", *flags)) == 2
    assert "biases of experts are not carried over" in capsys.readouterr().err and not (tmp_path / "x").exists()
