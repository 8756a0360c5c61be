"""Ling 2.0 (BailingMoeV2) as its authors' code computes it, slowly and readably: transformers has no such class.

Written from the formulas of inclusionAI/Ling-V2, models/modeling_bailing_moe_v2.py, with the names of its tensors.
"""

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn


class BailingMoeV2Config(transformers.PretrainedConfig):
    model_type = "bailing_moe"
    norm_topk_prob = True
    use_qkv_bias = False
    pad_token_id = None


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


def rotated(x: Tensor, rope: dict[str, Any]) -> Tensor:
    """[B, heads, S, d]: the first channels of each head, channel i with the one half of these further."""
    width = int(x.shape[-1] * rope["partial_rotary_factor"])
    turned, kept = x[..., :width], x[..., width:]
    frequencies = rope["rope_theta"] ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(x.shape[-2])[:, None] * torch.cat((frequencies, frequencies))
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * angles.cos() + torch.cat((-second, first), -1) * angles.sin(), kept), -1)


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c, self.sizes = c, (c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads)
        self.query_key_value = nn.Linear(c.hidden_size, sum(self.sizes) * c.head_dim, bias=c.use_qkv_bias)
        self.dense = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        if c.use_qk_norm:
            self.query_layernorm = Norm(c.head_dim, c.rms_norm_eps)
            self.key_layernorm = Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.query_key_value(x).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)
        query, key, value = packed.split(self.sizes, dim=1)
        if self.c.use_qk_norm:
            query, key = self.query_layernorm(query), self.key_layernorm(key)
        query, key = rotated(query, self.c.rope_parameters), rotated(key, self.c.rope_parameters)
        shared = self.sizes[0] // self.sizes[1]
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
        scores = query @ key.transpose(-1, -2) / self.c.head_dim**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        context = scores.masked_fill(future, float("-inf")).softmax(-1) @ value
        return self.dense(context.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c, self.weight = c, nn.Parameter(torch.zeros(c.num_experts, c.hidden_size))
        self.expert_bias = nn.Buffer(torch.zeros(c.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c, scores = self.c, (x @ self.weight.t()).sigmoid()
        groups = (scores + self.expert_bias).unflatten(-1, (c.n_group, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        allowed = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        chosen = groups.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
        ids = chosen.topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, ids)
        if c.num_experts_per_tok > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights * c.routed_scaling_factor


class Experts(nn.ModuleList):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        every = torch.stack([expert(x) for expert in self], dim=1)
        return (every.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[-1])) * weights.unsqueeze(-1)).sum(1)


class MoE(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.gate = Gate(c)
        self.experts = Experts(MLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts))
        if c.num_shared_experts is not None:
            self.shared_experts = MLP(c.hidden_size, c.moe_intermediate_size * c.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        output = self.experts(rows, *self.gate(rows)).view_as(x)
        return output if not hasattr(self, "shared_experts") else output + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, c: Any, number: int) -> None:
        super().__init__()
        self.attention = Attention(c)
        self.mlp = MoE(c) if number >= c.first_k_dense_replace else MLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = (Norm(c.hidden_size, c.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class BailingMoeV2Model(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, number) for number in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class BailingMoeV2ForCausalLM(transformers.PreTrainedModel):
    config_class = BailingMoeV2Config
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: BailingMoeV2Config) -> None:
        super().__init__(config)
        self.model = BailingMoeV2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, tokens: Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(tokens)))


transformers.AutoConfig.register("bailing_moe", BailingMoeV2Config)
transformers.AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM)
