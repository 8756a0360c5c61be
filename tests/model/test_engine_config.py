"""Every flag reaches the engine's configurations, or the settings that our own modules are built with."""

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_moe import platform
from megatron_moe.config import rules
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import ModelConfig
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace, sections
from megatron_moe.model import engine_config
from megatron_moe.model.engine_config import (
    AttentionConfig,
    LayerSettings,
    ddp_config,
    optimizer_config,
    transformer_config,
)
from megatron_moe.model.rotary import Rotation
from megatron_moe.moe.options import MoEOptions
from megatron_moe_tools.plan.tracing import trace_ranks
from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

SECTIONS = ("model", "moe", "parallel", "precision", "optimizer", "training")

MLA = {"multi_latent_attention": True, "num_attention_heads": 4, "hidden_size": 64}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2}
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FLEX = {**EXPERTS, "moe_token_dispatcher_type": "flex"}
Row = tuple[Any, dict[str, Any], dict[str, Any]]


def same(others: dict[str, Any], **fields: Any) -> dict[str, Row]:
    """Rows of fields that the engine has under the same names."""
    return {name: (value, others, {name: value}) for name, value in fields.items()}


def without(prefix: str, others: dict[str, Any], **fields: Any) -> dict[str, Row]:
    """Rows of fields that our options have under the same names without a prefix."""
    return {name: (value, others, {name.removeprefix(prefix): value}) for name, value in fields.items()}


def rotated(**fields: Any) -> dict[str, Row]:
    """Rows of fields that say how heads of 64 channels are rotated."""
    return {
        name: (value, {}, {"rotation": Rotation(ModelConfig(**{name: value}), 64)}) for name, value in fields.items()
    }


def library(name: str, num_sms: int | None) -> dict[str, Any]:
    return {"dispatcher_settings": {"library": name, "num_sms": num_sms}}


def stages(text: str) -> list[list[str]]:
    """Return the layers of each pipeline stage: E an embedding, t a layer of the decoder, L the loss."""
    names = {"E": "embedding", "t": "decoder", "L": "loss"}
    return [[names[letter] for letter in stage] for stage in text.split("|")]


LAYOUT = "pipeline_model_parallel_layout"
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}
# field -> (a value that is not the default, what else has to be set, the engine's fields and their values)
CONFIG: dict[str, Row] = {
    "num_layers": (6, {}, {"num_layers": 6, "moe_layer_freq": [0] * 6}),
    "num_attention_heads": (8, {}, {"num_attention_heads": 8, "num_query_groups": 8}),
    "group_query_attention": (True, {"num_query_groups": 2}, {"num_query_groups": 2}),
    "norm_epsilon": (1e-4, {}, {"layernorm_epsilon": 1e-4}),
    "swiglu": (False, {}, {"gated_linear_unit": False, "activation_func": F.gelu}),
    "quick_geglu": (True, {"swiglu": False}, {"gated_linear_unit": True, "activation_func": engine_config.quick_gelu}),
    **same({}, glu_linear_offset=1.0, activation_func_clamp_value=7.0, softmax_type="learnable"),
    "window_size": ("7,0", {}, {"window_size": (7, 0), "window_attn_skip_freq": [1] * 4}),
    "window_attn_skip_freq": (2, {"window_size": "7,0"}, {"window_attn_skip_freq": [1, 0, 1, 0]}),
    "attention_backend": ("fused", {}, {"attention_backend": AttnBackend.fused}),
    "num_experts": (8, {}, {"num_moe_experts": 8}),
    "moe_layer_freq": ("[0]+[1]*3", EXPERTS, {"moe_layer_freq": [0, 1, 1, 1]}),
    "tensor_model_parallel_size": (2, {}, {**TP2, "expert_tensor_parallel_size": 2}),
    "pipeline_model_parallel_size": (2, {}, {**PP2, "deallocate_pipeline_outputs": True}),
    "num_layers_per_virtual_pipeline_stage": (1, PP2, {**VIRTUAL, "batch_p2p_comm": False}),
    "decoder_first_pipeline_num_layers": (1, PP2, {LAYOUT: stages("Et|tttL")}),
    "decoder_last_pipeline_num_layers": (1, PP2, {LAYOUT: stages("Ettt|tL")}),
    "pipeline_model_parallel_layout": ("Et|t|tt|L", PP2, {**VIRTUAL, LAYOUT: stages("Et|t|tt|L")}),
    "bf16": (True, {}, {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}),
    "fp16": (True, {}, {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}),
    "recompute_modules": (
        ("mlp", "layernorm", "core_attn"),
        SELECTIVE,
        {"recompute_modules": ["layernorm", "core_attn"]},
    ),
    "qk_clip": (True, {"optimizer": "muon"}, {"log_max_attention_logit": True}),
    "qk_layernorm_across_heads": (True, {"qk_layernorm": True}, {"qk_layernorm": False}),
    **same({}, hidden_size=128, ffn_hidden_size=96, kv_channels=48, rotary_interleaved=True, qk_layernorm=True),
    **same({}, normalization="RMSNorm", add_bias_linear=True, add_qkv_bias=True, multi_latent_attention=True),
    **same({}, softmax_scale=0.3, attention_dropout=0.1, hidden_dropout=0.1, init_method_std=0.3, mtp_num_layers=2),
    **same({}, transformer_impl="transformer_engine", context_parallel_size=2, cp_comm_type="all_gather"),
    **same({}, attention_softmax_in_fp32=False, deterministic_mode=True, gradient_accumulation_fusion=False),
    **same({}, calculate_per_token_loss=True, recompute_granularity="selective"),
    **same({"group_query_attention": True}, num_query_groups=1),
    **same(MLA, q_lora_rank=24, kv_lora_rank=24, qk_head_dim=24, qk_pos_emb_head_dim=24, v_head_dim=24),
    **same({"mtp_num_layers": 1}, mtp_loss_scaling_factor=0.3),
    **same(TP2, sequence_parallel=True, expert_tensor_parallel_size=1),
    **same(EXPERTS, expert_model_parallel_size=2, moe_ffn_hidden_size=48),
    **same({"bf16": True}, fp32_residual_connection=True),
    **same(FULL, recompute_method="block", recompute_num_layers=2),
}
# The same for the fields of MoEOptions, which every MoE layer is built with.
BF16 = {**EXPERTS, "bf16": True}
CAPACITY = {**EXPERTS, "moe_expert_capacity_factor": 1.5}
HYBRID_EP = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}
AUX_LOSS = {**EXPERTS, "moe_router_load_balancing_type": ("aux_loss",)}
QUANTILES = {
    **{"moe_router_load_balancing_type": ("quantile_balancing",), "moe_router_enable_expert_bias": True},
    **{**EXPERTS, "moe_router_score_function": "sigmoid"},
}
MOE = {
    **same({}, num_experts=8),
    **same(EXPERTS, hidden_size=128, ffn_hidden_size=96),
    **same(BF16, fp8_format="hybrid"),
    **without("moe_", EXPERTS, moe_input_jitter_eps=0.01, moe_z_loss_coeff=0.5),
    **without("moe_router_", EXPERTS, moe_router_topk=3, moe_router_group_score="max", moe_router_bias_center=True),
    **without("moe_router_", EXPERTS, moe_router_norm_topk_prob=False, moe_router_enable_expert_bias=True),
    **without("moe_router_", EXPERTS, moe_router_bias_update_rate=0.5, moe_router_force_load_balancing=True),
    **without("moe_router_", {**EXPERTS, "moe_router_group_topk": 2}, moe_router_num_groups=4),
    **without("moe_router_", {**EXPERTS, "moe_router_num_groups": 4}, moe_router_group_topk=2),
    **without("moe_token_", EXPERTS, moe_token_drop_policy="position"),
    **without("moe_expert_", EXPERTS, moe_expert_capacity_factor=1.5, moe_expert_backend="loop"),
    "moe_ffn_hidden_size": (48, EXPERTS, {"ffn_hidden_size": 48}),
    "moe_router_score_function": ("sigmoid", EXPERTS, {"score_function": "sigmoid", "norm_topk_prob": True}),
    "moe_router_pre_softmax": (True, EXPERTS, {"pre_softmax": True, "norm_topk_prob": False}),
    "moe_router_topk_scaling_factor": (2.5, EXPERTS, {"scaling_factor": 2.5}),
    "moe_router_dtype": ("fp64", EXPERTS, {"router_dtype": torch.float64}),
    "moe_router_load_balancing_type": (
        ("seq_aux_loss",),
        {**EXPERTS, "moe_aux_loss_coeff": (0.5,)},
        {"aux_losses": (("seq_aux_loss", 0.5),)},
    ),
    "moe_router_quantile_balancing_ema": (0.5, QUANTILES, {"quantile_ema": 0.5}),
    "moe_router_quantile_balancing_num_bins": (9, QUANTILES, {"quantile_bins": 9}),
    "moe_aux_loss_coeff": ((0.25,), AUX_LOSS, {"aux_losses": (("aux_loss", 0.25),)}),
    "moe_global_aux_loss_counts": ("running", EXPERTS, {"global_counts": "running"}),
    "moe_seq_aux_loss_per": ("document", EXPERTS, {"seq_loss_per": "document"}),
    "moe_pad_expert_input_to_capacity": (True, CAPACITY, {"pad_to_capacity": True}),
    "moe_token_dispatcher_type": ("allgather", EXPERTS, {"dispatcher": "allgather"}),
    "moe_alltoall_by_node": (True, EXPERTS, {"dispatcher_settings": {"by_node": True}}),
    "moe_enable_deepep": (True, FLEX, {"dispatcher": "flex"}),
    "moe_flex_dispatcher_backend": ("hybridep", FLEX, library("hybridep", None)),
    "moe_deepep_num_sms": (24, FLEX, library("deepep", 24)),
    "moe_hybridep_num_sms": (16, HYBRID_EP, library("hybridep", 16)),
    "moe_shared_expert_overlap": (True, EXPERTS, {"shared_overlap": True}),
    "delay_wgrad_compute": (True, EXPERTS, {"delay_wgrad": True}),
    "overlap_moe_expert_parallel_comm": (True, EXPERTS, {"in_steps": True}),
    "fp8_modules": (("attention",), {**BF16, "fp8_format": "e4m3"}, {"fp8_format": None}),
    "gradient_accumulation_fusion": (True, EXPERTS, {"fuse_weight_gradients": True}),
    "moe_shared_expert_intermediate_size": (48, EXPERTS, {"shared_ffn_hidden_size": 48}),
    "moe_shared_expert_gate": (True, EXPERTS, {"shared_gate": True}),
    "calculate_per_token_loss": (True, EXPERTS, {"per_token_loss": True}),
    "add_bias_linear": (True, EXPERTS, {"biases": True}),
    "quick_geglu": (True, EXPERTS, {"quick_gelu": True}),
    "activation_func_clamp_value": (7.0, EXPERTS, {"activation_clamp": 7.0}),
    "glu_linear_offset": (1.0, EXPERTS, {"linear_offset": 1.0}),
    "recompute_granularity": ("selective", {**EXPERTS, "recompute_modules": ("moe",)}, {"recompute": True}),
    "recompute_modules": (
        ("moe_act", "shared_experts"),
        {**EXPERTS, **SELECTIVE},
        {"recompute": False, "recompute_activation": True, "recompute_shared_experts": True},
    ),
}
# And for what else our modules are told, LayerSettings.
LAYER: dict[str, Row] = {
    "qk_layernorm_after_rotation": (True, {}, {"qk_layernorm_after_rotation": True}),
    "residual_multiplier": (0.5, {}, {"residual_multiplier": 0.5}),
    "position_embedding_type": ("none", {}, {"rotation": None}),
    "qk_pos_emb_head_dim": (24, MLA, {"rotation": Rotation(replace(Run(), **MLA, qk_pos_emb_head_dim=24).model, 24)}),
    "rotary_percent": (0.5, {}, {"rotation": Rotation(ModelConfig(rotary_percent=0.5), 32)}),
    **rotated(rotary_base=5.0, rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=64),
    **rotated(beta_fast=8.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.7, attention_factor=1.5),
    **rotated(yarn_correction_range_round_to_int=False, low_freq_factor=0.5, high_freq_factor=8.0),
    **rotated(short_factor=(1.0,), long_factor=(2.0,)),
    "mla_cp_exchange": ("expanded", {**MLA, "context_parallel_size": 2}, {"gathers_latents": False}),
    "first_last_layers_bf16": (True, {}, {"bf16_layers": (0, 3)}),
    "num_layers_at_start_in_bf16": (2, {"first_last_layers_bf16": True}, {"bf16_layers": (0, 1, 3)}),
    "num_layers_at_end_in_bf16": (0, {"first_last_layers_bf16": True}, {"bf16_layers": (0,)}),
    "recompute_granularity": ("selective", {}, {"recomputed": ("core_attn",)}),
    "recompute_modules": (("mlp",), SELECTIVE, {"recomputed": ("mlp",)}),
    **same({"qk_layernorm": True}, qk_layernorm_across_heads=True),
    **same({}, reordered_norm=True),
}
# Read together, where there are streams.
OVERLAP = {"overlap_moe_expert_parallel_comm", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend"}
DDP = {
    **same({}, overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True),
    "ddp_bucket_size": (77, {}, {"bucket_size": 77}),
    "accumulate_allreduce_grads_in_fp32": (False, {}, {"grad_reduce_in_fp32": False}),
    "grad_reduce_in_bf16": (True, {"bf16": True}, {"grad_reduce_in_fp32": False}),
}
OPTIMIZER = {
    **same({}, optimizer="adam", lr=0.5, min_lr=0.25, weight_decay=0.75, adam_beta1=0.5, adam_beta2=0.6, adam_eps=0.25),
    **same({}, clip_grad=3.0, use_distributed_optimizer=True, overlap_param_gather=True),
    "bf16": (True, {}, {"bf16": True, "params_dtype": torch.bfloat16}),
    "fp16": (True, {}, {"fp16": True, "params_dtype": torch.float16}),
    **same({}, loss_scale=8.0, initial_loss_scale=16.0, min_loss_scale=2.0, loss_scale_window=5, hysteresis=7),
}
TABLES: dict[str, tuple[dict[str, Row], Callable[[Run], Any]]] = {
    "the engine's model": (CONFIG, transformer_config),
    "every MoE layer": (MOE, MoEOptions.from_run),
    "our modules": (LAYER, LayerSettings.from_run),
    "the engine's gradients": (DDP, ddp_config),
    "the engine's optimizer": (OPTIMIZER, optimizer_config),
}

SINGLE = ("normalization", "optimizer", "cp_comm_type", "moe_flex_dispatcher_backend")
"""Fields with a single value that can be tested here."""


def fields(section):
    return {field.name for field in dataclasses.fields(sections()[section])}


def test_every_field_that_is_read_to_build_a_model_has_a_row_here():
    known = set().union(*(fields(section) for section in SECTIONS))
    package = Path(engine_config.__file__).parents[1]
    for file, tables in {
        "model/engine_config.py": (CONFIG, DDP, OPTIMIZER, OVERLAP, LAYER),
        "moe/options.py": (MOE,),
        "model/rotary.py": (LAYER, CONFIG),
    }.items():
        nodes = [node for node in ast.walk(ast.parse((package / file).read_text())) if isinstance(node, ast.Attribute)]
        # `run.optimizer` is a section, `run.optimizer.optimizer` a field of it
        read = {node.attr for node in nodes if ast.unparse(node.value) != "run"} & known
        assert read and read - set().union(*tables) == set(), file
    of_model = {name for name in known if name.startswith("moe_") and "routing_replay" not in name}
    assert of_model - set(MOE) - set(CONFIG) == set()


def test_the_schedule_of_two_micro_batches_is_chosen_where_there_are_streams(monkeypatch):
    flags = {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "flex"}
    library = {"moe_flex_dispatcher_backend": "hybridep", "expert_model_parallel_size": 2, "bf16": True}
    run = replace(Run(), **EXPERTS, **flags, **library)
    assert not transformer_config(run).overlap_moe_expert_parallel_comm
    monkeypatch.setattr(engine_config.platform, "has_streams", lambda: True)
    config = transformer_config(run)
    assert {name: getattr(config, name) for name in OVERLAP} == {**flags, "moe_flex_dispatcher_backend": "hybridep"}
    assert not config.delay_wgrad_compute, "Transformer Engine's layers would wait for a call"
    assert not transformer_config(replace(run, overlap_moe_expert_parallel_comm=False)).overlap_moe_expert_parallel_comm


def test_the_engine_is_given_no_setting_of_our_router():
    """Its checks would refuse what our router does, as 0.16.1 refuses an expert bias with softmax scores."""
    stock = TransformerConfig(num_layers=4, hidden_size=256, num_attention_heads=4)
    everything = {name: row[0] for name, row in MOE.items() if name.startswith("moe_")} | EXPERTS
    config = transformer_config(replace(Run(), **everything, moe_layer_freq="[0]+[1]*3"))
    given = {"moe_layer_freq", "moe_ffn_hidden_size", "moe_router_dtype"}
    names = {field.name for field in dataclasses.fields(stock) if field.name.startswith("moe_")}
    assert {name for name in names if getattr(config, name) != getattr(stock, name)} == given
    assert {type(config), type(transformer_config(replace(Run(), **MLA)))} == {AttentionConfig, MLATransformerConfig}


def test_every_option_of_a_moe_layer_has_a_row_here():
    told = set().union(*(wanted for _, _, wanted in MOE.values()))
    assert {field.name for field in dataclasses.fields(MoEOptions)} - told == {"sinkhorn"}
    run = replace(Run(), **EXPERTS, moe_router_load_balancing_type=("sinkhorn",))
    options = MoEOptions.from_run(run)
    assert (options.sinkhorn, options.pre_softmax, options.norm_topk_prob) == (True, True, False)
    assert MoEOptions.from_run(replace(run, moe_router_topk=1)).score_function == "sigmoid"


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (rows, _) in TABLES.items() for name in rows])
def test_a_flag_reaches_what_it_is_about(kind, name):
    table, translate = TABLES[kind]
    value, others, wanted = table[name]
    section = next(section for section in SECTIONS if name in fields(section))
    assert getattr(getattr(Run(), section), name) != value or name in SINGLE, "the test could not fail"
    engine = translate(replace(Run(), **{**others, name: value}))
    got = {key: getattr(engine, key) for key in wanted}
    # The engine has made an object of the stages' list.
    assert {key: getattr(one, "input_data", one) for key, one in got.items()} == wanted


def test_every_preset_is_accepted_by_the_engine_on_either_device():
    for preset in PRESETS.values():
        run = replace(Run(), **preset)
        assert transformer_config(run).num_layers == len(transformer_config(run).moe_layer_freq)
        assert (MoEOptions.from_run(run) is None) == (run.moe.num_experts is None)
        with platform.fake_device("cuda", {}):
            transformer_config(run)


def test_what_no_flag_says():
    config = transformer_config(Run())
    assert config.perform_initialization is False
    assert config.enable_autocast is False
    assert config.gradient_accumulation_fusion is False
    if not torch.cuda.is_available():
        assert not (config.bias_activation_fusion or config.bias_dropout_fusion or config.masked_softmax_fusion)
    assert transformer_config(replace(Run(), sequence_parallel=True)).sequence_parallel is False  # without TP
    for virtual in (None, 1):
        run = replace(Run(), pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=virtual)
        assert transformer_config(run).batch_p2p_sync is False  # no stage waits for its device after a message


@pytest.mark.parametrize("installed", [False, True])
def test_linear_layers_add_gradients_in_the_product_where_a_kernel_is_there_and_sums_are_fp32(monkeypatch, installed):
    monkeypatch.setattr(engine_config.layers, "_grad_accum_fusion_available", installed)
    te, bf16 = {"transformer_impl": "transformer_engine"}, {"bf16": True}
    never = ({"gradient_accumulation_fusion": False}, {"grad_reduce_in_bf16": True}, {"use_torch_fsdp2": True})

    def fused(**flags):
        return transformer_config(replace(Run(), **bf16, **flags)).gradient_accumulation_fusion

    assert not fused() and not fused(gradient_accumulation_fusion=True)
    with platform.fake_device("cuda", {}):
        assert fused() == fused(gradient_accumulation_fusion=True) == fused(**te) == installed
        assert not any(fused(**flags) for flags in never)


def test_nothing_is_compiled_on_cuda_with_the_deterministic_mode():
    fused = ("bias_activation_fusion", "bias_dropout_fusion")
    with platform.fake_device("cuda", {}):
        for mode in (False, True):
            config = transformer_config(replace(Run(), deterministic_mode=mode))
            assert [getattr(config, name) for name in fused] == [not mode] * 2


# ---- what works on the CPU works on CUDA: every preset, and every combination of the flags that shape a layer


SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "mock_data": True,
    "vocab_size": 64,
    "train_iters": 1,
    "lr_warmup_iters": 0,
    "micro_batch_size": 1,
    "global_batch_size": 1,
}
RANKS = {"q_lora_rank": 8, "kv_lora_rank": 8}
LATENT = {**RANKS, "multi_latent_attention": True, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
AXES: tuple[tuple[dict, ...], ...] = (
    ({"swiglu": True}, {"swiglu": False}),
    ({}, {"add_bias_linear": True}),
    ({}, {"add_qkv_bias": True}, {"softmax_type": "learnable", "window_size": "3,0"}),
    ({}, {"qk_layernorm": True}),
    ({}, LATENT, {"group_query_attention": True, "num_query_groups": 2}),
    ({}, {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}),
    ({}, {"fp32_residual_connection": True}),
    ({}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    ({}, {"bf16": True}, {"fp16": True}),
)


def combinations() -> dict[tuple[int, ...], Run]:
    """A run for each combination of the flags that the rules accept, by its places on the axes."""
    found = {}
    for places in itertools.product(*(range(len(axis)) for axis in AXES)):
        flags = {name: value for place, axis in zip(places, AXES) for name, value in axis[place].items()}
        run = replace(Run(), **SHAPE, **flags)
        try:
            rules.check(run, 1)
        except ConfigError:
            continue
        found[places] = run
    return found


def pairs(places: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(places), 2))


def with_every_pair(every: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """A few combinations that together have each pair of settings which any combination has."""
    left, chosen = set().union(*map(pairs, every)), []
    while left:
        chosen.append(max(every, key=lambda places: len(pairs(places) & left)))
        left -= pairs(chosen[-1])
    return chosen


def test_every_combination_of_flags_is_configured_and_built_with_cuda_as_without():
    runs = combinations()
    assert len(runs) > 300, "the rules refuse almost everything"
    with platform.fake_device("cuda", {}):
        for run in runs.values():
            transformer_config(run)
    for places in with_every_pair(runs):
        trace_ranks(runs[places], 1, 64, device="cuda", imbalance=1.0)


@pytest.mark.parametrize("preset", rows(PRESETS, test=["tiny", "deepseek-v3"]))
def test_every_preset_is_built_with_cuda_as_without(preset):
    pattern = 1 if PRESETS[preset].get("moe_layer_freq", 1) == 1 else "[0]+[1]"
    few = {"num_layers": 2, "moe_layer_freq": pattern, "bf16": True, "mock_data": True, "vocab_size": 1024}
    trace_ranks(replace(Run(), **{**PRESETS[preset], **few}), 1, 1024, device="cuda", imbalance=1.0)


def test_gelu_is_the_same_function_with_cuda_as_without():
    """The engine's fused one is an approximation by tanh."""
    fused = {}
    for swiglu in (True, False):
        with platform.fake_device("cuda", {}):
            config = transformer_config(replace(Run(), **SHAPE, swiglu=swiglu, add_bias_linear=True))
        fused[swiglu] = config.bias_activation_fusion
    assert fused == {True: True, False: False}
