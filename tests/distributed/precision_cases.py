"""What the ranks do in test_per_module_precision.py."""

from __future__ import annotations

from typing import Any

import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build

SMALL = {
    **PRESETS["tiny"],
    "seq_length": 16,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 32,
    "num_layers": 4,
    "init_method_std": 0.1,
    "clip_grad": 1.0,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 256,
    "train_iters": 20,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2, SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "DP2": (2, {}),
    "DP2, distributed optimizer": (2, {"use_distributed_optimizer": True}),
}


def run_of(**flags: Any) -> Run:
    return build({**SMALL, **flags})


class Trainer:
    """A small model with its optimizer, on a fixed global batch of four sequences."""

    def __init__(self, run: Run) -> None:
        from megatron_moe.model.build import build_model
        from megatron_moe.parallel import groups
        from megatron_moe.parallel.seeds import seed_everything
        from megatron_moe.training.optimizer import build_optimizer, build_scheduler
        from megatron_moe.training.step import connect

        self.run, self.groups = run, groups.initialize(run)
        seed_everything(run)
        self.model = build_model(run, self.groups, 256)
        self.optimizer = build_optimizer(run, self.model, self.groups)
        self.scheduler = build_scheduler(run, self.optimizer)
        connect(self.model, self.optimizer)

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(7)
        length = self.run.model.seq_length
        tokens = torch.randint(0, 256, (4, length + 1), generator=generator)
        positions, mask = torch.arange(length).expand(4, length), torch.ones(4, length)
        whole = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}
        share = 4 // self.groups.dp.size()
        rows = range(self.groups.dp.rank() * share, (self.groups.dp.rank() + 1) * share)
        return [iter([{k: v[row : row + 1] for k, v in whole.items()} for row in rows]) for _ in self.model]

    def step(self) -> Any:
        from megatron_moe.training.step import train_step

        return train_step(
            self.model, self.optimizer, self.scheduler, self.batches(),
            num_micro_batches=4 // self.groups.dp.size(), micro_batch_size=1, seq_length=self.run.model.seq_length,
            pg_collection=self.groups,
        )  # fmt: skip

    def evaluate(self) -> float:
        from megatron_moe.training.evaluate import evaluate

        return evaluate(
            self.model, self.batches(), split="valid", iteration=1, num_micro_batches=4 // self.groups.dp.size(),
            micro_batch_size=1, seq_length=self.run.model.seq_length, pg_collection=self.groups,
            in_fp32=self.run.precision.eval_in_fp32,
        ).loss  # fmt: skip

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By their names in the whole model."""
        from megatron_moe.checkpoint.state import unwrapped
        from megatron_moe.model.initialize import global_name

        return {
            global_name(unwrapped(chunk), name): parameter
            for chunk in self.model
            for name, parameter in unwrapped(chunk).named_parameters()
        }


def trained(run: Run, steps: int = 3) -> dict[str, Any]:
    """Losses and gradient norms of some steps; dtypes of weights and gradients; initial weights."""
    trainer = Trainer(run)
    weights = {name: parameter.detach().clone() for name, parameter in trainer.parameters().items()}
    results = [trainer.step() for _ in range(steps)]
    return {
        "weights": weights,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "committed": all(result.committed for result in results),
        "dtypes": {
            name: (str(parameter.dtype), str(parameter.main_grad.dtype))
            for name, parameter in trainer.parameters().items()
        },
    }
