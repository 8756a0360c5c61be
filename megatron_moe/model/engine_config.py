"""The engine's configurations of a run: of the model, the gradient buffers and the optimizer.

They contain the settings that the engine's own code reads. The MoE layer, its router and our attention get theirs from
the run (`moe/options.py`, `LayerSettings`), so that the engine's checks do not refuse settings that it would not act
on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_moe import platform
from megatron_moe.config.model_flags import LATENT
from megatron_moe.config.pipeline_layout import LETTERS
from megatron_moe.config.rotary import amplitude
from megatron_moe.config.schema import Run
from megatron_moe.model.norm import residual_dtype
from megatron_moe.model.rotary import Rotation
from megatron_moe.moe.options import MoEOptions

# Of latent attention, in the engine's configuration under the same names as in ours.
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


@dataclass
class AttentionConfig(TransformerConfig):
    """The engine's configuration with the fields in which its attention looks for the amplitude of the rotation.

    No release of the engine declares them. It multiplies cosines and sines, in fp32, by
    0.1 x yarn_mscale x log(yarn_rotary_scaling_factor) + 1, which is yarn_mscale + 1.
    """

    yarn_rotary_scaling_factor: float = math.exp(10)
    yarn_mscale: float = 0.0
    yarn_mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        """Check as the engine does, except that biased experts may be split over ranks: the engine's may not."""
        split = self.expert_tensor_parallel_size  # type: ignore[has-type]
        self.expert_tensor_parallel_size = 1
        super().__post_init__()
        self.expert_tensor_parallel_size = split


def params_dtype(run: Run) -> torch.dtype:
    """Return the dtype of weights and activations."""
    return getattr(torch, run.derived.params_dtype_name)


def transformer_config(run: Run) -> TransformerConfig:
    """Return the engine's model configuration, for this machine's device."""
    model, moe, training, precision, dtype = run.model, run.moe, run.training, run.precision, params_dtype(run)
    # Given "mlp", the engine would recompute our MoE layers too, which it does not know; it refuses "moe_act" without
    # its own grouped experts. Our modules recompute these themselves.
    recomputed = [module for module in run.derived.recomputed_modules if module in ("core_attn", "layernorm")]
    fields: dict[str, Any] = {
        **_sizes(run),
        # One entry per layer always: the engine then gives every layer its own checkpoint keys, for dense models too.
        "moe_layer_freq": list(run.derived.moe_layer_pattern),
        **_layout(run),
        "bf16": precision.bf16,
        "fp16": precision.fp16,
        "params_dtype": dtype,
        "pipeline_dtype": residual_dtype(precision.fp32_residual_connection, dtype),
        "autocast_dtype": dtype,
        "enable_autocast": False,
        "attention_softmax_in_fp32": precision.attention_softmax_in_fp32,
        "fp32_residual_connection": precision.fp32_residual_connection,
        **_kernels(run),
        "calculate_per_token_loss": run.optimizer.calculate_per_token_loss,
        "recompute_granularity": training.recompute_granularity,
        "recompute_method": training.recompute_method,
        "recompute_num_layers": training.recompute_num_layers,
        "recompute_modules": recomputed,
        # Weights are drawn by model/initialize.py, whatever the layout.
        "perform_initialization": False,
        "init_method_std": model.init_method_std,
    }
    if moe.num_experts is not None:
        fields["num_moe_experts"] = moe.num_experts  # the schedules then scale auxiliary losses
        # No code that runs here reads these; without them the engine warns of its defaults.
        fields |= {"moe_ffn_hidden_size": run.derived.moe_ffn_hidden_size, "moe_router_dtype": "fp32"}
    # The schedule that runs two micro-batches at a time; without CUDA there are no streams. The dispatcher says which
    # inputs of a step may be freed. That gradients are computed later is not passed on: the engine's linear layers
    # cannot do it, and Transformer Engine's would wait for a call that attention does not get.
    if moe.num_experts is not None and moe.overlap_moe_expert_parallel_comm and platform.has_streams():
        fields["overlap_moe_expert_parallel_comm"] = True
        fields["moe_token_dispatcher_type"] = moe.moe_token_dispatcher_type
        fields["moe_flex_dispatcher_backend"] = moe.moe_flex_dispatcher_backend
    if not model.multi_latent_attention:
        return AttentionConfig(**fields, yarn_mscale=amplitude(model) - 1)
    return MLATransformerConfig(**fields, **{name: getattr(model, name) for name in _LATENT})


def _sizes(run: Run) -> dict[str, Any]:
    model = run.model
    latent = model.multi_latent_attention
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": run.derived.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_attention_heads if latent else run.derived.num_query_groups,
        "kv_channels": run.derived.head_size,
        "rotary_interleaved": model.rotary_interleaved and not latent,  # latent attention always rotates pairs
        "normalization": model.normalization,
        "layernorm_epsilon": model.norm_epsilon,
        "gated_linear_unit": run.derived.gated,
        "activation_func": _activation(run),
        "glu_linear_offset": model.glu_linear_offset,
        "activation_func_clamp_value": model.activation_func_clamp_value,
        "softmax_type": model.softmax_type,  # these three are our attention's
        "window_size": None if run.derived.window is None else (run.derived.window, 0),
        "window_attn_skip_freq": list(run.derived.window_pattern),
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        # With it the engine would add up the gradients of all q_layernorm and k_layernorm over the TP ranks, also of
        # those whose weights are split over them.
        "qk_layernorm": model.qk_layernorm and not model.qk_layernorm_across_heads,
        "softmax_scale": model.softmax_scale,
        "multi_latent_attention": latent,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "transformer_impl": model.transformer_impl,
        "attention_backend": AttnBackend[model.attention_backend],
        "mtp_num_layers": model.mtp_num_layers,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
        "log_max_attention_logit": run.optimizer.qk_clip or run.logging.log_max_attention_logit,
    }


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x sigmoid(1.702 x); the engine's would be compiled, on a CPU too."""
    return x * torch.sigmoid(1.702 * x)


def _activation(run: Run) -> Any:
    if run.model.quick_geglu:
        return quick_gelu
    return F.silu if run.model.swiglu else F.gelu


def _layout(run: Run) -> dict[str, Any]:
    layout = run.parallel
    virtual, several = run.derived.virtual_pipeline_size, layout.pipeline_model_parallel_size > 1
    stages = [[LETTERS[letter] for letter in stage.letters] for stage in run.derived.pipeline_stages]
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "sequence_parallel": layout.sequence_parallel and layout.tensor_model_parallel_size > 1,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        # The engine does not divide the layers once more by itself.
        "pipeline_model_parallel_layout": stages if several else None,
        "context_parallel_size": layout.context_parallel_size,
        "cp_comm_type": layout.cp_comm_type,  # ours gathers anyway; Transformer Engine's attention needs it
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": run.derived.expert_tensor_parallel_size,
        # With two stages and several chunks each, a batched send and receive pairs up the wrong messages: both
        # neighbours are the same rank, and the training is silently wrong. Single sends and receives are right.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        # The device is waited for after each batch of messages by default, for torch before 2.0. Waiting for a message
        # is done by the stream that reads it.
        "batch_p2p_sync": False,
        "variable_seq_lengths": False,
        # Frees an activation once it is passed to the send. gloo may still read it then, if no one waits for the send,
        # and the next stage silently gets other numbers. On CUDA the memory is not reused before the send has run.
        "deallocate_pipeline_outputs": several and (virtual is None or platform.has_cuda()),
    }


def _kernels(run: Run) -> dict[str, Any]:
    """Return the choice of fused kernels: those by torch.compile on CUDA, and none that needs an extension.

    GELU is not fused: the engine's fused one is the tanh approximation, another function than the CPU's, and it refuses
    layers without biases. What is compiled depends on the shapes that were met before, which a resumed run meets in
    another order (it has not evaluated yet): with `--deterministic-mode` nothing is.

    The engine captures no CUDA graphs (`model/cuda_graphs.py` does); its default for their contents makes it warn.
    """
    cuda = platform.has_cuda()
    compiled = cuda and not run.training.deterministic_mode
    model, fields = run.model, TransformerConfig.__dataclass_fields__
    plain = model.swiglu and not (
        model.quick_geglu or model.glu_linear_offset or model.activation_func_clamp_value is not None
    )
    graph_scope = "cuda_graph_modules" if "cuda_graph_modules" in fields else "cuda_graph_scope"  # 0.19.2, 0.16.1
    # The engine's linear layers add to fp32 sums with an extension that is compiled for the machine, and refuse to be
    # built without it. The output layer is the engine's next to Transformer Engine's layers too: one setting for all.
    wanted = run.precision.gradient_accumulation_fusion is not False and run.derived.grads_in_fp32
    fused = cuda and wanted and run.derived.zero_stage < 2 and layers._grad_accum_fusion_available
    return {
        graph_scope: [],
        "use_cpu_initialization": not cuda,  # where the engine allocates; it initialises nothing
        "bias_activation_fusion": compiled and plain,
        "bias_dropout_fusion": compiled,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": fused,
        "deterministic_mode": run.training.deterministic_mode,
    }


def ddp_config(run: Run) -> DistributedDataParallelConfig:
    """Return the configuration of the gradient buffers: dtype, overlap of the reduction, size of a bucket."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.derived.grads_in_fp32,
        overlap_grad_reduce=run.parallel.overlap_grad_reduce,
        overlap_param_gather=run.parallel.overlap_param_gather,
        use_distributed_optimizer=run.derived.zero_stage == 1,
        bucket_size=run.parallel.ddp_bucket_size,
        average_in_collective=False,  # per-token loss divides by the global token count instead
        check_for_nan_in_grad=False,  # the step decides, for all ranks together
    )


def optimizer_config(run: Run) -> OptimizerConfig:
    """Return the configuration of Adam with decoupled weight decay, with its precision and loss scale."""
    options, precision = run.optimizer, run.precision
    return OptimizerConfig(
        optimizer="adam",  # Muon is built in its place (optim/optimizer.py)
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        use_distributed_optimizer=run.derived.zero_stage == 1,
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


@dataclass(frozen=True)
class LayerSettings:
    """The options of our own modules in a layer, which the engine's configuration does not have.

    moe: options of the MoE layers; None for a dense model. recomputed: see `derived.recomputed_modules`. rotation: of
    queries and keys; None without positions. gathers_latents: whether latent attention gathers its latents over CP
    ranks. bf16_layers: the layers of the decoder whose experts are not in FP8. qk_layernorm_after_rotation: whether the
    norms of queries and keys, if there are any, come after the rotation. residual_multiplier: a factor of what a layer
    adds to the stream. qk_layernorm_across_heads: whether one norm is over the queries of all heads, and one over the
    keys. reordered_norm: whether norms are behind attention and MLP.
    """

    moe: MoEOptions | None
    recomputed: tuple[str, ...]
    rotation: Rotation | None
    gathers_latents: bool = False
    bf16_layers: tuple[int, ...] = ()
    qk_layernorm_after_rotation: bool = False
    residual_multiplier: float = 1.0
    qk_layernorm_across_heads: bool = False
    reordered_norm: bool = False

    @classmethod
    def from_run(cls, run: Run) -> LayerSettings:
        """Read the settings from a run that has passed `config.rules.check`."""
        return cls(
            moe=MoEOptions.from_run(run),
            recomputed=run.derived.recomputed_modules,
            rotation=Rotation.from_run(run),
            gathers_latents=run.derived.mla_cp_exchange == LATENT,
            bf16_layers=run.derived.bf16_layers,
            qk_layernorm_after_rotation=run.model.qk_layernorm_after_rotation,
            residual_multiplier=run.model.residual_multiplier,
            qk_layernorm_across_heads=run.model.qk_layernorm_across_heads,
            reordered_norm=run.model.reordered_norm,
        )

    def of_layer(self, layer: int) -> LayerSettings:
        """Return the settings of one layer of the decoder, by its number from 0 in the whole model."""
        if self.moe is None or layer not in self.bf16_layers:
            return self
        return replace(self, moe=replace(self.moe, fp8_format=None))
