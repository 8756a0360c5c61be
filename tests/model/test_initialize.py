"""Initial weights: a function of seed and name, with Megatron-LM's standard deviations."""

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import build_model
from megatron_moe.model.initialize import normal
from megatron_moe.parallel import groups

STREAM = [[0.1495968997478485, -0.2706325054168701], [-0.8512492775917053, 0.4086861312389374]]


def parameters(**changes):
    run = replace(Run(), **{**PRESETS["tiny"], **changes})
    chunk = build_model(run, groups.initialize(run), 256, wrap=False)[0]
    return chunk, dict(chunk.named_parameters())


def test_a_tensor_is_a_function_of_seed_name_and_shape():
    first = normal(1, "a", (40, 50), 0.5)
    assert torch.equal(first, normal(1, "a", (40, 50), 0.5))
    assert not torch.equal(first, normal(2, "a", (40, 50), 0.5))
    assert not torch.equal(first, normal(1, "b", (40, 50), 0.5))
    assert first.dtype == torch.float32
    assert abs(first.std().item() - 0.5) < 0.02
    assert abs(first.mean().item()) < 0.04
    # A change of the generator would silently make another model of every seed.
    assert normal(1234, "embedding.word_embeddings.weight", (2, 2), 1.0).tolist() == STREAM


def test_standard_deviations_and_constants(one_process):
    chunk, named = parameters(num_layers=4, hidden_size=64, init_method_std=0.1, seed=3)
    output_std = 0.1 / (2 * 4) ** 0.5
    for name, parameter in named.items():
        if "layernorm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            out = any(part_ in name for part_ in ("linear_proj", "linear_fc2", "weight2"))
            assert parameter.std().item() == pytest.approx(output_std if out else 0.1, rel=0.12), name
    biases = [buffer for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")]
    assert len(biases) == 3
    assert all(torch.equal(bias, torch.zeros(8)) for bias in biases)


def test_no_two_tensors_are_alike(one_process):
    _, named = parameters()
    corners = [parameter.flatten()[:4].tolist() for name, parameter in named.items() if "layernorm" not in name]
    experts = [row.flatten()[:4].tolist() for name, p in named.items() if "experts.weight" in name for row in p[1:]]
    seen = [tuple(corner) for corner in corners + experts]
    assert len(set(seen)) == len(seen)


def test_bf16_weights_are_the_fp32_weights_rounded_once(one_process):
    _, fp32 = parameters()
    groups.destroy()
    _, bf16 = parameters(bf16=True)
    for name, parameter in bf16.items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, fp32[name].bfloat16()), name


def test_biases_start_at_zero(one_process):
    run = replace(Run(), num_layers=1, hidden_size=32, add_bias_linear=True)
    chunk = build_model(run, groups.initialize(run), 128, wrap=False)[0]
    biases = [parameter for name, parameter in chunk.named_parameters() if name.endswith("bias")]
    assert len(biases) == 4
    assert all(not bias.any() for bias in biases)
