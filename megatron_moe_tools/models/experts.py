"""Shows what a model's experts do: their load by text, the tokens that choose them, and how alike they are.

Layers are numbered as in `Trace.routing`; depths of multi-token prediction have names of their own.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.io.files import replace_text
from megatron_moe.io.texts import listed
from megatron_moe_tools.models.source import BlockValues
from megatron_moe_tools.models.trace import Routing

DUPLICATE_COSINE = 0.999
"""Experts with a larger cosine of their weights have learnt nothing apart from each other."""
MAX_TOKENS_SHOWN = 4096
"""Tokens that a page shows with their experts, equally many of each text; its figures count all."""
_COLUMNS = 65_536
"""Weights of each expert that are multiplied at once: E times as many fp32 values."""
_TYPICAL, _CONTEXT, _NAMED = 8, 4, 20
_WEIGHTS = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:transformer_layer\.)?mlp\.experts\.(weight[12])")


@dataclass(frozen=True)
class Sequences:
    """Texts cut into B sequences of at most S tokens.

    names: of the texts. input_ids: [B, S] int64, rows filled up with token 0. lengths: [B] int64, without what fills
    up. texts: [B] int64, the text of each sequence.
    """

    names: list[str]
    input_ids: Tensor
    lengths: Tensor
    texts: Tensor

    def is_token(self, depth: int = 0) -> Tensor:
        """Return [B * S] bool: positions that have a token, and `depth` more after it."""
        return (torch.arange(self.input_ids.shape[1]) < self.lengths[:, None] - depth).flatten()


@dataclass(frozen=True)
class LayerExperts:
    """The E experts of one layer.

    cosine: [E, E] fp32, of the weights of two experts, all three matrices as one vector.
    topk_idx: [B * S, K] int64, the experts of each token, -1 where there is none; no rows without a text.
    tokens_per_expert: [texts, E] int64; no rows without a text.
    coactivation: [E, E] fp32, how often two experts are chosen for one token, relative to a choice that follows their
        loads alone: 1 as often, 0 never. The diagonal is 0.
    """

    name: str
    cosine: Tensor
    topk_idx: Tensor
    tokens_per_expert: Tensor
    coactivation: Tensor

    def duplicates(self) -> list[list[int]]:
        """Return the groups of experts that have the same weights but for rounding."""
        groups: list[list[int]] = []
        for alike in self.cosine > DUPLICATE_COSINE:
            group = alike.nonzero().flatten().tolist()
            if len(group) > 1 and group not in groups:
                groups.append(group)
        return groups


def cut(texts: dict[str, list[int]], limit: int) -> Sequences:
    """Cut each text into equal sequences of at most `limit` tokens; the last one of a text may be shorter."""
    rows, numbers = [], []
    for number, ids in enumerate(texts.values()):
        size = -(-len(ids) // -(-len(ids) // limit))
        for first in range(0, len(ids), size):
            rows.append(torch.tensor(ids[first : first + size]))
            numbers.append(number)
    lengths = torch.tensor(list(map(len, rows)))
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Sequences(list(texts), input_ids, lengths, torch.tensor(numbers))


@torch.no_grad()
def weight_cosines(blocks: Iterable[BlockValues], run: Run) -> dict[int, Tensor]:
    """Return layer -> [E, E] fp32, the cosines of the experts' weights; memory is needed for one layer's experts.

    Raises:
        ConfigError: weights are NaN or infinite.
    """
    experts, width, hidden = run.moe.num_experts or 0, run.derived.moe_ffn_hidden_size, run.model.hidden_size
    shapes = {"weight1": (experts, 2, width, hidden), "weight2": (experts, hidden, width)}
    partial: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    products: dict[int, Tensor] = {}
    for block in blocks:
        named = _WEIGHTS.fullmatch(block.key)
        if named is None:
            continue
        stack, number, matrix = named.groups()
        weights = block.values
        if weights.shape != shapes[matrix]:  # a block of the tensor: of one expert, or of one rank
            if block.key not in partial:
                partial[block.key] = weights.new_empty(shapes[matrix])
                missing[block.key] = partial[block.key].numel()
            ends = map(int.__add__, block.start, weights.shape)
            partial[block.key][tuple(map(slice, block.start, ends))] = weights
            missing[block.key] -= weights.numel()
            if missing[block.key]:
                continue
            weights = partial.pop(block.key)
        layer = int(number) + run.model.num_layers * (stack == "mtp")
        total = products.setdefault(layer, torch.zeros(experts, experts, dtype=torch.float64))
        for columns in weights.flatten(1).split(_COLUMNS, dim=1):
            rows = columns.to(platform.device(), torch.float32)
            total += (rows @ rows.T).cpu()
        if not torch.isfinite(total).all():
            raise ConfigError(f"{block.key} contains NaN or infinity: it is damaged, or of a faulty run")
    cosines = {}
    for layer, total in sorted(products.items()):
        norms = total.diagonal().sqrt().clamp_min(1e-30)
        cosines[layer] = (total / norms / norms[:, None]).float()
    return cosines


def coactivation(topk_idx: Tensor, experts: int) -> Tensor:
    """Return [E, E] as `LayerExperts` has it, from the experts [T, K] of each token."""
    chosen = torch.zeros(len(topk_idx), experts).scatter_(1, topk_idx, 1.0)
    pairs = (chosen.T @ chosen).double()
    loads = pairs.diagonal().clone()
    expected = torch.outer(loads, loads)
    for table in (pairs, expected):
        table.fill_diagonal_(0.0)
    expected *= pairs.sum() / expected.sum().clamp_min(1.0)  # a token's experts differ: fewer pairs than K^2
    return torch.where(expected > 0, pairs / expected, 0.0).float()


def experts_by_layer(
    run: Run, cosines: dict[int, Tensor], routing: dict[int, Routing], sequences: Sequences | None
) -> dict[int, LayerExperts]:
    """Return what is known of each layer's experts; `routing` is empty without sequences."""
    found = {}
    for layer, cosine in cosines.items():
        experts, depth = len(cosine), max(layer - run.model.num_layers + 1, 0)
        name = f"MTP depth {depth}" if depth else f"layer {layer}"
        topk_idx = counts = torch.zeros(0, experts, dtype=torch.int64)
        together = torch.zeros(experts, experts)
        if sequences is not None:
            is_token = sequences.is_token(depth)
            topk_idx = routing[layer].topk_idx.masked_fill(~is_token[:, None], -1)
            texts = sequences.texts.repeat_interleave(sequences.input_ids.shape[1])[is_token]
            cells = (texts[:, None] * experts + topk_idx[is_token]).flatten()
            counts = torch.bincount(cells, minlength=len(sequences.names) * experts).view(-1, experts)
            together = coactivation(topk_idx[is_token], experts)
        found[layer] = LayerExperts(name, cosine, topk_idx, counts, together)
    return found


def expert_tensors(layers: dict[int, LayerExperts]) -> dict[str, Tensor]:
    """Return the tensors by the names that they have in a file."""
    named: dict[str, Tensor] = {}
    for layer, one in layers.items():
        named[f"cosine.{layer}"] = one.cosine
        if len(one.tokens_per_expert):
            named |= {f"tokens_per_expert.{layer}": one.tokens_per_expert, f"coactivation.{layer}": one.coactivation}
    return named


def findings(layers: dict[int, LayerExperts]) -> list[str]:
    """Return lines about the experts: extremes, and each layer with dead or duplicate experts."""
    lines, fullest, closest = [], (0.0, ""), (-1.0, "")
    for one in layers.values():
        counts = one.tokens_per_expert.sum(dim=0)
        between = one.cosine.clone().fill_diagonal_(-1.0)
        first, second = divmod(int(between.argmax()), len(between))
        closest = max(closest, (float(between.max()), f"experts {first} and {second} of {one.name}"))
        if len(one.tokens_per_expert):
            share = float(counts.double().mean())
            fullest = max(fullest, (int(counts.max()) / share, f"expert {int(counts.argmax())} of {one.name}"))
            dead = (counts == 0).nonzero().flatten().tolist()
            if dead:
                text = f"{len(dead)} of {len(counts)} experts dead (no token; an even share is {share:.4g})"
                lines.append(f"{one.name}: {text}: {listed(dead, _NAMED)}")
        for group in one.duplicates():
            lines.append(f"{one.name}: duplicate experts, cosine > {DUPLICATE_COSINE}: {listed(group, _NAMED)}")
    extremes = f"most alike: {closest[1]}, cosine {closest[0]:.3f}"
    if fullest[1]:
        extremes = f"fullest: {fullest[1]}, {fullest[0]:.2f} times an even share; {extremes}"
    return [extremes, *lines]


def typical_tokens(ids: Tensor, topk_idx: Tensor, experts: int) -> list[list[tuple[int, int, int]]]:
    """Return for each expert the kinds of token that choose it more often than tokens do on average, most first.

    Args:
        ids: [T] int64. topk_idx: [T, K] int64.

    Returns:
        E lists of up to 8: token id, how many of them chose the expert, how many there are.
    """
    kinds, kind, totals = ids.unique(return_inverse=True, return_counts=True)
    cells = (kind[:, None] * experts + topk_idx).flatten()
    chose = torch.bincount(cells, minlength=len(kinds) * experts).view(-1, experts)
    more = chose - totals[:, None] * (chose.sum(dim=0) / max(len(ids), 1))
    order = more.topk(min(_TYPICAL, len(kinds)), dim=0).indices.T
    found = []
    for expert, places in enumerate(order):
        places = places[more[places, expert] > 0]
        columns = (kinds[places], chose[places, expert], totals[places])
        found.append(list(zip(*map(Tensor.tolist, columns))))
    return found


def write_picture(
    path: Path,
    title: str,
    layers: dict[int, LayerExperts],
    sequences: Sequences | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write one HTML page that needs no network: loads, tokens with their experts, typical tokens, similarities.

    sequences and tokenizer: None if only weights are shown.
    """
    data: dict[str, Any] = {"title": title, "findings": findings(layers), "layers": [], "texts": [], "ids": []}
    if sequences is not None and tokenizer is not None:
        ids, is_token = sequences.input_ids.flatten(), sequences.is_token()
        text_of, first = sequences.texts.repeat_interleave(sequences.input_ids.shape[1]), []
        for text in range(len(sequences.names)):
            first.append((is_token & (text_of == text)).nonzero().flatten()[: MAX_TOKENS_SHOWN // len(sequences.names)])
        shown = torch.cat(first)
        data |= {"texts": sequences.names, "tokens": int(is_token.sum()), "ids": ids[shown].tolist()}
        data |= {"textOf": text_of[shown].tolist(), "pieces": _pieces(sequences, tokenizer)}
    for one in layers.values():
        entry: dict[str, Any] = {"name": one.name, "cosine": _cells(one.cosine)}
        if sequences is not None:
            counts = one.topk_idx[:, 0] >= 0
            entry["typical"] = typical_tokens(ids[counts], one.topk_idx[counts], len(one.cosine))
            entry["experts"] = one.topk_idx[shown].tolist()
            entry["coactivation"] = _cells(one.coactivation)
            entry["counts"] = one.tokens_per_expert.tolist()
        data["layers"].append(entry)
    content = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = resources.files("megatron_moe_tools.models").joinpath("experts.html").read_text(encoding="utf-8")
    replace_text(path, page.replace("THE DATA", content, 1))


def _pieces(sequences: Sequences, tokenizer: Tokenizer) -> dict[int, str]:
    """Return token id -> its text, decoded after a few tokens before it: some decoders drop a text's first space."""
    pieces: dict[int, str] = {}
    for row, length in zip(sequences.input_ids.tolist(), sequences.lengths.tolist()):
        for at, token in enumerate(row[:length]):
            if token in pieces:
                continue
            before: Sequence[int] = row[max(at - _CONTEXT, 0) : at]
            piece = tokenizer.detokenize([*before, token])[len(tokenizer.detokenize(before)) :]
            pieces[token] = piece or f"<{token}>"  # a special token, or some bytes of a character
    return pieces


def _cells(table: Tensor) -> dict[str, Any]:
    """Return [E, E] in base64, a byte per cell from low to high; the diagonal does not count."""
    between = table.double().fill_diagonal_(0.0)
    low, high = float(between.min()), float(between.max())
    cells = ((between - low) / max(high - low, 1e-9) * 255).round().byte()
    return {"low": low, "high": high, "cells": base64.b64encode(cells.numpy().tobytes()).decode()}
