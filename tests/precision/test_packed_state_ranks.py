"""Packed optimizer state over layouts, precisions and checkpoints: one rank is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.rows import rows

pytestmark = pytest.mark.engine

PACKED = {"use_precision_aware_optimizer": True}
BF16_MOMENTS = {**PACKED, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
CODES = {**PACKED, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "fp8"}
STEPS = 3
# A dense layer and one with experts: what is tested here is done to each parameter by itself.
# Epsilon of the size of the gradients: what is nothing in a gradient is nothing in an update.
FLAGS = {
    "num_layers": 2,
    "moe_layer_freq": "[0,1]",
    "make_vocab_size_divisible_by": 50,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "lr": 1e-2,
    "lr_warmup_init": 1e-2,
    "adam_eps": 1e-3,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "DP2, distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "DP2, ZeRO 2": (2, {"data_parallel_sharding_strategy": "optim_grads"}),
    "DP2, ZeRO 3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "TP2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "TP2, ETP1": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
        | {"expert_model_parallel_size": 2},
    ),
    "EP2, distributed optimizer": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "offload": (1, {"optimizer_cpu_offload": True}),
    "DP4 x EP2, ZeRO 3": (4, {"expert_model_parallel_size": 2, "use_torch_fsdp2": True}),
    "TP2 x PP2, distributed optimizer": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
        | {"sequence_parallel": True},
    ),
}
EITHER = ["DP2, distributed optimizer", "DP2, ZeRO 3", "TP2", "PP2"]
Saved = dict[str, list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]]


def optimizer_tensors(trainer: Any) -> Saved:
    """What this rank would write of the optimizer, by key: start, whole shape and values."""
    from megatron_moe.checkpoint import dist, gather
    from megatron_moe.checkpoint.state import Trained, model_state, optimizer_state

    trained = Trained(trainer.model, trainer.optimizer, trainer.scheduler, trainer.groups)
    state = model_state(trained)
    with gather.into(trainer.optimizer, {}, later=False) as gathered:
        own = optimizer_state(trained, state, loading=False)
    found: Saved = {}
    for shard in dist.shards([own, state]):
        if shard.is_main and shard.values.untyped_storage().data_ptr() not in gathered.absent:
            found.setdefault(shard.key, []).append((shard.start, shard.whole, shard.values.clone()))
    return found


def trained(flags: dict[str, Any], steps: int = STEPS) -> tuple[list[float], Saved]:
    """Losses of a few steps, and the state after them."""
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({**FLAGS, **flags})
    losses = [trainer.step().loss for _ in range(steps)]
    return losses, optimizer_tensors(trainer)


def whole(ranks: list[tuple[list[float], Saved]]) -> dict[str, torch.Tensor]:
    """The tensors that the ranks wrote together."""
    made: dict[str, torch.Tensor] = {}
    for _, saved in ranks:
        for key, boxes in saved.items():
            for start, shape, values in boxes:
                there = made.setdefault(key, torch.full(shape, torch.nan, dtype=values.dtype))
                there[tuple(slice(a, a + n) for a, n in zip(start, values.shape))] = values
    return made


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
    same = sum(int((found[key] == wanted[key]).sum()) for key in moments)
    assert same / sum(wanted[key].numel() for key in moments) > 0.99


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=EITHER))
def test_a_layout_rounds_as_one_rank_does(gloo: Any, once: Any, layout: str) -> None:
    ranks, changes = LAYOUTS[layout]
    require_rounded_alike(
        once(1, trained, flags=BF16_MOMENTS), gloo.run(ranks, trained, flags={**BF16_MOMENTS, **changes})
    )


@pytest.mark.parametrize("changes", [{}, {"use_distributed_optimizer": True}], ids=["plain", "distributed optimizer"])
def test_packed_main_weights_train_as_fp32_ones_to_the_bit(gloo: Any, changes: dict[str, Any]) -> None:
    flags = {"bf16": True, **changes}
    ranks = 2 if changes else 1
    plain = gloo.run(ranks, trained, flags=flags, steps=15)
    packed = gloo.run(ranks, trained, flags={**flags, **PACKED}, steps=15)
    assert packed[0][0] == plain[0][0]
    assert any(".state.param." in key for key in whole(packed))
    require_same_bits(plain, packed)


def stopped(flags: dict[str, Any], folder: str) -> tuple[None, Saved]:
    """A run of two steps that is saved, and its state."""
    from megatron_moe.checkpoint.save import begin, target
    from megatron_moe.checkpoint.state import Trained, TrainingProgress
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({**FLAGS, **flags, "save": folder})
    for _ in range(2):
        trainer.step()
    trained = Trained(trainer.model, trainer.optimizer, trainer.scheduler, trainer.groups)
    progress = TrainingProgress(iteration=2, consumed_samples=16)
    saving = begin(trainer.run, trained, progress, target(trainer.run), facts={})
    for stage in (saving.write, saving.exchange, saving.publish, saving.conclude):
        stage()
    return None, optimizer_tensors(trainer)


def resumed(flags: dict[str, Any], folder: str, steps: int = STEPS - 2) -> tuple[list[float], Saved]:
    """Losses of the steps after those of a saved run, and the state after them."""
    from megatron_moe.checkpoint.load import load
    from megatron_moe.checkpoint.plan import plan
    from megatron_moe.checkpoint.state import Trained
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({**FLAGS, **flags, "load": folder})
    source = plan(trainer.run).source
    assert source is not None
    load(trainer.run, source, Trained(trainer.model, trainer.optimizer, trainer.scheduler, trainer.groups))
    for _ in range(2 * 8 // (trainer.run.training.micro_batch_size * trainer.groups.dp.size())):
        next(trainer.batches[0])
    losses = [trainer.step().loss for _ in range(steps)]
    return losses, optimizer_tensors(trainer)


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
    saved = once(2, stopped, flags=flags, folder=str(folder))
    require_same_bits(saved, gloo.run(ranks, resumed, flags={**flags, **changes}, folder=str(folder), steps=0))


RESUMED = {
    "one rank, codes": (1, {"bf16": True, **CODES}, {}),
    "distributed optimizer, codes": (2, {"bf16": True, **CODES, "use_distributed_optimizer": True}, {}),
    "ZeRO 2, codes": (2, {"bf16": True, **CODES, "data_parallel_sharding_strategy": "optim_grads"}, {}),
    "ZeRO 3, bf16": (2, {**BF16_MOMENTS, "use_torch_fsdp2": True}, {}),
    "fp16, codes": (1, {"fp16": True, "initial_loss_scale": 256.0, **CODES}, {}),
    "offload, codes": (1, {"bf16": True, **CODES, "optimizer_cpu_offload": True}, {}),
    "from fp32 masters to packed ones": (1, {"bf16": True, "use_precision_aware_optimizer": False}, PACKED),
}


@pytest.mark.parametrize("name", rows(RESUMED, test=["distributed optimizer, codes", "ZeRO 2, codes"]))
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(gloo: Any, tmp_path: Any, name: str) -> None:
    ranks, flags, others = RESUMED[name]
    require_resumed_to_the_bit(gloo, tmp_path / "run", ranks, flags, **others)


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=["DP2, distributed optimizer"]))
def test_a_checkpoint_is_the_same_to_the_bit_on_every_layout(gloo: Any, once: Any, folder: Any, layout: str) -> None:
    require_loaded_to_the_bit(gloo, once, folder, {"bf16": True, **BF16_MOMENTS}, LAYOUTS[layout])


def copies(flags: dict[str, Any]) -> list[str]:
    """The weights whose copies differ after a few steps: with other moments they would soon."""
    from megatron_moe.checkpoint.state import Trained
    from megatron_moe.training.optimizer import mains_of, parts
    from megatron_moe.training.replicas import compare_replicas
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({**FLAGS, "lr": 1e-1, "lr_warmup_init": 1e-1, **flags})
    for _ in range(STEPS):
        trainer.step()
    adams = [part.optimizer for part in parts(trainer.optimizer)]
    for parameter, main in mains_of(trainer.model, trainer.optimizer):
        for adam in (one for one in adams if main in one.state):
            parameter.data.copy_(adam.values_of(main, "exp_avg_sq").view(parameter.shape))
    found = compare_replicas(Trained(trainer.model, trainer.optimizer, trainer.scheduler, trainer.groups))
    return [difference.name for difference in found]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}),
    ],
    ids=["TP2 x DP2", "tied embeddings"],
)
def test_copies_of_a_weight_are_rounded_alike(gloo: Any, ranks: int, changes: dict[str, Any]) -> None:
    assert gloo.run(ranks, copies, flags={**BF16_MOMENTS, **changes}) == [[]] * ranks
