"""Fewer or new experts in a mixture of experts, by the load that was measured on given tokens.

    --prune-experts N    keep each layer's N most loaded experts
    --merge-experts N    add each of the others to the one of these N that it is most like, weighted by load
    --reinit-experts X   draw anew the experts whose load is below X times an even share

With groups of experts (`--moe-router-num-groups`) every group keeps as many. The router's rows and the expert biases
are those of the experts that stay; a merged expert has its most loaded member's. A new expert has a row like those that
a run draws, and the mean of the layer's biases. The loss on the same tokens is measured before and after.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.config import schema
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run
from megatron_moe.io.program import note
from megatron_moe_tools.convert.certificate import Row
from megatron_moe_tools.convert.pipeline import EXPERTS, Block, ConversionSource
from megatron_moe_tools.convert.remade import Recipe, RemadeSource
from megatron_moe_tools.convert.upcycle_plan import require_sound
from megatron_moe_tools.models.experts import Sequences, experts_by_layer, weight_cosines
from megatron_moe_tools.models.load_model import load_model
from megatron_moe_tools.models.source import ModelSource, locate
from megatron_moe_tools.models.trace import trace, working_bytes

_LAYER = re.compile(r"((decoder|mtp)\.layers\.(\d+)\..*)mlp\.(router|experts)\.")
NEW = -1
"""The place of an expert that is drawn anew."""


@dataclass(frozen=True)
class ExpertChange:
    """What becomes of the experts. kind: the flag's first word: prune, merge, reinit. to: its value."""

    kind: str
    to: float
    seed: int = 1234

    @property
    def flag(self) -> str:
        """The flag as it was given."""
        return f"--{self.kind}-experts {self.to:g}"


@dataclass(frozen=True)
class MeasuredLoad:
    """What a model did on some tokens.

    loss: in nats per token. tokens: how many. loads: layer -> choices of each expert [E]; depths of multi-token
    prediction follow the last layer. cosines: layer -> [E, E], of the experts' weights.
    """

    loss: float
    tokens: int
    loads: dict[int, Tensor]
    cosines: dict[int, Tensor]


def measured(source: ModelSource, sequences: Sequences) -> MeasuredLoad:
    """Run a model on tokens. Raises ConfigError: there is not enough memory for it."""
    batch, length = sequences.input_ids.shape
    cosines = weight_cosines(source.blocks(source.run), source.run)
    with load_model(source, working_bytes=working_bytes(source.run, batch, length, False, False)) as found:
        result = trace(found, sequences.input_ids, sequences.lengths, logits=False, routing=True)
    loads = {}
    for layer, one in experts_by_layer(source.run, cosines, result.routing, sequences).items():
        loads[layer] = one.tokens_per_expert.sum(dim=0)
    return MeasuredLoad(float(result.loss), int(sequences.lengths.sum()), loads, cosines)


def require_possible(run: Run, change: ExpertChange, where: str) -> Run:
    """Return the run of the new model. Raises ConfigError: it cannot have so many experts."""
    experts, number = run.moe.num_experts, int(change.to)
    if experts is None:
        raise ConfigError(f"{change.flag}: {where} is a dense model; --upcycle makes experts of it")
    if change.kind == "reinit":
        if not 0 < change.to <= 1:
            raise ConfigError(f"{change.flag}: is a share of an even load, above 0 and up to 1, e.g. 0.05")
        return run
    if not 2 <= number < experts:
        raise ConfigError(f"{change.flag}: {where} has {experts} experts; 2 to {experts - 1} can be left")
    if number < run.moe.moe_router_topk:
        raise ConfigError(f"{change.flag}: a token chooses {run.moe.moe_router_topk} experts, which have to be left")
    groups = run.moe.moe_router_num_groups or 1
    if number % groups:
        raise ConfigError(
            f"{change.flag}: the router has {groups} groups of experts of one size; {-(-number // groups) * groups} "
            "leaves as many in each"
        )
    new = schema.replace(run, num_experts=number)
    require_sound(new)
    return new


Members = tuple[tuple[int, float], ...]
"""The experts that one is made of, with their weights, the most loaded first; none of an expert that is drawn anew."""


def members(change: ExpertChange, load: Tensor, cosine: Tensor, groups: int) -> list[Members]:
    """Return what each expert of the new layer is made of.

    load: [E] int64. cosine: [E, E]. groups: of neighbouring experts, which stay apart.
    """
    experts, found = len(load), list[Members]()
    if change.kind == "reinit":
        least = change.to * float(load.sum()) / experts
        for expert in range(experts):
            found.append(())
            if float(load[expert]) >= least:
                found[-1] = ((expert, 1.0),)
        return found
    each, size = int(change.to) // groups, experts // groups
    for first in range(0, experts, size):
        here = range(first, first + size)
        order = sorted(here, key=lambda expert: (-int(load[expert]), expert))
        kept = sorted(order[:each])
        joined: dict[int, list[int]] = {expert: [expert] for expert in kept}
        if change.kind == "merge":
            for expert in order[each:]:
                joined[max(kept, key=lambda other: float(cosine[expert, other]))].append(expert)
        for expert in kept:
            together = joined[expert]
            shares = load[together].double()
            if not shares.sum():
                shares = torch.ones_like(shares)
            found.append(tuple(zip(together, (shares / shares.sum()).tolist())))
    return found


def _first(made: Sequence[Sequence[Any]]) -> int:
    """Return the expert whose row in the router an expert has; `NEW` for a new one."""
    for expert, _ in made:
        return int(expert)
    return NEW


class ChangedExperts(RemadeSource):
    """A mixture of experts with other experts. Raises ConfigError: it cannot be made as the flags say.

    before: what the source did on the tokens.
    """

    direction: ClassVar[str] = "change of experts"

    def __init__(self, of: ConversionSource, model: ModelSource, change: ExpertChange, sequences: Sequences) -> None:
        if model.run.model.add_bias_linear:
            raise ConfigError(
                f"{change.flag}: --load {of.path} has --add-bias-linear, and biases of experts are not carried over; "
                "only experts without biases can be changed"
            )
        super().__init__(of, model.run)
        new = require_possible(self.old, change, f"--load {of.path}")
        note(f"measuring the experts' load on {int(sequences.lengths.sum())} tokens")
        self.change, self.sequences, self.before = change, sequences, measured(locate(model.path), sequences)
        groups = self.old.moe.moe_router_num_groups or 1
        self.members: dict[int, list[Members]] = {}
        layers = []
        for layer, load in sorted(self.before.loads.items()):
            self.members[layer] = made = members(change, load, self.before.cosines[layer], groups)
            stays = sum(float(load[one[0][0]]) for one in made if one)
            share = stays / max(float(load.sum()), 1.0)
            layers.append({"layer": layer, "load": load.tolist(), "experts": made, "load_that_stays": share})
        if change.kind == "reinit" and all(map(all, self.members.values())):
            raise ConfigError(
                f"{change.flag}: every expert has at least {change.to:g} times an even share on these tokens; there is "
                "nothing to draw anew"
            )
        changed = {"num_experts": new.moe.num_experts}
        facts = {**dataclasses.asdict(change), "tokens": self.before.tokens, "layers": layers}
        self.become(new, changed, facts, self._words_of(layers))

    def _words_of(self, layers: list[dict[str, Any]]) -> str:
        least = min(layer["load_that_stays"] for layer in layers)
        drawn = sum(not one for made in self.members.values() for one in made)
        what = f"{drawn} experts are drawn anew"
        if self.change.kind != "reinit":
            what = f"{self.run_experts} of {self.old.moe.num_experts} experts are left"
        return f"{what}; the experts that stay had {100 * least:.1f} % of a layer's load, at least"

    @property
    def run_experts(self) -> int:
        """Number of experts of a layer of the new model."""
        return len(next(iter(self.members.values())))

    def _of_layer(self, key: str) -> list[Members]:
        found = _LAYER.match(key)
        assert found is not None, "a tensor of the experts is one of a layer"
        return self.members[int(found[3]) + self.old.model.num_layers * (found[2] == "mtp")]

    def recipe(self, block: Block) -> Recipe:
        key, std = block.key, self.run.model.init_method_std
        if key.endswith(EXPERTS):
            made = self._of_layer(key)[block.start[0]]
            if made:
                return Recipe(key, experts=made)
            if key.endswith(EXPERTS[1]):  # as a run draws what is added to the residual stream
                std /= (2.0 * self.run.model.num_layers) ** 0.5
            return Recipe(None, std=std, seed=self.change.seed)
        if ".mlp.router." not in key:
            return Recipe(key)
        rows = tuple(_first(one) for one in self._of_layer(key))
        if key.endswith(".expert_bias"):
            return Recipe(key, rows=rows, mean=True)
        return Recipe(key, rows=rows, std=std * (NEW in rows), seed=self.change.seed)

    def require_coverage(self, rows: list[Row]) -> None:
        """Check that each layer's experts, rows and biases are of the same experts, each used once at most."""
        wrong, layers = list[str](), dict[str, dict[str, list[Any]]]()
        used = set()
        for row in rows:
            key, recipe = row["native"]["key"], row["recipe"]
            used.add(recipe.get("key"))
            if key.endswith(EXPERTS) or ".mlp.router." in key:
                layer, name = key.split("mlp.")
                found = layers.setdefault(layer, {}).setdefault(name, [])
                if "rows" in recipe:
                    found += recipe["rows"]
                else:
                    found.append(recipe.get("experts", []))
        wrong += map("{} is not used".format, sorted(self.dtypes.keys() - used))
        for layer, of in sorted(layers.items()):
            experts = of["experts.weight1"]
            first, every = list(map(_first, experts)), [expert for one in experts for expert, _ in one]
            fewest = {"prune": self.run_experts, "merge": self.old.moe.num_experts}.get(self.change.kind, len(every))
            if len(set(every)) != len(every) or len(every) != fewest:
                wrong.append(f"{layer}mlp.experts: made of experts {every}, each once")
            for name, found in of.items():
                if found not in (first, experts) or name.startswith("experts.") != (found == experts):
                    wrong.append(f"{layer}mlp.{name}: is of experts {found}, the first matrix of {experts}")
        if wrong:
            raise ConfigError(listing(f"--load {self.path}: experts and router are not of the same experts:", wrong))

    def compared(self, output: Path, layers: int | None) -> dict[str, Any]:
        after = measured(locate(output), self.sequences)
        note(
            f"loss {after.loss:.4f} on {after.tokens} tokens, {self.before.loss:.4f} before: "
            f"{after.loss - self.before.loss:+.4f}"
        )
        result = {"tokens": after.tokens, "loss_before": self.before.loss, "loss": after.loss}
        return {**result, "change": after.loss - self.before.loss, "passed": True}
