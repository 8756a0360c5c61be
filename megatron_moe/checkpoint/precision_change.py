"""Loading a step into a model of other dtypes: weights are made from the fp32 main weights, rounded once.

A step of a bf16 or fp16 run holds the main weight of NAME under `optimizer.state.param.NAME`; in a step of an fp32 run
NAME itself is it. Main weights, moments and fp32 state keep their bits, so that a run that changes its dtype and
changes it back goes on from the state that it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint import dist
from megatron_moe.checkpoint.errors import from_all
from megatron_moe.config.errors import ConfigError, listing

_MAIN, _MOMENT = "optimizer.state.param.", "optimizer.state.exp_avg."
_Dtypes = dict[str, torch.dtype]


def load_tensors(
    request: dict[str, Any],
    chunks: Sequence[str],
    folder: Path,
    *,
    allow_unread: tuple[str, ...],
    fp32_state: frozenset[str],
) -> tuple[dict[str, Any], _Dtypes]:
    """Do what `dist.load_tensors` does for a model whose weights have other dtypes than the step's. Collective.

    The step is read twice: all but the weights, and then the weights, for the optimizer may ask for the same main
    weights. These pass through host memory in fp32.

    Args:
        request: the sharded state dict; weights are taken out of it.
        chunks: the names in it of the model's chunks.

    Raises:
        ConfigError: besides the reasons there, a weight is too large for its dtype. The same on every rank.
    """
    saved = dist.saved_dtypes(folder)
    trained = {key.removeprefix(_MOMENT) for key in saved if key.startswith(_MOMENT)}
    sources = {key: _MAIN + key if _MAIN + key in saved else key for key in trained}
    weights, wanted = _take_weights(request, chunks, sources)
    for part in dist.sharded_parts(request.get("optimizer")):
        if part.key.startswith(_MAIN) and part.key not in saved:
            part.key = part.key.removeprefix(_MAIN)
    either = tuple(trained | {_MAIN + key for key in trained})
    loaded, rounded_state = dist.load_tensors(
        request, folder, allow_unread=(*allow_unread, *either), fp32_state=fp32_state
    )
    others = tuple(saved.keys() - set(sources.values()))
    filled, _ = dist.load_tensors(weights, folder, allow_unread=others)
    too_large: list[str] = []
    for chunk in chunks:
        made = {name: _rounded(filled[chunk][name], *wanted[chunk][name], too_large) for name in wanted[chunk]}
        loaded.setdefault(chunk, {}).update(made)
    _refuse(folder, too_large)
    return loaded, rounded_state


def _take_weights(
    request: dict[str, Any], chunks: Sequence[str], sources: dict[str, str]
) -> tuple[dict[str, Any], dict[str, dict[str, tuple[str, torch.dtype]]]]:
    """Take the weights out of a request.

    Returns:
        A request for their sources in fp32, and of each weight its key in a step and its dtype here, both by chunk and
        name.
    """
    weights: dict[str, Any] = {}
    wanted: dict[str, dict[str, tuple[str, torch.dtype]]] = {}
    for chunk in chunks:
        weights[chunk], wanted[chunk] = {}, {}
        for name in list(request[chunk]):
            parts = list(dist.sharded_parts(request[chunk][name]))
            if parts and parts[0].key in sources:
                wanted[chunk][name] = (parts[0].key, parts[0].data.dtype)
                weights[chunk][name] = dist.read_in_fp32(request[chunk].pop(name), sources)
    return weights, wanted


def _rounded(values: Any, key: str, dtype: torch.dtype, too_large: list[str]) -> Any:
    """Return what was read of a weight in the dtype; add its key to `too_large` if a number becomes infinite."""
    if isinstance(values, list):
        return [_rounded(part, key, dtype, too_large) for part in values]
    main: Tensor = dist.values_of(values)
    weight = main.to(dtype)
    if bool((weight.isinf() & main.isfinite()).any()):
        too_large.append(f"{key}: {main[main.isfinite()].abs().max().item():g}")
    return weight


def _refuse(folder: Path, too_large: list[str]) -> None:
    """Raise an error on every rank if a weight of any rank does not fit into its dtype."""
    found = sorted({line for lines in from_all(too_large) for line in lines})
    if found:
        head = (
            f"--load {folder}: weights are beyond the largest number of their dtype (fp16: 65504); use --bf16 or fp32:"
        )
        raise ConfigError(listing(head, found))
