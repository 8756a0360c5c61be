"""transformers as a trainer under test: its Trainer, or its tensor and expert parallelism in a plain loop.

CONFIG is a folder with a config.json, or a YAML or JSON file as transformers' example programs read: TrainingArguments,
`model_name_or_path`, and what a script gives to `from_pretrained` and its collator (`OWN`). The model is built small
from its configuration. Trainer's own loop runs, with accelerate's DDP or FSDP; what it computes is read by callbacks.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from megatron_moe.config.errors import ConfigError
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
_NOT_KEPT = frozenset(
    "output_dir per_device_train_batch_size gradient_accumulation_steps max_steps num_train_epochs report_to save_steps"
    " save_strategy eval_strategy logging_steps bf16 fp16 tf32 do_train do_eval warmup_ratio warmup_steps"
    " lr_scheduler_type dataloader_num_workers".split()
)
"""TrainingArguments that say nothing about what a step computes in fp32, or that the doctor sets."""
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
    settings = {"model_name_or_path": str(path.resolve())} if path.is_dir() else _read(path)
    folder = model_folder(path, settings)
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigError("--target transformers: needs accelerate; pip install accelerate")
    return TransformersTrainer(folder, settings)


def _read(path: Path) -> dict[str, Any]:
    settings = read_mapping(path, "TrainingArguments and model_name_or_path")
    from transformers import TrainingArguments

    unknown = set(settings) - set(OWN) - set(TrainingArguments.__dataclass_fields__)
    if unknown:
        raise ConfigError(f"{path}: {', '.join(sorted(unknown))}: not of TrainingArguments, nor {', '.join(OWN)}")
    if settings.get("deepspeed") is not None:
        raise ConfigError(f"{path}: deepspeed: DeepSpeed's engine is checked by --target deepspeed {path}")
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
    """

    loss = "tokens"

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, {**OWN, **settings}
        self.packed = bool(self._settings["packing"])
        self.config = small_config(folder, self._settings)
        self.vocabulary = int(self.config.vocab_size)
        self._load_from: str | None = None
        self._steps: list[dict[str, Any]] = []
        sizes = map(self._settings.__getitem__, _SIZES)
        self._plain_loop = max(map(int, sizes)) > 1
        if self._plain_loop:
            self.save = self.load = None  # type: ignore[assignment]  # a plain loop saves nothing

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
        from transformers import AutoModelForCausalLM

        self._steps, self._load_from = [], None
        self._step: dict[str, Any] = {}
        options: dict[str, Any] = {"attn_implementation": self._settings["attn_implementation"], "dtype": torch.float32}
        if self._settings["experts_implementation"] is not None:
            options["experts_implementation"] = self._settings["experts_implementation"]
        torch.manual_seed(0)
        self._model: Any = AutoModelForCausalLM.from_config(self.config, **options)
        if world > 1 and self._plain_loop:
            self._model = self._distributed_copy(self._model, options)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)  # of the plain loop
        self._model.train()
        self._counts: dict[str, Tensor] = {}
        self._token_loss = 0.0

    def _watch(self) -> None:
        """Let the model's hooks see the experts that its routers choose, and its loss."""
        for name, module in self._model.named_modules():
            if name.rpartition(".")[2] in ("gate", "router") and name.count("."):
                module.register_forward_hook(self._counter(name))
        self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._model.register_forward_hook(self._see, with_kwargs=True)

    def _distributed_copy(self, model: Any, options: dict[str, Any]) -> Any:
        """Return the model as `from_pretrained` cuts it."""
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        folder = os.path.join(os.environ["TRAINER_FOLDER"], "weights")
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        plan: dict[str, Any] = {}
        for name in _SIZES:
            if int(self._settings[name]) > 1:
                plan[name] = int(self._settings[name])
        if self._settings["tp_plan"] is not None or "tp_size" in plan:
            plan["tp_plan"] = self._settings["tp_plan"] or "auto"
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**plan), **options)

    # ---- Training.

    def prepare(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        """Train on all batches now."""
        if self._plain_loop:
            return
        from transformers import Trainer, TrainerCallback

        outer = self

        class Reader(TrainerCallback):
            """Reads gradients before the optimizer uses them, and what is logged."""

            def on_pre_optimizer_step(self, *_: object, model: Any = None, **__: object) -> None:
                outer._steps.append(outer._end_of_pass(_gradients(model)))

            def on_step_end(self, *_: object, **__: object) -> None:
                outer._steps[-1]["weights"] = _whole(outer._model.named_parameters())

            def on_log(self, *_: object, logs: Any = None, **__: object) -> None:
                if logs is not None and "loss" in logs:
                    outer._steps[-1] |= {"loss": logs["loss"], "grad_norm": logs.get("grad_norm")}

        rows = []
        for batch in batches:
            for micro in batch:
                rows.append(self._inputs(micro))

        class OwnRows(Trainer):
            """Trainer, with the rows that are this rank's already."""

            def get_train_dataloader(self) -> DataLoader:
                return DataLoader(_Rows(rows), batch_size=1, collate_fn=lambda found: dict(found[0]))

        trainer = OwnRows(
            model=self._model,
            args=self._arguments(len(batches), len(batches[0])),
            train_dataset=_Rows(rows),
            callbacks=[Reader()],
        )
        trainer.train(resume_from_checkpoint=self._load_from)

    def _arguments(self, steps: int, accumulated: int) -> Any:
        from accelerate.state import AcceleratorState, GradientState
        from transformers import TrainingArguments

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        given = {name: value for name, value in self._settings.items() if name not in OWN and name not in _NOT_KEPT}
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
            lr_scheduler_type="constant",
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
            # Trainer shows gradients after they were clipped.
            clip, norm = float(self._settings.get("max_grad_norm", 1.0)), self._step["grad_norm"]
            if norm is not None and 0 < clip < norm:
                for _, gradient in self._step["gradients"]:
                    if gradient is not None:
                        gradient *= norm / clip
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
        return found

    def _counter(self, name: str) -> Callable[..., None]:
        """Return a hook on a router that counts the choices of tokens that are no padding."""
        experts = next(getattr(self.config, key) for key in _EXPERTS if hasattr(self.config, key))

        def count(_: nn.Module, __: object, output: Any) -> None:
            for one in output if isinstance(output, tuple) else ():
                if isinstance(one, Tensor) and one.dtype == torch.int64:
                    chosen = one.flatten(0, -2)[self._is_token.flatten()]
                    counts = torch.bincount(chosen.flatten(), minlength=experts)
                    self._counts[name] = self._counts.get(name, torch.zeros_like(counts)) + counts

        return count

    def _before(self, _: nn.Module, __: object, given: Mapping[str, Any]) -> None:
        self._is_token = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()

    def _see(self, _: nn.Module, __: object, given: Mapping[str, Any], output: Any) -> None:
        """Add up the loss of the tokens alone, from the logits; what is logged may hold more."""
        labels = given.get("labels")
        if labels is None or getattr(output, "logits", None) is None:
            return
        with torch.no_grad():
            logits = output.logits[:, :-1].float().flatten(0, 1)
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            wanted = labels[:, 1:].flatten()
            self._token_loss += float(cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum"))

    def _end_of_pass(self, gradients: list[tuple[str, Tensor | None]]) -> dict[str, Any]:
        ranks = dist.get_world_size()
        copies = ranks // self.place().get("dp", (0, 1))[1]
        loss = torch.tensor(self._token_loss, dtype=torch.float64)
        dist.all_reduce(loss)
        for counts in self._counts.values():
            dist.all_reduce(counts)
            counts //= copies
        found = {"gradients": gradients, "token_loss": float(loss) / copies, "counts": self._counts, "grad_norm": None}
        self._token_loss, self._counts = 0.0, {}
        return found


def _gradients(model: nn.Module) -> list[tuple[str, Tensor | None]]:
    """Return copies of a model's gradients, whole, by the names of the model without its wrappers."""
    found: list[tuple[str, Tensor | None]] = []
    for name, weight in model.named_parameters():
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
