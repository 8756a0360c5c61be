"""The precision contract as a table one can read: the dtypes of every class of tensor under a run's own flags.

`precision/guard.py` holds a run to it; a test trains a step and compares. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace

from megatron_moe.config import derived
from megatron_moe.config.schema import Run

SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
NONE = "-"


@dataclass(frozen=True)
class TensorClass:
    """One line of the contract. Dtypes are fp32, fp64, bf16, fp16 or int64; "-" where there is nothing to say.

    stored: between steps. computed: what the arithmetic is done in, before the result is rounded to what is stored or
    handed on. accumulated: sums on one rank. reduced: sums over ranks. saved: in a checkpoint.
    """

    name: str
    stored: str
    computed: str
    accumulated: str
    reduced: str
    saved: str
    note: str = ""


def contract(run: Run) -> tuple[TensorClass, ...]:
    """Every class of tensor of this run, in the order in which a token and then a gradient meets them."""
    model = SHORT[derived.params_dtype_name(run)]
    experts = run.moe.num_experts is not None
    rows = _dense(run, model)
    rows += [*_routing(run), *_experts(run, model)] if experts else []
    rows += _head(run, model)
    for pattern in run.precision.keep_fp32 or ():
        if pattern not in _ALIASES:
            rows.append(TensorClass(f"modules {pattern}", "fp32", "fp32", "fp32", "fp32", "fp32", "--keep-fp32"))
    return (*rows, *_backward(run, model), *_files(model))


_ALIASES = ("embedding", "output_layer", "norms", "router", "experts", "shared_experts", "attention")
"""The values of `--keep-fp32` that are whole classes of this table; others get lines of their own."""


def _weights(run: Run, name: str, alias: str, reduced: str | None = None) -> TensorClass:
    """A class of weights; `reduced` where its outputs are summed over ranks in another dtype than theirs, or not."""
    kept = alias in (run.precision.keep_fp32 or ())
    dtype = "fp32" if kept else SHORT[derived.params_dtype_name(run)]
    # A product adds in fp32 inside the kernel; what it hands on is rounded to the dtype it computes in.
    return TensorClass(name, dtype, dtype, "fp32", reduced or dtype, dtype)


def _dense(run: Run, model: str) -> list[TensorClass]:
    residual = "fp32" if run.precision.fp32_residual_connection else model
    rows = [
        _weights(run, "embedding", "embedding", NONE),
        TensorClass("residual stream", residual, residual, NONE, NONE, NONE),
        replace(_weights(run, "norms", "norms", NONE), computed="fp32", note="rounded once"),
        _weights(run, "attention weights", "attention"),
        TensorClass("attention softmax", NONE, "fp32", "fp32", NONE, NONE),
    ]
    if run.parallel.context_parallel_size > 1:
        gathered = _weights(run, "attention weights", "attention").computed
        rows.append(
            TensorClass("keys and values over CP ranks", gathered, NONE, NONE, "fp32", NONE, "reduced: their gradients")
        )
    if sum(derived.moe_layer_pattern(run)) < run.model.num_layers:
        rows.append(_weights(run, "dense MLP weights", ""))
    return rows


def _experts(run: Run, model: str) -> list[TensorClass]:
    rows = [
        _weights(run, "expert weights", "experts", "fp32"),
        TensorClass("experts' activation", model, "fp32", NONE, NONE, NONE, "rounded once"),
        TensorClass("combine of the experts", model, "fp32", "fp32", "fp32", NONE, "rounded once"),
    ]
    if run.moe.moe_shared_expert_intermediate_size:
        rows.append(_weights(run, "shared expert weights", "shared_experts"))
    return rows


def _head(run: Run, model: str) -> list[TensorClass]:
    evaluation = "fp32" if run.precision.eval_in_fp32 else model
    return [
        _weights(run, "output layer", "output_layer", NONE),
        TensorClass("loss", "fp32", "fp32", "fp32", "fp64", NONE, "sums and token counts over ranks in fp64"),
        *_further_predictions(run),
        TensorClass("evaluation", model, evaluation, "fp64", "fp64", NONE, "of the weights as they are"),
    ]


def _further_predictions(run: Run) -> list[TensorClass]:
    """What multi-token prediction has of its own; its layers are like the others."""
    if run.model.mtp_num_layers is None:
        return []
    return [
        _weights(run, "merge of further predictions", ""),
        TensorClass("further losses", "fp32", "fp32", "fp32", "fp64", NONE, "logged sums and counts in fp64"),
    ]


def _routing(run: Run) -> list[TensorClass]:
    router = run.moe.moe_router_dtype
    weight = _weights(run, "router weight", "router")
    rows = [
        replace(weight, computed=router, accumulated=router, reduced=NONE),
        TensorClass("router logits", router, router, router, NONE, NONE),
        TensorClass("router scores", router, router, router, NONE, NONE),
        TensorClass("router probs", router, router, router, NONE, NONE),
        TensorClass("auxiliary losses", "fp32" if router == "fp32" else router, router, router, "fp64", NONE),
        TensorClass("token counts", "fp32", "int64", "fp32", "int64", NONE, "whole numbers, exact; 0 between steps"),
    ]
    if run.moe.moe_expert_capacity_factor is not None:
        rows.append(replace(rows[-1], name="dropped choices", note="as the token counts, beside them"))
    if run.moe.moe_router_enable_expert_bias:
        rows.append(TensorClass("expert_bias", "fp32", "fp32", NONE, NONE, "fp32", "sign of the step in int64"))
    return rows


def _backward(run: Run, model: str) -> list[TensorClass]:
    gradients = "fp32" if derived.grads_in_fp32(run) else model
    residual = "fp32" if run.precision.fp32_residual_connection else model
    masters = "the weights themselves" if model == "fp32" else ""
    rows = [
        TensorClass("activation gradients", model, model, "fp32", model, NONE, f"residual stream {residual}"),
        TensorClass("weight gradients", gradients, model, gradients, NONE, NONE, "main_grad"),
        TensorClass("gradient reduction", NONE, NONE, NONE, gradients, NONE, "over DP, and TP under sequence parallel"),
        TensorClass("gradient norm", "fp32", "fp32", "fp32", "fp32", NONE),
        TensorClass("master weights", "fp32", "fp32", NONE, NONE, "fp32", masters),
        TensorClass("Adam moments", "fp32", "fp32", NONE, NONE, "fp32"),
    ]
    if run.precision.fp16:
        rows.append(TensorClass("loss scale", "fp32", "fp32", NONE, NONE, "fp32", "one for all gradients"))
    return rows


def _files(model: str) -> list[TensorClass]:
    note = "as stored, no cast in either direction; expert_bias fp32"
    return [
        TensorClass("checkpoint", NONE, NONE, NONE, NONE, "as stored", "weights as stored, masters and moments fp32"),
        TensorClass("export", NONE, NONE, NONE, NONE, model, note),
    ]


def title(run: Run) -> str:
    """The flags that decide, as they would be typed."""
    p = run.precision
    flags = [f"--{name}" for name in ("bf16", "fp16") if getattr(p, name)] or ["fp32 (neither --bf16 nor --fp16)"]
    flags += [f"--{n.replace('_', '-')}" for n in _SWITCHES if getattr(p, n)]
    if p.accumulate_allreduce_grads_in_fp32 is False:
        flags.append("--no-accumulate-allreduce-grads-in-fp32")
    if p.keep_fp32:
        flags.append(f"--keep-fp32 {' '.join(p.keep_fp32)}")
    if run.moe.num_experts is not None and run.moe.moe_router_dtype != "fp32":
        flags.append(f"--moe-router-dtype {run.moe.moe_router_dtype}")
    return f"precision contract for {' '.join(flags)}"


_SWITCHES = ("fp32_residual_connection", "grad_reduce_in_bf16", "eval_in_fp32")


def text(run: Run) -> str:
    """The contract in columns, for `--print-precision`."""
    lines = [_heading(), *map(astuple, contract(run))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([title(run), "", *rows])


def markdown(run: Run) -> str:
    """The contract as a table of a document."""
    lines = [_heading(), ("---",) * len(_heading()), *map(astuple, contract(run))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _heading() -> tuple[str, ...]:
    return ("tensor", *(field.name for field in fields(TensorClass)[1:]))
