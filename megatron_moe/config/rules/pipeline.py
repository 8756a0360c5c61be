"""Rules about the stages of the pipeline: which layers each has, and how micro-batches go through them."""

from __future__ import annotations

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.module_names import frozen, kept_in_fp32, modules
from megatron_moe.config.pipeline_layout import spelled_out
from megatron_moe.config.rules.wording import divisors, nearest_multiples, refuse, set_among, spelled, value
from megatron_moe.config.schema import Run

_LAYOUT, _RANKS = "pipeline_model_parallel_layout", "pipeline_model_parallel_size"
_VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def counted_embedding_and_loss_split_evenly(run: Run, world_size: int) -> None:
    """Require of a split that counts embedding or loss as a layer that it is even, and the only one.

    Then the command line has written it as letters (`ignored.split_that_counts_embedding_and_loss`).
    """
    names = set_among(run, ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"))
    if not names:
        return
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    others = set_among(run, (_LAYOUT, *ends, "num_layers_per_virtual_pipeline_stage"))
    layers = run.model.num_layers + len(names)
    raise refuse(
        run,
        (*names, "num_layers", _RANKS, *others),
        f"{layers} layers, counted so, must divide by PP and by the layers of a virtual stage, without other splits;"
        f" use --pipeline-model-parallel-size out of {divisors(layers)}, or --pipeline-model-parallel-layout",
    )


def layout_is_the_only_split(run: Run, world_size: int) -> None:
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
        raise refuse(run, (_LAYOUT, *others), "the layout says what every stage has; drop the rest")


def layout_has_stages_for_all_ranks(run: Run, world_size: int) -> None:
    """Require letters that can be read, as many stages on every rank, and something to do for each."""
    if run.parallel.pipeline_model_parallel_layout is None:
        return
    stages, ranks = run.derived.pipeline_stages, run.parallel.pipeline_model_parallel_size
    if len(stages) % ranks:
        raise refuse(
            run,
            (_LAYOUT, _RANKS),
            f"the layout has {len(stages)} stages, which must be a multiple of PP; use --pipeline-model-parallel-size"
            f" out of {divisors(len(stages))}, or {nearest_multiples(len(stages), ranks)} stages",
        )
    if ranks == 1 and len(stages) > 1:
        raise refuse(
            run,
            (_LAYOUT, _RANKS),
            "one rank has one stage; drop the layout, or use --pipeline-model-parallel-size out of"
            f" {divisors(len(stages))}",
        )
    idle = [rank for rank in range(ranks) if not any(s.letters for s in run.derived.chunks_of_pipeline_rank(rank))]
    if idle:
        raise refuse(
            run,
            (_LAYOUT, _RANKS),
            f"pipeline rank {idle[0]} has nothing to do; give one of its stages a layer, or use fewer ranks",
        )


def layout_is_the_model(run: Run, world_size: int) -> None:
    """Require that the letters are the model's parts, each as often as the model has it, and in its order."""
    layout = run.parallel.pipeline_model_parallel_layout
    if layout is None:
        return
    stages = spelled_out(layout)
    letters, depths = "".join(stages), run.model.mtp_num_layers or 0
    for letter, name, wanted in (("t", "num_layers", run.model.num_layers), ("m", "mtp_num_layers", depths)):
        if letters.count(letter) != wanted:
            raise refuse(
                run,
                (_LAYOUT, name),
                f"the layout has {letters.count(letter)} times {letter}, and the model {wanted}; change one of the two",
            )
    in_order = "E" + "t" * run.model.num_layers + "m" * depths + "L"
    if letters != in_order or not stages[0].startswith("E") or not stages[-1].endswith("L"):
        raise refuse(
            run,
            (_LAYOUT,),
            "E begins the first stage, L ends the last one, and all t, then all m, are between them; put bars into"
            f" Et*{run.model.num_layers}{'m' * depths}L",
        )


def predictions_are_in_one_stage(run: Run, world_size: int) -> None:
    """Require one place for all layers of multi-token prediction, which the engine looks for at the end of a rank."""
    if run.parallel.pipeline_model_parallel_layout is None:
        return
    stages, ranks = run.derived.pipeline_stages, run.parallel.pipeline_model_parallel_size
    places = [index for index, stage in enumerate(stages) if stage.predictions]
    if len(places) > 1:
        raise refuse(run, (_LAYOUT,), "all m are computed one after the other, from one embedding; move the bar")
    rank = run.derived.predictions_pipeline_rank
    if rank is not None and (rank == 0 or places[0] < len(stages) - ranks):
        raise refuse(
            run,
            (_LAYOUT, _RANKS),
            "the stage of m is the last stage of its rank, and not of the first rank, which has the model's embedding:"
            f" one of the last {ranks - 1} of {len(stages)} stages; move the bars, or use mL for the last stage",
        )


def normed_states_travel_in_the_models_dtype(run: Run, world_size: int) -> None:
    """Refuse fp32 for what a stage sends behind the final norm, which is computed where the last layer is."""
    stages = run.derived.pipeline_stages
    if not run.model.mtp_num_layers or (stages[-1].layers and stages[-1].predictions):
        return
    asks = set_among(run, ("fp32_residual_connection",))
    kept = kept_in_fp32(run)
    if "output_layer" in kept and any(name.endswith("final_layernorm") for name in kept):
        asks.append("keep_fp32")  # its output stays in fp32 then
    if asks:
        raise refuse(
            run,
            (_LAYOUT, "mtp_num_layers", *asks),
            "with multi-token prediction the final norm is where the last t is, and its output is sent on in the"
            " model's dtype; end the layout with a t before mL, or drop the rest",
        )


def end_stage_layers_need_pipeline(run: Run, world_size: int) -> None:
    """Refuse a first or last stage that differs without pipeline parallelism."""
    stray = set_among(run, ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
    if stray and run.parallel.pipeline_model_parallel_size == 1:
        raise refuse(
            run,
            (*stray, "pipeline_model_parallel_size"),
            "there is one stage only; drop the flag or use --pipeline-model-parallel-size 2",
        )


def layers_divide_over_stages(run: Run, world_size: int) -> None:
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
    raise refuse(
        run,
        ("num_layers", "pipeline_model_parallel_size", *ends),
        "every stage needs a layer, and stages without a count of their own equally many; use"
        f" --pipeline-model-parallel-size out of {divisors(layers)}"
        + (", without those counts" if ends else ", or --decoder-first-pipeline-num-layers for an uneven rest"),
    )


def virtual_stages_need_pipeline(run: Run, world_size: int) -> None:
    """Refuse the interleaved schedule without pipeline parallelism."""
    given = set_among(run, _VIRTUAL)
    if given and run.parallel.pipeline_model_parallel_size == 1:
        raise refuse(
            run,
            (*given, "pipeline_model_parallel_size"),
            "needs more than one stage; drop it or use --pipeline-model-parallel-size 2",
        )


def virtual_stages_divide_layers(run: Run, world_size: int) -> None:
    """Require that each stage's layers divide into equal virtual stages, whose size or number is given."""
    p = run.parallel
    given = set_among(run, _VIRTUAL)
    if not given:
        return
    if len(given) > 1:
        raise refuse(run, given, "both say how a stage is divided; drop one of the two")
    divisor = value(run, given[0])
    ends = set_among(run, ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"))
    if ends:
        raise refuse(
            run,
            (*given, *ends),
            "virtual stages need equal stages; drop one or the other",
        )
    layers = run.model.num_layers // p.pipeline_model_parallel_size
    if layers % divisor:
        raise refuse(
            run,
            (*given, "num_layers", "pipeline_model_parallel_size"),
            f"a stage's {layers} layers must divide by the layers, or the number, of its virtual stages; use one of "
            f"{divisors(layers)}",
        )


def each_stage_trains_something(run: Run, world_size: int) -> None:
    """Require of frozen parameters that each virtual stage keeps one to train besides its experts.

    The engine makes an optimizer for each kind of parameters on each stage, whose ranks then step together.
    """
    left_alone = frozen(run)
    if not left_alone:
        return
    trained = [
        name
        for name, parameters in modules(run).items()
        if not name.endswith(".experts") and any(f"{name}.{own}" not in left_alone for own in parameters)
    ]
    for number, stage in enumerate(run.derived.pipeline_stages):
        starts = [f"decoder.layers.{layer}." for layer in stage.layers]
        starts += ["embedding."] * stage.embedding + ["mtp."] * bool(stage.predictions)
        starts += ["decoder.final_layernorm", "output_layer"] * stage.loss
        if not any(name.startswith(tuple(starts)) for name in trained):
            raise refuse(
                run,
                ("freeze", _RANKS),
                f"stage {number} of the pipeline, counted from 0, has nothing to train but experts; leave a parameter "
                f"of it out of the patterns, e.g. its norms, or use fewer stages",
            )


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
