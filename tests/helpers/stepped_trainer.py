"""A tiny model that is trained step by step; digests of its state; what it would write, and runs that are resumed."""

import hashlib
from typing import Any

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from tests.helpers import model_cases

TINY = {**PRESETS["tiny"], "mock_data": True, "vocab_size": 100, "clip_grad": 1.0, "lr_decay_style": "cosine"}
# A dense layer and one with experts.
SMALL = {"num_layers": 2, "moe_layer_freq": "[0,1]"}
# For what is done to each parameter by itself. Epsilon is of the size of the gradients: what is nothing in a gradient
# is nothing in an update.
STORED = {
    **SMALL,
    "seq_length": 32,
    "make_vocab_size_divisible_by": 50,
    "lr": 1e-2,
    "lr_warmup_init": 1e-2,
    "adam_eps": 1e-3,
}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}
ZERO_2: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads"}
ZERO_3: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "DP2, distributed optimizer": (2, DISTRIBUTED),
    "DP2, ZeRO 2": (2, ZERO_2),
    "DP2, ZeRO 3": (2, ZERO_3),
    "TP2": (2, TP2),
    "TP2, ETP1": (2, {**TP2, **EP2, "expert_tensor_parallel_size": 1}),
    "EP2, distributed optimizer": (2, {**EP2, **DISTRIBUTED}),
    "PP2": (2, PP2),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP4 x EP2, ZeRO 3": (4, {**EP2, **ZERO_3}),
    "TP2 x PP2, distributed optimizer": (4, {**TP2, **PP2, **DISTRIBUTED}),
}
STEPS = 3
Saved = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]]
"""Key -> start, shape of the whole and values of each piece that a rank writes."""


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


def digests(trained: Any) -> dict[str, str]:
    """Digest of everything in a run's state that a step may change."""

    from megatron_moe.engine.optimizer import parts
    from megatron_moe.moe.router import routers

    found = list(routers(trained.model))
    optimizers, groups = parts(trained.optimizer), trained.optimizer.param_groups
    return {
        "weights": digest([list(chunk.state_dict().items()) for chunk in trained.model]),
        "main weights": digest([list(part.get_parameters()) for part in optimizers]),
        "moments": digest([list(part.optimizer.state.values()) for part in optimizers]),
        "steps": digest([group.get("step") for group in groups]),
        "schedule": digest([trained.scheduler.num_steps, [group["lr"] for group in groups]]),
        "bias": digest([router.expert_bias for router in found]),
        "counts": digest([[router.local_tokens_per_expert, router.step.num_tokens] for router in found]),
    }


class Trainer(model_cases.Trainer):
    """A tiny model with its optimizer, stepped by hand over made-up data."""

    def __init__(self, flags: dict[str, Any]) -> None:
        from megatron_moe.data.batches import batch_iterators
        from megatron_moe.data.datasets import build_datasets
        from megatron_moe.data.tokenizer_choice import build_tokenizer
        from megatron_moe.optim.weight_average import WeightAverage

        run = build({**TINY, **flags})
        super().__init__(run, vocabulary=run.derived.padded_vocab_size(100))
        self.average = None
        if (decay := run.optimizer.ema_decay) is not None:
            self.average = WeightAverage(decay, self.model, self.optimizer)
        tokenizer = build_tokenizer(run.data, 100)
        self.dataset, *_ = build_datasets(run, tokenizer, 80, 0, 0, pg_collection=self.groups)
        self.batches = batch_iterators(self.dataset, run, pg_collection=self.groups)

    def step(self, **options: Any) -> Any:
        """One step; `options` are those of `train_step`."""
        number = 8 // (self.run.training.micro_batch_size * self.groups.dp.size())
        return self.step_of(self.batches, number, average=self.average, **options)

    def state(self) -> dict[str, str]:
        """Digest of everything that a step may change."""
        return digests(self.trained)

    @property
    def trained(self) -> Any:
        """What a checkpoint is made of."""
        from megatron_moe.checkpoint.state import TrainState

        return TrainState(self.model, self.optimizer, self.scheduler, self.groups, self.average)

    def tensors(self) -> Saved:
        """What this rank would write of weights, optimizer and averages."""
        from megatron_moe.checkpoint.optimizer import unpacked
        from megatron_moe.checkpoint.sharded import written_here
        from megatron_moe.checkpoint.state import average_shards, model_shards, optimizer_shards

        with unpacked(self.optimizer, keep=False):
            shards = optimizer_shards(self.trained)
        shards += model_shards(self.trained)
        shards += [] if self.average is None else average_shards(self.trained)
        found: Saved = {}
        for shard in written_here(shards):
            values = shard.values.detach().to(shard.dtype, copy=True)
            found.setdefault(shard.key, []).append((shard.start, shard.whole, values))
        return found

    def save(self, iteration: int = 2) -> None:
        """Save into `--save`."""
        from megatron_moe.checkpoint.save import SaveTarget, begin
        from megatron_moe.checkpoint.state import TrainingProgress

        progress = TrainingProgress(iteration=iteration, consumed_samples=8 * iteration)
        saving = begin(self.run, self.trained, progress, SaveTarget.of(self.run), facts={})
        for stage in (saving.write, saving.exchange, saving.publish, saving.conclude):
            stage()

    def load(self, iteration: int = 2) -> list[str]:
        """Load what `--load` has of this iteration, go on to its place in the data, and return the load's notes."""
        from megatron_moe.checkpoint.load import load
        from megatron_moe.checkpoint.plan import plan

        source = plan(self.run).source
        assert source is not None
        notes = load(self.run, source, self.trained).notes
        for _ in range(iteration * 8 // (self.run.training.micro_batch_size * self.groups.dp.size())):
            next(self.batches[0])
        return notes


def trained(flags: dict[str, Any], steps: int = STEPS) -> tuple[list[float], Saved]:
    """Losses of a few steps, and the state after them."""
    trainer = Trainer({**STORED, **flags})
    losses = [trainer.step().loss for _ in range(steps)]
    return losses, trainer.tensors()


def stopped(flags: dict[str, Any], folder: str) -> tuple[None, Saved]:
    """A run of two steps that is saved, and its state."""
    trainer = Trainer({**STORED, **flags, "save": folder})
    for _ in range(2):
        trainer.step()
    trainer.save()
    return None, trainer.tensors()


def resumed(flags: dict[str, Any], folder: str, steps: int = STEPS - 2) -> tuple[list[float], Saved]:
    """Losses of the steps after those of a saved run, and the state after them."""
    trainer = Trainer({**STORED, **flags, "load": folder})
    trainer.load()
    losses = [trainer.step().loss for _ in range(steps)]
    return losses, trainer.tensors()


def whole(ranks: list[tuple[Any, Saved]]) -> dict[str, torch.Tensor]:
    """The tensors that the ranks wrote together."""
    made: dict[str, torch.Tensor] = {}
    for _, saved in ranks:
        for key, boxes in saved.items():
            for start, shape, values in boxes:
                there = made.setdefault(key, torch.full(shape, torch.nan, dtype=values.dtype))
                there[tuple(slice(a, a + n) for a, n in zip(start, values.shape))] = values
    return made


def require_same_bits(first: list[tuple[Any, Saved]], second: list[tuple[Any, Saved]]) -> None:
    """What the ranks of two cases wrote together has the same keys and bits."""
    wanted, found = whole(first), whole(second)
    assert found.keys() == wanted.keys()
    for key in wanted:
        assert torch.equal(found[key].view(torch.uint8), wanted[key].view(torch.uint8)), key


def require_resumed_to_the_bit(gloo: Any, folder: Any, ranks: int, flags: dict[str, Any], **others: Any) -> None:
    """A run that is saved, and goes on with other flags, ends as an uninterrupted one."""
    folder.mkdir()
    straight = gloo.run(ranks, trained, flags=flags)
    gloo.run(ranks, stopped, flags=flags, folder=str(folder))
    later = gloo.run(ranks, resumed, flags={**flags, **others}, folder=str(folder))
    assert later[0][0] == straight[0][0][2:]
    require_same_bits(straight, later)


def require_loaded_to_the_bit(
    gloo: Any, once: Any, folder: Any, flags: dict[str, Any], layout: tuple[int, dict[str, Any]]
) -> None:
    """What two ranks saved, once for all layouts, is the same once another layout has loaded it."""
    ranks, changes = layout
    folder.mkdir(exist_ok=True)
    saved = once(2, stopped, flags=flags, folder=str(folder))
    require_same_bits(saved, gloo.run(ranks, resumed, flags={**flags, **changes}, folder=str(folder), steps=0))


def require_rounded_alike(one: list[tuple[list[float], Saved]], many: list[tuple[list[float], Saved]]) -> None:
    """Ranks have the losses of one rank, and its state after bf16 moments were rounded at random."""
    assert many[0][0] == pytest.approx(one[0][0], rel=1e-5)
    wanted, found = whole(one), whole(many)
    assert found.keys() == wanted.keys()
    moments = [key for key in wanted if ".exp_avg" in key]
    assert len(moments) > 20
    for key in wanted:
        assert found[key].isfinite().all(), key
        torch.testing.assert_close(found[key], wanted[key], rtol=0, atol=2e-4, msg=key)
    # A sum in another order moves a moment by less than a step of bf16, and one in hundreds over a threshold.
    for keys in (moments, [key for key in moments if wanted[key].dim() == 1]):
        same = sum(int((found[key] == wanted[key]).sum()) for key in keys)
        assert same / sum(wanted[key].numel() for key in keys) > 0.99
