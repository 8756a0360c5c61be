"""The settings of a run around its model: optimizer, length, data, checkpoints, faults, logging."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_moe.config.model_flags import ModelConfig, MoEConfig, ParallelConfig, PrecisionConfig
from megatron_moe.config.setting import COUNT, NOT_NEGATIVE, POSITIVE, POSITIVE_COUNT, PROBABILITY, Range, setting


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: str = setting(
        "adam",
        "adam is AdamW; muon: Muon for the matrices of hidden layers, AdamW for the rest",
        choices=("adam", "muon"),
    )
    lr: float = setting(1e-3, "peak learning rate", within=POSITIVE)
    min_lr: float = setting(0.0, "learning rate at the end of the decay", within=NOT_NEGATIVE)
    decoupled_lr: float | None = setting(
        None,
        "peak learning rate of the word embeddings and the output layer; default: lr, with min-lr",
        within=POSITIVE,
    )
    decoupled_min_lr: float | None = setting(
        None, "their learning rate at the end of the decay; default: min-lr", within=NOT_NEGATIVE
    )
    lr_mult: tuple[str, ...] | None = setting(
        None,
        "PATTERN=X ...: the learning rate of parameters, as a multiple; patterns of freeze, the last match decides",
    )
    lr_decay_style: str = setting(
        "cosine", "schedule after the warm-up", choices=("constant", "cosine", "linear", "WSD")
    )
    lr_decay_iters: int | None = setting(None, "iterations of the decay; default train-iters", within=POSITIVE_COUNT)
    lr_decay_samples: int | None = setting(None, "the same in sequences", unit="sequences", within=POSITIVE_COUNT)
    lr_warmup_iters: int = setting(0, "iterations of linear warm-up", within=COUNT)
    lr_warmup_samples: int | None = setting(None, "the same in sequences", unit="sequences", within=COUNT)
    lr_warmup_fraction: float | None = setting(
        None, "warm-up as a share of lr-decay-iters, instead of lr-warmup-iters", within=PROBABILITY
    )
    lr_warmup_init: float = setting(0.0, "learning rate at the first step of the warm-up", within=NOT_NEGATIVE)
    lr_restart_at: int | None = setting(
        None,
        "begin a new schedule, warm-up first, after the iteration that --load is at; default: the checkpoint's",
        within=COUNT,
    )
    use_checkpoint_opt_param_scheduler: bool = setting(False, "take the schedule from --load's step", report=False)
    override_opt_param_scheduler: bool = setting(False, "take it from the flags, as without both", report=False)
    lr_wsd_decay_style: str = setting("exponential", "WSD: the last phase", choices=("exponential", "linear", "cosine"))
    lr_wsd_decay_iters: int | None = setting(None, "WSD: iterations of the last phase", within=POSITIVE_COUNT)
    lr_wsd_decay_samples: int | None = setting(None, "the same in sequences", unit="sequences", within=POSITIVE_COUNT)
    weight_decay: float = setting(0.01, "decoupled weight decay (not on norms and biases)", within=NOT_NEGATIVE)
    weight_decay_mult: tuple[str, ...] | None = setting(
        None, "PATTERN=X ...: the same of the weight decay, 0 for none; also of norms and biases"
    )
    adam_beta1: float = setting(0.9, "decay of the first moment", within=PROBABILITY)
    adam_beta2: float = setting(0.95, "decay of the second moment", within=PROBABILITY)
    adam_eps: float = setting(1e-8, "epsilon of Adam", within=Range(low=2.0**-126))
    muon_momentum: float = setting(0.95, "Muon: decay of the momentum", within=PROBABILITY)
    muon_nesterov: bool = setting(False, "Muon: Nesterov's momentum")
    muon_num_ns_steps: int = setting(5, "Muon: steps of the Newton-Schulz iteration", within=Range(low=1, high=100))
    muon_coefficient_type: str = setting(
        "quintic",
        "Muon: coefficients of the iteration: one set per step, or the same in all",
        choices=("quintic", "simple"),
    )
    muon_fp32_matmul_prec: str = setting(
        "medium", "Muon: precision of the iteration, bf16 (medium) or fp32 (highest)", choices=("medium", "highest")
    )
    muon_scale_mode: str = setting(
        "spectral",
        "Muon: an update [m, n] is scaled by sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n))",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = setting(
        0.2, "Muon: and by this; with spectral, 0.2 gives updates AdamW's size", within=POSITIVE
    )
    muon_split_qkv: bool = setting(True, "Muon: queries, keys and values are three matrices, not one")
    muon_split_qkv_per_head: bool = setting(
        False, "Muon: the queries, keys and values of each attention head are matrices of their own"
    )
    qk_clip: bool = setting(False, "scale down queries and keys of heads with attention logits above a threshold")
    qk_clip_alpha: float = setting(
        0.5, "qk-clip: the share, as a power of the factor, that falls to the queries", within=Range(low=0, high=1)
    )
    qk_clip_threshold: float = setting(100.0, "qk-clip: the largest logit that is left alone", within=POSITIVE)
    clip_grad: float = setting(1.0, "largest gradient norm; 0 switches clipping off", within=NOT_NEGATIVE)
    use_distributed_optimizer: bool = setting(False, "spread master weights and moments over the data-parallel ranks")
    use_precision_aware_optimizer: bool = setting(
        False,
        "store optimizer state in fewer bytes: main weights as bf16 weight and 16-bit rest, and the moments below",
    )
    exp_avg_dtype: str = setting(
        "fp32",
        "dtype in which the first moment, Muon's momentum too, is stored",
        choices=("fp32", "bf16", "fp8", "int8"),
    )
    exp_avg_sq_dtype: str = setting("fp32", "the same of the second moment", choices=("fp32", "bf16", "fp8", "int8"))
    optimizer_cpu_offload: bool = setting(
        False, "keep the moments in host memory; with a strategy that shards gradients master weights and gradients too"
    )
    freeze: tuple[str, ...] | None = setting(
        None, "PATTERN ...: names of parameters and modules, as in a checkpoint, that are not trained"
    )
    ema_decay: float | None = setting(
        None,
        "keep the exponential moving average of the main weights, in fp32: its decay at each step, e.g. 0.9999",
        within=Range(above=0, below=1),
    )
    calculate_per_token_loss: bool = setting(
        False, "weigh every token of the global batch alike, not every micro-batch"
    )


@dataclass(frozen=True)
class TrainingConfig:
    """Batches, length, evaluation, seeds, recomputation."""

    micro_batch_size: int = setting(1, "sequences per micro-batch and rank", within=Range(low=1, high=2**24))
    global_batch_size: int | None = setting(
        None, "sequences per optimizer step; default micro-batch-size x DP", within=Range(low=1, high=2**24)
    )
    rampup_batch_size: tuple[int, ...] | None = setting(
        None, "START INCREMENT SAMPLES: grow the global batch over SAMPLES", within=POSITIVE_COUNT
    )
    train_iters: int | None = setting(None, "optimizer steps of the whole run", within=Range(low=1, high=10**12))
    train_samples: int | None = setting(
        None,
        "the same in sequences: as many whole steps of --global-batch-size as these have",
        unit="sequences",
        within=POSITIVE_COUNT,
    )
    skip_train: bool = setting(
        False, "train and save nothing: evaluate what --load or --load-hf loads, and end", report=False
    )
    eval_interval: int = setting(0, "iterations between evaluations; 0: only at the end", within=COUNT)
    eval_iters: int = setting(10, "global batches per evaluation; 0 switches evaluation off", within=COUNT)
    eval_at_start: bool = setting(False, "evaluate before the first step, too")
    seed: int = setting(1234, "seed of the weights, dropout and data order", within=Range(low=0, below=2**31))
    deterministic_mode: bool = setting(
        False, "add in one order on CUDA too: the same bits from the same ranks, devices, versions and flags; slower"
    )
    exit_interval: int | None = setting(
        None, "save and stop after an iteration that this divides", within=POSITIVE_COUNT
    )
    exit_duration_in_mins: float | None = setting(
        None, "save and stop after this many minutes", unit="min", within=POSITIVE
    )
    exit_signal_handler: bool = setting(False, "save and stop on SIGTERM or SIGUSR1")
    manual_gc: bool = setting(False, "run Python's garbage collector by hand, on all ranks between the same steps")
    manual_gc_interval: int = setting(
        0, "with manual-gc: iterations between collections; 0: none but at the start", within=COUNT
    )
    manual_gc_eval: bool = setting(True, "with manual-gc: collect before and after an evaluation too")
    recompute_granularity: str | None = setting(
        None, "recompute activations in the backward pass", choices=("full", "selective")
    )
    recompute_method: str | None = setting(None, "full recomputation: which layers", choices=("uniform", "block"))
    recompute_num_layers: int | None = setting(
        None, "full recomputation: layers per chunk (uniform) or per stage (block)", within=POSITIVE_COUNT
    )
    recompute_modules: tuple[str, ...] | None = setting(
        None,
        "selective recomputation: modules",
        choices=("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts"),
    )
    cuda_graph_impl: str = setting(
        "none",
        "CUDA: local replays parts of layers as graphs",
        choices=("none", "local"),
        resume="free",
    )
    cuda_graph_modules: tuple[str, ...] | None = setting(
        None,
        "with this: the parts; default: all it can",
        choices=("attn", "mlp", "moe", "moe_router", "moe_preprocess"),
        resume="free",
    )
    cuda_graph_warmup_steps: int = setting(3, "with this: steps before", within=POSITIVE_COUNT, resume="free")
    fine_grained_activation_offloading: bool = setting(
        False, "keep what --offload-modules save for the backward pass in host memory, between the passes (CUDA)"
    )
    offload_modules: tuple[str, ...] | None = setting(
        None,
        "modules whose inputs are offloaded; of core_attn its output too",
        choices=("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
    )
    min_offloaded_tensor_size: int = setting(
        2**20, "offload tensors of at least so many elements", unit="elements", within=POSITIVE_COUNT
    )


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

    data_path: tuple[str, ...] | None = setting(
        None, "PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...: indexed datasets, split by --split"
    )
    split: str | None = setting(None, "shares of train, valid, test, e.g. 969,30,1")
    train_data_path: tuple[str, ...] | None = setting(None, "as data-path, for training only")
    valid_data_path: tuple[str, ...] | None = setting(None, "as data-path, for validation only")
    test_data_path: tuple[str, ...] | None = setting(None, "as data-path, for testing only")
    data_config: str | None = setting(None, "FILE.yaml of named sources and validation sets, in place of paths")
    data_cache_path: str | None = setting(None, "folder of the index caches; default: next to the data")
    mock_data: bool = setting(False, "made-up tokens, no files")
    program_data: bool = setting(False, "samples of the program that calls train(settings, data=...), no files")
    tokenizer_type: str | None = setting(None, "kind of tokenizer", choices=tuple(TOKENIZER_FILES))
    tokenizer_model: str | None = setting(None, "file or folder of the tokenizer")
    vocab_file: str | None = setting(None, "GPT2BPETokenizer: its vocab.json")
    merge_file: str | None = setting(None, "GPT2BPETokenizer: its merges.txt")
    tiktoken_pattern: str = setting("v2", "TikTokenizer: the pattern that splits texts", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = setting(
        1000, "TikTokenizer: ids of special tokens, which come first", within=POSITIVE_COUNT
    )
    tiktoken_special_tokens: tuple[str, ...] | None = setting(
        None, "TikTokenizer: the first special tokens; default: <unk> <s> </s> <mask> <pad> <cls> <sep>"
    )
    num_workers: int = setting(0, "processes that read data, per rank", within=COUNT)
    reset_position_ids: bool = setting(
        False, "with --reset-attention-mask: rotary positions start again at each document; alone no number changes"
    )
    reset_attention_mask: bool = setting(False, "tokens attend to their own document alone, and predict no other's")
    document_boundaries: str = setting(
        "index",
        "where documents end: where the index says, or after each end-of-document token (Megatron-LM's)",
        choices=("index", "eod"),
    )
    packing: str = setting(
        "none",
        "documents in a sequence: cut anywhere, or whole, in their order (greedy) or with least padding (best-fit)",
        choices=("none", "greedy", "best-fit"),
    )
    eod_mask_loss: bool = setting(False, "no loss on end-of-document tokens")
    no_mmap_bin_files: bool = setting(False, "read .bin files instead of mapping them")
    data_verify_gb: float = setting(
        4.0,
        "check SHA-256 of .bin files at the start up to this much in all; beyond it their sizes",
        unit="GB",
        within=NOT_NEGATIVE,
    )
    accept_changed_data: bool = setting(
        False, "resume although a data file is not the one that the checkpoint was trained on"
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: saving, loading, retention."""

    save: str | None = setting(None, "folder for checkpoints, or URL of an object store", report=False)
    save_interval: int | None = setting(
        None, "iterations between checkpoints; default: only at the end", within=POSITIVE_COUNT
    )
    load: str | None = setting(
        None, "folder or URL to continue from: its latest step; may be empty where it is --save's", report=False
    )
    load_hf: str | None = setting(
        None,
        "Hugging Face folder to start from: architecture and weights; a step in --load takes precedence",
        report=False,
    )
    allow_suspicious_weights: bool = setting(
        False, "--load-hf: go on where the folder's weights look damaged: zeros of a broken download, equal experts"
    )
    pretrained_checkpoint: str | None = setting(
        None,
        "folder whose weights the run starts from where --load has no step yet: as --load FOLDER --finetune",
        report=False,
    )
    use_checkpoint_args: bool = setting(
        False, "take architecture and vocabulary from the step that --load reads", report=False
    )
    ckpt_step: int | None = setting(None, "load this step instead of the latest", within=COUNT, report=False)
    exit_on_missing_checkpoint: bool = setting(
        False, "fail when --load has no checkpoint, also where it is the folder of --save"
    )
    finetune: bool = setting(False, "load weights only: iteration, optimizer, scheduler and RNG start fresh")
    no_load_optim: bool = setting(False, "do not load the optimizer")
    no_load_rng: bool = setting(False, "do not load the random states")
    no_save_optim: bool = setting(False, "do not save the optimizer")
    no_save_rng: bool = setting(False, "do not save the random states")
    async_save: bool = setting(False, "write checkpoints in the background, while the training goes on")
    local_save: str | None = setting(
        None,
        "folder on each node, as in /dev/shm, for its ranks' state and a copy of the next node's: what a restart takes"
        " where it is newer than the step of --load",
        report=False,
    )
    local_save_interval: int | None = setting(None, "iterations between local steps", within=POSITIVE_COUNT)
    save_retain_interval: int | None = setting(
        None,
        "iterations between checkpoints that are kept permanently; of the others --keep-last-k stay, 1 by default",
        within=POSITIVE_COUNT,
    )
    keep_last_k: int | None = setting(None, "how many of the checkpoints stay; default: all", within=POSITIVE_COUNT)
    on_save_error: str = setting(
        "stop", "a checkpoint cannot be written (full disk): stop, or go on without", choices=("stop", "continue")
    )
    verify_checkpoint: bool = setting(True, "check the SHA-256 of every file of a step before it is used")


@dataclass(frozen=True)
class FaultConfig:
    """Non-finite numbers, loss spikes, and ranks that die or hang."""

    on_nan: str = setting(
        "skip",
        "a loss or gradient that is NaN or infinite: skip the step, or stop (fp16's overflows are always skipped)",
        choices=("skip", "stop"),
    )
    on_untrained_weights: str = setting(
        "warn",
        "a weight, or an expert's, gets no gradient or stays, in the first steps: warn, or stop",
        choices=("warn", "stop"),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = setting(
        None,
        "iterations between comparisons of all replicas of every weight, bit by bit; none: never",
        within=POSITIVE_COUNT,
    )
    loss_spike_factor: float | None = setting(
        None,
        "record the batch of a step with a loss this many deviations above the median of the last 128",
        within=POSITIVE,
    )
    watchdog: bool = setting(True, "when a rank dies or hangs, name it, show the stacks of all ranks and end the run")
    warm_restarts: int | None = setting(
        None,
        "when ranks die or hang, go on from the newest step in processes that are there already; as often in a row "
        "without a newer step",
        within=POSITIVE_COUNT,
        report=False,
    )
    fault_dir: str | None = setting(
        None, "folder for the stacks of a run that hung and the batches of loss spikes; default: faults/ under --save"
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Log lines, metrics files, measurements and samples."""

    log_interval: int = setting(1, "iterations between log lines", within=POSITIVE_COUNT)
    log_legend: bool = setting(False, "print what the words of a log line mean, and stop", report=False)
    console: str = setting(
        "auto",
        "what a terminal shows below the lines: a panel or one line that follow every step, nothing (plain), or what "
        "fits (auto)",
        choices=("auto", "panel", "line", "plain"),
        report=False,
    )
    tensorboard_dir: str | None = setting(None, "folder for TensorBoard events", report=False)
    tensorboard_log_interval: int = setting(
        1, "iterations between values in TensorBoard, W&B and MLflow", within=POSITIVE_COUNT
    )
    tensorboard_queue_size: int = setting(
        1000, "TensorBoard's events in memory before they are written, at most", within=POSITIVE_COUNT
    )
    tensorboard_names: str = setting(
        "ours",
        "tags of TensorBoard, W&B and MLflow: ours, or Megatron-LM's where it has one; those over samples are in "
        "TensorBoard's vs_samples/",
        choices=("ours", "megatron"),
        report=False,
    )
    log_timers_to_tensorboard: bool = setting(False, "step time, throughput and --timing-log-level's times, there")
    log_memory_to_tensorboard: bool = setting(False, "what the allocator of rank 0's device holds, there")
    log_validation_ppl_to_tensorboard: bool = setting(False, "the perplexity of evaluations, there")
    log_world_size_to_tensorboard: bool = setting(False, "the number of ranks, there")
    wandb_project: str | None = setting(
        None,
        "project of Weights & Biases (W&B) that gets the run; with WANDB_MODE=offline it stays on this machine",
        report=False,
    )
    wandb_exp_name: str | None = setting(None, "its name there; default: W&B makes one up", report=False)
    wandb_entity: str | None = setting(None, "team or user of the project; default: yours", report=False)
    wandb_save_dir: str | None = setting(
        None, "folder for W&B's files; default: wandb/ under --save, or as W&B says", report=False
    )
    mlflow_experiment: str | None = setting(None, "experiment of MLflow that gets the run", report=False)
    mlflow_tracking_uri: str | None = setting(
        None,
        "where its runs are: http://HOST:PORT, file:FOLDER or sqlite:///FILE; default: MLFLOW_TRACKING_URI",
        report=False,
    )
    mlflow_run_name: str | None = setting(None, "its name there; default: MLflow makes one up", report=False)
    metrics_file: str | None = setting(None, "JSONL file, one line per iteration", report=False)
    plot_file: str | None = setting(None, "PNG of the loss and of the expert load, drawn at the end", report=False)
    report_file: str | None = setting(
        None, "HTML page of the run, written anew while it trains and when it ends", report=False
    )
    summary_file: str | None = setting(None, "JSON with the run's result, written at the end", report=False)
    prometheus_file: str | None = setting(
        None, "NAME.prom with the present metrics, for the textfile collector of node_exporter", report=False
    )
    moe_routing_trace_path: str | None = setting(None, "folder for the routes of every training step", report=False)
    sample_prompt: str | None = setting(None, "text to continue at the end of the run")
    sample_tokens: int = setting(48, "tokens to generate after --sample-prompt", within=POSITIVE_COUNT)
    peak_tflops: float | None = setting(
        None, "peak of one device, for the model FLOPs utilisation", unit="TFLOP/s", within=POSITIVE
    )
    dry_run: bool = setting(False, "check the configuration and stop", report=False)
    log_params_norm: bool = setting(False, "the norm of all weights after a step, in log lines, files and TensorBoard")
    log_num_zeros_in_grad: bool = setting(False, "how many elements of the gradients are 0, there too")
    log_max_attention_logit: bool = setting(False, "the largest attention logit, there too; qk-clip logs it anyway")
    timing_log_level: int = setting(
        0, "log where a step's time goes: 1 its parts, 2 every micro-batch; adds barriers", choices=(0, 1, 2)
    )
    log_straggler: bool = setting(
        False, "name a rank that is slower than the others of its pipeline stage, and the part of the step"
    )
    straggler_interval: int = setting(
        2, "iterations between the ranks' exchanges of their times, for --log-straggler", within=POSITIVE_COUNT
    )
    health_interval: int | None = setting(
        None,
        "iterations between measurements of routing and rounding; 0: never; default: log-interval, 10 at least",
        within=COUNT,
    )
    profile: bool = setting(
        False,
        "profile steps by CUDA's profiler (nsys profile --capture-range=cudaProfilerApi), or by use-pytorch-profiler",
    )
    use_pytorch_profiler: bool = setting(
        False, "profile by torch's, into a trace per rank in --tensorboard-dir, or profile/ under --save"
    )
    profile_step_start: int = setting(10, "steps before the first one that is profiled", within=COUNT)
    profile_step_end: int = setting(12, "steps up to the last one that is profiled", within=POSITIVE_COUNT)
    profile_ranks: tuple[int, ...] = setting((0,), "ranks that are profiled", within=COUNT)
    list_advisories: bool = setting(
        False, "print the known defects of the engine, which of them these flags meet, what is done, and stop"
    )
    health_sample_tokens: int = setting(
        256,
        "tokens per layer and rank whose routing is compared with an fp64 shadow, at --health-interval",
        within=POSITIVE_COUNT,
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
