"""The average of the weights: its formula on every layout, and its way through checkpoints."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, STORED, TP2, ZERO_3, Saved, Trainer, stopped, whole
from tests.optim.layout_cases import CODES, EVERY, FEW, OFFLOAD, PACKED

DECAY = 0.75
BF16 = {"bf16": True, **FEW}
ZERO_1 = {**BF16, **DISTRIBUTED}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, BF16),
    **{name: (ranks, {**BF16, **flags}) for name, (ranks, flags) in EVERY.items()},
    "fp16": (1, {**FEW, "fp16": True, "initial_loss_scale": 256.0}),
    # Shards begin and end within rows, and buffers of two dtypes have another order than the optimizer.
    "odd widths, modules in fp32, frozen": (
        2,
        {**ZERO_1, "ffn_hidden_size": 106, "moe_ffn_hidden_size": 40, "q_lora_rank": 37, "kv_lora_rank": 35}
        | {"overlap_grad_reduce": True, "ddp_bucket_size": 2000, "keep_fp32": ("router", "norms")}
        | {"freeze": ("*.experts.weight1",)},
    ),
    "PP2, interleaved, tied": (
        2,
        {**ZERO_1, **PP2, "num_layers": 4, "moe_layer_freq": "[0,1,1,1]", "num_layers_per_virtual_pipeline_stage": 1}
        | {"untie_embeddings_and_output_weights": False, "mtp_num_layers": 1},
    ),
    "packed, offload": (1, {**BF16, **PACKED, **OFFLOAD}),
    "packed, ZeRO 3": (2, {**BF16, **ZERO_3, **CODES}),
    "ZeRO 3, offload": (2, {**BF16, **ZERO_3, **OFFLOAD}),
}


def stepped(flags: dict[str, Any]) -> list[Saved]:
    """The tensors at the start and after each of two steps; of packed weights few elements are averaged at once."""
    from megatron_moe.optim import weight_average

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_average, "_PIECE", 256)
        trainer = Trainer({**STORED, "ema_decay": DECAY, **flags})
        found = [trainer.tensors()]
        for _ in range(2):
            assert trainer.step().committed
            found.append(trainer.tensors())
    return found


def of_main_weights(tensors: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    return tensors.get(f"optimizer.state.param.{key}", tensors[key])


def averages(ranks: list[Saved]) -> dict[str, torch.Tensor]:
    """The averages that the ranks wrote together."""
    prefix = "optimizer.state.ema."
    tensors = whole([(None, saved) for saved in ranks])
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def require_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(wanted) > 20
    for key in wanted:
        assert found[key].equal(wanted[key]), key


@pytest.mark.parametrize(
    "case", rows(CASES, test=["odd widths, modules in fp32, frozen", "packed, ZeRO 3", "packed, offload"])
)
def test_the_average_is_that_of_the_main_weights_after_each_step(gloo: Any, case: str) -> None:
    ranks, flags = CASES[case]
    results = gloo.run(ranks, stepped, flags=flags)
    wanted: dict[str, torch.Tensor] = {}
    for number, saved in enumerate(zip(*results)):
        tensors, found = whole([(None, of_rank) for of_rank in saved]), averages(list(saved))
        assert found.keys() == {key.partition(".exp_avg.")[2] for key in tensors if ".exp_avg." in key}
        assert len(found) > 20
        for key, value in found.items():
            main = of_main_weights(tensors, key).double()
            wanted[key] = DECAY * wanted[key] + (1 - DECAY) * main if number else main
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), wanted[key], rtol=1e-6, atol=1e-8, msg=f"step {number}: {key}")
    moved = [key for key, value in found.items() if not value.equal(of_main_weights(tensors, key))]
    assert len(moved) > 0.9 * len(found)


def test_an_average_over_many_steps_is_not_off_by_the_rounding_of_its_decay() -> None:
    from megatron_moe.engine.optimizer import OwnedPart
    from megatron_moe.optim.weight_average import AveragedWeight, WeightAverage

    generator, decay = torch.Generator().manual_seed(3), 0.9999
    parameter = torch.nn.Parameter(0.5 + torch.rand(256, generator=generator))
    average = WeightAverage(decay, [], SimpleNamespace(is_stub_optimizer=True))  # type: ignore[arg-type]
    values, middle = parameter.detach().clone(), parameter.detach().clone()
    average.weights.append(AveragedWeight(parameter, OwnedPart(None, 0, 256), parameter, None, values))
    exact = values.double()
    for _ in range(3_000):
        parameter.data = middle + 0.02 * torch.randn(256, generator=generator)
        average.update()
        exact = decay * exact + (1 - decay) * parameter.detach().double()
    assert abs(float((values / exact - 1).mean())) < 1e-6  # 3e-5 where the decay is rounded to fp32


def skipped() -> tuple[bool, Saved, Saved]:
    """Whether a step whose gradients overflow is committed, and the tensors before and after it."""
    trainer = Trainer({**STORED, "ema_decay": DECAY, "fp16": True, "initial_loss_scale": 256.0})
    trainer.step()
    before = trainer.tensors()
    trainer.optimizer.chained_optimizers[0].grad_scaler._scaler._scale.fill_(2.0**100)
    return trainer.step().committed, before, trainer.tensors()


def test_a_step_that_is_not_committed_leaves_the_average(gloo: Any) -> None:
    ((committed, before, after),) = gloo.run(1, skipped)
    assert not committed
    require_equal(averages([after]), averages([before]))


def loaded(flags: dict[str, Any], folder: str) -> tuple[list[str], Saved]:
    """The notes of a load, and the tensors after it."""
    trainer = Trainer({**STORED, **flags, "load": folder})
    if trainer.average is not None:
        for weight in trainer.average.weights:
            weight.values.fill_(math.nan)
    return trainer.load(), trainer.tensors()


MOVES = {
    "TP2 to PP2": ((2, {**BF16, **TP2}), (2, {**BF16, **PP2})),
    "ZeRO 1 x EP2 to TP2 x PP2": ((2, {**ZERO_1, **EP2}), (4, {**ZERO_1, **TP2, **PP2})),
    "ZeRO 1 to 3": ((2, ZERO_1), (2, {**BF16, **ZERO_3})),
    "ZeRO 3 to packed ZeRO 1": ((2, {**BF16, **ZERO_3}), (2, {**ZERO_1, **CODES})),
    "packed ZeRO 1 to offload": ((2, {**ZERO_1, **PACKED}), (1, {**BF16, **OFFLOAD})),
    "fp32 to bf16": ((1, FEW), (2, ZERO_1)),
}


@pytest.mark.parametrize("move", rows(MOVES, test=["TP2 to PP2", "ZeRO 3 to packed ZeRO 1"]))
def test_an_average_moves_to_another_layout_to_the_bit(gloo: Any, tmp_path: Any, move: str) -> None:
    (first_ranks, first), (ranks, flags) = MOVES[move]
    before = gloo.run(first_ranks, stopped, flags={**first, "ema_decay": DECAY}, folder=str(tmp_path))
    after = gloo.run(ranks, loaded, flags={**flags, "ema_decay": 0.5}, folder=str(tmp_path))
    require_equal(averages([saved for _, saved in after]), averages([saved for _, saved in before]))


def test_an_average_begins_with_the_weights_of_a_step_without_one(gloo: Any, tmp_path: Any) -> None:
    before = gloo.run(1, stopped, flags=BF16, folder=str(tmp_path))
    ((notes, tensors),) = gloo.run(1, loaded, flags={**ZERO_1, "ema_decay": DECAY}, folder=str(tmp_path))
    weights, found = whole(before), averages([tensors])
    assert found and all(value.equal(of_main_weights(weights, key)) for key, value in found.items())
    assert any("--ema-decay" in note for note in notes)


def test_a_run_without_an_average_leaves_a_steps_out_and_says_so(gloo: Any, tmp_path: Any) -> None:
    averaged = {**BF16, "ema_decay": DECAY}
    gloo.run(1, stopped, flags=averaged, folder=str(tmp_path))
    ((notes, tensors),) = gloo.run(1, loaded, flags=BF16, folder=str(tmp_path))
    assert not averages([tensors]) and any("--ema-decay" in note for note in notes)
    ((notes, tensors),) = gloo.run(1, loaded, flags={**averaged, "no_load_optim": True}, folder=str(tmp_path))
    found = averages([tensors])
    assert found and all(value.isfinite().all() for value in found.values())
