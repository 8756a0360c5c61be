"""The router of a MoE layer: the gate, its fp32 state, and the experts that each token is sent to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.setting import SCORE_FUNCTIONS
from megatron_moe.engine.layers import MegatronModule
from megatron_moe.engine.modules import DeepcopyKeepsGroups
from megatron_moe.moe.grouped_gemm import gate_product
from megatron_moe.moe.load_balance import AuxLosses, GlobalBatch, StepTokens, count_differences, requested_counts
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routes import RouteSource, rows_and_documents
from megatron_moe.moe.routing import (
    Choice,
    ExpertCapacity,
    MicroBatch,
    RoutedTokens,
    RoutingDecision,
    chosen_experts,
    route,
)
from megatron_moe.parallel.collectives import all_reduce_sum
from megatron_moe.platform.numerics import without_autocast
from megatron_moe.platform.protocols import EngineConfig, ProcessGroups
from megatron_moe.precision.contract import returns_wider
from megatron_moe.precision.fp32_state import Fp32State

Observer = Callable[["TopKRouter", RoutedTokens], None]
"""A function that is called with a router and each of its passes, see `TopKRouter.observed_by`."""


@returns_wider("the weights of the choices are in the router's dtype")
class TopKRouter(Fp32State, DeepcopyKeepsGroups, MegatronModule):
    """A gate that chooses K experts for every token, weighs them and counts the choices.

    State, which stays in float32 when the module is cast or moved (see `Fp32State`):
        expert_bias: [E], saved in checkpoints; None where the bias is not enabled.
        local_tokens_per_expert: [E], whole numbers counted on this rank since the last `finalize_model_grads`: the
            choices that were dispatched.
        local_dropped_per_expert: [E], the choices that were beyond the experts' capacity; None without a capacity.

    local_num_tokens is an int64 [1], the tokens without padding that were counted. local_differences is an int32
    [E, bins], see `count_differences`; None without quantile balancing. Counts and the sums of the auxiliary losses are
    on the device, in memory that stays where it is, so that a captured graph adds at each replay; the limit of `step`
    is checked on the host, by `count_replay`. Observers are not called by a replay.

    The weight is [E, H], and a bias of the logits [E], in the model's dtype; the gate's product and everything after it
    is in fp32 (or fp64). Under sequence parallelism each TP rank routes its own tokens, and the engine sums gradients.

    Used alone or inside megatron-core's own MoE layer (`MoESubmodules(router=TopKRouter)`), `forward` follows the
    engine's protocol. Our MoE layer calls `route`, which needs no dense map. Both pass through the module's hooks.

    Args:
        config: the engine's TransformerConfig; dtype, sequence parallelism and initialisation are read from it.
        pg_collection: the engine's process groups; the default ones if None.
        is_mtp_layer: accepted for the engine's protocol; routing is the same.
        options: what our layer was built with; None for a router alone, which reads them from `config`.

    Attributes:
        step: the tokens since the last step, and the global batch that they belong to.
        aux_losses: the auxiliary losses since the last step; None where there are none.
        observers: see `observed_by`.
        routes: where it takes its choices from in training, see `take_routes`; None: its scores.
        local_live_per_expert: [E] fp32, the choices that the gate would have made; None unless the bias goes by them.
    """

    fp32_state = ("expert_bias", "local_tokens_per_expert", "local_dropped_per_expert")

    def __init__(
        self,
        config: EngineConfig,
        pg_collection: ProcessGroups | None = None,
        is_mtp_layer: bool = False,
        options: MoEOptions | None = None,
    ) -> None:
        super().__init__(config)
        self.options = options = options or MoEOptions.from_engine_config(config)
        self.groups = moe_groups(pg_collection)
        self.layer_number: int | None = None
        self.weight = torch.nn.Parameter(
            torch.empty(options.num_experts, options.hidden_size, dtype=config.params_dtype)
        )
        # Each TP rank sees its own part of the sequence, so the weight's gradient is a sum over TP ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias: torch.nn.Parameter | None = None
        if options.biases:
            self.bias = torch.nn.Parameter(torch.zeros(options.num_experts, dtype=config.params_dtype))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            config.init_method(self.weight)
        zeros = torch.zeros(options.num_experts, dtype=torch.float32)
        self.register_buffer("expert_bias", zeros.clone() if options.enable_expert_bias else None)
        self.register_buffer("local_tokens_per_expert", zeros.clone(), persistent=False)
        dropped = None if options.capacity_factor is None else zeros.clone()
        self.register_buffer("local_dropped_per_expert", dropped, persistent=False)
        self.register_buffer("local_num_tokens", torch.zeros(1, dtype=torch.int64), persistent=False)
        bins = options.quantile_bins
        differences = None if bins is None else torch.zeros(options.num_experts, bins, dtype=torch.int32)
        self.register_buffer("local_differences", differences, persistent=False)
        self.perturb = Jitter(options.input_jitter_eps or 0.0, options.router_dtype)
        self.score = SCORE_FUNCTIONS[options.score_function].scores
        self.choose: Choice | None = None  # by the scores, which the choice's kernel knows
        if not options.chooses_by_score:
            self.choose = partial(chosen_experts, options, self.groups)
        self.limit = ExpertCapacity(options, self.groups)
        self.aux_losses: AuxLosses | None = None
        if options.aux_losses or options.z_loss_coeff:
            self.aux_losses = AuxLosses(options, self.groups)
        self.step = StepTokens()
        self.observers: list[Observer] = []
        self.routes: RouteSource | None = None
        self.local_live_per_expert: Tensor | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Remember the global, one-based number of the layer; called by the engine."""
        self.layer_number = layer_number

    def take_routes(self, source: RouteSource | None) -> None:
        """Take the choices of passes in training from a source, or by the scores again; in evaluation they stay."""
        self.routes, self.local_live_per_expert = source, None
        if source is not None and source.balances_live:
            self.local_live_per_expert = torch.zeros_like(self.local_tokens_per_expert)

    @contextmanager
    def observed_by(self, see: Observer, every_pass: bool = False) -> Iterator[None]:
        """Call `see` with each pass of the router within the block, before the auxiliary losses are attached.

        Args:
            see: takes this router and the pass, and changes neither.
            every_pass: whether to include passes that do not count for a step: without gradients, or in evaluation.
        """

        def observer(router: TopKRouter, routed: RoutedTokens) -> None:
            if routed.counted or every_pass:
                see(router, routed)

        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)

    def count_replay(self, hidden: Tensor) -> None:
        """Count on the host what a replay of a captured graph does with hidden [..., H]; see `StepTokens.add`."""
        self.step.add(hidden.numel() // hidden.shape[-1], where=f"layer {self.layer_number}")

    def gate(self, hidden: Tensor) -> Tensor:
        """Return the router logits [T, E] in the router's dtype, from [T, H] in the model's."""
        fused = self.options.fuse_weight_gradients is not False
        logits = gate_product(hidden, self.weight, self.options.router_dtype, fused)
        return logits if self.bias is None else logits + self.bias.to(logits.dtype)

    def logits_in_fp64(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, E] of hidden [T, H] in fp64, by which `gate` is judged."""
        bias = None if self.bias is None else self.bias.double()
        return torch.nn.functional.linear(hidden.double(), self.weight.double(), bias)

    def choice(self) -> Choice:
        """Return what chooses experts, as a function even where a kernel does."""
        return self.choose or partial(chosen_experts, self.options, self.groups)

    def route(self, hidden: Tensor, is_padding: Tensor | None = None, num_sequences: int = 1) -> RoutingDecision:
        """Choose and weigh the experts of each token, count them, and attach the auxiliary losses.

        A surrounding autocast changes neither the forward nor the backward pass.

        Args:
            hidden: [T, H]; token t belongs to sequence t % B, as in the engine's [S, B] order.
            is_padding: [T] bool, True for padding; None if no token is. Or int64, the tokens' documents; see
                `MicroBatch`.
            num_sequences: B, for the sequence-wise loss.

        Returns:
            expert_ids [T, K] int64 and probs [T, K] fp32.

        Raises:
            OverflowError: before a count could pass 2^24, from where fp32 rounds integers.
        """
        # Through `__call__`: in its forward pre-hooks DDP waits for the weight that it gathers, and FSDP gathers it.
        return self(hidden, is_padding, num_sequences=num_sequences, dense=False)

    def forward(
        self,
        hidden: Tensor,
        padding_mask: Tensor | None = None,
        *,
        num_sequences: int | None = None,
        dense: bool = True,
        **_: Any,
    ) -> RoutingDecision | tuple[Tensor, Tensor]:
        """Return the decision in dense form, (probs [T, E], routing_map [T, E] bool), as the engine's protocol asks.

        Args:
            hidden: [S, B, H] or [T, H].
            padding_mask: bool, one entry per token in the order of `hidden`, True for padding; or as in `route`.
            num_sequences: B; None reads it from `hidden`, where [T, H] is one sequence.
            dense: False returns the decision as `route` does.
        """
        is_padding = documents = rows = None
        if padding_mask is not None and padding_mask.dtype == torch.int64:
            documents = padding_mask.reshape(-1)
            if self.routes is not None:
                rows, documents = rows_and_documents(documents)
            is_padding = documents < 0
        elif padding_mask is not None:
            is_padding = padding_mask.reshape(-1).bool()
        num_sequences = num_sequences or (hidden.shape[1] if hidden.dim() == 3 else 1)
        micro_batch = MicroBatch(is_padding, num_sequences, self.training, documents)
        if hidden.dim() > 2:
            hidden = hidden.flatten(0, -2)
        with without_autocast(hidden.device.type):
            hidden = self.perturb(hidden, self.training)
            logits = self.gate(hidden)
            scores = self.score(logits)
            counted = self.training and torch.is_grad_enabled()
            counts = None
            if counted:
                self.step.add(hidden.shape[0], where=f"layer {self.layer_number}")
                if self.limit.factor is None:
                    counts = (self.local_tokens_per_expert, self.local_num_tokens)
            source, choose, live_ids = self.routes if self.training else None, self.choose, None
            if source is not None:
                choose, live_ids = self._choice_of(source, rows, logits, scores, micro_batch)
            decision = route(logits, scores, self.expert_bias, self.options, micro_batch, choose, counts)
            decision = self.limit(decision, micro_batch)
            if source is not None and counted:
                source.see(self.layer_number or 0, rows, decision.expert_ids, is_padding)
            routed = RoutedTokens(hidden, logits, scores, decision, micro_batch, counted, live_ids)
            for see in self.observers:
                see(self, routed)
            if counted and self.local_differences is not None:
                count_differences(
                    self.local_differences, scores, self.expert_bias, self.options.topk, micro_batch.is_padding
                )
            if counted:
                decision = self._balance(routed)
        if not dense:
            return decision
        # Padding and dropped choices are not in the map.
        ids, shape = decision.expert_ids, (hidden.shape[0], self.options.num_experts)
        probs = decision.probs.new_zeros(shape).scatter(1, ids, decision.probs)
        routing_map = torch.zeros(shape, dtype=torch.bool, device=probs.device).scatter_(1, ids, True)
        if is_padding is not None:
            routing_map &= ~is_padding.unsqueeze(1)
        if decision.kept is not None:
            routing_map &= torch.zeros_like(routing_map).scatter_(1, ids, decision.kept)
        return probs, routing_map

    def reset_counts(self) -> None:
        """Reset all counts and forget the global batch, after a step was committed or abandoned."""
        self.local_tokens_per_expert.zero_()
        for counts in (self.local_dropped_per_expert, self.local_live_per_expert):
            if counts is not None:
                counts.zero_()
        self.local_num_tokens.zero_()
        if self.local_differences is not None:
            self.local_differences.zero_()
        self.step = StepTokens()
        if self.aux_losses is not None:
            self.aux_losses.reset()

    @torch.no_grad()
    def _choice_of(
        self, source: RouteSource, rows: Tensor | None, logits: Tensor, scores: Tensor, micro_batch: MicroBatch
    ) -> tuple[Choice | None, Tensor | None]:
        """Return the choice that a source makes, and the gate's own one where the balance goes by it."""
        live_ids: Tensor | None = None

        def live() -> Tensor:
            nonlocal live_ids
            if live_ids is None:
                live_ids = self.choice()(logits, scores, self.expert_bias, micro_batch)
            return live_ids

        expert_ids = source.expert_ids(self.layer_number or 0, rows, len(logits), live)
        choose = self.choose if expert_ids is None else lambda *_: expert_ids
        return choose, live() if source.balances_live else None

    def _balance(self, routed: RoutedTokens) -> RoutingDecision:
        """Count what is beyond the experts' capacity, and attach the auxiliary losses to the decision."""
        decision, is_padding = routed.decision, routed.micro_batch.is_padding
        if decision.kept is None and self.aux_losses is None and routed.live_ids is None:
            return decision
        requested = requested_counts(routed)
        if self.local_live_per_expert is not None:
            self.local_live_per_expert += requested.sum(dim=0).to(torch.float32)
        if decision.kept is not None:
            dispatched = requested if routed.live_ids is None else requested_counts(routed._replace(live_ids=None))
            requested_by_expert = dispatched.sum(dim=0)
            kept = torch.zeros_like(requested_by_expert)
            kept.scatter_add_(0, decision.expert_ids.flatten(), decision.kept.flatten().long())
            self.local_tokens_per_expert += kept.to(torch.float32)
            self.local_dropped_per_expert += (requested_by_expert - kept).to(torch.float32)
            self.local_num_tokens += decision.expert_ids.shape[0] if is_padding is None else (~is_padding).sum()
        return decision if self.aux_losses is None else self.aux_losses.attach(routed, requested)


class Jitter:
    """A function that multiplies the router's input by noise from [1 - eps, 1 + eps] in training.

    The noise is drawn from torch's generator of the device, which recomputation restores before it runs again; within
    the engine's block, under sequence parallelism, each TP rank has its own random stream. The noise depends on the
    layout, as dropout does. The product is in the router's dtype: in bf16, noise of 1 % would have four values.
    """

    def __init__(self, eps: float, dtype: torch.dtype) -> None:
        self.eps, self.dtype = eps, dtype

    def __call__(self, hidden: Tensor, training: bool) -> Tensor:
        if not training or not self.eps:
            return hidden
        noise = torch.empty(hidden.shape, dtype=self.dtype, device=hidden.device)
        return hidden.to(self.dtype) * noise.uniform_(1 - self.eps, 1 + self.eps)


# ---- all routers of a model


def routers(model_chunks: Iterable[torch.nn.Module]) -> Iterator[TopKRouter]:
    """Yield every router of these chunks, wrapped or not, in the order of the layers."""
    for chunk in model_chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                yield module


def announce_global_batch(
    model_chunks: Sequence[torch.nn.Module], global_batch: GlobalBatch, counted: Sequence[Tensor] | None = None
) -> None:
    """Announce the coming global batch to every router, which forgets it when its counts are reset.

    It is called before the batch's first forward pass in training, and after any counting ahead.

    Args:
        counted: what `counting_ahead` yielded; None if nothing was counted ahead.
    """
    for index, router in enumerate(routers(model_chunks)):
        announced = replace(global_batch, tokens_per_expert=None if counted is None else counted[index])
        router.step.global_batch = announced
        if router.aux_losses is not None:
            router.aux_losses.announce(announced, router.weight.device)


@contextmanager
def counting_ahead(model_chunks: Sequence[torch.nn.Module]) -> Iterator[list[Tensor]]:
    """Count the choices of experts in the forward passes of the block, which run without gradients.

    Yields:
        A tensor [E] int64 per router. After the block it holds the sum over all ranks, by a collective over TP x CP x
        DP.
    """
    counts = {
        router: torch.zeros(router.options.num_experts, dtype=torch.int64, device=router.weight.device)
        for router in routers(model_chunks)
    }
    found = list(counts.values())

    def see(router: TopKRouter, routed: RoutedTokens) -> None:
        counts[router] += requested_counts(routed).sum(dim=0)

    with torch.no_grad(), ExitStack() as stack:
        for router in counts:
            stack.enter_context(router.observed_by(see, every_pass=True))
        yield found
    if not found:
        return
    total = all_reduce_sum(torch.cat(found), next(iter(counts)).groups.tp_dp_cp)
    for count, of_all_ranks in zip(found, total.split([len(count) for count in found])):
        count.copy_(of_all_ranks)


@dataclass(frozen=True)
class RouterSnapshot:
    """A copy of the routers' state that a step may change, made before the step.

    A step that is not committed (overflow, NaN, rerun) restores it: the bias keeps its bits, and the counts of the
    abandoned step are discarded. The tensors are E floats per layer.
    """

    model_chunks: tuple[torch.nn.Module, ...]
    expert_bias: tuple[Tensor | None, ...]

    @classmethod
    def capture(cls, model_chunks: Iterable[torch.nn.Module]) -> RouterSnapshot:
        """Copy the biases and reset all counts, since what was counted before belongs to no step."""
        chunks = tuple(model_chunks)
        biases = []
        for router in routers(chunks):
            router.reset_counts()
            biases.append(None if router.expert_bias is None else router.expert_bias.clone())
        return cls(chunks, tuple(biases))

    @property
    def biases(self) -> list[Tensor]:
        """The copied expert biases, without the routers that have none."""
        return [bias for bias in self.expert_bias if bias is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the step: restore the bits of each bias, and reset counts and auxiliary losses."""
        for router, bias in zip(routers(self.model_chunks), self.expert_bias):
            if bias is not None:
                router.expert_bias.copy_(bias)
            router.reset_counts()
