"""The models and layouts that the doctor tries when no run is given; together they have every feature.

A model is a line of flags, as one would give them to the doctor, and is made small like any run's. A row of
`DEFAULT_LAYOUTS` combines a layout that a run of the demo's model would be given with a model and with options that
train the same: dispatchers, recomputation, the fused loss. The oracle trains without these options.

Half precision is compared with fp32 once, in one process that begins with the same weights: an error that all layouts
make would show nowhere else. Its layouts are then compared with one process in their own dtype.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from functools import cache
from typing import Any

from megatron_moe.config.model_flags import PrecisionConfig
from megatron_moe.config.schema import Run
from megatron_moe.hf.config import filled_in
from megatron_moe_tools import compat
from megatron_moe_tools.doctor.layouts import (
    EVERY_KIND,
    Layout,
    LayoutChoice,
    apply_rules,
    combinations_of,
    other_batches,
    select_layouts,
)
from megatron_moe_tools.doctor.small_copy import small_copy, with_few_choices

MODELS = {
    "demo": "--preset demo",
    "mtp": "--preset demo --mtp-num-layers 1 --moe-shared-expert-gate --moe-router-bias-center"
    " --moe-router-group-score megatron --calculate-per-token-loss"
    " --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.05 0.05",
    "capacity": "--preset tiny-gqa --moe-expert-capacity-factor 1 --moe-router-pre-softmax --moe-router-num-groups 4"
    " --moe-router-group-topk 2 --moe-router-group-score max --moe-router-load-balancing-type global_aux_loss aux_loss"
    " --moe-aux-loss-coeff 0.05 0.05 --moe-layer-freq [0,1] --no-untie-embeddings-and-output-weights",
    "sinkhorn": "--preset tiny-gqa --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-layer-freq 2",
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
    ("cp2-ep2", "mtp", _PLAIN),
    ("dp2", "sinkhorn", _PLAIN),
    ("dp2-ep2", "demo", _LOOP),
    ("tp2-pp2", "capacity", _PLAIN),
    ("tp2-pp2-ep2-etp1", "mtp", _PLAIN),
    ("tp2-cp2", "demo", _PLAIN),
    ("tp2-cp2-ep2-etp2", "capacity", _PADDED),
    ("tp2-cp2-ep2-etp1", "sinkhorn", _PLAIN),
    ("tp2-dp2", "demo", _ALL_AGAIN),
    ("tp2-dp2-ep2-etp2", "demo", _ZERO3),
    ("tp2-dp2-ep2-etp1", "mtp", _ZERO2),
    ("pp2-cp2", "sinkhorn", _UNEVEN),
    ("pp2-cp2-ep2", "demo", _PARTS_AGAIN),
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
    """Return a model as its flags give it, and its small copy, in half precision where the flags say so."""
    own = compat.parse(shlex.split(MODELS[name]), filled_in)
    if name not in _HALF:
        return own, small_copy(own)
    return own, dataclasses.replace(with_few_choices(small_copy(own)), precision=own.precision)


def default_choice(max_ranks: int, wanted: Sequence[str] = ()) -> LayoutChoice:
    """Return the default layouts of at most `max_ranks` ranks; `wanted` has the meaning that it has in `choose`."""
    own, _ = model("demo")
    known = {layout.name: layout for ranks in (4, max_ranks) for layout in combinations_of(own, EVERY_KIND, ranks)}
    layouts = []
    for name, of, options in DEFAULT_LAYOUTS:
        _, copy = model(of)
        found = {layout.name: layout for layout in other_batches(copy)}.get(name) or known[name]
        layouts.append(_with_model(found, of, copy, options))
    trained = {name for name, _, _ in DEFAULT_LAYOUTS}
    demo = model("demo")[1]
    layouts += [_with_model(layout, "demo", demo, {}) for name, layout in known.items() if name not in trained]
    layouts += [_against_fp32(name) for name in _HALF]
    layouts.sort(key=lambda layout: layout.ranks)
    return apply_rules(select_layouts(layouts, wanted), "")


def _with_model(layout: Layout, name: str, copy: Run, options: dict[str, Any]) -> Layout:
    return dataclasses.replace(
        layout, name=f"{layout.name}+{name}", flags={**layout.flags, **options}, model=name, copy=copy
    )


def _against_fp32(name: str) -> Layout:
    """Return the layout of one process in half precision whose oracle is in fp32."""
    wide = dataclasses.replace(model(name)[1], precision=PrecisionConfig())
    return Layout(f"{name}-against-fp32", 1, _HALF[name], frozenset(), model=name, copy=wide)
