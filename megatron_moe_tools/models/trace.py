"""Traces a model on given tokens, to compare implementations: logits, loss, routing, MTP logits, gradient norms.

Tensors are in the order of the tokens, b * S + s, whatever the engine's order is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.hf.mapping import Mapping
from megatron_moe.moe.router import TopKRouter
from megatron_moe.moe.routing import RoutingDecision
from megatron_moe_tools.models.load_model import LoadedCheckpoint

TOKENS_AT_ONCE = 4096
"""Sequences of together about this many tokens go through the model at once: logits and activations take memory."""


@dataclass(frozen=True)
class Routing:
    """The routing of one layer.

    topk_idx: [B * S, K] int64, the chosen experts in the order of the choice. probs: [B * S, E] fp32, the weights of
    the experts' outputs, 0 for those that were not chosen.
    """

    topk_idx: Tensor
    probs: Tensor


@dataclass(frozen=True)
class Trace:
    """What a model computes on B sequences of S tokens, on the CPU.

    logits: [B, S, V] fp32, V the real vocabulary, or 0 if logits were not requested.
    loss: fp32 scalar in nats, mean of the cross entropy with which the positions of a sequence predict the next token.
    routing: layer -> its routing; empty unless requested. Layers are numbered from 0, and depths of multi-token
        prediction after the last layer, as in Hugging Face's names.
    mtp_logits: [D, B, S, V] fp32; depth k predicts at s the token s + k + 1. A depth's last k positions mean nothing:
        there is no token that far ahead. None for a model without such depths.
    grad_norms: name at Hugging Face -> L2 norm of the loss's gradient; None unless requested.
    """

    logits: Tensor
    loss: Tensor
    routing: dict[int, Routing]
    mtp_logits: Tensor | None
    grad_norms: dict[str, float] | None

    def tensors(self, routing: bool) -> dict[str, Tensor]:
        """Return the tensors by the names that they have in a file, with the routing or without."""
        named = {"logits": self.logits, "loss": self.loss}
        if self.mtp_logits is not None:
            named["mtp_logits"] = self.mtp_logits
        if routing:
            for layer, one in self.routing.items():
                named |= {f"topk_idx.{layer}": one.topk_idx, f"probs.{layer}": one.probs}
        return named


def trace(
    found: LoadedCheckpoint,
    input_ids: Tensor,
    lengths: Tensor | None = None,
    *,
    logits: bool = True,
    routing: bool = False,
    gradients: bool = False,
) -> Trace:
    """Run a model, in evaluation mode, on tokens [B, S] below the vocabulary's size, S at least 2.

    lengths: [B] int64, tokens of each sequence; the rest is padding, which the loss leaves out and later tokens alone
    see (default: S). logits: keep them. routing: record every layer's routing. gradients: run the backward pass too and
    record the norms of gradients. Raises ConfigError for a model of no family that has names for them.
    """
    table, grad_norms = None, None
    if gradients:
        table = found.mapping
    batch, length = input_ids.shape
    width = found.vocab_size * logits
    kept = torch.empty(batch, length, width)
    if lengths is None:
        lengths = torch.full((batch,), length)
    targets = int((lengths - 1).sum())
    mtp_logits: list[Tensor] = []
    chosen: dict[int, list[Routing]] = {}
    loss = torch.zeros((), dtype=torch.float64)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(gradients))
        if routing:
            stack.enter_context(_recorded_routing(found.chunk, chosen))
        if found.run.model.mtp_num_layers:
            stack.enter_context(_recorded_mtp_logits(found.chunk, mtp_logits, width))
        at_once = max(TOKENS_AT_ONCE // length, 1)
        for first in range(0, batch, at_once):
            tokens = input_ids[first : first + at_once].to(platform.device(), torch.int64)
            positions = torch.arange(length, device=tokens.device).expand_as(tokens)
            output = found.model(tokens, positions, None)[..., : found.vocab_size].float()
            losses = F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            is_target = positions[:, 1:] < lengths[first : first + at_once, None].to(tokens.device)
            losses = losses[is_target.flatten()]
            if gradients:
                (losses.sum() / targets).backward()
            loss += losses.detach().double().sum().cpu()
            kept[first : first + at_once] = output[..., :width].detach().cpu()
    routings = {}
    for layer, parts in sorted(chosen.items()):
        topk_idx, probs = torch.cat([part.topk_idx for part in parts]), torch.cat([part.probs for part in parts])
        routings[layer] = Routing(topk_idx, probs)
    if table is not None:
        grad_norms = _grad_norms(found, table)
    result = Trace(kept, (loss / targets).float(), routings, None, grad_norms)
    if mtp_logits:
        result = replace(result, mtp_logits=torch.cat(mtp_logits, dim=1))
    return result


def working_bytes(run: Run, batch: int, length: int, gradients: bool, logits: bool = True) -> int:
    """Estimate the bytes that `trace` needs in addition to weights and their gradients."""
    model = run.model
    vocab_size = model.vocab_size or 0
    tokens = min(batch, max(TOKENS_AT_ONCE // length, 1)) * length
    kept = 4 * batch * length * vocab_size * (1 + (model.mtp_num_layers or 0)) * logits
    # logits, their softmax and its gradient; activations of one layer, or of all of them
    activations = max(model.hidden_size, 1) * 40
    if gradients:
        activations *= model.num_layers
    return kept + 4 * tokens * (4 * vocab_size + activations)


@contextmanager
def _recorded_routing(chunk: torch.nn.Module, found: dict[int, list[Routing]]) -> Iterator[None]:
    """Append every router's decisions to `found` within the block: layer from 0, tokens in the order b * S + s."""
    routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]

    def wrapped(router: TopKRouter) -> Callable[..., RoutingDecision]:
        route = router.route

        def recorded(hidden: Tensor, is_padding: Tensor | None = None, num_sequences: int = 1) -> RoutingDecision:
            decision = route(hidden, is_padding, num_sequences)
            ids, probs = decision.expert_ids, decision.probs.detach().float()
            dense = probs.new_zeros(ids.shape[0], router.options.num_experts).scatter_(1, ids, probs)
            number = router.layer_number or 0
            one = Routing(_by_sequence(ids, num_sequences), _by_sequence(dense, num_sequences))
            found.setdefault(number - 1, []).append(one)
            return decision

        return recorded

    for router in routers:
        router.route = wrapped(router)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for router in routers:
            del router.route


def _by_sequence(rows: Tensor, num_sequences: int) -> Tensor:
    """Return the rows [S * B, ...] on the CPU, row s * B + b as row b * S + s."""
    return rows.unflatten(0, (-1, num_sequences)).transpose(0, 1).flatten(0, 1).cpu()


@contextmanager
def _recorded_mtp_logits(chunk: Any, found: list[Tensor], vocab_size: int) -> Iterator[None]:
    """Append the logits [D, B, S, V] of multi-token prediction to `found` in each forward pass within the block."""
    finish = chunk._postprocess

    def recorded(hidden_states: Tensor, **rest: Any) -> Tensor:
        logits = finish(hidden_states=hidden_states, **rest)
        with torch.no_grad():
            depths = chunk.further_logits(
                hidden_states, rest["input_ids"], rest["position_ids"], rest["rotary_pos_emb"]
            )
            found.append(torch.stack([one[..., :vocab_size].float().cpu() for one in depths]))
        return logits

    chunk._postprocess = recorded
    try:
        yield
    finally:
        del chunk._postprocess


def _grad_norms(found: LoadedCheckpoint, table: Mapping) -> dict[str, float]:
    """Return the L2 norm, summed in fp64, of each trained tensor's gradient; 0 where the loss does not depend on it."""
    tensors, norms = found.tensors, {}
    for piece in table.pieces:
        tensor = tensors[piece.key]
        if not isinstance(tensor, torch.nn.Parameter):  # the router's bias has no gradient
            continue
        if tensor.grad is None:
            norms.update(dict.fromkeys(piece.hf, 0.0))
            continue
        ends = map(int.__add__, piece.start, piece.transform.native_shape)
        for name, part in zip(piece.hf, piece.transform.to_hf(tensor.grad[tuple(map(slice, piece.start, ends))])):
            norms[name] = float(torch.linalg.vector_norm(part, dtype=torch.float64))
    return norms
