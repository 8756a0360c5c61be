"""`--deterministic-mode` changes no bit on a CPU, and a step uses no operation whose order was not thought of."""

import re
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_moe.config.schema import build
from tests.helpers import trained_steps
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2

TINY = {**trained_steps.TINY, **trained_steps.SMALL, "global_batch_size": 4}
LOSSES = {"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"), "moe_aux_loss_coeff": (1e-2, 1e-2)}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True, "hidden_dropout": 0.1, "health_interval": 1},
    "fp16, capacity, fused loss": {"fp16": True, **DISTRIBUTED, "moe_expert_capacity_factor": 1.0}
    | {"cross_entropy_loss_fusion": True},
    "fp32, auxiliary losses, recomputed": {**LOSSES, "moe_z_loss_coeff": 1e-3, "mtp_num_layers": 1, **RECOMPUTED},
}


def records(flags: dict[str, Any], poisoned: bool = False) -> list[dict[str, Any]]:
    """The exact records of a run; `poisoned`: memory that is allocated holds NaN until it is written."""
    from megatron_moe.platform import numerics
    from megatron_moe.training.run import recorded

    switches = numerics.DETERMINISTIC
    try:
        if poisoned:
            numerics.DETERMINISTIC = tuple(one for one in switches if "fill_uninitialized" not in one.name)
            assert torch.utils.deterministic.fill_uninitialized_memory
        return recorded(build({**TINY, **flags}))
    finally:
        numerics.DETERMINISTIC = switches


@pytest.mark.parametrize("name", rows(VARIANTS, test=["bf16"]))
def test_the_mode_changes_no_bit_on_a_cpu_and_nothing_reads_memory_unwritten(gloo, name):
    ranks, flags = (2, {**VARIANTS[name], **EP2}) if name == "bf16" else (1, VARIANTS[name])
    plain, *_ = gloo.run(ranks, records, flags=flags)
    mode = {**flags, "deterministic_mode": True}
    assert gloo.run(ranks, records, flags=mode, poisoned=True)[0] == plain
    assert len(plain) == 3 and plain[-1]["loss_hex"] and plain[-1]["expert_bias_hash"]


# What adds, or writes, through an index: each is in the table of docs/internals/gpu_paths.md, or not in a step.
INDEXED = re.compile(
    "index_add|index_copy|index_fill|index_put|index_reduce|scatter|bincount|histc|cumsum|cumprod|put_|embedding_dense"
    "|embedding_bag|kthvalue|median|nll_loss|masked_scatter|repeat_interleave|unique|gather|sort|topk|searchsorted"
)
# index_add_: the embedding's gradient. gather: weights of the chosen experts, and its backward. scatter: the gradient
# of the routing weights; the experts of a token are different ones.
DECIDED = {
    *("index_add_ float32", "index_copy_ float32", "index_copy_ bfloat16", "index_copy_ float16"),
    *("gather float32", "gather float64", "scatter float32", "scatter_add_ int64", "scatter_ bool"),
    *("index_put_ bool", "index_put_ int64", "index_put_ float32"),
    *("bincount int64", "sort float32", "sort int64", "topk float32", "topk float64", "searchsorted int64"),
}
ON_A_CPU_ALONE = ("_embedding_bag",)  # moe/dispatch.py's sum of a token's copies


class _Indexed(TorchDispatchMode):
    """Keeps which indexed operations ran, with the dtype of their first tensor; `index_put` that adds apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = function._schema.name.split("::")
        if namespace == "aten" and INDEXED.search(name) and not name.startswith(ON_A_CPU_ALONE):
            first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            adds = " that adds" if "index_put" in name and len(args) > 3 and args[3] else ""
            self.seen.add(f"{name} {str(first.dtype).removeprefix('torch.')}{adds}")
        return function(*args, **(kwargs or {}))


def indexed(flags: dict[str, Any]) -> set[str]:
    with _Indexed() as mode:
        trained_steps.trained({**TINY, "train_iters": 1, **flags})
    return mode.seen


def test_a_step_uses_no_operation_whose_order_was_not_decided(gloo):
    seen: set[str] = set()
    for flags in VARIANTS.values():
        seen |= gloo.run(1, indexed, flags=flags)[0]
    assert seen - DECIDED == set()
    assert DECIDED - seen <= {"gather float64", "index_copy_ float16"}, "no step uses these any more"
