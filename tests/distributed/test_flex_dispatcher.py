"""The flex dispatcher over a stub of DeepEP gives a layer the rows, results, gradients and counts of the all-to-all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers import deep_ep_stub
from tests.helpers.moe_cases import build_layer, random_case, tokens_and_padding

SEQUENCE, BATCH = 6, 2


def passes(case: dict[str, Any]) -> dict[str, Any]:
    """What comes out of a layer with the all-to-all, and with its dispatcher in place of it by DeepEP."""
    from megatron_moe.moe.flex import FlexDispatcher, flex_dispatcher

    layer, pg = build_layer(case, dict(expert_model_parallel_size=pg_size()))
    hidden, padding = tokens_and_padding(case, SEQUENCE, BATCH * pg.dp.size())
    mine = hidden.chunk(pg.dp.size(), dim=1)[pg.dp.rank()]
    mask = None if padding is None else padding.chunk(pg.dp.size(), dim=0)[pg.dp.rank()]
    plain = layer.dispatcher
    found: dict[str, Any] = {}
    with deep_ep_stub.installed():
        flex = flex_dispatcher(plain.num_experts, plain.groups, plain.drops)
        assert type(flex) is FlexDispatcher
        for name, dispatcher in (("alltoall", plain), ("flex", flex)):
            layer.dispatcher = dispatcher
            layer.zero_grad(set_to_none=True)
            layer.router.local_tokens_per_expert.zero_()
            given = mine.clone().requires_grad_()
            seen = mock.Mock(side_effect=layer.experts.forward)
            with mock.patch.object(layer.experts, "forward", seen):
                output, _ = layer(given, padding_mask=mask)
            (output * torch.linspace(0.5, 1.5, output.shape[-1])).sum().backward()
            (expert_input,) = seen.call_args.args
            experts = dict(layer.experts.named_parameters())
            found[name] = {
                "bits": [
                    expert_input.rows,
                    expert_input.probs,
                    expert_input.offsets,
                    *[w.grad for w in experts.values()],
                ],
                "close": [output, given.grad, layer.router.weight.grad],
                "counts": layer.router.local_tokens_per_expert.clone(),
            }
            assert expert_input.host_offsets.tolist() == expert_input.offsets.tolist()
    return {key: {k: _detached(v) for k, v in value.items()} for key, value in found.items()}


def pg_size() -> int:
    return torch.distributed.get_world_size()


def _detached(value: Any) -> Any:
    return [one.detach() for one in value] if isinstance(value, list) else value


@pytest.mark.claim("Over a stub of DeepEP the flex dispatcher gives experts the all-to-all's rows, bit for bit.")
@pytest.mark.parametrize(("world", "seed", "drops"), [(2, 4, None), (2, 5, 0.75), (4, 6, None)])
def test_a_layer_computes_what_it_does_with_the_all_to_all(gloo: Any, world: int, seed: int, drops: Any) -> None:
    case = {**random_case(seed), "num_experts": 8, "dispatcher": "alltoall", "pad": False, "backend": "loop"}
    case["routing"].capacity_factor = drops
    for found in gloo.run(world, passes, case=case):
        flex, plain = found["flex"], found["alltoall"]
        assert all(torch.equal(a, b) for a, b in zip(flex["bits"], plain["bits"], strict=True))
        assert torch.equal(flex["counts"], plain["counts"])
        for one, other in zip(flex["close"], plain["close"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums of a rank come first


def refusal() -> str:
    """What the dispatcher says where DeepEP cannot be loaded."""
    from megatron_moe.config.errors import ConfigError
    from megatron_moe.moe.dispatch import build_dispatcher
    from megatron_moe.moe.layer import MoEGroups

    world = torch.distributed.group.WORLD
    groups = MoEGroups(world, world, world, world, world, world.size(), world.rank(), 1, 0)
    try:
        build_dispatcher("flex", 4, groups)
    except ConfigError as error:
        return str(error)
    return ""


def test_without_deepep_the_dispatcher_is_refused_by_name(gloo: Any) -> None:
    for said in gloo.run(2, refusal):
        assert "--moe-token-dispatcher-type flex" in said and "deep_ep" in said and "alltoall" in said
