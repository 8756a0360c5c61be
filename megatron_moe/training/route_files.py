"""Files of routes: the experts of samples' tokens, bound to samples, layers and tokens. No torch.

The page `docs/reference/routes.md` describes the format. A file says which model its routes are of, and a reader
compares that with its own: what does not match is an error that names both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
from numpy import ndarray

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run
from megatron_moe.hf.safetensors_file import FormatError, Header, StreamedFile, read_header
from megatron_moe.io.files import canonical_json, written_aside

if TYPE_CHECKING:
    from megatron_moe.platform.protocols import EngineConfig

FORMAT, VERSION = "megatron-moe routes", "1"


@dataclass(frozen=True)
class RouteShape:
    """What routes and the model that replays them have to agree on.

    moe_layers: global, one-based numbers of the decoder's layers with experts; the dense ones are counted too.
    mtp_layers: numbers of the layers of multi-token prediction with experts, from num_layers + 1.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    num_experts: int
    topk: int
    seq_length: int

    @classmethod
    def _of(cls, pattern: Sequence[int], depths: int | None, experts: int | None, topk: int, length: int) -> RouteShape:
        count = len(pattern)
        moe_layers = tuple(number for number, is_moe in enumerate(pattern, start=1) if is_moe)
        mtp_layers = tuple(range(count + 1, count + 1 + (depths or 0) * pattern[-1]))  # of the last layer's kind
        return cls(count, moe_layers, mtp_layers, experts or 0, topk, length)

    @classmethod
    def from_run(cls, run: Run) -> RouteShape:
        """Read it from a run that has passed `config.rules.check`."""
        pattern, moe = run.derived.moe_layer_pattern, run.moe
        return cls._of(pattern, run.model.mtp_num_layers, moe.num_experts, moe.moe_router_topk, run.model.seq_length)

    @classmethod
    def from_engine_config(cls, config: EngineConfig, seq_length: int) -> RouteShape:
        """Read it from megatron-core's TransformerConfig."""
        pattern = config.moe_layer_freq
        if isinstance(pattern, int):
            pattern = [int(layer % pattern == 0) for layer in range(config.num_layers)]
        return cls._of(pattern, config.mtp_num_layers, config.num_moe_experts, config.moe_router_topk, seq_length)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers with routes."""
        return self.moe_layers + self.mtp_layers

    def __str__(self) -> str:
        text = f"of {self.num_layers} layers, counted from 1, {list(self.moe_layers)} have experts"
        return f"{text}, and {list(self.mtp_layers)} predict further tokens" if self.mtp_layers else text


@dataclass
class RoutePart:
    """The routes of N samples in L layers.

    samples: [N] int64, numbers in the run's order. token_hash: [N] int64, `data.batches.token_hash` of each. layers:
    [L] int64, global numbers. routes: [N, S, L, K], K different experts, in the order in which their outputs are added.
    recorded: [N, S] bool, False for positions without a route, such as padding.
    """

    samples: ndarray
    token_hash: ndarray
    layers: ndarray
    routes: ndarray
    recorded: ndarray

    def check(self, where: str, shape: RouteShape) -> None:
        """Require what the docstring says.

        Raises:
            ConfigError: naming layer, sample and position.
        """
        for layer in self.layers.tolist():
            if layer not in shape.layers:
                raise ConfigError(f"{where}: has routes of layer {layer}, and {shape}")
        for name, numbers in (("layer", self.layers), ("sample", self.samples)):
            found, count = numpy.unique(numbers, return_counts=True)
            if (count > 1).any():
                raise ConfigError(f"{where}: has {name} {found[count > 1][0]} more than once")
        wanted = (len(self.samples), shape.seq_length, len(self.layers), shape.topk)
        if self.routes.shape != wanted or self.recorded.shape != wanted[:2] or self.token_hash.shape != wanted[:1]:
            raise ConfigError(
                f"{where}: routes are {list(self.routes.shape)} and recorded {list(self.recorded.shape)}; [samples, "
                f"--seq-length, layers, --moe-router-topk] are {list(wanted)}"
            )
        ordered = numpy.sort(self.routes, axis=-1)
        wrong = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        wrong |= (ordered[..., 0] < 0) | (ordered[..., -1] >= shape.num_experts)
        wrong &= self.recorded[:, :, None]
        if wrong.any():
            sample, position, layer = numpy.argwhere(wrong)[0]
            raise ConfigError(
                f"{where}: layer {self.layers[layer]}, sample {self.samples[sample]}, position {position} goes to "
                f"experts {self.routes[sample, position, layer].tolist()}; a token has {shape.topk} different ones, "
                f"from 0 to {shape.num_experts - 1}"
            )


def write_part(path: Path, shape: RouteShape, part: RoutePart) -> None:
    """Write a file of routes, at once: a reader sees all of it, or none.

    Raises:
        ConfigError: the routes are not those of a model of this shape.
    """
    part.check(str(path), shape)
    arrays = {name: numpy.ascontiguousarray(value) for name, value in vars(part).items()}
    arrays["routes"] = arrays["routes"].astype(numpy.min_scalar_type(shape.num_experts - 1))
    metadata = {"format": FORMAT, "version": VERSION, **_stored(shape)}
    metadata["sha256"] = _content_hash(metadata, arrays)
    layout = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside, StreamedFile(aside, layout, metadata) as file:
        for name, array in arrays.items():
            file.write(name, array)


def read_part(path: Path, shape: RouteShape) -> RoutePart:
    """Read and check a whole file.

    Raises:
        ConfigError: it is damaged, no file of routes, or another model's.
    """
    header = _header(path, shape)
    arrays = {name: _array(path, header, name) for name in header.tensors}
    if _content_hash(header.metadata, arrays) != header.metadata.get("sha256"):
        raise FormatError(f"{path}: its content is not what was written (SHA-256); take another copy of the file")
    part = RoutePart(**arrays)
    part.check(str(path), shape)
    return part


def _stored(shape: RouteShape) -> dict[str, str]:
    return {name: json.dumps(value) for name, value in asdict(shape).items()}


def _content_hash(metadata: Mapping[str, str], arrays: Mapping[str, ndarray]) -> str:
    """Return the SHA-256 of the metadata, but for itself, and of all tensors by name."""
    hashed = hashlib.sha256(canonical_json({**metadata, "sha256": ""}))
    for name in sorted(arrays):
        hashed.update(f"{name} {arrays[name].dtype.name} {arrays[name].shape}".encode())
        hashed.update(arrays[name].tobytes())
    return hashed.hexdigest()


def _header(path: Path, shape: RouteShape) -> Header:
    header = read_header(path)
    there = header.metadata
    names = set(RoutePart.__dataclass_fields__)
    if there.get("format") != FORMAT or there.get("version") != VERSION or set(header.tensors) != names:
        raise FormatError(f"{path}: is no file of routes of version {VERSION}; see docs/reference/routes.md")
    differing = []
    for name, here in _stored(shape).items():
        if there.get(name) != here:
            differing.append(f"{name} is {there.get(name)} there and {here} here")
    if differing:
        raise ConfigError(f"{path}: its routes are another model's: {', '.join(differing)}")
    return header


def _array(path: Path, header: Header, name: str) -> ndarray:
    found = header.tensors[name]
    with open(path, "rb") as file:
        file.seek(found.begin)
        data = file.read(found.end - found.begin)
    return numpy.frombuffer(data, dtype=found.dtype).reshape(found.shape)


class FoundRoutes:
    """The routes of N samples for L layers, put together from files.

    routes: [N, S, L, K] int16, `K different experts` where none is recorded. recorded: [N, S, L] bool. token_hash: of
    the samples that any file has. origin: the file of each sample and layer.
    """

    def __init__(self, samples: Sequence[int], layers: Sequence[int], shape: RouteShape) -> None:
        self.samples = dict(zip(samples, range(len(samples))))
        self.layers = dict(zip(layers, range(len(layers))))
        self.recorded = numpy.zeros((len(samples), shape.seq_length, len(layers)), bool)
        self.routes = numpy.zeros((*self.recorded.shape, shape.topk), numpy.int16)
        self.routes[...] = numpy.arange(shape.topk)
        self.token_hash: dict[int, int] = {}
        self.origin: dict[tuple[int, int], Path] = {}

    def add(self, part: RoutePart, file: Path) -> None:
        """Add what a file has of the samples and layers.

        Raises:
            ConfigError: another file has the same, or other tokens.
        """
        for row, sample in enumerate(part.samples.tolist()):
            if sample not in self.samples:
                continue
            own_hash = int(part.token_hash[row])
            if self.token_hash.setdefault(sample, own_hash) != own_hash:
                raise ConfigError(f"{file}: sample {sample} has other tokens than in another file of the folder")
            place, known = self.samples[sample], part.recorded[row]
            for column, layer in enumerate(part.layers.tolist()):
                if (sample, layer) in self.origin:
                    raise ConfigError(
                        f"{file}: layer {layer} of sample {sample} is in {self.origin[sample, layer]} too; remove one"
                    )
                self.origin[sample, layer] = file
                if layer in self.layers:
                    self.recorded[place, :, self.layers[layer]] = known
                    self.routes[place, known, self.layers[layer]] = part.routes[row, known, column]

    def require_all(self, where: Path) -> None:
        """Require a route of every sample in every layer.

        Raises:
            ConfigError: naming the first that is missing, and what is there.
        """
        for sample in self.samples:
            there = [layer for of_sample, layer in self.origin if of_sample == sample]
            for layer in self.layers:
                if layer not in there:
                    others = f"layers {sorted(there)} of it are" if there else "nothing of it is"
                    raise ConfigError(
                        f"--moe-enable-routing-replay {where}: layer {layer} of sample {sample} is not recorded, "
                        f"{others}; --moe-routing-replay-missing live lets the gate choose"
                    )


class RouteFiles:
    """The files of routes at a path, a folder or one file, found by their headers, whatever their layout.

    A folder is looked through again when a sample is missing, so that files may be added during a run.
    """

    def __init__(self, path: Path, shape: RouteShape) -> None:
        """Read the headers.

        Raises:
            ConfigError: nothing is there, or a file of another model.
        """
        self.path, self.shape = path, shape
        self._of_sample: defaultdict[int, list[Path]] = defaultdict(list)
        self._layers: dict[Path, set[int]] = {}
        self._parts: dict[Path, RoutePart] = {}
        self._look()
        if not self._layers:
            raise ConfigError(
                f"--moe-enable-routing-replay {path}: there are no routes; name what --moe-routing-trace-path wrote"
                " (Megatron-LM's flag takes no path: a program hands routes to it)"
            )

    def _look(self) -> None:
        files = [self.path] if self.path.is_file() else sorted(self.path.rglob("*.safetensors"))
        for file in files:
            if file not in self._layers:
                header = _header(file, self.shape)
                for sample in _array(file, header, "samples").tolist():
                    self._of_sample[sample].append(file)
                self._layers[file] = set(_array(file, header, "layers").tolist())

    def take(self, samples: Sequence[int], layers: Sequence[int]) -> FoundRoutes:
        """Return the routes of some samples in some layers, as far as they are there.

        Raises:
            ConfigError: a file is damaged, or contradicts another.
        """
        if not self._of_sample.keys() >= set(samples):
            self._look()
        files: set[Path] = set()
        for sample in samples:
            files.update(self._of_sample.get(sample, ()))
        found, kept = FoundRoutes(samples, layers, self.shape), self._parts
        self._parts = {}  # a file may have the samples of several steps
        for file in sorted(files):
            if self._layers[file] & set(layers):
                self._parts[file] = kept.get(file) or read_part(file, self.shape)
                found.add(self._parts[file], file)
        return found
