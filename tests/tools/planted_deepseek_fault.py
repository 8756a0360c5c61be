"""A small bf16 transformer whose MoE has the fault of DeepSeek-Coder-V2's issue 6, planted for the audit to find.

The experts' bf16 outputs are multiplied by fp32 routing weights; torch promotes, nobody casts back, and the layer
returns fp32. In `crashing` the next layer's product refuses it; in `silent` everything behind the layer happens to be
fp32, and the model trains, at twice the memory and not as configured.
"""

import torch
from torch import Tensor

HIDDEN, EXPERTS, TOKENS = 16, 4, 6


class Experts(torch.nn.Module):
    """A mixture over all experts, wide by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x).float(), dim=-1)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        weighted = outputs * weights.unsqueeze(-1)  # THE FAULT
        return weighted.sum(dim=-2)


class Layer(torch.nn.Module):
    """Attention in name, experts in earnest."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x + self.attention(x))


class Transformer(torch.nn.Module):
    """Layers in bf16, then a head."""

    def __init__(self, num_layers: int, head_dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers)).bfloat16()
        self.head = torch.nn.Linear(HIDDEN, HIDDEN, bias=False).to(head_dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def crashing() -> tuple[torch.nn.Module, tuple[Tensor]]:
    """Two layers: the second one's attention gets fp32 and raises."""
    return Transformer(2, torch.bfloat16), (torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16),)


def silent() -> tuple[torch.nn.Module, tuple[Tensor]]:
    """One layer before an fp32 head: nothing raises."""
    return Transformer(1, torch.float32), (torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16),)
