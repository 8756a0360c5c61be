"""The layouts next to one, those among which a plan looks for the fastest that fits, and how they are typed.

Searched are tensor, pipeline, expert and expert-tensor parallelism, the layers and the virtual stages of each pipeline
rank, the ZeRO stage, the offload of moments and of activations, and recomputation: none of them changes what is
computed. A field that the user has set is not searched; neither are batch, micro-batch, context parallelism, precision
and the optimizer's dtypes. Loads no torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
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
from megatron_moe.platform import host

GIB = 2**30
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_UNDIVIDED: dict[str, Any] = {
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
}
"""What says that a rank has one stage."""
UNSHARDED: dict[str, Any] = {
    "use_torch_fsdp2": False,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": None,
    "zero_hpz_partition_size": None,
}
"""What says that there is nothing of ZeRO's stages 2 and 3."""

Modules = tuple[str, ...] | None
"""Recomputed modules, and offloaded ones, whose names begin with `TO_HOST`; None: those that the user has set."""
FULL = ("full",)
"""What stands for the recomputation of whole layers among the sets of modules."""
TO_HOST = "offload:"
RECOMPUTATION: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective: core_attn": ("core_attn",),
    "selective: core_attn moe": ("core_attn", "moe"),
    "full": FULL,
}
"""Recomputation at its extremes and between."""
RECOMPUTATION_FIELDS = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


@dataclass(frozen=True)
class Machine:
    """The machines that the run is planned for.

    Attributes:
        device: one of host.DEVICE_KINDS.
        gpus_per_node: ranks of one machine.
        memory_gib: memory of one device.
        peak_tflops: peak of one device.
        mfu: share of the peak that the model's FLOPs are assumed to reach.
        imbalance: rows that a rank's experts get, over the mean.
        mean_document_length: tokens of a document, where documents do not see each other; None: of a sequence.
        node_bandwidth, network_bandwidth: what a rank sends to its machine and to others, in GB/s.
        host_bandwidth: what a device exchanges with its machine's memory, in GB/s.
        memory_bandwidth: what a device reads or writes of its own memory, in GB/s.
        host_memory_gib: memory of one machine.
    """

    device: str = host.DEVICE_KINDS[0]
    gpus_per_node: int = 8
    memory_gib: float = 80.0
    peak_tflops: float = 989.0
    mfu: float = 0.4
    imbalance: float = 1.0
    mean_document_length: float | None = None
    node_bandwidth: float = 300.0
    network_bandwidth: float = 40.0
    host_bandwidth: float = 40.0
    memory_bandwidth: float = 3350.0
    host_memory_gib: float = 2000.0

    def attended_share(self, seq_length: int) -> float:
        """Return the pairs of a query and a key in equally long documents, over those of a sequence of one."""
        return min(1.0, (self.mean_document_length or seq_length) / seq_length)


def vocabulary(run: Run) -> int:
    """Return the number of rows of the embedding table.

    Raises:
        ConfigError: the run does not say how large its vocabulary is.
    """
    if run.model.vocab_size is None:
        raise ConfigError("no --vocab-size: a plan reads no tokenizer; give --vocab-size, e.g. --vocab-size 32000")
    return run.derived.padded_vocab_size(run.model.vocab_size)


def recomputed(run: Run, modules: tuple[str, ...]) -> Run:
    """Return `run` with other recomputed and offloaded modules."""
    return replace(run, **recomputing(modules))


def recomputing(modules: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that recompute some modules, `FULL` or nothing, and offload those that are to be."""
    found: dict[str, Any] = dict.fromkeys(RECOMPUTATION_FIELDS)
    again, offloaded = divided(modules)
    if modules == FULL:
        found |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif again:
        found |= {"recompute_granularity": "selective", "recompute_modules": again}
    if offloaded:
        found |= {"fine_grained_activation_offloading": True, "offload_modules": offloaded}
    return found


def divided(modules: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the recomputed and the offloaded ones of some modules, by their names."""
    again, offloaded = [], []
    for name in modules:
        if name.startswith(TO_HOST):
            offloaded.append(name.removeprefix(TO_HOST))
        else:
            again.append(name)
    return tuple(again), tuple(offloaded)


def legal(run: Run, world_size: int) -> bool:
    """Return whether the rules allow this layout on `world_size` ranks."""
    try:
        rules.check_layout(run, world_size)
    except ConfigError:
        return False
    return True


def nearby_layouts(run: Run) -> Iterator[Run]:
    """Yield a run for every single change of the layout: sizes halved and doubled, and the like.

    With a size change the flags that the rules require along with it: sequence parallelism is on with TP; uneven ends
    and layouts by letters belong to the old number of stages.
    """
    sections, layers = {**vars(run.parallel), **vars(run.training)}, run.model.num_layers
    if run.parallel.tensor_model_parallel_size > 1 and not run.parallel.sequence_parallel:
        yield replace(run, sequence_parallel=True)
    for name in (*_SIZES, "micro_batch_size"):
        for size in (sections[name] // 2, sections[name] * 2):
            changes: dict[str, Any] = {name: size}
            if name == "tensor_model_parallel_size":
                changes["sequence_parallel"] = size > 1
            elif name == "context_parallel_size" and size == 1:
                changes["mla_cp_exchange"] = None
            elif name == "pipeline_model_parallel_size" and size:
                changes["pipeline_model_parallel_layout"] = None
                changes |= dict.fromkeys(("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
                if size == 1:
                    changes |= _UNDIVIDED
                elif layers % size and layers > size:
                    # Full stages, and what is left on the last; where nothing is, fewer and more on the last.
                    last = layers - -(-layers // size) * (size - 1)
                    if last < 1:
                        last = layers - layers // size * (size - 1)
                    changes |= {**_UNDIVIDED, "decoder_last_pipeline_num_layers": last}
            if size:
                yield replace(run, **changes)
    virtual = None
    if run.derived.virtual_pipeline_size is not None:
        virtual = len(run.derived.pipeline_stages[0].layers)
    by_letters = run.parallel.pipeline_model_parallel_layout is not None
    for count in (None, 1, 2, 4):
        if run.parallel.pipeline_model_parallel_size > 1 and count != virtual and not by_letters:
            yield replace(run, **{**_UNDIVIDED, "num_layers_per_virtual_pipeline_stage": count})
    for stage, strategy in enumerate(SHARDING_STRATEGIES):
        if stage != run.derived.zero_stage:
            yield with_stage(run, strategy)
    if run.training.recompute_granularity != "full":
        yield recomputed(run, FULL)
    if run.training.recompute_granularity is not None:
        yield recomputed(run, ())


def require_legal(run: Run, world_size: int) -> None:
    """Apply the rules for that many ranks.

    Raises:
        ConfigError: the rule that refuses, with up to five legal layouts that are one change away, or else two.
    """
    try:
        rules.check_layout(run, world_size)
        return
    except ConfigError as error:
        text = str(error)
    found: list[str] = []
    seen = {run}
    level = [run]
    for _ in range(2):
        following = []
        for other in itertools.chain.from_iterable(map(nearby_layouts, level)):
            if other in seen:
                continue
            seen.add(other)
            following.append(other)
            if legal(other, world_size):
                found.append(changed_flags(run, other))
        level = following
        if len(found) >= 5:
            break
    if found:
        text += "\n  ".join(["\nnearest legal layouts, each by the flags that change:", *found[:5]])
    raise ConfigError(text)


def changed_flags(run: Run, other: Run) -> str:
    """Return the flags of another layout of a run, which replace those that the run was typed with."""
    return " ".join(spelled(run, other, all_fields()))


def with_stage(run: Run, strategy: str) -> Run:
    """Return `run` with another ZeRO stage, without the flags that belong to the one it had."""
    changes: dict[str, Any] = {**UNSHARDED, "data_parallel_sharding_strategy": strategy}
    changes |= {"overlap_param_gather": False, "optimizer_cpu_offload": False}
    if strategy == "no_shard":
        changes["use_distributed_optimizer"] = False
    if strategy not in ("no_shard", "optim"):
        changes |= {"overlap_grad_reduce": False, "ddp_bucket_size": None}
    return replace(run, **changes)


_SPLIT = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
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
    *RECOMPUTATION_FIELDS,
    *_OFFLOAD,
)
_VIRTUAL_SIZES = (1, 2, 3, 4, 6, 8)

UNSPLIT: dict[str, Any] = {name: all_fields()[name].default for name in _SPLIT}
"""What says that the layers are split evenly, without virtual stages."""
SEPARATE: dict[str, Any] = {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False}
"""What says that micro-batches do not overlap."""

_RUNGS = (
    (f"{TO_HOST}core_attn", f"{TO_HOST}attn_proj"),
    (f"{TO_HOST}moe_act",),
    (f"{TO_HOST}expert_fc1",),
    (f"{TO_HOST}qkv_linear", f"{TO_HOST}attn_norm", f"{TO_HOST}mlp_norm"),
)
"""Offloaded modules, in the order in which they are added: what a byte takes is the same for all."""


def fixed_fields(run: Run) -> set[str]:
    """Return the searched fields that the command line or a file has set; a preset's ZeRO stage is no one's choice."""
    fixed = set()
    for name in _SEARCHED:
        by_user = name in run.explicit or name in run.sources
        if by_user or (name != "use_distributed_optimizer" and is_set(run, name)):
            fixed.add(name)
    return fixed


@dataclass(frozen=True, eq=False)
class LayerSharding:
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

    sharding: LayerSharding
    pp: int
    stages: tuple[Stage, ...]
    zero: int
    offload: bool
    changes: dict[str, Any]

    def run(self, base: Run, modules: Modules) -> Run:
        """Return `base` in this layout, with other recomputed and offloaded modules; None: with its own."""
        if modules is None:
            return replace(base, **self.changes)
        return recomputed(replace(base, **self.changes), modules)


def offloadable(run: Run, machine: Machine) -> list[tuple[str, ...]]:
    """Return modules that may be offloaded, some at a time; none on a CPU, and where the user has said which are."""
    if machine.device == "cpu" or fixed_fields(run) & set(_OFFLOAD) or run.moe.overlap_moe_expert_parallel_comm:
        return []
    return [rung for rung in _RUNGS if exists(run, rung)]


def exists(run: Run, modules: tuple[str, ...]) -> bool:
    """Return whether the model has these modules, and keeps them."""
    try:
        changed = recomputed(run, modules)
        training.recomputed_modules_exist(changed, 1)
        training.offloaded_modules_are_kept(changed, 1)
    except ConfigError:
        return False
    return True


def module_sets(run: Run, modules: Sequence[str], rungs: Sequence[tuple[str, ...]] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the sets of recomputed modules that do not nest, nothing first, each with more and more offloaded; `FULL`.

    rungs: see `offloadable`; of each what the recomputed modules leave.
    """
    for count in range(len(modules) + 1):
        for chosen in itertools.combinations(modules, count):
            if not exists(run, chosen):
                continue
            yield chosen
            for rung in rungs:
                more = chosen
                for name in rung:
                    if exists(run, (*more, name)):
                        more = (*more, name)
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


def layer_shardings(run: Run, world_size: int, machine: Machine) -> list[LayerSharding]:
    """Return the ways to cut layers that the rules allow; TP stays on a machine."""
    fixed, p, experts = fixed_fields(run), run.parallel, run.moe.num_experts
    tps, eps = [p.tensor_model_parallel_size], [p.expert_model_parallel_size]
    if "tensor_model_parallel_size" not in fixed:
        tps = [tp for tp in _divisors(machine.gpus_per_node) if world_size % (tp * p.context_parallel_size) == 0]
    if "expert_model_parallel_size" not in fixed:
        eps = _divisors(experts or 1)
    found = []
    for tp in tps:
        etps = sorted({tp, 1})
        if "expert_tensor_parallel_size" in fixed:
            etps = [p.expert_tensor_parallel_size or tp]
        elif experts is None:
            etps = [tp]
        for etp, ep in itertools.product(etps, eps):
            if world_size % (ep * etp):
                continue
            if run.moe.moe_alltoall_by_node and (ep <= machine.gpus_per_node or ep % machine.gpus_per_node):
                continue
            changes: dict[str, Any] = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep}
            if "expert_tensor_parallel_size" not in fixed:
                changes["expert_tensor_parallel_size"] = etp if etp != tp else None
            if "sequence_parallel" not in fixed:
                changes["sequence_parallel"] = tp > 1
            if legal(replace(run, **changes, **_ALONE), math.lcm(tp * p.context_parallel_size, etp * ep)):
                found.append(LayerSharding(tp, etp, ep, changes))
    return found


def no_layout(run: Run, world_size: int) -> ConfigError:
    """Return the error where the rules allow no layout. Raises ConfigError: a rule that the flags break as they are."""
    rules.check_layout(run, world_size)
    return ConfigError(
        f"--world-size {world_size}, --global-batch-size {run.training.global_batch_size}: the rules allow no layout "
        "of these ranks with the flags that are given; give fewer of them, or another batch"
    )


def layouts(
    run: Run, world_size: int, machine: Machine, shardings: Sequence[LayerSharding], head: float
) -> Iterator[SearchedLayout]:
    """Yield the layouts of a run with a batch; those that a rule refuses are among them.

    Args:
        shardings: from `layer_shardings`.
        head: time of the output layer, and of multi-token prediction, over that of a layer.
    """
    fixed, given, cp = fixed_fields(run), run.derived.zero_stage, run.parallel.context_parallel_size
    splits = list(_splits(run, fixed, world_size, head))
    offloads = [False, True]
    if "optimizer_cpu_offload" in fixed or machine.device == "cpu":
        offloads = [run.optimizer.optimizer_cpu_offload]
    for sharding, (pp, stages, split) in itertools.product(shardings, splits):
        model_ranks, expert_ranks = sharding.tp * pp * cp, sharding.ep * sharding.etp * pp
        if world_size % model_ranks or world_size % expert_ranks:
            continue
        samples, batch = run.training.micro_batch_size * world_size // model_ranks, run.training.global_batch_size
        if batch is None or batch % samples or (len(stages) > pp and batch // samples % pp):
            continue
        zeros = [given]
        if max(world_size * cp // model_ranks, world_size // expert_ranks) > 1 and not fixed & set(_ZERO):
            zeros = [1, 2, 3] if pp == 1 else [1]  # where there is something to share 1 sends and takes less than 0
        for zero, offload in itertools.product(zeros, offloads):
            changes = {**sharding.changes, **split, "optimizer_cpu_offload": offload}
            if zero != given:
                changes["data_parallel_sharding_strategy"] = SHARDING_STRATEGIES[zero]
            yield SearchedLayout(sharding, pp, stages, zero, offload, changes)


def _splits(
    run: Run, fixed: set[str], world_size: int, head: float
) -> Iterator[tuple[int, tuple[Stage, ...], dict[str, Any]]]:
    """Yield (PP, stages, fields) of each way to spread the layers over a pipeline.

    The fields give the stages their layers by numbers where these can say it, else by letters.
    """
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
                counts = balanced(layers, pp * chunks, head)
                middle = counts[1:-1][:1]
                if len(set(counts)) == 1:
                    if chunks > 1:
                        changes["num_layers_per_virtual_pipeline_stage"] = counts[0]
                elif chunks == 1 and len(set(counts[1:-1])) <= 1 and min(counts) > 0:
                    if counts[:1] != middle:
                        changes["decoder_first_pipeline_num_layers"] = counts[0]
                    if counts[-1:] != middle:
                        changes["decoder_last_pipeline_num_layers"] = counts[-1]
                else:
                    words = ["t" * count if count < 4 else f"t*{count}" for count in counts]
                    words[0], words[-1] = "E" + words[0], f"{words[-1]}{'m' * (run.model.mtp_num_layers or 0)}L"
                    letters = ""
                    for word, alike in itertools.groupby(words[:-1]):
                        count = len(list(alike))
                        letters += f"({word}|)*{count}" if count > 1 else f"{word}|"
                    changes["pipeline_model_parallel_layout"] = letters + words[-1]
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


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def spelled(base: Run, chosen: Run, names: Iterable[str] = ("global_batch_size", *_SEARCHED)) -> list[str]:
    """Return the words that make the second run of the first one, as they are typed, for the fields of these names."""
    words: list[str] = []
    for name in names:
        known = all_fields()[name]
        before = getattr(getattr(base, known.section), name)
        after = getattr(getattr(chosen, known.section), name)
        if before == after:
            continue
        if known.is_bool:
            words.append(known.flag if after else known.negative_flag)
        elif isinstance(after, tuple):
            words += [known.flag, *map(str, after)]
        else:
            words += [known.flag, "none" if after is None else str(after)]
    return words


def brief(number: float) -> str:
    """Return a number with two decimals, or with two digits where these would say nothing."""
    return f"{number:,.2f}" if number >= 0.1 or not number else f"{number:.2g}"
