"""Text of tokens as they come, in whole characters: a character's bytes may lie in several tokens."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_moe.data.tokenizers import REPLACEMENT, Tokenizer


class TextStream:
    """What each further token adds to a text.

    Tokens are decoded behind the few before them, because some decoders treat a text's first token otherwise than the
    same one later. Text that ends amid a character waits for the tokens that end it.

    Args:
        tokenizer: of the tokens. before: the tokens that the text continues, such as a prompt's.
    """

    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)[-self._CONTEXT :]
        self._told = len(self._ids)

    def add(self, token: int) -> str:
        """The text that is complete with this token; empty while it waits."""
        self._ids.append(token)
        text = self._waiting()
        if not text or text.endswith(REPLACEMENT):
            return ""
        # What was told last is the context of what comes next.
        self._ids = self._ids[self._told :]
        self._told = len(self._ids)
        return text

    def rest(self) -> str:
        """What is left when no token comes any more, with U+FFFD for a character that was not ended."""
        text, self._told = self._waiting(), len(self._ids)
        return text

    def _waiting(self) -> str:
        decode = self._tokenizer.detokenize
        return decode(self._ids)[len(decode(self._ids[: self._told])) :]
