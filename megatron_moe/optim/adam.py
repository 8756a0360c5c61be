"""AdamW with its moments in host memory, or with state in fewer bytes (`--use-precision-aware-optimizer`).

To the engine this optimizer looks like any Adam: it has fp32 main weights with fp32 gradients. But a main weight that
is packed with its bf16 weight (`precision/packed_state.py`) is a tensor of the right shape without memory, which reads
as NaN and cannot be written. `unpacked` puts fp32 tensors in the place of everything that is packed, for what the
engine does with whole tensors: saving and loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_moe.engine.adam import Adam
from megatron_moe.kernels.choice import has_kernel
from megatron_moe.platform import host_memory, synchronize
from megatron_moe.precision.contract import mixes_dtypes
from megatron_moe.precision.packed_state import (
    GROUP,
    NOT_FINITE,
    AdamState,
    AdamStep,
    StochasticRounding,
    has_codes,
    pack_main,
    pack_moment,
    random_bits,
    seeds_of,
    stored_dtype,
    unpacked_main,
    unpacked_moment,
    update_by_torch,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
# Elements of a piece, multiples of GROUP: few operations on a GPU, little memory on a CPU.
_PIECE, _PIECE_ON_CPU = 2**22, 2**14


class AdamWithMomentsOnHost(Adam):
    """An Adam whose moments are in host memory, with the same numbers.

    A step brings the moments of a piece of a weight to the weight's device, updates both there, and takes the moments
    back: 16 bytes of traffic per element, and two pieces of device memory. Weights and gradients stay on the device.
    """

    piece_numel = 16 * 2**20
    """Elements that are updated at once, a multiple of what a CPU updates by one instruction."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and wait until the moments are back in host memory."""
        loss = super().step(closure)
        synchronize()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; torch puts it next to the weights, from where it goes back to host memory."""
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    state[name] = self._zeros_like(param).copy_(value)

    def _step_group(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self._state_of(param)
            updated = [tensor.view(-1) for tensor in (param.detach(), state["exp_avg"], state["exp_avg_sq"])]
            pieces = zip(*(tensor.split(self.piece_numel) for tensor in (param.grad.reshape(-1), *updated)))
            for grad, weight, *moments in pieces:
                near = [moment.to(param.device, non_blocking=True) for moment in moments]
                self.update(group, [weight], [grad], [dict(zip(("exp_avg", "exp_avg_sq"), near))])
                for moment, result in zip(moments, near):
                    if result is not moment:
                        moment.copy_(result, non_blocking=True)

    def _zeros_like(self, param: Tensor) -> Tensor:
        return torch.zeros(param.shape, dtype=param.dtype, device="cpu", pin_memory=param.is_cuda)


# ---- State that is stored in fewer bytes, and updated in one pass.


@has_kernel("adam_update")
@mixes_dtypes("optimizer state that is stored in fewer bytes is unpacked to fp32, updated, and packed")
def adam_update(
    grads: Sequence[Tensor], states: Sequence[AdamState], step: AdamStep, rounding: Sequence[StochasticRounding] | None
) -> None:
    """Update weights and moments in place, of each gradient those of its state.

    This form computes the update itself by torch's fused AdamW, whose bits are also those of the kernel in C.

    Args:
        grads: each [n] fp32, contiguous.
        rounding: None where all moments are fp32; their seeds are the same.
    """
    for number, (grad, state) in enumerate(zip(grads, states, strict=True)):
        drawn = None if rounding is None else rounding[number]
        for begin, end in pieces(grad.numel(), grad):
            _update_piece(grad[begin:end], state.part(begin, end), step, rounding_at(drawn, begin))


def rounding_at(rounding: StochasticRounding | None, begin: int) -> StochasticRounding | None:
    """Return the rounding of the elements from `begin` on; None where nothing is rounded at random."""
    return None if rounding is None else rounding.at(begin)


def _update_parts(parts: Sequence[tuple[Tensor, AdamState, StochasticRounding | None]], step: AdamStep) -> None:
    """Update all at once: a launch on a GPU takes longer than the update of a small weight."""
    if parts:
        grads, states, drawn = map(list, zip(*parts))
        adam_update(grads, states, step, None if drawn[0] is None else drawn)


def pieces(numel: int, near: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges in which torch packs and unpacks: a whole weight would take several times its size."""
    piece = _PIECE_ON_CPU if near.device.type == "cpu" else _PIECE
    for begin in range(0, numel, piece):
        yield begin, min(begin + piece, numel)


def _update_piece(grad: Tensor, state: AdamState, step: AdamStep, rounding: StochasticRounding | None) -> None:
    # Its own function, so that nothing of a piece is left in memory when the next is unpacked.
    main = unpacked_main(state) if state.main is None else state.main
    moments = [unpacked_moment(*stored) for stored in zip(state.moments, state.exponents)]
    update_by_torch(main, grad, moments, step)
    if state.main is None:
        pack_main(main, state)
    drawn = None if rounding is None else random_bits(rounding, grad.numel())
    for number, (values, stored) in enumerate(zip(moments, state.moments)):
        if values is not stored:
            pack_moment(values, stored, state.exponents[number], drawn, second=number == 1)


class PrecisionAwareAdam(Adam):
    """AdamW whose moments, and main weights next to bf16 weights, are stored in fewer bytes.

    state, of each parameter: `exp_avg` and `exp_avg_sq`, for 8-bit codes `exp_avg_exponents` and
    `exp_avg_sq_exponents`, for a packed main weight `low_bits` and `carry_bits` (see `AdamState`), all flat.

    Args:
        moment_dtypes: of the first and the second moment: fp32, bf16, int8 or fp8.
        seed: of the run.
        on_host: keep the state in host memory, from where it goes piece by piece to the weights' device and back.
        options: see `Adam`, whose decay of weights is decoupled here.
    """

    piece_numel = 16 * 2**20
    """Elements that are updated at once with `on_host`, a multiple of `GROUP`."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        moment_dtypes: tuple[str, str] = ("fp32", "fp32"),
        seed: int = 0,
        on_host: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        if self._update is not adamw:
            raise ValueError("this Adam decays weights by themselves: adam_w_mode=False is not among its forms")
        self._dtypes = tuple(stored_dtype(name, second=number == 1) for number, name in enumerate(moment_dtypes))
        self._seed, self._on_host = seed, on_host
        self.packed: dict[Tensor, Tensor] = {}
        """Main param that has no values of its own -> the bf16 weight that it is stored with."""
        self._places: dict[Tensor, StochasticRounding] = {}

    @property
    def uses_stochastic_rounding(self) -> bool:
        """Whether a moment is rounded at random."""
        return self._dtypes != (torch.float32, torch.float32)

    def moments_of(self, param: Tensor) -> tuple[str, ...]:
        """Return the moments that a parameter has."""
        return MOMENTS

    def allocate(self) -> None:
        """Allocate the moments of all parameters, zeros, in one form for main weights of any kind."""
        for param in self._params():
            state = self.state[param]
            for name in self.moments_of(param):
                dtype = self._dtypes[MOMENTS.index(name)]
                state[name] = self._zeros(param, param.numel(), dtype)
                if has_codes(dtype):
                    state[f"{name}_exponents"] = self._zeros(param, -(-param.numel() // GROUP), torch.int8)

    def pack_main_param(self, main: Tensor, weight: Tensor) -> None:
        """Store a main weight, an fp32 parameter of this optimizer, with the bf16 weight that it was made from."""
        assert weight.dtype == torch.bfloat16 and weight.numel() == main.numel()
        self.packed[main] = weight
        self.state[main]["low_bits"] = self._zeros(main, main.numel(), torch.int16)
        self.state[main]["carry_bits"] = self._zeros(main, -(-main.numel() // 8), torch.uint8)
        self._put_away(main)

    def first_beta(self, param: Tensor, group: dict[str, Any]) -> float:
        """Return the decay of a parameter's first moment."""
        return group["betas"][0]

    def place(self, param: Tensor, rounding: StochasticRounding) -> None:
        """Say what an element's random numbers are made of; its seeds are replaced at each step."""
        self._places[param] = rounding

    def drop_low_bits(self, *_: Any, **__: Any) -> None:
        """Make every packed main weight the bf16 weight that it is stored with, as after loading weights alone."""
        for main in self.packed:
            self.state[main]["low_bits"].zero_()
            self.state[main]["carry_bits"].zero_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; state in host memory is there when this returns."""
        loss = super().step(closure)
        if self._on_host:
            synchronize()
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        step = AdamStep(group["lr"], group["betas"], group["eps"], group["weight_decay"], group["step"] + 1)
        parts: list[tuple[Tensor, AdamState, StochasticRounding | None]] = []
        for param in group["params"]:
            if param.grad is None or not param.numel():
                continue
            grad, rounding = param.grad.reshape(-1), self._rounding(param, group)
            for begin, end, near in self._near(self._stored(param), param):
                parts.append((grad[begin:end], near, rounding_at(rounding, begin)))
                if self._on_host:  # it is taken back before the next
                    _update_parts(parts, step)
                    parts.clear()
        _update_parts(parts, step)

    def _near(self, state: AdamState, param: Tensor) -> Iterator[tuple[int, int, AdamState]]:
        """Yield ranges of a parameter with their state on its device, and take each back to where it is stored."""
        numel = param.numel()
        piece = self.piece_numel if self._on_host else max(numel, 1)
        for begin in range(0, numel, piece):
            end = min(begin + piece, numel)
            part = state.part(begin, end)
            near = part.to(param.device) if self._on_host else part
            yield begin, end, near
            if self._on_host:
                part.copy_(near)

    def _rounding(self, param: Tensor, group: dict[str, Any]) -> StochasticRounding | None:
        if not self.uses_stochastic_rounding:
            return None
        return self._places[param]._replace(seeds=seeds_of(self._seed, group["step"] + 1))

    def _stored(self, param: Tensor) -> AdamState:
        weight, state = self.packed.get(param), self.state[param]
        main = param.detach().view(-1) if weight is None else None
        weight = None if weight is None else weight.detach().view(-1)
        first, second = (state[name] if name in state else self._no_moment(param) for name in MOMENTS)
        exponents = (state.get("exp_avg_exponents"), state.get("exp_avg_sq_exponents"))
        return AdamState(main, weight, state.get("low_bits"), state.get("carry_bits"), (first, second), exponents)

    @staticmethod
    def _no_moment(param: Tensor) -> Tensor:
        """Return what stands for a moment that a parameter does not have: fp32 zeros, flat, without memory."""
        return torch.zeros((), device=param.device).expand(param.numel())

    # fp32 again.

    def values_of(self, param: Tensor, kind: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Return a part of a main weight ("param") or moment as fp32 [end - begin], on its weight's device.

        What is stored in fp32 there is not copied. A moment that the weight does not have is zeros without memory.
        """
        first, last = begin // GROUP * GROUP, param.numel() if end is None else end
        stored = self._stored(param).part(first, last)
        wide = stored.main if kind == "param" else stored.moments[MOMENTS.index(kind)]
        if wide is not None and wide.dtype == torch.float32:
            return wide[begin - first :].to(param.device)
        values = torch.empty(last - first, device=param.device)
        for one, two in pieces(last - first, param):
            piece = stored.part(one, two).to(param.device)
            if kind == "param":
                values[one:two] = unpacked_main(piece)
            else:
                number = MOMENTS.index(kind)
                values[one:two] = unpacked_moment(piece.moments[number], piece.exponents[number])
        return values[begin - first :]

    def main_param(self, main: Tensor) -> Tensor:
        """Return a packed main param as fp32, in its shape."""
        return self.values_of(main, "param").view(main.shape)

    def evidence(self) -> Iterator[Tensor]:
        """Yield tensors of floating dtypes, one of which is not finite where the stored state is not."""
        for param in self._params():
            yield self.packed.get(param, param).detach()
            state = self.state[param]
            for name in self.moments_of(param):
                moment, exponents = state[name], state.get(f"{name}_exponents")
                yield moment if exponents is None else torch.where(exponents == NOT_FINITE, torch.nan, 0.0)

    @contextmanager
    def unpacked(self, *, keep: bool) -> Iterator[None]:
        """Put fp32 tensors in the place of what is packed, for the block.

        Args:
            keep: pack what they hold at the end of the block: weights are made of the main weights, and moments are
                rounded as a step rounds them. Otherwise the tensors are in host memory, and what they hold is dropped.
        """
        stored = {param: self.state[param] for param in self._params()}
        for param in stored:
            device = param.device if keep else torch.device("cpu")
            none = torch.zeros(param.shape if keep else (), device=device).expand(param.shape)
            moments = dict.fromkeys(MOMENTS, none)
            for name in self.moments_of(param):
                moments[name] = self.values_of(param, name).to(device).view(param.shape)
            if param in self.packed:
                param.data = self.main_param(param).to(device)
            self.state[param] = moments
        try:
            yield
            if keep:
                for param, kept in stored.items():
                    self._pack(param, kept)
        finally:
            for param, kept in stored.items():
                self.state[param] = kept
                if param in self.packed:
                    self._put_away(param)

    def _pack(self, param: Tensor, kept: dict[str, Any]) -> None:
        moments = [self.state[param][name].reshape(-1) for name in self.moments_of(param)]
        self.state[param] = kept
        group = next(group for group in self.param_groups if any(param is one for one in group["params"]))
        rounding = self._rounding(param, group)
        stored, main = self._stored(param), param.data.reshape(-1)
        for begin, end in pieces(param.numel(), param):
            part = stored.part(begin, end)
            near = part.to(param.device)
            drawn = None if rounding is None else random_bits(rounding.at(begin), end - begin)
            if near.main is None:
                pack_main(main[begin:end], near)
            for number, moment in enumerate(moments):
                pack_moment(moment[begin:end], near.moments[number], near.exponents[number], drawn, second=number == 1)
            part.copy_(near)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @staticmethod
    def _put_away(main: Tensor) -> None:
        main.data = torch.full((), torch.nan, device=main.device).expand(main.shape)

    def _zeros(self, param: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        if self._on_host:
            return host_memory((numel,), dtype, pinned=True).zero_()
        return torch.zeros(numel, dtype=dtype, device=param.device)
