"""What is changed in torch's modules: the class of one that is built, its bits under casts, its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_Module = TypeVar("_Module", bound=torch.nn.Module)


def with_class(cls: type[_Module], module: torch.nn.Module) -> _Module:
    """Return a module of a subclass of a built module's class, with the same weights, submodules and settings.

    For modules whose class the engine cannot be asked for, in all releases: GPTModel's output layer and embedding, and
    linear layers that multiply in FP8. The caller puts it in the module's place, before hooks are registered.
    """
    made = cls.__new__(cls)
    vars(made).update(vars(module))
    return made


# ---- Layers that are told what their block is told.


def pass_on_padding_mask(block: torch.nn.Module) -> None:
    """Give each layer of a block, from now on, the padding_mask that the block is called with.

    In 0.16.1, not in 0.19.2, a block whose first layers are recomputed (--recompute-method block) forgets it for the
    others. These run within the block's call, so its mask is theirs.
    """
    told: dict[str, Any] = {}

    def of_block(_: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        told["padding_mask"] = options.get("padding_mask")

    def of_layer(_: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, options if options.get("padding_mask") is not None else {**options, **told}

    block.register_forward_pre_hook(of_block, with_kwargs=True)
    for layer in block.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(of_layer, with_kwargs=True)


# ---- Modules that keep fp32 bits under casts.


def keep_fp32_bits(module: torch.nn.Module) -> None:
    """Keep the bits of a module's own fp32 tensors under every cast, from now on.

    `torch.nn.Module.to`, `.half()` and every wrapper built on them go through `Module._apply(fn)`, which torch, in all
    releases, lets no parameter decline. The module gets an `_apply` of its own, and `fp32_parameters`, the names of its
    parameters. Both are attributes of the module, and a bound method, not a closure: a deepcopy has them, for the copy.
    """
    module.fp32_parameters = tuple(name for name, _ in module.named_parameters(recurse=False))  # type: ignore[assignment]
    module._apply = MethodType(_apply_around_fp32, module)  # type: ignore[method-assign]


def fp32_parameters(module: torch.nn.Module) -> tuple[str, ...] | None:
    """Return the names of a module's own parameters that keep their fp32 bits; None: it keeps none."""
    return vars(module).get("fp32_parameters")


def _apply_around_fp32(self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """Apply `fn` to one module as `Module._apply` does, but to the int32 bits of its fp32 tensors.

    Casts of floating-point tensors leave integers alone, and moves take them along.
    """

    def around(tensor: Tensor) -> Tensor:
        return moved_with_its_bits(tensor, fn) if tensor.dtype == torch.float32 else fn(tensor)

    if recurse:
        for child in self.children():
            child._apply(fn)
    type(self)._apply(self, around, False)
    return self


def moved_with_its_bits(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return an fp32 tensor with the same bits, on the device to which `fn` moves it."""
    bits = fn(tensor.view(torch.int32))
    if bits.dtype != torch.int32:  # Module.type() casts integers too: take from it the device alone
        bits = tensor.view(torch.int32).to(bits.device)
    return bits.view(torch.float32)


# ---- Modules that refer to process groups.

_DEPTH = 4
"""A group is an attribute of a module, of a record of groups, of a dispatcher's record, or of the one it wraps."""


class DeepcopyKeepsGroups:
    """A mixin for `torch.nn.Module` whose deepcopies share the original's process groups and engine configuration.

    A deepcopy has its own tensors. A process group is a handle on connections, which cannot be copied. The
    configuration refers to functions of the optimizer, so that a copy of it would copy the optimizer. Pickling, and
    with it `torch.save` of the whole module, is refused for the same reason.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for module in self.modules():  # type: ignore[attr-defined]
            for group in _groups_of(module):
                memo[id(group)] = group
            config = vars(module).get("config")
            if config is not None:
                memo[id(config)] = config
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuse to pickle a module that refers to a process group.

        Raises:
            TypeError: the module refers to one; the message says what to save instead.
        """
        for module in self.modules():  # type: ignore[attr-defined]
            if next(_groups_of(module), None) is not None:
                raise TypeError(
                    f"a whole {type(self).__name__} cannot be pickled, nor saved with torch.save: it refers to process "
                    "groups, which exist in this process only. Save module.state_dict() and load it into a module that "
                    "is built anew, or write a checkpoint that any layout can read (sharded_state_dict(), or --save)"
                )
        return super().__reduce_ex__(protocol)


def _groups_of(module: torch.nn.Module) -> Iterator[ProcessGroup]:
    for value in vars(module).values():
        yield from _groups(value, _DEPTH)


def _groups(value: object, depth: int) -> Iterator[ProcessGroup]:
    if isinstance(value, ProcessGroup):
        yield value
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (torch.nn.Module, torch.Tensor)):
        for inner in vars(value).values():
            yield from _groups(inner, depth - 1)
