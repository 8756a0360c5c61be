"""The command line of megatron-moe trace: run a checkpoint on given tokens and write what it computed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.safetensors_file import FormatError, read_header
from megatron_moe.io.files import replace_json, require_writable, written_aside
from megatron_moe.io.program import DONE, note, run_program
from megatron_moe_tools.models.source import locate

NAME = "megatron-moe trace"

_INPUT = "input_ids"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog=NAME,
        description="Run a checkpoint in fp32 on given tokens and write what it computed, to compare two "
        "implementations. One process, on this machine's device.",
        epilog="The result holds logits [B, S, V] and loss; with --routing topk_idx.L [B*S, K] and probs.L [B*S, E] of "
        "every MoE layer L, counted from 0 over all layers, those of multi-token prediction after the last; "
        "mtp_logits [D, B, S, V] of models that have them. Files that exist are replaced. Exit status: 0 done; 2 a "
        "mistake in the flags or a file.",
        allow_abbrev=False,
    )
    p.add_argument("--load", required=True, metavar="CKPT", help="folder of a run, iter_* or Hugging Face's")
    p.add_argument("--tokens", required=True, metavar="FILE", help="safetensors with input_ids [B, S], int64 or int32")
    p.add_argument("--output", required=True, metavar="FILE", help="safetensors to write")
    p.add_argument("--routing", action="store_true", help="write every token's experts and their weights too")
    p.add_argument("--grad-norms", metavar="FILE", help="JSON to write: name at Hugging Face -> norm of its gradient")
    p.add_argument("--ckpt-step", type=int, metavar="N", help="which step of a run's folder (default: the newest)")
    p.add_argument("--family", metavar="NAME", help="names for a model that was trained here: deepseek-v3, ...")
    return p


def main(argv: list[str]) -> int:
    """Trace what the flags name and return the exit status."""
    errors = (ConfigError, OSError)
    return run_program(NAME, _main, argv, interrupted="interrupted; nothing was written", errors=errors, rank=0)


def _main(argv: list[str]) -> int:
    flags = parser().parse_args(argv)
    for name in ("output", "grad_norms"):
        require_writable(f"--{name.replace('_', '-')}", getattr(flags, name))
    taken: dict[str, str] = {}  # one path for two of the files that are read and written
    for name in ("tokens", "output", "grad_norms"):
        path, flag = getattr(flags, name), f"--{name.replace('_', '-')}"
        if path is not None and (other := taken.setdefault(os.path.realpath(path), flag)) != flag:
            raise ConfigError(f"{other}, {flag} {path}: one would overwrite the other; give each its own path")
    source = locate(Path(flags.load), flags.ckpt_step, flags.family)
    if not Path(flags.tokens).is_file():
        raise ConfigError(f"--tokens {flags.tokens}: is no file; give a safetensors file with {_INPUT} [B, S]")
    try:
        tensors = read_header(Path(flags.tokens)).tensors
    except FormatError as error:
        raise ConfigError(f"--tokens {flags.tokens}: is no safetensors file that can be read: {error}") from None
    where = f"--tokens {flags.tokens}"
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

    from megatron_moe.hf.safetensors_file import StreamedFile
    from megatron_moe.hf.tensors import layout_of, write_tensor
    from megatron_moe_tools.models.load_model import load_model
    from megatron_moe_tools.models.trace import trace, working_bytes

    with safe_open(flags.tokens, framework="pt") as opened:
        tokens = opened.get_tensor(_INPUT).long()
    vocab_size = source.run.model.vocab_size or 0
    for token in map(int, torch.aminmax(tokens)):
        if not 0 <= token < vocab_size:
            ids = f"{source.path} has ids from 0 to {vocab_size - 1}"
            raise ConfigError(f"{where}: token id {token} is outside of the vocabulary; {ids}")
    for text in source.notes:
        note(f"{NAME}: {text}")
    gradients = flags.grad_norms is not None
    if gradients:
        _ = source.required_family
    working = working_bytes(source.run, shape[0], shape[1], gradients)
    with load_model(source, gradients=gradients, working_bytes=working) as found:
        result = trace(found, tokens, routing=flags.routing, gradients=gradients)
    computed = result.tensors()
    with written_aside(Path(flags.output)) as aside, StreamedFile(aside, layout_of(computed.items())) as file:
        for name, tensor in computed.items():
            write_tensor(file, name, tensor)
    if gradients:
        replace_json(Path(flags.grad_norms), result.grad_norms)
    print(f"{source.path}: loss {float(result.loss):.6f} on {shape[0]} x {shape[1]} tokens; {flags.output}")
    return DONE
