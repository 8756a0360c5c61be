"""Every flag reaches the engine, or stands on the list of those that need not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace, sections
from megatron_moe.model import engine_config
from megatron_moe.model.engine_config import TRANSLATED, ddp_config, optimizer_config, transformer_config

SECTIONS = ("model", "moe", "parallel", "precision", "optimizer", "training")

MLA = {"multi_latent_attention": True, "num_attention_heads": 4, "hidden_size": 64}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2}
# field -> (a value that is not the default, what else has to be set, the engine's fields and their values)
CONFIG = {
    "num_layers": (6, {}, {"num_layers": 6, "moe_layer_freq": [0] * 6}),
    "hidden_size": (128, {}, {"hidden_size": 128}),
    "ffn_hidden_size": (96, {}, {"ffn_hidden_size": 96}),
    "num_attention_heads": (8, {}, {"num_attention_heads": 8, "num_query_groups": 8}),
    "group_query_attention": (True, {"num_query_groups": 2}, {"num_query_groups": 2}),
    "num_query_groups": (1, {"group_query_attention": True}, {"num_query_groups": 1}),
    "kv_channels": (48, {}, {"kv_channels": 48}),
    "rotary_interleaved": (True, {}, {"rotary_interleaved": True}),
    "position_embedding_type": ("none", {}, {"position_embedding_type": "none"}),
    "normalization": ("RMSNorm", {}, {"normalization": "RMSNorm"}),
    "norm_epsilon": (1e-4, {}, {"layernorm_epsilon": 1e-4}),
    "swiglu": (False, {}, {"gated_linear_unit": False, "activation_func": F.gelu}),
    "add_bias_linear": (True, {}, {"add_bias_linear": True}),
    "add_qkv_bias": (True, {}, {"add_qkv_bias": True}),
    "qk_layernorm": (True, {}, {"qk_layernorm": True}),
    "multi_latent_attention": (True, {}, {"multi_latent_attention": True}),
    "q_lora_rank": (24, MLA, {"q_lora_rank": 24}),
    "kv_lora_rank": (24, MLA, {"kv_lora_rank": 24}),
    "qk_head_dim": (24, MLA, {"qk_head_dim": 24}),
    "qk_pos_emb_head_dim": (24, MLA, {"qk_pos_emb_head_dim": 24}),
    "v_head_dim": (24, MLA, {"v_head_dim": 24}),
    "rope_type": ("yarn", MLA, {"rope_type": "yarn"}),
    "rotary_base": (5.0, MLA, {"rotary_base": 5.0}),
    "rotary_percent": (0.5, MLA, {"rotary_percent": 0.5}),
    "rotary_scaling_factor": (4.0, MLA, {"rotary_scaling_factor": 4.0}),
    "original_max_position_embeddings": (64, MLA, {"original_max_position_embeddings": 64}),
    "beta_fast": (8.0, MLA, {"beta_fast": 8.0}),
    "beta_slow": (2.0, MLA, {"beta_slow": 2.0}),
    "mscale": (0.7, MLA, {"mscale": 0.7}),
    "mscale_all_dim": (0.7, MLA, {"mscale_all_dim": 0.7}),
    "attention_dropout": (0.1, {}, {"attention_dropout": 0.1}),
    "hidden_dropout": (0.1, {}, {"hidden_dropout": 0.1}),
    "init_method_std": (0.3, {}, {"init_method_std": 0.3}),
    "mtp_num_layers": (2, {}, {"mtp_num_layers": 2}),
    "mtp_loss_scaling_factor": (0.3, {"mtp_num_layers": 1}, {"mtp_loss_scaling_factor": 0.3}),
    "transformer_impl": ("transformer_engine", {}, {"transformer_impl": "transformer_engine"}),
    "num_experts": (8, {}, {"num_moe_experts": 8}),
    "moe_layer_freq": ("[0]+[1]*3", EXPERTS, {"moe_layer_freq": [0, 1, 1, 1]}),
    "moe_ffn_hidden_size": (48, EXPERTS, {"moe_ffn_hidden_size": 48}),
    "moe_router_topk": (3, EXPERTS, {"moe_router_topk": 3}),
    "moe_router_score_function": ("sigmoid", EXPERTS, {"moe_router_score_function": "sigmoid"}),
    "moe_router_pre_softmax": (True, EXPERTS, {"moe_router_pre_softmax": True, "moe_router_norm_topk_prob": False}),
    "moe_router_norm_topk_prob": (False, EXPERTS, {"moe_router_norm_topk_prob": False}),
    "moe_router_num_groups": (4, {**EXPERTS, "moe_router_group_topk": 2}, {"moe_router_num_groups": 4}),
    "moe_router_group_topk": (2, {**EXPERTS, "moe_router_num_groups": 4}, {"moe_router_group_topk": 2}),
    "moe_router_group_score": ("max", EXPERTS, {"moe_router_group_score": "max"}),
    "moe_router_topk_scaling_factor": (2.5, EXPERTS, {"moe_router_topk_scaling_factor": 2.5}),
    "moe_router_enable_expert_bias": (
        True,
        {**EXPERTS, "moe_router_score_function": "sigmoid"},
        {"moe_router_enable_expert_bias": True},
    ),
    "moe_router_bias_update_rate": (0.5, EXPERTS, {"moe_router_bias_update_rate": 0.5}),
    "moe_router_dtype": ("fp64", EXPERTS, {"moe_router_dtype": "fp64"}),
    "moe_router_load_balancing_type": (
        ("seq_aux_loss",),
        EXPERTS,
        {"moe_router_load_balancing_type": ["seq_aux_loss"]},
    ),
    "moe_aux_loss_coeff": ((0.25,), EXPERTS, {"moe_aux_loss_coeff": [0.25]}),
    "moe_global_aux_loss_counts": ("running", EXPERTS, {"moe_global_aux_loss_counts": "running"}),
    "moe_input_jitter_eps": (0.01, EXPERTS, {"moe_input_jitter_eps": 0.01}),
    "moe_expert_capacity_factor": (1.5, EXPERTS, {"moe_expert_capacity_factor": 1.5}),
    "moe_token_drop_policy": ("position", EXPERTS, {"moe_token_drop_policy": "position"}),
    "moe_pad_expert_input_to_capacity": (
        True,
        {**EXPERTS, "moe_expert_capacity_factor": 1.5},
        {"moe_pad_expert_input_to_capacity": True},
    ),
    "moe_router_force_load_balancing": (True, EXPERTS, {"moe_router_force_load_balancing": True}),
    "moe_z_loss_coeff": (0.5, EXPERTS, {"moe_z_loss_coeff": 0.5}),
    "moe_token_dispatcher_type": ("allgather", EXPERTS, {"moe_token_dispatcher_type": "allgather"}),
    "moe_expert_backend": ("loop", EXPERTS, {"moe_expert_backend": "loop"}),
    "moe_shared_expert_intermediate_size": (48, EXPERTS, {"moe_shared_expert_intermediate_size": 48}),
    "moe_shared_expert_gate": (True, EXPERTS, {"moe_shared_expert_gate": True}),
    "tensor_model_parallel_size": (2, {}, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "sequence_parallel": (True, {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}),
    "pipeline_model_parallel_size": (2, {}, {"pipeline_model_parallel_size": 2, "deallocate_pipeline_outputs": True}),
    "num_layers_per_virtual_pipeline_stage": (
        1,
        {"pipeline_model_parallel_size": 2},
        {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False},
    ),
    "decoder_first_pipeline_num_layers": (
        1,
        {"pipeline_model_parallel_size": 2},
        {"num_layers_in_first_pipeline_stage": 1},
    ),
    "decoder_last_pipeline_num_layers": (
        1,
        {"pipeline_model_parallel_size": 2},
        {"num_layers_in_last_pipeline_stage": 1},
    ),
    "context_parallel_size": (2, {}, {"context_parallel_size": 2}),
    "cp_comm_type": ("all_gather", {}, {"cp_comm_type": "all_gather"}),
    "expert_model_parallel_size": (2, EXPERTS, {"expert_model_parallel_size": 2}),
    "expert_tensor_parallel_size": (1, {"tensor_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}),
    "bf16": (True, {}, {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}),
    "fp16": (True, {}, {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}),
    "attention_softmax_in_fp32": (False, {}, {"attention_softmax_in_fp32": False}),
    "fp32_residual_connection": (True, {"bf16": True}, {"fp32_residual_connection": True}),
    "moe_router_bias_center": (True, EXPERTS, {"moe_router_bias_center": True}),
    "calculate_per_token_loss": (True, {}, {"calculate_per_token_loss": True}),
    "recompute_granularity": ("selective", {}, {"recompute_granularity": "selective"}),
    "recompute_method": (
        "block",
        {"recompute_granularity": "full", "recompute_num_layers": 1},
        {"recompute_method": "block"},
    ),
    "recompute_num_layers": (
        2,
        {"recompute_granularity": "full", "recompute_method": "uniform"},
        {"recompute_num_layers": 2},
    ),
    "recompute_modules": (
        ("mlp",),
        {"recompute_granularity": "selective"},
        {"recomputed_modules": ("mlp",), "recompute_modules": []},
    ),
}
DDP = {
    "overlap_grad_reduce": (True, {}, {"overlap_grad_reduce": True}),
    "overlap_param_gather": (True, {}, {"overlap_param_gather": True}),
    "ddp_bucket_size": (77, {}, {"bucket_size": 77}),
    "accumulate_allreduce_grads_in_fp32": (False, {}, {"grad_reduce_in_fp32": False}),
    "grad_reduce_in_bf16": (True, {"bf16": True}, {"grad_reduce_in_fp32": False}),
    "use_distributed_optimizer": (True, {}, {"use_distributed_optimizer": True}),
}
OPTIMIZER = {
    name: (value, {}, {name: value})
    for name, value in {
        "optimizer": "adam",
        "lr": 0.5,
        "min_lr": 0.25,
        "weight_decay": 0.75,
        "adam_beta1": 0.5,
        "adam_beta2": 0.6,
        "adam_eps": 0.25,
        "clip_grad": 3.0,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "loss_scale": 8.0,
        "initial_loss_scale": 16.0,
        "min_loss_scale": 2.0,
        "loss_scale_window": 5,
        "hysteresis": 7,
        "bf16": True,
        "fp16": True,
    }.items()
}


def fields(section):
    return {field.name for field in dataclasses.fields(sections()[section])}


def test_every_flag_is_translated_or_listed_with_a_reason():
    known = set().union(*(fields(section) for section in SECTIONS))
    assert set(TRANSLATED) == known
    assert {name for name, where in TRANSLATED.items() if where == "config"} == set(CONFIG)
    assert {name for name, where in TRANSLATED.items() if where == "ddp"} <= set(DDP)
    assert {name for name, where in TRANSLATED.items() if where == "optimizer"} <= set(OPTIMIZER)


@pytest.mark.parametrize("name", CONFIG)
def test_a_model_flag_reaches_the_engine(name):
    assert_translated(name, CONFIG, transformer_config)


@pytest.mark.parametrize("name", DDP)
def test_a_gradient_flag_reaches_the_engine(name):
    assert_translated(name, DDP, ddp_config)


@pytest.mark.parametrize("name", OPTIMIZER)
def test_an_optimizer_flag_reaches_the_engine(name):
    assert_translated(name, OPTIMIZER, optimizer_config)


def assert_translated(name, table, translate):
    value, others, wanted = table[name]
    engine = translate(replace(Run(), **{**others, name: value}))
    assert {key: getattr(engine, key) for key in wanted} == wanted


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_accepted_by_the_engine(name):
    config = transformer_config(replace(Run(), **PRESETS[name]))
    assert config.num_layers == len(config.moe_layer_freq)


def test_the_engine_initialises_and_fuses_nothing_here():
    config = transformer_config(Run())
    assert config.perform_initialization is False
    assert config.enable_autocast is False
    assert config.gradient_accumulation_fusion is False
    if not torch.cuda.is_available():
        assert not (config.bias_activation_fusion or config.bias_dropout_fusion or config.masked_softmax_fusion)


def test_sequence_parallelism_needs_tensor_parallelism():
    assert transformer_config(replace(Run(), sequence_parallel=True)).sequence_parallel is False


SINGLE = ("normalization", "optimizer", "cp_comm_type")


def test_defaults_differ_from_the_tested_values():
    """Else the tests above could not fail; fields with a single possible value are the exception."""
    run = Run()
    for table in (CONFIG, DDP, OPTIMIZER):
        for name, (value, _, _) in table.items():
            section = next(section for section in SECTIONS if name in fields(section))
            assert getattr(getattr(run, section), name) != value or name in SINGLE, name
    assert engine_config.params_dtype(run) is torch.float32
