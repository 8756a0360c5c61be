"""The average of the weights: its formula on every layout, and its way through checkpoints."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.rows import rows
from tests.precision.test_packed_state_ranks import CODES, FLAGS, LAYOUTS, PACKED, Saved, whole

pytestmark = pytest.mark.engine

DECAY = 0.75
AVERAGED = {**FLAGS, "ema_decay": DECAY}
BF16 = {"bf16": True}
DISTRIBUTED = {**BF16, "use_distributed_optimizer": True}
ZERO_2 = {**BF16, "data_parallel_sharding_strategy": "optim_grads"}
ZERO_3 = {**BF16, "data_parallel_sharding_strategy": "optim_grads_params"}
OFFLOAD = {"optimizer_cpu_offload": True}
PP2 = {"pipeline_model_parallel_size": 2}
FOUR_LAYERS = {"num_layers": 4, "moe_layer_freq": "[0,1,1,1]"}
TIED = {"untie_embeddings_and_output_weights": False}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank, bf16": (1, BF16),
    **{f"{name}, bf16": (ranks, {**BF16, **flags}) for name, (ranks, flags) in LAYOUTS.items()},
    "fp16": (1, {"fp16": True, "initial_loss_scale": 256.0}),
    "PP2, interleaved": (2, {**BF16, **PP2, "num_layers_per_virtual_pipeline_stage": 1, **FOUR_LAYERS}),
    # Shards begin and end within rows.
    "odd widths, distributed optimizer": (
        2,
        {**DISTRIBUTED, "ffn_hidden_size": 106, "moe_ffn_hidden_size": 40, "q_lora_rank": 37, "kv_lora_rank": 35}
        | {"overlap_grad_reduce": True, "ddp_bucket_size": 2000},
    ),
    "PP2, tied, distributed optimizer": (2, {**DISTRIBUTED, **PP2, **TIED, "mtp_num_layers": 1}),
    "packed, distributed optimizer": (2, {**DISTRIBUTED, **CODES}),
    "packed, offload": (1, {**BF16, **PACKED, **OFFLOAD}),
    "packed, ZeRO 3": (2, {**ZERO_3, **CODES}),
    "DP2, ZeRO 3, offload": (2, {**ZERO_3, **OFFLOAD}),
    "modules in fp32, distributed optimizer": (2, {**DISTRIBUTED, "keep_fp32": ("router", "norms")}),
    "frozen, distributed optimizer": (2, {**DISTRIBUTED, "freeze": ("router", "*.experts.weight1")}),
}
EITHER = [
    "one rank, bf16",
    "TP2, bf16",
    "DP2, ZeRO 3, bf16",
    "EP2, distributed optimizer, bf16",
    "packed, distributed optimizer",
]


def state_of(trainer: Any) -> Any:
    from megatron_moe.checkpoint.state import Trained

    return Trained(trainer.model, trainer.optimizer, trainer.scheduler, trainer.groups, trainer.average)


def tensors_of(trainer: Any) -> Saved:
    """What this rank would write, by key: weights, optimizer and averages."""
    from megatron_moe.checkpoint import dist
    from megatron_moe.checkpoint.state import average_state
    from tests.precision.test_packed_state_ranks import optimizer_tensors

    found = optimizer_tensors(trainer)
    for shard in dist.shards(average_state(state_of(trainer)) if trainer.average is not None else {}):
        if shard.is_main:
            found.setdefault(shard.key, []).append((shard.start, shard.whole, shard.values.clone()))
    return found


def stepped(flags: dict[str, Any], steps: int = 2, piece: int | None = None) -> list[Saved]:
    """The tensors at the start and after each step; at most `piece` elements are averaged at once."""
    from megatron_moe.training import weight_average
    from tests.helpers.stepped_trainer import Trainer

    with pytest.MonkeyPatch.context() as patch:
        if piece is not None:
            patch.setattr(weight_average, "_PIECE", piece)
        trainer = Trainer({**AVERAGED, **flags})
        found = [tensors_of(trainer)]
        for _ in range(steps):
            assert trainer.step().committed
            found.append(tensors_of(trainer))
    return found


def of_main_weights(tensors: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    return tensors.get(f"optimizer.state.param.{key}", tensors[key]).detach()


def averages(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = "optimizer.state.ema."
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def together(ranks: list[Saved]) -> dict[str, torch.Tensor]:
    return whole([([], saved) for saved in ranks])


@pytest.mark.parametrize("case", rows(CASES, test=EITHER))
def test_the_average_is_that_of_the_main_weights_after_each_step(gloo: Any, case: str) -> None:
    ranks, flags = CASES[case]
    results = gloo.run(ranks, stepped, flags=flags)
    steps = [together([result[number] for result in results]) for number in range(3)]
    moments = {key.removeprefix("optimizer.state.exp_avg.") for key in steps[0] if ".exp_avg." in key}
    wanted = {key: of_main_weights(steps[0], key).double() for key in moments}
    for number, tensors in enumerate(steps):
        found = averages(tensors)
        assert found.keys() == moments and len(found) > 20
        for key, value in found.items():
            if number:
                wanted[key] = DECAY * wanted[key] + (1 - DECAY) * of_main_weights(tensors, key).double()
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), wanted[key], rtol=1e-6, atol=1e-8, msg=f"step {number}: {key}")
    moved = [key for key, value in averages(steps[-1]).items() if not value.equal(of_main_weights(steps[-1], key))]
    assert len(moved) > 0.9 * len(moments)


def test_an_average_over_many_steps_is_not_off_by_the_rounding_of_its_decay() -> None:
    from megatron_moe.training.optimizer import OwnedPart
    from megatron_moe.training.weight_average import AveragedWeight, WeightAverage

    generator, decay = torch.Generator().manual_seed(3), 0.9999
    parameter = torch.nn.Parameter(0.5 + torch.rand(256, generator=generator))
    average = WeightAverage(decay, [], SimpleNamespace(is_stub_optimizer=True))  # type: ignore[arg-type]
    values, middle = parameter.detach().clone(), parameter.detach().clone()
    average.weights.append(AveragedWeight(parameter, OwnedPart(None, 0, 256), parameter, values))
    exact = values.double()
    for _ in range(15_000):
        parameter.data = middle + 0.02 * torch.randn(256, generator=generator)
        average.update()
        exact = decay * exact + (1 - decay) * parameter.detach().double()
    assert abs(float((values / exact - 1).mean())) < 1e-6  # 1e-4 where the decay is rounded to fp32


def test_what_is_averaged_piece_by_piece_is_what_is_averaged_at_once(gloo: Any) -> None:
    flags = {**BF16, **PACKED, **OFFLOAD}
    at_once, in_pieces = (gloo.run(1, stepped, flags=flags, piece=piece) for piece in (None, 256))
    wanted, found = (averages(together([result[0][-1]])) for result in (at_once, in_pieces))
    assert found.keys() == wanted.keys() and all(found[key].equal(wanted[key]) for key in wanted)


def skipped() -> tuple[bool, Saved, Saved]:
    """Whether a step whose gradients overflow is committed, and the tensors before and after it."""
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({**AVERAGED, "fp16": True, "initial_loss_scale": 256.0})
    trainer.step()
    before = tensors_of(trainer)
    trainer.optimizer.chained_optimizers[0].grad_scaler._scaler._scale.fill_(2.0**100)
    return trainer.step().committed, before, tensors_of(trainer)


def test_a_step_that_is_not_committed_leaves_the_average(gloo: Any) -> None:
    ((committed, before, after),) = gloo.run(1, skipped)
    first, second = averages(together([before])), averages(together([after]))
    assert not committed and all(first[key].equal(second[key]) for key in first)


def saved(flags: dict[str, Any], folder: str, steps: int = 2, then: int = 0) -> tuple[Saved, Saved]:
    """The tensors of a run when it saved a step, and after further steps."""
    from megatron_moe.checkpoint.save import begin, target
    from megatron_moe.checkpoint.state import TrainingProgress
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({**FLAGS, **flags, "save": folder})
    for _ in range(steps):
        trainer.step()
    progress = TrainingProgress(iteration=steps, consumed_samples=8 * steps)
    saving = begin(trainer.run, state_of(trainer), progress, target(trainer.run), facts={})
    for stage in (saving.write, saving.exchange, saving.publish, saving.conclude):
        stage()
    then_saved = tensors_of(trainer)
    for _ in range(then):
        trainer.step()
    return then_saved, tensors_of(trainer)


def loaded(flags: dict[str, Any], folder: str, steps: int = 0) -> tuple[list[str], Saved]:
    """The notes of a load, and the tensors after it and further steps."""
    from megatron_moe.checkpoint.load import load
    from megatron_moe.checkpoint.plan import plan
    from tests.helpers.stepped_trainer import Trainer

    trainer = Trainer({**FLAGS, **flags, "load": folder})
    if trainer.average is not None:
        for weight in trainer.average.weights:
            weight.values.fill_(math.nan)
    source = plan(trainer.run).source
    assert source is not None
    notes = load(trainer.run, source, state_of(trainer)).notes
    for _ in range(2 * 8 // (trainer.run.training.micro_batch_size * trainer.groups.dp.size())):
        next(trainer.batches[0])
    for _ in range(steps):
        trainer.step()
    return notes, tensors_of(trainer)


MOVES = {
    "ZeRO 1 to one rank": ((2, DISTRIBUTED), (1, BF16)),
    "one rank to ZeRO 1": ((1, BF16), (2, DISTRIBUTED)),
    "TP2 to PP2": ((2, {**BF16, **LAYOUTS["TP2"][1]}), (2, {**BF16, **PP2})),
    "ZeRO 1 x EP2 to TP2 x PP2": (
        (2, {**DISTRIBUTED, "expert_model_parallel_size": 2}),
        (4, {**BF16, **LAYOUTS["TP2 x PP2, distributed optimizer"][1]}),
    ),
    "ZeRO 1 to 3": ((2, DISTRIBUTED), (2, ZERO_3)),
    "ZeRO 3 to packed ZeRO 1": ((2, ZERO_3), (2, {**DISTRIBUTED, **CODES})),
    "packed ZeRO 1 to offload": ((2, {**DISTRIBUTED, **PACKED}), (1, {**BF16, **OFFLOAD})),
    "bf16 to fp32": ((1, BF16), (2, {"use_distributed_optimizer": True})),
    "fp32 to bf16": ((1, {}), (2, DISTRIBUTED)),
}


@pytest.mark.parametrize("move", rows(MOVES, test=["ZeRO 1 x EP2 to TP2 x PP2", "ZeRO 1 to 3"]))
def test_an_average_moves_to_another_layout_to_the_bit(gloo: Any, tmp_path: Any, move: str) -> None:
    (first_ranks, first), (ranks, flags) = MOVES[move]
    before = gloo.run(first_ranks, saved, flags={**first, "ema_decay": DECAY}, folder=str(tmp_path))
    after = gloo.run(ranks, loaded, flags={**flags, "ema_decay": 0.5}, folder=str(tmp_path))
    wanted = averages(together([tensors for tensors, _ in before]))
    found = averages(together([tensors for _, tensors in after]))
    assert found.keys() == wanted.keys() and len(wanted) > 20
    for key in wanted:
        assert found[key].equal(wanted[key]), key


RESUMED = {
    "one rank": (1, BF16),
    "distributed optimizer": (2, DISTRIBUTED),
    "ZeRO 2": (2, ZERO_2),
    "TP2 x PP2, distributed optimizer": (4, {**BF16, **LAYOUTS["TP2 x PP2, distributed optimizer"][1]}),
    "packed": (1, {**BF16, **CODES}),
}


@pytest.mark.parametrize("name", rows(RESUMED, test=["distributed optimizer"]))
def test_a_resumed_run_averages_as_an_uninterrupted_one(gloo: Any, tmp_path: Any, name: str) -> None:
    ranks, flags = RESUMED[name]
    flags = {**flags, "ema_decay": DECAY}
    straight = gloo.run(ranks, saved, flags=flags, folder=str(tmp_path), then=2)
    later = gloo.run(ranks, loaded, flags=flags, folder=str(tmp_path), steps=2)
    wanted, found = (averages(together([tensors for _, tensors in run])) for run in (straight, later))
    assert found.keys() == wanted.keys() and all(found[key].equal(wanted[key]) for key in wanted)


def test_an_average_begins_with_the_weights_of_a_step_without_one(gloo: Any, tmp_path: Any) -> None:
    before = gloo.run(1, saved, flags=BF16, folder=str(tmp_path))
    ((notes, tensors),) = gloo.run(1, loaded, flags={**DISTRIBUTED, "ema_decay": DECAY}, folder=str(tmp_path))
    weights, found = together([before[0][0]]), averages(together([tensors]))
    assert found and all(value.equal(of_main_weights(weights, key)) for key, value in found.items())
    assert any("--ema-decay" in note for note in notes)


def test_a_run_without_an_average_leaves_a_steps_out_and_says_so(gloo: Any, tmp_path: Any) -> None:
    gloo.run(1, saved, flags={**BF16, "ema_decay": DECAY}, folder=str(tmp_path))
    ((notes, tensors),) = gloo.run(1, loaded, flags=BF16, folder=str(tmp_path))
    assert not averages(together([tensors])) and any("--ema-decay" in note for note in notes)
    ((notes, tensors),) = gloo.run(
        1, loaded, flags={**BF16, "ema_decay": DECAY, "no_load_optim": True}, folder=str(tmp_path)
    )
    found = averages(together([tensors]))
    assert found and all(value.isfinite().all() for value in found.values())
