"""What a step read, as 64 bits: equal for the same samples in the same places, whatever the layout.

Each sample's hash covers its number in the run's order and all that the model sees of it; those of a step are added,
so that every rank can count its own. Sums are kept as two halves of 32 bits: sums of those are exact in fp64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor

NOTHING = (0.0, 0.0)


def sample_words(number: int, sample: Tensor) -> tuple[float, float]:
    """The two halves of one sample's hash. sample: int64, all that is read of it, on the CPU."""
    return words_of(number, sample.contiguous().numpy().tobytes())


def words_of(number: int, content: bytes) -> tuple[float, float]:
    """The two halves, as whole numbers below 2^32, of the 64-bit BLAKE2b hash of a number and what belongs to it."""
    digest = hashlib.blake2b(number.to_bytes(8, "little", signed=True) + content, digest_size=8).digest()
    return float(int.from_bytes(digest[:4], "little")), float(int.from_bytes(digest[4:], "little"))


def added(words: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The sum of some hashes; exact for fewer than two million of them."""
    low, high = NOTHING
    for first, second in words:
        low, high = low + first, high + second
    return low, high


def hex_of(low: float, high: float) -> str | None:
    """Sums of halves as 16 hex digits; None where nothing was added."""
    return None if (low, high) == NOTHING else f"{int(high) % (1 << 32):08x}{int(low) % (1 << 32):08x}"
