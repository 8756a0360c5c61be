"""The tokens that a tool runs a model on: of a file of token ids, or of texts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

from megatron_moe.config.errors import ConfigError
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.hf.safetensors_file import FormatError, read_header
from megatron_moe_tools.models.source import ModelSource, beginning_of_text, text_of_flag

if TYPE_CHECKING:
    from megatron_moe_tools.models.experts import Sequences

_INPUT = "input_ids"


def sequences_of_file(path: str, source: ModelSource) -> Sequences:
    """Return the sequences of a file of tokens. Raises ConfigError: it is not what the model takes."""
    where = f"--tokens {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: is no file; give a safetensors file with {_INPUT} [B, S]")
    try:
        tensors = read_header(Path(path)).tensors
    except FormatError as error:
        raise ConfigError(f"{where}: is no safetensors file that can be read: {error}") from None
    if _INPUT not in tensors:
        raise ConfigError(f"{where}: holds {', '.join(sorted(tensors)[:5]) or 'nothing'}, and no {_INPUT} [B, S]")
    stored, shape = tensors[_INPUT].dtype, list(tensors[_INPUT].shape)
    if stored not in ("int64", "int32"):
        raise ConfigError(f"{where}: {_INPUT} is {stored}; token ids are int64 or int32")
    if len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
        raise ConfigError(f"{where}: {_INPUT} has the shape {shape}; [B, S] is wanted, with B >= 1 and S >= 2")
    largest = source.run.derived.max_position_embeddings
    if shape[1] > largest:
        raise ConfigError(f"{where}: sequences of {shape[1]} tokens; {source.path} has positions for {largest}")
    import torch
    from safetensors import safe_open

    from megatron_moe_tools.models.experts import Sequences

    with safe_open(path, framework="pt") as opened:
        tokens = opened.get_tensor(_INPUT).long()
    _require_ids(where, tokens.aminmax(), source)
    zeros = torch.zeros(shape[0], dtype=torch.int64)
    return Sequences([path], tokens, zeros + shape[1], zeros)


def sequences_of_texts(given: list[tuple[str | None, str]], source: ModelSource, tokenizer: Tokenizer) -> Sequences:
    """Return the sequences of texts. Raises ConfigError: one has fewer than two tokens, or other tokens."""
    texts: dict[str, list[int]] = {}
    for number, (path, text) in enumerate(given, start=1):
        where = "--text"
        if path is not None:
            where = f"--text-file {path}"
        ids = beginning_of_text(source, tokenizer) + tokenizer.tokenize(text_of_flag("--text", path, text))
        if len(ids) < 2:
            raise ConfigError(f"{where}: has {len(ids)} tokens; at least 2 are needed")
        _require_ids(where, (min(ids), max(ids)), source)
        texts[f"{number}: {path or text[:40]}"] = ids
    from megatron_moe_tools.models.experts import cut
    from megatron_moe_tools.models.trace import TOKENS_AT_ONCE

    return cut(texts, min(source.run.derived.max_position_embeddings, TOKENS_AT_ONCE))


def _require_ids(where: str, extremes: Iterable[SupportsInt], source: ModelSource) -> None:
    """Refuse token ids that a model does not have."""
    vocab_size = source.run.model.vocab_size or 0
    for token in map(int, extremes):
        if not 0 <= token < vocab_size:
            ids = f"{source.path} has ids from 0 to {vocab_size - 1}"
            raise ConfigError(f"{where}: token id {token} is outside of the vocabulary; {ids}")
