"""Rules about the split of the model and of the batch over ranks, and about the stages of the pipeline."""

from __future__ import annotations

import math

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.pipeline_layout import spelled_out
from megatron_moe.config.rules.rule import (
    LAYOUT,
    Refusal,
    divisors,
    nearest_multiples,
    rule,
    set_among,
    spelled,
    unread,
    value,
)
from megatron_moe.config.schema import Run


@rule(needs=LAYOUT)
def tensor_parallel_divides_heads(run: Run) -> None:
    """Require that every tensor-parallel rank has the same number of heads."""
    heads, tp = run.model.num_attention_heads, run.parallel.tensor_model_parallel_size
    if heads % tp:
        raise Refusal(
            ("num_attention_heads", "tensor_model_parallel_size"),
            f"the heads must divide by TP; use --tensor-model-parallel-size out of {divisors(heads)}",
        )


@rule(needs=LAYOUT)
def tensor_parallel_divides_query_groups(run: Run) -> None:
    """Require that every tensor-parallel rank has its own key/value heads; they are not replicated."""
    if run.model.multi_latent_attention or not run.model.group_query_attention:
        return
    groups, tp = run.derived.num_query_groups, run.parallel.tensor_model_parallel_size
    if groups % tp:
        raise Refusal(
            ("num_query_groups", "tensor_model_parallel_size"),
            f"the key/value heads must divide by TP; use --tensor-model-parallel-size out of {divisors(groups)}",
        )


@rule(needs=LAYOUT)
def tensor_parallel_divides_widths(run: Run) -> None:
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
            raise Refusal(
                (name, flag), f"a width of {width} must divide by {ranks}; use {nearest_multiples(width, ranks)}"
            )


@rule(needs=LAYOUT)
def sequence_parallel_needs_tensor_parallel(run: Run) -> None:
    """Refuse sequence parallelism without TP, since it splits activations over the TP ranks."""
    if run.parallel.sequence_parallel and run.parallel.tensor_model_parallel_size == 1:
        raise Refusal(
            ("sequence_parallel", "tensor_model_parallel_size"),
            "needs TP above 1; drop --sequence-parallel or use --tensor-model-parallel-size 2",
        )


@rule(needs=LAYOUT)
def experts_with_tensor_parallel_need_sequence_parallel(run: Run) -> None:
    """Require sequence parallelism for experts with TP, or all TP ranks would route the same tokens."""
    p = run.parallel
    if run.moe.num_experts is not None and p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        raise Refusal(
            ("tensor_model_parallel_size", "num_experts", "sequence_parallel"),
            "a MoE model with TP needs its tokens split over the TP ranks; add --sequence-parallel",
        )


@rule(needs=LAYOUT)
def sequence_divides_by_context_parallel(run: Run) -> None:
    """Require that every context-parallel rank has an early and a late chunk of equal length."""
    cp, length = run.parallel.context_parallel_size, run.model.seq_length
    if cp > 1 and length % (2 * cp):
        raise Refusal(
            ("seq_length", "context_parallel_size"),
            f"the sequence must divide into 2 x CP = {2 * cp} chunks; use"
            f" --seq-length {nearest_multiples(length, 2 * cp)}",
        )


@rule(needs=LAYOUT)
def sequence_divides_by_tensor_parallel(run: Run) -> None:
    """Require that every TP rank has an equal piece of the sequence, or of a CP rank's part of it."""
    tp, cp, length = (
        run.parallel.tensor_model_parallel_size,
        run.parallel.context_parallel_size,
        run.model.seq_length,
    )
    if run.parallel.sequence_parallel and cp == 1 and length % tp:
        raise Refusal(
            ("seq_length", "tensor_model_parallel_size"),
            f"the sequence must divide by TP; use --seq-length {nearest_multiples(length, tp)}",
        )
    if run.parallel.sequence_parallel and cp > 1 and length // cp % tp:
        raise Refusal(
            ("seq_length", "tensor_model_parallel_size", "context_parallel_size"),
            f"a CP rank's {length // cp} tokens must divide by TP; use"
            f" --seq-length {nearest_multiples(length, math.lcm(2 * cp, tp * cp))}",
        )


@rule(needs=LAYOUT)
def context_parallel_latents_need_our_attention(run: Run) -> None:
    """Refuse latent attention over context-parallel ranks in Transformer Engine.

    Its attention asserts that keys and values are of one width where it gathers them.
    """
    if (
        run.parallel.context_parallel_size > 1
        and run.model.multi_latent_attention
        and run.model.transformer_impl == "transformer_engine"
    ):
        raise Refusal(
            ("transformer_impl", "multi_latent_attention", "context_parallel_size"),
            "Transformer Engine's attention does not gather keys and values of two widths; use"
            " --transformer-impl local or --context-parallel-size 1",
        )


@rule()
def experts_divide_by_expert_parallel(run: Run) -> None:
    """Require that every expert-parallel rank has the same number of experts, at least one."""
    experts, ep = run.moe.num_experts, run.parallel.expert_model_parallel_size
    if experts is not None and experts % ep:
        raise Refusal(
            ("num_experts", "expert_model_parallel_size"),
            f"every rank holds equally many experts; use --expert-model-parallel-size out of {divisors(experts)}",
        )


_LAYOUT, _RANKS = "pipeline_model_parallel_layout", "pipeline_model_parallel_size"


@rule(needs=LAYOUT)
def counted_embedding_and_loss_split_evenly(run: Run) -> None:
    """Require of a split that counts embedding or loss as a layer that it is even, and the only one.

    Then the command line has written it as letters (`ignored.split_that_counts_embedding_and_loss`).
    """
    names = set_among(run, ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"))
    if not names:
        return
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    others = set_among(run, (_LAYOUT, *ends, "num_layers_per_virtual_pipeline_stage"))
    layers = run.model.num_layers + len(names)
    raise Refusal(
        (*names, "num_layers", _RANKS, *others),
        f"{layers} layers, counted so, must divide by PP and by the layers of a virtual stage, without other splits;"
        f" use --pipeline-model-parallel-size out of {divisors(layers)}, or --pipeline-model-parallel-layout",
    )


_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@rule(needs=LAYOUT)
def layout_is_the_only_split(run: Run) -> None:
    """Refuse next to a layout by letters the other flags that say which layers a stage has."""
    others = set_among(
        run,
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            *_VIRTUAL,
        ),
    )
    if run.parallel.pipeline_model_parallel_layout is not None and others:
        raise Refusal((_LAYOUT, *others), "the layout says what every stage has; drop the rest")


@rule(needs=LAYOUT)
def layout_has_stages_for_all_ranks(run: Run) -> None:
    """Require letters that can be read, as many stages on every rank, and something to do for each."""
    if run.parallel.pipeline_model_parallel_layout is None:
        return
    stages, ranks = run.derived.pipeline_stages, run.parallel.pipeline_model_parallel_size
    if len(stages) % ranks:
        raise Refusal(
            (_LAYOUT, _RANKS),
            f"the layout has {len(stages)} stages, which must be a multiple of PP; use --pipeline-model-parallel-size"
            f" out of {divisors(len(stages))}, or {nearest_multiples(len(stages), ranks)} stages",
        )
    if ranks == 1 and len(stages) > 1:
        raise Refusal(
            (_LAYOUT, _RANKS),
            "one rank has one stage; drop the layout, or use --pipeline-model-parallel-size out of"
            f" {divisors(len(stages))}",
        )
    idle = [rank for rank in range(ranks) if not any(s.letters for s in run.derived.chunks_of_pipeline_rank(rank))]
    if idle:
        raise Refusal(
            (_LAYOUT, _RANKS),
            f"pipeline rank {idle[0]} has nothing to do; give one of its stages a layer, or use fewer ranks",
        )


@rule(needs=LAYOUT)
def layout_is_the_model(run: Run) -> None:
    """Require that the letters are the model's parts, each as often as the model has it, and in its order."""
    layout = run.parallel.pipeline_model_parallel_layout
    if layout is None:
        return
    stages = spelled_out(layout)
    letters, depths = "".join(stages), run.model.mtp_num_layers or 0
    for letter, name, wanted in (("t", "num_layers", run.model.num_layers), ("m", "mtp_num_layers", depths)):
        if letters.count(letter) != wanted:
            raise Refusal(
                (_LAYOUT, name),
                f"the layout has {letters.count(letter)} times {letter}, and the model {wanted}; change one of the two",
            )
    in_order = "E" + "t" * run.model.num_layers + "m" * depths + "L"
    if letters != in_order or not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise Refusal(
            (_LAYOUT,),
            "E begins the first stage, L ends the last one, and all t, then all m, are between them; put bars into"
            f" Et*{run.model.num_layers}{'m' * depths}L",
        )


@rule(needs=LAYOUT)
def predictions_are_in_one_stage(run: Run) -> None:
    """Require one place for all layers of multi-token prediction, which the engine looks for at the end of a rank."""
    if run.parallel.pipeline_model_parallel_layout is None:
        return
    stages, ranks = run.derived.pipeline_stages, run.parallel.pipeline_model_parallel_size
    places = [index for index, stage in enumerate(stages) if stage.predictions]
    if len(places) > 1:
        raise Refusal((_LAYOUT,), "all m are computed one after the other, from one embedding; move the bar")
    rank = run.derived.predictions_pipeline_rank
    if rank is not None and (rank == 0 or places[0] < len(stages) - ranks):
        raise Refusal(
            (_LAYOUT, _RANKS),
            "the stage of m is the last stage of its rank, and not of the first rank, which has the model's embedding:"
            f" one of the last {ranks - 1} of {len(stages)} stages; move the bars, or use mL for the last stage",
        )


@rule(needs=LAYOUT)
def end_stage_layers_need_pipeline(run: Run) -> None:
    """Refuse a first or last stage that differs without pipeline parallelism."""
    stray = set_among(run, ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
    if stray and run.parallel.pipeline_model_parallel_size == 1:
        raise Refusal(
            (*stray, "pipeline_model_parallel_size"),
            "there is one stage only; drop the flag or use --pipeline-model-parallel-size 2",
        )


@rule(needs=LAYOUT)
def layers_divide_over_stages(run: Run) -> None:
    """Require a layer on every stage, and equally many on those in the middle, where no letters say otherwise."""
    if run.parallel.pipeline_model_parallel_layout is not None:
        return
    layers = run.model.num_layers
    ends = set_among(run, ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
    try:
        if min(run.derived.pipeline_layer_counts) >= 1:
            return
    except ConfigError:
        pass  # worded below, with the remedy
    raise Refusal(
        ("num_layers", "pipeline_model_parallel_size", *ends),
        "every stage needs a layer, and stages without a count of their own equally many; use"
        f" --pipeline-model-parallel-size out of {divisors(layers)}"
        + (", without those counts" if ends else ", or --decoder-first-pipeline-num-layers for an uneven rest"),
    )


@rule(needs=LAYOUT)
def virtual_stages_need_pipeline(run: Run) -> None:
    """Refuse the interleaved schedule without pipeline parallelism."""
    given = set_among(run, _VIRTUAL)
    if given and run.parallel.pipeline_model_parallel_size == 1:
        raise Refusal(
            (*given, "pipeline_model_parallel_size"),
            "needs more than one stage; drop it or use --pipeline-model-parallel-size 2",
        )


@rule(needs=LAYOUT)
def virtual_stages_divide_layers(run: Run) -> None:
    """Require that each stage's layers divide into equal virtual stages, whose size or number is given."""
    p = run.parallel
    given = set_among(run, _VIRTUAL)
    if not given:
        return
    if len(given) > 1:
        raise Refusal(given, "both say how a stage is divided; drop one of the two")
    divisor = value(run, given[0])
    ends = set_among(run, ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
    if ends:
        raise Refusal((*given, *ends), "virtual stages need equal stages; drop one or the other")
    layers = run.model.num_layers // p.pipeline_model_parallel_size
    if layers % divisor:
        raise Refusal(
            (*given, "num_layers", "pipeline_model_parallel_size"),
            f"a stage's {layers} layers must divide by the layers, or the number, of its virtual stages; use one of "
            f"{divisors(layers)}",
        )


@rule(needs=LAYOUT)
def world_divides_by_model(run: Run, world_size: int) -> None:
    """Require that the ranks have a whole number of copies of the model."""
    ranks = run.derived.model_ranks
    if world_size % ranks:
        raise Refusal(
            ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            f"the world size {world_size} must be a multiple of TP x PP x CP = {ranks}; start"
            f" {nearest_multiples(world_size, ranks)} processes",
        )


@rule(needs=LAYOUT)
def world_divides_by_experts(run: Run, world_size: int) -> None:
    """Require that the ranks have a whole number of copies of the experts."""
    ranks = run.derived.expert_ranks
    if run.moe.num_experts is not None and world_size % ranks:
        etp = run.derived.expert_tensor_parallel_size
        note = "" if run.parallel.expert_tensor_parallel_size is not None else f" (expert-TP is {etp}, as TP)"
        raise Refusal(
            ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size"),
            f"EP x expert-TP x PP = {ranks}{note} must divide the world size {world_size}; start"
            f" {nearest_multiples(world_size, ranks)} processes, or lower --expert-model-parallel-size",
        )


@rule(needs=LAYOUT)
def sharding_flags_agree(run: Run) -> None:
    """Refuse two flags that say what data-parallel ranks share, and differ in it."""
    strategy = run.parallel.data_parallel_sharding_strategy
    if run.parallel.use_torch_fsdp2 and strategy not in (None, "optim_grads_params"):
        raise Refusal(
            ("use_torch_fsdp2", "data_parallel_sharding_strategy"),
            "the first is another name of optim_grads_params; drop one of the two",
        )
    if run.optimizer.use_distributed_optimizer and strategy == "no_shard":
        raise Refusal(
            ("data_parallel_sharding_strategy", "use_distributed_optimizer"),
            "one shards the optimizer and the other does not; use --data-parallel-sharding-strategy optim, or"
            " --no-use-distributed-optimizer over a preset",
        )


def stage_flags(run: Run) -> tuple[str, ...]:
    """Return the flags that made the ZeRO stage what it is."""
    if run.parallel.use_torch_fsdp2:
        return ("use_torch_fsdp2",)
    if run.parallel.data_parallel_sharding_strategy is None and run.optimizer.use_distributed_optimizer:
        return ("use_distributed_optimizer",)
    return ("data_parallel_sharding_strategy",)


@rule(needs=LAYOUT)
def zero_flags_fit_the_stage(run: Run) -> None:
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
            raise Refusal(
                (name, *stage_flags(run)),
                f"needs ZeRO stage {' or '.join(map(str, range(lowest, 4)))}, where {why}, and this is stage {stage};"
                f" use --data-parallel-sharding-strategy {works}, or drop it",
            )


@rule(needs=LAYOUT)
def sharded_gradients_need_one_stage(run: Run) -> None:
    """Refuse sharded gradients with pipeline parallelism."""
    if run.derived.zero_stage >= 2 and run.parallel.pipeline_model_parallel_size > 1:
        raise Refusal(
            (*stage_flags(run), "pipeline_model_parallel_size"),
            "a pipeline's schedule has several micro-batches in flight, and each would gather and reduce every layer"
            " again; use --data-parallel-sharding-strategy optim, or --pipeline-model-parallel-size 1",
        )


@rule(needs=LAYOUT)
def sharded_gradients_overlap_by_themselves(run: Run) -> None:
    """Refuse the flags of the engine's gradient buckets where there are none."""
    stray = set_among(run, ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"))
    if stray and run.derived.zero_stage >= 2:
        raise Refusal(
            (*stray, *stage_flags(run)),
            "from ZeRO stage 2 on each layer is gathered and reduced behind the computation of the next, without"
            " buckets; drop it",
        )


@rule(needs=LAYOUT)
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
    raise Refusal(names, f"must divide DP x CP = {dense}, the ranks that share the dense weights{also}; {works}")


@rule(needs=LAYOUT)
def parameter_gather_overlap_needs_its_base(run: Run) -> None:
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
        raise Refusal(
            ("overlap_param_gather", *missing),
            "needs --use-distributed-optimizer and --overlap-grad-reduce; add them or drop it",
        )


unread(
    ("ddp_bucket_size",),
    "overlap_grad_reduce",
    "the size would be ignored; add --overlap-grad-reduce or drop it",
    needs=LAYOUT,
)


@rule(needs=LAYOUT)
def global_batch_divides(run: Run, world_size: int) -> None:
    """Require that every rank takes a whole number of micro-batches, at least one."""
    micro, dp = run.training.micro_batch_size, run.derived.data_parallel_size(world_size)
    batch = run.derived.global_batch_size(world_size)
    if batch % (micro * dp):
        raise Refusal(
            ("global_batch_size", "micro_batch_size"),
            f"must be a multiple of micro-batch size {micro} x DP {dp} = {micro * dp};"
            f" use --global-batch-size {nearest_multiples(batch, micro * dp)}",
        )


@rule(needs=LAYOUT)
def interleaving_needs_full_rounds(run: Run, world_size: int) -> None:
    """Require whole rounds of PP micro-batches for the interleaved schedule."""
    if run.derived.virtual_pipeline_size is None:
        return
    pp, micro = run.parallel.pipeline_model_parallel_size, run.training.micro_batch_size
    count = run.derived.num_microbatches(world_size)
    if count % pp:
        samples = micro * run.derived.data_parallel_size(world_size)
        virtual = spelled(run, set_among(run, (_LAYOUT, *_VIRTUAL))[0])
        named = f"{spelled(run, 'global_batch_size')}, {virtual}"
        sizes = nearest_multiples(count * samples, pp * samples)
        raise ConfigError(
            f"{named}, {spelled(run, 'pipeline_model_parallel_size')}: {count} micro-batches are no multiple of"
            f" {pp} stages; use --global-batch-size {sizes}"
        )
