"""Packed optimizer state over layouts, precisions and checkpoints: one rank is the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import stepped_trainer as steps
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, PP2, STORED, TP2, ZERO_2, ZERO_3, trained, whole
from tests.training import layout_cases
from tests.training.layout_cases import FEW, OFFLOAD, PACKED

BF16 = {"bf16": True, **FEW}
BF16_MOMENTS = {**FEW, **layout_cases.BF16_MOMENTS}
CODES = {**BF16, **layout_cases.CODES}
EVERY = {**layout_cases.EVERY, "offload": (1, OFFLOAD)}


@pytest.mark.parametrize("layout", rows(EVERY, test=["DP2, distributed optimizer", "DP2, ZeRO 3", "TP2", "PP2"]))
def test_a_layout_rounds_as_one_rank_does(gloo: Any, once: Any, layout: str) -> None:
    ranks, changes = EVERY[layout]
    one = once(1, trained, flags=BF16_MOMENTS)
    steps.require_rounded_alike(one, gloo.run(ranks, trained, flags={**BF16_MOMENTS, **changes}))


@pytest.mark.engine
@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, DISTRIBUTED)], ids=["plain", "distributed optimizer"])
def test_packed_main_weights_train_as_fp32_ones_to_the_bit(gloo: Any, ranks: int, changes: dict[str, Any]) -> None:
    flags = {**BF16, **changes}
    plain = gloo.run(ranks, trained, flags=flags, steps=4)
    packed = gloo.run(ranks, trained, flags={**flags, **PACKED}, steps=4)
    assert packed[0][0] == plain[0][0]
    assert any(".state.param." in key for key in whole(packed))
    steps.require_same_bits(plain, packed)


RESUMED = {
    "one rank, codes": (1, CODES, {}),
    "distributed optimizer, codes": (2, {**CODES, **DISTRIBUTED}, {}),
    "ZeRO 2, codes, average": (2, {**CODES, **ZERO_2, "ema_decay": 0.75}, {}),
    "ZeRO 3, bf16": (2, {**BF16_MOMENTS, **ZERO_3}, {}),
    "fp16, codes": (1, {**CODES, "bf16": False, "fp16": True, "initial_loss_scale": 256.0}, {}),
    "offload, codes": (1, {**CODES, **OFFLOAD}, {}),
    "from fp32 masters to packed ones": (1, BF16, PACKED),
}


@pytest.mark.parametrize("name", rows(RESUMED, test=["ZeRO 2, codes, average", "from fp32 masters to packed ones"]))
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(gloo: Any, tmp_path: Any, name: str) -> None:
    ranks, flags, others = RESUMED[name]
    steps.require_resumed_to_the_bit(gloo, tmp_path / "run", ranks, flags, **others)


@pytest.mark.parametrize("layout", rows(EVERY, test=["DP2, distributed optimizer"]))
def test_a_checkpoint_is_the_same_to_the_bit_on_every_layout(gloo: Any, once: Any, folder: Any, layout: str) -> None:
    steps.require_loaded_to_the_bit(gloo, once, folder, {**BF16, **BF16_MOMENTS}, EVERY[layout])


def copies(flags: dict[str, Any]) -> list[str]:
    """The weights whose copies differ after a few steps: with other moments they would soon."""
    from megatron_moe.training.callbacks.replicas import compare_replicas
    from megatron_moe.training.optimizer import mains_of, parts

    trainer = steps.Trainer({**STORED, "lr": 1e-1, "lr_warmup_init": 1e-1, **flags})
    for _ in range(steps.STEPS):
        trainer.step()
    adams = [part.optimizer for part in parts(trainer.optimizer)]
    for parameter, main in mains_of(trainer.model, trainer.optimizer):
        for adam in (one for one in adams if main in one.state):
            parameter.data.copy_(adam.values_of(main, "exp_avg_sq").view(parameter.shape))
    return [difference.name for difference in compare_replicas(trainer.trained)]


@pytest.mark.parametrize(
    "changes", [TP2, {**PP2, "untie_embeddings_and_output_weights": False}], ids=["TP2", "tied embeddings"]
)
def test_copies_of_a_weight_are_rounded_alike(gloo: Any, changes: dict[str, Any]) -> None:
    assert gloo.run(2, copies, flags={**BF16_MOMENTS, **changes}) == [[]] * 2
