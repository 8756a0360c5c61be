"""What this code reads of objects that torch and the engine make, as types: the engine's classes have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class AutogradContext(Protocol):
    """The `ctx` of an autograd function, on which `forward` leaves what `backward` needs."""

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


class ProcessGroups(Protocol):
    """The engine's ProcessGroupCollection. Names join axes: tp_cp is the group of the ranks of TP x CP."""

    tp: ProcessGroup
    pp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    tp_cp: ProcessGroup
    tp_dp_cp: ProcessGroup
    ep: ProcessGroup
    tp_ep: ProcessGroup
    expt_tp: ProcessGroup
    expt_dp: ProcessGroup
    mp: ProcessGroup
    tp_ep_pp: ProcessGroup
    embd: ProcessGroup


class EngineOptimizer(Protocol):
    """megatron-core's MegatronOptimizer: one optimizer, or a chain of them (`engine.optimizer.parts`).

    optimizer: the one of torch's kind that it drives. is_stub_optimizer: whether this rank has no weight for it, and
    `optimizer` is None.
    """

    optimizer: Any
    config: Any
    is_stub_optimizer: bool

    get_parameters: Callable[[], list[torch.nn.Parameter]]
    """Returns what it updates: main params, or this rank's shards of them."""
    get_loss_scale: Callable[[], Tensor]
    """Returns the loss scale, fp32 [1]."""
    scale_loss: Callable[[Tensor], Tensor]
    zero_grad: Callable[[], None]
    """Forgets the gradients of the model's weights and of the main params."""
    prepare_grads: Callable[[], bool]
    """Copies the gradients to the main params, divided by the loss scale; returns whether one is not finite."""
    step_with_ready_grads: Callable[[], bool]
    """Updates the main params, and copies them to the model's weights."""
    reload_model_params: Callable[[], None]
    """Takes the main params from the model's weights."""


class OptimizerPart(EngineOptimizer, Protocol):
    """One of the engine's optimizers in a chain, with the internals that `engine.optimizer` changes."""

    grad_scaler: object
    grad_stats_parallel_group: ProcessGroup | None
    _dummy_overflow_buf: Tensor | None
    model_param_group_index_map: dict[torch.nn.Parameter, tuple[int, int]]
    _copy_main_params_to_model_params: Callable[..., None]
    _copy_model_params_to_main_params: Callable[..., None]


class WrappedChunk(Protocol):
    """A model chunk in the wrapper for data parallelism: the engine's, or ours for ZeRO stage 3.

    The hooks are called with `overlap_param_gather` alone, which the engine's wrapper has.
    """

    ddp_config: Any

    def zero_grad_buffer(self) -> None: ...
    def disable_forward_pre_hook(self) -> None: ...
    def enable_forward_pre_hook(self) -> None: ...


class EngineConfig(Protocol):
    """The engine's TransformerConfig, or for latent attention its MLATransformerConfig."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    layernorm_epsilon: float
    attention_dropout: float
    gated_linear_unit: bool
    activation_func: Callable[[Tensor], Tensor]
    activation_func_clamp_value: float | None
    glu_linear_offset: float
    softmax_type: str
    tensor_model_parallel_size: int
    window_size: tuple[int, int] | None
    window_attn_skip_freq: Sequence[int]
    add_bias_linear: bool
    qk_layernorm: bool
    multi_latent_attention: bool
    fp32_residual_connection: bool
    log_max_attention_logit: bool
    mtp_num_layers: int | None
    mtp_loss_scaling_factor: float
    transformer_impl: str
    # precision, initialisation, parallelism, recomputation
    params_dtype: torch.dtype
    perform_initialization: bool
    init_method_std: float
    init_method: Callable[[Tensor], Any]
    output_layer_init_method: Callable[[Tensor], Any]
    sequence_parallel: bool
    context_parallel_size: int
    calculate_per_token_loss: bool
    gradient_accumulation_fusion: bool
    recompute_granularity: str | None
    recompute_modules: Sequence[str] | None
    # latent attention
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    # mixture of experts
    num_moe_experts: int
    moe_ffn_hidden_size: int | None
    moe_layer_freq: Sequence[int]
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_overlap: bool
    moe_router_topk: int
    moe_router_dtype: str | None
    moe_router_score_function: str
    moe_router_pre_softmax: bool
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_topk_scaling_factor: float | None
    moe_router_enable_expert_bias: bool
    moe_router_bias_update_rate: float
    moe_router_load_balancing_type: str | Sequence[str]
    moe_router_force_load_balancing: bool
    moe_aux_loss_coeff: float | Sequence[float]
    moe_z_loss_coeff: float | None
    moe_input_jitter_eps: float | None
    moe_expert_capacity_factor: float | None
    moe_token_drop_policy: str
    moe_pad_expert_input_to_capacity: bool
    moe_token_dispatcher_type: str
    moe_flex_dispatcher_backend: str
    moe_deepep_num_sms: int
    moe_hybridep_num_sms: int
