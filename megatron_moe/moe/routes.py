"""Routes as data: what tells a router which tokens it is given, and where it takes their experts from.

The tokens of a step on a rank are the rows 0 to R - 1 of a table: of each of its samples in turn, S positions. A router
is told the row of each of its tokens, in whatever order it has them, by the tensor that also tells it the documents.
That tensor goes through the layers with the micro-batch, so that a recomputed pass and one that runs between those of
other micro-batches are told theirs, and context and sequence parallelism cut it as they cut the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

_ROW = 1 << 32


class RouteSource(Protocol):
    """Where a router takes the experts of its tokens from in training, and who is told what it chose.

    balances_live: whether expert_bias and the auxiliary losses go by what the gate would choose, and not by what its
    experts get.
    """

    balances_live: bool

    def expert_ids(self, layer: int, rows: Tensor | None, num_tokens: int, live: Callable[[], Tensor]) -> Tensor | None:
        """Return the experts [T, K] int64 of tokens in a layer, different ones in each row; None: those of the gate.

        Args:
            layer: the global, one-based number.
            rows: [T] int64, the tokens' rows; None where nothing came with the tokens that tells them.
            num_tokens: T.
            live: returns what the gate would choose. Every rank has to call it, or none.
        """

    def see(self, layer: int, rows: Tensor | None, expert_ids: Tensor, is_padding: Tensor | None) -> None:
        """Take note of the experts [T, K] that tokens were sent to; called once for every pass that counts."""


def tagged(rows: Tensor, documents: Tensor | None = None) -> Tensor:
    """Return what a model is given as padding_mask, int64, so that its routers know the tokens' rows.

    Args:
        rows: int64, from 0 to 2^31 - 2.
        documents: int64 as in `routing.MicroBatch`, below 2^31; None: no token is padding.
    """
    tags = (rows + 1) * _ROW
    return tags if documents is None else tags + documents


def rows_and_documents(tags: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `tagged`; the rows of documents without tags are -1, which no table has."""
    rows = ((tags + 1) >> 32) - 1
    return rows, tags - (rows + 1) * _ROW
