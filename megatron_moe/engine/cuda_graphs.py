"""CUDA graphs of parts of a model: a part's forward and backward pass are captured once, and replayed from then on.

A graph repeats the kernels of the pass that it has captured, on the same addresses, and runs no Python. So what changes
from pass to pass has to be in memory that stays where it is: inputs and gradients are copied into it, weights and the
sums of their gradients are there already, and so is what routers count (`moe/load_balance.py`).

A captured pass is not executed; it is replayed at once, for the micro-batch that met it. One pass in flight takes a
`_Slot`, which is free again after its backward pass: a pipeline stage has as many as micro-batches in flight.

megatron-core's own `CudaGraphManager` captures its own layers alone, and only with its own or Transformer Engine's
random number tracker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import random as engine_random
from megatron.core.transformer import cuda_graphs as engine_graphs
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_moe.engine.patching import replaced
from megatron_moe.platform.protocols import AutogradContext


class Graph(Protocol):
    """Operations that are recorded once, and replayed on the tensors that they were recorded with."""

    def recording(self) -> AbstractContextManager[None]:
        """Return the block whose operations are recorded and, but for the host's, not executed."""

    def replay(self) -> None:
        """Execute the operations."""


NewGraph = Callable[[Hashable], Graph]
"""The name of a memory pool -> a graph whose memory is of that pool."""


class TorchGraphs:
    """Torch's graphs, a `NewGraph`.

    A graph may write where one of its pool that was captured before it had freed its memory.
    """

    def __init__(self) -> None:
        self._pools: dict[Hashable, Any] = defaultdict(torch.cuda.graph_pool_handle)

    def __call__(self, pool: Hashable) -> Graph:
        return _TorchGraph(self._pools[pool])


class _TorchGraph:
    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def recording(self) -> AbstractContextManager[None]:
        # Threads of NCCL and of the watchdog call CUDA meanwhile, which the default mode would take for a part of it.
        return torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local")

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """When a model's parts replay graphs: in training steps, after the warm-up.

    Args:
        warmup_steps: steps without graphs, at least 1: in them kernels are compiled, and memory that stays is made.
        new_graph: see `NewGraph`.
    """

    def __init__(self, warmup_steps: int, new_graph: NewGraph) -> None:
        self.new_graph = new_graph
        self.replaying = False
        self._warmup_steps_left = warmup_steps

    @contextmanager
    def step(self, eager: bool = False) -> Iterator[None]:
        """Let parts replay graphs within the block, which is one step; `eager`: not in this one."""
        self.replaying = not (eager or self._warmup_steps_left)
        try:
            yield
        finally:
            self.replaying = False
            self._warmup_steps_left = max(self._warmup_steps_left - 1, 0)


@dataclass
class _Slot:
    """The graphs of a pass and their tensors, all at fixed addresses, which hold one pass until its backward is done.

    inputs, outputs: of the forward pass; `outputs` keep its autograd graph, and with it what the backward pass reads.
    output_grads: of the outputs with a gradient. input_grads: None for an input without one. parameters, their grads:
    those that got a gradient; added: those that were added to their sum already.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    form: Any
    output_grads: list[Tensor]
    input_grads: list[Tensor | None]
    parameters: list[torch.nn.Parameter]
    parameter_grads: list[Tensor]
    added: list[Any]
    forward: Graph
    backward: Graph
    busy: bool = False
    copied: list[tuple[Tensor, int] | None] | None = None


class GraphedCall:
    """A function of tensors that replays graphs in the place of its own calls, with the same results and gradients.

    Where it is not to (`CudaGraphs`), without gradients, in evaluation, within another's capture, or with arguments
    other than tensors and plain values, it calls the function. With tensors of other shapes it captures anew.

    The gradients of parameters are in memory that the next replay writes: something has to take them at once, as the
    hooks of the engine's DistributedDataParallel do.

    Args:
        graphs: the model's.
        function: takes tensors that it does not change, and plain values; returns tensors in any nest. Apart from
            results and gradients it changes nothing but tensors that stay where they are, in place.
        modules: all that have parameters which it uses.
        pool: passes that share a pool's name begin in one order, and end in the opposite one.
        before_replay: called before each pass, with each of the modules: waits for weights that are gathered.
        beside_replay: does on the host what the function does there; called with the first tensor.
        allowed: whether graphs may be replayed at present.
        copies: whether results and gradients of inputs are copies. What is sent to another stage of a pipeline has to
            be one: nobody waits for the end of a send before the slot's next pass.
    """

    def __init__(
        self,
        graphs: CudaGraphs,
        function: Callable[..., Any],
        modules: Sequence[torch.nn.Module],
        pool: Hashable,
        before_replay: Callable[[torch.nn.Module], None] | None = None,
        beside_replay: Callable[[Tensor], None] | None = None,
        allowed: Callable[[], bool] = lambda: True,
        copies: bool = False,
    ) -> None:
        self._graphs, self._function, self._pool = graphs, function, pool
        self._modules = [part for module in modules for part in module.modules()]
        self._before_replay, self._beside_replay, self._allowed = before_replay, beside_replay, allowed
        self._copies = copies
        self._slots: list[_Slot] = []
        self._captured: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        leaves, form = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        can_replay = (
            self._graphs.replaying
            and torch.is_grad_enabled()
            and self._modules[0].training
            and not engine_graphs.is_graph_capturing()
            and self._allowed()
            and all(value is None or type(value) in (bool, int, float) for value in values)
        )
        if not can_replay:
            return self._function(*args, **kwargs)
        if self._before_replay is not None:
            for module in self._modules:
                self._before_replay(module)
        call = [form, values, [(one.shape, one.dtype, one.device, one.requires_grad) for one in tensors]]
        if call != self._captured:
            self._captured, self._slots = call, []  # a pass in flight keeps its slot
        slot = next((one for one in self._slots if not one.busy), None)
        if slot is None:
            slot = self._capture(leaves, form)
            self._slots.append(slot)
        elif self._beside_replay is not None:  # a capture has run the function's Python
            self._beside_replay(tensors[0])
        return tree_unflatten(_Replay.apply(slot, self._copies, len(tensors), *tensors, *slot.parameters), slot.form)

    def _capture(self, leaves: list[Any], form: Any) -> _Slot:
        """Capture a pass with arguments like these."""
        pool = (self._pool, len(self._slots))
        own = list(leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                own[index] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        inputs = [one for one in own if isinstance(one, Tensor)]
        args, kwargs = tree_unflatten(own, form)
        forward, backward = self._graphs.new_graph(pool), self._graphs.new_graph(pool)
        with _capturing(self._modules) as (stand_ins, discarded):
            with forward.recording():
                outputs, form = tree_flatten(self._function(*args, **kwargs))
            differentiable = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            output_grads = [torch.zeros_like(one) for one in differentiable]
            with backward.recording():
                # The autograd graph is retained for its tensors: the next capture would take their memory.
                torch.autograd.backward(differentiable, output_grads, retain_graph=True)
                for storage in discarded:
                    storage.resize_(0)
        used = [(parameter, one.grad) for parameter, one in stand_ins.items() if one.grad is not None]
        slot = _Slot(
            inputs=inputs,
            outputs=outputs,
            form=form,
            output_grads=output_grads,
            input_grads=[one.grad for one in inputs],
            parameters=[parameter for parameter, _ in used],
            parameter_grads=[grad for _, grad in used],
            added=[parameter for parameter, one in stand_ins.items() if one.grad_added_to_main_grad],
            forward=forward,
            backward=backward,
        )
        for one in inputs:
            one.grad = None
        return slot


@contextmanager
def _capturing(
    modules: Sequence[torch.nn.Module],
) -> Iterator[tuple[dict[torch.nn.Parameter, Any], list[torch.UntypedStorage]]]:
    """Make the engine ready for a capture with these modules in the block.

    Yields what follows.
        stand_ins: each parameter, and what is in its place: it is in the same memory, has the same attributes, gets the
            gradient and runs no hooks. The engine's DistributedDataParallel keeps the nodes that add up gradients of
            the parameters themselves; they belong to the stream on which it was built, for which no capture can wait.
        discarded: memory that recomputation frees in the forward pass, and fills in the backward pass. The engine would
            read the state of the device's generator for it, which no capture can; what is recomputed draws nothing.
    """
    stand_ins: dict[torch.nn.Parameter, Any] = {}
    discarded: list[torch.UntypedStorage] = []
    kind = engine_random.CheckpointWithoutOutput
    discard = kind.discard_output_and_register_recompute

    def noted(self: Any, hook_tensor: Tensor) -> None:
        discarded.extend(output.untyped_storage() for output in self.outputs)
        discard(self, hook_tensor)

    places: list[tuple[Any, str, Any]] = []
    for part in modules:
        places += [(part._parameters, name, one) for name, one in part._parameters.items()]
    places = [(place, name, one) for place, name, one in places if one is not None and one.requires_grad]
    without_states = {"_get_all_rng_states": tuple, "_set_all_rng_states": lambda *_: None}
    engine_graphs._set_capture_start()
    try:
        for place, name, parameter in places:
            if parameter not in stand_ins:
                own = stand_ins[parameter] = torch.nn.Parameter(parameter.detach())
                vars(own).update(vars(parameter), grad_added_to_main_grad=False)
            place[name] = stand_ins[parameter]
        with replaced([engine_random], **without_states):
            with replaced([kind], discard_output_and_register_recompute=noted):
                yield stand_ins, discarded
    finally:
        for place, name, parameter in places:
            place[name] = parameter
        engine_graphs._set_capture_end()


def replace_method(
    module: torch.nn.Module, name: str, graphed: Callable[..., GraphedCall], using: list[Any], **options: Any
) -> None:
    """Put a graphed call in the place of a method of one module; the engine, in all releases, calls its own by name.

    Args:
        graphed: makes the call of the method, `using` and `options`, see `GraphedCall`.
        using: the modules that the method uses.
    """
    vars(module)[name] = graphed(getattr(module, name), using, **options)


class _Replay(torch.autograd.Function):
    """One pass through a slot. Parameters are inputs, so that autograd takes their gradients and runs their hooks."""

    @staticmethod
    def forward(ctx: AutogradContext, slot: _Slot, copies: bool, count: int, *tensors: Tensor) -> tuple[Any, ...]:
        slot.busy = True
        # Those without gradient may be there since the last pass: rotations.
        copied = slot.copied or [None] * count
        for index, (here, given) in enumerate(zip(slot.inputs, tensors[:count])):
            before = copied[index]
            if before is None or before[0] is not given or before[1] != given._version:
                here.detach().copy_(given)
            copied[index] = None if given.requires_grad else (given, given._version)
        slot.copied = copied
        slot.forward.replay()
        ctx.slot, ctx.copies = slot, copies
        ctx.set_materialize_grads(False)
        results = tuple(_given_out(one, copies) if isinstance(one, Tensor) else one for one in slot.outputs)
        fixed = [new for new, one in zip(results, slot.outputs) if isinstance(one, Tensor) and not one.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: AutogradContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        slot = ctx.slot
        differentiable = [isinstance(one, Tensor) and one.requires_grad for one in slot.outputs]
        given = [grad for grad, wanted in zip(grads, differentiable) if wanted]
        for here, grad in zip(slot.output_grads, given, strict=True):
            here.zero_() if grad is None else here.copy_(grad)
        slot.backward.replay()
        slot.busy = False
        for parameter in slot.added:
            parameter.grad_added_to_main_grad = True
        of_inputs = [None if grad is None else _given_out(grad, ctx.copies) for grad in slot.input_grads]
        return None, None, None, *of_inputs, *(grad.detach() for grad in slot.parameter_grads)


def _given_out(tensor: Tensor, as_copy: bool) -> Tensor:
    return tensor.detach().clone() if as_copy else tensor.detach()
