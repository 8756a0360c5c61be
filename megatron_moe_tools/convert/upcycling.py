"""Upcycling: the source of a mixture of experts that is made of a dense model, and the certificate of its logits.

`upcycle_plan` says how an MLP becomes experts. Here every tensor of the new model has a recipe: the tensors of the
dense model that it is made of, the hidden units that it takes, a factor, and what is drawn. A row of the certificate
has the recipe and the hashes of both sides; what was written is read again and compared with the recipe.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.checkpoint import folder, origin
from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run
from megatron_moe.hf.families import DEEPSEEK, family_of_run
from megatron_moe.hf.folder import CONFIG
from megatron_moe.hf.mapping import mapping
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe.io.program import note
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row
from megatron_moe_tools.convert.native import EMBEDDING, native_state
from megatron_moe_tools.convert.pipeline import Block, ConversionSource, blocks_of, model_words
from megatron_moe_tools.convert.upcycle_plan import UpcycleFlags, require_exact_scale, upcycled_run
from megatron_moe_tools.models.load_model import load_model, one_process, require_memory
from megatron_moe_tools.models.source import locate
from megatron_moe_tools.models.trace import Trace, trace, working_bytes

_MLP = re.compile(r"(.*\.)mlp\.(.*)")
_DEPTH = re.compile(r"mtp\.layers\.\d+\.transformer_layer\.")
_GATE_AND_UP, _DOWN = "linear_fc1.weight", "linear_fc2.weight"
_TOKENS = (4, 64)
"""Number of random sequences, and of tokens of each, whose logits are compared."""


@dataclass(frozen=True)
class Recipe:
    """How a block of the new model is made.

    key: the dense model's tensor; None: of none. units: the first and the last but one hidden unit that are taken of
    it; None: all of the tensor. times: a factor. noise: standard deviation of what is added, relative to the root mean
    square of the rest. std, seed: a normal distribution that the block is drawn from where there is no key, zero: zeros
    or, for norms, ones. repeats: how often each drawn row is there, one after the other.
    """

    key: str | None
    units: tuple[int, int] | None = None
    times: float = 1.0
    noise: float = 0.0
    std: float = 0.0
    constant: float = 0.0
    repeats: int = 1
    seed: int = 0

    def words(self) -> dict[str, Any]:
        """Return the recipe for a row of the certificate, without what does not apply."""
        given = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default and (field.name != "seed" or self.std or self.noise):
                given[field.name] = value
        return given


class UpcycledSource(ConversionSource):
    """A mixture of experts made of a dense model's source. Raises ConfigError: it cannot be made as the flags say.

    dense: the source of the dense model, planned as a native step. run: of the new model. plan: of its experts.
    """

    kind: ClassVar[str] = "dense"
    direction: ClassVar[str] = "upcycling"

    def __init__(self, dense: ConversionSource, run: Run, given: dict[str, Any], flags: UpcycleFlags) -> None:
        super().__init__(dense.path, dense.options)
        where = f"--load {dense.path}"
        self.dense, self._dense_blocks = dense, {}
        for block in dense.step_blocks():
            self._dense_blocks[block.key] = block
        self.config, self.state = dense.step_json()
        precision = {name: bool(self.config.get(name)) for name in ("bf16", "fp16")}
        patterns = self.config.get("keep_fp32")
        run = schema.replace(
            run,
            **precision,
            keep_fp32=None if patterns is None else tuple(patterns),
            padded_vocab_size=dense.shapes[EMBEDDING][0],
        )
        self.run, self.plan = upcycled_run(run, given, flags, where)
        head = f"{where}: its tensors are not those of a dense model of its configuration:"
        certificate.require_shapes(dense.shapes, mapping(run, DEEPSEEK).shapes, head, "upcycling knows no tensor")
        self.shapes = mapping(self.run, DEEPSEEK).shapes
        self._first_fc1 = self._dense_blocks[f"decoder.layers.0.mlp.{_GATE_AND_UP}"]
        self.dtype = dtype_name(self._first_fc1.dtype)
        require_exact_scale(self.plan, self.dtype, self.run.moe.moe_router_topk_scaling_factor)
        self._recipes: dict[tuple[str, Shape], Recipe] = {}
        self._held: tuple[Block, Tensor, Row] | None = None
        self.changed = {**given, "moe_ffn_hidden_size": self.plan.width}
        self.inputs, self.listed = dense.inputs, dense.listed
        self.identity = {**dense.identity, "upcycling": self.plan.facts(), "settings": self.changed}
        for name, among_inputs in dense.companions.items():
            if name.startswith(f"{origin.FOLDER}/") and name != f"{origin.FOLDER}/{CONFIG}":
                self.companions[name] = among_inputs
        self.notes, self.warnings = dense.notes, dense.warnings
        self.notes.append(f"upcycling: {self.plan.words()}")
        family = family_of_run(self.run)
        self.family = None if family is None else family.name
        self.summary = model_words(self.run, self.family or "no family", self.dtype)

    def step_blocks(self) -> list[Block]:
        blocks = []
        for key in sorted(self.shapes):
            for block in blocks_of(key, self.shapes[key], self._dtype(key)):
                self._recipes[block.place] = self._recipe(block)
                blocks.append(block)
        return blocks

    def _dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor: the dense model's, of the MLP for what takes its place."""
        if key.endswith(".expert_bias"):
            return torch.float32
        source = self._source_of(key)
        if source in self._dense_blocks:
            return self._dense_blocks[source].dtype
        found = _MLP.match(source)
        if found is None:
            return self._first_fc1.dtype
        is_down = found[2].endswith(("weight2", _DOWN))
        return self._dense_blocks[f"{found[1]}mlp.{_DOWN if is_down else _GATE_AND_UP}"].dtype

    def _source_of(self, key: str) -> str:
        """Return a tensor's name in the dense model; a depth of prediction that it lacks is made of its last layer."""
        if self.dense_depths:
            return key
        return _DEPTH.sub(f"decoder.layers.{self.run.model.num_layers - 1}.", key)

    @property
    def dense_depths(self) -> int:
        """Number of layers of multi-token prediction that the dense model has."""
        return len([key for key in self._dense_blocks if key.endswith(".eh_proj.weight")])

    def _recipe(self, block: Block) -> Recipe:
        """Return how a block is made."""
        plan, key = self.plan, self._source_of(block.key)
        if key in self._dense_blocks:
            return Recipe(key)
        found = _MLP.match(key)
        if found is None:  # of a depth of prediction, beside its layer
            if key.endswith(".eh_proj.weight"):
                return Recipe(None, std=self.run.model.init_method_std, seed=plan.seed)
            if key.endswith(".final_layernorm.weight"):
                return Recipe("decoder.final_layernorm.weight")
            return Recipe(None, constant=1.0)
        layer, name = found[1], found[2]
        gate_and_up, down = f"{layer}mlp.{_GATE_AND_UP}", f"{layer}mlp.{_DOWN}"
        if name == "router.weight":
            return Recipe(None, std=plan.router_std, repeats=plan.parts, seed=plan.seed)
        if name == "experts.weight1":
            return Recipe(gate_and_up, plan.units(block.start[0]), noise=plan.noise, seed=plan.seed)
        if name == "experts.weight2":
            return Recipe(down, plan.units(block.start[0]), plan.scale, plan.noise, seed=plan.seed)
        if name == f"shared_experts.{_GATE_AND_UP}":
            return Recipe(gate_and_up, (0, plan.shared))
        if name == f"shared_experts.{_DOWN}":
            return Recipe(down, (0, plan.shared), plan.shared_scale)
        return Recipe(None)  # expert_bias, and the gate of the shared expert

    def read(self, block: Block) -> tuple[Tensor, Row]:
        recipe = self._recipes[block.place]
        values, source = self._made(recipe, block)
        row: Row = {"native": certificate.native_entry(block.key, block.start, values), "recipe": recipe.words()}
        if source is not None:
            row["source"] = source["native"]
            if "hf" in source:
                row["source_hf"] = source["hf"]
        return values, row

    def _made(self, recipe: Recipe, block: Block) -> tuple[Tensor, Row | None]:
        """Return a block made by a recipe, and the row of the dense tensor that it was made of."""
        generator = torch.Generator().manual_seed(_seed(recipe.seed, block))
        if recipe.key is None:
            values = torch.full(block.shape, recipe.constant)
            if recipe.std:
                rows = torch.randn(block.shape[0] // recipe.repeats, *block.shape[1:], generator=generator)
                values = (rows * recipe.std).repeat_interleave(recipe.repeats, 0)
            return values.to(block.dtype), None
        dense = dataclasses.replace(self._dense_blocks[recipe.key], dtype=block.dtype)
        if self._held is None or self._held[0] != dense:  # the experts of a layer are made of one tensor
            self._held = (dense, *self.dense.read(dense))
        _, values, row = self._held
        if recipe.units is None:
            return values.view(block.shape), row
        units = slice(*recipe.units)
        if recipe.key.endswith(_GATE_AND_UP):  # [2 F, H]: the gate's rows, then those of up
            values = values.unflatten(0, (2, -1))[:, units]
        else:
            values = values[:, units]
        values = values.reshape(block.shape)
        if recipe.times != 1 or recipe.noise:
            wide = values.float() * recipe.times + 0.0  # which leaves no -0
            if recipe.noise:
                deviation = recipe.noise * float(wide.square().mean().sqrt())
                wide += deviation * torch.randn(wide.shape, generator=generator)
            values = wide.to(block.dtype)
        return values.contiguous(), row

    def require_made_back(self, row: Row, block: Tensor) -> None:
        """Check a block that was read again against its recipe, by the row's own words."""
        native, recipe = row["native"], Recipe(**{"key": None, **row["recipe"]})
        place = (native["key"], tuple(native["start"]))
        again, _ = self._made(recipe, Block(*place, tuple(native["shape"]), getattr(torch, native["dtype"])))
        certificate.require_same(sha256(block), sha256(again), native["key"], "it is not what its recipe makes")

    def require_coverage(self, rows: list[Row]) -> None:
        """Check that every tensor of the dense model was used, and each part of an MLP equally often."""
        units: dict[str, Counter[tuple[int, int]]] = {}
        copied = set()
        for row in rows:
            recipe = row["recipe"]
            if "units" in recipe:
                # A depth that is made of the last layer uses it once more.
                use = f"{recipe['key']} for {row['native']['key'].partition('mlp.')[0]}"
                units.setdefault(use, Counter())[tuple(recipe["units"])] += 1
            copied.add(recipe.get("key"))
        wrong = list(map("{} is not used".format, sorted(self._dense_blocks.keys() - copied)))
        plan = self.plan
        wanted = Counter(map(plan.units, range(plan.parts * plan.copies)))
        if plan.shared:
            wanted[0, plan.shared] += 1
        for use, found in sorted(units.items()):
            covered = [False] * plan.dense_width
            for first, end in found:
                covered[first:end] = [True] * (end - first)
            if found != wanted or set(wanted.values()) - {1, plan.copies, plan.copies + 1} or not all(covered):
                wrong.append(f"{use}: hidden units {dict(found)}, each is to be there {plan.copies} times")
        if wrong:
            raise ConfigError(listing(f"--load {self.path}: not every tensor is used as planned:", wrong))

    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        state = native_state(self.run, self.warnings)
        for name in ("tokenizer", "vocab_size", "padded_vocab_size"):
            state[name] = self.state.get(name, state[name])
        if self.state.get(origin.FOLDER) is not None:
            state[origin.FOLDER] = {"family": self.family}
        positions = {"max_position_embeddings": self.run.derived.max_position_embeddings}
        made_of = {"path": str(self.path), "iteration": self.state.get("iteration"), "plan": self.plan.words()}
        return {**self.config, **self.changed, **positions}, {**state, folder.UPCYCLED: made_of}

    def facts(self) -> dict[str, Any]:
        kept = set(self.shapes) & set(self._dense_blocks)
        return {
            "family": self.family,
            "dtype": self.dtype,
            "iteration": 0,
            "dropped": [],
            "upcycling": {
                **self.plan.facts(),
                "settings": self.changed,
                "moe_layers": list(self.run.derived.moe_layer_pattern),
                "dense_tensors": len(self._dense_blocks),
                "unchanged_tensors": len(kept),
                "experts": sum(shape[0] for key, shape in self.shapes.items() if key.endswith(".experts.weight1")),
            },
        }


def _seed(seed: int, block: Block) -> int:
    """Return the seed of a block's own random numbers."""
    digest = hashlib.sha256(f"{seed} {block.key} {block.start}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


# ---- The certificate.


@dataclass(frozen=True)
class LogitComparison:
    """The logits of a dense model and of the one that was made of it, in fp32 on the same random tokens.

    relative: the largest difference of a token's logits over its largest logit. promised: what it may be at most; None:
    it was only measured.
    """

    sequences: int
    length: int
    layers: int
    difference: float
    relative: float
    relative_of_depths: float | None
    dense_loss: float
    loss: float
    promised: float | None

    @property
    def passed(self) -> bool:
        """Whether the promise, if there is one, is kept."""
        largest = max(self.relative, self.relative_of_depths or 0.0)
        return self.promised is None or largest <= self.promised

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for a certificate."""
        return {**dataclasses.asdict(self), "passed": self.passed}

    def line(self) -> str:
        """Return the comparison in a line."""
        bound = "nothing was promised, with noise" if self.promised is None else f"{self.promised:.0e} is promised"
        return (
            f"{'passed' if self.passed else 'FAILED'}: on {self.sequences} x {self.length} random tokens through "
            f"{self.layers} layers the logits are {self.relative:.1e} from the dense model's, relative to a token's "
            f"largest; {bound}. Loss {self.loss:.6f}, dense {self.dense_loss:.6f}"
        )


def require_memory_to_compare(source: UpcycledSource, layers: int | None) -> None:
    """Check, before anything is written, that either model fits into memory. Raises ConfigError: it does not."""
    total, pattern = source.run.model.num_layers, source.run.derived.moe_layer_pattern
    if layers is not None and not pattern.index(1) < layers <= total:
        raise ConfigError(
            f"--verify-layers {layers}: the model has {total} layers, and layer {pattern.index(1)} is the first with "
            "experts; it has to be among those that are compared"
        )
    run = one_process(source.run, layers=layers)
    require_memory(
        locate(source.path), run, 4, working_bytes(run, *_TOKENS, False), "--verify-layers N compares the first N"
    )


def compare_logits(upcycled: UpcycledSource, output: Path, layers: int | None) -> LogitComparison:
    """Run the dense model and then the output, one at a time in memory. layers: the first so many; None: all.

    Raises ConfigError: a side cannot be opened, or there is not enough memory.
    """
    note("verifying: logits of both models in fp32")
    plan, first, second = upcycled.plan, locate(upcycled.path), locate(output)
    sequences, length = _TOKENS[0], min(_TOKENS[1], first.run.derived.max_position_embeddings)
    generator = torch.Generator().manual_seed(plan.seed)
    tokens = torch.randint(0, first.run.model.vocab_size or 0, (sequences, length), generator=generator)
    traces: list[Trace] = []
    for source in (first, second):
        with load_model(source, layers=layers) as found:
            traces.append(trace(found, tokens))
    before, after = traces
    depths = None
    if before.mtp_logits is not None and after.mtp_logits is not None:
        depths = _relative(before.mtp_logits, after.mtp_logits)
    return LogitComparison(
        sequences=sequences,
        length=length,
        layers=layers or first.run.model.num_layers,
        difference=float((before.logits - after.logits).abs().max()),
        relative=_relative(before.logits, after.logits),
        relative_of_depths=depths,
        dense_loss=float(before.loss),
        loss=float(after.loss),
        promised=plan.promised,
    )


def _relative(wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference of logits [..., V] relative to a token's largest; infinite where one is NaN."""
    apart = (wanted - found).abs().amax(-1) / wanted.abs().amax(-1)
    return float(torch.nan_to_num(apart, nan=torch.inf).max())
