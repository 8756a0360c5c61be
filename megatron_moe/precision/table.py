"""The precision contract as a readable table: the dtypes of every class of tensor under a run's flags.

`PrecisionGuard` enforces it in a run; a test trains a step and compares. This file does not import torch.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_moe.config import module_names
from megatron_moe.config.module_names import (
    EVALUATION,
    GRADIENTS,
    GRADIENTS_OF_PRODUCTS,
    MODEL,
    NONE,
    PRODUCTS,
    TensorClass,
    dtype_words,
    every_part,
)
from megatron_moe.config.schema import Run

_COLUMNS = ("name", "stored", "computed", "accumulated", "reduced", "saved", "note")

# --fp8-format -> the dtype of the gradients of products in FP8; rows and weights are in e4m3
_FP8_GRADIENTS = {"e4m3": "e4m3", "hybrid": "e5m2"}


def _in_fp8(run: Run) -> bool:
    return run.precision.fp8_format is not None


def _is_muon(run: Run) -> bool:
    return run.optimizer.optimizer == "muon"


_EVALUATION = TensorClass("evaluation", MODEL, EVALUATION, "fp64", "fp64", note="of the weights as they are")

_BACKWARD_AND_FILES = (
    TensorClass("matrix products", NONE, "of their operands", "fp32", note="split sums too{tf32}"),
    TensorClass("rows of products in FP8", MODEL, PRODUCTS, note="tiles of 1 x 128 and 128 x 1", when=_in_fp8),
    TensorClass("gradients of products in FP8", MODEL, GRADIENTS_OF_PRODUCTS, "fp32", note="as the rows", when=_in_fp8),
    TensorClass("activation gradients", MODEL, MODEL, "fp32", MODEL, note="residual stream {residual}"),
    TensorClass("weight gradients", GRADIENTS, MODEL, GRADIENTS, note="main_grad{per_micro_batch}"),
    TensorClass("gradient reduction", NONE, reduced=GRADIENTS, note="over DP, and TP under sequence parallel"),
    TensorClass("gradient norm", "fp32", "fp32", "fp32", "fp32"),
    TensorClass("master weights", "{master_storage}", "fp32", saved="fp32", note="{masters}"),
    TensorClass("Adam moments", "{moment_storage}", "fp32", saved="fp32", note="{moments}"),
    TensorClass("momentum of Muon", "{momentum_storage}", "fp32", saved="fp32", note="{momentum}", when=_is_muon),
    TensorClass("orthogonalization", NONE, "{orthogonalized}", "fp32", note="of momenta", when=_is_muon),
    TensorClass(
        "loss scale", "fp32", "fp32", saved="fp32", note="one for all gradients", when=lambda run: run.precision.fp16
    ),
    TensorClass("checkpoint", NONE, saved="as stored", note="weights as stored, masters and moments fp32"),
    TensorClass("export", NONE, saved=MODEL, note="as stored, no cast in either direction; expert_bias fp32"),
)


def contract(run: Run) -> tuple[TensorClass, ...]:
    """Return every class of tensor of this run, in the order of the forward and then of the backward pass."""
    words = dtype_words(run)
    words["masters"] = "the weights themselves" if words["model"] == "fp32" else ""
    if run.derived.zero_stage >= 2:
        words["masters"] = f"the weights' shards; what is gathered of them is {words['model']}"
    words["master_storage"] = "fp32"
    if run.derived.packs_main_weights:
        words |= {"master_storage": "bf16 + int16", "masters": "the weights and their rests: fp32 to the bit"}
    stored = (run.optimizer.exp_avg_dtype, run.optimizer.exp_avg_sq_dtype)
    words["moment_storage"] = ", ".join(dict.fromkeys(stored))
    words["moments"] = "" if set(stored) == {"fp32"} else "rounded at random"
    words["momentum_storage"], words["momentum"] = stored[0], "" if stored[0] == "fp32" else "rounded at random"
    words["orthogonalized"] = {"medium": "bf16", "highest": "fp32"}[run.optimizer.muon_fp32_matmul_prec]
    words["tf32"] = ", fp32 by TF32 on CUDA but for routers" if run.precision.allow_tf32 else "; no TF32"
    words["per_micro_batch"] = _rounded_per_micro_batch(run, words["model"])
    kept = run.precision.keep_fp32 or ()
    present = set(module_names.parts(run).values())
    rows: dict[str, TensorClass] = {}
    for part in every_part():
        if part in present:
            own = "fp32" if part.alias in kept else words["model"]
            in_fp8 = _in_fp8(run) and part.fp8 in run.precision.fp8_modules
            its_words = {**words, "own": own, "products": "e4m3" if in_fp8 else own}
            for row in (*part.tensors, *part.state.values()):
                rows.setdefault(row.name, _resolved(row, its_words))
    whole_classes = {part.alias for part in every_part() if part.tensors}
    own_lines = [
        TensorClass(f"modules {pattern}", "fp32", "fp32", "fp32", "fp32", "fp32", "--keep-fp32")
        for pattern in kept
        if pattern not in whole_classes
    ]
    words |= {"products": "e4m3", "gradients_of_products": _FP8_GRADIENTS.get(run.precision.fp8_format or "", NONE)}
    others = [_resolved(row, words) for row in (_EVALUATION, *_BACKWARD_AND_FILES)]
    everything = (*rows.values(), others[0], *own_lines, *others[1:])
    return tuple(row for row in everything if row.when(run))


def _rounded_per_micro_batch(run: Run, model: str) -> str:
    """Return where weight gradients are rounded before they are added to main_grad, of which parts they are not."""
    if model == "fp32":
        return ""
    # What DistributedDataParallel adds has the weight's dtype; what a product adds by itself is not rounded to it.
    note = f", a sum of what each micro-batch rounds to {model}"
    fusion = run.precision.gradient_accumulation_fusion
    if fusion is False or not run.derived.grads_in_fp32 or run.derived.zero_stage >= 2:
        return note
    moe = run.moe
    added = {
        "router": moe.num_experts is not None,
        "experts": moe.num_experts is not None and fusion is True,
        "shared expert's gate": moe.moe_shared_expert_gate,
        "output layer": run.model.cross_entropy_loss_fusion,
        "Transformer Engine's linear layers": run.model.transformer_impl == "transformer_engine",
    }
    names = [name for name, unrounded in added.items() if unrounded]
    return f"{note}, but for: {', '.join(names)}" if names else note


def _resolved(row: TensorClass, words: dict[str, str]) -> TensorClass:
    """Return the line with the dtypes that its words stand for."""
    return replace(row, **{column: getattr(row, column).format_map(words) for column in _COLUMNS})


def title(run: Run) -> str:
    """Return a heading with the flags that the dtypes depend on, as they would be typed."""
    p = run.precision
    flags = [f"--{name}" for name in ("bf16", "fp16") if getattr(p, name)] or ["fp32 (neither --bf16 nor --fp16)"]
    flags += [f"--{n.replace('_', '-')}" for n in _SWITCHES if getattr(p, n)]
    if p.accumulate_allreduce_grads_in_fp32 is False:
        flags.append("--no-accumulate-allreduce-grads-in-fp32")
    options = run.optimizer
    if options.use_precision_aware_optimizer:
        flags.append(
            f"--use-precision-aware-optimizer --exp-avg-dtype {options.exp_avg_dtype} "
            f"--exp-avg-sq-dtype {options.exp_avg_sq_dtype}"
        )
    if _is_muon(run):
        flags.append(f"--optimizer muon --muon-fp32-matmul-prec {options.muon_fp32_matmul_prec}")
    if p.fp8_format is not None:
        flags.append(f"--fp8-format {p.fp8_format} --fp8-recipe {p.fp8_recipe} --fp8-modules {' '.join(p.fp8_modules)}")
    if layers := run.derived.bf16_layers:
        flags.append(f"--first-last-layers-bf16 (layers {', '.join(map(str, layers))} multiply in bf16)")
    if p.keep_fp32:
        flags.append(f"--keep-fp32 {' '.join(p.keep_fp32)}")
    if run.moe.num_experts is not None and run.moe.moe_router_dtype != "fp32":
        flags.append(f"--moe-router-dtype {run.moe.moe_router_dtype}")
    return f"precision contract for {' '.join(flags)}"


_SWITCHES = ("fp32_residual_connection", "grad_reduce_in_bf16", "eval_in_fp32")


def text(run: Run) -> str:
    """Return the contract in columns, for `--print-precision`."""
    lines = [("tensor", *_COLUMNS[1:])]
    lines += [tuple(getattr(row, column) for column in _COLUMNS) for row in contract(run)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    rows = ["  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([title(run), "", *rows])
