"""Activations of named modules in host memory between the forward and the backward pass.

What is moved is a storage, not a tensor: it is copied to the host while the forward pass goes on, resized to nothing
one layer later, and given its size and its bytes back before the layer's backward pass. The tensors that autograd saved
stay as they are, so that no number, dtype or attribute changes, and a storage that several functions saved moves once.

    forward of layer k     copy what its modules keep to the host; free what the same modules of layer k - 1 kept
    backward of layer k    wait for its own; start copying back what belongs to layer k - 1

One layer is thus on its way in each direction. The last layer of a pass is freed in the next pass, so that a backward
pass that follows at once finds it on the device. Copies have CUDA streams of their own, one in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.engine.layers import TransformerLayer
from megatron_moe.moe.dispatch import ExpertInput
from megatron_moe.moe.experts import LocalExperts
from megatron_moe.platform.pinned_memory import CopyStream, Event, OffloadedStorage, PinnedPool

_INPUTS = {
    "attn_norm": ("input_layernorm",),
    "qkv_linear": tuple(
        f"self_attention.{name}"
        for name in "linear_qkv k_layernorm linear_q_proj linear_q_down_proj q_layernorm linear_q_up_proj "
        "linear_kv_down_proj kv_layernorm linear_kv_up_proj".split()
    ),
    "core_attn": ("self_attention.core_attention",),
    "attn_proj": ("self_attention.linear_proj",),
    "mlp_norm": ("pre_mlp_layernorm",),
    "expert_fc1": ("mlp.experts",),
}
"""The modules of a layer, as far as it has them, whose inputs are moved; of "core_attn" all that it saves is."""
_RECOMPUTED_ALONE = ("attn_norm", "mlp_norm", "core_attn")
"""Where these are recomputed, their inputs are kept all the same."""


class ActivationOffload:
    """What the layers of a rank keep for the backward pass, moved to host memory.

    Args:
        modules: of `--offload-modules`.
        smallest: elements that a tensor needs to be moved.
    """

    def __init__(self, modules: Iterable[str], smallest: int) -> None:
        self._modules, self._smallest = tuple(modules), smallest
        self._pool = PinnedPool()
        self._there, self._back = CopyStream(), CopyStream()
        self._layer: _Layer | None = None
        self._latest: _Layer | None = None
        # Of each module's name: the layer that it was last computed in, and what it keeps there.
        self._leaving: dict[str, tuple[_Layer, list[OffloadedStorage]]] = {}

    @classmethod
    def from_run(cls, run: Run) -> ActivationOffload | None:
        """Return the offload of a run that has passed `config.rules.check`; None without it, and on a CPU.

        A CPU's memory is the host's: there is nowhere to move anything to.
        """
        training = run.training
        if not training.fine_grained_activation_offloading or not platform.has_cuda():
            return None
        return cls(training.offload_modules or (), training.min_offloaded_tensor_size)

    def bytes_now(self) -> tuple[int, int]:
        """Return the bytes that leave the device with the next pass, and those of host memory that are in use."""
        return sum(one.size for _, some in self._leaving.values() for one in some if one.is_leaving), self._pool.in_use

    def attach(self, model: torch.nn.Module) -> None:
        """Let the transformer layers of a model move what the modules keep."""
        for layer in model.modules():
            if isinstance(layer, TransformerLayer):
                layer.register_forward_pre_hook(partial(self._begin, layer.layer_number))
                layer.register_forward_hook(self._end)
                for name in self._modules:
                    for module in (_submodule(layer, path) for path in _INPUTS.get(name, ())):
                        if module is None:
                            continue
                        module.register_forward_pre_hook(partial(self._move_inputs, name), with_kwargs=True)
                        if name == "core_attn":
                            saved = _Saved(partial(self._move, name))
                            module.register_forward_pre_hook(saved.start)
                            module.register_forward_hook(saved.stop, always_call=True)
                experts = _submodule(layer, "mlp.experts")
                if "moe_act" in self._modules and isinstance(experts, LocalExperts):
                    experts.activate_into = partial(self._activate, experts.activate_into)

    def _begin(self, number: int, layer: torch.nn.Module, args: object) -> None:
        if layer.training and torch.is_grad_enabled():
            self._layer = _Layer(number, self._back, self._latest)

    def _move_inputs(self, name: str, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() and name not in _RECOMPUTED_ALONE:
            return
        tensors = _tensors((*args, *kwargs.values()))
        if name == "attn_norm":  # it comes from outside the layer, where another part of the storage may be read later
            tensors = (tensor for tensor in tensors if tensor.nbytes == tensor.untyped_storage().nbytes())
        self._move(name, *tensors)

    def _activate(self, into: Callable[..., Tensor], activation: object, product: object, *inputs: Tensor) -> Tensor:
        self._move("moe_act", *inputs)
        return into(activation, product, *inputs)

    def _move(self, name: str, *tensors: Tensor) -> None:
        """Start moving what a module of this layer keeps, and free what the same module kept in the layer before."""
        layer = self._layer
        if layer is None:  # a pass without gradients, or a recomputation
            return
        last, leaving = self._leaving.get(name, (layer, []))
        if last is not layer:
            for moved in leaving:
                moved.free()
            leaving = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.numel() >= self._smallest and storage.resizable() and storage._cdata not in layer.moved:
                layer.moved[storage._cdata] = moved = OffloadedStorage(tensor, self._pool, self._there)
                leaving.append(moved)
        self._leaving[name] = layer, leaving

    def _end(self, module: torch.nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        layer, self._layer = self._layer, None
        if layer is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(layer.return_all)
            self._latest = layer
        else:  # frozen, with all before it: no backward pass comes
            layer.start_returning()


class _Layer:
    """One layer in one pass.

    moved: by the number of the storage, which is held until the next layer, so that no other one has its number.
    """

    def __init__(self, number: int, lane: CopyStream, latest: _Layer | None) -> None:
        self.number = number
        self.moved: dict[int, OffloadedStorage] = {}
        self._lane = lane
        # A pass goes through consecutive layers, and the next pass begins with an earlier one.
        self._before = latest if latest is not None and latest.number == number - 1 else None
        self._arrived: Event | None = None

    def return_all(self, grad: Tensor) -> None:
        """Have all of it on the device, for the backward pass that begins, and start returning the layer before."""
        self.start_returning()
        self._lane.make_current_wait(self._arrived)
        before, self._before = self._before, None
        if before is not None:
            before.start_returning()

    def start_returning(self) -> None:
        """Start copying all of it back to the device, unless that was done."""
        for moved in self.moved.values():
            self._arrived = moved.return_to_device(self._lane) or self._arrived
        self.moved = {}


class _Saved:
    """Shows what autograd saves in a module's forward pass: each tensor is given to `see`, and saved as it is."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        self._see = see
        self._hooks: Any = None

    def start(self, module: torch.nn.Module, args: object) -> None:
        """Begin, as a module's forward pre-hook."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def stop(self, *_: Any) -> None:
        """End, as a module's forward hook."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def _pack(self, tensor: Tensor) -> Tensor:
        self._see(tensor)
        return tensor.detach()  # the tensor itself would be held by its own graph


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, ExpertInput):
            yield argument.rows


def _submodule(layer: torch.nn.Module, path: str) -> torch.nn.Module | None:
    """Return a module of a layer by its path; None where the layer has none there."""
    module: Any = layer
    for name in path.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, torch.nn.Module) else None
