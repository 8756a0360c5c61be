"""Packed optimizer state of random numbers, for tests of what updates it."""

import torch
from torch import Tensor

from megatron_moe.precision import packed_state
from megatron_moe.precision.packed_state import AdamState, StochasticRounding

FORMATS = ("fp32", "bf16", "int8", "fp8")


def rounding(numel: int, width: int = 7, start: int = 3) -> StochasticRounding:
    """StochasticRounding of a weight whose rows are shorter than a group, and which begins within a row."""
    places = (torch.arange((numel + start) // width + 1) * 977 + (123456789 << 31)) * 31
    return StochasticRounding(places, width, start, packed_state.seeds_of(1, 1))


def values(numel: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradient, main weight, first and second moment, of very different sizes within a group."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(numel, generator=generator)

    first = normal() * torch.exp(3 * normal()) * 1e-3
    return normal() * torch.exp(2 * normal()) * 1e-2, normal(), first, first * first * torch.rand(numel)


Moment = tuple[Tensor, Tensor | None]


def packed_moment(name: str, wide: Tensor, second: bool, of: StochasticRounding | None = None) -> Moment:
    """The stored moment and exponents of these values."""
    numel, dtype = wide.numel(), packed_state.stored_dtype(name, second)
    groups = torch.zeros(-(-numel // packed_state.GROUP), dtype=torch.int8)
    moment, exponents = torch.zeros(numel, dtype=dtype), groups if packed_state.has_codes(dtype) else None
    drawn = packed_state.random_bits(of or rounding(numel), numel)
    packed_state.pack_moment(wide, moment, exponents, drawn, second)
    return moment, exponents


def state(main: Tensor, first: Tensor, second: Tensor, formats: tuple[str, str], packed: bool) -> AdamState:
    """The state that stores these numbers."""
    numel = main.numel()
    moments = packed_moment(formats[0], first, False), packed_moment(formats[1], second, True)
    stored = ((moments[0][0], moments[1][0]), (moments[0][1], moments[1][1]))
    if not packed:
        return AdamState(main.clone(), None, None, None, *stored)
    weight, rest = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    made = AdamState(None, weight, rest, torch.empty(-(-numel // 8), dtype=torch.uint8), *stored)
    packed_state.pack_main(main, made)
    return made


def on(of: AdamState, device: torch.device) -> AdamState:
    """The whole state in the memory of a device."""

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    moments, exponents = ([there(one) for one in pair] for pair in (of.moments, of.exponents))
    kept = [there(one) for one in (of.main, of.weight, of.low_bits, of.carry_bits)]
    return AdamState(*kept, (moments[0], moments[1]), (exponents[0], exponents[1]))  # type: ignore[arg-type]


def tensors(of: AdamState) -> list[Tensor]:
    """The bytes of all that a state stores."""
    found = (of.main, of.weight, of.low_bits, of.carry_bits, *of.moments, *of.exponents)
    return [one.view(torch.uint8) for one in found if one is not None]


def unpacked(of: AdamState) -> list[Tensor]:
    """Main weights and moments in fp32."""
    main = packed_state.unpacked_main(of) if of.main is None else of.main
    return [main, *(packed_state.unpacked_moment(*stored) for stored in zip(of.moments, of.exponents))]
