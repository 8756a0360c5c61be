"""The command line of megatron-moe trace: run a checkpoint on given tokens and write what it computed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe.config.cli import add_flags
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.io.files import replace_json, require_writable, written_aside
from megatron_moe.io.program import DONE, note, run_program
from megatron_moe_tools.models.sequences import sequences_of_file, sequences_of_texts
from megatron_moe_tools.models.source import (
    locate,
    tokenizer_of_model,
)

if TYPE_CHECKING:  # the flags are checked before torch is loaded
    from torch import Tensor


NAME = "megatron-moe trace"

_INPUT = "input_ids"
_WRITTEN = ("output", "grad_norms", "experts", "picture")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog=NAME,
        description="Run a checkpoint in fp32 on given tokens or texts and write what it computed, to compare two "
        "implementations or to see its experts. One process, on this machine's device.",
        epilog="--output gets logits [B, S, V] and loss; with --routing topk_idx.L [B*S, K] and probs.L [B*S, E] of "
        "every MoE layer L, counted from 0 over all layers, those of multi-token prediction after the last; "
        "mtp_logits [D, B, S, V] of models that have them; input_ids and lengths [B] of texts. --experts gets cosine.L "
        "[E, E] of the experts' weights, tokens_per_expert.L [texts, E], and coactivation.L [E, E], how often two are "
        "chosen for one token over what their loads give. Files that exist are replaced. Exit status: 0 done; 2 a "
        "mistake in the flags or a file.",
        allow_abbrev=False,
    )
    p.add_argument("--load", required=True, metavar="CKPT", help="folder of a run, iter_* or Hugging Face's")
    p.add_argument("--tokens", metavar="FILE", help="safetensors with input_ids [B, S], int64 or int32")
    p.add_argument("--text", dest="texts", action="append", type=lambda text: (None, text), metavar="TEXT",
                   help="a text in place of --tokens; repeatable")  # fmt: skip
    p.add_argument("--text-file", dest="texts", action="append", type=lambda path: (path, ""), metavar="FILE",
                   help="a text that is all of a UTF-8 file; repeatable")  # fmt: skip
    p.add_argument("--output", metavar="FILE", help="safetensors to write: logits, loss")
    p.add_argument("--routing", action="store_true", help="write every token's experts and their weights too")
    p.add_argument("--grad-norms", metavar="FILE", help="JSON to write: name at Hugging Face -> norm of its gradient")
    p.add_argument("--experts", metavar="FILE", help="safetensors to write: loads and similarities of the experts; "
                   "without tokens or a text of their weights alone")  # fmt: skip
    p.add_argument("--picture", metavar="FILE", help="HTML page to write: the experts of layers and tokens")
    p.add_argument("--ckpt-step", type=int, metavar="N", help="which step of a run's folder (default: the newest)")
    p.add_argument("--family", metavar="NAME", help="names for a model that was trained here: deepseek-v3, ...")
    add_flags(p.add_argument_group("tokenizer", "by default the checkpoint's own"), TOKENIZER_FIELDS)
    return p


def main(argv: list[str]) -> int:
    """Trace what the flags name and return the exit status."""
    errors = (ConfigError, OSError)
    return run_program(NAME, _main, argv, interrupted="interrupted; nothing was written", errors=errors, rank=0)


def _main(argv: list[str]) -> int:
    flags = parser().parse_args(argv)
    _check(flags)
    source = locate(Path(flags.load), flags.ckpt_step, flags.family)
    show = flags.experts is not None or flags.picture is not None
    if (show or flags.routing) and not any(source.run.derived.moe_layer_pattern):
        raise ConfigError(f"--experts, --picture, --routing: {source.path} is a dense model; leave them out")
    tokenizer = None
    if flags.texts or (flags.tokens and flags.picture):
        chosen = {name: getattr(flags, name) for name in TOKENIZER_FIELDS if getattr(flags, name) is not None}
        try:
            tokenizer = tokenizer_of_model(source, chosen)
        except ConfigError as error:
            if flags.tokens is None:
                raise
            raise ConfigError(f"--picture {flags.picture}: shows the text of the tokens; {error}") from error
    sequences = None
    if flags.tokens is not None:
        sequences = sequences_of_file(flags.tokens, source)
    elif flags.texts and tokenizer is not None:
        sequences = sequences_of_texts(flags.texts, source, tokenizer)
    for text in source.notes:
        note(f"{NAME}: {text}")
    gradients = flags.grad_norms is not None
    from megatron_moe_tools.models.experts import (
        expert_tensors,
        experts_by_layer,
        findings,
        weight_cosines,
        write_picture,
    )
    from megatron_moe_tools.models.load_model import load_model
    from megatron_moe_tools.models.source import BlockValues
    from megatron_moe_tools.models.trace import Routing, trace, working_bytes

    run, routing = source.run, dict[int, Routing]()
    if sequences is None:
        cosines = weight_cosines(source.blocks(run), run)
    else:
        logits, (batch, length) = flags.output is not None, sequences.input_ids.shape
        working = working_bytes(run, batch, length, gradients, logits)
        with load_model(source, gradients=gradients, working_bytes=working) as found:
            result = trace(
                found,
                sequences.input_ids,
                sequences.lengths,
                logits=logits,
                routing=flags.routing or show,
                gradients=gradients,
            )
            routing = result.routing
            if show:
                weights = (BlockValues(key, (0,) * tensor.dim(), tensor, key) for key, tensor in found.tensors.items())
                cosines = weight_cosines(weights, run)
        if logits:
            computed = result.tensors(routing=flags.routing)
            if flags.texts:
                computed |= {_INPUT: sequences.input_ids, "lengths": sequences.lengths}
            _write(flags.output, computed)
        if gradients:
            replace_json(Path(flags.grad_norms), result.grad_norms)
        files = ", ".join(getattr(flags, name) for name in _WRITTEN if getattr(flags, name) is not None)
        print(f"{source.path}: loss {float(result.loss):.6f} on {batch} x {length} tokens; {files}")
    if show:
        layers = experts_by_layer(run, cosines, routing, sequences)
        if flags.experts is not None:
            _write(flags.experts, expert_tensors(layers))
        if flags.picture is not None:
            write_picture(Path(flags.picture), str(source.path), layers, sequences, tokenizer)
        print(*findings(layers), sep="\n")
    return DONE


def _check(flags: argparse.Namespace) -> None:
    """Refuse flags that do not go together, before anything is read."""
    files: dict[str, str] = {}  # one path for two of the files that are read and written
    named = [("tokens", flags.tokens), *(("text-file", path) for path, _ in flags.texts or ())]
    for name in _WRITTEN:
        require_writable(f"--{name.replace('_', '-')}", getattr(flags, name))
        named.append((name.replace("_", "-"), getattr(flags, name)))
    for name, path in named:
        if path is None:
            continue
        flag = f"--{name}"
        other = files.setdefault(os.path.realpath(path), flag)
        if other != flag:
            raise ConfigError(f"{other}, {flag} {path}: one would overwrite the other; give each its own path")
    show = flags.experts is not None or flags.picture is not None
    if flags.output is None and flags.grad_norms is None and not show:
        raise ConfigError("--output is missing: name a file to write, or --experts or --picture to see the experts")
    if flags.routing and flags.output is None:
        raise ConfigError("--routing: --output is missing, the file that it is written to")
    if flags.tokens is not None and flags.texts:
        raise ConfigError(f"--tokens {flags.tokens}: a text was given too; give one of both")
    if flags.tokens is None and not flags.texts:
        for name in ("output", "grad_norms"):
            if getattr(flags, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"--tokens is missing, which {flag} is computed on; or give a --text or --text-file")


def _write(path: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, atomically."""
    from megatron_moe.hf.safetensors_file import StreamedFile
    from megatron_moe.hf.tensors import layout_of, write_tensor

    with written_aside(Path(path)) as aside, StreamedFile(aside, layout_of(tensors.items())) as file:
        for name, tensor in tensors.items():
            write_tensor(file, name, tensor)
