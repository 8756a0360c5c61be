"""Rotary positions of latent attention, plain or stretched with yarn (arXiv 2104.09864, 2309.00071).

As in DeepSeek's code, neighbouring elements form a pair. The tables are fp32 and not module state, so that no cast
reaches them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.parallel.sequence import context_parallel_slice
from megatron_moe.platform.protocols import AutogradContext, EngineConfig


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Return yarn's growth of the attention logits for a context `factor` times as long; 1 for factor <= 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: EngineConfig) -> float:
    """Return latent attention's scale of q k^T: 1/sqrt(key width), times yarn's squared magnitude if configured."""
    scale = (config.qk_head_dim + config.qk_pos_emb_head_dim) ** -0.5
    if config.rope_type == "yarn" and config.mscale_all_dim:
        scale *= yarn_magnitude(config.rotary_scaling_factor, config.mscale_all_dim) ** 2
    return scale


class Rotary:
    """A function that rotates the pairs of a head's positional part by position x frequency.

    Args:
        config: the engine's MLATransformerConfig: qk_pos_emb_head_dim, rotary_base, rope_type and, for yarn,
            rotary_scaling_factor, original_max_position_embeddings, beta_fast, beta_slow, mscale, mscale_all_dim.
        cp_rank, cp_size: this rank among those that share a sequence, and their number.

    Raises:
        ConfigError: a rotary_percent other than 1; the width itself says how much latent attention rotates.
    """

    def __init__(self, config: EngineConfig, cp_rank: int = 0, cp_size: int = 1) -> None:
        width = config.qk_pos_emb_head_dim
        if config.rotary_percent != 1.0:
            raise ConfigError(
                f"--rotary-percent {config.rotary_percent}: latent attention rotates the whole of "
                f"--qk-pos-emb-head-dim {width}; leave --rotary-percent at 1.0"
            )
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.frequencies = config.rotary_base**-exponents
        self.amplitude = 1.0
        if config.rope_type == "yarn":
            factor = config.rotary_scaling_factor
            self.frequencies = _interpolated(self.frequencies, config)
            self.amplitude = yarn_magnitude(factor, config.mscale) / yarn_magnitude(factor, config.mscale_all_dim)
        self._cp_rank, self._cp_size = cp_rank, cp_size
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [S / CP, B, heads, width] rotated by each row's position in the sequence.

        The rotation is computed in fp32, the result in x's dtype.
        """
        return rotated(x, *self.tables(x.shape[0], x.device))

    def join(self, rest: Tensor, positional: Tensor) -> Tensor:
        """Return heads [S / CP, B, n, width + w]: `rest` [S / CP, B, n, width], and behind it the rotated `positional`.

        positional: [S / CP, B, n, w], or [S / CP, B, 1, w] for all heads, whose gradients are then added in fp32. The
        rotation is computed in fp32, and rounded once in both directions.
        """
        return _JoinPositions.apply(rest, positional, *self.tables(rest.shape[0], rest.device))

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of this rank's `length` positions, fp32 [length, 1, 1, width / 2], times the amplitude.

        They are cached for the next call.
        """
        key = (length, device)
        if key not in self._tables:
            positions = torch.arange(length * self._cp_size, dtype=torch.float32)
            if self._cp_size > 1:
                positions = context_parallel_slice(positions, self._cp_rank, self._cp_size)
            angles = torch.outer(positions, self.frequencies)[:, None, None, :]
            cos, sin = self.amplitude * angles.cos(), self.amplitude * angles.sin()
            self._tables[key] = cos.to(device), sin.to(device)
        return self._tables[key]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [S, B, heads, width] rotated by fp32 tables [S, 1, 1, width / 2] of `Rotary.tables`, in x's dtype.

    The rotation is computed in fp32.
    """
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return pairs.flatten(-2).to(x.dtype)


@has_kernel("join_positions")
def join_positions(rest: Tensor, positional: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [S, B, n, width + w] of `rest` [S, B, n, width] and the rotated `positional` [S, B, n or 1, w]."""
    turned = rotated(positional, cos, sin).expand(-1, -1, rest.shape[2], -1)
    return torch.cat((rest, turned), dim=-1)


@has_kernel("join_positions_backward")
def join_positions_backward(grad: Tensor, cos: Tensor, sin: Tensor, width: int, shared: bool) -> Tensor:
    """Return the gradient of `positional`, added up over the heads in fp32 where they share it, and rounded once.

    grad: [S, B, n, width + w], of what `join_positions` returns.
    """
    turned = grad[..., width:].float()
    return rotated(turned.sum(dim=2, keepdim=True) if shared else turned, cos, -sin).to(grad.dtype)


class _JoinPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, rest: Tensor, positional: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.width, ctx.shared = rest.shape[-1], positional.shape[2] != rest.shape[2]
        return join_positions(rest, positional, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        found = join_positions_backward(grad, cos, sin, ctx.width, ctx.shared)
        return grad[..., : ctx.width], found, None, None


def _interpolated(frequencies: Tensor, config: EngineConfig) -> Tensor:
    """Return yarn's frequencies: slow ones divided by the factor, fast ones kept, those between blended linearly."""
    width, base = config.qk_pos_emb_head_dim, config.rotary_base

    def dimension(rotations: float) -> float:
        """Return the (fractional) index whose frequency makes this many rotations over the original context."""
        wavelength = config.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(dimension(config.beta_fast)), 0)
    high = min(math.ceil(dimension(config.beta_slow)), width - 1)
    span = max(high - low, 0.001)  # as DeepSeek's code does, where both ends meet
    slow = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / config.rotary_scaling_factor * slow + frequencies * (1 - slow)
