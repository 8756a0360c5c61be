"""What context-parallel ranks of latent attention exchange: latents, or the keys and values that are made of them.

Latents are few numbers, but each rank then makes the keys and values of all tokens, not only of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe.config.model_flags import EXPANDED, LATENT, MOST_FLOPS_PER_BYTE
from megatron_moe.config.run_flags import RunSections


@dataclass(frozen=True)
class ExchangeCost:
    """What a rank receives and computes for one token of another rank, in one layer, without recomputation.

    Attributes:
        latent: numbers of a latent with its rotary key. TP ranks receive a part each and exchange the parts.
        expanded: numbers of the keys and values of a rank's heads.
        bytes_per_number: in the forward pass in the model's dtype, and its gradient in fp32.
        flops: of expanding the latent, in both passes.
    """

    latent: int
    expanded: int
    bytes_per_number: int
    flops: int

    @property
    def cheaper(self) -> str:
        """What to exchange: latents where a byte that is not sent costs at most `MOST_FLOPS_PER_BYTE`."""
        saved = (self.expanded - self.latent) * self.bytes_per_number
        return LATENT if self.flops <= saved * MOST_FLOPS_PER_BYTE else EXPANDED


def exchange_cost(run: RunSections, dtype_name: str) -> ExchangeCost:
    """Return the cost for a run with latent attention, whose weights have the named dtype."""
    m = run.model
    heads = m.num_attention_heads // run.parallel.tensor_model_parallel_size
    return ExchangeCost(
        latent=m.kv_lora_rank + m.qk_pos_emb_head_dim,
        expanded=heads * (m.qk_head_dim + m.qk_pos_emb_head_dim + m.v_head_dim),
        bytes_per_number=4 + (4 if dtype_name == "float32" else 2),
        flops=3 * 2 * m.kv_lora_rank * heads * (m.qk_head_dim + m.v_head_dim),
    )
