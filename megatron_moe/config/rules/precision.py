"""Rules about the modules that stay in fp32 inside a bf16 or fp16 model."""

from __future__ import annotations

from megatron_moe.config import module_names
from megatron_moe.config.rules.wording import refuse
from megatron_moe.config.schema import Run


def fp32_patterns_name_modules(run: Run, world_size: int) -> None:
    """A pattern that names nothing would keep nothing, and nobody would be told."""
    for pattern in run.precision.keep_fp32 or ():
        if not module_names.matches(run, pattern):
            near = module_names.near_names(run, pattern) or module_names.usable_aliases(run)
            raise refuse(
                run,
                ("keep_fp32",),
                f"{pattern!r} names no module and no parameter of this model; use e.g. {', '.join(near)}",
            )


def tied_weights_stay_together(run: Run, world_size: int) -> None:
    """A tied embedding and output layer are one tensor, which has one dtype."""
    kept = module_names.kept_in_fp32(run)
    ends = [any(name.startswith(end) for name in kept) for end in (module_names.EMBEDDING, module_names.OUTPUT_LAYER)]
    if not run.model.untie_embeddings_and_output_weights and ends[0] != ends[1]:
        raise refuse(
            run,
            ("keep_fp32", "untie_embeddings_and_output_weights"),
            "embedding and output layer share one weight, which has one dtype; name both, embedding and output_layer, "
            "or use --untie-embeddings-and-output-weights",
        )


def fp32_compute_is_our_own(run: Run, world_size: int) -> None:
    """What Transformer Engine's modules do with fp32 weights, or with an fp32 stream, has not been verified."""
    wanted = [
        name for name in ("keep_fp32", "fp32_residual_connection", "eval_in_fp32") if getattr(run.precision, name)
    ]
    engine = [
        name
        for name, asks in (
            ("transformer_impl", run.model.transformer_impl == "transformer_engine"),
            ("moe_expert_backend", run.moe.moe_expert_backend == "te"),
        )
        if asks
    ]
    if wanted and engine:
        raise refuse(
            run,
            (*wanted, *engine),
            "not with Transformer Engine's modules, whose dtypes are their own; use --transformer-impl local and "
            "--moe-expert-backend grouped_mm",
        )
