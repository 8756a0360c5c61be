"""A tiny model that is trained step by step, and digests of its state."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build

TINY = {**PRESETS["tiny"], "mock_data": True, "vocab_size": 100, "clip_grad": 1.0, "lr_decay_style": "cosine"}


def digest(tensors: Any) -> str:
    """Bits of any nest of tensors and plain values; of a sharded tensor those of this rank's shard."""
    from megatron_moe.model.fully_sharded import local

    if isinstance(tensors, torch.Tensor):
        tensors = local(tensors)
        return hashlib.sha256(tensors.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(tensors, dict):
        return digest([[key, tensors[key]] for key in sorted(tensors, key=str)])
    if isinstance(tensors, (list, tuple)):
        return hashlib.sha256("".join(digest(value) for value in tensors).encode()).hexdigest()
    return repr(tensors)


class Trainer:
    """A tiny model with its optimizer, stepped by hand."""

    def __init__(self, flags: dict[str, Any]) -> None:
        from megatron_moe.data.batches import batch_iterators
        from megatron_moe.data.datasets import build_datasets
        from megatron_moe.data.tokenizer_choice import build_tokenizer
        from megatron_moe.model.build import build_model
        from megatron_moe.parallel import groups
        from megatron_moe.parallel.groups import seed_everything
        from megatron_moe.training.optimizer import build_optimizer, build_scheduler
        from megatron_moe.training.step import connect
        from megatron_moe.training.weight_average import build_average

        self.run = run = build({**TINY, **flags})
        self.groups = groups.initialize(run)
        seed_everything(run)
        self.model = build_model(run, self.groups, run.derived.padded_vocab_size(100))
        self.optimizer = build_optimizer(run, self.model, self.groups)
        self.scheduler = build_scheduler(run, self.optimizer)
        self.average = build_average(run, self.model, self.optimizer)
        connect(self.model, self.optimizer)
        tokenizer = build_tokenizer(run.data, 100)
        self.dataset, *_ = build_datasets(run, tokenizer, 80, 0, 0, pg_collection=self.groups)
        self.batches = batch_iterators(self.dataset, run, pg_collection=self.groups)

    def step(self) -> Any:
        from megatron_moe.training.step import train_step

        size = self.run.training.micro_batch_size
        return train_step(
            self.model,
            self.optimizer,
            self.scheduler,
            self.batches,
            num_micro_batches=8 // (size * self.groups.dp.size()),
            micro_batch_size=size,
            seq_length=self.run.model.seq_length,
            pg_collection=self.groups,
            average=self.average,
        )

    def state(self) -> dict[str, str]:
        """Digest of everything that a step may change."""
        from megatron_moe.moe.state import routers
        from megatron_moe.training.optimizer import parts

        found = list(routers(self.model))
        return {
            "weights": digest([list(chunk.state_dict().items()) for chunk in self.model]),
            "main weights": digest([list(part.get_parameters()) for part in parts(self.optimizer)]),
            "moments": digest([list(part.optimizer.state.values()) for part in parts(self.optimizer)]),
            "steps": digest([group.get("step") for group in self.optimizer.param_groups]),
            "schedule": digest([self.scheduler.num_steps, [group["lr"] for group in self.optimizer.param_groups]]),
            "bias": digest([router.expert_bias for router in found]),
            "counts": digest([[router.local_tokens_per_expert, router.step.num_tokens] for router in found]),
        }
