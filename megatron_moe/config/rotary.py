"""What the settings of the rotary embedding mean, in numbers and words. No torch."""

from __future__ import annotations

import math

from megatron_moe.config.model_flags import ROPE_SETTINGS, ModelConfig


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return yarn's growth of the attention logits for a context `factor` times as long; 1 for factor <= 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def amplitude(model: ModelConfig) -> float:
    """Return the factor of the cosines and sines of the rotation."""
    factor = model.rotary_scaling_factor
    if model.attention_factor is not None:
        return model.attention_factor
    if model.rope_type == "yarn":
        return yarn_magnitude(factor, model.mscale) / yarn_magnitude(factor, model.mscale_all_dim)
    if model.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(model.original_max_position_embeddings))
    return 1.0


ROTARY_FIELDS = ("rotary_base", "rope_type", *dict.fromkeys(name for names in ROPE_SETTINGS.values() for name in names))
"""The settings with which a model may be trained on, other than those that it was trained with."""


def change(before: ModelConfig, after: ModelConfig) -> str | None:
    """Say in a line how two models' rotations differ: `rope: default -> yarn x4, ...`; None where they do not."""
    changed = [name for name in ROTARY_FIELDS if getattr(before, name) != getattr(after, name)]
    if not changed:
        return None
    models = (before, after)
    kinds = ["default" if m.rope_type == "rope" else f"{m.rope_type} x{m.rotary_scaling_factor:g}" for m in models]
    trained, now = (m.max_position_embeddings or m.seq_length for m in models)
    words = [f"rope: {kinds[0]} -> {kinds[1]}", f"trained {trained} -> {now}"]
    words.append(f"attention amplitude {amplitude(after):.3g}")
    for name in changed:
        if name == "rotary_base" or (before.rope_type == after.rope_type and name != "rotary_scaling_factor"):
            words.append(f"{name} {getattr(before, name)} -> {getattr(after, name)}")
    return ", ".join(words)
