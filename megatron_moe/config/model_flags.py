"""The settings of a model and its layout: transformer, experts, parallelism, precision."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_moe.config.flag import flag, free
from megatron_moe.config.registry import DISPATCHERS, EXPERT_BACKENDS, SCORE_FUNCTIONS

SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""What data-parallel ranks share, by ZeRO stage: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."""


@dataclass(frozen=True)
class ModelConfig:
    """Transformer: sizes, attention, position embedding, normalisation."""

    num_layers: int = flag(4, "number of transformer layers")
    hidden_size: int = flag(256, "width of the residual stream (H)")
    ffn_hidden_size: int | None = flag(None, "width of a dense layer's MLP; default 4 x hidden-size")
    num_attention_heads: int = flag(4, "number of attention heads")
    group_query_attention: bool = flag(False, "grouped-query attention; needs --num-query-groups")
    num_query_groups: int | None = flag(None, "key/value heads; default: one per attention head")
    kv_channels: int | None = flag(None, "width of one head; default hidden-size / num-attention-heads")
    seq_length: int = free(256, "tokens per sequence (S)")
    max_position_embeddings: int | None = free(None, "largest position the model is built for; default seq-length")
    position_embedding_type: str = flag("rope", "position embedding", choices=("rope", "none"))
    rotary_base: float = flag(10000.0, "base of the rotary frequencies")
    rotary_percent: float = flag(1.0, "share of a head's width that is rotated")
    rotary_interleaved: bool = flag(False, "rotate neighbouring pairs instead of halves (grouped-query attention)")
    rope_type: str = flag("rope", "rotary embedding of latent attention", choices=("rope", "yarn"))
    rotary_scaling_factor: float = flag(1.0, "yarn: context extension factor")
    original_max_position_embeddings: int = flag(4096, "yarn: context length before extension")
    beta_fast: float = flag(32.0, "yarn: rotations above which a frequency is kept")
    beta_slow: float = flag(1.0, "yarn: rotations below which a frequency is interpolated")
    mscale: float = flag(1.0, "yarn: scale of the rotary amplitude")
    mscale_all_dim: float = flag(0.0, "yarn: scale of the attention logits; 0 switches it off")
    use_rope_scaling: bool = flag(False, "Llama 3's scaling of the rotary frequencies; not here")
    normalization: str = flag("RMSNorm", "normalisation", choices=("RMSNorm",))
    norm_epsilon: float = flag(1e-6, "epsilon of the normalisation")
    swiglu: bool = flag(True, "gated SiLU in every MLP and expert")
    add_bias_linear: bool = flag(
        False, "biases in the linear layers (Megatron-LM: the opposite of --disable-bias-linear)"
    )
    add_qkv_bias: bool = flag(False, "biases in the query, key and value projections only")
    qk_layernorm: bool = flag(False, "normalise queries and keys (latent attention: the two latent norms)")
    multi_latent_attention: bool = flag(False, "DeepSeek's multi-head latent attention (MLA)")
    q_lora_rank: int | None = flag(None, "MLA: rank of the query compression; default none")
    kv_lora_rank: int = flag(512, "MLA: rank of the key/value compression")
    qk_head_dim: int = flag(128, "MLA: width of a head's part without position")
    qk_pos_emb_head_dim: int = flag(64, "MLA: width of a head's rotary part")
    v_head_dim: int = flag(128, "MLA: width of a head's value")
    attention_dropout: float = free(0.0, "dropout on attention weights")
    hidden_dropout: float = free(0.0, "dropout on the residual branches")
    init_method_std: float = free(0.02, "standard deviation of the weight initialisation")
    untie_embeddings_and_output_weights: bool = flag(False, "separate tables for the embedding and the output layer")
    vocab_size: int | None = flag(None, "size of the vocabulary before padding; default: the tokenizer's")
    make_vocab_size_divisible_by: int = free(128, "pad the vocabulary to a multiple of this times TP")
    padded_vocab_size: int | None = free(
        None, "rows of the embedding table, tokens and padding; default: by make-vocab-size-divisible-by"
    )
    transformer_impl: str = free(
        "local",
        "linear, norm and attention modules; the MoE layer is ours in both",
        choices=("local", "transformer_engine"),
    )
    attention_backend: str = free(
        "auto",
        "the kernel of Transformer Engine's attention; the local attention's is torch's choice",
        choices=("auto", "flash", "fused", "unfused"),
    )
    cross_entropy_loss_fusion: bool = free(
        False, "output layer and cross entropy in one, over chunks of tokens, without the whole logits in memory"
    )
    cross_entropy_chunk_tokens: int | None = free(
        None, "tokens per chunk of the fused loss; default 1024, with which a chunk's fp32 logits take at most 32 MiB"
    )
    mtp_num_layers: int | None = flag(
        None, "multi-token prediction: layers that predict further tokens (DeepSeek-V3); none: the next token only"
    )
    mtp_loss_scaling_factor: float = free(0.1, "weight of the mean loss of the multi-token prediction layers")


@dataclass(frozen=True)
class MoEConfig:
    """Router, experts, dispatch, load balancing."""

    num_experts: int | None = flag(None, "experts per MoE layer (E); none: a dense model")
    moe_layer_freq: int | str = flag(
        1, "which layers are MoE: N for every N-th (layer % N == 0), or a list expression like '[0]+[1]*3'"
    )
    moe_ffn_hidden_size: int | None = flag(None, "width of one expert (F); default ffn-hidden-size")
    moe_router_topk: int = flag(2, "experts per token (K)")
    moe_router_score_function: str = flag("softmax", "scores from logits", choices=SCORE_FUNCTIONS)
    moe_router_pre_softmax: bool = flag(False, "softmax over all experts before the choice, not over the chosen ones")
    moe_router_norm_topk_prob: bool | None = flag(
        None, "make a token's K weights sum to one; default as Megatron-LM: sigmoid with K > 1 yes, pre-softmax no"
    )
    moe_router_num_groups: int | None = flag(None, "group-limited routing: number of expert groups")
    moe_router_group_topk: int | None = flag(None, "group-limited routing: groups a token may use")
    moe_router_group_score: str = flag(
        "top2",
        "a group's score: max, its best expert (DeepSeek-V2); top2, the sum of its best two (DeepSeek-V3); megatron, "
        "the sum of its best topk // group-topk, of logits where the softmax comes after the choice (megatron-core)",
        choices=("max", "top2", "megatron"),
    )
    moe_router_topk_scaling_factor: float | None = flag(None, "multiply the K weights by this")
    moe_router_enable_expert_bias: bool = flag(
        False, "balance by a bias on the scores, used for the choice and not for the weights"
    )
    moe_router_bias_update_rate: float = free(1e-3, "step of the expert bias, per optimizer step")
    moe_router_dtype: str = free("fp32", "dtype of the gate's matmul and scores", choices=("fp32", "fp64"))
    moe_router_load_balancing_type: tuple[str, ...] = free(
        ("none",),
        "auxiliary losses, or sinkhorn: a choice of experts that is balanced within the micro-batch",
        choices=("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"),
    )
    moe_aux_loss_coeff: tuple[float, ...] = free((0.0,), "coefficient of each auxiliary loss")
    moe_z_loss_coeff: float | None = free(None, "coefficient of the router z-loss")
    moe_token_dispatcher_type: str = free("alltoall", "how tokens reach their experts", choices=DISPATCHERS)
    moe_flex_dispatcher_backend: str = free(
        "deepep", "library of the flex dispatcher (Megatron-LM has ncclep too)", choices=("deepep", "hybridep")
    )
    moe_deepep_num_sms: int | None = free(
        None, "multiprocessors that DeepEP takes for its exchanges, an even number; default: the library's"
    )
    moe_hybridep_num_sms: int | None = free(
        None, "multiprocessors that HybridEP takes for a dispatch, and for a combine; default: the library's"
    )
    moe_enable_deepep: bool = free(False, "Megatron-LM's older spelling of --moe-flex-dispatcher-backend deepep")
    moe_expert_backend: str = free(
        "grouped_mm",
        "kernel of the experts: torch's grouped_mm, Transformer Engine's, or a plain loop",
        choices=EXPERT_BACKENDS,
    )
    moe_shared_expert_intermediate_size: int | None = flag(None, "width of the shared expert; none: no shared expert")
    moe_shared_expert_gate: bool = flag(False, "gate the shared expert's output (Qwen2-MoE)")
    moe_shared_expert_overlap: bool = free(
        False, "CUDA: compute the shared expert on a stream of its own, next to dispatch, experts and combine"
    )
    overlap_moe_expert_parallel_comm: bool = free(
        False, "CUDA: run two micro-batches at a time, and hide the exchanges of one behind the work of the other"
    )
    delay_wgrad_compute: bool = free(
        False, "with this overlap: compute the gradients of the experts' weights while the next exchange is on its way"
    )
    moe_router_bias_center: bool = free(False, "subtract the mean from the expert bias after every update")
    moe_global_aux_loss_counts: str = free(
        "batch",
        "global_aux_loss: balance the whole global batch, at the price of one more forward pass where it has several "
        "micro-batches per rank, or the micro-batches so far (Megatron-LM's)",
        choices=("batch", "running"),
    )
    moe_input_jitter_eps: float | None = free(
        None, "multiply the router's input by noise out of [1 - eps, 1 + eps] in training"
    )
    moe_expert_capacity_factor: float | None = free(
        None, "an expert takes at most this times its even share of a micro-batch's choices; none: no token is dropped"
    )
    moe_token_drop_policy: str = free(
        "probs",
        "which choices are dropped beyond the capacity: those of least weight, or the last of the sequence",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = free(
        False, "pad each expert's rows to the capacity, so that shapes never change"
    )
    moe_router_force_load_balancing: bool = free(
        False, "for benchmarks only: send tokens round robin whatever the router says; such a model is not trained"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Split of the model and of the batch over ranks."""

    tensor_model_parallel_size: int = flag(1, "TP: ranks a layer's matrices are split over")
    sequence_parallel: bool = flag(
        False, "split activations between TP regions along the sequence; required for MoE with TP > 1"
    )
    pipeline_model_parallel_size: int = flag(1, "PP: stages the layers are split over")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "VPP: layers per virtual stage (interleaved schedule)"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "the same by their number on a pipeline rank")
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers on the first stage, where they differ")
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers on the last stage, where they differ")
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as a layer of the first stage; replaced by the layout by letters that this is"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the loss as a layer of the last stage; replaced likewise"
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "what each stage has, in letters: E embedding, t layer, m multi-token prediction, L loss, | next stage; e.g. "
        "'Et*3|(tt|)*4,m|L'; more stages than PP are virtual ones",
    )
    context_parallel_size: int = flag(1, "CP: ranks a sequence is split over")
    expert_model_parallel_size: int = flag(1, "EP: ranks the experts are spread over")
    expert_tensor_parallel_size: int | None = flag(None, "ETP: ranks one expert is split over; default TP")
    distributed_backend: str | None = flag(
        None, "nccl or gloo; default: nccl with CUDA, gloo without", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(10.0, "a collective that waits longer than this fails", unit="min")
    overlap_grad_reduce: bool = flag(False, "reduce gradients while the backward pass runs")
    overlap_param_gather: bool = flag(False, "gather parameters while the forward pass runs (distributed optimizer)")
    ddp_bucket_size: int | None = flag(None, "parameters per gradient bucket; default: the engine's")
    cp_comm_type: str = flag(
        "all_gather", "how context-parallel ranks share keys and values: all are gathered", choices=("all_gather",)
    )
    data_parallel_sharding_strategy: str | None = flag(
        None,
        "ZeRO: spread the optimizer (stage 1, as --use-distributed-optimizer), gradients too (2), weights too (3) over "
        "the data-parallel ranks; default: no_shard, or optim with --use-distributed-optimizer",
        choices=SHARDING_STRATEGIES,
    )
    use_torch_fsdp2: bool = flag(False, "as --data-parallel-sharding-strategy optim_grads_params")
    zero_quantized_weights: bool = flag(
        False, "ZeRO++ qwZ: gather weights as int8 blocks; needs a strategy that shards gradients"
    )
    zero_hpz_partition_size: int | None = flag(
        None, "ZeRO++ hpZ: after the forward pass keep weights spread over this many ranks only, a machine's"
    )
    zero_quantized_gradients: str | None = flag(
        None,
        "ZeRO++ qgZ: send gradients as blocks of this integer type, and add them in fp32",
        choices=("int8", "int4"),
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of weights, gradients and the loss scale."""

    bf16: bool = flag(False, "weights and activations in bfloat16, fp32 master weights")
    fp16: bool = flag(False, "weights and activations in float16, fp32 master weights, loss scaling")
    loss_scale: float | None = flag(None, "fp16: constant loss scale; default: dynamic")
    initial_loss_scale: float = flag(
        2.0**16, "fp16: first dynamic loss scale; Megatron-LM's is 2^32, which overflows in the first 16 steps"
    )
    min_loss_scale: float = flag(1.0, "fp16: smallest dynamic loss scale")
    loss_scale_window: int = flag(1000, "fp16: steps without overflow before the scale doubles")
    hysteresis: int = flag(2, "fp16: overflows before the scale halves")
    accumulate_allreduce_grads_in_fp32: bool | None = flag(
        None, "accumulate and reduce gradients in fp32; default: on, unless --grad-reduce-in-bf16"
    )
    gradient_accumulation_fusion: bool | None = free(
        None,
        "add weight gradients to their fp32 sums in the products that make them, unrounded (docs/precision.md); "
        "default: where that is known to cost nothing, which leaves out the experts' in half precision",
    )
    attention_softmax_in_fp32: bool = flag(True, "softmax of the attention in fp32 (always so in our attention)")
    grad_reduce_in_bf16: bool = flag(False, "bf16: accumulate and reduce gradients in bf16, which rounds them")
    keep_fp32: tuple[str, ...] | None = flag(
        None,
        "bf16, fp16: keep these modules' weights and compute in fp32: names with wildcards, layers numbered from 0 "
        "over the whole model (decoder.layers.0, *.router), or one of embedding, output_layer, norms, router, experts, "
        "shared_experts, attention, softmax, first_layer, last_layer",
    )
    fp8_format: str | None = free(
        None,
        "bf16: multiply the linear layers and the routed experts in FP8: e4m3, or hybrid with e5m2 for gradients; "
        "default: in bf16",
        choices=("e4m3", "hybrid"),
    )
    fp8_modules: tuple[str, ...] = free(
        ("experts", "shared_experts", "mlp", "attention"),
        "FP8: the modules whose products are in FP8 (mlp: of dense layers); default: all four",
        choices=("experts", "shared_experts", "mlp", "attention"),
    )
    first_last_layers_bf16: bool = free(False, "FP8: multiply the first and the last layers in bf16")
    num_layers_at_start_in_bf16: int = free(1, "FP8: layers at the start for --first-last-layers-bf16")
    num_layers_at_end_in_bf16: int = free(1, "FP8: layers at the end for --first-last-layers-bf16")
    fp8_recipe: str = free(
        "blockwise",
        "FP8: how numbers share scales; tiles of 1 x 128 and blocks of 128 x 128 are there, the others are refused "
        "(Megatron-LM's default is delayed)",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    )
    fp8_param_gather: bool = free(False, "FP8: store and gather weights in FP8; not done")
    fp32_residual_connection: bool = flag(False, "bf16, fp16: carry and add the residual stream in fp32")
    allow_tf32: bool = flag(
        False, "fp32 on CUDA: multiply with ten bits of mantissa, as TF32, but for routers and their gradients; faster"
    )
    eval_in_fp32: bool = flag(False, "bf16, fp16: evaluate the model's weights, as they are, with fp32 compute")
    check_precision_interval: int = flag(
        100, "iterations between checks of every tensor's dtype; 0: only at build, wrap, load and save"
    )
    print_precision: bool = flag(False, "print every tensor class's dtypes under these flags and stop; needs no data")
    audit_precision: bool = flag(
        False, "trace the second step of this run: dtypes, casts, promotions; --audit-precision-output names the files"
    )
    audit_precision_output: str = flag("precision_audit", "path of the audit's files, without .txt, .json and .html")
