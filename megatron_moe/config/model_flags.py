"""The settings of a model and its layout: transformer, experts, parallelism, precision."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe.config.setting import (
    COUNT,
    DISPATCHERS,
    EXPERT_BACKENDS,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_COUNT,
    PROBABILITY,
    SCORE_FUNCTIONS,
    Range,
    setting,
)

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What data-parallel ranks share, by ZeRO stage: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."""
QUANTILE = "quantile_balancing"
NO_LOSSES = frozenset(("none", "sinkhorn", QUANTILE))
"""What balances without an auxiliary loss, or not at all."""
LATENT, EXPANDED = EXCHANGES = ("latent", "expanded")
"""What context-parallel ranks exchange of latent attention: latents, or the keys and values that are made of them."""
ROPE_SETTINGS = {
    "yarn": (
        *("rotary_scaling_factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"),
    ),
    "linear": ("rotary_scaling_factor",),
    "llama3": ("rotary_scaling_factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": (
        *("rotary_scaling_factor", "original_max_position_embeddings", "attention_factor"),
        *("short_factor", "long_factor"),
    ),
}
"""Kinds of stretched rotary frequencies -> the settings that each reads."""
MOST_FLOPS_PER_BYTE = 1000
"""FLOPs worth computing to send a byte less: 0.4 x 989 TFLOP/s of an H100 over its 300 GB/s of NVLink is 1,300."""


@dataclass(frozen=True)
class ModelConfig:
    """Transformer: sizes, attention, position embedding, normalisation."""

    num_layers: int = setting(4, "number of transformer layers", within=Range(low=1, high=10_000))
    hidden_size: int = setting(256, "width of the residual stream (H)", within=POSITIVE_COUNT)
    ffn_hidden_size: int | None = setting(
        None, "width of a dense layer's MLP; default 4 x hidden-size", within=POSITIVE_COUNT
    )
    num_attention_heads: int = setting(4, "number of attention heads", within=POSITIVE_COUNT)
    group_query_attention: bool = setting(False, "grouped-query attention; needs --num-query-groups")
    num_query_groups: int | None = setting(
        None, "key/value heads; default: one per attention head", within=POSITIVE_COUNT
    )
    kv_channels: int | None = setting(
        None, "width of one head; default hidden-size / num-attention-heads", within=POSITIVE_COUNT
    )
    seq_length: int = setting(256, "tokens per sequence (S)", within=POSITIVE_COUNT, resume="free")
    max_position_embeddings: int | None = setting(
        None, "largest position the model is built for; default seq-length", within=POSITIVE_COUNT, resume="free"
    )
    position_embedding_type: str = setting("rope", "position embedding", choices=("rope", "none"))
    rotary_base: float = setting(10000.0, "base of the rotary frequencies", within=Range(above=1))
    rotary_percent: float = setting(1.0, "share of a head's width that is rotated", within=Range(above=0, high=1))
    rotary_interleaved: bool = setting(False, "rotate neighbouring pairs instead of halves (grouped-query attention)")
    rope_type: str = setting(
        "rope",
        "how rotary frequencies are stretched for a longer context; latent attention: rope or yarn",
        choices=("rope", *ROPE_SETTINGS),
    )
    rotary_scaling_factor: float = setting(
        1.0, "yarn, linear, llama3, longrope: context extension factor", within=Range(low=1)
    )
    original_max_position_embeddings: int = setting(
        4096, "yarn, llama3, longrope: context length before extension", within=Range(low=2)
    )
    attention_factor: float | None = setting(
        None, "yarn, longrope: amplitude of rotated queries and keys; default: by the factor", within=POSITIVE
    )
    beta_fast: float = setting(32.0, "yarn: rotations above which a frequency is kept", within=POSITIVE)
    beta_slow: float = setting(1.0, "yarn: rotations below which a frequency is interpolated", within=POSITIVE)
    yarn_correction_range_round_to_int: bool = setting(True, "yarn: the ramp begins and ends at whole pairs")
    mscale: float = setting(1.0, "yarn: scale of the rotary amplitude", within=POSITIVE)
    mscale_all_dim: float = setting(
        0.0,
        "yarn: divides the amplitude; latent attention: scale of the logits; 0 switches it off",
        within=NOT_NEGATIVE,
    )
    low_freq_factor: float = setting(1.0, "llama3: rotations below which a frequency is divided", within=POSITIVE)
    high_freq_factor: float = setting(4.0, "llama3: rotations above which a frequency is kept", within=POSITIVE)
    short_factor: tuple[float, ...] | None = setting(
        None, "longrope: divisor of each pair's frequency, up to the original length", within=POSITIVE
    )
    long_factor: tuple[float, ...] | None = setting(
        None, "longrope: the same for a longer --seq-length", within=POSITIVE
    )
    normalization: str = setting("RMSNorm", "normalisation", choices=("RMSNorm",))
    norm_epsilon: float = setting(1e-6, "epsilon of the normalisation", within=POSITIVE)
    swiglu: bool = setting(True, "gated SiLU in every MLP and expert")
    quick_geglu: bool = setting(False, "gate MLPs and experts by x sigmoid(1.702 x) in place of SiLU")
    glu_linear_offset: float = setting(
        0.0, "add this to the half of a gated layer that the gate multiplies", within=NOT_NEGATIVE
    )
    activation_func_clamp_value: float | None = setting(
        None, "cut a gated layer's halves: both off above this, the gated one below its negative", within=POSITIVE
    )
    add_bias_linear: bool = setting(
        False, "biases in linear layers, experts and router (Megatron-LM: the opposite of --disable-bias-linear)"
    )
    add_qkv_bias: bool = setting(False, "biases in the query, key and value projections only")
    qk_layernorm: bool = setting(False, "normalise queries and keys (latent attention: the two latent norms)")
    qk_layernorm_after_rotation: bool = setting(False, "with it: normalise after the rotation, not before (Hunyuan)")
    softmax_scale: float | None = setting(
        None, "multiply attention logits by this; default 1 / sqrt(width of a head)", within=POSITIVE
    )
    embedding_multiplier: float = setting(1.0, "multiply embeddings by this (Granite)", within=POSITIVE)
    residual_multiplier: float = setting(
        1.0, "multiply what attention and MLP add to the stream by this (Granite)", within=POSITIVE
    )
    logits_scaling: float = setting(1.0, "divide the logits by this (Granite)", within=POSITIVE)
    qk_layernorm_across_heads: bool = setting(False, "one such norm over all heads together, not over each (OLMo 2)")
    reordered_norm: bool = setting(False, "norms behind attention and MLP, x + norm(f(x)), not before them (OLMo 2)")
    multi_latent_attention: bool = setting(False, "DeepSeek's multi-head latent attention (MLA)")
    q_lora_rank: int | None = setting(None, "MLA: rank of the query compression; default none", within=POSITIVE_COUNT)
    kv_lora_rank: int = setting(512, "MLA: rank of the key/value compression", within=POSITIVE_COUNT)
    qk_head_dim: int = setting(128, "MLA: width of a head's part without position", within=POSITIVE_COUNT)
    qk_pos_emb_head_dim: int = setting(64, "MLA: width of a head's rotary part", within=POSITIVE_COUNT)
    v_head_dim: int = setting(128, "MLA: width of a head's value", within=POSITIVE_COUNT)
    softmax_type: str = setting(
        "vanilla",
        "attention's softmax: vanilla; learnable adds exp(a weight of the head, its sink) to the sum (gpt-oss); "
        "off-by-one adds 1",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    window_size: str | None = setting(
        None, "LEFT,0: a token sees itself and LEFT tokens before it; default: all tokens before it"
    )
    window_attn_skip_freq: int | str | None = setting(
        None,
        "layers without the window: N for every N-th, or a list expression with 1 for a window; default: none",
    )
    attention_dropout: float = setting(0.0, "dropout on attention weights", within=PROBABILITY, resume="free")
    hidden_dropout: float = setting(0.0, "dropout on the residual branches", within=PROBABILITY, resume="free")
    init_method_std: float = setting(
        0.02, "standard deviation of the weight initialisation", within=POSITIVE, resume="free"
    )
    untie_embeddings_and_output_weights: bool = setting(False, "separate tables for the embedding and the output layer")
    vocab_size: int | None = setting(
        None, "size of the vocabulary before padding; default: the tokenizer's", within=POSITIVE_COUNT
    )
    make_vocab_size_divisible_by: int = setting(
        128, "pad the vocabulary to a multiple of this times TP", within=POSITIVE_COUNT, resume="free"
    )
    padded_vocab_size: int | None = setting(
        None,
        "rows of the embedding table, tokens and padding; default: by make-vocab-size-divisible-by",
        within=POSITIVE_COUNT,
        resume="free",
    )
    transformer_impl: str = setting(
        "local",
        "linear, norm and attention modules; the MoE layer is ours in both",
        choices=("local", "transformer_engine"),
        resume="free",
    )
    attention_backend: str = setting(
        "auto",
        "the kernel of Transformer Engine's attention; the local attention's is torch's choice",
        choices=("auto", "flash", "fused", "unfused"),
        resume="free",
    )
    cross_entropy_loss_fusion: bool = setting(
        False,
        "output layer and cross entropy in one, over chunks of tokens, without the whole logits in memory",
        resume="free",
    )
    cross_entropy_chunk_tokens: int | None = setting(
        None,
        "tokens per chunk of the fused loss; default 1024, with which a chunk's fp32 logits take at most 32 MiB",
        within=POSITIVE_COUNT,
        resume="free",
    )
    mtp_num_layers: int | None = setting(
        None,
        "multi-token prediction: layers that predict further tokens (DeepSeek-V3); none: the next token only",
        within=POSITIVE_COUNT,
    )
    mtp_loss_scaling_factor: float = setting(
        0.1, "weight of the mean loss of the multi-token prediction layers", within=NOT_NEGATIVE, resume="free"
    )


@dataclass(frozen=True)
class MoEConfig:
    """Router, experts, dispatch, load balancing."""

    num_experts: int | None = setting(None, "experts per MoE layer (E); none: a dense model", within=Range(low=2))
    moe_layer_freq: int | str = setting(
        1, "which layers are MoE: N for every N-th (layer % N == 0), or a list expression like '[0]+[1]*3'"
    )
    moe_ffn_hidden_size: int | None = setting(
        None, "width of one expert (F); default ffn-hidden-size", within=POSITIVE_COUNT
    )
    moe_router_topk: int = setting(2, "experts per token (K)", within=POSITIVE_COUNT)
    moe_router_score_function: str = setting("softmax", "scores from logits", choices=SCORE_FUNCTIONS)
    moe_router_pre_softmax: bool = setting(
        False, "softmax over all experts before the choice, not over the chosen ones"
    )
    moe_router_norm_topk_prob: bool | None = setting(
        None, "make a token's K weights sum to one; default as Megatron-LM: sigmoid with K > 1 yes, pre-softmax no"
    )
    moe_router_num_groups: int | None = setting(
        None, "group-limited routing: number of expert groups", within=POSITIVE_COUNT
    )
    moe_router_group_topk: int | None = setting(
        None, "group-limited routing: groups a token may use", within=POSITIVE_COUNT
    )
    moe_router_group_score: str = setting(
        "top2",
        "a group's score: max, its best expert (DeepSeek-V2); top2, the sum of its best two (DeepSeek-V3); megatron, "
        "the sum of its best topk // group-topk, of logits where the softmax comes after the choice (megatron-core)",
        choices=("max", "top2", "megatron"),
    )
    moe_router_topk_scaling_factor: float | None = setting(None, "multiply the K weights by this", within=POSITIVE)
    moe_router_enable_expert_bias: bool = setting(
        False, "balance by a bias on the scores, used for the choice and not for the weights"
    )
    moe_router_bias_update_rate: float = setting(
        1e-3, "step of the expert bias, per optimizer step", within=NOT_NEGATIVE, resume="free"
    )
    moe_router_dtype: str = setting(
        "fp32", "dtype of the gate's matmul and scores", choices=("fp32", "fp64"), resume="free"
    )
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("none",),
        "auxiliary losses; or sinkhorn, a choice that is balanced within the micro-batch; or quantile_balancing, which "
        "sets the expert bias to what would have balanced the global batch",
        choices=("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", QUANTILE),
        resume="free",
    )
    moe_router_quantile_balancing_ema: float = setting(
        0.0, "with it: share of the old bias that stays in an update", within=PROBABILITY, resume="free"
    )
    moe_router_quantile_balancing_num_bins: int = setting(
        1000, "with it: bins of an expert's histogram", within=Range(low=2), resume="free"
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting(
        (0.0,), "coefficient of each auxiliary loss", within=NOT_NEGATIVE, resume="free"
    )
    moe_z_loss_coeff: float | None = setting(
        None, "coefficient of the router z-loss", within=NOT_NEGATIVE, resume="free"
    )
    moe_token_dispatcher_type: str = setting(
        "alltoall", "how tokens reach their experts", choices=DISPATCHERS, resume="free"
    )
    moe_alltoall_by_node: bool = setting(
        False,
        "EP over several nodes: send a token once to each node with its experts, and copy it there; same bits",
        resume="free",
    )
    moe_flex_dispatcher_backend: str = setting(
        "deepep",
        "library of the flex dispatcher (Megatron-LM has ncclep too)",
        choices=("deepep", "hybridep"),
        resume="free",
    )
    moe_deepep_num_sms: int | None = setting(
        None,
        "multiprocessors that DeepEP takes for its exchanges, an even number; default: the library's",
        within=Range(low=2),
        resume="free",
    )
    moe_hybridep_num_sms: int | None = setting(
        None,
        "multiprocessors that HybridEP takes for a dispatch, and for a combine; default: the library's",
        within=POSITIVE_COUNT,
        resume="free",
    )
    moe_enable_deepep: bool = setting(
        False, "Megatron-LM's older spelling of --moe-flex-dispatcher-backend deepep", resume="free"
    )
    moe_expert_backend: str = setting(
        "grouped_mm",
        "kernel of the experts: torch's grouped_mm, Transformer Engine's, or a plain loop",
        choices=EXPERT_BACKENDS,
        resume="free",
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None, "width of the shared expert; none: no shared expert", within=POSITIVE_COUNT
    )
    moe_shared_expert_gate: bool = setting(False, "gate the shared expert's output (Qwen2-MoE)")
    moe_shared_expert_overlap: bool = setting(
        False,
        "CUDA: compute the shared expert on its own stream, beside dispatch, experts and combine",
        resume="free",
    )
    overlap_moe_expert_parallel_comm: bool = setting(
        False,
        "CUDA: run two micro-batches at a time, and hide the exchanges of one behind the work of the other",
        resume="free",
    )
    delay_wgrad_compute: bool = setting(
        False,
        "with this overlap: compute the gradients of the experts' weights while the next exchange is on its way",
        resume="free",
    )
    moe_router_bias_center: bool = setting(
        False, "subtract the mean from the expert bias after every update", resume="free"
    )
    moe_global_aux_loss_counts: str = setting(
        "batch",
        "global_aux_loss: balance the whole global batch, at the price of one more forward pass where it has several "
        "micro-batches per rank, or the micro-batches so far (Megatron-LM's)",
        choices=("batch", "running"),
        resume="free",
    )
    moe_seq_aux_loss_per: str = setting(
        "sequence",
        "seq_aux_loss: balance each sequence or document",
        choices=("sequence", "document"),
        resume="free",
    )
    moe_input_jitter_eps: float | None = setting(
        None,
        "multiply the router's input by noise out of [1 - eps, 1 + eps] in training",
        within=Range(above=0, below=1),
        resume="free",
    )
    moe_expert_capacity_factor: float | None = setting(
        None,
        "an expert takes at most this times its even share of a micro-batch's choices; none: no token is dropped",
        within=POSITIVE,
        resume="free",
    )
    moe_token_drop_policy: str = setting(
        "probs",
        "which choices are dropped beyond the capacity: the least weighted, or the last of the sequence",
        choices=("probs", "position"),
        resume="free",
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        False, "pad each expert's rows to the capacity, so that shapes never change", resume="free"
    )
    moe_router_force_load_balancing: bool = setting(
        False,
        "for benchmarks only: send tokens round robin whatever the router says; such a model is not trained",
        resume="free",
    )
    moe_enable_routing_replay: str | None = setting(
        None, "train with the routes of these files", resume="free", report=False
    )
    moe_routing_replay_missing: str = setting(
        "error",
        "a missing route is an error, or the gate chooses",
        choices=("error", "live"),
        resume="free",
    )
    moe_routing_replay_counts: str = setting(
        "replayed",
        "balance by the replayed choices, or by the gate's",
        choices=("replayed", "live"),
        resume="free",
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Split of the model and of the batch over ranks."""

    tensor_model_parallel_size: int = setting(1, "TP: ranks a layer's matrices are split over", within=POSITIVE_COUNT)
    sequence_parallel: bool = setting(
        False, "split activations between TP regions along the sequence; required for MoE with TP > 1"
    )
    pipeline_model_parallel_size: int = setting(1, "PP: stages the layers are split over", within=POSITIVE_COUNT)
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "VPP: layers per virtual stage (interleaved schedule)", within=POSITIVE_COUNT
    )
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None, "the same by their number on a pipeline rank", within=POSITIVE_COUNT
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None, "layers on the first stage, where they differ", within=POSITIVE_COUNT
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, "layers on the last stage, where they differ", within=POSITIVE_COUNT
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "count the embedding as a layer of the first stage; replaced by the layout by letters that this is"
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "count the loss as a layer of the last stage; replaced likewise"
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "what each stage has, in letters: E embedding, t layer, m multi-token prediction, L loss, | next stage; e.g. "
        "'Et*3|(tt|)*4,m|L'; more stages than PP are virtual ones",
    )
    context_parallel_size: int = setting(1, "CP: ranks a sequence is split over", within=POSITIVE_COUNT)
    expert_model_parallel_size: int = setting(1, "EP: ranks the experts are spread over", within=POSITIVE_COUNT)
    expert_tensor_parallel_size: int | None = setting(
        None, "ETP: ranks one expert is split over; default TP", within=POSITIVE_COUNT
    )
    distributed_backend: str | None = setting(
        None, "nccl or gloo; default: nccl with CUDA, gloo without", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = setting(
        10.0, "a collective that waits longer than this fails", unit="min", within=POSITIVE
    )
    overlap_grad_reduce: bool = setting(False, "reduce gradients while the backward pass runs")
    overlap_param_gather: bool = setting(False, "gather parameters while the forward pass runs (distributed optimizer)")
    ddp_bucket_size: int | None = setting(
        None, "parameters per gradient bucket; default: the engine's", within=POSITIVE_COUNT
    )
    cp_comm_type: str = setting(
        "all_gather", "how context-parallel ranks share keys and values: all are gathered", choices=("all_gather",)
    )
    mla_cp_exchange: str | None = setting(
        None,
        "latent attention's context-parallel ranks exchange latents, which each expands, or keys and values; default: "
        f"latent, unless a byte saved costs over {MOST_FLOPS_PER_BYTE:,} FLOPs",
        choices=EXCHANGES,
    )
    data_parallel_sharding_strategy: str | None = setting(
        None,
        "ZeRO: spread the optimizer (stage 1, as --use-distributed-optimizer), gradients too (2), weights too (3) over "
        "the data-parallel ranks; default: no_shard, or optim with --use-distributed-optimizer",
        choices=SHARDING_STRATEGIES,
    )
    use_torch_fsdp2: bool = setting(False, "as --data-parallel-sharding-strategy optim_grads_params")
    zero_quantized_weights: bool = setting(
        False, "ZeRO++ qwZ: gather weights as int8 blocks; needs a strategy that shards gradients"
    )
    zero_hpz_partition_size: int | None = setting(
        None,
        "ZeRO++ hpZ: after the forward pass keep weights spread over this many ranks only, a machine's",
        within=Range(low=2),
    )
    zero_quantized_gradients: str | None = setting(
        None,
        "ZeRO++ qgZ: send gradients as blocks of this integer type, and add them in fp32",
        choices=("int8", "int4"),
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of weights, gradients and the loss scale."""

    bf16: bool = setting(False, "weights and activations in bfloat16, fp32 master weights")
    fp16: bool = setting(False, "weights and activations in float16, fp32 master weights, loss scaling")
    loss_scale: float | None = setting(None, "fp16: constant loss scale; default: dynamic", within=POSITIVE)
    initial_loss_scale: float = setting(
        2.0**16,
        "fp16: first dynamic loss scale; Megatron-LM's is 2^32, which overflows in the first 16 steps",
        within=POSITIVE,
    )
    min_loss_scale: float = setting(1.0, "fp16: smallest dynamic loss scale", within=POSITIVE)
    loss_scale_window: int = setting(
        1000, "fp16: steps without overflow before the scale doubles", within=POSITIVE_COUNT
    )
    hysteresis: int = setting(2, "fp16: overflows before the scale halves", within=POSITIVE_COUNT)
    accumulate_allreduce_grads_in_fp32: bool | None = setting(
        None, "accumulate and reduce gradients in fp32; default: on, unless --grad-reduce-in-bf16"
    )
    gradient_accumulation_fusion: bool | None = setting(
        None,
        "add weight gradients to their fp32 sums in the products that make them, unrounded (docs/guides/precision.md); "
        "default: where that is known to cost nothing, which leaves out the experts' in half precision",
        resume="free",
    )
    attention_softmax_in_fp32: bool = setting(True, "softmax of the attention in fp32 (always so in our attention)")
    grad_reduce_in_bf16: bool = setting(False, "bf16: accumulate and reduce gradients in bf16, which rounds them")
    keep_fp32: tuple[str, ...] | None = setting(
        None,
        "bf16, fp16: keep these modules' weights and compute in fp32: names with wildcards, layers numbered from 0 "
        "over the whole model (decoder.layers.0, *.router), or one of embedding, output_layer, norms, router, experts, "
        "shared_experts, attention, softmax, first_layer, last_layer",
    )
    fp8_format: str | None = setting(
        None,
        "bf16: multiply the linear layers and the routed experts in FP8: e4m3, or hybrid with e5m2 for gradients; "
        "default: in bf16",
        choices=("e4m3", "hybrid"),
        resume="free",
    )
    fp8_modules: tuple[str, ...] = setting(
        ("experts", "shared_experts", "mlp", "attention"),
        "FP8: the modules with products in FP8 (mlp: of dense layers); default: all four",
        choices=("experts", "shared_experts", "mlp", "attention"),
        resume="free",
    )
    first_last_layers_bf16: bool = setting(False, "FP8: multiply the first and the last layers in bf16", resume="free")
    num_layers_at_start_in_bf16: int = setting(
        1, "FP8: layers at the start for --first-last-layers-bf16", within=NOT_NEGATIVE, resume="free"
    )
    num_layers_at_end_in_bf16: int = setting(
        1, "FP8: layers at the end for --first-last-layers-bf16", within=NOT_NEGATIVE, resume="free"
    )
    fp8_recipe: str = setting(
        "blockwise",
        "FP8: how numbers share scales; tiles of 1 x 128 and blocks of 128 x 128 are there, the others are refused "
        "(Megatron-LM's default is delayed)",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        resume="free",
    )
    fp8_param_gather: bool = setting(False, "FP8: store and gather weights in FP8; not done", resume="free")
    fp32_residual_connection: bool = setting(False, "bf16, fp16: carry and add the residual stream in fp32")
    allow_tf32: bool = setting(
        False, "fp32 on CUDA: multiply with ten bits of mantissa, as TF32, but for routers and their gradients; faster"
    )
    eval_in_fp32: bool = setting(False, "bf16, fp16: evaluate the model's weights, as they are, with fp32 compute")
    check_precision_interval: int = setting(
        100, "iterations between checks of every tensor's dtype; 0: only at build, wrap, load and save", within=COUNT
    )
    print_precision: bool = setting(
        False, "print every tensor class's dtypes under these flags and stop; needs no data"
    )
    audit_precision: bool = setting(
        False, "trace the second step of this run: dtypes, casts, promotions; --audit-precision-output names the files"
    )
    audit_precision_output: str = setting("precision_audit", "path of the audit's files, without .txt, .json and .html")
