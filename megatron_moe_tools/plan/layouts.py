"""The layouts among which a plan looks for the fastest that fits, and how each is typed. Loads no torch.

Searched are tensor, pipeline, expert and expert-tensor parallelism, the layers and the virtual stages of each pipeline
rank, the ZeRO stage, the offload of moments and of activations, and recomputation: none of them changes what is
computed. A field that the user has set is not searched; neither are batch, micro-batch, context parallelism, precision
and the optimizer's dtypes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.pipeline_layout import Stage
from megatron_moe.config.rules import training
from megatron_moe.config.rules.rule import is_set
from megatron_moe.config.schema import Run, replace
from megatron_moe_tools.plan.neighbours import Machine, legal

_SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_OFFLOAD = ("fine_grained_activation_offloading", "offload_modules")
_ZERO = ("data_parallel_sharding_strategy", "use_torch_fsdp2", "use_distributed_optimizer")
_SEARCHED = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    *_SPLIT,
    *_ZERO,
    "optimizer_cpu_offload",
    *_RECOMPUTATION,
    *_OFFLOAD,
)
_VIRTUAL_SIZES = (1, 2, 3, 4, 6, 8)

UNSPLIT: dict[str, Any] = {name: all_fields()[name].default for name in _SPLIT}
"""What says that the layers are split evenly, without virtual stages."""
UNSHARDED: dict[str, Any] = {
    "use_torch_fsdp2": False,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": None,
    "zero_hpz_partition_size": None,
}
"""What says that there is nothing of ZeRO's stages 2 and 3."""

SEPARATE: dict[str, Any] = {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False}
"""What says that micro-batches do not overlap."""

Modules = tuple[str, ...] | None
"""Recomputed modules, and offloaded ones, whose names begin with `TO_HOST`; None: those that the user has set."""
FULL = ("full",)
"""What stands for the recomputation of whole layers among the sets of modules."""
TO_HOST = "offload:"
_RUNGS = (("core_attn", "attn_proj"), ("moe_act",), ("expert_fc1",), ("qkv_linear", "attn_norm", "mlp_norm"))
"""Offloaded modules, in the order in which they are added: what a byte takes is the same for all."""


def fixed_fields(run: Run) -> set[str]:
    """Return the searched fields that the command line or a file has set; a preset's ZeRO stage is no one's choice."""
    of_preset = {"use_distributed_optimizer"}
    return {
        name
        for name in _SEARCHED
        if name in run.explicit or name in run.sources or (name not in of_preset and is_set(run, name))
    }


def recompute_is_fixed(run: Run) -> bool:
    """Return whether the user has said what is recomputed."""
    return bool(fixed_fields(run) & set(_RECOMPUTATION))


def with_batch(run: Run, world_size: int) -> Run:
    """Return `run` with the global batch that it would take as it is, so that all layouts train on the same one."""
    if run.training.global_batch_size is not None:
        return run
    return replace(run, global_batch_size=max(1, run.derived.global_batch_size(world_size)))


@dataclass(frozen=True, eq=False)
class Width:
    """How layers are cut, whichever they are: TP, expert-TP and EP, with the fields that say so."""

    tp: int
    etp: int
    ep: int
    changes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class SearchedLayout:
    """A layout without its recomputation.

    stages: of the pipeline, virtual ones too. zero: its ZeRO stage. changes: the fields that say all of it.
    """

    width: Width
    pp: int
    stages: tuple[Stage, ...]
    zero: int
    offload: bool
    changes: dict[str, Any]

    def run(self, base: Run, modules: Modules) -> Run:
        """Return `base` in this layout, with other recomputed and offloaded modules; None: with its own."""
        return replace(base, **self.changes, **({} if modules is None else recomputing(modules)))


def recomputing(modules: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that recompute some modules, `FULL` or nothing, and offload those that are to be."""
    found: dict[str, Any] = dict.fromkeys(_RECOMPUTATION)
    recomputed, offloaded = divided(modules)
    if modules == FULL:
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recomputed:
        found |= {"recompute_granularity": "selective", "recompute_modules": recomputed}
    if offloaded:
        found |= {"fine_grained_activation_offloading": True, "offload_modules": offloaded}
    return found


def divided(modules: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the recomputed and the offloaded ones of some modules, by their names."""
    recomputed = tuple(name for name in modules if not name.startswith(TO_HOST))
    return recomputed, tuple(name.removeprefix(TO_HOST) for name in modules if name.startswith(TO_HOST))


def single_modules(run: Run) -> list[str]:
    """Return the modules of the model that can be recomputed on their own."""
    return [name for name in all_fields()["recompute_modules"].choices or () if _exists(run, (name,))]


def offloadable(run: Run, machine: Machine) -> list[tuple[str, ...]]:
    """Return modules that may be offloaded, some at a time; none on a CPU, and where the user has said which are."""
    if machine.device == "cpu" or fixed_fields(run) & set(_OFFLOAD) or run.moe.overlap_moe_expert_parallel_comm:
        return []
    rungs = [tuple(TO_HOST + name for name in rung) for rung in _RUNGS]
    return [rung for rung in rungs if _exists(run, rung)]


def _exists(run: Run, modules: tuple[str, ...]) -> bool:
    """Return whether the model has these modules, and keeps them."""
    try:
        changed = replace(run, **recomputing(modules))
        for rule in (
            training.recomputed_modules_exist,
            training.offloaded_modules_exist,
            training.offloaded_products_keep_their_input,
            training.recomputed_modules_do_not_nest,
            training.offloaded_modules_are_kept,
        ):
            rule(changed, 1)
    except ConfigError:
        return False
    return True


def module_sets(run: Run, modules: Sequence[str], rungs: Sequence[tuple[str, ...]] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the sets of recomputed modules that do not nest, nothing first, each with more and more offloaded; `FULL`.

    rungs: see `offloadable`; of each what the recomputed modules leave.
    """
    for count in range(len(modules) + 1):
        for chosen in itertools.combinations(modules, count):
            if not _exists(run, chosen):
                continue
            yield chosen
            for rung in rungs:
                more = chosen
                for name in rung:
                    more = (*more, name) if _exists(run, (*more, name)) else more
                if more != chosen:
                    chosen = more
                    yield chosen
    yield FULL


_ALONE: dict[str, Any] = {
    **UNSPLIT,
    **recomputing(()),
    "pipeline_model_parallel_size": 1,
    "global_batch_size": None,
    "rampup_batch_size": None,
    **SEPARATE,
}
"""What leaves of a layout how layers are cut."""


def widths(run: Run, world_size: int, machine: Machine) -> list[Width]:
    """Return the ways to cut layers that the rules allow; TP stays on a machine."""
    fixed, p = fixed_fields(run), run.parallel
    sizes = [p.tensor_model_parallel_size]
    if "tensor_model_parallel_size" not in fixed:
        sizes = [tp for tp in _divisors(machine.gpus_per_node) if world_size % (tp * p.context_parallel_size) == 0]
    found = []
    for tp in sizes:
        for etp, ep in _expert_widths(run, fixed, world_size, tp):
            changes: dict[str, Any] = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep}
            changes["expert_tensor_parallel_size"] = None if etp == tp else etp
            if "sequence_parallel" not in fixed:
                changes["sequence_parallel"] = tp > 1
            if "expert_tensor_parallel_size" in fixed:
                del changes["expert_tensor_parallel_size"]
            if legal(replace(run, **changes, **_ALONE), math.lcm(tp * p.context_parallel_size, etp * ep)):
                found.append(Width(tp, etp, ep, changes))
    return found


def _expert_widths(run: Run, fixed: set[str], world_size: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield (expert-TP, EP) next to a TP."""
    p, experts = run.parallel, run.moe.num_experts
    etps = sorted({tp, 1})
    if "expert_tensor_parallel_size" in fixed:
        etps = [p.expert_tensor_parallel_size or tp]
    elif experts is None:
        etps = [tp]
    for etp in etps:
        eps = [1] if experts is None else _divisors(experts)
        if "expert_model_parallel_size" in fixed:
            eps = [p.expert_model_parallel_size]
        for ep in eps:
            if world_size % (ep * etp) == 0:
                yield etp, ep


def require_a_layout(run: Run, world_size: int, machine: Machine) -> None:
    """Refuse flags that leave no layout to search.

    Raises:
        ConfigError: from the rule that the flags break as they are, or about the ranks and the batch.
    """
    if next(layouts(run, world_size, machine, widths(run, world_size, machine), 1.0), None) is None:
        raise no_layout(run, world_size)


def no_layout(run: Run, world_size: int) -> ConfigError:
    """Return the error where the rules allow no layout; a rule that the flags break as they are says more."""
    rules.check_layout(run, world_size)
    return ConfigError(
        f"--world-size {world_size}, --global-batch-size {run.training.global_batch_size}: the rules allow no layout of"
        " these ranks with the flags that are given; give fewer of them, or another batch"
    )


def layouts(
    run: Run, world_size: int, machine: Machine, found_widths: Sequence[Width], head: float
) -> Iterator[SearchedLayout]:
    """Yield the layouts of a run with a batch; those that a rule refuses are among them.

    Args:
        found_widths: from `widths`.
        head: time of the output layer, and of multi-token prediction, over that of a layer.
    """
    fixed = fixed_fields(run)
    one_batch = run.training.micro_batch_size
    splits = list(_splits(run, fixed, world_size, head))
    for width in found_widths:
        for pp, stages, split in splits:
            model_ranks = width.tp * pp * run.parallel.context_parallel_size
            if world_size % model_ranks or world_size % (width.ep * width.etp * pp):
                continue
            samples, batch = one_batch * world_size // model_ranks, run.training.global_batch_size
            if batch is None or batch % samples or (len(stages) > pp and batch // samples % pp):
                continue
            copies = world_size * run.parallel.context_parallel_size // model_ranks
            copies = max(copies, world_size // (width.ep * width.etp * pp))
            for zero, changes in _zero_stages(run, fixed, pp, copies):
                for offload in _offloads(run, fixed, machine):
                    every = {**width.changes, **split, **changes, "optimizer_cpu_offload": offload}
                    yield SearchedLayout(width, pp, stages, zero, offload, every)


def _zero_stages(run: Run, fixed: set[str], pp: int, copies: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ZeRO stages: of 0 and 1 the latter where there is something to share, for it sends and takes less."""
    given = run.derived.zero_stage
    if fixed & set(_ZERO):
        yield given, {}
        return
    for stage in (1, 2, 3) if copies > 1 and pp == 1 else (1,) if copies > 1 else (given,):
        yield stage, {} if stage == given else {"data_parallel_sharding_strategy": SHARDING_STRATEGIES[stage]}


def _offloads(run: Run, fixed: set[str], machine: Machine) -> tuple[bool, ...]:
    given = run.optimizer.optimizer_cpu_offload
    return (given,) if "optimizer_cpu_offload" in fixed or machine.device == "cpu" else (False, True)


def _splits(
    run: Run, fixed: set[str], world_size: int, head: float
) -> Iterator[tuple[int, tuple[Stage, ...], dict[str, Any]]]:
    """Yield (PP, stages, fields) of each way to spread the layers over a pipeline."""
    layers, of_user = run.model.num_layers, bool(fixed & set(_SPLIT))
    sizes = [run.parallel.pipeline_model_parallel_size]
    if "pipeline_model_parallel_size" not in fixed:
        sizes = [pp for pp in _divisors(world_size) if pp <= layers]
    for pp in sizes:
        for chunks in (1,) if of_user or pp == 1 else _VIRTUAL_SIZES:
            if pp * chunks > layers:
                continue
            changes: dict[str, Any] = {"pipeline_model_parallel_size": pp}
            if not of_user:
                changes |= _spelled_split(run, pp, balanced(layers, pp * chunks, head))
            try:
                stages = replace(run, **changes).derived.pipeline_stages
            except ConfigError:
                continue
            yield pp, stages, changes


def balanced(layers: int, stages: int, head: float) -> list[int]:
    """Return the layers of each stage such that the slowest is as fast as can be; early ones get less if any does.

    Early stages keep most.

    Args:
        head: layers that the last stage has in addition, by their time.
    """
    load = [(head if stage == stages - 1 else 0.0, -stage) for stage in range(stages)]
    heapq.heapify(load)
    counts = [0] * stages
    for _ in range(layers):
        taken, place = load[0]
        counts[-place] += 1
        heapq.heapreplace(load, (taken + 1.0, place))
    return counts


def _spelled_split(run: Run, pp: int, counts: list[int]) -> dict[str, Any]:
    """Return the fields that give the stages so many layers: by numbers where these can say it, else by letters."""
    if len(set(counts)) == 1:
        chunks = len(counts) // pp
        return {"num_layers_per_virtual_pipeline_stage": counts[0]} if chunks > 1 else {}
    if len(counts) == pp and len(set(counts[1:-1])) <= 1 and min(counts) > 0:
        changes: dict[str, Any] = {}
        middle = counts[1] if pp > 2 else None
        if counts[0] != middle:
            changes["decoder_first_pipeline_num_layers"] = counts[0]
        if counts[-1] != middle:
            changes["decoder_last_pipeline_num_layers"] = counts[-1]
        return changes
    predicted = "m" * (run.model.mtp_num_layers or 0)
    words = [_letters("t", count) for count in counts]
    words[0], words[-1] = "E" + words[0], f"{words[-1]}{predicted}L"
    text = ""
    for word, alike in itertools.groupby(words[:-1]):
        count = len(list(alike))
        text += f"{word}|" if count == 1 else f"({word}|)*{count}"
    return {"pipeline_model_parallel_layout": text + words[-1]}


def _letters(letter: str, count: int) -> str:
    return letter * count if count < 4 else f"{letter}*{count}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def spelled(base: Run, chosen: Run) -> list[str]:
    """Return the words that make the second run of the first one, as they are typed."""
    words: list[str] = []
    for name in ("global_batch_size", *_SEARCHED):
        known = all_fields()[name]
        before, after = (getattr(getattr(run, known.section), name) for run in (base, chosen))
        if before == after:
            continue
        if known.is_bool:
            words.append(known.flag if after else known.negative_flag)
        else:
            value = after if isinstance(after, tuple) else ("none" if after is None else after,)
            words += [known.flag, *map(str, value)]
    return words


def quoted(words: Sequence[str], width: int = 112) -> str:
    """Return words as a shell reads them, over several lines."""
    groups: list[str] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append(shlex.quote(word))
        else:
            groups[-1] += f" {shlex.quote(word)}"
    lines = [""]
    for group in groups:
        if lines[-1] and len(lines[-1]) + len(group) > width:
            lines.append("")
        lines[-1] += f" {group}" if lines[-1] else group
    return " \\\n  ".join(lines)
