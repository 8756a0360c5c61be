"""Numbers of a model that are no weights: the norms' epsilons and the rotary frequencies.

Logits tell a wrong epsilon only where activations are small, and a wrong frequency only far into a sequence. Both are
plain numbers on either side, so they are compared as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_moe.conversion.mapping import Mapping
from megatron_moe.model.mla import LatentAttention

FREQUENCY_TOLERANCE = 1e-5
"""Largest relative difference of a rotary frequency: both sides compute them in fp32."""


@dataclass(frozen=True)
class Constants:
    """epsilons: of the norms, by the name of their weight in a folder. frequencies: radians per position, [pairs].
    amplitude: of the rotation. Both None for a model without a rotary embedding that is known here."""

    epsilons: dict[str, float]
    frequencies: Tensor | None
    amplitude: float | None


def of_reference(model: Any) -> Constants:
    """Of transformers' model."""
    epsilons = {}
    for name, module in model.named_modules():
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(epsilon, float) and hasattr(module, "weight"):
            epsilons[f"{name}.weight"] = epsilon
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None:
        return Constants(epsilons, None, None)
    return Constants(epsilons, rotary.inv_freq.detach().float().cpu(), float(rotary.attention_scaling))


def of_ours(chunk: torch.nn.Module, table: Mapping) -> Constants:
    """Of a whole model of ours."""
    epsilons = {}
    for piece in table.pieces:
        module = chunk.get_submodule(piece.key.rpartition(".")[0])
        if isinstance(epsilon := getattr(module, "eps", None), float):
            epsilons[piece.hf[0]] = epsilon
    latent = next((module for module in chunk.modules() if isinstance(module, LatentAttention)), None)
    if latent is not None and latent.rotary is not None:
        return Constants(epsilons, latent.rotary.frequencies.cpu(), latent.rotary.amplitude)
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if latent is not None or rotary is None:
        return Constants(epsilons, None, None)
    return Constants(epsilons, rotary.inv_freq.detach().float().cpu(), 1.0)


def differences(ours: Constants, theirs: Constants, depths: set[str]) -> Iterator[str]:
    """What is not the same, in words.

    Args:
        depths: names that only ours has: layers of multi-token prediction.
    """
    names = (ours.epsilons.keys() | theirs.epsilons.keys()) - depths
    wrong = [name for name in sorted(names) if ours.epsilons.get(name) != theirs.epsilons.get(name)]
    if wrong:
        name = wrong[0]
        yield (
            f"epsilon of {len(wrong)} norms: {name}: {ours.epsilons.get(name)} here, {theirs.epsilons.get(name)} there"
        )
    if ours.frequencies is None or theirs.frequencies is None:
        if (ours.frequencies is None) != (theirs.frequencies is None):
            yield "rotary frequencies: on one side only"
        return
    if ours.frequencies.shape != theirs.frequencies.shape:
        yield f"rotary frequencies: {len(ours.frequencies)} pairs here, {len(theirs.frequencies)} there"
    elif not torch.allclose(ours.frequencies, theirs.frequencies, rtol=FREQUENCY_TOLERANCE, atol=0.0):
        apart = ((ours.frequencies - theirs.frequencies).abs() / theirs.frequencies).max()
        yield f"rotary frequencies differ by {float(apart):.2e} of their size"
    if ours.amplitude is not None and abs(ours.amplitude - (theirs.amplitude or 0.0)) > FREQUENCY_TOLERANCE:
        yield f"rotary amplitude is {ours.amplitude:.7f} here, {theirs.amplitude:.7f} there"
