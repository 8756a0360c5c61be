"""How many tokens an exchange that knows nodes sends between them: a token goes to a node with its experts once."""

from __future__ import annotations

import functools

import torch

from megatron_moe.config.schema import Run
from megatron_moe.moe.options import MoEOptions, moe_groups
from megatron_moe.moe.routing import MicroBatch, chosen_experts, scores_from_logits

_TOKENS = 16384


@functools.cache
def share_of_tokens(run: Run, nodes: int) -> float:
    """Return the share of tokens that have an expert on a node, for experts that are spread evenly over the nodes.

    They are counted: the run's own choice, over random logits. Without groups the mean is 1 - C(E - E / nodes, K) /
    C(E, K). Call it without process groups.
    """
    options = MoEOptions.from_run(run)
    assert options is not None, "a model with experts"
    logits = torch.randn(_TOKENS, options.num_experts, generator=torch.Generator().manual_seed(0))
    scores, micro_batch = scores_from_logits(logits, options), MicroBatch(None, 1, training=False)
    expert_ids = chosen_experts(options, moe_groups(), logits, scores, None, micro_batch)
    node = expert_ids * nodes // options.num_experts
    return float(torch.zeros(_TOKENS, nodes).scatter_(1, node, 1.0).mean())
