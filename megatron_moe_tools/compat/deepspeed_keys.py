"""The keys of a DeepSpeed configuration file, as tables: what is taken, what has no meaning here, what is refused.

Keys are written with dots, `zero_optimization.stage`. A key of these tables whose value is a mapping covers all that is
in it. `deepspeed.py` reads the tables; where several keys are read together, it also does what a table cannot say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
"""The value that leaves a key to the program that DeepSpeed is used from."""


@dataclass(frozen=True)
class Taken:
    """A key that is read.

    Args:
        kind: the type of its value.
        sets: the field of the schema that takes the value as it is; None where `means` or `deepspeed.py` says more.
        means: value -> settings, for values that are not taken as they are.
    """

    kind: type
    sets: str | None = None
    means: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A key that asks for something else than this framework does.

    Args:
        rule: why. works: what works instead.
        harmless: values that ask for nothing.
        switched: of a mapping, whether it asks for nothing without an `"enabled": true` in it.
    """

    rule: str
    works: str
    harmless: tuple[Any, ...] = (False,)
    switched: bool = False


_ON_THE_HOST = {"cpu": {"optimizer_cpu_offload": True}, "none": {}}
_HOST_IF_TRUE = {True: {"optimizer_cpu_offload": True}, False: {}}

TAKEN: dict[str, Taken] = {
    "train_batch_size": Taken(int),
    "train_micro_batch_size_per_gpu": Taken(int),
    "gradient_accumulation_steps": Taken(int),
    "gradient_clipping": Taken(float, "clip_grad"),
    "seed": Taken(int, "seed"),
    "steps_per_print": Taken(int, "log_interval"),
    "wall_clock_breakdown": Taken(bool, means={True: {"timing_log_level": 1}, False: {}}),
    "communication_data_type": Taken(str),
    "data_types.grad_accum_dtype": Taken(str),
    "bf16.enabled": Taken(bool, "bf16"),
    "fp16.enabled": Taken(bool, "fp16"),
    "fp16.loss_scale": Taken(float, "loss_scale", means={0.0: {"loss_scale": None}}),
    "fp16.initial_scale_power": Taken(int),
    "fp16.loss_scale_window": Taken(int, "loss_scale_window"),
    "fp16.hysteresis": Taken(int, "hysteresis"),
    "fp16.min_loss_scale": Taken(float, "min_loss_scale"),
    "fp16.consecutive_hysteresis": Taken(bool),
    "zero_optimization.stage": Taken(
        int,
        means={
            0: {"data_parallel_sharding_strategy": "no_shard"},
            1: {"data_parallel_sharding_strategy": "optim"},
            2: {"data_parallel_sharding_strategy": "optim_grads"},
            3: {"data_parallel_sharding_strategy": "optim_grads_params"},
        },
    ),
    "zero_optimization.zero_quantized_weights": Taken(bool, "zero_quantized_weights"),
    "zero_optimization.zero_quantized_gradients": Taken(
        bool, means={True: {"zero_quantized_gradients": "int8"}, False: {"zero_quantized_gradients": None}}
    ),
    "zero_optimization.zero_hpz_partition_size": Taken(
        int,
        "zero_hpz_partition_size",
        means={0: {"zero_hpz_partition_size": None}, 1: {"zero_hpz_partition_size": None}},
    ),
    "zero_optimization.offload_optimizer.device": Taken(str, means=_ON_THE_HOST),
    "zero_optimization.offload_param.device": Taken(str, means=_ON_THE_HOST),
    "zero_optimization.cpu_offload": Taken(bool, means=_HOST_IF_TRUE),
    "zero_optimization.cpu_offload_param": Taken(bool, means=_HOST_IF_TRUE),
    "optimizer.type": Taken(str),
    "optimizer.params.lr": Taken(float, "lr"),
    "optimizer.params.betas": Taken(list),
    "optimizer.params.eps": Taken(float, "adam_eps"),
    "optimizer.params.weight_decay": Taken(float, "weight_decay"),
    "optimizer.params.adam_w_mode": Taken(bool),
    "scheduler.type": Taken(str),
    "scheduler.params.warmup_min_lr": Taken(float),
    "scheduler.params.warmup_max_lr": Taken(float),
    "scheduler.params.warmup_num_steps": Taken(int),
    "scheduler.params.warmup_type": Taken(str),
    "scheduler.params.total_num_steps": Taken(int),
    "scheduler.params.cycle_min_lr": Taken(float),
    "scheduler.params.cycle_max_lr": Taken(float),
    "scheduler.params.cycle_first_step_size": Taken(int),
    "scheduler.params.cycle_second_step_size": Taken(int),
    "scheduler.params.cycle_first_stair_count": Taken(int),
    "scheduler.params.cycle_second_stair_count": Taken(int),
    "scheduler.params.cycle_momentum": Taken(bool),
    "scheduler.params.cycle_min_mom": Taken(float),
    "scheduler.params.cycle_max_mom": Taken(float),
    "scheduler.params.decay_step_size": Taken(int),
    "scheduler.params.decay_lr_rate": Taken(float),
    "scheduler.params.decay_mom_rate": Taken(float),
    "tensorboard.enabled": Taken(bool),
    "tensorboard.output_path": Taken(str),
    "tensorboard.job_name": Taken(str),
    "wandb.enabled": Taken(bool),
    "wandb.project": Taken(str),
}

ALIASES = {"bfloat16": "bf16"}
"""Older names of mappings."""

LOSS_SCALE_KEYS = (
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.hysteresis",
    "fp16.min_loss_scale",
    "fp16.consecutive_hysteresis",
)
"""What a run without fp16 does not read; DeepSpeed does not either."""

MEANINGLESS: dict[str, tuple[str, ...]] = {
    "from stage 2 on each layer is gathered and reduced as a whole, behind the computation of its neighbours; below, "
    "--overlap-grad-reduce and --ddp-bucket-size say it": (
        "zero_optimization.allgather_partitions",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_scatter",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.max_reuse_distance",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.param_persistence_threshold",
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.model_persistence_threshold",
        "zero_optimization.stage3_module_granularity_threshold",
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "zero_optimization.stage3_allgather_sequential",
        "zero_optimization.stage3_partition_stream_chunk_size",
        "zero_optimization.sub_group_size",
        "zero_optimization.parameter_alignment",
        "zero_optimization.mics_hierarchical_params_gather",
        "zero_optimization.legacy_stage1",
        "disable_allgather",
    ),
    "every parameter takes part in every step, experts without a token too": (
        "zero_optimization.ignore_unused_parameters",
        "zero_optimization.leaf_module",
        "sparse_gradients",
    ),
    "the offload to host memory has no settings of its own": (
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_optimizer.pipeline",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.pipeline_write",
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.cpu_offload_use_pin_memory",
        "aio",
    ),
    "a part of DeepSpeed that is not used": (
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.override_module_apply",
        "zero_optimization.log_trace_cache_warnings",
        "zero_optimization.enable_sanity_checks",
        "zero_optimization.compute_grad_norm",
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        "seq_parallel_comm_data_type",
        "seq_parallel_communication_data_type",
        "bf16.immediate_grad_update",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "managed_gradient_accumulation",
        "optimizer.legacy_fusion",
        "optimizer.params.torch_adam",
        "optimizer.params.fused",
        "optimizer.params.foreach",
        "optimizer.params.fp32_optimizer_states",
        "fp16.fused_mode",
        "tensor_parallel.preset_model",
        "tensor_parallel.partition_config",
        "tensor_parallel.tp_overlap_comm",
        "tensor_parallel.vocab_parallel_lm_head",
        "hybrid_engine",
        "compile",
        "graph_harvesting",
        "disable_python_gc",
        "dump_state",
        "use_data_before_expert_parallelism",
    ),
    "a gradient is averaged over ranks by one division": ("prescale_gradients", "gradient_predivide_factor"),
    "gradients are looked at in every step and dtype (--on-nan)": ("bf16.check_grad_overflow",),
    "a model reads token ids, which are no numbers to cast": ("fp16.auto_cast", "bf16.auto_cast"),
    "bf16 has the range of fp32 and no loss scale": (
        "bf16.loss_scale",
        "bf16.initial_scale_power",
        "bf16.loss_scale_window",
        "bf16.hysteresis",
        "bf16.consecutive_hysteresis",
        "bf16.min_loss_scale",
    ),
    "checkpoints go to --save and are read at any layout; megatron-moe convert exports weights": (
        "checkpoint",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.gather_16bit_weights_on_model_save",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.pipeline_loading_checkpoint",
    ),
    "--recompute-granularity says what is recomputed": ("activation_checkpointing",),
    "--wandb-project, --tensorboard-dir and --metrics-file record a run": ("comet", "csv_monitor"),
    "W&B takes team and group from WANDB_ENTITY and WANDB_RUN_GROUP": ("wandb.team", "wandb.group"),
    "--timing-log-level 1 shows where the time of a step goes, megatron-moe plan memory and traffic": (
        "flops_profiler",
        "comms_logger",
        "memory_breakdown",
        "timers",
    ),
    "every batch is whole": ("dataloader_drop_last",),
    "the model and its tokenizer say it": ("vocabulary_size",),
}
"""Reason -> the keys that are read past, each named at the start of a run."""

_FP32_MASTERS = Refused("master weights, moments and sums of gradients are fp32", "false")
_ONE_BIT = "sends gradients of one bit after a warm-up"

REFUSED: dict[str, Refused] = {
    "amp": Refused("Apex's mixed precision is not used", '"bf16": {"enabled": true}, or fp16', switched=True),
    "torch_autocast": Refused(
        "weights are cast by layer, not by operation", '"bf16": {"enabled": true}, or fp16', switched=True
    ),
    "fp16.fp16_master_weights_and_grads": _FP32_MASTERS,
    "bf16.bf16_master_weights_and_grads": _FP32_MASTERS,
    "bf16.bf16_optimizer_states": _FP32_MASTERS,
    "sparse_attention": Refused("attention is dense", "a file without it"),
    "pipeline": Refused("DeepSpeed's pipeline engine is not used", "--pipeline-model-parallel-size N without it"),
    "tensor_parallel.autotp_size": Refused(
        "AutoTP splits a model by the names of its modules",
        "--tensor-model-parallel-size N --sequence-parallel without it",
        harmless=(0, 1),
    ),
    "expert_parallel": Refused(
        "AutoEP replaces modules of a Hugging Face model", "--expert-model-parallel-size N without it", switched=True
    ),
    "elasticity": Refused(
        "it would choose the batch size by the number of ranks",
        "a fixed train_batch_size; a run continues on another number of ranks by --load",
        switched=True,
    ),
    "compression_training": Refused("weights are trained as they are", "a file without it", switched=True),
    "quantize_training": Refused(
        "MoQ rounds the weights that are trained", "zero_quantized_weights, which rounds what is sent", switched=True
    ),
    "weight_quantization": Refused("weights are trained as they are", "a file without it"),
    "eigenvalue": Refused(
        "it belongs to MoQ, which rounds the weights that are trained", "a file without it", switched=True
    ),
    "progressive_layer_drop": Refused("every layer takes part in every step", "a file without it", switched=True),
    "curriculum_learning": Refused("every sequence has --seq-length tokens", "a file without it", switched=True),
    "data_efficiency": Refused(
        "every token of the data is trained on, in --seed's order", "a file without it", switched=True
    ),
    "autotuning": Refused("it starts runs of its own", "megatron-moe plan, which compares layouts", switched=True),
    "nebula": Refused("it writes checkpoints to a service", "--async-save without it", switched=True),
    "datastates_ckpt": Refused("it writes checkpoints of DeepSpeed's format", "--async-save without it"),
    "gradient_allreduce_op": Refused("gradients are averaged over ranks", '"mean"', harmless=("mean",)),
    "zero_optimization.zero_quantized_nontrainable_weights": Refused("every weight is trained", "false"),
    "zero_optimization.zeropp_loco_param": Refused(
        "quantised gradients are summed in fp32, without a moving average of their errors", "a file without it"
    ),
    "zero_optimization.mics_shard_size": Refused(
        "MiCS keeps a copy of the optimizer's state in each group of ranks",
        "stage 3 with zero_hpz_partition_size",
        harmless=(-1, 0),
    ),
    "zero_optimization.zenflow": Refused("it updates weights from gradients of earlier steps", "a file without it"),
    "zero_optimization.offload_optimizer.super_offload": Refused("it updates weights before a step is sound", "false"),
    "zero_optimization.offload_optimizer.ratio": Refused(
        "all of the optimizer's state is kept in host memory, or none of it", "1.0", harmless=(1, 1.0)
    ),
    "optimizer.params.bias_correction": Refused("Adam corrects the bias of its moments", "true", harmless=(True,)),
    "optimizer.params.amsgrad": Refused("AMSGrad is not used", "false"),
    "optimizer.params.max_grad_norm": Refused(
        "the gradient's norm is no setting of Adam", "gradient_clipping", (0, 0.0)
    ),
    "scheduler.params.last_batch_iteration": Refused("a checkpoint says where a schedule is", "-1", harmless=(-1,)),
}

OPTIMIZERS = ("adam", "adamw")
OTHER_OPTIMIZERS = {
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "lamb": "scales each layer's update by its norm",
    "lion": "updates by signs",
    "muon": "is the flag --optimizer muon here, with settings of its own",
    "adagrad": "divides by sums of squares",
    "muadam": "scales rates by width",
    "muadamw": "scales rates by width",
    "musgd": "scales rates by width",
    "sgd": "has no second moment",
}
"""Optimizer -> what it does that AdamW does not; in lower case, as DeepSpeed compares them."""

SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "total_num_steps": None,
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": 0,
        "decay_step_size": 0,
        "decay_lr_rate": 0.0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
}
"""Schedule -> its parameters and DeepSpeed's defaults; None where it has none."""

OTHER_SCHEDULERS = {
    "WarmupCosineLR": "its cosine is one step ahead of the one here; nearest are --lr-decay-style cosine,"
    " --lr-warmup-iters (warmup_num_steps), --lr-decay-iters (total_num_steps) and --min-lr (lr x cos_min_ratio)",
    "LRRangeTest": "its rate grows until training diverges; nearest is a run with --lr-warmup-iters as long as"
    " --train-iters",
}
"""Schedule -> why it cannot be expressed exactly, and what is nearest."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gradient_clipping": {"clip_grad": 0.0},
    "optimizer.params.betas": {"adam_beta1": 0.9, "adam_beta2": 0.999},
    "optimizer.params.weight_decay": {"weight_decay": 0.0},
    "scheduler.type": {"lr_decay_style": "constant"},
}
"""Key -> the fields that it sets and DeepSpeed's default, where this framework has another one."""

RIVALS: dict[str, dict[str, tuple[Any, ...]]] = {
    "data_parallel_sharding_strategy": {
        "use_torch_fsdp2": ("optim_grads_params",),
        "use_distributed_optimizer": ("optim", "optim_grads", "optim_grads_params"),
    },
    "bf16": {"fp16": (False,)},
    "fp16": {"bf16": (False,)},
    "lr_warmup_iters": {"lr_warmup_fraction": ()},
    "accumulate_allreduce_grads_in_fp32": {"grad_reduce_in_bf16": (False,)},
    "grad_reduce_in_bf16": {"accumulate_allreduce_grads_in_fp32": (False,)},
}
"""Field -> other fields that speak of the same thing, with the values of the first that these do not contradict."""

IMPLIED: dict[tuple[str, Any], dict[str, Any]] = {
    ("bf16", True): {"fp16": False},
    ("fp16", True): {"bf16": False},
    ("data_parallel_sharding_strategy", "no_shard"): {"use_distributed_optimizer": False},
    ("accumulate_allreduce_grads_in_fp32", True): {"grad_reduce_in_bf16": False},
    ("grad_reduce_in_bf16", True): {"accumulate_allreduce_grads_in_fp32": None},
}
"""Field and value that a file sets -> what a preset may have set otherwise, and is no longer so."""
