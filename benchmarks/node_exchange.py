"""Bytes that an exchange of tokens sends between nodes: by the plain all-to-all, and by node. It needs one process.

    python -m benchmarks.node_exchange [--nodes 8] [--tokens 512]

The model is DeepSeek-V3, with EP over 8 ranks of each node. Every rank's tokens are routed by the model's own choice
over random logits, and sorted by the dispatchers' own sorts. Rows are bf16, and as wide as they are packed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build, replace
from megatron_moe.moe.dispatch_by_node import first_of_each_node
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routing import MicroBatch, chosen_experts, scores_from_logits
from megatron_moe.moe.rows import sort_by_expert
from megatron_moe.parallel.collectives import room_for_rows

RANKS_OF_NODE = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Print bytes of a token and layer, forward and backward, and their ratio; that of the dispatch alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    args = parser.parse_args(argv)
    print(f"{'groups':<10}{'nodes of a token':>17}{'plain':>10}{'by node':>10}{'ratio':>8}{'dispatch':>10}")
    for group_topk in (None, 4, 2):
        groups = {"moe_router_num_groups": group_topk and 8, "moe_router_group_topk": group_topk}
        options = MoEOptions.from_run(replace(build(PRESETS["deepseek-v3"]), **groups))
        assert options is not None
        found, tokens, choices = _counted(options, args.nodes, args.tokens)
        rows, weights = torch.empty(1, options.hidden_size, dtype=torch.bfloat16), torch.empty(1)
        row, packed = rows.nbytes, room_for_rows(1, options.hidden_size, rows, weights).nbytes
        told = options.topk * (4 + weights.element_size())  # experts and weights
        # Tokens and the gradients of their results, then results and the gradients of copies.
        plain = 2 * choices * (row + packed)
        by_node = tokens * (2 * row + told) + choices * (row + packed)
        dispatch = tokens * (row + told) / choices / packed
        words = f"{group_topk} of 8" if group_topk else "none"
        print(f"{words:<10}{found:>17.2f}{plain:>10,.0f}{by_node:>10,.0f}{by_node / plain:>8.3f}{dispatch:>10.3f}")


def _counted(options: MoEOptions, nodes: int, tokens: int) -> tuple[float, float, float]:
    """Return a token's nodes, and how often it is sent to other nodes: once to each, and once for each expert there."""
    generator, node_experts = torch.Generator().manual_seed(1), options.num_experts // nodes
    found = once = each = 0
    for rank in range(nodes * RANKS_OF_NODE):
        logits = torch.randn(tokens, options.num_experts, generator=generator)
        scores, batch = scores_from_logits(logits, options), MicroBatch(None, 1, training=False)
        ids = chosen_experts(options, moe_groups(), logits, scores, None, batch)
        counts, to_nodes = ids.new_empty(options.num_experts), ids.new_empty(nodes)
        sort_by_expert(ids, options.num_experts, counts=counts)
        sort_by_expert(first_of_each_node(ids // node_experts, nodes), nodes, partial=True, counts=to_nodes)
        own, at_node = rank // RANKS_OF_NODE, counts.view(nodes, -1).sum(dim=1)
        found += int(to_nodes.sum())
        once += int(to_nodes.sum() - to_nodes[own])
        each += int(at_node.sum() - at_node[own])
    total = nodes * RANKS_OF_NODE * tokens
    return found / total, once / total, each / total


if __name__ == "__main__":
    main()
