"""From a run to the engine's configurations: the only translation there is.

`TRANSLATED` says where every field of the run's model, moe, parallel, precision and optimizer sections (and what of
training concerns the engine) goes, or why it goes nowhere; a test holds that no field is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_moe import platform
from megatron_moe.config import derived
from megatron_moe.config.schema import Run
from megatron_moe.model.norm import residual_dtype


@dataclass
class EngineConfig(TransformerConfig):
    """The engine's configuration with what this project adds to it."""

    moe_router_group_score: str = "top2"
    """A group's score: "max", its best expert, "top2", the sum of its best two, or "megatron", which is megatron-core's
    own, and what a configuration without this field means."""
    moe_router_norm_topk_prob: bool = True
    """Whether a token's weights sum to one."""
    moe_expert_backend: str = "grouped_mm"
    """Kernel of the experts: "grouped_mm", "te" or "loop"."""
    moe_router_bias_center: bool = False
    """Whether the expert bias is moved to mean zero after every update."""
    moe_global_aux_loss_counts: str = "batch"
    """What global_aux_loss goes by: "batch", counted ahead of the step, or "running", counted so far in it."""
    position_embedding_type: str = "rope"
    """"rope" or "none"; read by GPTModel and by latent attention."""
    recomputed_modules: tuple[str, ...] = ()
    """Modules that are recomputed; `recompute_modules` has only those that the engine's own classes recompute."""


@dataclass
class LatentEngineConfig(MLATransformerConfig):
    """The same for latent attention."""

    moe_router_group_score: str = "top2"
    moe_router_norm_topk_prob: bool = True
    moe_expert_backend: str = "grouped_mm"
    moe_router_bias_center: bool = False
    moe_global_aux_loss_counts: str = "batch"
    position_embedding_type: str = "rope"
    recomputed_modules: tuple[str, ...] = ()


# Where each field of the run goes: "config" (transformer_config), "ddp", "optimizer", "model" (build.py and spec.py),
# or a reason why the engine has no use for it.
TRANSLATED: dict[str, str] = {
    **dict.fromkeys(
        (
            "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
            "kv_channels rotary_interleaved rope_type rotary_base rotary_percent rotary_scaling_factor "
            "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim position_embedding_type "
            "normalization norm_epsilon swiglu add_bias_linear add_qkv_bias qk_layernorm multi_latent_attention "
            "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim attention_dropout hidden_dropout "
            "init_method_std transformer_impl "
            "num_experts moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_score_function "
            "moe_router_pre_softmax moe_router_norm_topk_prob moe_router_num_groups moe_router_group_topk "
            "moe_router_group_score moe_router_topk_scaling_factor moe_router_enable_expert_bias "
            "moe_router_bias_update_rate moe_router_dtype moe_router_load_balancing_type moe_aux_loss_coeff "
            "moe_z_loss_coeff moe_token_dispatcher_type moe_expert_backend moe_shared_expert_intermediate_size "
            "moe_shared_expert_gate moe_router_bias_center moe_global_aux_loss_counts moe_input_jitter_eps "
            "moe_expert_capacity_factor moe_token_drop_policy moe_pad_expert_input_to_capacity "
            "moe_router_force_load_balancing mtp_num_layers mtp_loss_scaling_factor "
            "tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size "
            "num_layers_per_virtual_pipeline_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
            "context_parallel_size cp_comm_type expert_model_parallel_size expert_tensor_parallel_size "
            "bf16 fp16 attention_softmax_in_fp32 fp32_residual_connection calculate_per_token_loss "
            "recompute_granularity recompute_method recompute_num_layers recompute_modules"
        ).split(),
        "config",
    ),
    **dict.fromkeys(
        (
            "overlap_grad_reduce overlap_param_gather ddp_bucket_size accumulate_allreduce_grads_in_fp32 "
            "grad_reduce_in_bf16"
        ).split(),
        "ddp",
    ),
    **dict.fromkeys(
        (
            "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad use_distributed_optimizer "
            "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
        ).split(),
        "optimizer",
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings untie_embeddings_and_output_weights seed cross_entropy_loss_fusion "
            "cross_entropy_chunk_tokens keep_fp32"
        ).split(),
        "model",
    ),
    **dict.fromkeys(
        "eval_in_fp32 check_precision_interval print_precision audit_precision audit_precision_output".split(),
        "the loop, training/",
    ),
    "seq_length": "given to the schedules with every step",
    "vocab_size": "the padded vocabulary is an argument of build_model",
    "make_vocab_size_divisible_by": "the padded vocabulary is an argument of build_model",
    "distributed_backend": "parallel/groups.py",
    "distributed_timeout_minutes": "parallel/groups.py",
    **dict.fromkeys(
        (
            "lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_fraction lr_warmup_init lr_wsd_decay_style "
            "lr_wsd_decay_iters"
        ).split(),
        "the schedule, training/optimizer.py",
    ),
    **dict.fromkeys("micro_batch_size global_batch_size rampup_batch_size".split(), "training/batch_size.py"),
    **dict.fromkeys(
        "train_iters eval_interval eval_iters exit_interval exit_duration_in_mins exit_signal_handler".split(),
        "the loop, training/",
    ),
}


def params_dtype(run: Run) -> torch.dtype:
    """Dtype of weights and activations."""
    return getattr(torch, derived.params_dtype_name(run))


def transformer_config(run: Run) -> EngineConfig | LatentEngineConfig:
    """The engine's model configuration, for this machine's device."""
    fields = {
        **_sizes(run),
        **_moe(run),
        **_layout(run),
        **_precision(run),
        **_kernels(),
        "calculate_per_token_loss": run.optimizer.calculate_per_token_loss,
        **_recomputation(run),
        # Weights are drawn by model/initialize.py, whatever the layout.
        "perform_initialization": False,
        "init_method_std": run.model.init_method_std,
    }
    if run.model.multi_latent_attention:
        return LatentEngineConfig(**fields, **_latent_attention(run))
    return EngineConfig(**fields)


def _sizes(run: Run) -> dict[str, Any]:
    model = run.model
    latent = model.multi_latent_attention
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": derived.ffn_hidden_size(run),
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_attention_heads if latent else derived.num_query_groups(run),
        "kv_channels": derived.head_size(run),
        "rotary_interleaved": model.rotary_interleaved and not latent,  # latent attention always rotates pairs
        "position_embedding_type": model.position_embedding_type,
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": model.swiglu,
        "activation_func": F.silu if model.swiglu else F.gelu,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "multi_latent_attention": latent,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "transformer_impl": model.transformer_impl,
        "mtp_num_layers": model.mtp_num_layers,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
    }


def _latent_attention(run: Run) -> dict[str, Any]:
    names = (
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent "
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim"
    )
    return {name: getattr(run.model, name) for name in names.split()}


def _moe(run: Run) -> dict[str, Any]:
    # One entry per layer always: the engine then gives every layer its own checkpoint keys, for dense models too.
    pattern = {"moe_layer_freq": derived.moe_layer_pattern(run)}
    moe = run.moe
    if moe.num_experts is None:
        return pattern
    same = (
        "moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk "
        "moe_router_group_score moe_router_topk_scaling_factor moe_router_enable_expert_bias "
        "moe_router_bias_update_rate moe_router_dtype moe_z_loss_coeff moe_token_dispatcher_type moe_expert_backend "
        "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_bias_center moe_global_aux_loss_counts "
        "moe_input_jitter_eps moe_expert_capacity_factor moe_token_drop_policy moe_pad_expert_input_to_capacity "
        "moe_router_force_load_balancing"
    )
    kinds, coeffs = moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff
    # In a list the engine does not find its "sinkhorn", and asks K = 1 for a softmax that sinkhorn does not use.
    sinkhorn = kinds == ("sinkhorn",)
    return {
        **pattern,
        **{name: getattr(moe, name) for name in same.split()},
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": derived.moe_ffn_hidden_size(run),
        "moe_router_norm_topk_prob": derived.norm_topk_prob(run),
        "moe_router_load_balancing_type": "sinkhorn" if sinkhorn else list(kinds),
        "moe_aux_loss_coeff": 0.0 if sinkhorn else list(coeffs),
    }


def _layout(run: Run) -> dict[str, Any]:
    layout = run.parallel
    virtual = derived.virtual_pipeline_size(run)
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "sequence_parallel": layout.sequence_parallel and layout.tensor_model_parallel_size > 1,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "num_layers_in_first_pipeline_stage": layout.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": layout.decoder_last_pipeline_num_layers,
        "context_parallel_size": layout.context_parallel_size,
        "cp_comm_type": layout.cp_comm_type,  # ours gathers anyway; Transformer Engine's attention has to be told
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": derived.expert_tensor_parallel_size(run),
        # With two stages and several chunks each, a batched send and receive pairs up the wrong messages: both
        # neighbours are the same rank, and the training is silently wrong. Single sends and receives are right.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "variable_seq_lengths": False,
        # Frees an activation once it is handed to the send. gloo may still read it then, where nobody waits for sends:
        # the next stage silently gets other numbers. On CUDA the memory is not reused before the send has run.
        "deallocate_pipeline_outputs": layout.pipeline_model_parallel_size > 1
        and (virtual is None or platform.has_cuda()),
    }


def _recomputation(run: Run) -> dict[str, Any]:
    training = run.training
    # Megatron-LM's default.
    modules = ("core_attn",) if training.recompute_modules is None else training.recompute_modules
    return {
        "recompute_granularity": training.recompute_granularity,
        "recompute_method": training.recompute_method,
        "recompute_num_layers": training.recompute_num_layers,
        "recomputed_modules": modules if training.recompute_granularity == "selective" else (),
        # Told of "mlp", the engine would recompute our MoE layers too, which it does not know; "moe_act" it refuses
        # without its own grouped experts.
        "recompute_modules": [module for module in modules if module in ("core_attn", "layernorm")],
    }


def _precision(run: Run) -> dict[str, Any]:
    dtype = params_dtype(run)
    return {
        "bf16": run.precision.bf16,
        "fp16": run.precision.fp16,
        "params_dtype": dtype,
        "pipeline_dtype": residual_dtype(run.precision.fp32_residual_connection, dtype),
        "autocast_dtype": dtype,
        "enable_autocast": False,
        "attention_softmax_in_fp32": run.precision.attention_softmax_in_fp32,
        "fp32_residual_connection": run.precision.fp32_residual_connection,
    }


def _kernels() -> dict[str, Any]:
    """Fusions: those that are torch.compile'd on CUDA only, those that need an extension never. No CUDA graphs: the
    engine's default for what they hold makes it warn about that default."""
    cuda = platform.has_cuda()
    fields = TransformerConfig.__dataclass_fields__
    graph_scope = "cuda_graph_modules" if "cuda_graph_modules" in fields else "cuda_graph_scope"  # 0.19.2, 0.16.1
    return {
        graph_scope: [],
        "use_cpu_initialization": not cuda,  # where the engine allocates; it initialises nothing
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
    }


def ddp_config(run: Run) -> DistributedDataParallelConfig:
    """Gradient buffers: their dtype, when they are reduced, how large a bucket is."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=derived.grads_in_fp32(run),
        overlap_grad_reduce=run.parallel.overlap_grad_reduce,
        overlap_param_gather=run.parallel.overlap_param_gather,
        use_distributed_optimizer=run.optimizer.use_distributed_optimizer,
        bucket_size=run.parallel.ddp_bucket_size,
        average_in_collective=False,  # per-token loss divides by the global token count instead
        check_for_nan_in_grad=False,  # the step decides, for all ranks together
    )


def optimizer_config(run: Run) -> OptimizerConfig:
    """Adam with decoupled weight decay, its precision and its loss scale."""
    options, precision = run.optimizer, run.precision
    return OptimizerConfig(
        optimizer=options.optimizer,
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        use_distributed_optimizer=options.use_distributed_optimizer,
        overlap_param_gather=run.parallel.overlap_param_gather,
        bf16=precision.bf16,
        fp16=precision.fp16,
        params_dtype=params_dtype(run),
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )
