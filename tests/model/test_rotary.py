"""Frequencies and amplitudes of every kind of rotary embedding, against transformers' functions."""

import random

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_moe.config.model_flags import ROPE_SETTINGS
from megatron_moe.config.rotary import amplitude
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.rotary import Rotation
from tests.helpers.rows import rows

ROUNDING = 2.5e-7
"""Two roundings of fp32: transformers divides once more, or in another order."""
OTHER_NAMES = {"rotary_scaling_factor": "factor", "yarn_correction_range_round_to_int": "truncate"}


def drawn(kind, seed):
    """Return settings of a kind, and the width of its heads."""
    draw = random.Random(f"{kind} {seed}")
    settings = {
        "rotary_scaling_factor": draw.choice([1.5, 2.0, 8.0, 32.0, 40.0]),
        "original_max_position_embeddings": draw.choice([64, 100, 4096, 8192]),
        "beta_fast": draw.choice([8.0, 16.0, 32.0]),
        "beta_slow": draw.choice([0.5, 1.0, 2.0, 8.0]),
        "low_freq_factor": draw.choice([0.5, 1.0, 2.0]),
        "high_freq_factor": draw.choice([3.0, 4.0, 10.0]),
        "yarn_correction_range_round_to_int": draw.random() < 0.5,
    }
    if draw.random() < 0.5:
        settings |= {"mscale": draw.uniform(0.5, 1.5), "mscale_all_dim": draw.uniform(0.5, 1.5)}
    if draw.random() < 0.4:
        settings["attention_factor"] = draw.uniform(0.5, 2)
    width, part = draw.choice([8, 16, 40, 96, 128, 256]), draw.choice([0.5, 0.75, 1.0])
    for name in ("short_factor", "long_factor"):
        settings[name] = tuple(draw.uniform(1, 5) for _ in range(int(width * part) // 2))
    others = {"rotary_base": draw.choice([50.0, 1e4, 5e5, 1e6]), "rotary_percent": part, "kv_channels": width}
    return {name: value for name, value in settings.items() if name in ROPE_SETTINGS[kind]} | others


@pytest.mark.parametrize("seed", rows(range(100), test=range(10)))
@pytest.mark.parametrize("kind", ROPE_SETTINGS)
def test_frequencies_and_amplitude_are_those_of_transformers(kind, seed):
    settings = drawn(kind, seed)
    rotation = Rotation.from_run(replace(Run(), **settings, rope_type=kind))
    width, base, part = (settings.pop(name) for name in ("kv_channels", "rotary_base", "rotary_percent"))
    there = {OTHER_NAMES.get(name, name): list(x) if isinstance(x, tuple) else x for name, x in settings.items()}
    config = LlamaConfig(
        head_dim=width,
        rope_parameters={"rope_type": kind, "rope_theta": base, "partial_rotary_factor": part, **there},
        max_position_embeddings=2**20,
    )
    original = settings.get("original_max_position_embeddings", 10)
    for length in (original, original + 1):
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)
        torch.testing.assert_close(rotation.frequencies(length), wanted, rtol=ROUNDING, atol=0)
        assert amplitude(rotation.model) == pytest.approx(factor, rel=1e-15)


def test_a_plain_rotation_is_transformers_bit_for_bit():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for width, base in ((96, 1e4), (128, 5e5), (6, 50.0)):
        config = LlamaConfig(head_dim=width, rope_parameters={"rope_type": "default", "rope_theta": base})
        rotation = Rotation.from_run(replace(Run(), kv_channels=width, rotary_base=base))
        assert torch.equal(rotation.frequencies(7), LlamaRotaryEmbedding(config).inv_freq)
        assert amplitude(rotation.model) == 1
