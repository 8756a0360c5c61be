"""The shared expert on a stream of its own: the order of waits, on streams that only take notes, and the same bits.

The streams have CUDA's methods and queue nothing. No test here can see that kernels overlap on a card, or that memory
is not reused early there; `make gpu` compares the bits.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import groups
from megatron_moe.platform import hardware
from tests.helpers.moe_cases import build_layer, engine_config, random_case, tokens_and_padding

EP2 = {"expert_model_parallel_size": 2}


class NotedStream:
    """A stream that notes who waits for whom."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name

    def wait_stream(self, stream: Any) -> None:
        self.notes.append(f"{self.name} waits for {stream.name}")


class Noted(torch.autograd.Function):
    """The identity, which notes when and on which stream it is reached; its gradient too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, notes: list[str], name: str) -> torch.Tensor:
        ctx.notes, ctx.name = notes, name
        notes.append(f"{name} on {torch.cuda.current_stream().name}")  # type: ignore[attr-defined]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.notes.append(f"{ctx.name}, backward")
        return grad, None, None


@contextlib.contextmanager
def noted_streams(notes: list[str], named: dict[int, str]) -> Iterator[None]:
    """Within the block torch.cuda has two streams. named: tensors' names by the addresses of their memory."""
    current = [NotedStream(notes, "main")]

    @contextlib.contextmanager
    def stream(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        notes.append(f"{named.get(tensor.data_ptr(), 'a gradient')} is kept for {stream.name}")

    replaced: Any = {"Stream": lambda *_, **__: NotedStream(notes, "side"), "stream": stream}
    replaced |= {"current_stream": lambda *_: current[-1], "current_device": lambda: 0}
    hardware._side.cache_clear()
    with mock.patch.multiple(torch.cuda, **replaced), mock.patch.object(torch.Tensor, "record_stream", record_stream):
        yield
    hardware._side.cache_clear()


def passes() -> list[dict[str, Any]]:
    """A layer's output and gradients without and with the overlap, and its notes: without and with a gate."""
    pg = groups.initialize(replace(Run(), **EP2))
    return [both_passes(pg, gate) for gate in (False, True)]


def both_passes(pg: Any, gate: bool) -> dict[str, Any]:
    case = {**random_case(5), "shared_gate": gate, "shared": True, "dispatcher": "alltoall"}
    hidden, padding = tokens_and_padding(case, 6, 2)
    found: dict[str, Any] = {}
    layer, _ = build_layer(case, EP2, pg)
    for name in ("without", "with"):
        notes: list[str] = []
        given = hidden.clone().requires_grad_()
        named = {given.data_ptr(): "hidden"}
        layer.zero_grad(set_to_none=True)
        layer.shared_overlaps = name == "with"
        watched = noted_layer(layer, notes, named) if name == "with" else contextlib.nullcontext()
        with noted_streams(notes, named), watched:
            output, _ = layer(given, padding_mask=padding)
            forward = list(notes)
            named.clear()  # memory that is free by now has other tensors
            (output * torch.linspace(0.5, 1.5, output.shape[-1])).sum().backward()
        found[name] = [output.detach(), given.grad, *(weight.grad for weight in layer.parameters())]
        found["forward"], found["backward"] = forward, notes[len(forward) :]
    return found


@contextlib.contextmanager
def noted_layer(layer: Any, notes: list[str], named: dict[int, str]) -> Iterator[None]:
    """The layer notes when it dispatches, combines, and computes the two kinds of experts."""
    dispatcher, shared_experts = layer.dispatcher, layer.shared_experts
    dispatch, combine = dispatcher.dispatch, dispatcher.combine
    experts, shared = layer.experts.forward, shared_experts.forward

    def noted(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return Noted.apply(tensor, notes, name)

    def noted_shared(hidden: torch.Tensor) -> torch.Tensor:
        output = noted(shared(hidden), "the shared expert")
        named[output.data_ptr()] = "its output"
        return output

    with (
        mock.patch.object(dispatcher, "dispatch", lambda x, decision: dispatch(noted(x, "dispatch"), decision)),
        mock.patch.object(dispatcher, "combine", lambda x, plan: noted(combine(x, plan), "combine")),
        mock.patch.object(layer.experts, "forward", lambda given: noted(experts(given), "the experts")),
        mock.patch.object(shared_experts, "forward", noted_shared),
    ):
        yield


FORWARD = [
    "side waits for main",
    "hidden is kept for side",
    "dispatch on main",
    "the shared expert on side",
    "the experts on main",
    "combine on main",
    "main waits for side",
    "its output is kept for main",
]
BACKWARD = [
    "side waits for main",
    "a gradient is kept for side",
    "combine, backward",
    "the experts, backward",
    "the shared expert, backward",
    "dispatch, backward",
    "main waits for side",
    "a gradient is kept for main",
]


def test_streams_wait_for_each_other_in_both_passes_and_no_bit_changes(gloo: Any) -> None:
    for found in [found for rank in gloo.run(2, passes) for found in rank]:
        assert found["forward"] == FORWARD
        assert found["backward"] == BACKWARD
        assert len(found["with"]) == len(found["without"]) >= 6
        assert all(torch.equal(a, b) for a, b in zip(found["with"], found["without"]))


def choices() -> list[bool]:
    """Whether a layer's shared expert overlaps: not asked for, without streams, and with both."""
    pg = groups.initialize(Run())
    config = engine_config({**random_case(5), "shared": True}, Run())
    found = []
    for asked, streams_here in ((False, True), (True, False), (True, True)):
        config.moe_shared_expert_overlap = asked
        with mock.patch.object(hardware, "has_streams", lambda here=streams_here: here):
            found.append(MoELayer(config, pg_collection=pg, layer_number=1).shared_overlaps)
    return found


def test_the_schedule_is_chosen_when_the_layer_is_built(gloo: Any) -> None:
    assert gloo.run(1, choices) == [[False, False, True]]
