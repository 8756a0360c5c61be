"""Rules about the split of the model and of the batch over ranks."""

from __future__ import annotations

import math

from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.rules.wording import divisors, nearest_multiples, refuse, set_among
from megatron_moe.config.schema import Run


def sequence_divides_by_context_parallel(run: Run, world_size: int) -> None:
    """Require that every context-parallel rank has an early and a late chunk of equal length."""
    cp, length = run.parallel.context_parallel_size, run.model.seq_length
    if cp > 1 and length % (2 * cp):
        raise refuse(
            run,
            ("seq_length", "context_parallel_size"),
            f"the sequence must divide into 2 x CP = {2 * cp} chunks; use"
            f" --seq-length {nearest_multiples(length, 2 * cp)}",
        )


def context_parallel_latents_need_our_attention(run: Run, world_size: int) -> None:
    """Refuse latent attention over context-parallel ranks in Transformer Engine.

    Its attention asserts that keys and values are of one width where it gathers them.
    """
    if (
        run.parallel.context_parallel_size > 1
        and run.model.multi_latent_attention
        and run.model.transformer_impl == "transformer_engine"
    ):
        raise refuse(
            run,
            ("transformer_impl", "multi_latent_attention", "context_parallel_size"),
            "Transformer Engine's attention does not gather keys and values of two widths; use"
            " --transformer-impl local or --context-parallel-size 1",
        )


def tensor_parallel_divides_heads(run: Run, world_size: int) -> None:
    """Require that every tensor-parallel rank has the same number of heads."""
    heads, tp = run.model.num_attention_heads, run.parallel.tensor_model_parallel_size
    if heads % tp:
        raise refuse(
            run,
            ("num_attention_heads", "tensor_model_parallel_size"),
            f"the heads must divide by TP; use --tensor-model-parallel-size out of {divisors(heads)}",
        )


def tensor_parallel_divides_query_groups(run: Run, world_size: int) -> None:
    """Require that every tensor-parallel rank has its own key/value heads; they are not replicated."""
    if run.model.multi_latent_attention or not run.model.group_query_attention:
        return
    groups, tp = run.derived.num_query_groups, run.parallel.tensor_model_parallel_size
    if groups % tp:
        raise refuse(
            run,
            ("num_query_groups", "tensor_model_parallel_size"),
            f"the key/value heads must divide by TP; use --tensor-model-parallel-size out of {divisors(groups)}",
        )


def tensor_parallel_divides_widths(run: Run, world_size: int) -> None:
    """Require that TP divides the MLP's and the shared expert's width, and expert-TP an expert's."""
    tp = run.parallel.tensor_model_parallel_size
    widths = {"ffn_hidden_size": (run.derived.ffn_hidden_size, tp, "tensor_model_parallel_size")}
    if run.moe.num_experts is not None:
        etp = run.derived.expert_tensor_parallel_size
        flag = (
            "tensor_model_parallel_size"
            if run.parallel.expert_tensor_parallel_size is None
            else "expert_tensor_parallel_size"
        )
        widths["moe_ffn_hidden_size"] = (run.derived.moe_ffn_hidden_size, etp, flag)
        shared = run.moe.moe_shared_expert_intermediate_size or 0
        widths["moe_shared_expert_intermediate_size"] = (shared, tp, "tensor_model_parallel_size")
        if all(run.derived.moe_layer_pattern):
            del widths["ffn_hidden_size"]
    for name, (width, ranks, flag) in widths.items():
        if width % ranks:
            raise refuse(
                run, (name, flag), f"a width of {width} must divide by {ranks}; use {nearest_multiples(width, ranks)}"
            )


def sequence_parallel_needs_tensor_parallel(run: Run, world_size: int) -> None:
    """Refuse sequence parallelism without TP, since it splits activations over the TP ranks."""
    if run.parallel.sequence_parallel and run.parallel.tensor_model_parallel_size == 1:
        raise refuse(
            run,
            ("sequence_parallel", "tensor_model_parallel_size"),
            "needs TP above 1; drop --sequence-parallel or use --tensor-model-parallel-size 2",
        )


def experts_with_tensor_parallel_need_sequence_parallel(run: Run, world_size: int) -> None:
    """Require sequence parallelism for experts with TP, or all TP ranks would route the same tokens."""
    p = run.parallel
    if run.moe.num_experts is not None and p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        raise refuse(
            run,
            ("tensor_model_parallel_size", "num_experts", "sequence_parallel"),
            "a MoE model with TP needs its tokens split over the TP ranks; add --sequence-parallel",
        )


def sequence_divides_by_tensor_parallel(run: Run, world_size: int) -> None:
    """Require that every TP rank has an equal piece of the sequence, or of a CP rank's part of it."""
    tp, cp, length = (
        run.parallel.tensor_model_parallel_size,
        run.parallel.context_parallel_size,
        run.model.seq_length,
    )
    if run.parallel.sequence_parallel and cp == 1 and length % tp:
        raise refuse(
            run,
            ("seq_length", "tensor_model_parallel_size"),
            f"the sequence must divide by TP; use --seq-length {nearest_multiples(length, tp)}",
        )
    if run.parallel.sequence_parallel and cp > 1 and length // cp % tp:
        raise refuse(
            run,
            ("seq_length", "tensor_model_parallel_size", "context_parallel_size"),
            f"a CP rank's {length // cp} tokens must divide by TP; use"
            f" --seq-length {nearest_multiples(length, math.lcm(2 * cp, tp * cp))}",
        )


def world_divides_by_model(run: Run, world_size: int) -> None:
    """Require that the ranks have a whole number of copies of the model."""
    ranks = run.derived.model_ranks
    if world_size % ranks:
        raise refuse(
            run,
            ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            f"the world size {world_size} must be a multiple of TP x PP x CP = {ranks}; start"
            f" {nearest_multiples(world_size, ranks)} processes",
        )


def world_divides_by_experts(run: Run, world_size: int) -> None:
    """Require that the ranks have a whole number of copies of the experts."""
    ranks = run.derived.expert_ranks
    if run.moe.num_experts is not None and world_size % ranks:
        etp = run.derived.expert_tensor_parallel_size
        note = "" if run.parallel.expert_tensor_parallel_size is not None else f" (expert-TP is {etp}, as TP)"
        raise refuse(
            run,
            ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size"),
            f"EP x expert-TP x PP = {ranks}{note} must divide the world size {world_size}; start"
            f" {nearest_multiples(world_size, ranks)} processes, or lower --expert-model-parallel-size",
        )


def sharding_flags_agree(run: Run, world_size: int) -> None:
    """Refuse two flags that say what data-parallel ranks share, and differ in it."""
    strategy = run.parallel.data_parallel_sharding_strategy
    if run.parallel.use_torch_fsdp2 and strategy not in (None, "optim_grads_params"):
        raise refuse(
            run,
            ("use_torch_fsdp2", "data_parallel_sharding_strategy"),
            "the first is another name of optim_grads_params; drop one of the two",
        )
    if run.optimizer.use_distributed_optimizer and strategy == "no_shard":
        raise refuse(
            run,
            ("data_parallel_sharding_strategy", "use_distributed_optimizer"),
            "one shards the optimizer and the other does not; use --data-parallel-sharding-strategy optim, or"
            " --no-use-distributed-optimizer over a preset",
        )


def zero_flags_fit_the_stage(run: Run, world_size: int) -> None:
    """Require of each ZeRO++ switch a stage that sends or keeps what it changes."""
    needed = {
        "zero_quantized_weights": (2, "weights are gathered"),
        "zero_quantized_gradients": (2, "gradients are reduced to shards"),
        "zero_hpz_partition_size": (3, "weights are gathered again in the backward pass"),
    }
    stage = run.derived.zero_stage
    for name in set_among(run, needed):
        lowest, why = needed[name]
        if stage < lowest:
            works = " or ".join(SHARDING_STRATEGIES[lowest:])
            raise refuse(
                run,
                (name, *_stage_flags(run)),
                f"needs ZeRO stage {' or '.join(map(str, range(lowest, 4)))}, where {why}, and this is stage {stage};"
                f" use --data-parallel-sharding-strategy {works}, or drop it",
            )


def _stage_flags(run: Run) -> tuple[str, ...]:
    """Return the flags that made the ZeRO stage what it is."""
    if run.parallel.use_torch_fsdp2:
        return ("use_torch_fsdp2",)
    if run.parallel.data_parallel_sharding_strategy is None and run.optimizer.use_distributed_optimizer:
        return ("use_distributed_optimizer",)
    return ("data_parallel_sharding_strategy",)


def sharded_gradients_need_one_stage(run: Run, world_size: int) -> None:
    """Refuse sharded gradients with pipeline parallelism."""
    if run.derived.zero_stage >= 2 and run.parallel.pipeline_model_parallel_size > 1:
        raise refuse(
            run,
            (*_stage_flags(run), "pipeline_model_parallel_size"),
            "a pipeline's schedule has several micro-batches in flight, and each would gather and reduce every layer"
            " again; use --data-parallel-sharding-strategy optim, or --pipeline-model-parallel-size 1",
        )


def sharded_gradients_overlap_by_themselves(run: Run, world_size: int) -> None:
    """Refuse the flags of the engine's gradient buckets where there are none."""
    stray = set_among(run, ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"))
    if stray and run.derived.zero_stage >= 2:
        raise refuse(
            run,
            (*stray, *_stage_flags(run)),
            "from ZeRO stage 2 on each layer is gathered and reduced behind the computation of the next, without"
            " buckets; drop it",
        )


def sharded_gradients_are_reduced_in_fp32(run: Run, world_size: int) -> None:
    """Refuse gradients in half precision where they are sharded: shards are fp32."""
    half = run.precision.bf16 or run.precision.fp16
    if run.derived.zero_stage >= 2 and half and not run.derived.grads_in_fp32:
        raise refuse(
            run,
            (
                *set_among(run, ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32")),
                *_stage_flags(run),
            ),
            "from ZeRO stage 2 on gradients are reduced in fp32; drop it, and use --zero-quantized-gradients int8 to"
            " send fewer bytes",
        )


def offloaded_gradients_are_whole(run: Run, world_size: int) -> None:
    """Refuse to offload gradients with tensor parallelism, whose ranks add up those of what they all hold."""
    offloads = run.optimizer.optimizer_cpu_offload and run.derived.zero_stage >= 2
    if offloads and run.parallel.tensor_model_parallel_size > 1:
        raise refuse(
            run,
            ("optimizer_cpu_offload", "tensor_model_parallel_size", *_stage_flags(run)),
            "gradients in host memory cannot be added up over a GPU's tensor-parallel ranks; use"
            " --data-parallel-sharding-strategy optim, which offloads the moments alone, or drop the offload",
        )


def fp32_evaluation_needs_whole_weights(run: Run, world_size: int) -> None:
    """Refuse evaluation in fp32 where weights are gathered in the model's dtype."""
    half = run.precision.bf16 or run.precision.fp16
    if run.derived.zero_stage >= 2 and half and run.precision.eval_in_fp32:
        raise refuse(
            run,
            ("eval_in_fp32", *_stage_flags(run)),
            "from ZeRO stage 2 on weights are gathered in the model's dtype; drop it, or use"
            " --data-parallel-sharding-strategy optim",
        )


def secondary_partition_divides(run: Run, world_size: int) -> None:
    """Require that secondary partitions make up the DP x CP ranks, and hold each expert equally often.

    A partition of N has N x TP ranks of the world, of which each EP x ETP neighbours hold different experts.
    """
    size = run.parallel.zero_hpz_partition_size
    if size is None:
        return
    dense = run.derived.data_parallel_size(world_size) * run.parallel.context_parallel_size
    copies = run.derived.expert_data_parallel_size(world_size)
    experts = run.derived.expert_ranks

    def fits(candidate: int) -> bool:
        ranks = candidate * run.parallel.tensor_model_parallel_size
        return dense % candidate == 0 and (copies == 1 or ranks % experts == 0 or experts % ranks == 0)

    if fits(size):
        return
    common = [candidate for candidate in range(2, dense + 1) if fits(candidate)]
    works = f"use one of {', '.join(map(str, common))}" if common else "drop it"
    also = (
        "" if copies == 1 else f", and with TP be a divisor or a multiple of the {experts} ranks of one set of experts"
    )
    names = ["zero_hpz_partition_size", *set_among(run, ("context_parallel_size", "expert_model_parallel_size"))]
    raise refuse(run, names, f"must divide DP x CP = {dense}, the ranks that share the dense weights{also}; {works}")


def parameter_gather_overlap_needs_its_base(run: Run, world_size: int) -> None:
    """Require the distributed optimizer and its overlap for gathering parameters behind the forward pass."""
    missing = [
        name
        for name, there in (
            ("use_distributed_optimizer", run.derived.zero_stage >= 1),
            ("overlap_grad_reduce", run.parallel.overlap_grad_reduce),
        )
        if not there
    ]
    if run.parallel.overlap_param_gather and missing:
        raise refuse(
            run,
            ("overlap_param_gather", *missing),
            "needs --use-distributed-optimizer and --overlap-grad-reduce; add them or drop it",
        )


def bucket_size_needs_overlap(run: Run, world_size: int) -> None:
    """Refuse a bucket size without overlap, where there is one bucket."""
    if run.parallel.ddp_bucket_size is not None and not run.parallel.overlap_grad_reduce:
        raise refuse(
            run,
            ("ddp_bucket_size", "overlap_grad_reduce"),
            "the size would be ignored; add --overlap-grad-reduce or drop it",
        )


def global_batch_divides(run: Run, world_size: int) -> None:
    """Require that every rank takes a whole number of micro-batches, at least one."""
    micro, dp = run.training.micro_batch_size, run.derived.data_parallel_size(world_size)
    batch = run.derived.global_batch_size(world_size)
    if batch % (micro * dp):
        raise refuse(
            run,
            ("global_batch_size", "micro_batch_size"),
            f"must be a multiple of micro-batch size {micro} x DP {dp} = {micro * dp};"
            f" use --global-batch-size {nearest_multiples(batch, micro * dp)}",
        )
