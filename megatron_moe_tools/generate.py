"""The command line of megatron-moe generate: continue prompts with a checkpoint and print the text as it is made."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_moe.config import schema
from megatron_moe.config.cli import add_flags
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.config.schema import Run
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import REPLACEMENT, Tokenizer
from megatron_moe.io.program import DONE, note, run_program
from megatron_moe_tools.models.source import ModelSource, begin_ids, locate, said_in, tokenizer_of_model

NAME = "megatron-moe generate"

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog=NAME,
        description="Generate text from a checkpoint, for a quick look: one process, one prompt after the other, a "
        "key-value cache. For serving, export the checkpoint with megatron-moe convert --to hf.",
        epilog="Each prompt is written to stdout, followed by its continuation as it is made; the speed is on stderr. "
        "Exit status: 0 done; 2 a mistake in the flags or a file; 130 interrupted.",
        allow_abbrev=False,
    )
    p.add_argument("--load", required=True, metavar="CKPT", help="folder of a run, iter_* or Hugging Face's")
    p.add_argument("--ckpt-step", type=int, metavar="N", help="which step of a run's folder (default: the newest)")
    p.add_argument("--prompt", dest="prompts", action="append", type=lambda text: (None, text), metavar="TEXT",
                   help="a prompt; repeatable")  # fmt: skip
    p.add_argument("--prompt-file", dest="prompts", action="append", type=lambda path: (path, ""), metavar="FILE",
                   help="a prompt that is all of a UTF-8 file; repeatable")  # fmt: skip
    p.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate (default: 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    p.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    p.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that have P together")
    p.add_argument("--seed", type=int, default=0, help="seed of the draws, the same for every prompt (default: 0)")
    p.add_argument("--dtype", choices=tuple(_DTYPES), default="fp32", help="dtype of the model (default: fp32)")
    p.add_argument("--stop-at-eod", action=argparse.BooleanOptionalAction, default=True, help="stop after the "
                   "end-of-document token, and after those that end a text of an imported model")  # fmt: skip
    p.add_argument("--add-bos", action=argparse.BooleanOptionalAction, help="begin with the tokenizer's "
                   "begin-of-sequence token (default: as the tokenizer_config.json or the tokenizer.json that came "
                   "with an imported model says, otherwise not)")  # fmt: skip
    add_flags(p.add_argument_group("tokenizer", "by default the checkpoint's own"), TOKENIZER_FIELDS)
    return p


def main(argv: list[str]) -> int:
    """Continue the prompts and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    flags = parser().parse_args(argv)
    _check(flags)
    flags.chosen = {name: getattr(flags, name) for name in TOKENIZER_FIELDS if getattr(flags, name) is not None}
    prompts = list(itertools.starmap(_read, flags.prompts))
    source = locate(Path(flags.load), flags.ckpt_step)
    tokenizer = _tokenizer(source, flags)
    begin = begin_ids(source, tokenizer, flags.add_bos)
    ends = _ends(source, tokenizer, flags)
    ids = [_ids(tokenizer, begin, prompt, source.run, flags.max_new_tokens) for prompt in prompts]
    for text in source.notes:
        note(f"{NAME}: {text}")
    import torch

    from megatron_moe.model.generate import Sampling, continuation
    from megatron_moe_tools.models.load_model import load_model

    dtype: torch.dtype = getattr(torch, _DTYPES[flags.dtype])
    working = working_bytes(source.run, max(map(len, ids)), flags.max_new_tokens, dtype.itemsize)
    with load_model(source, dtype=dtype, working_bytes=working) as found:
        for number, (prompt, prompt_ids) in enumerate(zip(prompts, ids)):
            stream, times = TextStream(tokenizer, prompt_ids), [time.perf_counter()]
            print("\n" * bool(number) + prompt, end="", flush=True)
            for token in continuation(
                found.model,
                prompt_ids,
                flags.max_new_tokens,
                vocab_size=found.vocab_size,
                sampling=Sampling(flags.temperature, flags.top_k, flags.top_p or 1.0),
                seed=flags.seed,
                end_ids=ends,
            ):
                times.append(time.perf_counter())
                print(stream.add(token), end="", flush=True)
            print(stream.rest(), flush=True)
            # The time of the first token includes the whole prompt.
            more, first, speed = len(times) - 2, times[1] - times[0], "one token"
            if more:
                speed = f"{more / (times[-1] - times[1]):.1f} tokens/s"
            note(f"{NAME}: prompt of {len(prompt_ids)} tokens in {first:.2f} s, then {more} tokens: {speed}")
    return DONE


def working_bytes(run: Run, prompt: int, new: int, width: int) -> int:
    """Return the bytes that `new` tokens after a prompt need besides the model, at `width` bytes a number."""
    from megatron_moe.model.generate import numbers_per_token

    cache = (prompt + new) * numbers_per_token(run) * width
    vocabulary = run.derived.padded_vocab_size(run.model.vocab_size or 0)
    # Logits as computed and in fp32; within a layer, a few tensors of the widest kind.
    widest = max(run.model.hidden_size, run.derived.ffn_hidden_size, run.model.num_attention_heads * 256)
    return cache + prompt * (vocabulary * (width + 4) + 16 * widest * 4)


def _check(flags: argparse.Namespace) -> None:
    if not Path(flags.load).is_dir():
        locate(Path(flags.load))  # the mistake to report first
    if not flags.prompts:
        raise ConfigError("--prompt is missing: give a text to continue, or a file that holds one (--prompt-file)")
    if flags.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {flags.max_new_tokens}: has to be 1 or more")
    if not 0.0 <= flags.temperature <= 100.0:
        raise ConfigError(f"--temperature {flags.temperature}: has to be from 0 to 100; 0 takes the likeliest token")
    if flags.top_k is not None and flags.top_k < 1:
        raise ConfigError(f"--top-k {flags.top_k}: has to be 1 or more; without it all tokens may be drawn")
    if flags.top_p is not None and not 0.0 < flags.top_p <= 1.0:
        raise ConfigError(f"--top-p {flags.top_p}: has to be above 0 and at most 1")
    for flag, value in (("--top-k", flags.top_k), ("--top-p", flags.top_p)):
        if flags.temperature == 0.0 and value is not None:
            raise ConfigError(f"{flag} {value}: nothing is drawn with --temperature 0; add --temperature 1")
    if not -(2**63) <= flags.seed < 2**63:
        raise ConfigError(f"--seed {flags.seed}: has to fit into 64 bits")


def _read(path: str | None, text: str) -> str:
    where = "--prompt"
    try:
        if path is not None:
            where = f"--prompt-file {path}"
            text = Path(path).read_text(encoding="utf-8")
        text.encode("utf-8")
        return text
    except UnicodeError as error:
        raise ConfigError(f"{where}: is not UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error


def _tokenizer(source: ModelSource, flags: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer of the flags, else the one that came with the model, else the one of the run's flags."""
    if flags.chosen:
        return build_tokenizer(schema.build(flags.chosen).data, source.run.model.vocab_size)
    return tokenizer_of_model(source)


def _ends(source: ModelSource, tokenizer: Tokenizer, flags: argparse.Namespace) -> set[int]:
    """Return the tokens to stop after: the tokenizer's end, and those that an imported model came with."""
    if not flags.stop_at_eod:
        return set()
    file, ids = source.companions.get("generation_config.json"), []
    if file is not None and not flags.chosen:  # ids of the tokenizer that came along
        ids = said_in(file, "eos_token_id")
        if not isinstance(ids, list):
            ids = [ids]
    return {i for i in (tokenizer.eos, *ids) if isinstance(i, int)}


def _ids(tokenizer: Tokenizer, begin: Sequence[int], prompt: str, run: Run, new: int) -> list[int]:
    ids = [*begin, *tokenizer.tokenize(prompt)] or [tokenizer.eod]
    vocab_size, positions = run.model.vocab_size or 0, run.derived.max_position_embeddings
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"--tokenizer-type {tokenizer.name}: gives token {max(ids)} and the model has {vocab_size}; name the "
            "tokenizer that it was trained with (--tokenizer-type, --tokenizer-model)"
        )
    if len(ids) + new > positions:
        remedy = "shorten the prompt"
        if len(ids) < positions:
            remedy = f"{positions - len(ids)} is the most"
        raise ConfigError(
            f"--max-new-tokens {new}: prompt of {len(ids)} tokens, model of {positions} positions; {remedy}"
        )
    return ids


class TextStream:
    """A decoder of tokens as they come, in whole characters: a character's bytes may be in several tokens.

    Tokens are decoded together with a few before them, such as a prompt's, because some decoders treat a text's first
    token differently. Text that ends within a character waits for the tokens that complete it.
    """

    _CONTEXT = 6

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(before)[-self._CONTEXT :]
        self._shown = len(self._ids)

    def add(self, token: int) -> str:
        """Add a token and return the text that it completes; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._waiting()
        if not text or text.endswith(REPLACEMENT):
            return ""
        # What was returned last is the context of what comes next.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def rest(self) -> str:
        """Return what is left at the end, with U+FFFD for a character that is incomplete."""
        text, self._shown = self._waiting(), len(self._ids)
        return text

    def _waiting(self) -> str:
        decode = self._tokenizer.detokenize
        return decode(self._ids)[len(decode(self._ids[: self._shown])) :]
