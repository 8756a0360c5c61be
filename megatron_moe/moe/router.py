"""TopKRouter: the gate, its fp32 state, and one decision per token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_moe.moe.groups import moe_groups
from megatron_moe.moe.load_balance import EXACT_FP32_INTEGER, aux_loss, count_tokens, z_loss
from megatron_moe.moe.options import MoEOptions
from megatron_moe.moe.routing import RoutingDecision, route
from megatron_moe.moe.routing_probe import RoutingProbe
from megatron_moe.parallel.collectives import sum_over_ranks
from megatron_moe.parallel.copying import CopiesShareGroups
from megatron_moe.precision.fp32_state import Fp32State


class TopKRouter(Fp32State, CopiesShareGroups, MegatronModule):
    """Choose K experts for every token.

    State, float32 under every cast and move (see `Fp32State`):
        expert_bias: [E], saved in checkpoints; None where the bias is not enabled.
        local_tokens_per_expert: [E], whole numbers counted on this rank since the last `finalize_model_grads`.

    The weight is [E, H] in the model's dtype; the gate's product and everything after it is in fp32 (or fp64).
    Under sequence parallelism each TP rank routes its own tokens, and the engine sums the weight's gradients.

    Used alone or inside megatron-core's own MoE layer (`MoESubmodules(router=TopKRouter)`), `forward` speaks the
    engine's protocol. Our MoE layer calls `route`, which needs no dense map.

    Args:
        config: the engine's TransformerConfig.
        pg_collection: the engine's process groups; the default ones if None.
        is_mtp_layer: accepted for the engine's protocol; routing is the same.
    """

    fp32_state = ("expert_bias", "local_tokens_per_expert")

    def __init__(self, config: Any, pg_collection: Any = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config)
        self.options = options = MoEOptions.from_engine_config(config)
        self.groups = moe_groups(pg_collection)
        self.layer_number: int | None = None
        self.weight = torch.nn.Parameter(
            torch.empty(options.num_experts, options.hidden_size, dtype=config.params_dtype)
        )
        # Each TP rank sees its own part of the sequence, so the weight's gradient is a sum over TP ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            config.init_method(self.weight)
        zeros = torch.zeros(options.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", zeros.clone() if options.enable_expert_bias else None)
        self.register_buffer("local_tokens_per_expert", zeros.clone(), persistent=False)
        self.counted_tokens = 0
        self.aux_loss_totals: dict[str, Tensor] = {}
        self.counted_micro_batches = 0
        self.probe: RoutingProbe | None = None  # held during the steps that are measured

    def set_layer_number(self, layer_number: int) -> None:
        """Remember the global, one-based number of the layer; called by the engine."""
        self.layer_number = layer_number

    def gate(self, hidden: Tensor) -> Tensor:
        """Router logits [T, E] in the router's dtype, from [T, H] in the model's."""
        return _GateProduct.apply(hidden, self.weight, self.options.router_dtype)

    def route(self, hidden: Tensor, is_padding: Tensor | None = None, num_sequences: int = 1) -> RoutingDecision:
        """Choose and weigh the experts of each token, count them, and attach the auxiliary losses.

        Args:
            hidden: [T, H]; token t belongs to sequence t % B, as in the engine's [S, B] order.
            is_padding: [T] bool, True for padding; None if no token is.
            num_sequences: B, for the sequence-wise loss.

        Returns:
            expert_ids [T, K] int64 and probs [T, K] fp32.

        Raises:
            OverflowError: before a count could pass 2^24, from where fp32 rounds integers.
        """
        logits = self.gate(hidden)
        decision, scores = route(logits, self.expert_bias, self.options, is_padding)
        # Recomputation runs the forward twice, first without gradients: only the pass that has a backward counts.
        if not (self.training and torch.is_grad_enabled()):
            return decision
        counts = count_tokens(decision.expert_ids, self.options.num_experts, is_padding, num_sequences)
        self._add_counts(counts.sum(dim=0), hidden.shape[0])
        if self.probe is not None:
            self.probe.see(self, hidden, logits, scores, decision, is_padding)
        return self._attach_aux_losses(decision, logits, scores, counts, is_padding)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor]:
        """The engine's protocol: (probs [T, E], routing_map [T, E] bool) of the same decision, in dense form.

        Args:
            hidden: [S, B, H] or [T, H].
            padding_mask: bool, one entry per token in the order of `hidden`, True for padding.
        """
        is_padding = None if padding_mask is None else padding_mask.reshape(-1).bool()
        num_sequences = hidden.shape[1] if hidden.dim() == 3 else 1
        decision = self.route(hidden.reshape(-1, hidden.shape[-1]), is_padding, num_sequences)
        shape = (decision.expert_ids.shape[0], self.options.num_experts)
        probs = decision.probs.new_zeros(shape).scatter(1, decision.expert_ids, decision.probs)
        routing_map = torch.zeros(shape, dtype=torch.bool, device=probs.device).scatter_(1, decision.expert_ids, True)
        if is_padding is not None:
            routing_map &= ~is_padding.unsqueeze(1)
        return probs, routing_map

    def reset_counts(self) -> None:
        """Start counting anew: a committed or an abandoned step is over."""
        self.local_tokens_per_expert.zero_()
        self.counted_tokens = 0
        self.aux_loss_totals = {}
        self.counted_micro_batches = 0

    @torch.no_grad()
    def _add_counts(self, counts: Tensor, num_tokens: int) -> None:
        # An expert gets at most one choice per token, so the number of tokens bounds every count without a sync.
        if self.counted_tokens + num_tokens > EXACT_FP32_INTEGER:
            raise OverflowError(
                f"layer {self.layer_number}: {self.counted_tokens + num_tokens} tokens on one rank in one step; counts "
                f"are exact up to {EXACT_FP32_INTEGER}. Use a smaller --global-batch-size or more data-parallel ranks."
            )
        self.counted_tokens += num_tokens
        self.counted_micro_batches += 1
        self.local_tokens_per_expert += counts.to(torch.float32)

    def _attach_aux_losses(
        self, decision: RoutingDecision, logits: Tensor, scores: Tensor, counts: Tensor, is_padding: Tensor | None
    ) -> RoutingDecision:
        """Let the losses' gradients enter the graph at the probs, with the scale that the engine's schedule sets."""
        options = self.options
        if not options.aux_losses and not options.z_loss_coeff:
            return decision
        counts = sum_over_ranks(counts, self.groups.tp_cp)  # [B, E], of the whole micro-batch
        tokens = counts.sum(dim=-1) // options.topk  # [B]
        total, total_tokens = counts.sum(dim=0, keepdim=True), tokens.sum()
        distributions = _distributions(scores, options, is_padding)
        probs = decision.probs
        for name, coeff in options.aux_losses:
            sets = (counts, tokens) if name == "seq_aux_loss" else (total, total_tokens.view(1))
            probs = self._attach(probs, name, aux_loss(distributions, *sets, options.topk), coeff, total_tokens)
        if options.z_loss_coeff:
            value = z_loss(logits, total_tokens.clamp(min=1), is_padding)
            probs = self._attach(probs, "z_loss", value, options.z_loss_coeff, total_tokens)
        return decision._replace(probs=probs)

    def _attach(self, probs: Tensor, name: str, value: Tensor, coeff: float, num_tokens: Tensor) -> Tensor:
        previous = self.aux_loss_totals.get(name)
        self.aux_loss_totals[name] = value.detach() if previous is None else previous + value.detach()
        # With a per-token loss the engine divides all gradients by the tokens of the global batch; the tokens counted
        # here are those of the micro-batch over all ranks that share it.
        scaled = value * coeff * num_tokens if self.options.per_token_loss else value * coeff
        return MoEAuxLossAutoScaler.apply(probs, scaled)


class _GateProduct(torch.autograd.Function):
    """hidden weight^T in a wider dtype. Keeps the operands as they came, which others keep too; left to itself,
    autograd would keep a copy of all hidden states in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden.to(dtype), weight.to(dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        grad_hidden = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_hidden = torch.mm(grad, weight.to(grad.dtype)).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mm(grad.t(), hidden.to(grad.dtype)).to(weight.dtype)
        return grad_hidden, grad_weight, None


def _distributions(scores: Tensor, options: MoEOptions, is_padding: Tensor | None) -> Tensor:
    """Scores [T, E] that sum to one per token, rows of padding zero."""
    if options.score_function == "sigmoid":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return scores if is_padding is None else scores.masked_fill(is_padding.unsqueeze(-1), 0.0)
