"""The rules that a run has to meet, in the order in which they are checked.

A rule is a function of (run, world size) that raises a ConfigError with flag, value, rule and a setting that works if
the run breaks it. Single values come first, so that later rules may divide by them.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_moe.config.errors import ConfigError, MissingPackage
from megatron_moe.config.rules import (
    activations,
    freezing,
    model,
    moe,
    overlap,
    parallel,
    param_groups,
    pipeline,
    precision,
    ranges,
    sources,
    training,
)
from megatron_moe.config.schema import Run

Rule = Callable[[Run, int], None]

RULES: tuple[Rule, ...] = (
    ranges.choices_are_known,
    ranges.numbers_are_in_range,
    # the transformer
    model.query_groups_go_with_their_switch,
    model.latent_flags_need_latent_attention,
    model.grouped_query_flags_need_grouped_query_attention,
    model.latent_attention_needs_rotary_embedding,
    model.heads_divide_hidden,
    model.query_groups_divide_heads,
    model.yarn_flags_need_yarn,
    model.rotary_frequencies_are_not_scaled,
    model.yarn_betas_are_ordered,
    model.rotary_width_is_even,
    model.sequence_fits_positions,
    model.padded_vocabulary_holds_its_tokens,
    model.prediction_weight_needs_its_layers,
    model.predictions_fit_the_sequence,
    # experts
    moe.moe_flags_need_experts,
    moe.layer_pattern_fits,
    moe.topk_within_experts,
    moe.grouped_products_are_aligned,
    moe.groups_come_in_pairs_of_flags,
    moe.group_score_needs_groups,
    moe.groups_divide_experts,
    moe.group_topk_within_groups,
    moe.topk_uses_every_chosen_group,
    moe.chosen_groups_hold_topk,
    moe.top2_group_score_needs_two_experts,
    moe.bias_rate_needs_expert_bias,
    moe.pre_softmax_needs_softmax,
    moe.single_expert_needs_pre_softmax,
    moe.softmax_over_chosen_is_normalised,
    moe.balancing_lists_match,
    moe.balancing_coefficients_are_read,
    moe.global_counts_need_the_global_loss,
    moe.sinkhorn_chooses_by_itself,
    moe.sinkhorn_has_no_capacity,
    moe.dropping_flags_need_a_capacity,
    moe.forced_balance_is_not_saved,
    moe.forced_balance_is_the_only_choice,
    moe.forced_balance_is_even,
    moe.shared_gate_needs_shared_expert,
    moe.shared_overlap_needs_shared_expert,
    moe.flex_flags_agree,
    moe.flex_dispatcher_can_work,
    moe.experts_are_gated_and_unbiased,
    # the layout
    parallel.tensor_parallel_divides_heads,
    parallel.tensor_parallel_divides_query_groups,
    parallel.tensor_parallel_divides_widths,
    parallel.sequence_parallel_needs_tensor_parallel,
    parallel.experts_with_tensor_parallel_need_sequence_parallel,
    parallel.sequence_divides_by_context_parallel,
    parallel.sequence_divides_by_tensor_parallel,
    parallel.context_parallel_latents_need_our_attention,
    moe.experts_divide_by_expert_parallel,
    pipeline.counted_embedding_and_loss_split_evenly,
    pipeline.layout_is_the_only_split,
    pipeline.layout_has_stages_for_all_ranks,
    pipeline.layout_is_the_model,
    pipeline.predictions_are_in_one_stage,
    pipeline.end_stage_layers_need_pipeline,
    pipeline.layers_divide_over_stages,
    pipeline.virtual_stages_need_pipeline,
    pipeline.virtual_stages_divide_layers,
    parallel.world_divides_by_model,
    parallel.world_divides_by_experts,
    parallel.sharding_flags_agree,
    parallel.zero_flags_fit_the_stage,
    parallel.sharded_gradients_need_one_stage,
    parallel.sharded_gradients_overlap_by_themselves,
    parallel.secondary_partition_divides,
    parallel.parameter_gather_overlap_needs_its_base,
    parallel.bucket_size_needs_overlap,
    parallel.global_batch_divides,
    pipeline.interleaving_needs_full_rounds,
    # precision, optimizer, length, recomputation
    precision.one_half_precision,
    precision.loss_scale_flags_need_fp16,
    precision.constant_loss_scale_is_alone,
    precision.loss_scales_are_ordered,
    precision.bf16_reduction_needs_bf16,
    precision.fused_gradients_have_fp32_sums,
    parallel.sharded_gradients_are_reduced_in_fp32,
    parallel.fp32_evaluation_needs_whole_weights,
    parallel.offloaded_gradients_are_whole,
    precision.fp32_exceptions_need_half_precision,
    precision.tf32_is_for_fp32_runs,
    precision.moments_are_stored_by_the_precision_aware_optimizer,
    model.fp32_patterns_name_modules,
    model.tied_weights_stay_together,
    freezing.frozen_patterns_name_parameters,
    freezing.frozen_parts_are_tried,
    freezing.frozen_tables_are_whole,
    param_groups.multiples_are_pairs,
    param_groups.multiples_decide_something,
    param_groups.an_average_is_saved,
    pipeline.each_stage_trains_something,
    pipeline.normed_states_travel_in_the_models_dtype,
    model.fp32_compute_is_our_own,
    precision.fp8_scales_are_per_block,
    precision.fp8_narrowing_needs_fp8,
    precision.fp8_is_for_bf16_products,
    precision.fp8_of_transformer_engine_takes_whole_tiles,
    precision.fp8_and_fp32_exclude_each_other,
    precision.audit_output_needs_audit,
    training.health_sample_needs_health,
    training.chunk_tokens_need_the_fused_loss,
    training.training_has_a_length,
    precision.audit_needs_a_second_step,
    training.learning_rates_are_ordered,
    training.decay_leaves_weights,
    training.muon_flags_need_muon,
    training.heads_are_split_apart,
    param_groups.decoupled_rates_are_ordered,
    training.samples_have_a_batch,
    training.lengths_are_given_once,
    training.warmup_is_given_once,
    training.warmup_ends_before_decay,
    training.wsd_flags_need_wsd,
    training.wsd_phases_fit,
    training.clipped_logits_need_muon,
    model.clipped_queries_are_not_normed,
    freezing.clipped_weights_are_trained,
    model.measured_attention_is_our_own,
    training.rampup_reaches_the_batch,
    training.rampup_batches_divide,
    training.evaluation_has_iterations,
    activations.full_recompute_is_described,
    activations.recompute_flags_fit_granularity,
    activations.recompute_layers_within_stage,
    activations.recomputed_modules_exist,
    activations.recomputed_modules_do_not_nest,
    activations.offload_names_modules,
    activations.offloaded_modules_exist,
    activations.offloaded_products_keep_their_input,
    activations.offloaded_modules_are_kept,
    activations.offload_takes_whole_layers,
    model.softmax_flag_is_read,
    model.attention_backend_is_read,
    model.transformer_engine_is_installed,
    # micro-batches that overlap
    overlap.expert_overlap_can_work,
    overlap.expert_overlap_excludes,
    overlap.delayed_gradients_can_work,
    # faults
    training.spikes_have_a_folder,
    # what is read and written
    sources.one_data_source,
    sources.blend_is_weighted,
    sources.split_is_three_shares,
    sources.tokenizer_is_given,
    sources.tokenizer_files_go_with_their_type,
    sources.sample_needs_tokenizer,
    sources.sample_length_needs_prompt,
    sources.save_flags_need_save,
    sources.retained_steps_are_saved,
    sources.load_flags_need_load,
    sources.imported_weights_are_a_start,
    sources.suspicious_weights_are_imported,
    sources.written_paths_are_writable,
    sources.written_files_differ,
    sources.pictures_need_metrics,
    sources.profile_is_a_range_of_steps,
    sources.settings_are_read,
    sources.mlflow_has_an_experiment,
    sources.mlflow_uri_is_public,
)


def check_model(run: Run, world_size: int) -> None:
    """Check a model without the layout on ranks, length, data and files of a run.

    Raises:
        ConfigError: from the rules about model, experts, precision or optimizer that the run breaks.
    """
    _require(run, world_size, {parallel.__name__, pipeline.__name__, sources.__name__}, has_length=False)


def check_layout(run: Run, world_size: int) -> None:
    """Check a model and its layout on ranks, without the length, data and files of a run that trains.

    Raises:
        ConfigError: from the rules about model, experts, layout, precision or optimizer that the run breaks.
    """
    _require(run, world_size, {sources.__name__}, has_length=False)


def check(run: Run, world_size: int) -> None:
    """Refuse a run that breaks a rule, before anything is allocated; reads no contents and writes nothing.

    Raises:
        ConfigError: from the rules that the run breaks on `world_size` ranks.
    """
    _require(run, world_size, set(), has_length=True)


def missing_packages(run: Run, world_size: int) -> list[str]:
    """Return what `check` leaves out for a dry run: an error for each package that is missing here."""
    found = []
    for rule in (model.transformer_engine_is_installed, moe.flex_dispatcher_can_work):
        try:
            rule(run, world_size)
        except MissingPackage as error:
            found.append(str(error))
        except ConfigError:
            pass  # `check` refuses it
    return found


def _require(run: Run, world_size: int, left_out: set[str], has_length: bool) -> None:
    """Raise the error of the first rule that a run breaks, with those of later rules about other settings.

    A later error about a setting that an earlier one names may be a consequence of that one, and is not shown.

    Args:
        left_out: modules whose rules are not asked.
    """
    found: list[ConfigError] = []
    for rule in RULES:
        if rule.__module__ in left_out or (rule is training.training_has_a_length and not has_length):
            continue
        try:
            rule(run, world_size)
        except MissingPackage as error:
            if not run.logging.dry_run:
                found.append(error)
        except ConfigError as error:
            if not found or (error.fields and all(error.fields.isdisjoint(other.fields) for other in found)):
                found.append(error)
            if not error.fields:
                break
        except Exception:
            if not found:
                raise
            break  # a rule relies on those before it
    if len(found) == 1:
        raise found[0]
    if found:
        raise ConfigError(*(problem for error in found for problem in error.problems))
