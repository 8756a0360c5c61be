"""`megatron-moe routes`: routes of vLLM, SGLang or Megatron-LM as files that a run replays, and back.

Their arrays do not say which layers and samples they are of. This program asks, and checks the answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError
from megatron_moe.data.batches import token_hash
from megatron_moe.io.files import sync, written_aside
from megatron_moe.io.program import DONE, run_program
from megatron_moe.training.route_files import RouteFiles, RoutePart, RouteShape, write_part
from megatron_moe_tools import compat

NAME = "megatron-moe routes"
Tensors = Mapping[str, Tensor]


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
    shape = RouteShape.from_run(compat.parse(words))
    layers = _layers(flags.layers, shape)
    if flags.from_form is not None:
        read = from_requests if flags.from_form == "requests" else from_router_replay
        write_part(flags.output, shape, read(load_file(flags.load), flags.samples, layers, shape))
        return DONE
    write = to_requests if flags.to_form == "requests" else to_router_replay
    with written_aside(flags.output) as aside:
        save_file(write(flags.load, flags.samples, layers, shape), aside)
        sync(aside)
    return DONE


def _layers(words: Sequence[str], shape: RouteShape) -> list[int]:
    if list(words) == ["all"]:
        return list(range(1, shape.num_layers + 1))
    if list(words) == ["experts"]:
        return list(shape.moe_layers)
    try:
        return list(map(int, words))
    except ValueError:
        raise ConfigError(f"--layers {' '.join(words)}: give numbers from 1, `all`, or `experts`") from None


def from_requests(tensors: Tensors, samples: Sequence[int], layers: Sequence[int], shape: RouteShape) -> RoutePart:
    """Return the routes of requests, of which each is a sample.

    Args:
        tensors: for each sample N tokens.N [S] int64, and routed_experts.N [rows, L, K]: row t is of position t, and
            the last token, which was only generated, has none.
        layers: the global, one-based layer of each column. Columns of dense layers have to be all zeros.

    Raises:
        ConfigError: naming the sample, and the layer.
    """
    stacked = torch.zeros((len(samples), shape.seq_length, len(layers), shape.topk), dtype=torch.int64)
    recorded = numpy.zeros(stacked.shape[:2], bool)
    for place, sample in enumerate(samples):
        routes = _tensor(tensors, f"routed_experts.{sample}")
        if routes.shape[1:] != stacked.shape[2:] or len(routes) > shape.seq_length:
            raise ConfigError(
                f"routed_experts.{sample} is {list(routes.shape)}; with --layers {list(layers)} it has to be "
                f"[at most {shape.seq_length}, {len(layers)}, {shape.topk}]"
            )
        stacked[place, : len(routes)] = routes
        recorded[place, : len(routes)] = True
    return _part(tensors, samples, layers, shape, stacked, recorded)


def from_router_replay(tensors: Tensors, samples: Sequence[int], layers: Sequence[int], shape: RouteShape) -> RoutePart:
    """Return the routes of a micro-batch that Megatron-LM's `RouterReplay.get_recorded_data` returned.

    Args:
        tensors: recorded.I [S x B, K] of the I-th router, in the order [S, B]; tokens.N [S] int64 of each sample N.
        samples: those of the micro-batch, in its order.
        layers: the global, one-based layer of each router: dense layers have none, and prediction layers follow.

    Raises:
        ConfigError: naming the layer.
    """
    rows = shape.seq_length * len(samples)
    stacked = torch.zeros((rows, len(layers), shape.topk), dtype=torch.int64)
    for place in range(len(layers)):
        routes = _tensor(tensors, f"recorded.{place}")
        if routes.shape != (rows, shape.topk):
            raise ConfigError(
                f"recorded.{place}, layer {layers[place]}: is {list(routes.shape)}; {len(samples)} samples of "
                f"{shape.seq_length} tokens with {shape.topk} experts each are [{rows}, {shape.topk}]"
            )
        stacked[:, place] = routes
    if f"recorded.{len(layers)}" in tensors:
        raise ConfigError(f"--layers {list(layers)}: names {len(layers)} routers, and there are more")
    stacked = stacked.view(shape.seq_length, len(samples), len(layers), shape.topk).transpose(0, 1)
    return _part(tensors, samples, layers, shape, stacked, numpy.ones((len(samples), shape.seq_length), bool))


def _part(
    tensors: Tensors,
    samples: Sequence[int],
    layers: Sequence[int],
    shape: RouteShape,
    routes: Tensor,
    recorded: numpy.ndarray,
) -> RoutePart:
    kept: list[int] = []
    for column, layer in enumerate(layers):
        if layer in shape.layers or layer > shape.num_layers:
            kept.append(column)
        elif routes[:, :, column].any():
            raise ConfigError(f"--layers: column {column} is of layer {layer} and has routes, and {shape}")
    hashes = []
    for sample in samples:
        tokens = _tensor(tensors, f"tokens.{sample}").to(torch.int64)
        if tokens.shape != (shape.seq_length,):
            raise ConfigError(f"tokens.{sample} is {list(tokens.shape)}, and --seq-length {shape.seq_length}")
        hashes.append(token_hash(sample, tokens))
    return RoutePart(
        samples=numpy.array(samples, numpy.int64),
        token_hash=numpy.array(hashes, numpy.int64),
        layers=numpy.array(layers, numpy.int64)[kept],
        routes=routes[:, :, kept].numpy(),
        recorded=recorded,
    )


def _tensor(tensors: Tensors, name: str) -> Tensor:
    if name not in tensors:
        raise ConfigError(f"{name}: is not in the file, which has {', '.join(sorted(tensors))}")
    return tensors[name]


def to_requests(path: Path, samples: Sequence[int], layers: Sequence[int], shape: RouteShape) -> dict[str, Tensor]:
    """Return what `from_requests` takes, int32, without the tokens, from files of routes.

    Raises:
        ConfigError: a route is missing before the last one of its sample.
    """
    routes, recorded = _found(path, samples, layers, shape)
    found = {}
    for place, sample in enumerate(samples):
        rows = int(recorded[place].sum())
        if not recorded[place, :rows].all():
            raise ConfigError(f"{path}: sample {sample} has positions without a route between others")
        found[f"routed_experts.{sample}"] = routes[place, :rows].to(torch.int32).contiguous()
    return found


def to_router_replay(path: Path, samples: Sequence[int], layers: Sequence[int], shape: RouteShape) -> dict[str, Tensor]:
    """Return what `from_router_replay` takes, int64, without the tokens: for `RouterReplay.set_replay_data`.

    Raises:
        ConfigError: a route is missing.
    """
    routes, recorded = _found(path, samples, layers, shape)
    if not recorded.all():
        raise ConfigError(f"{path}: has positions without a route, and RouterReplay replays all of a micro-batch")
    in_order = routes.transpose(0, 1).flatten(0, 1)
    return {f"recorded.{place}": in_order[:, place].contiguous() for place in range(len(layers))}


def _found(
    path: Path, samples: Sequence[int], layers: Sequence[int], shape: RouteShape
) -> tuple[Tensor, numpy.ndarray]:
    """Return the routes [N, S, L, K] int64, zeros in dense layers, and where they are recorded, [N, S]."""
    routed = [layer for layer in layers if layer in shape.layers]
    found = RouteFiles(path, shape).take(samples, routed)
    found.require_all(path)
    routes = torch.zeros((len(samples), shape.seq_length, len(layers), shape.topk), dtype=torch.int64)
    for place, layer in enumerate(routed):
        routes[:, :, list(layers).index(layer)] = torch.from_numpy(found.routes[:, :, place]).long()
    return routes, found.recorded.all(axis=2)
