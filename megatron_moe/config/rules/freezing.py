"""Rules about `--freeze`: what it names, and what frozen parameters cannot go with."""

from __future__ import annotations

from megatron_moe.config import module_names
from megatron_moe.config.rules.wording import refuse, set_among
from megatron_moe.config.schema import Run

_FREEZE, _TIED = "freeze", "untie_embeddings_and_output_weights"


def frozen_patterns_name_parameters(run: Run, world_size: int) -> None:
    """Refuse a pattern that matches no parameter, which would silently freeze none."""
    for pattern in run.optimizer.freeze or ():
        if not module_names.parameters_of(run, pattern):
            near = module_names.near_names(run, pattern)
            raise refuse(
                run,
                (_FREEZE,),
                f"{pattern!r} names no module with parameters and no parameter of this model; use e.g. "
                f"{', '.join(near)}",
            )


def frozen_parts_are_tried(run: Run, world_size: int) -> None:
    """Refuse frozen parameters where the code that would leave them alone has not been written or tried."""
    if not run.optimizer.freeze:
        return
    if run.derived.zero_stage >= 2:
        raise refuse(
            run,
            (_FREEZE, *set_among(run, ("data_parallel_sharding_strategy", "use_torch_fsdp2"))),
            "a fully sharded model keeps fp32 shards of all weights and gradients; use --use-distributed-optimizer",
        )
    if run.precision.fp8_format is not None:
        raise refuse(run, (_FREEZE, "fp8_format"), "frozen weights were not tried in FP8; drop one of the two")
    if run.moe.overlap_moe_expert_parallel_comm:
        raise refuse(
            run,
            (_FREEZE, "overlap_moe_expert_parallel_comm"),
            "the parts of a layer were not tried with frozen weights; drop one of the two",
        )


_CLIPPED = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")


def clipped_weights_are_trained(run: Run, world_size: int) -> None:
    """Refuse QK-clip where the weights that it would scale are frozen."""
    if not run.optimizer.qk_clip:
        return
    kept = sorted(name for name in module_names.frozen(run) if name.split(".")[-2] in _CLIPPED)
    if kept:
        raise refuse(
            run,
            ("qk_clip", _FREEZE),
            f"{kept[0]} would have to be scaled, and is frozen; leave queries and keys out of the frozen parameters, "
            "or drop --qk-clip",
        )


def frozen_tables_are_whole(run: Run, world_size: int) -> None:
    """Require of a tied embedding and output layer that both are frozen or none, on one stage of the pipeline."""
    frozen = module_names.frozen(run)
    ends = [any(name.startswith(end) for name in frozen) for end in (module_names.EMBEDDING, module_names.OUTPUT_LAYER)]
    tied = not run.model.untie_embeddings_and_output_weights
    if tied and ends[0] != ends[1]:
        raise refuse(
            run,
            (_FREEZE, _TIED),
            "embedding and output layer share one weight; name both, embedding and output_layer, or none, or use "
            "--untie-embeddings-and-output-weights",
        )
    copied = [name for name, shares in (("mtp_num_layers", run.model.mtp_num_layers), (_TIED, tied)) if shares]
    if ends[0] and copied and run.parallel.pipeline_model_parallel_size > 1:
        raise refuse(
            run,
            (_FREEZE, *copied, "pipeline_model_parallel_size"),
            "the last stage has a copy of the embedding, whose gradients the engine adds to the first one's; do not "
            "freeze the embedding, or use --pipeline-model-parallel-size 1",
        )
