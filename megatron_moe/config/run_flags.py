"""The settings of a run around its model: optimizer, length, data, checkpoints, faults, logging."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_moe.config.flag import flag, mute
from megatron_moe.config.model_flags import ModelConfig, MoEConfig, ParallelConfig, PrecisionConfig


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: str = flag(
        "adam",
        "adam is AdamW; muon: Muon for the matrices of hidden layers, AdamW for the rest",
        choices=("adam", "muon"),
    )
    lr: float = flag(1e-3, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    decoupled_lr: float | None = flag(
        None, "peak learning rate of the word embeddings and the output layer; default: lr, with min-lr"
    )
    decoupled_min_lr: float | None = flag(None, "their learning rate at the end of the decay; default: min-lr")
    lr_mult: tuple[str, ...] | None = flag(
        None,
        "PATTERN=X ...: the learning rate of parameters, as a multiple; patterns of freeze, the last match decides",
    )
    lr_decay_style: str = flag("cosine", "schedule after the warm-up", choices=("constant", "cosine", "linear", "WSD"))
    lr_decay_iters: int | None = flag(None, "iterations of the decay; default train-iters")
    lr_decay_samples: int | None = flag(None, "the same in sequences", unit="sequences")
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up")
    lr_warmup_samples: int | None = flag(None, "the same in sequences", unit="sequences")
    lr_warmup_fraction: float | None = flag(None, "warm-up as a share of lr-decay-iters, instead of lr-warmup-iters")
    lr_warmup_init: float = flag(0.0, "learning rate at the first step of the warm-up")
    lr_wsd_decay_style: str = flag("exponential", "WSD: the last phase", choices=("exponential", "linear", "cosine"))
    lr_wsd_decay_iters: int | None = flag(None, "WSD: iterations of the last phase")
    lr_wsd_decay_samples: int | None = flag(None, "the same in sequences", unit="sequences")
    weight_decay: float = flag(0.01, "decoupled weight decay (not on norms and biases)")
    weight_decay_mult: tuple[str, ...] | None = flag(
        None, "PATTERN=X ...: the same of the weight decay, 0 for none; also of norms and biases"
    )
    adam_beta1: float = flag(0.9, "decay of the first moment")
    adam_beta2: float = flag(0.95, "decay of the second moment")
    adam_eps: float = flag(1e-8, "epsilon of Adam")
    muon_momentum: float = flag(0.95, "Muon: decay of the momentum")
    muon_nesterov: bool = flag(False, "Muon: Nesterov's momentum")
    muon_num_ns_steps: int = flag(5, "Muon: steps of the Newton-Schulz iteration")
    muon_coefficient_type: str = flag(
        "quintic",
        "Muon: coefficients of the iteration: one set per step, or the same in all",
        choices=("quintic", "simple"),
    )
    muon_fp32_matmul_prec: str = flag(
        "medium", "Muon: precision of the iteration, bf16 (medium) or fp32 (highest)", choices=("medium", "highest")
    )
    muon_scale_mode: str = flag(
        "spectral",
        "Muon: an update [m, n] is scaled by sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = flag(0.2, "Muon: and by this; with spectral, 0.2 gives updates AdamW's size")
    muon_split_qkv: bool = flag(True, "Muon: queries, keys and values are three matrices, not one")
    muon_split_qkv_per_head: bool = flag(
        False, "Muon: the queries, keys and values of each attention head are matrices of their own"
    )
    qk_clip: bool = flag(False, "scale down queries and keys of heads whose attention logits exceed a threshold")
    qk_clip_alpha: float = flag(0.5, "qk-clip: the share, as a power of the factor, that falls to the queries")
    qk_clip_threshold: float = flag(100.0, "qk-clip: the largest logit that is left alone")
    clip_grad: float = flag(1.0, "largest gradient norm; 0 switches clipping off")
    use_distributed_optimizer: bool = flag(False, "spread master weights and moments over the data-parallel ranks")
    use_precision_aware_optimizer: bool = flag(
        False,
        "store optimizer state in fewer bytes: main weights as bf16 weight and 16-bit rest, and the moments below",
    )
    exp_avg_dtype: str = flag(
        "fp32",
        "dtype in which the first moment, Muon's momentum too, is stored",
        choices=("fp32", "bf16", "fp8", "int8"),
    )
    exp_avg_sq_dtype: str = flag("fp32", "the same of the second moment", choices=("fp32", "bf16", "fp8", "int8"))
    optimizer_cpu_offload: bool = flag(
        False, "keep the moments in host memory; with a strategy that shards gradients master weights and gradients too"
    )
    freeze: tuple[str, ...] | None = flag(
        None, "PATTERN ...: names of parameters and modules, as in a checkpoint, that are not trained"
    )
    ema_decay: float | None = flag(
        None, "keep the exponential moving average of the main weights, in fp32: its decay at each step, e.g. 0.9999"
    )
    calculate_per_token_loss: bool = flag(False, "weigh every token of the global batch alike, not every micro-batch")


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length, evaluation, seeds, recomputation."""

    micro_batch_size: int = flag(1, "sequences per micro-batch and rank")
    global_batch_size: int | None = flag(None, "sequences per optimizer step; default micro-batch-size x DP")
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "START INCREMENT SAMPLES: grow the global batch over SAMPLES"
    )
    train_iters: int | None = flag(None, "optimizer steps of the whole run")
    train_samples: int | None = flag(
        None, "the same in sequences: as many whole steps of --global-batch-size as these have", unit="sequences"
    )
    eval_interval: int = flag(0, "iterations between evaluations; 0: only at the end")
    eval_iters: int = flag(10, "global batches per evaluation; 0 switches evaluation off")
    seed: int = flag(1234, "seed of the weights, dropout and data order")
    deterministic_mode: bool = flag(
        False, "add in one order on CUDA too: the same bits from the same ranks, devices, versions and flags; slower"
    )
    exit_interval: int | None = flag(None, "save and stop after an iteration that this divides")
    exit_duration_in_mins: float | None = flag(None, "save and stop after this many minutes", unit="min")
    exit_signal_handler: bool = flag(False, "save and stop on SIGTERM or SIGUSR1")
    manual_gc: bool = flag(False, "run Python's garbage collector by hand, on all ranks between the same steps")
    manual_gc_interval: int = flag(0, "with manual-gc: iterations between collections; 0: none but at the start")
    manual_gc_eval: bool = flag(True, "with manual-gc: collect before and after an evaluation too")
    recompute_granularity: str | None = flag(
        None, "recompute activations in the backward pass", choices=("full", "selective")
    )
    recompute_method: str | None = flag(None, "full recomputation: which layers", choices=("uniform", "block"))
    recompute_num_layers: int | None = flag(None, "full recomputation: layers per chunk (uniform) or per stage (block)")
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "selective recomputation: modules",
        choices=("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts"),
    )
    fine_grained_activation_offloading: bool = flag(
        False, "keep what --offload-modules save for the backward pass in host memory, between the passes (CUDA)"
    )
    offload_modules: tuple[str, ...] | None = flag(
        None,
        "modules whose inputs are offloaded; of core_attn its output too",
        choices=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    )
    min_offloaded_tensor_size: int = flag(2**20, "offload tensors of at least so many elements", unit="elements")


TOKENIZER_FILES: dict[str, tuple[str, ...]] = {
    "SentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "TikTokenizer": ("tokenizer_model",),
    "ByteTokenizer": (),
    "NullTokenizer": (),
}
"""Kind of tokenizer -> the fields that name its files, all of which it needs."""
TIKTOKEN_FIELDS = ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens")
TOKENIZER_FIELDS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", *TIKTOKEN_FIELDS)
"""The fields of `DataConfig` that say which tokenizer it is: flags of each program that builds one."""


@dataclass(frozen=True)
class DataConfig:
    """Tokens: where they come from and how they are split."""

    data_path: tuple[str, ...] | None = flag(
        None, "PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...: indexed datasets, split by --split"
    )
    split: str | None = flag(None, "shares of train, valid, test, e.g. 969,30,1")
    train_data_path: tuple[str, ...] | None = flag(None, "as data-path, for training only")
    valid_data_path: tuple[str, ...] | None = flag(None, "as data-path, for validation only")
    test_data_path: tuple[str, ...] | None = flag(None, "as data-path, for testing only")
    data_cache_path: str | None = flag(None, "folder of the index caches; default: next to the data")
    mock_data: bool = flag(False, "made-up tokens, no files")
    tokenizer_type: str | None = flag(None, "kind of tokenizer", choices=tuple(TOKENIZER_FILES))
    tokenizer_model: str | None = flag(None, "file or folder of the tokenizer")
    vocab_file: str | None = flag(None, "GPT2BPETokenizer: its vocab.json")
    merge_file: str | None = flag(None, "GPT2BPETokenizer: its merges.txt")
    tiktoken_pattern: str = flag("v2", "TikTokenizer: the pattern that splits texts", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = flag(1000, "TikTokenizer: ids of special tokens, which come first")
    tiktoken_special_tokens: tuple[str, ...] | None = flag(
        None, "TikTokenizer: the first special tokens; default: <unk> <s> </s> <mask> <pad> <cls> <sep>"
    )
    num_workers: int = flag(0, "processes that read data, per rank")
    reset_position_ids: bool = flag(False, "positions start again after an end-of-document token")
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    no_mmap_bin_files: bool = flag(False, "read .bin files instead of mapping them")
    data_verify_gb: float = flag(
        4.0, "check SHA-256 of .bin files at the start up to this much in all; beyond it their sizes", unit="GB"
    )
    accept_changed_data: bool = flag(
        False, "resume although a data file is not the one that the checkpoint was trained on"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: saving, loading, retention."""

    save: str | None = mute(None, "folder for checkpoints")
    save_interval: int | None = flag(None, "iterations between checkpoints; default: only at the end")
    load: str | None = mute(None, "folder to continue from: its latest step; may be empty where it is --save's")
    load_hf: str | None = mute(
        None, "Hugging Face folder to start from: architecture and weights; a step in --load takes precedence"
    )
    allow_suspicious_weights: bool = flag(
        False, "--load-hf: go on where the folder's weights look damaged: zeros of a broken download, equal experts"
    )
    pretrained_checkpoint: str | None = mute(
        None, "folder whose weights the run starts from where --load has no step yet: as --load FOLDER --finetune"
    )
    use_checkpoint_args: bool = mute(False, "take architecture and vocabulary from the step that --load reads")
    ckpt_step: int | None = mute(None, "load this step instead of the latest")
    exit_on_missing_checkpoint: bool = flag(
        False, "fail when --load has no checkpoint, also where it is the folder of --save"
    )
    finetune: bool = flag(False, "load weights only: iteration, optimizer, scheduler and RNG start fresh")
    no_load_optim: bool = flag(False, "do not load the optimizer")
    no_load_rng: bool = flag(False, "do not load the random states")
    no_save_optim: bool = flag(False, "do not save the optimizer")
    no_save_rng: bool = flag(False, "do not save the random states")
    async_save: bool = flag(False, "write checkpoints in the background, while the training goes on")
    save_retain_interval: int | None = flag(
        None, "iterations between checkpoints that are kept permanently; of the others --keep-last-k stay, 1 by default"
    )
    keep_last_k: int | None = flag(None, "how many of the checkpoints stay; default: all")
    on_save_error: str = flag(
        "stop", "a checkpoint cannot be written (full disk): stop, or go on without", choices=("stop", "continue")
    )
    verify_checkpoint: bool = flag(True, "check the SHA-256 of every file of a step before it is used")


@dataclass(frozen=True)
class FaultConfig:
    """Non-finite numbers, loss spikes, and ranks that die or hang."""

    on_nan: str = flag(
        "skip",
        "a loss or gradient that is NaN or infinite: skip the step, or stop (fp16's overflows are always skipped)",
        choices=("skip", "stop"),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "iterations between comparisons of all replicas of every weight, bit by bit; none: never"
    )
    loss_spike_factor: float | None = flag(
        None, "record the batch of a step whose loss is this many deviations above the median of the last 128"
    )
    watchdog: bool = flag(True, "when a rank dies or hangs, name it, show the stacks of all ranks and end the run")
    fault_dir: str | None = flag(
        None, "folder for the stacks of a run that hung and the batches of loss spikes; default: faults/ under --save"
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Log lines, metrics files, measurements and samples."""

    log_interval: int = flag(1, "iterations between log lines")
    log_legend: bool = mute(False, "print what the words of a log line mean, and stop")
    console: str = mute(
        "auto",
        "what a terminal shows below the lines: a panel or one line that follow every step, nothing (plain), or what "
        "fits (auto)",
        choices=("auto", "panel", "line", "plain"),
    )
    tensorboard_dir: str | None = mute(None, "folder for TensorBoard events")
    tensorboard_log_interval: int = flag(1, "iterations between values in TensorBoard, W&B and MLflow")
    tensorboard_queue_size: int = flag(1000, "TensorBoard's events in memory before they are written, at most")
    tensorboard_names: str = mute(
        "ours",
        "tags of TensorBoard, W&B and MLflow: ours, or Megatron-LM's where it has one; those over samples are in "
        "TensorBoard's vs_samples/",
        choices=("ours", "megatron"),
    )
    log_timers_to_tensorboard: bool = flag(False, "step time, throughput and --timing-log-level's times, there")
    log_memory_to_tensorboard: bool = flag(False, "what the allocator of rank 0's device holds, there")
    log_validation_ppl_to_tensorboard: bool = flag(False, "the perplexity of evaluations, there")
    log_world_size_to_tensorboard: bool = flag(False, "the number of ranks, there")
    wandb_project: str | None = mute(
        None, "project of Weights & Biases (W&B) that gets the run; with WANDB_MODE=offline it stays on this machine"
    )
    wandb_exp_name: str | None = mute(None, "its name there; default: W&B makes one up")
    wandb_entity: str | None = mute(None, "team or user of the project; default: yours")
    wandb_save_dir: str | None = mute(None, "folder for W&B's files; default: wandb/ under --save, or as W&B says")
    mlflow_experiment: str | None = mute(None, "experiment of MLflow that gets the run")
    mlflow_tracking_uri: str | None = mute(
        None, "where its runs are: http://HOST:PORT, file:FOLDER or sqlite:///FILE; default: MLFLOW_TRACKING_URI"
    )
    mlflow_run_name: str | None = mute(None, "its name there; default: MLflow makes one up")
    metrics_file: str | None = mute(None, "JSONL file, one line per iteration")
    plot_file: str | None = mute(None, "PNG of the loss and of the expert load, drawn at the end")
    report_file: str | None = mute(None, "HTML page of the run, written anew while it trains and when it ends")
    summary_file: str | None = mute(None, "JSON with the run's result, written at the end")
    sample_prompt: str | None = flag(None, "text to continue at the end of the run")
    sample_tokens: int = flag(48, "tokens to generate after --sample-prompt")
    peak_tflops: float | None = flag(None, "peak of one device, for the model FLOPs utilisation", unit="TFLOP/s")
    dry_run: bool = mute(False, "check the configuration and stop")
    log_params_norm: bool = flag(False, "the norm of all weights after a step, in log lines, files and TensorBoard")
    log_num_zeros_in_grad: bool = flag(False, "how many elements of the gradients are 0, there too")
    log_max_attention_logit: bool = flag(False, "the largest attention logit, there too; qk-clip logs it anyway")
    timing_log_level: int = flag(
        0, "log where a step's time goes: 1 its parts, 2 every micro-batch; adds barriers", choices=(0, 1, 2)
    )
    health_interval: int | None = flag(
        None, "iterations between measurements of routing and rounding; 0: never; default: log-interval, 10 at least"
    )
    profile: bool = flag(
        False,
        "profile steps by CUDA's profiler (nsys profile --capture-range=cudaProfilerApi), or by use-pytorch-profiler",
    )
    use_pytorch_profiler: bool = flag(
        False, "profile by torch's, into a trace per rank in --tensorboard-dir, or profile/ under --save"
    )
    profile_step_start: int = flag(10, "steps before the first one that is profiled")
    profile_step_end: int = flag(12, "steps up to the last one that is profiled")
    profile_ranks: tuple[int, ...] = flag((0,), "ranks that are profiled")
    list_advisories: bool = flag(
        False, "print the known defects of the engine, which of them these flags meet, what is done, and stop"
    )
    health_sample_tokens: int = flag(
        256, "tokens per layer and rank whose routing is compared with an fp64 shadow, at --health-interval"
    )


@dataclass(frozen=True)
class RunSections:
    """All settings of a run, one section per topic."""

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
