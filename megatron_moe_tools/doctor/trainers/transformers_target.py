"""transformers as a trainer under test: its Trainer, or its tensor and expert parallelism in a plain loop.

CONFIG is a folder with a config.json, or a YAML or JSON file as transformers' example programs read: TrainingArguments,
`model_name_or_path`, and what a script gives to `from_pretrained` and its collator (`OWN`). The model is built small
from its configuration. Trainer's own loop runs, with accelerate's DDP or FSDP; what it computes is read by callbacks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from megatron_moe.config.errors import ConfigError
from megatron_moe.engine.patching import replaced
from megatron_moe_tools.doctor.trainers.samples import IGNORED, MicroBatch

OWN = {
    "model_name_or_path": None,
    "packing": False,  # documents in a row told by position_ids alone, as DataCollatorWithFlattening does
    "attn_implementation": "eager",
    "experts_implementation": None,
    "router_aux_loss_coef": None,  # given: output_router_logits too
    "tp_size": 1,
    "ep_size": 1,
    "fsdp_size": 1,
    "tp_plan": None,
}
"""Keys that are not TrainingArguments', and what they are if they are left out."""
OF_NO_MATTER = re.compile(
    r"(eval|logging|log|save|hub|dataloader|trackio)_.*|.*_eval|output_dir|per_device_.*|gradient_accumulation_steps|"
    r"max_steps|num_train_epochs|report_to|run_name|project|debug|disable_tqdm|do_.*|push_to_hub|load_best_model_at_end|"
    r"metric_for_best_model|greater_is_better|include_.*|prediction_loss_only|batch_eval_metrics|skip_memory_metrics|"
    r"local_rank|ddp_backend|ddp_timeout|use_cpu|seed|data_seed|full_determinism|ignore_data_skip|remove_unused_columns|"
    r"label_names|auto_find_batch_size|torch_empty_cache_steps|resume_from_checkpoint|enable_jit_checkpoint|"
    r"restore_callback_states_from_checkpoint|torch_compile_.*|liger_kernel_config"
)
"""TrainingArguments that do not change what a step computes in fp32, or that the doctor sets."""
_IN_FP32 = "the check runs in fp32"
_OWN_ROWS = "the doctor feeds its own rows, in order"
_NO_WARMUP = "with a learning rate near 0 the first update would show nothing"
LEFT_OUT = {
    "bf16": _IN_FP32,
    "fp16": _IN_FP32,
    "tf32": _IN_FP32,
    "torch_compile": "the model is not compiled",
    "use_liger_kernel": "the kernels need a GPU",
    "neftune_noise_alpha": "random noise differs between layouts",
    "warmup_steps": _NO_WARMUP,
    "warmup_ratio": _NO_WARMUP,
    "train_sampling_strategy": _OWN_ROWS,
    "length_column_name": _OWN_ROWS,
}
"""TrainingArguments that are not checked, with the reason."""
_REFUSED = {
    "deepspeed": "DeepSpeed's engine is checked by --target deepspeed. Remove the setting to check the run under DDP",
    "parallelism_config": "is not checked. Use tp_size, ep_size or fsdp_size",
    "enable_expert_parallel": "is deprecated, and transformers 5.23 fails with it. Use ep_size",
}
_RANDOM_ROUTERS = ("phimoe",)
"""Model types that sample experts at random in training, so that no two runs agree."""
_ON_THE_CPU = {
    "optim": ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"),
    "lr_scheduler_type": (
        "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
    ),
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}  # fmt: skip
"""Values that need no GPU, package or evaluation. The first one of a setting replaces others."""
_SCHEDULED_STEPS = 4
"""Length of the learning rate's schedule, of which the first one or two steps are trained."""
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_DRAWN = {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BIASES = ("e_score_correction_bias", "expert_bias")
_SIZES = ("tp_size", "ep_size", "fsdp_size")
_COLLATED = ("input_ids", "labels", "attention_mask")
LARGEST_AS_IT_IS = 2_000_000


def load(path: Path) -> TransformersTrainer:
    """Read the configuration.

    Raises:
        ConfigError: it is no configuration of a model or of TrainingArguments, or a package is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("--target transformers: transformers is not installed; pip install transformers")
    settings = {"model_name_or_path": str(path.resolve())} if path.is_dir() else read_arguments(path)
    folder = model_folder(path, settings)
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("--target transformers: needs accelerate; pip install accelerate")
    _refuse_mistakes(path, settings)
    trainer = TransformersTrainer(folder, settings)
    if (kind := trainer.config.model_type) in _RANDOM_ROUTERS:
        raise ConfigError(f"{path}: {kind}: its routers sample experts at random, so no two runs agree")
    try:
        trainer.new_model()
        trainer.layout()
    except Exception as error:
        raise ConfigError(f"{path}: transformers refuses this model or layout: {error}") from error
    return trainer


def read_arguments(path: Path) -> dict[str, Any]:
    """Return TrainingArguments and what there is beside them.

    Raises:
        ConfigError: it is neither YAML nor JSON, or has a name that is unknown.
    """
    settings = read_mapping(path, "TrainingArguments and model_name_or_path")
    from transformers import TrainingArguments

    unknown = set(settings) - set(OWN) - set(_REFUSED) - set(TrainingArguments.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"{path}: {', '.join(sorted(unknown))}: not of TrainingArguments, nor {', '.join(OWN)}")
    return settings


def read_mapping(path: Path, of: str) -> dict[str, Any]:
    """Return the settings of a YAML or JSON file; `of` says what they have to be.

    Raises:
        ConfigError: it is neither, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        # YAML takes 1e-3 for a string; JSON does not.
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, json.JSONDecodeError, OSError) as error:
        raise ConfigError(f"{path}: is neither YAML nor JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: has to be a mapping of {of}")
    return settings


def model_folder(path: Path, settings: Mapping[str, Any]) -> Path:
    """Return the folder of the model that a file of settings names, relative to the file.

    Raises:
        ConfigError: there is none.
    """
    named = settings.get("model_name_or_path")
    if named is None or not (path.parent / str(named) / "config.json").is_file():
        raise ConfigError(f"{path}: model_name_or_path {named!r} is no folder with a config.json")
    return path.parent / str(named)


def _refuse_mistakes(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError: a value has the wrong type, is not known, or cannot be checked."""
    from transformers import TrainingArguments
    from transformers.integrations.moe import ExpertsInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    known = {
        "optim": [one.value for one in OptimizerNames],
        "lr_scheduler_type": [one.value for one in SchedulerType],
        "attn_implementation": ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()],
        "experts_implementation": ["eager", *ExpertsInterface().valid_keys()],
    }
    for name, value in settings.items():
        if value is None:
            continue
        if name in _REFUSED and value:
            raise ConfigError(f"{path}: {name}: {_REFUSED[name]}")
        if name in known and value not in known[name] and "/" not in str(value):  # a kernel of the hub has one
            raise ConfigError(f"{path}: {name}: unknown value {value!r}. Known: {', '.join(known[name])}")
        if name == "tp_plan" and settings.get("tp_size", 1) == 1:
            raise ConfigError(f"{path}: tp_plan: needs tp_size above 1")
        if name in _SIZES and (type(value) is not int or value < 1):
            raise ConfigError(f"{path}: {name}: must be a positive integer, is {value!r}")
        kind = "str"
        if name in TrainingArguments.__dataclass_fields__:
            kind = str(TrainingArguments.__dataclass_fields__[name].type)
        elif isinstance(OWN.get(name), bool):
            kind = "bool"
        elif name == "router_aux_loss_coef":
            kind = "float"
        if isinstance(value, str) and not re.search("str|dict", kind):
            hint = ". YAML reads 1e-3 as a string; write 1.0e-3" if "float" in kind else ""
            raise ConfigError(f"{path}: {name}: must not be a string, is {value!r}{hint}")


def _left_out(settings: Mapping[str, Any], plain_loop: bool) -> dict[str, str]:
    """Return which settings are not checked, with the reason."""
    found, unused = dict[str, str](), []
    for name, value in settings.items():
        if not value or OF_NO_MATTER.fullmatch(name):
            continue
        if name in LEFT_OUT:
            found[name] = LEFT_OUT[name]
        elif name in _ON_THE_CPU and value not in _ON_THE_CPU[name]:
            found[name] = f"{value} needs a GPU, a package or an evaluation; {_ON_THE_CPU[name][0]} is checked"
        elif name not in OWN:
            unused.append(name)
    if plain_loop and unused:
        found[", ".join(unused)] = "a model that is cut trains in a plain loop with AdamW"
    return found


def small_config(folder: Path, settings: Mapping[str, Any]) -> Any:
    """Return the configuration of a small copy of a folder's model; a small model is taken as it is."""
    from transformers import AutoConfig

    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values = values.get("text_config", values)
    if (coefficient := settings.get("router_aux_loss_coef")) is not None:
        values["router_aux_loss_coef"] = coefficient
    size = values.get("vocab_size", 0) + 12 * values.get("hidden_size", 0) * values.get("num_hidden_layers", 1)
    if size * values.get("hidden_size", 0) > LARGEST_AS_IT_IS:
        _shrink(values)
    # Drawn wider than for training: a small model would else be almost linear, and its choices of experts all alike.
    values |= {**_DRAWN, "output_router_logits": settings.get("router_aux_loss_coef") is not None}
    for name in list(values):
        if "dropout" in name or name.endswith("jitter_noise"):
            values[name] = 0.0
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _shrink(values: dict[str, Any]) -> None:
    heads, groups = values["num_attention_heads"], values.get("num_key_value_heads")
    for name, small in SMALL.items():
        if isinstance(values.get(name), int) and not isinstance(values.get(name), bool):
            values[name] = min(small, values[name])
    if groups is not None:
        values["num_key_value_heads"] = {heads: 4, 1: 1}.get(groups, 2)
    for name in ("num_experts_per_tok", "moe_k", "moe_topk"):
        if isinstance(values.get(name), int):
            values[name] = min(2, values[name])
    if isinstance(values.get("layer_types"), list):
        kinds = list(dict.fromkeys(values["layer_types"]))
        values["layer_types"] = (kinds * 2)[:2]


class _Rows(Dataset):
    """A rank's micro-batches in their order; Trainer's sampler would give each rank another share."""

    def __init__(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> None:
        self._micro_batches = micro_batches

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        return self._micro_batches[index]


class TransformersTrainer:
    """A `Trainer` of the doctor's protocol around transformers.

    Attributes:
        loss: transformers weighs every token of a batch the same.
        packed: whether documents are told by position_ids.
        ranks: of a model that is cut.
        leaves_out: settings that are not checked, with the reason.
    """

    loss = "tokens"

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, dict[str, Any](OWN)
        for name, value in settings.items():
            if value is not None:
                self._settings[name] = value
        self.packed = bool(self._settings["packing"])
        self.config = small_config(folder, self._settings)
        self.vocabulary = int(self.config.vocab_size)
        self._load_from: str | None = None
        self._steps: list[dict[str, Any]] = []
        sizes = map(self._settings.__getitem__, _SIZES)
        self._plain_loop = max(sizes) > 1
        self.ranks = self._settings["tp_size"] * self._settings["fsdp_size"]
        if self._plain_loop:
            self.save = self.load = None  # type: ignore[assignment]  # a plain loop saves nothing
        self.leaves_out = _left_out(settings, self._plain_loop)
        for name in _ON_THE_CPU:
            if name in self.leaves_out:
                self._settings[name] = _ON_THE_CPU[name][0]

    def place(self) -> dict[str, tuple[int, int]]:
        """Return the axes: the model's own parallelism, and data parallelism over the rest."""
        rank, world, s = dist.get_rank(), dist.get_world_size(), self._settings
        if world == 1:
            return {}
        model_ranks = int(s["tp_size"])
        found = {"dp": (rank // model_ranks, world // model_ranks)}
        for axis, size in (("tp", model_ranks), ("ep", int(s["ep_size"]))):
            if size > 1:
                found[axis] = (rank % size, size)
        return found

    # ---- Building.

    def build(self, rank: int, world: int) -> None:
        """Build the model with the same weights in every world, in fp32."""
        self._build_model(world)
        self._watch()

    def _build_model(self, world: int) -> None:
        self._steps, self._load_from = [], None
        self._step: dict[str, Any] = {}
        torch.manual_seed(0)
        self._model = self.new_model()
        for _, bias in self._expert_biases():
            bias.copy_(torch.randn(bias.shape) / 10)  # zeros would not show whether ranks have it
        if world > 1 and self._plain_loop:
            self._model = self._distributed_copy(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)  # of the plain loop
        self._model.train()
        self._counts: dict[str, Tensor] = {}
        self._token_losses: list[float] = []

    def _watch(self) -> None:
        """Let the model's hooks see the experts that its routers choose, and its loss."""
        self._order: dict[str, int] = {}
        for name, module in self._model.named_modules():
            module.register_forward_pre_hook(partial(self._meet, name))
            if name.rpartition(".")[2] in ("gate", "router") and name.count("."):
                module.register_forward_hook(self._counter(name))
        self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._model.register_forward_hook(self._see)

    def new_model(self) -> Any:
        """Return the model on one process."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(self.config, **self._options())

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"attn_implementation": self._settings["attn_implementation"], "dtype": torch.float32}
        if self._settings["experts_implementation"] is not None:
            options["experts_implementation"] = self._settings["experts_implementation"]
        return options

    def layout(self) -> Any:
        """Return the layout of a model that is cut."""
        from transformers.distributed import DistributedConfig

        plan: dict[str, Any] = {}
        for name in _SIZES:
            if int(self._settings[name]) > 1:
                plan[name] = int(self._settings[name])
        if self._settings["tp_plan"] is not None or "tp_size" in plan:
            plan["tp_plan"] = "auto" if self._settings["tp_plan"] is None else self._settings["tp_plan"]
        return DistributedConfig(**plan)

    def _distributed_copy(self, model: Any) -> Any:
        """Return the model as `from_pretrained` cuts it."""
        from transformers import AutoModelForCausalLM

        folder = os.path.join(os.environ["TRAINER_FOLDER"], "weights")
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=self.layout(), **self._options())

    # ---- Training.

    def prepare(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        """Train on all batches now."""
        if self._plain_loop:
            return
        from transformers import Trainer, TrainerCallback

        outer = self

        class Reader(TrainerCallback):
            """Reads weights after an update, and what is logged."""

            def on_step_end(self, *_: object, **__: object) -> None:
                outer._steps[-1]["weights"] = _whole(outer._model.named_parameters())

            def on_log(self, *_: object, logs: Any = None, **__: object) -> None:
                if logs is not None and "loss" in logs:
                    outer._steps[-1] |= {"loss": logs["loss"], "grad_norm": logs.get("grad_norm")}
                    outer._steps[-1].setdefault("token_loss", logs["loss"])

        rows = []
        for batch in batches:
            for micro in batch:
                rows.append(self._inputs(micro))

        class OwnRows(Trainer):
            """Trainer with the rows of this rank, and a schedule that does not depend on how many steps are trained."""

            def get_train_dataloader(self) -> DataLoader:
                return DataLoader(_Rows(rows), batch_size=1, collate_fn=lambda found: dict(found[0]))

            def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
                return super().create_scheduler(_SCHEDULED_STEPS, optimizer)

        trainer = OwnRows(
            model=self._model,
            args=self._arguments(len(batches), len(batches[0])),
            train_dataset=_Rows(rows),
            callbacks=[Reader()],
        )
        clip = trainer.accelerator.clip_grad_norm_

        def clip_what_was_read(*given: Any, **options: Any) -> Any:
            trained: Any = trainer.model  # FSDP wraps it anew
            outer._steps.append(outer._end_of_pass(_gradients(trained)))
            return clip(*given, **options)

        with replaced([trainer.accelerator], clip_grad_norm_=clip_what_was_read):
            trainer.train(resume_from_checkpoint=self._load_from)

    def _arguments(self, steps: int, accumulated: int) -> Any:
        from accelerate.state import AcceleratorState, GradientState
        from transformers import TrainingArguments

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        given: dict[str, Any] = {}
        for name, value in self._settings.items():
            if name in OWN or name in LEFT_OUT or OF_NO_MATTER.fullmatch(name):
                continue
            if dist.get_world_size() > 1 or "_checkpointing" not in name:  # one process shows what is recomputed
                given[name] = value
        return TrainingArguments(
            output_dir=os.path.join(os.environ["TRAINER_FOLDER"], "trainer"),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulated,
            max_steps=steps + (1 if self._load_from else 0),
            ignore_data_skip=True,
            use_cpu=True,
            report_to=[],
            save_strategy="steps" if steps == 1 else "no",
            save_steps=1,
            logging_steps=1,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            dataloader_num_workers=0,
            remove_unused_columns=False,
            seed=0,
            **given,
        )

    def step(self, batch: Sequence[MicroBatch]) -> dict[str, Any]:
        """Return what was logged of the next step; train it, in a plain loop, where the model itself is distributed."""
        if not self._plain_loop:
            self._step = self._steps.pop(0)
            return self._step
        tokens = torch.tensor(0)
        for micro in batch:
            tokens += (micro["labels"][:, 1:] != IGNORED).sum()
        data_ranks = self.place().get("dp", (0, 1))[1]
        dist.all_reduce(tokens)
        tokens = tokens // (dist.get_world_size() // data_ranks)
        total = torch.zeros(())
        for micro in batch:
            loss = self._model(**self._inputs(micro), num_items_in_batch=tokens).loss
            (loss * data_ranks).backward()  # fully_shard averages over the ranks
            total += loss.detach()
        dist.all_reduce(total)
        self._step = self._end_of_pass(_gradients(self._model))
        self._step["loss"] = float(total) * data_ranks / dist.get_world_size()
        return self._step

    def _inputs(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Return what the collator would give: an attention mask, or rows flattened into one with position_ids."""
        if not self.packed:
            return dict(zip(_COLLATED, map(micro.__getitem__, _COLLATED)))
        kept = micro["attention_mask"].bool().flatten()
        found = {name: micro[name].flatten()[kept].unsqueeze(0) for name in ("input_ids", "labels", "position_ids")}
        found["labels"] = found["labels"].masked_fill(found["position_ids"] == 0, IGNORED)
        return found

    def update(self) -> float | None:
        """Return the norm that Trainer logged; in a plain loop step the optimizer."""
        if not self._plain_loop:
            return self._step["grad_norm"]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return None

    def save(self, _: str) -> None:
        """Leave the checkpoint that Trainer has written after its only step."""

    def load(self, _: str) -> None:
        """Let Trainer resume from it."""
        self._load_from = os.path.join(os.environ["TRAINER_FOLDER"], "trainer", "checkpoint-1")

    # ---- What is read.

    def named_gradients(self) -> Iterable[tuple[str, Tensor | None]]:
        """Yield the gradients of the step."""
        return self._step["gradients"]

    def named_weights(self) -> Iterable[tuple[str, Tensor | None]]:
        """Yield the weights: after the step that was asked for last, which Trainer may have left behind."""
        return self._step.get("weights") or _whole(self._model.named_parameters())

    def routers(self) -> dict[str, dict[str, Any]]:
        """Return each router's counts of the step."""
        found = {}
        for name, counts in self._step["counts"].items():
            found[name] = {"counts": counts}
        for name, bias in self._step["biases"]:
            found.setdefault(name.rpartition(".")[0], {})["expert_bias"] = bias
        return found

    def _expert_biases(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each bias of experts' scores, which no optimizer updates."""
        for name, tensor in (*self._model.named_buffers(), *self._model.named_parameters()):
            if name.endswith(_BIASES) and not tensor.requires_grad:
                yield name, tensor

    def _counter(self, name: str) -> Callable[..., None]:
        """Return a hook on a router that counts the choices of tokens that are no padding."""
        experts = next(getattr(self.config, key) for key in _EXPERTS if hasattr(self.config, key))

        def count(_: nn.Module, __: object, output: Any) -> None:
            for one in output if isinstance(output, tuple) and self._in_forward else ():  # layers may be recomputed
                if isinstance(one, Tensor) and one.dtype == torch.int64:
                    chosen = one.flatten(0, -2)[self._is_token.flatten()]
                    counts = torch.bincount(chosen.flatten(), minlength=experts)
                    self._counts[name] = self._counts.get(name, torch.zeros_like(counts)) + counts

        return count

    def _meet(self, name: str, *_: object) -> None:
        """Note when the forward pass first meets a module. A layer's norms are listed behind its experts."""
        self._order.setdefault(name, len(self._order))

    def _before(self, _: nn.Module, __: object, given: Mapping[str, Any]) -> None:
        self._in_forward = True
        self._is_token = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()

    def _see(self, _: nn.Module, __: object, output: Any) -> None:
        """Add up the model's loss without the auxiliary one, which depends on all tokens."""
        self._in_forward = False
        if (loss := getattr(output, "loss", None)) is None:  # Trainer computes one from the logits
            return
        loss, auxiliary = loss.detach(), getattr(output, "aux_loss", None)
        if auxiliary is not None:
            loss = loss - (self._settings["router_aux_loss_coef"] or 0.0) * auxiliary.detach()
        self._token_losses.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))

    def _end_of_pass(self, gradients: list[tuple[str, Tensor | None]]) -> dict[str, Any]:
        ranks = dist.get_world_size()
        copies = ranks // self.place().get("dp", (0, 1))[1]
        loss = torch.tensor(sum(self._token_losses), dtype=torch.float64)
        dist.all_reduce(loss)
        for counts in self._counts.values():
            dist.all_reduce(counts)
            counts //= copies
        biases = _whole(self._expert_biases())
        gradients.sort(key=lambda one: self._order.get(one[0].rpartition(".")[0], -1))
        found: dict[str, Any] = {"gradients": gradients, "counts": self._counts, "biases": biases, "grad_norm": None}
        if self._token_losses:
            found["token_loss"] = float(loss) / copies
        self._token_losses, self._counts = [], {}
        return found


def _gradients(model: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Return copies of a model's gradients, whole, by the names of the model without its wrappers."""
    found: list[tuple[str, Tensor | None]] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            found.append((name.removeprefix("module."), weight.grad))
    return _whole(found)


@torch.no_grad()
def _whole(named: Iterable[tuple[str, Tensor | None]]) -> list[tuple[str, Tensor | None]]:
    """Return copies of tensors, each whole on every rank."""
    found: list[tuple[str, Tensor | None]] = []
    for name, tensor in named:
        if tensor is not None:
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()
        found.append((name, tensor))
    return found
