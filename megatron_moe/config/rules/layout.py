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
    refuse,
    rule,
    set_among,
    spelled,
    stage_flags,
    unread,
    value,
)
from megatron_moe.config.schema import Run

refuse(
    "tensor_parallel_divides_heads",
    ("num_attention_heads", "tensor_model_parallel_size"),
    lambda run: (
        "the heads must divide by TP; use --tensor-model-parallel-size out of "
        f"{divisors(run.model.num_attention_heads)}"
    ),
    when=lambda run: run.model.num_attention_heads % run.parallel.tensor_model_parallel_size,
    needs=LAYOUT,
)
refuse(  # they are not replicated
    "tensor_parallel_divides_query_groups",
    ("num_query_groups", "tensor_model_parallel_size"),
    lambda run: (
        "the key/value heads must divide by TP; use --tensor-model-parallel-size out of "
        f"{divisors(run.derived.num_query_groups)}"
    ),
    when=lambda run: (
        run.model.group_query_attention
        and not run.model.multi_latent_attention
        and run.derived.num_query_groups % run.parallel.tensor_model_parallel_size
    ),
    needs=LAYOUT,
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


refuse(  # it splits activations over the TP ranks
    "sequence_parallel_needs_tensor_parallel",
    ("sequence_parallel", "tensor_model_parallel_size"),
    "needs TP above 1; drop --sequence-parallel or use --tensor-model-parallel-size 2",
    when=lambda run: run.parallel.sequence_parallel and run.parallel.tensor_model_parallel_size == 1,
    needs=LAYOUT,
)
refuse(  # or all TP ranks would route the same tokens
    "experts_with_tensor_parallel_need_sequence_parallel",
    ("tensor_model_parallel_size", "num_experts", "sequence_parallel"),
    "a MoE model with TP needs its tokens split over the TP ranks; add --sequence-parallel",
    when=lambda run: (
        run.moe.num_experts is not None
        and run.parallel.tensor_model_parallel_size > 1
        and not run.parallel.sequence_parallel
    ),
    needs=LAYOUT,
)


@rule(needs=LAYOUT)
def sequence_divides_over_ranks(run: Run) -> None:
    """Require an early and a late chunk of equal length for each CP rank, and equal pieces of that for TP ranks."""
    tp, cp = run.parallel.tensor_model_parallel_size, run.parallel.context_parallel_size
    length = run.model.seq_length
    if cp > 1 and length % (2 * cp):
        raise Refusal(
            ("seq_length", "context_parallel_size"),
            f"the sequence must divide into 2 x CP = {2 * cp} chunks; use"
            f" --seq-length {nearest_multiples(length, 2 * cp)}",
        )
    if not run.parallel.sequence_parallel or length // cp % tp == 0:
        return
    if cp == 1:
        raise Refusal(
            ("seq_length", "tensor_model_parallel_size"),
            f"the sequence must divide by TP; use --seq-length {nearest_multiples(length, tp)}",
        )
    raise Refusal(
        ("seq_length", "tensor_model_parallel_size", "context_parallel_size"),
        f"a CP rank's {length // cp} tokens must divide by TP; use"
        f" --seq-length {nearest_multiples(length, math.lcm(2 * cp, tp * cp))}",
    )


refuse(
    "context_parallel_latents_need_our_attention",
    ("transformer_impl", "multi_latent_attention", "context_parallel_size"),
    "Transformer Engine's attention does not gather keys and values of two widths; use"
    " --transformer-impl local or --context-parallel-size 1",
    when=lambda run: (
        run.parallel.context_parallel_size > 1
        and run.model.multi_latent_attention
        and run.model.transformer_impl == "transformer_engine"
    ),
    needs=LAYOUT,
)
refuse(
    "documents_apart_need_our_attention",
    ("reset_attention_mask", "transformer_impl"),
    "Transformer Engine's attention does not keep documents apart here; use --transformer-impl local",
    when=lambda run: run.data.reset_attention_mask and run.model.transformer_impl == "transformer_engine",
)
unread(
    ("mla_cp_exchange",),
    ("context_parallel_size", "multi_latent_attention"),
    "is read where ranks with latent attention share a sequence; drop it, or use --multi-latent-attention and"
    " --context-parallel-size 2",
    is_read=lambda run: run.derived.mla_cp_exchange is not None,
    needs=LAYOUT,
)
refuse(
    "experts_divide_by_expert_parallel",
    ("num_experts", "expert_model_parallel_size"),
    lambda run: (
        "every rank holds equally many experts; use --expert-model-parallel-size out of "
        f"{divisors(run.moe.num_experts or 1)}"
    ),
    when=lambda run: (run.moe.num_experts or 0) % run.parallel.expert_model_parallel_size,
)
_LAYOUT, _RANKS = "pipeline_model_parallel_layout", "pipeline_model_parallel_size"
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@rule(needs=LAYOUT)
def counted_embedding_and_loss_split_evenly(run: Run) -> None:
    """Require of a split that counts embedding or loss as a layer that it is even, and the only one.

    Then the command line has written it as letters (`ignored.split_that_counts_embedding_and_loss`).
    """
    names = set_among(run, ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"))
    if not names:
        return
    others = set_among(run, (_LAYOUT, *_ENDS, "num_layers_per_virtual_pipeline_stage"))
    layers = run.model.num_layers + len(names)
    raise Refusal(
        (*names, "num_layers", _RANKS, *others),
        f"{layers} layers, counted so, must divide by PP and by the layers of a virtual stage, without other splits;"
        f" use --pipeline-model-parallel-size out of {divisors(layers)}, or --pipeline-model-parallel-layout",
    )


refuse(
    "layout_is_the_only_split",
    (_LAYOUT,),
    "the layout says what every stage has; drop the rest",
    when=lambda run: run.parallel.pipeline_model_parallel_layout is not None,
    any_of=(*_ENDS, *_VIRTUAL),
    needs=LAYOUT,
)


@rule(needs=LAYOUT)
def layout_is_the_model_in_stages(run: Run) -> None:
    """Require letters that are the model's parts in its order, in as many stages on every rank, none of them idle.

    The layers of multi-token prediction are in one place, which the engine looks for at the end of a rank.
    """
    layout = run.parallel.pipeline_model_parallel_layout
    if layout is None:
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
    for rank in range(ranks):
        if not any(stage.letters for stage in run.derived.chunks_of_pipeline_rank(rank)):
            raise Refusal(
                (_LAYOUT, _RANKS),
                f"pipeline rank {rank} has nothing to do; give one of its stages a layer, or use fewer ranks",
            )
    letters, depths = "".join(spelled_out(layout)), run.model.mtp_num_layers or 0
    for letter, name, wanted in (("t", "num_layers", run.model.num_layers), ("m", "mtp_num_layers", depths)):
        if letters.count(letter) != wanted:
            raise Refusal(
                (_LAYOUT, name),
                f"the layout has {letters.count(letter)} times {letter}, and the model {wanted}; change one of the two",
            )
    in_order = "E" + "t" * run.model.num_layers + "m" * depths + "L"
    if letters != in_order or not stages[0].embedding or not stages[-1].loss:
        raise Refusal(
            (_LAYOUT,),
            "E begins the first stage, L ends the last one, and all t, then all m, are between them; put bars into"
            f" Et*{run.model.num_layers}{'m' * depths}L",
        )
    places = [index for index, stage in enumerate(stages) if stage.predictions]
    if len(places) > 1:
        raise Refusal((_LAYOUT,), "all m are computed one after the other, from one embedding; move the bar")
    predictions = run.derived.predictions_pipeline_rank
    if predictions is not None and (predictions == 0 or places[0] < len(stages) - ranks):
        raise Refusal(
            (_LAYOUT, _RANKS),
            "the stage of m is the last stage of its rank, and not of the first rank, which has the model's embedding:"
            f" one of the last {ranks - 1} of {len(stages)} stages; move the bars, or use mL for the last stage",
        )


refuse(
    "uneven_stages_need_pipeline",
    (_RANKS,),
    "there is one stage only; drop it or use --pipeline-model-parallel-size 2",
    when=lambda run: run.parallel.pipeline_model_parallel_size == 1,
    any_of=(*_ENDS, *_VIRTUAL),
    needs=LAYOUT,
)


@rule(needs=LAYOUT)
def layers_divide_over_stages(run: Run) -> None:
    """Require a layer on every stage, and equally many on those in the middle, where no letters say otherwise."""
    if run.parallel.pipeline_model_parallel_layout is not None:
        return
    layers = run.model.num_layers
    ends = set_among(run, _ENDS)
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
def virtual_stages_divide_layers(run: Run) -> None:
    """Require that each stage's layers divide into equal virtual stages, whose size or number is given."""
    p = run.parallel
    given = set_among(run, _VIRTUAL)
    if not given:
        return
    if len(given) > 1:
        raise Refusal(given, "both say how a stage is divided; drop one of the two")
    divisor = value(run, given[0])
    ends = set_among(run, _ENDS)
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
def world_divides_by_copies(run: Run, world_size: int) -> None:
    """Require that the ranks have a whole number of copies of the model, and of its experts."""
    ranks = run.derived.model_ranks
    if world_size % ranks:
        raise Refusal(
            ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            f"the world size {world_size} must be a multiple of TP x PP x CP = {ranks}; start"
            f" {nearest_multiples(world_size, ranks)} processes",
        )
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


refuse(
    "sharded_gradients_need_one_stage",
    lambda run: (*stage_flags(run), _RANKS),
    "a pipeline's schedule has several micro-batches in flight, and each would gather and reduce every layer"
    " again; use --data-parallel-sharding-strategy optim, or --pipeline-model-parallel-size 1",
    when=lambda run: run.derived.zero_stage >= 2 and run.parallel.pipeline_model_parallel_size > 1,
    needs=LAYOUT,
)
refuse(
    "sharded_gradients_overlap_by_themselves",
    stage_flags,
    "from ZeRO stage 2 on each layer is gathered and reduced behind the computation of the next, without buckets; drop"
    " it",
    when=lambda run: run.derived.zero_stage >= 2,
    any_of=("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"),
    needs=LAYOUT,
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
