"""Multi-head latent attention as DeepSeek's papers and code describe it, written to be read; torch only.

Weights are a dict of full tensors under the names of megatron_moe.model.mla. Everything is computed in the dtype of the
weights, head by head, with the whole score matrix.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of one layer."""

    heads: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    rotary_base: float = 10000.0
    yarn: bool = False
    factor: float = 1.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    latent_eps: float = 1e-6


def attention(x: Tensor, weights: dict[str, Tensor], shape: Shape) -> Tensor:
    """[S, B, H] -> [S, B, H]."""
    if "linear_q_proj" in weights:
        queries = x @ weights["linear_q_proj"].T
    else:
        latent = rms_norm(x @ weights["linear_q_down_proj"].T, weights.get("q_layernorm"), shape.latent_eps)
        queries = latent @ weights["linear_q_up_proj"].T
    down = x @ weights["linear_kv_down_proj"].T
    latent = rms_norm(down[..., : shape.kv_lora_rank], weights.get("kv_layernorm"), shape.latent_eps)
    key_pos = rotate(down[..., shape.kv_lora_rank :], shape)
    up = latent @ weights["linear_kv_up_proj"].T

    query_width = shape.qk_head_dim + shape.qk_pos_emb_head_dim
    up_width = shape.qk_head_dim + shape.v_head_dim
    later = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    outputs = []
    for head in range(shape.heads):
        query = queries[..., head * query_width : (head + 1) * query_width]
        query_pos = rotate(query[..., shape.qk_head_dim :], shape)
        key, value = up[..., head * up_width : (head + 1) * up_width].split((shape.qk_head_dim, shape.v_head_dim), -1)
        scores = torch.einsum("sbd,tbd->bst", query[..., : shape.qk_head_dim], key)
        scores = scores + torch.einsum("sbd,tbd->bst", query_pos, key_pos)
        scores = (scores * softmax_scale(shape)).masked_fill(later, float("-inf"))
        outputs.append(torch.einsum("bst,tbd->sbd", torch.softmax(scores, -1), value))
    return torch.cat(outputs, -1) @ weights["linear_proj"].T


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """No weight: no norm."""
    return x if weight is None else x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(shape: Shape) -> float:
    scale = 1 / math.sqrt(shape.qk_head_dim + shape.qk_pos_emb_head_dim)
    if shape.yarn and shape.mscale_all_dim:
        scale *= magnitude(shape.factor, shape.mscale_all_dim) ** 2
    return scale


def rotate(x: Tensor, shape: Shape) -> Tensor:
    """[S, B, d]: pair (2i, 2i + 1) of row s is a complex number, turned by s * frequency(i)."""
    amplitude = 1.0
    if shape.yarn:
        amplitude = magnitude(shape.factor, shape.mscale) / magnitude(shape.factor, shape.mscale_all_dim)
    rotated = torch.empty_like(x)
    for pair in range(x.shape[-1] // 2):
        for s in range(x.shape[0]):
            angle = s * frequency(pair, x.shape[-1], shape)
            real, imaginary = x[s, :, 2 * pair], x[s, :, 2 * pair + 1]
            rotated[s, :, 2 * pair] = amplitude * (real * math.cos(angle) - imaginary * math.sin(angle))
            rotated[s, :, 2 * pair + 1] = amplitude * (real * math.sin(angle) + imaginary * math.cos(angle))
    return rotated


def frequency(pair: int, width: int, shape: Shape) -> float:
    plain = shape.rotary_base ** (-2 * pair / width)
    if not shape.yarn:
        return plain

    def index_of(rotations: float) -> float:
        numerator = width * math.log(shape.original_length / (rotations * 2 * math.pi))
        return numerator / (2 * math.log(shape.rotary_base))

    low = max(math.floor(index_of(shape.beta_fast)), 0)
    high = min(math.ceil(index_of(shape.beta_slow)), width - 1)
    if low == high:
        high += 0.001
    ramp = min(max((pair - low) / (high - low), 0.0), 1.0)  # 0: fast, kept; 1: slow, interpolated
    return plain / shape.factor * ramp + plain * (1 - ramp)
