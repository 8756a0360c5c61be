"""Upcycling: a mixture of experts that is made of a dense model, and the certificate of its logits.

`upcycle_plan` says how an MLP becomes experts; here are the recipes of the new model's tensors.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run
from megatron_moe.hf.tensors import dtype_name
from megatron_moe.io.program import note
from megatron_moe_tools.convert.certificate import Row
from megatron_moe_tools.convert.pipeline import Block, ConversionSource
from megatron_moe_tools.convert.remade import DOWN, GATE_AND_UP, Recipe, RemadeSource
from megatron_moe_tools.convert.upcycle_plan import UpcycleFlags, require_exact_scale, upcycled_run
from megatron_moe_tools.models.load_model import load_model, one_process, require_memory
from megatron_moe_tools.models.source import locate
from megatron_moe_tools.models.trace import Trace, trace, working_bytes

_MLP = re.compile(r"(.*\.)mlp\.(.*)")
_DEPTH = re.compile(r"mtp\.layers\.\d+\.transformer_layer\.")
_TOKENS = (4, 64)
"""Number of random sequences, and of tokens of each, whose logits are compared."""


class UpcycledSource(RemadeSource):
    """A mixture of experts made of a dense model's source. Raises ConfigError: it cannot be made as the flags say.

    plan: of its experts.
    """

    direction: ClassVar[str] = "upcycling"

    def __init__(self, of: ConversionSource, run: Run, given: dict[str, Any], flags: UpcycleFlags) -> None:
        super().__init__(of, run)
        run, self.plan = upcycled_run(self.old, given, flags, f"--load {of.path}")
        dtype = dtype_name(self.dtypes[f"decoder.layers.0.mlp.{GATE_AND_UP}"])
        require_exact_scale(self.plan, dtype, run.moe.moe_router_topk_scaling_factor)
        words, pattern = self.plan.words(), list(run.derived.moe_layer_pattern)
        facts = {**self.plan.facts(), "moe_layers": pattern}
        self.become(run, {**given, "moe_ffn_hidden_size": self.plan.width}, facts, words)
        if not self.plan.router_std:
            self.notes.append(
                "--upcycle-router zeros: all scores are equal at first, and all tokens choose the same experts; "
                "balance from the first step, by --moe-router-enable-expert-bias or an auxiliary loss"
            )

    def _source_of(self, key: str) -> str:
        """Return a tensor's name in the dense model; a depth of prediction that it lacks is made of its last layer."""
        if self.old.model.mtp_num_layers:
            return key
        return _DEPTH.sub(f"decoder.layers.{self.run.model.num_layers - 1}.", key)

    def dtype_of(self, key: str) -> torch.dtype:
        source = self._source_of(key)
        if key.endswith(".expert_bias"):
            return torch.float32
        if source in self.dtypes:
            return self.dtypes[source]
        layer = "decoder.layers.0."
        if (found := _MLP.match(source)) is not None:
            layer = found[1]
        if source.endswith(("weight2", DOWN)):
            return self.dtypes[f"{layer}mlp.{DOWN}"]
        return self.dtypes[f"{layer}mlp.{GATE_AND_UP}"]

    def recipe(self, block: Block) -> Recipe:
        plan, key = self.plan, self._source_of(block.key)
        if key in self.dtypes:
            return Recipe(key)
        found = _MLP.match(key)
        if found is None:  # of a depth of prediction, beside its layer
            if key.endswith(".eh_proj.weight"):
                return Recipe(None, std=self.run.model.init_method_std, seed=plan.seed)
            if key.endswith(".final_layernorm.weight"):
                return Recipe("decoder.final_layernorm.weight")
            return Recipe(None, constant=1.0)
        layer, name = found[1], found[2]
        gate_and_up, down = f"{layer}mlp.{GATE_AND_UP}", f"{layer}mlp.{DOWN}"
        if name == "router.weight":
            return Recipe(None, std=plan.router_std, repeats=plan.parts, seed=plan.seed)
        if name == "experts.weight1":
            return Recipe(gate_and_up, units=plan.units(block.start[0]), noise=plan.noise, seed=plan.seed)
        if name == "experts.weight2":
            units = plan.units(block.start[0])
            return Recipe(down, units=units, times=plan.scale, noise=plan.noise, seed=plan.seed)
        if name == f"shared_experts.{GATE_AND_UP}":
            return Recipe(gate_and_up, units=(0, plan.shared))
        if name == f"shared_experts.{DOWN}":
            return Recipe(down, units=(0, plan.shared), times=plan.shared_scale)
        if name in ("router.expert_bias", "shared_experts.gate_weight"):
            return Recipe(None)
        raise ConfigError(f"--upcycle: {block.key}: nothing of a dense model is known that it could be made of")

    def require_coverage(self, rows: list[Row]) -> None:
        """Check that every tensor of the dense model was used, and each part of an MLP equally often."""
        plan, used = self.plan, set()
        units: dict[str, Counter[tuple[int, int]]] = {}
        for row in rows:
            recipe = row["recipe"]
            used.add(recipe.get("key"))
            if "units" in recipe:
                use = f"{recipe['key']} for {row['native']['key'].partition('mlp.')[0]}"
                units.setdefault(use, Counter())[tuple(recipe["units"])] += 1
        wrong = list(map("{} is not used".format, sorted(self.dtypes.keys() - used)))
        wanted = Counter[tuple[int, int]]()
        for expert in range(plan.parts * plan.copies):
            first = plan.units(0)[0] + expert % plan.parts * plan.width
            wanted[first, first + plan.width] += 1
        if plan.shared:
            wanted[0, plan.shared] += 1
        for use, found in sorted(units.items()):
            if found != wanted:
                wrong.append(f"{use}: hidden units {dict(found)}, each is to be there {plan.copies} times")
        if wrong:
            raise ConfigError(listing(f"--load {self.path}: not every tensor is used as planned:", wrong))

    def require_memory(self, layers: int | None) -> None:
        total, first = self.run.model.num_layers, self.run.derived.moe_layer_pattern.index(1)
        if layers is not None and not first < layers <= total:
            raise ConfigError(
                f"--verify-layers {layers}: the model has {total} layers, and layer {first} is the first with experts; "
                "it has to be among those that are compared"
            )
        run, remedy = one_process(self.run, layers=layers), "--verify-layers N compares the first N layers"
        require_memory(locate(self.path), run, 4, working_bytes(run, *_TOKENS, False), remedy)

    def compared(self, output: Path, layers: int | None) -> dict[str, Any]:
        note("verifying: logits of both models in fp32")
        first, second = locate(self.path), locate(output)
        sequences, length = _TOKENS[0], min(_TOKENS[1], first.run.derived.max_position_embeddings)
        generator = torch.Generator().manual_seed(self.plan.seed)
        tokens = torch.randint(0, first.run.model.vocab_size or 0, (sequences, length), generator=generator)
        traces: list[Trace] = []
        for source in (first, second):  # one at a time in memory
            with load_model(source, layers=layers) as found:
                traces.append(trace(found, tokens))
        before, after = traces
        depths = None
        if before.mtp_logits is not None and after.mtp_logits is not None:
            depths = _relative(before.mtp_logits, after.mtp_logits)
        result = LogitComparison(
            sequences=sequences,
            length=length,
            layers=layers or first.run.model.num_layers,
            difference=float((before.logits - after.logits).abs().max()),
            relative=_relative(before.logits, after.logits),
            relative_of_depths=depths,
            dense_loss=float(before.loss),
            loss=float(after.loss),
            promised=self.plan.promised,
        )
        note(result.line())
        return {**dataclasses.asdict(result), "passed": result.passed}


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

    def line(self) -> str:
        """Return the comparison in a line."""
        bound, outcome = "nothing was promised, with noise", "FAILED"
        if self.promised is not None:
            bound = f"{self.promised:.0e} is promised"
        if self.passed:
            outcome = "passed"
        return (
            f"{outcome}: on {self.sequences} x {self.length} random tokens through "
            f"{self.layers} layers the logits are {self.relative:.1e} from the dense model's, relative to a token's "
            f"largest; {bound}. Loss {self.loss:.6f}, dense {self.dense_loss:.6f}"
        )


def _relative(wanted: Tensor, found: Tensor) -> float:
    """Return the largest difference of logits [..., V] relative to a token's largest; infinite where one is NaN."""
    apart = (wanted - found).abs().amax(-1) / wanted.abs().amax(-1)
    return float(torch.nan_to_num(apart, nan=torch.inf).max())
