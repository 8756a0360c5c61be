"""One rank is the oracle: any layout starts from its weights and has its loss, gradients, gradient norm and logits."""

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from tests.helpers import model_cases as cases
from tests.helpers.errors import relative
from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

SMALL = {"seq_length": 16, "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 24, "num_layers": 4}
DENSE = {
    **PRESETS["tiny"],
    **SMALL,
    "num_experts": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_ffn_hidden_size": None,
    "init_method_std": 0.2,
}
TIED = "dense mla, no query latent, tied"
REORDERED = "normed across heads, norms behind"
MODELS = {
    "dense mla": DENSE,
    TIED: {**DENSE, "q_lora_rank": None, "untie_embeddings_and_output_weights": False},
    "grouped, biased": {
        **SMALL,
        "moe_ffn_hidden_size": None,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "add_bias_linear": True,
        "init_method_std": 0.2,
    },
    REORDERED: {
        **SMALL,
        "moe_ffn_hidden_size": None,
        "num_attention_heads": 4,
        "kv_channels": 12,
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "reordered_norm": True,
        "norm_epsilon": 1e-2,
        "init_method_std": 0.2,
    },
    "experts": {**PRESETS["tiny"], **SMALL, "init_method_std": 0.1},
}
TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "num_layers_per_virtual_pipeline_stage": 1}
EP2 = {"expert_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
# What the layout matrix has not: a query norm without sequence parallelism, a tied table without a query latent, norms
# of heads.
LAYOUTS = [
    ("dense mla", 2, TP2),
    (TIED, 2, VPP2),
    ("grouped, biased", 2, SP2),
    ("experts", 2, {**SP2, **EP2, "expert_tensor_parallel_size": 1}),
    (REORDERED, 2, TP2),
    ("dense mla", 2, OVERLAPPED),
    (TIED, 2, TP2),
    (TIED, 2, PP2),
    ("grouped, biased", 4, {**TP2, **PP2, "decoder_first_pipeline_num_layers": 1}),
    ("experts", 4, {**EP2, **PP2}),
    (REORDERED, 2, SP2),
    (REORDERED, 4, {**TP2, **CP2}),
    (REORDERED, 2, VPP2),
]


def cut(full, recipe):
    for axis, index, parts, stride in recipe:
        full = torch.cat([block.chunk(parts, axis)[index] for block in full.chunk(stride, axis)], axis)
    return full


def over(layouts, test):
    """Parametrize a test by rows of a model, a number of ranks and a layout."""
    ids = [f"{model}-{ranks}-{'-'.join(layout)}" for model, ranks, layout in layouts]
    return pytest.mark.parametrize(("model", "ranks", "layout"), rows(layouts, test=test), ids=ids)


@over(LAYOUTS, test=LAYOUTS[:5])
def test_a_layout_agrees_with_one_rank(once, model, ranks, layout):
    agrees(once, model, ranks, layout)


def agrees(once, model, ranks, layout):
    (wanted,) = once(1, cases.one_step, run=replace(Run(), **MODELS[model]))
    seen = set()
    for rank, result in enumerate(once(ranks, cases.one_step, run=replace(Run(), **{**MODELS[model], **layout}))):
        assert result["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert result["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert relative(result["logits"], wanted["logits"]) < 1e-5
        for name, (recipe, weight, grad) in result["tensors"].items():
            _, full_weight, full_grad = wanted["tensors"][name]
            assert torch.equal(weight, cut(full_weight, recipe)), f"rank {rank}: weight of {name}"
            if not layout.get("use_distributed_optimizer"):  # there a rank has the whole sum of its own shard only
                error = (grad - cut(full_grad, recipe)).norm() / full_grad.norm().clamp_min(1e-12)
                assert error < 2e-5, f"rank {rank}: gradient of {name} is {error:.1e} off"
        seen |= set(result["tensors"])
    assert seen == set(wanted["tensors"])


GENERATING = {
    "EP2": (2, EP2),
    "SP2": (2, SP2),
    "VPP2": (2, VPP2),
    "CP4": (4, {"context_parallel_size": 4}),
    "CP2 SP2": (4, {**CP2, **SP2}),
    "CP2 VPP2": (4, {**CP2, **VPP2}),
}


@pytest.mark.parametrize("layout", rows(GENERATING, test=["EP2", "VPP2", "CP2 SP2"]))
def test_generation_does_not_depend_on_the_layout(gloo, once, layout):
    run = replace(Run(), **{**MODELS["experts"], "init_method_std": 0.2})
    (wanted,) = once(1, cases.continuation, run=run, temperature=1.0)
    assert len(wanted) == 5
    assert max(wanted) < 200
    ranks, flags = GENERATING[layout]
    assert gloo.run(ranks, cases.continuation, run=replace(run, **flags), temperature=1.0) == [wanted] * ranks
