"""Does a folder hold the tensors of a model, all of them and no others? Told from its headers. No tensor is read."""

from __future__ import annotations

from collections.abc import Mapping as Named

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.conversion.mapping import Mapping
from megatron_moe.conversion.transforms import Shape

_RECOMPUTED = ".rotary_emb.inv_freq"
"""Ends the names of tensors that older folders hold and that follow from the configuration."""


def require_tensors(table: Mapping, held: Named[str, Shape], where: str) -> tuple[list[str], list[str]]:
    """Hold a folder's names and shapes against the table.

    Returns:
        The names that it holds as copies of others, and those that nothing is made of.

    Raises:
        ConfigError: tensors are missing, unknown or of another shape; all of them are listed.
    """
    wanted = {name: shape for piece in table.pieces for name, shape in zip(piece.hf, piece.transform.hf_shapes)}
    copies = [name for name in table.copies if name in held]
    dropped = sorted(name for name in held if name.endswith(_RECOMPUTED))
    unknown = sorted(held.keys() - wanted.keys() - set(copies) - set(dropped))
    expected = {**wanted, **{name: wanted[table.copies[name]] for name in copies}}
    lines = [f"missing: {name}" for name in sorted(wanted.keys() - held.keys())]
    lines += [f"nothing is made of it: {name}" for name in unknown]
    lines += [
        f"{name}: shape {list(held[name])}, its configuration says {list(expected[name])}"
        for name in sorted(expected.keys() & held.keys())
        if tuple(held[name]) != tuple(expected[name])
    ]
    if lines:
        raise ConfigError(listing(f"{where}: its tensors are not those of its config.json:", lines))
    return copies, dropped
