"""A DeepSpeed configuration file: the keys that are taken, refused or without a meaning here, and its typed values.

Keys are written with dots, `zero_optimization.stage`. A key of the tables whose value is a mapping covers all that is
in it. `deepspeed.py` turns the values into settings; where several keys are read together, it also does what a table
cannot say.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe.config.paths import read_settings

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


def _in(mapping: str, names: str) -> tuple[str, ...]:
    """Return the keys of a mapping."""
    return tuple(f"{mapping}.{name}" for name in names.split())


MEANINGLESS: dict[str, tuple[str, ...]] = {
    "from stage 2 on each layer is gathered and reduced as a whole, behind the computation of its neighbours; "
    "below, --overlap-grad-reduce and --ddp-bucket-size say it": (
        *_in(
            "zero_optimization",
            "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
            "use_multi_rank_bucket_allreduce contiguous_gradients round_robin_gradients "
            "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
            "stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
            "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
            "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params "
            "stage3_allgather_sequential stage3_partition_stream_chunk_size sub_group_size parameter_alignment "
            "mics_hierarchical_params_gather legacy_stage1",
        ),
        "disable_allgather",
    ),
    "every parameter takes part in every step, experts without a token too": (
        *_in("zero_optimization", "ignore_unused_parameters leaf_module"),
        "sparse_gradients",
    ),
    "the offload to host memory has no settings of its own": (
        *_in(
            "zero_optimization.offload_optimizer",
            "pin_memory buffer_count fast_init nvme_path pipeline pipeline_read pipeline_write",
        ),
        *_in("zero_optimization.offload_param", "pin_memory buffer_count buffer_size max_in_cpu nvme_path"),
        "zero_optimization.cpu_offload_use_pin_memory",
        "aio",
    ),
    "a part of DeepSpeed that is not used": (
        *_in(
            "zero_optimization",
            "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks "
            "compute_grad_norm save_muon_momentum_buffer_in_memory",
        ),
        "seq_parallel_comm_data_type",
        "seq_parallel_communication_data_type",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "managed_gradient_accumulation",
        "hybrid_engine",
        "compile",
        "graph_harvesting",
        "disable_python_gc",
        "dump_state",
        "use_data_before_expert_parallelism",
        "bf16.immediate_grad_update",
        "optimizer.legacy_fusion",
        *_in("optimizer.params", "torch_adam fused foreach fp32_optimizer_states"),
        "fp16.fused_mode",
        *_in("tensor_parallel", "preset_model partition_config tp_overlap_comm vocab_parallel_lm_head"),
    ),
    "a gradient is averaged over ranks by one division": (
        "prescale_gradients",
        "gradient_predivide_factor",
    ),
    "gradients are looked at in every step and dtype (--on-nan)": ("bf16.check_grad_overflow",),
    "a model reads token ids, which are no numbers to cast": (
        "fp16.auto_cast",
        "bf16.auto_cast",
    ),
    "bf16 has the range of fp32 and no loss scale": (
        *_in(
            "bf16", "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
        ),
    ),
    "checkpoints go to --save and are read at any layout; megatron-moe convert exports weights": (
        "checkpoint",
        *_in(
            "zero_optimization",
            "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save load_from_fp32_weights elastic_checkpoint "
            "pipeline_loading_checkpoint",
        ),
    ),
    "--recompute-granularity says what is recomputed": ("activation_checkpointing",),
    "--wandb-project, --tensorboard-dir and --metrics-file record a run": (
        "comet",
        "csv_monitor",
    ),
    "W&B takes team and group from WANDB_ENTITY and WANDB_RUN_GROUP": (*_in("wandb", "team group"),),
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


# Reading

# Strings are kept as they are; of comments and of commas before a closing bracket nothing is left.
_TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/\*.*?\*/', re.DOTALL)
_TEXT_OR_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')
_REASONS = {key: reason for reason, keys in MEANINGLESS.items() for key in keys}
_KNOWN = {*TAKEN, *REFUSED, *_REASONS}
_MAPPINGS = {key.rpartition(".")[0] for key in _KNOWN if "." in key}
_NOUNS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}


@dataclass(frozen=True)
class DeepSpeedFile:
    """The keys of one file that are taken.

    Args:
        path: as the flag gives it.
        values: key with dots -> value of the key's type, in the order of the file; without those that are "auto".
        automatic: keys whose value is "auto", so that flags and defaults of this framework decide.
        notes: a line for each reason why keys are read past.
    """

    path: str
    values: dict[str, Any]
    automatic: frozenset[str]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file's name, for notes."""
        return Path(self.path).name

    def refusal(self, key: str, rule: str) -> ConfigError:
        """Return the error to raise for a key with the value that it has."""
        return _refusal(self.path, key, self.values.get(key), rule)

    def number(self, key: str, default: Any) -> Any:
        """Return a key's value: DeepSpeed's default where it is left out, None where it is "auto"."""
        return None if key in self.automatic else self.values.get(key, default)


def read(path: str) -> DeepSpeedFile:
    """Read a DeepSpeed configuration file.

    Comments (`//`, `#`, `/* */`) and trailing commas are accepted, as DeepSpeed accepts them, and keys that start with
    `_` or `//` count as comments. `null` is a key that is not given.

    Raises:
        ConfigError: the file cannot be read or is not JSON, a key is given twice, is unknown or asks for something that
            this framework does not do, or a value has another type than its key.
    """
    document = _document(path)
    _check_types(path, document)
    keys: dict[str, Any] = {}
    _collect(path, document, "", keys)
    values: dict[str, Any] = {}
    automatic = set()
    meaningless: dict[str, list[str]] = {}
    for key, value in keys.items():
        if value == AUTO:
            automatic.add(key)
        elif key in TAKEN:
            values[key] = _typed(path, key, value)
        elif key in REFUSED:
            _refuse(path, key, value, REFUSED[key])
        else:
            meaningless.setdefault(_REASONS[key], []).append(key)
    notes = tuple(
        f"{Path(path).name}: {', '.join(named)}: no meaning here: {reason}" for reason, named in meaningless.items()
    )
    return DeepSpeedFile(path, values, frozenset(automatic), notes)


def _document(path: str) -> dict[str, Any]:
    text = read_settings("--deepspeed-config", path, "JSON")

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else " "

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"--deepspeed-config {path}: key {twice[0]} is given twice; keep one")
        return dict(pairs)

    try:
        document = json.loads(_TEXT_OR_COMMA.sub(kept, _TEXT_OR_COMMENT.sub(kept, text)), object_pairs_hook=once)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(
            f"--deepspeed-config {path}: is not JSON: {error}; write keys and text in double quotes"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f'--deepspeed-config {path}: holds no mapping; write {{"zero_optimization": {{"stage": 3}}}}')
    return document


def _check_types(path: str, document: dict[str, Any]) -> None:
    """Refuse optimizers and schedules of other kinds, before their parameters are called unknown."""
    for block, known in (("optimizer", OPTIMIZERS), ("scheduler", tuple(SCHEDULERS))):
        mapping = document.get(block)
        kind = mapping.get("type") if isinstance(mapping, dict) else None
        if not isinstance(kind, str) or kind == AUTO:
            continue
        name = kind.lower() if block == "optimizer" else kind
        if name in known:
            continue
        if block == "optimizer":
            rule = f"{OTHER_OPTIMIZERS.get(name, 'is another optimizer')}; a file names AdamW alone: use AdamW"
        else:
            rule = OTHER_SCHEDULERS.get(name, f"not one of {', '.join(known)}{suggestion(name, known)}")
            rule += "; without a scheduler in the file the flags decide"
        raise _refusal(path, f"{block}.type", kind, rule)


def _collect(path: str, mapping: dict[str, Any], above: str, found: dict[str, Any]) -> None:
    """Put the keys of a mapping into `found`, with those of the mappings in it that are known."""
    for name, value in mapping.items():
        if name.startswith(("_", "//")) or name in ("comment", "comments"):
            continue
        key = above + name
        key = ALIASES.get(key, key)
        if key == "zero_optimization" and isinstance(value, bool):  # the first form of the setting
            key, value = "zero_optimization.stage", int(value)
        if value is None or (value == AUTO and key in _MAPPINGS):
            continue
        if key in _MAPPINGS and key not in _KNOWN:
            if not isinstance(value, dict):
                raise _refusal(path, key, value, f'holds keys; write {{"{name}": {{...}}}}')
            _collect(path, value, f"{key}.", found)
        elif key not in _KNOWN:
            raise ConfigError(f"--deepspeed-config {path}: {key}: unknown key{_near(key)}")
        elif key in found:
            raise ConfigError(f"--deepspeed-config {path}: key {key} is given twice; keep one")
        else:
            found[key] = value


def _near(key: str) -> str:
    """Return the known key that an unknown one may have been meant for: elsewhere by its name, or spelled like it."""
    name = key.rpartition(".")[2]
    elsewhere = [known for known in sorted(_KNOWN | _MAPPINGS) if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return suggestion(key, sorted(_KNOWN | _MAPPINGS)) or "; remove it"


def _refuse(path: str, key: str, value: Any, refused: Refused) -> None:
    """Raise the error of a key that is refused, unless its value asks for nothing."""
    if isinstance(value, dict):
        leaves = _leaves(value)
        asks = any(name == "enabled" and on is True for name, on in leaves) if refused.switched else bool(leaves)
    else:
        asks = not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in refused.harmless)
    if asks:
        raise _refusal(path, key, value, f"{refused.rule}; use {refused.works}")


def _leaves(mapping: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and values in a mapping, at any depth, that are given."""
    found = []
    for name, value in mapping.items():
        if isinstance(value, dict):
            found += _leaves(value)
        elif value is not None and value != AUTO:
            found.append((name, value))
    return found


def _typed(path: str, key: str, value: Any) -> Any:
    """Return a value in the type of its key. As for DeepSpeed, 5e8 is a whole number, and "true" and 1 are true."""
    taken = TAKEN[key]
    converted: Any = None
    if taken.kind is bool:
        converted = {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())
    elif taken.kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if taken.kind is float and not math.isnan(number):
            converted = number
        elif number.is_integer():
            converted = int(number)
    elif type(value) is taken.kind:
        converted = value
    if converted is None:
        raise _refusal(path, key, value, f'is not {_NOUNS[taken.kind]}; or use "{AUTO}", for the flags to decide')
    if taken.means and taken.sets is None and converted not in taken.means:
        known = ", ".join(json.dumps(choice) for choice in taken.means)
        raise _refusal(path, key, value, f"not one of {known}{_why_not(converted)}")
    return converted


def _why_not(value: Any) -> str:
    return (
        '; nothing is kept on NVMe, and --optimizer-cpu-offload is what "cpu" is taken for' if value == "nvme" else ""
    )


def _refusal(path: str, key: str, value: Any, rule: str) -> ConfigError:
    shown = json.dumps(value)
    return ConfigError(f"--deepspeed-config {path}: {key} {shown if len(shown) <= 80 else shown[:76] + ' ...'}: {rule}")
