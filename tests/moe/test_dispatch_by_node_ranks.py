"""A step whose tokens go once to each pretended node has the bits of a plain all-to-all's, and sends fewer bytes."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.fully_sharded import local
from megatron_moe.moe.dispatch import AllToAllDispatcher
from megatron_moe.moe.dispatch_by_node import ByNodeDispatcher
from megatron_moe.parallel import groups
from tests.helpers.rows import rows
from tests.model import mtp_cases
from tests.model.test_build_ranks import MODELS, PP2

pytestmark = pytest.mark.engine

FP32 = {**MODELS["experts"], "micro_batch_size": 1, "moe_router_topk": 3, "moe_router_enable_expert_bias": True}
HALF = {"bf16": True, "moe_router_dtype": "fp64", "use_distributed_optimizer": True}
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("moe",), "mtp_num_layers": 1}
FULL = {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": True}
# flags, EP, ranks of a node
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "fp32": ({}, 4, 2),
    "bf16, capacity, recomputed": ({**HALF, **AGAIN, **FULL, "moe_shared_expert_overlap": True}, 4, 2),
    "ZeRO 3, nodes of one rank": ({"use_torch_fsdp2": True}, 4, 1),
    "PP2": ({**PP2, "moe_expert_backend": "loop", "moe_expert_capacity_factor": 0.75}, 2, 1),
}


def counted_steps(run: Run, machine: int) -> dict[str, Any]:
    """Steps, and the bytes that this rank sent to other nodes, and those that its tokens' choices ask for."""
    groups.pretend_machines(machine)
    sent, wanted = [], []
    kind = ByNodeDispatcher if run.moe.moe_alltoall_by_node else AllToAllDispatcher
    exchange, prepare = dist.all_to_all_single, kind.prepare

    def exchanged(out: Any, given: Any, out_splits: Any = None, in_splits: Any = None, group: Any = None) -> Any:
        for rank, count in zip(dist.get_process_group_ranks(group), in_splits or ()):
            if rank // machine != dist.get_rank() // machine:
                sent.append(count * given.shape[1] * given.element_size())
        return exchange(out, given, out_splits, in_splits, group=group)

    def prepared(self: Any, hidden: Any, decision: Any, *do: Any) -> Any:
        group, topk = self.groups.expert, decision.expert_ids.shape[1]
        nodes = group.size() // machine
        away = self.destinations(decision) * nodes // self.num_experts
        away = away.masked_fill((away == group.rank() // machine) | (away == nodes), -1)
        choices, tokens = int((away >= 0).sum()), sum(len({*row} - {-1}) for row in away.tolist())
        row, weight = hidden.shape[1] * hidden.element_size(), decision.probs.element_size()
        packed = row + 16 * hidden.element_size()
        plain = kind is AllToAllDispatcher
        # Tokens and gradients of their results, then results and gradients of copies.
        wanted.append(choices * (packed + row) if plain else tokens * (2 * row + topk * (4 + weight)))
        wanted.append(choices * (packed + row))
        return prepare(self, hidden, decision, *do)

    with mock.patch.object(dist, "all_to_all_single", exchanged), mock.patch.object(kind, "prepare", prepared):
        found = mtp_cases.steps(run, count=2)
    tensors = {name: [local(weight), local(grad)] for name, (_, weight, grad) in found.pop("tensors").items()}
    return {**found, "tensors": tensors, "sent": sum(sent), "wanted": sum(wanted)}


@pytest.mark.parametrize("case", rows(CASES, test=list(CASES)[:2]))
def test_a_step_by_node_has_the_plain_steps_bits_and_sends_a_token_once_to_a_node(gloo: Any, case: str) -> None:
    flags, ep, machine = CASES[case]
    run = replace(Run(), **{**FP32, **flags, "expert_model_parallel_size": ep})
    plain = gloo.run(4, counted_steps, run=run, machine=machine)
    by_node = gloo.run(4, counted_steps, run=replace(run, moe_alltoall_by_node=True), machine=machine)
    for got, wanted in zip(by_node, plain, strict=True):
        for name in ("losses", "mtp_losses", "grad_norms", "counts", "aux", "dropped"):
            assert got[name] == wanted[name], name
        assert all(torch.equal(one, other) for one, other in zip(got["biases"], wanted["biases"], strict=True))
        for name, tensors in wanted["tensors"].items():
            assert all(torch.equal(*pair) for pair in zip(got["tensors"][name], tensors, strict=True)), name
    sent, asked = ([sum(one[name] for one in ranks) for ranks in (by_node, plain)] for name in ("sent", "wanted"))
    assert sent[0] < sent[1]
    if "recompute_modules" not in flags:  # which dispatches twice, and once backward
        assert sent == asked
