"""The flex dispatcher over stubs of DeepEP and HybridEP gives a layer what the all-to-all gives it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers import deep_ep_stub
from tests.helpers.moe_cases import build_layer, random_case, tokens_and_padding

pytestmark = pytest.mark.engine

SEQUENCE, BATCH = 6, 2


def passes(case: dict[str, Any], library: str) -> dict[str, Any]:
    """What comes out of a layer with the all-to-all, and with its dispatcher in place of it by a library."""
    from megatron.core.transformer.moe import fused_a2a

    from megatron_moe.moe.flex import DeepEPDispatcher, HybridEPDispatcher, flex_dispatcher

    layer, pg = build_layer(case, dict(expert_model_parallel_size=pg_size()))
    hidden, padding = tokens_and_padding(case, SEQUENCE, BATCH * pg.dp.size())
    mine = hidden.chunk(pg.dp.size(), dim=1)[pg.dp.rank()]
    mask = None if padding is None else padding.chunk(pg.dp.size(), dim=0)[pg.dp.rank()]
    plain = layer.dispatcher
    found: dict[str, Any] = {}
    with deep_ep_stub.installed():
        flex = flex_dispatcher(plain.num_experts, plain.groups, plain.drops, library, num_sms=6)
        assert type(flex) is {"deepep": DeepEPDispatcher, "hybridep": HybridEPDispatcher}[library]
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
        taken = deep_ep_stub.Buffer.num_sms if library == "deepep" else fused_a2a._hybrid_ep_buffer.num_sms
        assert taken == {"deepep": 6, "hybridep": (6, 6)}[library]
    return {key: {k: _detached(v) for k, v in value.items()} for key, value in found.items()}


def pg_size() -> int:
    return torch.distributed.get_world_size()


def _detached(value: Any) -> Any:
    return [one.detach() for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("library", ["deepep", "hybridep"])
@pytest.mark.parametrize(("world", "seed", "drops"), [(2, 4, None), (2, 5, 0.75), (4, 6, None)])
def test_a_layer_computes_what_it_does_with_the_all_to_all(
    gloo: Any, world: int, seed: int, drops: Any, library: str
) -> None:
    case = {**random_case(seed), "num_experts": 8, "dispatcher": "alltoall", "pad": False, "backend": "loop"}
    case["routing"].capacity_factor = drops
    for found in gloo.run(world, passes, case=case, library=library):
        flex, plain = found["flex"], found["alltoall"]
        assert all(torch.equal(a, b) for a, b in zip(flex["bits"], plain["bits"], strict=True))
        assert torch.equal(flex["counts"], plain["counts"])
        for one, other in zip(flex["close"], plain["close"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # sums of a rank come first


def refusal(library: str) -> str:
    """What the dispatcher says where its library cannot be loaded."""
    from megatron_moe.config.errors import ConfigError
    from megatron_moe.moe.dispatch import build_dispatcher
    from megatron_moe.moe.layer import MoEGroups

    world = torch.distributed.group.WORLD
    groups = MoEGroups(world, world, world, world, world, world.size(), world.rank(), 1, 0)
    try:
        build_dispatcher("flex", 4, groups, library=library)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("library", "named"), [("deepep", "deep_ep"), ("hybridep", "HybridEPBuffer"), ("ncclep", "deepep")]
)
def test_without_its_library_the_dispatcher_is_refused_by_name(gloo: Any, library: str, named: str) -> None:
    for said in gloo.run(2, refusal, library=library):
        assert f"--moe-flex-dispatcher-backend {library}" in said and named in said
