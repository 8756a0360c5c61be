"""The features of a run, and the layouts under which the doctor trains its small copy.

The layouts are the run's own kinds of parallelism at size two, alone and combined, and the fullest one with single
extras dropped. Before them come one process with the batch cut into other micro-batches, and with the loss averaged the
other way. Where every token has a loss both must train the same. Without these two, one process would be compared only
with code that shares its scaling, and a scale that is wrong everywhere would agree everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import SHARDING_STRATEGIES, ParallelConfig
from megatron_moe.config.schema import Run, replace
from megatron_moe_tools.doctor.small_copy import DEPTHS, LAYERS

# Features: what the default layouts have to cover, and what layouts that fail may have in common.


def _balanced_by(kind: str) -> Callable[[Run], object]:
    return lambda run: kind in run.moe.moe_router_load_balancing_type


def _scored_by(function: str) -> Callable[[Run], object]:
    return lambda run: not _balanced_by("sinkhorn")(run) and run.moe.moe_router_score_function == function


def _grouped_by(score: str) -> Callable[[Run], object]:
    return lambda run: run.moe.moe_router_num_groups is not None and run.moe.moe_router_group_score == score


_MODEL_FEATURES: dict[str, Callable[[Run], object]] = {
    "latent attention": lambda run: run.model.multi_latent_attention,
    "grouped-query attention": lambda run: run.model.group_query_attention,
    "tied embeddings": lambda run: not run.model.untie_embeddings_and_output_weights,
    "separate embeddings": lambda run: run.model.untie_embeddings_and_output_weights,
    "dense layers": lambda run: 0 in run.derived.moe_layer_pattern,
    "multi-token prediction": lambda run: run.model.mtp_num_layers is not None,
    "fused loss": lambda run: run.model.cross_entropy_loss_fusion,
    "per-token loss": lambda run: run.optimizer.calculate_per_token_loss,
    "full recomputation": lambda run: run.training.recompute_granularity == "full",
    "selective recomputation": lambda run: run.training.recompute_granularity == "selective",
    "distributed optimizer": lambda run: run.derived.zero_stage == 1,
    "sharded gradients": lambda run: run.derived.zero_stage == 2,
    "sharded weights": lambda run: run.derived.zero_stage == 3,
    "overlapped reduction": lambda run: run.parallel.overlap_grad_reduce,
    "uneven stages": lambda run: len(set(run.derived.pipeline_layer_counts)) > 1,
    "virtual stages": lambda run: run.derived.virtual_pipeline_size is not None,
    "fp32": lambda run: run.derived.params_dtype_name == "float32",
    "bf16": lambda run: run.precision.bf16,
    "fp16": lambda run: run.precision.fp16,
}
_EXPERT_FEATURES: dict[str, Callable[[Run], object]] = {
    "softmax scores": _scored_by("softmax"),
    "sigmoid scores": _scored_by("sigmoid"),
    "pre-softmax": lambda run: run.moe.moe_router_pre_softmax,
    "groups by their best expert": _grouped_by("max"),
    "groups by their best two": _grouped_by("top2"),
    "groups by megatron-core's rule": _grouped_by("megatron"),
    "expert_bias": lambda run: run.moe.moe_router_enable_expert_bias,
    "expert_bias centred": lambda run: run.moe.moe_router_bias_center,
    "Sinkhorn": _balanced_by("sinkhorn"),
    "aux_loss": _balanced_by("aux_loss"),
    "seq_aux_loss": _balanced_by("seq_aux_loss"),
    "global_aux_loss": _balanced_by("global_aux_loss"),
    "z-loss": lambda run: run.moe.moe_z_loss_coeff,
    "capacity": lambda run: run.moe.moe_expert_capacity_factor is not None,
    "padding to the capacity": lambda run: run.moe.moe_pad_expert_input_to_capacity,
    "shared expert": lambda run: run.moe.moe_shared_expert_intermediate_size is not None,
    "shared gate": lambda run: run.moe.moe_shared_expert_gate,
    "experts in a grouped product": lambda run: run.moe.moe_expert_backend == "grouped_mm",
    "experts in a loop": lambda run: run.moe.moe_expert_backend == "loop",
    "alltoall dispatcher": lambda run: run.moe.moe_token_dispatcher_type == "alltoall",
    "allgather dispatcher": lambda run: run.moe.moe_token_dispatcher_type == "allgather",
}
FEATURES = {**_MODEL_FEATURES, **_EXPERT_FEATURES}
"""Maps a feature's name to a predicate that says whether a run has it."""


def features(run: Run) -> frozenset[str]:
    """Return the names of the features that a run has; a dense model has no feature of experts."""
    candidates = FEATURES if run.moe.num_experts is not None else _MODEL_FEATURES
    return frozenset(name for name, has in candidates.items() if has(run))


# Layouts.

DENSE = ("TP", "PP", "CP", "DP")
EVERY_KIND = {*DENSE, "EP"}
_SIZES = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}


@dataclass(frozen=True)
class Layout:
    """A layout that the doctor tries: how many ranks train a small copy, and with which flags.

    Attributes:
        name: what the log and --layouts call it.
        ranks: number of ranks.
        flags: fields that it sets in the small copy's run.
        kinds: kinds of parallelism in it.
        masked: whether its samples hold tokens without a loss.
        model: name of the model, where there are several.
        copy: small copy of the model, as the oracle trains it.
    """

    name: str
    ranks: int
    flags: dict[str, Any]
    kinds: frozenset[str]
    masked: bool = True
    model: str = ""
    copy: Run = field(default_factory=Run)

    @property
    def run(self) -> Run:
        """The run that the layout's ranks train."""
        return replace(self.copy, **self.flags)

    @property
    def features(self) -> frozenset[str]:
        """The features of that run."""
        return features(self.run)


@dataclass(frozen=True)
class LayoutChoice:
    """The layouts that are tried, and those that are not, each of these with the rule that refuses it."""

    layouts: list[Layout]
    refused: list[tuple[Layout, str]]
    reduced_from: str
    """The run's own layout, as the flags give it; empty where they give none."""


def oracle_run(run: Run) -> Run:
    """Return the run of the oracle: a small copy on one rank, without fused loss and recomputation."""
    return replace(
        run,
        cross_entropy_loss_fusion=False,
        cross_entropy_chunk_tokens=None,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=None,
    )


def choose(own: Run, copy: Run, max_ranks: int, wanted: Sequence[str] = ()) -> LayoutChoice:
    """Return the layouts for the small copy of a run.

    Args:
        own: the run as the flags give it. It says which kinds of parallelism are in use; where it names none, all
            that fit are tried.
        copy: its small copy.
        max_ranks: 4 or 8.
        wanted: names or patterns of layouts; all if empty.

    Raises:
        ConfigError: no layout has a wanted name, or every layout is refused.
    """
    used = {kind for kind, name in _SIZES.items() if getattr(own.parallel, name) > 1}
    kinds = used | {"DP"} if used else set(EVERY_KIND)
    if copy.moe.num_experts is None:
        kinds.discard("EP")
    layouts = [*other_batches(copy), *combinations_of(own, kinds, max_ranks)]
    shown = [f"{kind} {getattr(own.parallel, name)}" for kind, name in _SIZES.items() if kind in used]
    return apply_rules(
        select_layouts([dataclasses.replace(layout, copy=copy) for layout in layouts], wanted), ", ".join(shown)
    )


def select_layouts(layouts: list[Layout], wanted: Sequence[str]) -> list[Layout]:
    """Return the layouts whose name, with or without "+model", matches one of the patterns; all without patterns.

    Raises:
        ConfigError: no layout matches a pattern.
    """
    for pattern in wanted:
        if not any(_matches(layout, pattern) for layout in layouts):
            raise ConfigError(f"--layouts {pattern}: none of {', '.join(layout.name for layout in layouts)}")
    return [layout for layout in layouts if not wanted or any(_matches(layout, pattern) for pattern in wanted)]


def _matches(layout: Layout, pattern: str) -> bool:
    return fnmatchcase(layout.name, pattern) or fnmatchcase(layout.name.partition("+")[0], pattern)


def apply_rules(layouts: list[Layout], reduced_from: str) -> LayoutChoice:
    """Divide layouts into those that the rules of a run accept and those that they refuse.

    Raises:
        ConfigError: every layout is refused.
    """
    good, refused = [], []
    for layout in layouts:
        try:
            rules.check(layout.run, layout.ranks)
            good.append(layout)
        except ConfigError as error:
            refused.append((layout, str(error)))
    if not good:
        raise ConfigError(f"no layout of two or more ranks can train this model; {refused[0][0].name}: {refused[0][1]}")
    return LayoutChoice(good, refused, reduced_from)


def other_batches(copy: Run) -> Iterator[Layout]:
    """Yield layouts that train the same global batch on one rank, cut or averaged in another way.

    What is defined per micro-batch (aux_loss, Sinkhorn, capacity) would be another function with another cut.
    """
    by_micro_batch = {"aux_loss", "sinkhorn"} & set(copy.moe.moe_router_load_balancing_type)
    if not by_micro_batch and copy.moe.moe_expert_capacity_factor is None:
        yield Layout("micro-batches-of-1", 1, {"micro_batch_size": 1}, frozenset(), masked=False)
    other = not copy.optimizer.calculate_per_token_loss
    name = "loss-per-token" if other else "loss-per-micro-batch"
    yield Layout(name, 1, {"calculate_per_token_loss": other}, frozenset(), masked=False)


def combinations_of(own: Run, kinds: set[str], max_ranks: int) -> Iterator[Layout]:
    """Yield single kinds of parallelism, then pairs, then triples on eight ranks; each without and with EP."""
    dense = [kind for kind in DENSE if kind in kinds]
    most = max_ranks.bit_length() - 1
    fullest: Layout | None = None
    for number in range(1, most + 1):
        for chosen in combinations(dense, number):
            for experts in (False, True) if "EP" in kinds else (False,):
                for etp in _expert_tensor_sizes(own, chosen, experts, 2**number):
                    fullest = _layout(own, chosen, experts, etp)
                    yield fullest
    if fullest is not None:
        yield from _without_extras(own, fullest)


def _expert_tensor_sizes(own: Run, chosen: Sequence[str], experts: bool, ranks: int) -> list[int | None]:
    """Return the ETP sizes to try: the run's own relation to TP where it fits, both where the run does not say."""
    if own.moe.num_experts is None or "TP" not in chosen:
        return [None] if _fits(chosen, experts, 1, ranks) else []
    given = own.parallel.expert_tensor_parallel_size
    if given is None:
        sizes = [2, 1] if experts else [2]
    else:
        sizes = [2] if given == own.parallel.tensor_model_parallel_size else [1]
    fitting: list[int | None] = [etp for etp in sizes if _fits(chosen, experts, etp, ranks)]
    if fitting:
        return fitting
    return [1] if _fits(chosen, experts, 1, ranks) else []


def _fits(chosen: Sequence[str], experts: bool, etp: int, ranks: int) -> bool:
    return ranks % ((2 if experts else 1) * etp * (2 if "PP" in chosen else 1)) == 0


def _layout(own: Run, chosen: Sequence[str], experts: bool, etp: int | None) -> Layout:
    p, flags = own.parallel, dict[str, Any]()
    for kind in (*chosen, *(["EP"] if experts else [])):
        if kind in _SIZES:
            flags[_SIZES[kind]] = 2
    if "TP" in chosen:
        flags["sequence_parallel"] = p.sequence_parallel or own.moe.num_experts is not None
        flags["expert_tensor_parallel_size"] = etp
    if "PP" in chosen:
        if p.pipeline_model_parallel_layout is not None:
            flags["pipeline_model_parallel_layout"] = _small_stages(own)
        elif p.num_layers_per_virtual_pipeline_stage is not None or p.num_virtual_stages_per_pipeline_rank is not None:
            flags["num_layers_per_virtual_pipeline_stage"] = 1
        elif p.decoder_first_pipeline_num_layers is not None or p.decoder_last_pipeline_num_layers is not None:
            first = p.decoder_first_pipeline_num_layers is not None
            flags[f"decoder_{'first' if first else 'last'}_pipeline_num_layers"] = 1
    # ZeRO++ is left out: what it rounds is meant to differ from one process.
    stage = own.derived.zero_stage
    if stage >= 2 and "PP" not in chosen:
        flags["data_parallel_sharding_strategy"] = SHARDING_STRATEGIES[stage]
    elif stage:
        flags["use_distributed_optimizer"] = True
    for name in ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"):
        if getattr(p, name) != getattr(ParallelConfig(), name):
            flags[name] = getattr(p, name)
    words = [f"{kind.lower()}2" for kind in chosen] + (["ep2"] if experts else [])
    if etp is not None and experts:
        words.append(f"etp{etp}")
    return Layout("-".join(words), 2 ** len(chosen), flags, frozenset({*chosen, *(["EP"] if experts else [])}))


def _small_stages(own: Run) -> str:
    """Return letters for a small copy on two ranks, with virtual stages and ends without layers where the run has them.

    Multi-token prediction is with the loss: a stage of its own takes three ranks.
    """
    stages = own.derived.pipeline_stages
    count = 2 if own.derived.virtual_pipeline_size is None else 4
    first, last = (0 if stages[0].layers else 1), (count - 1 if stages[-1].layers else count - 2)
    parts = [""] * count
    for layer in range(LAYERS):
        parts[min(first + layer, max(last, 0))] += "t"
    parts[0] = f"E{parts[0]}"
    parts[-1] += "m" * min(own.model.mtp_num_layers or 0, DEPTHS) + "L"
    return "|".join(parts)


def _without_extras(own: Run, fullest: Layout) -> Iterator[Layout]:
    """Yield the fullest layout without one of the run's extras, for each, to see whether that one is at fault."""
    extras = {
        "distributed-optimizer": ("use_distributed_optimizer", "overlap_param_gather"),
        "sharded-gradients": ("data_parallel_sharding_strategy",),
        "overlap": ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"),
        "virtual-stages": ("num_layers_per_virtual_pipeline_stage",),
        "uneven-stages": ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "letters": ("pipeline_model_parallel_layout",),
    }
    for word, names in extras.items():
        if any(name in fullest.flags for name in names):
            flags = {name: value for name, value in fullest.flags.items() if name not in names}
            yield Layout(f"{fullest.name}-no-{word}", fullest.ranks, flags, fullest.kinds)
    if own.training.recompute_granularity is not None:
        plain = {f"recompute_{name}": None for name in ("granularity", "method", "num_layers", "modules")}
        yield Layout(f"{fullest.name}-no-recompute", fullest.ranks, {**fullest.flags, **plain}, fullest.kinds)


def common_to(failed: Sequence[Layout], passed: Sequence[Layout]) -> list[str]:
    """Return the kinds of parallelism and features, alone or as pairs, that all failed layouts have and no passed one.

    Features that all layouts have are left out.
    """
    if not failed:
        return []
    everywhere = frozenset.intersection(*(layout.features for layout in (*failed, *passed)))
    shared = frozenset.intersection(*(_traits(layout, everywhere) for layout in failed))
    groups = [frozenset(group) for size in (1, 2) for group in combinations(sorted(shared), size)]
    distinguishing = [group for group in groups if not any(group <= _traits(layout, everywhere) for layout in passed)]
    smallest = min((len(group) for group in distinguishing), default=0)
    return ["+".join(sorted(group)) for group in distinguishing if len(group) == smallest]


def _traits(layout: Layout, everywhere: frozenset[str]) -> frozenset[str]:
    return layout.kinds | (layout.features - everywhere)
