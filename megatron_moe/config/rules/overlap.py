"""Rules about micro-batches that overlap: what the engine's schedule asks for, and what goes past it."""

from __future__ import annotations

from megatron_moe.config.rules.wording import refuse, set_among
from megatron_moe.config.schema import Run

_OVERLAP = "overlap_moe_expert_parallel_comm"


def expert_overlap_can_work(run: Run, world_size: int) -> None:
    """Require what megatron-core's schedule of two micro-batches asks for, with the same limits."""
    if not run.moe.overlap_moe_expert_parallel_comm:
        return
    if run.parallel.expert_model_parallel_size == 1:
        raise refuse(
            run,
            (_OVERLAP, "expert_model_parallel_size"),
            "there is no exchange to hide; use --expert-model-parallel-size 2 or more, or drop the flag",
        )
    if run.moe.moe_token_dispatcher_type not in ("alltoall", "flex"):
        raise refuse(
            run,
            (_OVERLAP, "moe_token_dispatcher_type"),
            "the schedule takes a dispatch apart; use --moe-token-dispatcher-type alltoall or flex",
        )
    if not (run.precision.bf16 or run.precision.fp16):
        raise refuse(run, (_OVERLAP, "bf16"), "megatron-core has the schedule for half precision alone; add --bf16")
    stages = run.parallel.pipeline_model_parallel_size
    if stages > 1 and run.derived.virtual_pipeline_size is None:
        raise refuse(
            run,
            (_OVERLAP, "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
            "over several stages it is the interleaved schedule; add --num-layers-per-virtual-pipeline-stage 1, or"
            " bars to --pipeline-model-parallel-layout",
        )
    if run.derived.predictions_pipeline_rank is not None:
        raise refuse(
            run,
            (_OVERLAP, "pipeline_model_parallel_layout"),
            "multi-token prediction is computed with the loss; use mL for the last stage",
        )
    if (run.model.mtp_num_layers or 0) > 1 or (run.model.mtp_num_layers and stages == 1):
        raise refuse(
            run,
            (_OVERLAP, "mtp_num_layers", "pipeline_model_parallel_size"),
            "megatron-core takes one layer of multi-token prediction, and 0.16.1 only over several stages; use"
            " --mtp-num-layers 1 with --pipeline-model-parallel-size 2 or more, or drop one of the two",
        )


def expert_overlap_excludes(run: Run, world_size: int) -> None:
    """Refuse with overlapping micro-batches what works on whole layers, which that schedule does not call."""
    if not run.moe.overlap_moe_expert_parallel_comm:
        return
    if run.moe.moe_shared_expert_overlap:
        raise refuse(
            run,
            (_OVERLAP, "moe_shared_expert_overlap"),
            "the exchange is hidden once, behind another micro-batch; drop one of the two",
        )
    if run.training.recompute_granularity == "full" or "moe" in run.derived.recomputed_modules:
        raise refuse(
            run,
            (_OVERLAP, "recompute_granularity", "recompute_modules"),
            "a layer in parts is not recomputed as a whole; use --recompute-granularity selective, with e.g."
            " --recompute-modules moe_act layernorm",
        )
    if run.moe.moe_pad_expert_input_to_capacity:
        raise refuse(
            run,
            (_OVERLAP, "moe_pad_expert_input_to_capacity"),
            "experts' rows are not padded between the parts of a layer; drop one of the two",
        )
    if run.derived.zero_stage >= 2:
        raise refuse(
            run,
            (_OVERLAP, *set_among(run, ("data_parallel_sharding_strategy", "use_torch_fsdp2"))),
            "weights are gathered when a layer is called as a whole; use --data-parallel-sharding-strategy optim",
        )
    if run.precision.keep_fp32:
        raise refuse(
            run,
            (_OVERLAP, "keep_fp32"),
            "modules that are kept in fp32 cast what they are called with, and parts of a layer are not called so;"
            " drop one of the two",
        )
    if run.faults.loss_spike_factor is not None:
        raise refuse(
            run,
            (_OVERLAP, "loss_spike_factor"),
            "losses per token are kept when the model is called as a whole; drop one of the two",
        )


def delayed_gradients_can_work(run: Run, world_size: int) -> None:
    """Require for later gradients the schedule that finds time for them, and products that can leave them out."""
    if not run.moe.delay_wgrad_compute:
        return
    if not run.moe.overlap_moe_expert_parallel_comm:
        raise refuse(
            run,
            ("delay_wgrad_compute", _OVERLAP),
            "there is no other micro-batch's exchange to hide behind them; add --overlap-moe-expert-parallel-comm",
        )
    if run.moe.moe_expert_backend != "grouped_mm" or run.precision.fp8_format is not None:
        raise refuse(
            run,
            ("delay_wgrad_compute", "moe_expert_backend", "fp8_format"),
            "these products find the gradients of rows and weights together; use --moe-expert-backend grouped_mm"
            " without --fp8-format, or drop the flag",
        )
