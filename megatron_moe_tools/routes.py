"""`megatron-moe routes`: routes of vLLM, SGLang or Megatron-LM as files that a run replays, and back.

Their arrays do not say which layers and samples they are of. This program asks, and checks the answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
from numpy import ndarray

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.config import filled_in
from megatron_moe.hf.safetensors_file import read_header
from megatron_moe.io.files import require_writable, sync, written_aside
from megatron_moe.io.program import DONE, run_program
from megatron_moe.training.route_files import RouteFiles, RoutePart, RouteShape, write_part
from megatron_moe_tools import compat

NAME = "megatron-moe routes"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog=NAME,
        description="Convert routes of another program to files for --moe-enable-routing-replay, or back.",
        epilog="requests: tensors routed_experts.N [rows, L, K] of sample N, rows from position 0 on, as vLLM and"
        " SGLang return them. router-replay: recorded.I [S x B, K] of the I-th RouterReplay of Megatron-LM, for one"
        " micro-batch. Both with tokens.N [S] int64 of sample N, as it is trained on. Flags of the run that replays"
        " follow, e.g. --preset, --seq-length.",
        allow_abbrev=False,
    )
    forms = p.add_mutually_exclusive_group(required=True)
    for way in ("from", "to"):
        forms.add_argument(f"--{way}", dest=f"{way}_form", choices=("requests", "router-replay"), help="their form")
    p.add_argument(
        "--load", required=True, type=Path, metavar="PATH", help="what is read: theirs is a safetensors file"
    )
    p.add_argument("--output", required=True, type=Path, metavar="FILE", help="the safetensors file to write")
    p.add_argument("--layers", required=True, nargs="+", metavar="L", help="the layer, counted from 1, of each of their"
                   " L columns, or of each I: numbers, or `all` of the decoder, or those with `experts`")  # fmt: skip
    p.add_argument("--samples", required=True, nargs="+", type=int, metavar="N", help="the samples in the run's order")
    return p


def main(argv: list[str]) -> int:
    """Convert as the flags say and return the exit status."""
    return run_program(NAME, _main, argv, errors=(ConfigError, OSError), rank=0)


def _main(argv: list[str]) -> int:
    flags, words = parser().parse_known_args(argv)
    shape = RouteShape.from_run(compat.parse(words, filled_in))
    if not shape.layers:
        raise ConfigError("the flags describe a dense model, which has no routes; add --load-hf or --preset")
    layers = _layers(flags.layers, shape)
    for flag, numbers in (("--layers", layers), ("--samples", flags.samples)):
        if len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise ConfigError(f"{flag} {' '.join(map(str, numbers))}: name each once, by a number that is not negative")
    require_writable("--output", str(flags.output))
    from safetensors.numpy import load_file, save_file

    if flags.from_form is not None:
        read_header(flags.load)  # its errors are for users
        tensors = load_file(flags.load)
        write_part(flags.output, shape, part_of(flags.from_form, tensors, flags.samples, layers, shape))
        return DONE
    with written_aside(flags.output) as aside:
        save_file(tensors_of(flags.to_form, flags.load, flags.samples, layers, shape), aside)
        sync(aside)
    return DONE


def _layers(words: Sequence[str], shape: RouteShape) -> list[int]:
    if list(words) == ["all"]:
        return list(range(1, shape.num_layers + 1))
    if list(words) == ["experts"]:
        return list(shape.moe_layers)
    known = (*map(str, range(1, shape.num_layers + 1)), *map(str, shape.layers))
    if not set(words) <= set(known):
        raise ConfigError(f"--layers {' '.join(words)}: give `all`, `experts`, or numbers; {shape}")
    return list(map(int, words))


def part_of(
    form: str, tensors: Mapping[str, ndarray], samples: Sequence[int], layers: Sequence[int], shape: RouteShape
) -> RoutePart:
    """Return the routes in another program's tensors.

    Args:
        form: `requests`: routed_experts.N [rows, L, K] of each sample N, of which row t is of position t; the last
            token of a request, which was only generated, has none. `router-replay`: recorded.I [S x B, K] of the I-th
            router, as Megatron-LM's `RouterReplay.get_recorded_data` returns them, in the order [S, B].
        tensors: these, and tokens.N [S] int64 of each sample N.
        samples: in the order of the micro-batch.
        layers: the global, one-based layer of each column or router. Columns of dense layers have to be all zeros.

    Raises:
        ConfigError: a tensor is missing or has another shape; a dense layer has routes.
    """
    import torch

    from megatron_moe.data.batches import token_hash

    routes = numpy.zeros((len(samples), shape.seq_length, len(layers), shape.topk), numpy.int64)
    recorded = numpy.full(routes.shape[:2], form == "router-replay")
    if form == "requests":
        for place, sample in enumerate(samples):
            one = _tensor(tensors, f"routed_experts.{sample}", (-1, len(layers), shape.topk))
            if len(one) > shape.seq_length:
                raise ConfigError(f"routed_experts.{sample}: {len(one)} rows, and --seq-length {shape.seq_length}")
            routes[place, : len(one)] = one
            recorded[place, : len(one)] = True
    else:
        for place in range(len(layers)):
            one = _tensor(tensors, f"recorded.{place}", (shape.seq_length * len(samples), shape.topk))
            routes[:, :, place] = one.reshape(shape.seq_length, len(samples), shape.topk).swapaxes(0, 1)
        if f"recorded.{len(layers)}" in tensors:
            raise ConfigError(f"--layers {list(layers)}: names {len(layers)} routers, and the file has more")
    kept = []
    for column, layer in enumerate(layers):
        if layer in shape.layers or layer > shape.num_layers:
            kept.append(column)
        elif routes[:, :, column].any():
            raise ConfigError(f"--layers: column {column} is of layer {layer} and has routes, and {shape}")
    hashes = []
    for sample in samples:
        tokens = _tensor(tensors, f"tokens.{sample}", (shape.seq_length,))
        hashes.append(token_hash(sample, torch.from_numpy(tokens.astype(numpy.int64))))
    return RoutePart(
        samples=numpy.array(samples, numpy.int64),
        token_hash=numpy.array(hashes, numpy.int64),
        layers=numpy.array(layers, numpy.int64)[kept],
        routes=routes[:, :, kept],
        recorded=recorded,
    )


def _tensor(tensors: Mapping[str, ndarray], name: str, shape: tuple[int, ...]) -> ndarray:
    """Return a tensor of this shape, of which -1 is any length."""
    found = tensors.get(name)
    if found is None:
        raise ConfigError(f"{name}: is not in the file, which has {', '.join(sorted(tensors))}")
    if found.ndim != len(shape) or any(there != here != -1 for there, here in zip(found.shape, shape)):
        raise ConfigError(f"{name}: is {list(found.shape)}; by --layers, --samples and the model it is {list(shape)}")
    return found


def tensors_of(
    form: str, path: Path, samples: Sequence[int], layers: Sequence[int], shape: RouteShape
) -> dict[str, ndarray]:
    """Return what `part_of` takes, without the tokens, from files of routes; dense layers are zeros.

    Raises:
        ConfigError: a route is missing, other than behind the last one of a request.
    """
    routed = list(filter(shape.layers.__contains__, layers))
    taken = RouteFiles(path, shape).take(samples, routed)
    taken.require_all(path)
    routes = numpy.zeros((*taken.recorded.shape[:2], len(layers), shape.topk), numpy.int64)
    for place, layer in enumerate(routed):
        routes[:, :, list(layers).index(layer)] = taken.routes[:, :, place]
    found, recorded = {}, taken.recorded.all(axis=2)
    for place, sample in enumerate(samples):
        rows = int(recorded[place].sum())
        if not recorded[place, :rows].all() or (form == "router-replay" and rows < shape.seq_length):
            raise ConfigError(f"{path}: sample {sample} has positions without a route, which this form cannot say")
        found[f"routed_experts.{sample}"] = routes[place, :rows].astype(numpy.int32)
    if form == "requests":
        return found
    in_order = routes.swapaxes(0, 1).reshape(-1, len(layers), shape.topk)
    return {f"recorded.{place}": numpy.ascontiguousarray(in_order[:, place]) for place in range(len(layers))}
