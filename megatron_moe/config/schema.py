"""What a run is: one frozen dataclass per topic, and `Run`, which holds one of each.

One field is one flag is one key in the checkpoint's config. A field `moe_router_topk` is the flag
`--moe-router-topk`; flags carry Megatron-LM's names wherever Megatron-LM has one. Field names are unique over all
sections, so `flatten(run)` is a plain dict and `build(flat)` is its inverse. Values are checked by `rules/`, parsed
by `cli.py`; nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_moe.config.registry import DISPATCHERS, EXPERT_BACKENDS, SCORE_FUNCTIONS


def _flag(default: Any, help: str, *, free: bool = False, reported: bool = True, **shown: Any) -> Any:
    """Declare a field with its default and what others need to know of it; lists are tuples.

    Args:
        free: see `_free`. reported: whether a resumed run says that it differs from the checkpoint's.
        shown: choices; spelling, the flag's name where Megatron-LM's differs from the field's; unit.
    """
    absent = {"choices": None, "spelling": None, "unit": ""}
    assert shown.keys() <= absent.keys(), shown
    return field(default=default, metadata={"help": help, "free": free, "reported": reported, **absent, **shown})


_free = partial(_flag, free=True)
"""Runs that share a checkpoint may differ in it: it changes neither a weight's shape nor its meaning."""
_mute = partial(_flag, reported=False)


@dataclass(frozen=True)
class ModelConfig:
    """Transformer: sizes, attention, position embedding, normalisation."""

    num_layers: int = _flag(4, "number of transformer layers")
    hidden_size: int = _flag(256, "width of the residual stream (H)")
    ffn_hidden_size: int | None = _flag(None, "width of a dense layer's MLP; default 4 x hidden-size")
    num_attention_heads: int = _flag(4, "number of attention heads")
    group_query_attention: bool = _flag(False, "grouped-query attention; needs --num-query-groups")
    num_query_groups: int | None = _flag(None, "key/value heads; default: one per attention head")
    kv_channels: int | None = _flag(None, "width of one head; default hidden-size / num-attention-heads")
    seq_length: int = _free(256, "tokens per sequence (S)")
    max_position_embeddings: int | None = _free(None, "largest position the model is built for; default seq-length")
    position_embedding_type: str = _flag("rope", "position embedding", choices=("rope", "none"))
    rotary_base: float = _flag(10000.0, "base of the rotary frequencies")
    rotary_percent: float = _flag(1.0, "share of a head's width that is rotated")
    rotary_interleaved: bool = _flag(False, "rotate neighbouring pairs instead of halves (grouped-query attention)")
    rope_type: str = _flag("rope", "rotary embedding of latent attention", choices=("rope", "yarn"))
    rotary_scaling_factor: float = _flag(1.0, "yarn: context extension factor")
    original_max_position_embeddings: int = _flag(4096, "yarn: context length before extension")
    beta_fast: float = _flag(32.0, "yarn: rotations above which a frequency is kept")
    beta_slow: float = _flag(1.0, "yarn: rotations below which a frequency is interpolated")
    mscale: float = _flag(1.0, "yarn: scale of the rotary amplitude")
    mscale_all_dim: float = _flag(0.0, "yarn: scale of the attention logits; 0 switches it off")
    normalization: str = _flag("RMSNorm", "normalisation", choices=("RMSNorm",))
    norm_epsilon: float = _flag(1e-6, "epsilon of the normalisation")
    swiglu: bool = _flag(True, "gated SiLU in every MLP and expert")
    add_bias_linear: bool = _flag(
        False, "biases in the linear layers (Megatron-LM: the opposite of --disable-bias-linear)"
    )
    add_qkv_bias: bool = _flag(False, "biases in the query, key and value projections only")
    qk_layernorm: bool = _flag(False, "normalise queries and keys (latent attention: the two latent norms)")
    multi_latent_attention: bool = _flag(False, "DeepSeek's multi-head latent attention (MLA)")
    q_lora_rank: int | None = _flag(None, "MLA: rank of the query compression; default none")
    kv_lora_rank: int = _flag(512, "MLA: rank of the key/value compression")
    qk_head_dim: int = _flag(128, "MLA: width of a head's part without position")
    qk_pos_emb_head_dim: int = _flag(64, "MLA: width of a head's rotary part")
    v_head_dim: int = _flag(128, "MLA: width of a head's value")
    attention_dropout: float = _free(0.0, "dropout on attention weights")
    hidden_dropout: float = _free(0.0, "dropout on the residual branches")
    init_method_std: float = _free(0.02, "standard deviation of the weight initialisation")
    untie_embeddings_and_output_weights: bool = _flag(False, "separate tables for the embedding and the output layer")
    vocab_size: int | None = _flag(None, "size of the vocabulary before padding; default: the tokenizer's")
    make_vocab_size_divisible_by: int = _free(128, "pad the vocabulary to a multiple of this times TP")
    transformer_impl: str = _free(
        "local",
        "linear, norm and attention modules; the MoE layer is ours in both",
        choices=("local", "transformer_engine"),
    )
    cross_entropy_loss_fusion: bool = _free(
        False, "output layer and cross entropy in one, over chunks of tokens: the logits are never held whole"
    )
    cross_entropy_chunk_tokens: int | None = _free(
        None, "tokens per chunk of the fused loss; default 1024, with which a chunk's fp32 logits take at most 32 MiB"
    )
    mtp_num_layers: int | None = _flag(
        None, "multi-token prediction: layers that predict further tokens (DeepSeek-V3); none: the next token only"
    )
    mtp_loss_scaling_factor: float = _free(0.1, "weight of the mean loss of the multi-token prediction layers")


@dataclass(frozen=True)
class MoEConfig:
    """Router, experts, dispatch, load balancing."""

    num_experts: int | None = _flag(None, "experts per MoE layer (E); none: a dense model")
    moe_layer_freq: int | str = _flag(
        1, "which layers are MoE: N for every N-th (layer % N == 0), or a list expression like '[0]+[1]*3'"
    )
    moe_ffn_hidden_size: int | None = _flag(None, "width of one expert (F); default ffn-hidden-size")
    moe_router_topk: int = _flag(2, "experts per token (K)")
    moe_router_score_function: str = _flag("softmax", "scores from logits", choices=SCORE_FUNCTIONS)
    moe_router_pre_softmax: bool = _flag(False, "softmax over all experts before the choice, not over the chosen ones")
    moe_router_norm_topk_prob: bool | None = _flag(
        None, "make a token's K weights sum to one; default as Megatron-LM: sigmoid with K > 1 yes, pre-softmax no"
    )
    moe_router_num_groups: int | None = _flag(None, "group-limited routing: number of expert groups")
    moe_router_group_topk: int | None = _flag(None, "group-limited routing: groups a token may use")
    moe_router_group_score: str = _flag(
        "top2",
        "a group's score: max, its best expert (DeepSeek-V2); top2, the sum of its best two (DeepSeek-V3); megatron, "
        "the sum of its best topk // group-topk, of logits where the softmax comes after the choice (megatron-core)",
        choices=("max", "top2", "megatron"),
    )
    moe_router_topk_scaling_factor: float | None = _flag(None, "multiply the K weights by this")
    moe_router_enable_expert_bias: bool = _flag(False, "balance by a bias on the scores that chooses and never weighs")
    moe_router_bias_update_rate: float = _free(1e-3, "step of the expert bias, per optimizer step")
    moe_router_dtype: str = _free("fp32", "dtype of the gate's matmul and scores", choices=("fp32", "fp64"))
    moe_router_load_balancing_type: tuple[str, ...] = _free(
        ("none",),
        "auxiliary losses, or sinkhorn: a choice of experts that is balanced within the micro-batch",
        choices=("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"),
    )
    moe_aux_loss_coeff: tuple[float, ...] = _free((0.0,), "coefficient of each auxiliary loss")
    moe_z_loss_coeff: float | None = _free(None, "coefficient of the router z-loss")
    moe_token_dispatcher_type: str = _free("alltoall", "how tokens reach their experts", choices=DISPATCHERS)
    moe_expert_backend: str = _free(
        "grouped_mm",
        "kernel of the experts: torch's grouped_mm, Transformer Engine's, or a plain loop",
        choices=EXPERT_BACKENDS,
    )
    moe_shared_expert_intermediate_size: int | None = _flag(None, "width of the shared expert; none: no shared expert")
    moe_shared_expert_gate: bool = _flag(False, "gate the shared expert's output (Qwen2-MoE)")
    moe_router_bias_center: bool = _free(False, "take the mean off the expert bias after every update")
    moe_global_aux_loss_counts: str = _free(
        "batch",
        "global_aux_loss: balance the whole global batch, at the price of one more forward pass where it has several "
        "micro-batches per rank, or the micro-batches so far (Megatron-LM's)",
        choices=("batch", "running"),
    )
    moe_input_jitter_eps: float | None = _free(
        None, "multiply the router's input by noise out of [1 - eps, 1 + eps] in training"
    )
    moe_expert_capacity_factor: float | None = _free(
        None, "an expert takes at most this times its even share of a micro-batch's choices; none: no token is dropped"
    )
    moe_token_drop_policy: str = _free(
        "probs",
        "which choices are dropped beyond the capacity: those of least weight, or the last of the sequence",
        choices=("probs", "position"),
    )
    moe_pad_expert_input_to_capacity: bool = _free(
        False, "pad each expert's rows to the capacity, so that shapes never change"
    )
    moe_router_force_load_balancing: bool = _free(
        False, "for benchmarks only: send tokens round robin whatever the router says; such a model is not trained"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are spread over ranks."""

    tensor_model_parallel_size: int = _flag(1, "TP: ranks a layer's matrices are split over")
    sequence_parallel: bool = _flag(
        False, "split activations between TP regions along the sequence; required for MoE with TP > 1"
    )
    pipeline_model_parallel_size: int = _flag(1, "PP: stages the layers are split over")
    num_layers_per_virtual_pipeline_stage: int | None = _flag(
        None, "VPP: layers per virtual stage (interleaved schedule)"
    )
    decoder_first_pipeline_num_layers: int | None = _flag(None, "layers on the first stage, where they differ")
    decoder_last_pipeline_num_layers: int | None = _flag(None, "layers on the last stage, where they differ")
    context_parallel_size: int = _flag(1, "CP: ranks a sequence is split over")
    expert_model_parallel_size: int = _flag(1, "EP: ranks the experts are spread over")
    expert_tensor_parallel_size: int | None = _flag(None, "ETP: ranks one expert is split over; default TP")
    distributed_backend: str | None = _flag(
        None, "nccl or gloo; default: nccl with CUDA, gloo without", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = _flag(10.0, "a collective that waits longer than this fails", unit="min")
    overlap_grad_reduce: bool = _flag(False, "reduce gradients while the backward pass runs")
    overlap_param_gather: bool = _flag(False, "gather parameters while the forward pass runs (distributed optimizer)")
    ddp_bucket_size: int | None = _flag(None, "parameters per gradient bucket; default: the engine's")
    cp_comm_type: str = _flag(
        "all_gather", "how context-parallel ranks share keys and values: all are gathered", choices=("all_gather",)
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes of weights, gradients and the loss scale."""

    bf16: bool = _flag(False, "weights and activations in bfloat16, fp32 master weights")
    fp16: bool = _flag(False, "weights and activations in float16, fp32 master weights, loss scaling")
    loss_scale: float | None = _flag(None, "fp16: constant loss scale; default: dynamic")
    initial_loss_scale: float = _flag(
        2.0**16, "fp16: first dynamic loss scale; Megatron-LM's is 2^32, whose way down costs the first 16 steps"
    )
    min_loss_scale: float = _flag(1.0, "fp16: smallest dynamic loss scale")
    loss_scale_window: int = _flag(1000, "fp16: steps without overflow before the scale doubles")
    hysteresis: int = _flag(2, "fp16: overflows before the scale halves")
    accumulate_allreduce_grads_in_fp32: bool | None = _flag(
        None, "accumulate and reduce gradients in fp32; default: on, unless --grad-reduce-in-bf16"
    )
    attention_softmax_in_fp32: bool = _flag(True, "softmax of the attention in fp32 (always so in our attention)")
    grad_reduce_in_bf16: bool = _flag(False, "bf16: accumulate and reduce gradients in bf16; rounds, and is told so")
    keep_fp32: tuple[str, ...] | None = _flag(
        None,
        "bf16, fp16: keep these modules' weights and compute in fp32: names with wildcards, layers numbered from 0 "
        "over the whole model (decoder.layers.0, *.router), or one of embedding, output_layer, norms, router, experts, "
        "shared_experts, attention, softmax, first_layer, last_layer",
    )
    fp32_residual_connection: bool = _flag(False, "bf16, fp16: carry and add the residual stream in fp32")
    eval_in_fp32: bool = _flag(False, "bf16, fp16: evaluate the model's weights, as they are, with fp32 compute")
    check_precision_interval: int = _flag(
        100, "iterations between checks of every tensor's dtype; 0: only at build, wrap, load and save"
    )
    print_precision: bool = _flag(False, "print every tensor class's dtypes under these flags and stop; needs no data")
    audit_precision: bool = _flag(
        False, "trace the second step of this run: dtypes, casts, promotions; --audit-precision-output names the files"
    )
    audit_precision_output: str = _flag("precision_audit", "path of the audit's files, without .txt, .json and .html")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: str = _flag("adam", "optimizer; adam is AdamW", choices=("adam",))
    lr: float = _flag(1e-3, "peak learning rate")
    min_lr: float = _flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = _flag("cosine", "schedule after the warm-up", choices=("constant", "cosine", "linear", "WSD"))
    lr_decay_iters: int | None = _flag(None, "iterations of the decay; default train-iters")
    lr_warmup_iters: int = _flag(0, "iterations of linear warm-up")
    lr_warmup_fraction: float | None = _flag(None, "warm-up as a share of lr-decay-iters, instead of lr-warmup-iters")
    lr_warmup_init: float = _flag(0.0, "learning rate at the first step of the warm-up")
    lr_wsd_decay_style: str = _flag("exponential", "WSD: the last phase", choices=("exponential", "linear", "cosine"))
    lr_wsd_decay_iters: int | None = _flag(None, "WSD: iterations of the last phase")
    weight_decay: float = _flag(0.01, "decoupled weight decay (not on norms and biases)")
    adam_beta1: float = _flag(0.9, "decay of the first moment")
    adam_beta2: float = _flag(0.95, "decay of the second moment")
    adam_eps: float = _flag(1e-8, "epsilon of Adam")
    clip_grad: float = _flag(1.0, "largest gradient norm; 0 switches clipping off")
    use_distributed_optimizer: bool = _flag(False, "spread master weights and moments over the data-parallel ranks")
    calculate_per_token_loss: bool = _flag(False, "weigh every token of the global batch alike, not every micro-batch")


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length, evaluation, seeds, recomputation."""

    micro_batch_size: int = _flag(1, "sequences per micro-batch and rank")
    global_batch_size: int | None = _flag(None, "sequences per optimizer step; default micro-batch-size x DP")
    rampup_batch_size: tuple[int, ...] | None = _flag(
        None, "START INCREMENT SAMPLES: grow the global batch over SAMPLES"
    )
    train_iters: int | None = _flag(None, "optimizer steps of the whole run")
    eval_interval: int = _flag(0, "iterations between evaluations; 0: only at the end")
    eval_iters: int = _flag(10, "global batches per evaluation; 0 switches evaluation off")
    seed: int = _flag(1234, "seed of the weights, dropout and data order")
    exit_interval: int | None = _flag(None, "save and stop after an iteration that this divides")
    exit_duration_in_mins: float | None = _flag(None, "save and stop after this many minutes", unit="min")
    exit_signal_handler: bool = _flag(False, "save and stop on SIGTERM or SIGUSR1")
    recompute_granularity: str | None = _flag(
        None, "recompute activations in the backward pass", choices=("full", "selective")
    )
    recompute_method: str | None = _flag(None, "full recomputation: which layers", choices=("uniform", "block"))
    recompute_num_layers: int | None = _flag(
        None, "full recomputation: layers per chunk (uniform) or per stage (block)"
    )
    recompute_modules: tuple[str, ...] | None = _flag(
        None,
        "selective recomputation: modules",
        choices=("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts"),
    )


@dataclass(frozen=True)
class DataConfig:
    """Tokens: where they come from and how they are split."""

    data_path: tuple[str, ...] | None = _flag(
        None, "PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...: indexed datasets, split by --split"
    )
    split: str | None = _flag(None, "shares of train, valid, test, e.g. 969,30,1")
    train_data_path: tuple[str, ...] | None = _flag(None, "as data-path, for training only")
    valid_data_path: tuple[str, ...] | None = _flag(None, "as data-path, for validation only")
    test_data_path: tuple[str, ...] | None = _flag(None, "as data-path, for testing only")
    data_cache_path: str | None = _flag(None, "folder of the index caches; default: beside the data")
    mock_data: bool = _flag(False, "made-up tokens, no files")
    tokenizer_type: str | None = _flag(
        None,
        "kind of tokenizer",
        choices=("SentencePieceTokenizer", "HuggingFaceTokenizer", "ByteTokenizer", "NullTokenizer"),
    )
    tokenizer_model: str | None = _flag(None, "file or folder of the tokenizer")
    num_workers: int = _flag(0, "processes that read data, per rank")
    reset_position_ids: bool = _flag(False, "positions start again after an end-of-document token")
    eod_mask_loss: bool = _flag(False, "no loss on end-of-document tokens")
    no_mmap_bin_files: bool = _flag(False, "read .bin files instead of mapping them")
    data_verify_gb: float = _flag(
        4.0, "check SHA-256 of .bin files at the start up to this much in all; beyond it their sizes", unit="GB"
    )
    accept_changed_data: bool = _flag(
        False, "resume although a data file is not the one that the checkpoint was trained on"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What survives."""

    save: str | None = _mute(None, "folder for checkpoints")
    save_interval: int | None = _flag(None, "iterations between checkpoints; default: only at the end")
    load: str | None = _mute(None, "folder to continue from: its latest step")
    load_hf: str | None = _mute(
        None, "Hugging Face folder to start from: architecture and weights; a step that --load holds goes before it"
    )
    use_checkpoint_args: bool = _mute(False, "take architecture and vocabulary from the step that --load reads")
    ckpt_step: int | None = _mute(None, "load this step instead of the latest")
    exit_on_missing_checkpoint: bool = _flag(False, "fail when --load holds no checkpoint, instead of starting fresh")
    finetune: bool = _flag(False, "load weights only: iteration, optimizer, scheduler and RNG start fresh")
    no_load_optim: bool = _flag(False, "do not load the optimizer")
    no_load_rng: bool = _flag(False, "do not load the random states")
    no_save_optim: bool = _flag(False, "do not save the optimizer")
    no_save_rng: bool = _flag(False, "do not save the random states")
    async_save: bool = _flag(False, "write checkpoints in the background, while the training goes on")
    save_retain_interval: int | None = _flag(
        None, "iterations between checkpoints that stay for ever; of the others --keep-last-k stay, 1 by default"
    )
    keep_last_k: int | None = _flag(None, "how many of the checkpoints stay; default: all")
    on_save_error: str = _flag(
        "stop", "a checkpoint cannot be written (full disk): stop, or go on without", choices=("stop", "continue")
    )
    verify_checkpoint: bool = _flag(True, "check the SHA-256 of every file of a step before anything of it is used")


@dataclass(frozen=True)
class FaultConfig:
    """What is done about numbers that go wrong and ranks that die."""

    on_nan: str = _flag(
        "skip",
        "a loss or gradient that is NaN or infinite: skip the step, or stop (fp16's overflows are always skipped)",
        choices=("skip", "stop"),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = _flag(
        None, "iterations between comparisons of all replicas of every weight, bit by bit; none: never"
    )
    loss_spike_factor: float | None = _flag(
        None, "write down the batch of a step whose loss is this many deviations above the median of the last 128"
    )
    watchdog: bool = _flag(True, "when a rank dies or hangs, name it, show the stacks of all ranks and end the job")
    fault_dir: str | None = _flag(
        None, "folder for the stacks of a job that hung and the batches of loss spikes; default: faults/ under --save"
    )


@dataclass(frozen=True)
class LoggingConfig:
    """What a person sees."""

    log_interval: int = _flag(1, "iterations between log lines")
    tensorboard_dir: str | None = _mute(None, "folder for TensorBoard events")
    metrics_file: str | None = _mute(None, "JSONL file, one line per iteration")
    plot_file: str | None = _mute(None, "PNG of the loss and of the expert load, drawn at the end")
    summary_file: str | None = _mute(None, "JSON with the run's result, written at the end")
    sample_prompt: str | None = _flag(None, "text to continue at the end of the run")
    sample_tokens: int = _flag(48, "tokens to generate after --sample-prompt")
    peak_tflops: float | None = _flag(None, "peak of one device, for the model FLOPs utilisation", unit="TFLOP/s")
    dry_run: bool = _mute(False, "check the configuration and stop")
    timing_log_level: int = _flag(
        0, "tell where a step's time goes: 1 its parts, 2 every micro-batch; adds barriers", choices=(0, 1, 2)
    )
    health_interval: int | None = _flag(
        None, "iterations between measurements of routing and rounding; 0: never; default: log-interval, 10 at least"
    )
    list_advisories: bool = _flag(
        False, "print the known defects of the engine, which of them these flags meet, what is done, and stop"
    )
    health_sample_tokens: int = _flag(
        256, "tokens per layer and rank whose routing is compared with an fp64 shadow, at --health-interval"
    )


@dataclass(frozen=True)
class Run:
    """A whole run. Read a value as `run.moe.moe_router_topk`; `flatten(run)` gives the flat dict."""

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def sections() -> dict[str, type]:
    """Section name -> its dataclass, in the order of `Run`."""
    return {name: f.default_factory for name, f in Run.__dataclass_fields__.items()}  # type: ignore[misc]


def fields_by_name() -> dict[str, tuple[str, dataclasses.Field]]:
    """Field name -> (section name, dataclass field), over all sections."""
    table: dict[str, tuple[str, dataclasses.Field]] = {}
    for section, cls in sections().items():
        for f in dataclasses.fields(cls):
            if f.name in table:
                raise AssertionError(f"field {f.name} stands in sections {table[f.name][0]} and {section}")
            table[f.name] = (section, f)
    return table


def flatten(run: Run) -> dict[str, Any]:
    """The run as one flat dict, field name -> value (tuples become lists, so that it is JSON)."""
    flat: dict[str, Any] = {}
    for section in sections():
        for name, value in dataclasses.asdict(getattr(run, section)).items():
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def build(flat: dict[str, Any]) -> Run:
    """A `Run` from a flat dict; missing names take their defaults, lists become tuples.

    Raises:
        ValueError: for a name that is no field.
    """
    table = fields_by_name()
    unknown = sorted(set(flat) - set(table))
    if unknown:
        raise ValueError(f"unknown configuration keys: {', '.join(unknown)}")
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in flat.items():
        parts[table[name][0]][name] = tuple(value) if isinstance(value, list) else value
    return Run(**{section: cls(**parts[section]) for section, cls in sections().items()})


def replace(run: Run, **changes: Any) -> Run:
    """A copy of `run` with the named fields changed, whichever section they stand in."""
    return build({**flatten(run), **changes})
