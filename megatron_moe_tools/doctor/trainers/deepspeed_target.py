"""DeepSpeed as a trainer under test: its engine, around a small copy of a model of transformers.

CONFIG is DeepSpeed's JSON file with `model_name_or_path` and what else `transformers_target.OWN` has beside DeepSpeed's
keys, or a file of TrainingArguments with `deepspeed`. The loop is the plain one: engine(...), backward, step.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import suggestion
from megatron_moe_tools.compat.deepspeed import tables
from megatron_moe_tools.doctor.trainers.protocol import Held
from megatron_moe_tools.doctor.trainers.samples import MicroBatch
from megatron_moe_tools.doctor.trainers.transformers_target import (
    LEFT_OUT,
    OF_NO_MATTER,
    OWN,
    TransformersTrainer,
    model_folder,
    read_arguments,
    read_mapping,
)

_SET = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print wall_clock_breakdown"
    " dump_state memory_breakdown flops_profiler comms_logger tensorboard wandb csv_monitor comet".split()
)
"""Keys that the doctor sets, or that say nothing about what a step computes."""
_LEFT_OUT = {
    "fp16": "both sides run in fp32",
    "bf16": "both sides run in fp32",
    "amp": "both sides run in fp32",
    "torch_autocast": "both sides run in fp32",
    "scheduler": "the learning rate stays as it is",
    "activation_checkpointing": "it acts on models that call DeepSpeed's checkpoint function",
    "compression_training": "it changes the model in the course of training",
    "data_efficiency": "the doctor gives the batches",
    "curriculum_learning": "the doctor gives the batches",
    "elasticity": "the ranks are the doctor's",
    "aio": "nothing is offloaded",
}
_ZERO_LEFT_OUT = {
    "offload_optimizer": "it needs a compiled optimizer",
    "offload_param": "it needs a compiled optimizer",
    "round_robin_gradients": "DeepSpeed's safe_get_full_grad, which the gradients are read by, fails with it",
    "zero_hpz_partition_size": "ZeRO++ needs CUDA kernels",
    "zero_quantized_weights": "ZeRO++ needs CUDA kernels",
    "zero_quantized_nontrainable_weights": "ZeRO++ needs CUDA kernels",
    "zero_quantized_gradients": "ZeRO++ needs CUDA kernels",
    "zeropp_loco_param": "ZeRO++ needs CUDA kernels",
}
_SECTIONS = {"tp": ("tensor_parallel", "autotp_size"), "ep": ("expert_parallel", "autoep_size")}
_LARGEST = 2
"""Ranks of an axis: what is wrong with many is wrong with two."""
_AUTO: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "lr": (("learning_rate",), (5e-5,)),
    "betas": (("adam_beta1", "adam_beta2"), (0.9, 0.999)),
    "eps": (("adam_epsilon",), (1e-8,)),
    "weight_decay": (("weight_decay",), (0.0,)),
    "gradient_clipping": (("max_grad_norm",), (1.0,)),
}
"""Key that may be "auto" -> the TrainingArguments that Trainer puts there, and their defaults."""
_ADAM = ("adam", "adamw")
_TAG = "saved"


def load(path: Path) -> DeepSpeedTrainer:
    """Read the configuration.

    Raises:
        ConfigError: it is no configuration of DeepSpeed and a model, or a package is missing.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("--target deepspeed: DeepSpeed is not installed; pip install deepspeed")
    settings = read_mapping(path, "DeepSpeed's keys and model_name_or_path")
    arguments = {name: value for name, value in settings.items() if name not in OWN and name != "deepspeed"}
    plan, given = arguments, settings.get("deepspeed")
    if given is None:
        arguments = {}
    else:
        read_arguments(path)
        plan = given if isinstance(given, dict) else read_mapping(path.parent / str(given), "DeepSpeed's keys")
    known = {key.partition(".")[0] for key in (*tables().known, *tables().mappings, *tables().aliases)}
    for name in sorted(set(plan) - known):
        raise ConfigError(f"{path}: {name}: no key of DeepSpeed's{suggestion(name, sorted(known))}")
    own = {name: settings[name] for name in OWN if name in settings}
    for name in ("tp_size", "ep_size", "fsdp_size", "tp_plan"):
        if name in own:
            raise ConfigError(f"{path}: {name}: is transformers'; DeepSpeed's are tensor_parallel and expert_parallel")
    return DeepSpeedTrainer(model_folder(path, settings), own, _filled(plan, arguments), left_out_of(arguments))


def left_out_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return which TrainingArguments are not checked, with the reason."""
    filled, reason = [name for names, _ in _AUTO.values() for name in names], "DeepSpeed's engine runs in a plain loop"
    found = {}
    for name, value in arguments.items():
        if value and name not in filled and not OF_NO_MATTER.fullmatch(name):
            found[name] = LEFT_OUT.get(name, reason)
    return found


def usable_plan(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what can be run of DeepSpeed's settings on gloo in fp32, and what cannot, with reasons."""
    plan, left_out = dict(given), dict[str, str]()
    for name in _SET | set(_LEFT_OUT):
        if name in plan and name in _LEFT_OUT:
            left_out[name] = _LEFT_OUT[name]
        plan.pop(name, None)
    zero = plan.get("zero_optimization", {})
    if isinstance(zero, bool):  # the first form of the setting
        plan["zero_optimization"] = zero = {"stage": int(zero)}
    for name, reason in _ZERO_LEFT_OUT.items():
        if zero.pop(name, None):
            left_out[name] = reason
    optimizer = plan.get("optimizer", {})
    kind, rates = optimizer.get("type", "AdamW"), optimizer.get("params", {})
    if kind.lower() not in _ADAM:
        left_out[f"optimizer {kind}"] = "it needs compiled kernels; AdamW runs in its place"
        kind, rates = "AdamW", {name: rates[name] for name in ("lr", "weight_decay") if name in rates}
    plan["optimizer"] = {"type": kind, "params": {**rates, "torch_adam": True}}
    return plan, left_out


def _filled(given: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which "auto" is what Trainer fills in of TrainingArguments; without them it is left out."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Mapping):
            found[name] = _filled(value, arguments)
        elif value != "auto":
            found[name] = value
        elif arguments and name in _AUTO:
            names, defaults = _AUTO[name]
            values = list(map(arguments.get, names, defaults))
            found[name] = values
            if len(values) == 1:
                (found[name],) = values
    return found


class DeepSpeedTrainer(TransformersTrainer):
    """A trainer of the doctor's protocol around a DeepSpeed engine.

    One process has neither tensor nor expert parallelism: its model is transformers' own. Weights have the names that
    they have there.

    Attributes:
        loss: each micro-batch weighs the same: the loss is the model's mean.
        ranks: of the model's own parallelism.
        leaves_out: what of the settings is not checked, and why.
        plan: DeepSpeed's settings, as far as they run here.
    """

    loss = "micro-batches"

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], plan: Mapping[str, Any], left_out: Mapping[str, str]
    ) -> None:
        super().__init__(folder, settings)
        self.plan, found = usable_plan(plan)
        self.leaves_out |= {**left_out, **found}
        self._sizes = {}
        for axis, (section, size) in _SECTIONS.items():
            asked = self.plan.get(section, {})
            if asked.get("enabled", True) and asked.get(size, 1) > 1:
                self._sizes[axis] = asked[size] = min(_LARGEST, asked[size])
        self.ranks = max(self._sizes.values(), default=1)
        self._engine: Any = None

    def place(self) -> dict[str, tuple[int, int]]:
        """Return the axes: neighbours share a model in tensor parallelism, and the experts."""
        rank, world, tp = dist.get_rank(), dist.get_world_size(), self._sizes.get("tp", 1)
        if world == 1:
            return {}
        found = {"dp": (rank // tp, world // tp)}
        for axis, size in self._sizes.items():
            found[axis] = (rank % size, size)
        return found

    def build(self, rank: int, world: int) -> None:
        """Build the model with the same weights in every world; the engine follows with the first batch."""
        self._build_model(world)
        self._engine = None
        self._shapes = {name: weight.shape for name, weight in self._model.named_parameters()}

    def prepare(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        """Build the engine: it has to know how many micro-batches make a step."""
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.comm.comm
        import deepspeed.ops
        from deepspeed.utils import groups

        # Each case has its own process groups; DeepSpeed keeps those of its first.
        for module in (deepspeed.comm.comm, groups):
            importlib.reload(module)
        # Collectives of gloo: DeepSpeed's own, in shared memory, would be compiled first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        plan = dict(self.plan)
        if dist.get_world_size() == 1:
            for section, _ in _SECTIONS.values():
                plan.pop(section, None)
        plan |= {
            "train_micro_batch_size_per_gpu": len(batches[0][0]["input_ids"]),
            "gradient_accumulation_steps": len(batches[0]),
            "steps_per_print": 1_000_000,
        }
        self._engine, *_ = deepspeed.initialize(
            model=self._model, model_parameters=self._model.parameters(), config=plan
        )
        if self._load_from is not None:
            self._engine.load_checkpoint(self._load_from, tag=_TAG)
        self._model = self._engine.module
        self._watch()

    def step(self, batch: Sequence[MicroBatch]) -> dict[str, Any]:
        """Make the passes of all micro-batches; the last one's update waits for `update`."""
        total = torch.zeros((), dtype=torch.float64)
        for number, micro in enumerate(batch, start=1):
            loss = self._engine(**self._inputs(micro)).loss
            self._engine.backward(loss)
            total += float(loss)
            if number < len(batch):
                self._engine.step()
        dist.all_reduce(total)
        from deepspeed.utils import safe_get_full_grad

        self._step = self._end_of_pass(self._parts(safe_get_full_grad))
        self._step["loss"] = float(total) / len(batch) / dist.get_world_size()
        self._step["token_loss"] /= len(batch) * self.place().get("dp", (0, 1))[1]
        return self._step

    def update(self) -> float | None:
        """Let the engine clip and update; return its norm."""
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Yield the weights that the model computes with."""
        if self._engine is None:
            return super().named_weights()
        from deepspeed.runtime.zero import GatheredParameters

        def read(weight: nn.Parameter) -> Tensor:
            with GatheredParameters([weight]):  # of ZeRO 3; others are there
                return weight.detach().clone()

        return self._parts(read)

    def save(self, folder: str) -> None:
        """Save the engine's checkpoint."""
        self._engine.save_checkpoint(folder, tag=_TAG)

    def load(self, folder: str) -> None:
        """Let the next engine load it."""
        self._load_from = folder

    def routers(self) -> dict[str, dict[str, Any]]:
        """Return each router's counts of the step, by transformers' names."""
        return {name.replace(".mlp.router", ".mlp.gate"): one for name, one in super().routers().items()}

    def _parts(self, read: Callable[[nn.Parameter], Tensor | None]) -> list[tuple[str, Any]]:
        """Return what is read of each weight, with transformers' names and as its part of the whole."""
        values = {}
        for name, weight in self._model.named_parameters():
            if weight.requires_grad:
                values[name] = read(weight)
        found = []
        for name, value in values.items():
            kind = name.partition(".experts.")[2]
            if kind == "w3":
                continue
            if kind == "w1":
                up = values[name.removesuffix("w1") + "w3"]
                value = None if value is None or up is None else torch.cat((value, up), 1)
            plain = name.replace(".experts.w1", ".experts.gate_up_proj").replace(".experts.w2", ".experts.down_proj")
            plain = plain.replace(".router.gate.", ".gate.")
            found.append((plain, None if value is None else self._part(plain, value)))
        return found

    def _part(self, name: str, value: Tensor) -> Tensor | Held:
        """Return a rank's part with its place in the whole: a weight is cut along the axis on which it is shorter."""
        value, whole = value.detach().clone(), self._shapes[name]
        if value.shape == whole:
            return value
        (axis,) = [axis for axis, (mine, all_) in enumerate(zip(value.shape, whole)) if mine != all_]
        index, parts = self.place()["ep" if ".experts." in name else "tp"]
        return ((axis, index, parts, 1),), value, (None, 0, math.prod(value.shape))
