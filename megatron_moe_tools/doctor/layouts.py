"""The features of a run, and the layouts under which the doctor trains its small copy.

The layouts are the run's own kinds of parallelism at size two, alone and combined, and the fullest one with single
extras dropped. Before them come one process with the batch cut into other micro-batches, and with the loss averaged the
other way. Where every token has a loss both must train the same. Without these two, one process would be compared only
with code that shares its scaling, and a scale that is wrong everywhere would agree everywhere.

Without a run the doctor tries models and layouts that together have every feature. A model is a line of flags, as one
would give them to the doctor, and is made small like any run's. A row of `DEFAULT_LAYOUTS` combines a layout that a run
of the demo's model would be given with a model and with options that train the same: dispatchers, recomputation, the
fused loss. The oracle trains without these options. Half precision is compared with fp32 once, in one process that
begins with the same weights: an error that all layouts make would show nowhere else. Its layouts are then compared with
one process in their own dtype.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import combinations, product
from typing import Any

from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import QUANTILE, SHARDING_STRATEGIES, ParallelConfig, PrecisionConfig
from megatron_moe.config.schema import Run, replace
from megatron_moe.hf.config import filled_in
from megatron_moe_tools import compat
from megatron_moe_tools.doctor.small_copy import DEPTHS, LAYERS, small_copy

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
    "expert_bias by quantiles": _balanced_by(QUANTILE),
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
    "alltoall by node": lambda run: run.moe.moe_alltoall_by_node,
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
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")


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


def names_of(layouts: Sequence[Layout]) -> list[str]:
    """Return the layouts' names."""
    return [layout.name for layout in layouts]


def oracle_run(run: Run) -> Run:
    """Return the run of the oracle: a small copy on one rank, without fused loss and recomputation."""
    plain = dict.fromkeys(("cross_entropy_chunk_tokens", *_RECOMPUTE))
    return replace(run, cross_entropy_loss_fusion=False, **plain)


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
    in_use, kinds = [], {"DP"}
    for kind, name in _SIZES.items():
        if getattr(own.parallel, name) > 1:
            in_use.append(f"{kind} {getattr(own.parallel, name)}")
            kinds.add(kind)
    if not in_use:
        kinds = set(EVERY_KIND)
    if copy.moe.num_experts is None:
        kinds.discard("EP")
    layouts = []
    for layout in (*other_batches(copy), *combinations_of(own, kinds, max_ranks)):
        layouts.append(dataclasses.replace(layout, copy=copy))
    return _chosen(layouts, wanted, ", ".join(in_use))


PACKED_LENGTH = 32
"""Tokens of a sequence with several documents."""


def documents_choice(choice: LayoutChoice, own: Run, wanted: Sequence[str] = ()) -> LayoutChoice:
    """Return one process of each model and the layouts of several ranks, with documents that do not see each other.

    Auxiliary losses are left out: they are meant to see all tokens. So is what `exempted` names.

    Args:
        own: the run as the flags give it, which says whether positions restart and sequences are padded. With its
            dropout, attention on a CPU is torch's, as it is on a GPU.
        wanted: as in `choose`.
    """
    layouts, alone = [], set()
    for layout in (*choice.layouts, *(layout for layout, _ in choice.refused)):
        flags = dict(layout.flags)
        if layout.ranks == 1:
            if layout.model in alone:
                continue
            alone.add(layout.model)
            for name in ("micro_batch_size", "calculate_per_token_loss"):
                flags.pop(name, None)
            layout = dataclasses.replace(layout, name=f"one-process+{layout.model}".removesuffix("+"))
        copy, micro_batches = layout.copy, 2 * layout.ranks  # two on each replica
        for kind in ("TP", "PP", "CP"):
            micro_batches //= flags.get(_SIZES[kind]) or 1
        settings: dict[str, Any] = {
            "reset_attention_mask": True,
            "reset_position_ids": own.data.reset_position_ids,
            "packing": own.data.packing,
            "attention_dropout": own.model.attention_dropout,
            "seq_length": PACKED_LENGTH,
            "global_batch_size": micro_batches * copy.training.micro_batch_size,
        }
        if copy.precision.fp16:
            settings["initial_loss_scale"] = 1.0
        if copy.moe.num_experts is not None:
            settings |= {"moe_router_load_balancing_type": ("none",), "moe_aux_loss_coeff": (0.0,)}
            settings |= {"moe_z_loss_coeff": None, "moe_expert_capacity_factor": None}
            settings["moe_pad_expert_input_to_capacity"] = flags["moe_pad_expert_input_to_capacity"] = False
        layouts.append(dataclasses.replace(layout, copy=replace(copy, **settings), flags=flags))
    return _chosen(layouts, wanted, choice.reduced_from)


def exempted(choice: LayoutChoice) -> list[str]:
    """Return a line about each flag with which tokens compete for experts, which `documents_choice` leaves out."""
    found: dict[str, None] = {}
    for moe in (layout.copy.moe for layout in choice.layouts if layout.copy.moe.num_experts is not None):
        if moe.moe_expert_capacity_factor is not None:
            found[f"--moe-expert-capacity-factor {moe.moe_expert_capacity_factor:g}"] = None
        if "sinkhorn" in moe.moe_router_load_balancing_type:
            found["--moe-router-load-balancing-type sinkhorn"] = None
    return [f"{flag}: tokens of all documents compete for experts; left out here" for flag in found]


def _chosen(layouts: list[Layout], wanted: Sequence[str], reduced_from: str) -> LayoutChoice:
    """Choose the layouts whose name, with or without "+model", matches a wanted pattern and which the rules accept.

    Raises:
        ConfigError: no layout matches a pattern, or every layout is refused.
    """
    matching: set[str] = set()
    for pattern in wanted:
        found = []
        for name in names_of(layouts):
            if fnmatchcase(name, pattern) or fnmatchcase(name.partition("+")[0], pattern):
                found.append(name)
        if not found:
            raise ConfigError(f"--layouts {pattern}: none of {', '.join(names_of(layouts))}")
        matching.update(found)
    good, refused = [], []
    for layout in layouts:
        if wanted and layout.name not in matching:
            continue
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
    """Yield single kinds of parallelism, then pairs, then triples on eight ranks; each without and with EP.

    Last come the fullest layout without one of the run's extras, for each, to see whether that one is at fault.
    """
    dense = sorted(kinds.intersection(DENSE), key=DENSE.index)
    fullest: Layout | None = None
    given = own.parallel.expert_tensor_parallel_size
    for number in range(1, max_ranks.bit_length()):
        for chosen, experts in product(combinations(dense, number), (False, True)):
            ranks_left, rest = divmod(2 ** len(chosen), 2 ** (experts + ("PP" in chosen)))
            if rest or (experts and "EP" not in kinds):
                continue
            # ETP: the run's own relation to TP where it fits, both where the run does not say.
            sizes: list[int | None] = [2]
            if own.moe.num_experts is None or "TP" not in chosen:
                sizes = [None]
            elif ranks_left < 2 or given not in (None, own.parallel.tensor_model_parallel_size):
                sizes = [1]
            elif given is None and experts:
                sizes = [2, 1]
            for etp in sizes:
                fullest = _layout(own, chosen, experts, etp)
                yield fullest
    if fullest is None:
        return
    extras = {
        "distributed-optimizer": ("use_distributed_optimizer", "overlap_param_gather"),
        "sharded-gradients": ("data_parallel_sharding_strategy",),
        "overlap": ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"),
        "virtual-stages": ("num_layers_per_virtual_pipeline_stage",),
        "uneven-stages": ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "letters": ("pipeline_model_parallel_layout",),
    }
    for word, names in extras.items():
        flags = dict(fullest.flags)
        for name in names:
            flags.pop(name, None)
        if flags != fullest.flags:
            yield dataclasses.replace(fullest, name=f"{fullest.name}-no-{word}", flags=flags)
    if own.training.recompute_granularity is not None:
        flags = {**fullest.flags, **dict.fromkeys(_RECOMPUTE)}
        yield dataclasses.replace(fullest, name=f"{fullest.name}-no-recompute", flags=flags)


def _layout(own: Run, chosen: Sequence[str], experts: bool, etp: int | None) -> Layout:
    p, flags = own.parallel, dict[str, Any]()
    kinds = list(chosen)
    if experts:
        kinds.append("EP")
    words = [f"{kind.lower()}2" for kind in kinds]
    if etp is not None and experts:
        words.append(f"etp{etp}")
    for kind in kinds:
        if kind in _SIZES:
            flags[_SIZES[kind]] = 2
    if experts and etp in (None, 1) and own.moe.moe_alltoall_by_node:
        flags["moe_alltoall_by_node"] = True
    if "CP" in chosen:
        flags["mla_cp_exchange"] = p.mla_cp_exchange
    if "TP" in chosen:
        flags["sequence_parallel"] = p.sequence_parallel or own.moe.num_experts is not None
        flags["expert_tensor_parallel_size"] = etp
    if "PP" in chosen:
        if p.pipeline_model_parallel_layout is not None:
            # With virtual stages and ends without layers where the run has them. Multi-token prediction is with the
            # loss: a stage of its own takes three ranks.
            stages, parts = own.derived.pipeline_stages, ["", ""]
            if own.derived.virtual_pipeline_size is not None:
                parts *= 2
            first, last = int(not stages[0].layers), len(parts) - 1 - int(not stages[-1].layers)
            for layer in range(LAYERS):
                parts[min(first + layer, max(last, 0))] += "t"
            parts[0] = f"E{parts[0]}"
            parts[-1] += "m" * min(own.model.mtp_num_layers or 0, DEPTHS) + "L"
            flags["pipeline_model_parallel_layout"] = "|".join(parts)
        elif p.num_layers_per_virtual_pipeline_stage is not None or p.num_virtual_stages_per_pipeline_rank is not None:
            flags["num_layers_per_virtual_pipeline_stage"] = 1
        else:
            for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
                if getattr(p, name) is not None:
                    flags[name] = 1
                    break
    # ZeRO++ is left out: what it rounds is meant to differ from one process.
    stage = own.derived.zero_stage
    if stage >= 2 and "PP" not in chosen:
        flags["data_parallel_sharding_strategy"] = SHARDING_STRATEGIES[stage]
    elif stage:
        flags["use_distributed_optimizer"] = True
    for name in ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"):
        if getattr(p, name) != getattr(ParallelConfig(), name):
            flags[name] = getattr(p, name)
    return Layout("-".join(words), 2 ** len(chosen), flags, frozenset(kinds))


def common_to(failed: Sequence[Layout], passed: Sequence[Layout]) -> list[str]:
    """Return the kinds of parallelism and features, alone or as pairs, that all failed layouts have and no passed one.

    Features that all layouts have are left out.
    """
    if not failed:
        return []
    everywhere = frozenset.intersection(*(layout.features for layout in (*failed, *passed)))

    def traits(layout: Layout) -> frozenset[str]:
        return layout.kinds | (layout.features - everywhere)

    shared, innocent = sorted(frozenset.intersection(*map(traits, failed))), list(map(traits, passed))
    for size in (1, 2):
        found = []
        for group in combinations(shared, size):
            if not any(map(set(group).issubset, innocent)):
                found.append("+".join(group))
        if found:
            return found
    return []


# What is tried without a run.

MODELS = {
    "demo": "--preset demo",
    "mtp": "--preset demo --mtp-num-layers 1 --moe-shared-expert-gate --moe-router-bias-center"
    " --moe-router-group-score megatron --calculate-per-token-loss"
    " --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.05 0.05",
    "capacity": "--preset tiny-gqa --moe-expert-capacity-factor 1 --moe-router-pre-softmax --moe-router-num-groups 4"
    " --moe-router-group-topk 2 --moe-router-group-score max --moe-router-load-balancing-type global_aux_loss aux_loss"
    " --moe-aux-loss-coeff 0.05 0.05 --moe-layer-freq [0,1] --no-untie-embeddings-and-output-weights",
    "sinkhorn": "--preset tiny-gqa --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-layer-freq 2",
    "quantiles": "--preset demo --moe-router-num-groups none --moe-router-group-topk none --moe-aux-loss-coeff 0"
    " --moe-router-load-balancing-type quantile_balancing"
    " --moe-router-quantile-balancing-ema 0.25",
    "bf16": "--preset demo --moe-shared-expert-gate --bf16",
    # Scaled so that the first step overflows and one of the next two does not. The loss is per token because the engine
    # otherwise divides it by a rank's micro-batches first and averages over ranks last: under data and context
    # parallelism gradients would overflow at a scale where those of one process do not.
    "fp16": "--preset tiny-gqa --calculate-per-token-loss --fp16 --initial-loss-scale 16384 --hysteresis 1"
    " --loss-scale-window 2",
}
# The loss scale is one at which nothing overflows: the oracle, in fp32, applies every step.
_HALF: dict[str, dict[str, Any]] = {"bf16": {"bf16": True}, "fp16": {"fp16": True, "initial_loss_scale": 2048.0}}

_PLAIN: dict[str, Any] = {}
_ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
_BY_NODE = {"moe_alltoall_by_node": True}
_FUSED = {"cross_entropy_loss_fusion": True}
_LOOP = {"moe_expert_backend": "loop"}
_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
_ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
_ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
_PADDED = {"moe_pad_expert_input_to_capacity": True}
_UNEVEN = {"decoder_first_pipeline_num_layers": 1}
_VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}
_ALL_AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_PARTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("moe_act", "layernorm")}

# (layout, model, options); a layout that is not listed gets the demo's model.
DEFAULT_LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("micro-batches-of-1", "demo", _PLAIN),
    ("loss-per-token", "demo", _PLAIN),
    ("loss-per-micro-batch", "mtp", _PLAIN),
    ("loss-per-token", "capacity", _PLAIN),
    ("tp2", "mtp", _PLAIN),
    ("tp2-ep2-etp1", "capacity", _ALLGATHER),
    ("pp2", "mtp", _FUSED),
    ("cp2", "capacity", _PLAIN),
    ("cp2-ep2", "mtp", _BY_NODE),
    ("dp2", "sinkhorn", _PLAIN),
    ("dp2-ep2", "demo", _LOOP),
    ("tp2-pp2", "capacity", _PLAIN),
    ("tp2-pp2-ep2-etp1", "mtp", _PLAIN),
    ("tp2-cp2", "demo", _PLAIN),
    ("tp2-cp2-ep2-etp2", "capacity", _PADDED),
    ("tp2-cp2-ep2-etp1", "sinkhorn", _PLAIN),
    ("tp2-dp2", "quantiles", _ALL_AGAIN),
    ("tp2-dp2-ep2-etp2", "demo", _ZERO3),
    ("tp2-dp2-ep2-etp1", "mtp", _ZERO2),
    ("pp2-cp2", "sinkhorn", _UNEVEN),
    ("pp2-cp2-ep2", "quantiles", _PARTS_AGAIN),
    ("pp2-dp2", "demo", _VIRTUAL),
    ("pp2-dp2-ep2", "capacity", _PLAIN),
    ("cp2-dp2", "mtp", _OVERLAP),
    ("cp2-dp2-ep2", "demo", _ZERO2),
    ("cp2-dp2-ep2-no-distributed-optimizer", "demo", _PLAIN),
    ("tp2-dp2-ep2-etp1", "bf16", _ZERO3),
    ("pp2-cp2-ep2", "bf16", _PLAIN),
    ("dp2-ep2", "fp16", _PLAIN),
    ("tp2-pp2", "fp16", _PLAIN),
    ("cp2-dp2-ep2", "fp16", _ZERO3),
]


@cache
def model(name: str) -> tuple[Run, Run]:
    """Return a model as its flags give it, and its small copy, in half precision where the flags say so.

    Such a copy has few choices of experts: two layers, short sequences, no groups. Then samples can be found in which
    no choice depends on rounding. Fewer layers also mean fewer roundings, and so smaller tolerances.
    """
    own = compat.parse(shlex.split(MODELS[name]), filled_in)
    copy = small_copy(own)
    if name in _HALF:
        groups = {"moe_router_num_groups": None, "moe_router_group_topk": None, "moe_router_group_score": "top2"}
        groups["window_attn_skip_freq"] = None
        copy = replace(copy, num_layers=2, moe_layer_freq=1, seq_length=8, mtp_num_layers=None, **groups)
        copy = dataclasses.replace(copy, precision=own.precision)
    return own, copy


def default_choice(max_ranks: int, wanted: Sequence[str] = ()) -> LayoutChoice:
    """Return the default layouts of at most `max_ranks` ranks; `wanted` has the meaning that it has in `choose`."""
    own, _ = model("demo")
    known: dict[str, Layout] = {}
    for layout in (*combinations_of(own, EVERY_KIND, 4), *combinations_of(own, EVERY_KIND, max_ranks)):
        known[layout.name] = layout
    layouts, unlisted = [], dict.fromkeys(known)
    for name, of, options in DEFAULT_LAYOUTS:
        unlisted.pop(name, None)
        _, copy = model(of)
        for layout in (*other_batches(copy), *known.values()):
            if layout.name == name:
                break
        flags = {**layout.flags, **options}
        layouts.append(dataclasses.replace(layout, name=f"{name}+{of}", flags=flags, model=of, copy=copy))
    for name in unlisted:
        layouts.append(dataclasses.replace(known[name], name=f"{name}+demo", model="demo", copy=model("demo")[1]))
    for name, flags in _HALF.items():  # one process in half precision, whose oracle is in fp32
        wide = dataclasses.replace(model(name)[1], precision=PrecisionConfig())
        layouts.append(Layout(f"{name}-against-fp32", 1, flags, frozenset(), model=name, copy=wide))
    layouts.sort(key=lambda layout: layout.ranks)
    return _chosen(layouts, wanted, "")
