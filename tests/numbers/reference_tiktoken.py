"""tiktoken's algorithm as it is published, slowly: split by a pattern, then join the pair of the lowest rank, again and
again.
"""

from __future__ import annotations

from collections.abc import Mapping

import regex


def joined_by_ranks(piece: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Return the tokens of one piece of a text."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        _, i = min(pairs)
        parts = [*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :]]


def encoded(text: str, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int]) -> list[int]:
    """Return the tokens of a text in which each special token stands for itself."""
    at = {text.find(token): token for token in sorted(special, key=len) if token in text}
    if at:
        first = min(at)
        token = at[first]
        rest = text[first + len(token) :]
        return [*encoded(text[:first], ranks, pattern, {}), special[token], *encoded(rest, ranks, pattern, special)]
    pieces = regex.findall(pattern, text, flags=regex.VERSION1)
    return [i for piece in pieces for i in joined_by_ranks(piece.encode(), ranks)]
