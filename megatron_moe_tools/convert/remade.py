"""Models that are made of another model's tensors by recipes: upcycled ones, and those with other experts.

Every block of the new model has a recipe: the tensors that it is made of, the experts, hidden units or rows that it
takes of them, a factor, and what is drawn. A row of the certificate has the recipe and the hashes of both sides. What
was written is read again and compared with what its row's recipe makes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.checkpoint import folder, origin
from megatron_moe.config import schema
from megatron_moe.config.schema import Run
from megatron_moe.hf.config import family_of_run
from megatron_moe.hf.family import DEEPSEEK
from megatron_moe.hf.folder import CONFIG
from megatron_moe.hf.mapping import mapping
from megatron_moe.hf.tensors import dtype_name, sha256
from megatron_moe.hf.transforms import Shape
from megatron_moe_tools.convert import certificate
from megatron_moe_tools.convert.certificate import Row
from megatron_moe_tools.convert.native import EMBEDDING, native_state
from megatron_moe_tools.convert.pipeline import EXPERTS, Block, ConversionSource, blocks_of, model_words

GATE_AND_UP, DOWN = "linear_fc1.weight", "linear_fc2.weight"
Place = tuple[str, Shape]


@dataclass(frozen=True)
class Recipe:
    """How a block of the new model is made.

    key: the source's tensor; None: of none. experts: for a tensor with a block per expert, the source's experts and
    their weights in the sum. units: the first hidden unit that is taken, and the one after the last; None: all. rows:
    the rows that are taken of a tensor, -1 for one that is new; None: all. times: a factor.

    noise: standard deviation of what is added, relative to the root mean square of the rest. std: standard deviation
    of what is drawn where there is no key, or for new rows; repeats: how often each drawn row is there, one after the
    other. constant: what is neither made of the source nor drawn. mean: new rows are the mean of the others. seed: of
    what is drawn.
    """

    key: str | None
    experts: tuple[tuple[int, float], ...] = ()
    units: tuple[int, int] | None = None
    rows: tuple[int, ...] | None = None
    times: float = 1.0
    noise: float = 0.0
    std: float = 0.0
    repeats: int = 1
    constant: float = 0.0
    mean: bool = False
    seed: int = 0

    def words(self) -> dict[str, Any]:
        """Return the recipe for a row of the certificate, without what does not apply."""
        given = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default and (field.name != "seed" or self.std or self.noise):
                given[field.name] = value
        return given

    @classmethod
    def of_words(cls, words: dict[str, Any]) -> Recipe:
        """Return the recipe of a row."""
        given: dict[str, Any] = {"key": None}
        for name, value in words.items():
            given[name] = tuple(value) if isinstance(value, list) else value
        return cls(**given)


class RemadeSource(ConversionSource):
    """A model that is made of another source's tensors. Raises ConfigError: they are not those of its configuration.

    of: the source that it is made of, planned as a native step. old, run: the settings of both models.
    """

    kind: ClassVar[str] = "remade"
    direction: ClassVar[str]
    run: Run

    def __init__(self, of: ConversionSource, run: Run) -> None:
        super().__init__(of.path, of.options)
        self.of, self.dtypes, blocks = of, dict[str, torch.dtype](), of.step_blocks()
        for block in blocks:
            self.dtypes[block.key] = block.dtype
        self._held: tuple[Block, Tensor, Row] | None = None
        self._recipes: dict[Place, Recipe] = {}
        self.config, self.state = of.step_json()
        precision = {name: bool(self.config.get(name)) for name in ("bf16", "fp16")}
        patterns = self.config.get("keep_fp32")
        self.old = schema.replace(
            run,
            **precision,
            keep_fp32=None if patterns is None else tuple(patterns),
            padded_vocab_size=of.shapes[EMBEDDING][0],
        )
        head = f"--load {of.path}: its tensors are not those of its configuration:"
        certificate.require_shapes(of.shapes, mapping(self.old, DEEPSEEK).shapes, head, "not known here")
        self.inputs, self.listed = of.inputs, of.listed
        self.notes, self.warnings = of.notes, of.warnings
        for name, among_inputs in of.companions.items():
            if name.startswith(f"{origin.FOLDER}/") and name != f"{origin.FOLDER}/{CONFIG}":
                self.companions[name] = among_inputs

    def become(self, run: Run, changed: dict[str, Any], plan: dict[str, Any], words: str) -> None:
        """Take the settings of the new model. changed: those that differ, by field. plan, words: what is made."""
        self.run, self.changed, self._plan, self._words = run, changed, plan, words
        self.shapes = mapping(run, DEEPSEEK).shapes
        self.identity = {**self.of.identity, self.direction: plan, "settings": changed}
        family = family_of_run(run)
        self.family = None if family is None else family.name
        self.dtype = dtype_name(self.dtypes[f"decoder.layers.0.self_attention.{_PROJECTION}"])
        self.summary = model_words(run, self.family or "no family", self.dtype)
        self.notes.append(f"{self.direction}: {words}")

    def require_memory(self, layers: int | None) -> None:
        """Check that each model, cut to so many layers, fits into memory. Raises ConfigError: it does not."""
        return

    @abstractmethod
    def compared(self, output: Path, layers: int | None) -> dict[str, Any]:
        """Return how the output differs from the source, for the certificate, with `passed`, and say it."""

    @abstractmethod
    def recipe(self, block: Block) -> Recipe:
        """Return how a block of the new model is made."""

    def dtype_of(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor of the new model."""
        return self.dtypes[key]

    def step_blocks(self) -> list[Block]:
        blocks = []
        for key in sorted(self.shapes):
            for block in blocks_of(key, self.shapes[key], self.dtype_of(key)):
                self._recipes[block.place] = self.recipe(block)
                blocks.append(block)
        return blocks

    def read(self, block: Block) -> tuple[Tensor, Row]:
        recipe = self._recipes[block.place]
        sources: list[Row] = []
        values = self._made(recipe, block, sources)
        row = {"native": certificate.native_entry(block.key, block.start, values), "recipe": recipe.words()}
        return values, {**row, "sources": sources}

    def _made(self, recipe: Recipe, block: Block, sources: list[Row]) -> Tensor:
        """Return a block made by a recipe; append what it was made of to the sources."""
        generator = torch.Generator().manual_seed(_seed(recipe.seed, block))
        if recipe.key is None:
            values = torch.full(block.shape, recipe.constant)
            if recipe.std:
                drawn = torch.randn(block.shape[0] // recipe.repeats, *block.shape[1:], generator=generator)
                values = (drawn * recipe.std).repeat_interleave(recipe.repeats, 0)
            return values.to(block.dtype)
        if recipe.experts:
            values = self._sum(recipe, block, sources)
        else:
            values = self._taken(recipe.key, None, block.dtype, sources)
        if recipe.rows is not None:
            rows = torch.tensor(recipe.rows)
            taken = values[rows.clamp(min=0)]
            if recipe.mean:
                taken[rows < 0] = taken[rows >= 0].mean()
            elif recipe.std:
                drawn = recipe.std * torch.randn(taken.shape, generator=generator)
                taken[rows < 0] = drawn[rows < 0].to(taken.dtype)
            values = taken
        if recipe.units is not None:
            if recipe.key.endswith(GATE_AND_UP):  # [2 F, H]: the gate's rows, then those of up
                values = values.unflatten(0, (2, -1))
            values = values[:, slice(*recipe.units)]
        values = values.reshape(block.shape)
        if recipe.times != 1 or recipe.noise:
            wide = values.float() * recipe.times + 0.0  # which leaves no -0
            if recipe.noise:
                deviation = recipe.noise * float(wide.square().mean().sqrt())
                wide += deviation * torch.randn(wide.shape, generator=generator)
            values = wide.to(block.dtype)
        return values.contiguous()

    def _sum(self, recipe: Recipe, block: Block, sources: list[Row]) -> Tensor:
        """Return the weighted sum of experts, in fp64 where there are several."""
        assert recipe.key is not None
        if recipe.experts[0][1] == 1 and len(recipe.experts) == 1:
            return self._taken(recipe.key, recipe.experts[0][0], block.dtype, sources)
        total = torch.zeros(block.shape, dtype=torch.float64)
        for expert, weight in recipe.experts:
            total += weight * self._taken(recipe.key, expert, block.dtype, sources).double()
        return total.to(block.dtype)

    def _taken(self, key: str, expert: int | None, dtype: torch.dtype, sources: list[Row]) -> Tensor:
        """Return a tensor of the source, or the block of one of its experts."""
        shape = self.of.shapes[key]
        start = (expert or 0, *(0,) * (len(shape) - 1))
        block = Block(key, start, shape if expert is None else (1, *shape[1:]), dtype)
        if self._held is None or self._held[0] != block:  # the experts of a layer may be made of one tensor
            self._held = (block, *self.of.read(block))
        row = self._held[2]
        sources.append({**row["native"], "hf": row["hf"]} if "hf" in row else row["native"])
        return self._held[1]

    def require_made_back(self, row: Row, block: Tensor) -> None:
        """Check a block that was read again against what its row says that it is."""
        native = row["native"]
        place = (native["key"], tuple(native["start"]), tuple(native["shape"]), getattr(torch, native["dtype"]))
        again = self._made(Recipe.of_words(row["recipe"]), Block(*place), [])
        certificate.require_same(sha256(block), sha256(again), native["key"], "it is not what its recipe makes")

    def step_json(self) -> tuple[dict[str, Any], dict[str, Any]]:
        state = native_state(self.run, self.warnings)
        for name in ("tokenizer", "vocab_size", "padded_vocab_size"):
            state[name] = self.state.get(name, state[name])
        if self.state.get(origin.FOLDER) is not None:
            state[origin.FOLDER] = {"family": self.family}
        made = {"by": self.direction, "of": str(self.path), "iteration": self.state.get("iteration", 0)}
        positions = {"max_position_embeddings": self.run.derived.max_position_embeddings}
        return {**self.config, **self.changed, **positions}, {**state, folder.MADE: {**made, "plan": self._words}}

    def facts(self) -> dict[str, Any]:
        experts = 0
        for key, shape in self.shapes.items():
            experts += shape[0] * key.endswith(EXPERTS[0])
        counts = {"source_tensors": len(self.of.shapes), "experts": experts, "settings": self.changed}
        about: dict[str, Any] = {"family": self.family, "dtype": self.dtype, "iteration": 0, "dropped": []}
        return {**about, self.direction: {**self._plan, **counts}}


_PROJECTION = "linear_proj.weight"
"""A tensor of every attention, whose dtype is the model's."""


def _seed(seed: int, block: Block) -> int:
    """Return the seed of a block's own random numbers."""
    digest = hashlib.sha256(f"{seed} {block.key} {block.start}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
