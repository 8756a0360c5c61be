"""Optimizer state in fewer bytes than fp32: how main weights and moments are packed, and unpacked to fp32.

A main weight needs no fp32 memory next to a bf16 weight that is its rounded value: 16 bits say which of the fp32
numbers that round to the weight it is. The fp32 number is there to the bit.

A moment is rounded at random, up or down with the chances that keep its expected value: rounded to nearest, a change
below half a step of its dtype would be lost at every step. The chances come from a hash of the run's seed, the step
and the element's place in the whole model, so that they are the same on every layout, and on ranks that have the same
weight.

`kernels/cpu.c` and `kernels/triton_adam.py` compute the same in one pass. All unpacked values are exact in fp32, and
packing what was unpacked gives them again: a checkpoint keeps them as fp32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128
"""Elements of a moment that share an exponent where it is stored as 8-bit codes."""
NOT_FINITE = -128
"""The exponent of a group with an element that is not finite."""

_MASK = 0xFFFFFFFF
_WEYL = 0x9E3779B9
_LIMITS = {torch.int8: 127.0, torch.uint8: 255.0**2, torch.float8_e4m3fn: 448.0}
ADAM_FACTORS = ("keep", "first_share", "second_share", "second_decay", "step_size", "root_correction", "eps")


class AdamState(NamedTuple):
    """The stored state of n elements of a weight, each tensor [n] and contiguous.

    main: fp32; or None, and then bf16 `weight` and int16 `low_bits`, whose sum as bits it is, with uint8 `carry_bits`
    [n / 8, rounded up]: a bit for each element whose low bits are +32768, which no int16 is. moments: the first and the
    second, fp32, bf16, or codes of 8 bits (int8, the second's uint8; float8_e4m3fn) with int8 `exponents` [n / 128,
    rounded up].
    """

    main: Tensor | None
    weight: Tensor | None
    low_bits: Tensor | None
    carry_bits: Tensor | None
    moments: tuple[Tensor, Tensor]
    exponents: tuple[Tensor | None, Tensor | None]

    def to(self, device: torch.device) -> AdamState:
        """Return the state on a device: a copy of what is elsewhere, as `copy_` takes it back."""
        first, second = (moment.to(device, non_blocking=True) for moment in self.moments)

        def there(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        exponents = (there(self.exponents[0]), there(self.exponents[1]))
        return AdamState(
            self.main, self.weight, there(self.low_bits), there(self.carry_bits), (first, second), exponents
        )

    def copy_(self, other: AdamState) -> None:
        """Copy the state that `other`, which has it on another device, has in memory of its own."""
        own = (self.low_bits, self.carry_bits, *self.moments, *self.exponents)
        for to, values in zip(own, (other.low_bits, other.carry_bits, *other.moments, *other.exponents)):
            if to is not None and values is not None and to is not values:
                to.copy_(values, non_blocking=True)

    def part(self, begin: int, end: int) -> AdamState:
        """Return the state of the elements from `begin`, a multiple of 128, to `end`, in the same memory."""
        assert begin % GROUP == 0

        def cut(tensor: Tensor | None, per_byte: int = 1) -> Tensor | None:
            return None if tensor is None else tensor[begin // per_byte : -(-end // per_byte)]

        first, second = (moment[begin:end] for moment in self.moments)
        exponents = (cut(self.exponents[0], GROUP), cut(self.exponents[1], GROUP))
        return AdamState(
            cut(self.main), cut(self.weight), cut(self.low_bits), cut(self.carry_bits, 8), (first, second), exponents
        )


class StochasticRounding(NamedTuple):
    """What decides whether an element is rounded up.

    row_ids: int64 [rows], a number of each row in the whole model. width: elements of a row that are here, of which the
    first is the model's column `first_column`. start: the first element's position, from the first row's beginning.
    seeds: of the run and step, 32 bits each.
    """

    row_ids: Tensor
    width: int
    start: int
    seeds: tuple[int, int]
    first_column: int = 0

    def at(self, begin: int) -> StochasticRounding:
        """Return those of the elements from `begin` on."""
        return self._replace(start=self.start + begin)


class AdamStep(NamedTuple):
    """The settings of an AdamW update; `number` is 1 at the first."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    number: int

    def factors(self) -> dict[str, float]:
        """Return the factors of the update as torch computes them, in fp64, by the names in `ADAM_FACTORS`."""
        return {
            "keep": 1.0 - self.lr * self.weight_decay,
            "first_share": 1.0 - self.betas[0],
            "second_share": 1.0 - self.betas[1],
            "second_decay": self.betas[1],
            "step_size": self.lr / (1.0 - self.betas[0] ** self.number),
            "root_correction": math.sqrt(1.0 - self.betas[1] ** self.number),
            "eps": self.eps,
        }


def update_by_torch(main: Tensor, grad: Tensor, moments: Sequence[Tensor], step: AdamStep) -> None:
    """Update fp32 [n] main weights and moments in place by torch's fused AdamW."""
    torch._fused_adamw_(
        [main],
        [grad],
        [moments[0]],
        [moments[1]],
        [],
        [torch.tensor(float(step.number), device=grad.device)],
        lr=step.lr,
        beta1=step.betas[0],
        beta2=step.betas[1],
        weight_decay=step.weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
    )


def seeds_of(seed: int, step: int) -> tuple[int, int]:
    """Return the two numbers of a run and step that its random numbers are made of, 32 bits each."""
    words = hashlib.sha256(f"{seed} {step}".encode()).digest()
    return int.from_bytes(words[:4], "little"), int.from_bytes(words[4:8], "little")


def stored_dtype(name: str, second: bool) -> torch.dtype:
    """Return the dtype of the tensor that stores a moment: of fp32, bf16, int8 or fp8."""
    if name == "int8":
        return torch.uint8 if second else torch.int8
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name]


def has_codes(dtype: torch.dtype) -> bool:
    """Return whether a moment of this dtype has exponents."""
    return dtype in _LIMITS


def random_bits(rounding: StochasticRounding, numel: int) -> Tensor:
    """Return 32 bits for each element, int64 [numel]: the low half is for the first moment."""
    position = torch.arange(rounding.start, rounding.start + numel, device=rounding.row_ids.device)
    row = position // rounding.width
    column = position - row * rounding.width + rounding.first_column
    low, high = rounding.row_ids & _MASK, (rounding.row_ids >> 32) & _MASK
    seeds = _mixed(_mixed(low ^ rounding.seeds[0]) ^ high ^ rounding.seeds[1])
    return _mixed((seeds[row] + column * _WEYL) & _MASK)


def _mixed(bits: Tensor) -> Tensor:
    """Return the 32 bits of each number mixed: each bit of the result depends on all of them."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & _MASK
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & _MASK
    return bits ^ (bits >> 16)


def unpacked_main(state: AdamState) -> Tensor:
    """Return main weights that are packed, fp32 [n]."""
    weight, low, carries = state.weight, state.low_bits, state.carry_bits
    assert weight is not None and low is not None and carries is not None
    tied = ((carries[:, None] >> torch.arange(8, device=carries.device, dtype=torch.uint8)) & 1).flatten()[
        : low.numel()
    ]
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + low + (tied.to(torch.int32) << 16)
    return bits.view(torch.float32)


def pack_main(main: Tensor, state: AdamState) -> None:
    """Store main weights, fp32 [n]: round the weight to nearest even, and keep the low bits."""
    weight, low, carries = state.weight, state.low_bits, state.carry_bits
    assert weight is not None and low is not None and carries is not None
    weight.copy_(main)
    over = main.view(torch.int32) - (weight.view(torch.int16).to(torch.int32) << 16)
    low.copy_(over)
    tied = torch.nn.functional.pad(over == 1 << 15, (0, -over.numel() % 8)).view(-1, 8)
    carries.copy_((tied.to(torch.int32) << torch.arange(8, device=carries.device)).sum(1))


def unpacked_moment(stored: Tensor, exponents: Tensor | None) -> Tensor:
    """Return a moment as fp32 [n]; an element that is not finite makes its whole group so."""
    if exponents is None:
        return stored.to(torch.float32)
    values = stored.to(torch.float32)
    scale = _power_of_two(exponents).masked_fill(exponents == NOT_FINITE, torch.nan)
    scale = scale.repeat_interleave(GROUP)[: stored.numel()]
    return values * values * scale * scale if stored.dtype == torch.uint8 else values * scale


def pack_moment(values: Tensor, stored: Tensor, exponents: Tensor | None, bits: Tensor | None, second: bool) -> None:
    """Store a moment, fp32 [n].

    Args:
        bits: see `random_bits`; None for fp32 alone, which nothing is rounded to.
        second: it is the second moment, which is not negative: codes round it to zero where it is zero alone, for the
            update is divided by its root.
    """
    if stored.dtype == torch.float32:
        stored.copy_(values)
        return
    assert bits is not None
    chance = (bits >> 16 if second else bits) & 0xFFFF
    if stored.dtype == torch.bfloat16:
        stored.view(torch.int16).copy_((values.view(torch.int32) + chance.to(torch.int32)) >> 16)
        return
    assert exponents is not None
    square = stored.dtype == torch.uint8
    groups = torch.nn.functional.pad(values, (0, -values.numel() % GROUP)).view(-1, GROUP)
    finite = groups.isfinite().all(1)
    largest = groups.abs().amax(1).masked_fill(~finite, 0.0)
    # The smallest exponent e with the largest number at most limit 2^e, or limit 4^e for squares.
    base, limit = 2 if square else 1, _LIMITS[stored.dtype]
    exponent = (((largest.view(torch.int32) >> 23) - 127).to(torch.float32) / base).trunc().to(torch.int32) - 20
    exponent = exponent.clamp(min=-126 // base)
    for _ in range(24):
        exponent = torch.where(largest > limit * _power_of_two(base * exponent), exponent + 1, exponent)
    exponents.copy_(torch.where(finite, exponent, NOT_FINITE))
    inverse = _power_of_two(-exponents.to(torch.int32)).masked_fill(~finite, 0.0)
    inverse = inverse.repeat_interleave(GROUP)[: values.numel()]
    size, share = values.abs() * inverse, chance.to(torch.float32) / 65536.0
    size = size.masked_fill(~values.isfinite(), 0.0)
    if square:
        value = size * inverse
        root = value.sqrt().trunc()
        root = torch.where(root * root > value, root - 1.0, root)
        root = torch.where((root + 1.0) * (root + 1.0) <= value, root + 1.0, root)
        codes = root.to(torch.int32) + (value - root * root > share * (root + root + 1.0)).to(torch.int32)
    elif stored.dtype == torch.float8_e4m3fn:
        small = (size * 512.0 + share).to(torch.int32)
        large = ((size.view(torch.int32) + (chance << 4).to(torch.int32)) >> 20) - 960
        codes = torch.where(size < 2.0**-6, small, large)
    else:
        codes = (size + share).to(torch.int32)
    if second:
        codes = torch.where((codes == 0) & (values > 0.0), 1, codes)
    elif stored.dtype == torch.float8_e4m3fn:
        codes = torch.where(values.signbit(), codes | 0x80, codes)  # of a zero too
    else:
        codes = torch.where(values < 0.0, -codes, codes)
    codes = torch.where(finite.repeat_interleave(GROUP)[: values.numel()], codes, 1)
    stored.view(torch.uint8).copy_(codes & 0xFF)


def _power_of_two(exponents: Tensor) -> Tensor:
    return ((exponents.to(torch.int32).clamp(-126, 127) + 127) << 23).view(torch.float32)
