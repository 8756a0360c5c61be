"""The flex dispatcher over stubs of DeepEP and HybridEP gives a layer what the all-to-all gives it."""

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import fused_a2a

from megatron_moe.config.errors import ConfigError
from megatron_moe.moe.dispatch import DISPATCHERS
from megatron_moe.moe.flex import DeepEPDispatcher, HybridEPDispatcher, flex_dispatcher
from megatron_moe.moe.options import moe_groups
from tests.helpers.moe_cases import build_layer, random_case, tokens_and_padding
from tests.helpers.rows import rows
from tests.moe import deep_ep_stub

pytestmark = pytest.mark.engine

SEQUENCE, BATCH = 6, 2
LIBRARIES = {"deepep": DeepEPDispatcher, "hybridep": HybridEPDispatcher}


def passes(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What comes out of layers with the all-to-all, and with their dispatcher in place of it by each library."""
    pg, found = None, []
    for case in cases:
        layer, pg = build_layer(case, dict(expert_model_parallel_size=torch.distributed.get_world_size()), pg)
        layer.to(case["dtype"])
        plain = layer.dispatcher
        results = {"alltoall": one_pass(layer, pg, case)}
        for library, kind in LIBRARIES.items():
            with deep_ep_stub.installed():
                layer.dispatcher = flex_dispatcher(plain.num_experts, plain.groups, plain.drops, library, num_sms=6)
                assert type(layer.dispatcher) is kind
                results[library] = one_pass(layer, pg, case)
                if library == "deepep":
                    assert deep_ep_stub.Buffer.num_sms == 6
                else:
                    assert fused_a2a._hybrid_ep_buffer.num_sms == (6, 6)
        found.append(results)
    return found


def one_pass(layer: Any, pg: Any, case: dict[str, Any]) -> dict[str, Any]:
    hidden, padding = tokens_and_padding(case, SEQUENCE, BATCH * pg.dp.size())
    given = hidden.chunk(pg.dp.size(), dim=1)[pg.dp.rank()].to(case["dtype"], copy=True).requires_grad_()
    mask = None if padding is None else padding.chunk(pg.dp.size(), dim=0)[pg.dp.rank()]
    layer.zero_grad(set_to_none=True)
    layer.router.local_tokens_per_expert.zero_()
    seen = mock.Mock(side_effect=layer.experts.forward)
    with mock.patch.object(layer.experts, "forward", seen):
        output, _ = layer(given, padding_mask=mask)
    (output * torch.linspace(0.5, 1.5, output.shape[-1])).sum().backward()
    (expert_input,) = seen.call_args.args
    assert expert_input.host_offsets().tolist() == expert_input.offsets.tolist()
    bits = [expert_input.rows, expert_input.probs, expert_input.offsets, layer.router.local_tokens_per_expert]
    bits += [weight.grad for weight in layer.experts.parameters()]
    close = [output.detach(), given.grad, layer.router.weight.grad]
    return {"bits": [one.detach().clone() for one in bits], "close": close}


def case_of(seed: int, drops: float | None) -> dict[str, Any]:
    case = {**random_case(seed), "num_experts": 8, "dispatcher": "alltoall", "pad": False, "backend": "loop"}
    case["routing"].capacity_factor = drops
    return {**case, "dtype": torch.float32 if drops is None else torch.bfloat16}


@pytest.mark.parametrize(
    ("world", "cases"),
    rows([(2, ((4, None), (5, 0.75))), (4, ((6, None),))], test=[(2, ((4, None), (5, 0.75)))]),
    ids=["two ranks", "four ranks"],
)
def test_a_layer_computes_what_it_does_with_the_all_to_all(gloo: Any, world: int, cases: Any) -> None:
    for rank in gloo.run(world, passes, cases=[case_of(*case) for case in cases]):
        for found in rank:
            plain = found["alltoall"]
            for library in LIBRARIES:
                flex = found[library]
                assert all(torch.equal(a, b) for a, b in zip(flex["bits"], plain["bits"], strict=True)), library
                for one, other in zip(flex["close"], plain["close"], strict=True):
                    bound = 1e-5 if one.dtype == torch.float32 else 2e-2  # sums of a rank come first
                    torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("library", "named"), [("deepep", "deep_ep"), ("hybridep", "HybridEPBuffer"), ("ncclep", "deepep")]
)
def test_without_its_library_the_dispatcher_is_refused_by_name(library: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"--moe-flex-dispatcher-backend {library}") as refused:
        DISPATCHERS["flex"](4, moe_groups(), library=library)
    assert named in str(refused.value)
