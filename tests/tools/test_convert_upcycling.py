"""megatron-moe convert --upcycle: the new model computes what the dense one does, or nothing is published."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.checkpoint.step_reader import StepReader
from megatron_moe_tools.convert.cli import main
from megatron_moe_tools.convert.upcycle_plan import PROMISED
from megatron_moe_tools.convert.upcycling import UpcycledSource
from tests.helpers import tiny_models
from tests.helpers.conversions import convert, words
from tests.helpers.dense_steps import step_of
from tests.helpers.rows import rows
from tests.helpers.trained_steps import trained

DENSE: dict[str, dict[str, Any]] = {
    "tied": {},
    "biases and norms": {"add_qkv_bias": True, "qk_layernorm": True, "untie_embeddings_and_output_weights": True},
    "latent": {
        "multi_latent_attention": True, "group_query_attention": False, "num_query_groups": None, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "qk_layernorm": True,
    },
    "prediction": {"mtp_num_layers": 1},
    "bf16": {"bf16": True},
}  # fmt: skip
KINDS: dict[str, str] = {
    "copies": "--num-experts 4 --moe-router-topk 2",
    "one of two copies": "--num-experts 2 --moe-router-topk 1 --moe-layer-freq [0,1,0] --moe-router-pre-softmax"
    " --upcycle-router zeros",
    "sigmoid": "--num-experts 4 --moe-router-topk 3 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
    " --moe-router-topk-scaling-factor 2",
    "equal weights": "--num-experts 8 --moe-router-topk 2 --upcycle-router zeros --moe-router-pre-softmax",
    "granular": "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 --moe-layer-freq [0,1,1]",
    "granular, scaled by the router": "--num-experts 9 --moe-router-topk 6 --moe-ffn-hidden-size 16"
    " --moe-router-topk-scaling-factor 3",
    "groups of whole copies": "--num-experts 6 --moe-router-topk 4 --moe-ffn-hidden-size 24 --moe-router-num-groups 3"
    " --moe-router-group-topk 2 --upcycle-router zeros",
    "part is shared": "--num-experts 8 --moe-router-topk 4 --moe-shared-expert-intermediate-size 16"
    " --moe-upcycling-granularity 2 --moe-shared-expert-gate",
    "all is shared": "--num-experts 6 --moe-router-topk 3 --moe-shared-expert-intermediate-size 48"
    " --moe-ffn-hidden-size 24 --moe-router-pre-softmax",
}
EVERY = [*((kind, "tied") for kind in KINDS), *(("granular", dense) for dense in DENSE if dense != "tied")]
TEST = [("equal weights", "tied"), ("granular", "prediction"), ("all is shared", "tied"), ("granular", "bf16")]
FAMILIES = {"Llama": "copies", "Qwen2": "part is shared", "Qwen3": "granular", "Mistral": "copies", "Olmo2": "copies"}
"""The class of a dense family -> a kind whose model has a format at Hugging Face."""
OF_FAMILIES = [case for case, (name, _) in tiny_models.CASES.items() if name in FAMILIES]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Steps of dense models, by the name of their settings; each is written when it is first asked for."""
    root, made = tmp_path_factory.mktemp("dense"), dict[str, Path]()

    def step(name: str) -> Path:
        if name not in made:
            made[name] = step_of(root / name.replace(" ", "_"), seed=len(made), **DENSE[name])
        return made[name]

    return step


def upcycled(source: Path, save: Path, kind: str, *flags: str) -> dict[str, Any]:
    return convert("native", "native", source, save, "--upcycle", *kind.split(), *flags)


@pytest.mark.parametrize(("kind", "settings"), rows(EVERY, test=TEST))
def test_every_kind_computes_the_logits_of_the_dense_model(dense, tmp_path, kind, settings):
    content = upcycled(dense(settings), tmp_path / "moe", KINDS[kind])
    found, plan = content["verification"], content["upcycling"]
    assert found["promised"] == PROMISED and found["relative"] <= PROMISED and found["passed"]
    assert (found["relative_of_depths"] is not None) == (settings == "prediction")
    experts = plan["experts_of_a_layer"]
    assert plan["experts"] == len(experts) * (sum(plan["moe_layers"]) + (settings == "prediction"))
    assert len({(one["copy"], one["part"]) for one in experts}) == len(experts) == plan["parts"] * plan["copies"]
    used = {source["key"] for row in content["tensors"] for source in row["sources"]}
    assert len(used) == plan["source_tensors"]


@pytest.mark.parametrize("case", rows(OF_FAMILIES, test=["qwen3"]) if OF_FAMILIES else [])
def test_a_dense_folder_becomes_experts_whose_folder_transformers_computes(tmp_path, case):
    tiny_models.make(case, 3, tmp_path / "dense")
    kind = KINDS[FAMILIES[tiny_models.CASES[case][0]]].replace("-size 16", "-size 32").replace("[0,1,1]", "[0,1,1,1]")
    content = convert("hf", "native", tmp_path / "dense", tmp_path / "moe", "--upcycle", *kind.split())
    assert content["verification"]["relative"] <= PROMISED
    exported = convert("native", "hf", tmp_path / "moe", tmp_path / "hf", "--verify", "--no-tokenizer")
    assert exported["verification"]["passed"]


def test_an_upcycled_model_trains_with_depths_of_prediction_and_a_bias_that_the_dense_one_lacks(gloo, dense, tmp_path):
    kind = f"{KINDS['copies']} --mtp-num-layers 1 --moe-router-enable-expert-bias --moe-layer-freq [0,1,1]"
    upcycled(dense("tied"), tmp_path / "moe", kind)
    reader, dense_reader = (StepReader(next(folder.glob("iter_*"))) for folder in (tmp_path / "moe", dense("tied")))
    depth = "mtp.layers.0.transformer_layer."
    for name in ("self_attention.linear_qkv.weight", "input_layernorm.weight"):
        assert torch.equal(reader.read(depth + name), dense_reader.read(f"decoder.layers.2.{name}"))
    merge = reader.read("mtp.layers.0.eh_proj.weight")
    assert abs(float(merge.std()) - 0.02) < 0.002 and bool((reader.read("mtp.layers.0.enorm.weight") == 1).all())
    assert reader.read("decoder.layers.1.mlp.router.expert_bias").tolist() == [0.0] * 4
    routers = [reader.read(f"{layer}mlp.router.weight") for layer in (depth, "decoder.layers.1.", "decoder.layers.2.")]
    assert not torch.equal(routers[0], routers[2]) and not torch.equal(routers[1], routers[2])
    config = json.loads((tmp_path / "moe" / "iter_0000000" / "config.json").read_text())
    flags = {**config, "seq_length": 64, "load": str(tmp_path / "moe"), "save": str(tmp_path / "run"), "train_iters": 1}
    gloo.run(1, trained, flags=flags | {"mock_data": True, "tokenizer_type": None})
    assert (tmp_path / "run" / "iter_0000001").is_dir()


def test_noise_makes_another_model_whose_difference_is_measured(dense, tmp_path):
    found = upcycled(dense("tied"), tmp_path / "moe", KINDS["granular"], "--upcycle-noise", "0.05")["verification"]
    assert found["promised"] is None and found["passed"] and found["relative"] > 1e-3
    step = StepReader(tmp_path / "moe" / "iter_0000000")
    experts = step.read("decoder.layers.1.mlp.experts.weight1")
    clean = StepReader(next(dense("tied").glob("iter_*"))).read("decoder.layers.1.mlp.linear_fc1.weight")
    noise = experts[0] - clean.unflatten(0, (2, -1))[:, :24]
    assert abs(float(noise.std() / clean.std()) - 0.05) < 0.005 and not torch.equal(experts[0], experts[2])


def test_equal_rows_of_the_router_choose_whole_copies_and_copies_have_other_rows(dense, tmp_path):
    upcycled(dense("tied"), tmp_path / "moe", KINDS["granular"])
    router = StepReader(tmp_path / "moe" / "iter_0000000").read("decoder.layers.1.mlp.router.weight")
    assert torch.equal(router[0::2], router[1::2]) and len(router.unique(dim=0)) == 4


def swapped(expert: int) -> int:
    return {0: 1, 1: 0}.get(expert, expert)


def twice(expert: int) -> int:
    return 2 if expert == 3 else expert


def with_units(of: Any, key: str) -> Any:
    """A `recipe` that takes the hidden units of another expert for one tensor of the experts."""
    recipe = UpcycledSource.recipe

    def wrong(source: UpcycledSource, block: Any) -> Any:
        found = recipe(source, block)
        if block.key.endswith(key):
            found = dataclasses.replace(found, units=source.plan.units(of(block.start[0])))
        return found

    return wrong


def without_scale(source: UpcycledSource, block: Any) -> Any:
    return dataclasses.replace(RECIPE(source, block), times=1.0)


def without_equal_rows(source: UpcycledSource, block: Any) -> Any:
    return dataclasses.replace(RECIPE(source, block), repeats=1)


RECIPE = UpcycledSource.recipe
WRONG: dict[str, tuple[Any, int, str]] = {
    "parts in another order in one matrix": (with_units(swapped, "weight2"), 1, "FAILED"),
    "a part twice and another never": (with_units(twice, ("weight1", "weight2")), 2, "each is to be there 4 times"),
    "no factor": (without_scale, 1, "FAILED"),
    "parts of a copy with rows of their own": (without_equal_rows, 1, "FAILED"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_expert_is_found_and_nothing_is_published(dense, tmp_path, capsys, monkeypatch, fault):
    recipe, status, message = WRONG[fault]
    monkeypatch.setattr(UpcycledSource, "recipe", recipe)
    line = words("native", "native", dense("tied"), tmp_path / "moe", "--upcycle", *KINDS["granular"].split())
    assert main(line) == status
    assert message in capsys.readouterr().err and not (tmp_path / "moe").exists()


REFUSED = [
    ("--moe-router-topk 2", "--num-experts is missing"),
    ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk 5"),
    ("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 20", "--moe-upcycling-granularity 2 does"),
    ("--num-experts 4 --moe-router-topk 2 --moe-upcycling-granularity 5", "--moe-upcycling-granularity 4 does"),
    (
        "--num-experts 4 --moe-router-topk 2 --moe-upcycling-granularity 2 --moe-ffn-hidden-size 48",
        "--moe-ffn-hidden-size 48, --moe-upcycling-granularity 2: 2 parts of 48 are not the 48",
    ),
    ("--num-experts 5 --moe-router-topk 2 --moe-upcycling-granularity 2", "e.g. 6"),
    ("--num-experts 6 --moe-router-topk 3 --moe-upcycling-granularity 2", "e.g. 4"),
    ("--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 64", "has 48 hidden units"),
    ("--num-experts 4 --moe-router-topk 2 --moe-router-pre-softmax", "--moe-router-norm-topk-prob makes them"),
    ("--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid", "do not sum to one"),
    (
        "--num-experts 8 --moe-router-topk 4 --moe-upcycling-granularity 2 --upcycle-router zeros",
        "--moe-router-num-groups 4 --moe-router-group-topk 2 chooses whole copies",
    ),
    (
        "--num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 12 --moe-router-num-groups 4"
        " --moe-router-group-topk 2",
        "2 groups hold whole copies",
    ),
    ("--num-experts 4 --moe-router-topk 2 --dtype bf16", "convert the result with --dtype bf16"),
    ("--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1", "flags of the training"),
    ("--num-experts 4 --moe-router-topk 2 --hidden-size 64", "--hidden-size 64: the settings of the experts"),
    ("--num-experts 4 --moe-router-topk 2 --lr 0.1", "--lr 0.1: is no setting of the model"),
    ("--num-experts 4 --moe-router-topk 2 --upcycle-noise -1", "--upcycle-noise -1.0: has to be at least 0"),
    ("--num-experts 4 --moe-router-topk 2 --ema", "convert with --average-steps or --ema first"),
    ("--num-experts 4 --moe-router-topk 2 --verify-layers 4", "--verify-layers 4: the model has 3 layers"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_cannot_be_upcycled_is_refused_before_anything_is_written(dense, tmp_path, capsys, flags, message):
    line = words("native", "native", dense("tied"), tmp_path / "moe", "--upcycle", *flags.split())
    assert main(line) == 2
    errors = capsys.readouterr().err
    assert message in errors and "verifying" not in errors and list(tmp_path.iterdir()) == []


def test_experts_that_half_precision_would_round_and_sources_with_experts_are_refused(dense, tmp_path, capsys):
    third = "--num-experts 6 --moe-router-topk 3 --moe-upcycling-granularity 3".split()
    assert main(words("native", "native", dense("bf16"), tmp_path / "moe", "--upcycle", *third)) == 2
    assert "--moe-router-topk-scaling-factor 3 puts it into the router" in capsys.readouterr().err
    assert upcycled(dense("bf16"), tmp_path / "wide", " ".join(third), "--dtype", "fp32")["verification"]["passed"]
    again = words("native", "native", tmp_path / "wide", tmp_path / "more", "--upcycle", *third)
    assert main(again) == 2
    assert "has 6 experts already; --prune-experts" in capsys.readouterr().err
    assert main(words("native", "hf", dense("tied"), tmp_path / "hf", "--upcycle", *third)) == 2
    assert "is done in two steps" in capsys.readouterr().err
    assert main(words("native", "native", dense("tied"), tmp_path / "moe", "--upcycle-noise", "1")) == 2
    assert "is for --upcycle, which is not there" in capsys.readouterr().err
