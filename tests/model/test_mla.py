"""Latent attention on one process against the readable reference; initialised weights, outputs and all gradients."""

import dataclasses

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import LOCAL
from megatron_moe.model.engine_config import LayerSettings, transformer_config
from megatron_moe.model.mla import LatentAttention, MLASubmodules
from megatron_moe.parallel import groups
from tests.helpers.errors import relative
from tests.numbers import reference_mla as reference

pytestmark = pytest.mark.engine


SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "qk_pos_emb_head_dim": 16,
}
CASES = {
    "query latent": {},
    "no query latent": {"q_lora_rank": None},
    "no latent norms": {"qk_layernorm": False},
    "wide values": {"v_head_dim": 24},
    "other base": {"rotary_base": 50.0, "norm_epsilon": 1e-2},
    "yarn": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, amplitude only": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.0},
    "yarn, both scales": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.707},
    "mscale without yarn": {"mscale_all_dim": 1.0, "rotary_scaling_factor": 40.0},
}


def layer_of(run):
    pg_collection = groups.initialize(run)
    submodules = MLASubmodules(
        LOCAL.column_linear, LOCAL.row_linear, LOCAL.norm if run.model.qk_layernorm else None, LOCAL.core_attention
    )
    settings = LayerSettings.from_run(run)
    layer = LatentAttention(
        transformer_config(run),
        submodules,
        layer_number=1,
        pg_collection=pg_collection,
        recomputed=settings.recomputed,
        rotation=settings.rotation,
        gathers_latents=settings.gathers_latents,
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if "layernorm" in name else 0.4 * noise)
    return layer


def shape_of(run):
    model = run.model
    names = {field.name for field in dataclasses.fields(reference.Shape)}
    return reference.Shape(
        heads=model.num_attention_heads,
        yarn=model.rope_type == "yarn",
        factor=model.rotary_scaling_factor,
        original_length=model.original_max_position_embeddings,
        **{name: value for name, value in vars(model).items() if name in names},
    )


@pytest.mark.parametrize("change", CASES.values(), ids=CASES)
def test_outputs_and_gradients_agree_with_the_reference(change, one_process):
    run = replace(Run(), **{**SIZES, **change})
    layer = layer_of(run)
    x = torch.randn(20, 2, 32, requires_grad=True)
    grad = torch.randn(20, 2, 32)
    weights = {
        name.removesuffix(".weight"): parameter.detach().double().requires_grad_()
        for name, parameter in layer.named_parameters()
    }
    x_wide = x.detach().double().requires_grad_()
    wanted = reference.attention(x_wide, weights, shape_of(run))
    wanted.backward(grad.double())
    got, bias = layer(x)
    got.backward(grad)
    assert bias is None
    assert relative(got, wanted) < 2e-6
    assert relative(x.grad, x_wide.grad) < 1e-5
    for name, parameter in layer.named_parameters():
        assert relative(parameter.grad, weights[name.removesuffix(".weight")].grad) < 1e-5, name


def test_bf16_stays_close_to_the_reference(one_process):
    run = replace(Run(), **SIZES, bf16=True)
    layer, x = layer_of(run), torch.randn(20, 2, 32).bfloat16()
    weights = {name.removesuffix(".weight"): parameter.double() for name, parameter in layer.named_parameters()}
    got, _ = layer(x)
    assert got.dtype == torch.bfloat16
    assert relative(got, reference.attention(x.double(), weights, shape_of(run))) < 1.5e-2


def test_without_positions_nothing_is_rotated(one_process):
    """Then attention is blind to the order of what came before: the last token's output stays when they swap places."""
    layer = layer_of(replace(Run(), **SIZES, position_embedding_type="none"))
    x = torch.randn(9, 1, 32)
    shuffled = torch.cat((x[:-1].flip(0), x[-1:]))
    assert torch.allclose(layer(x)[0][-1], layer(shuffled)[0][-1], atol=1e-5)
    groups.destroy()
    rotating = layer_of(replace(Run(), **SIZES))
    assert not torch.allclose(rotating(x)[0][-1], rotating(shuffled)[0][-1], atol=1e-2)


def test_masks_and_outside_positions_are_refused(one_process):
    layer, x = layer_of(replace(Run(), **SIZES)), torch.randn(4, 1, 32)
    with pytest.raises(ValueError, match="Documents.as_mask"):
        layer(x, attention_mask=torch.ones(1))
    with pytest.raises(ValueError, match="inference_context"):
        layer(x, inference_context=object())
