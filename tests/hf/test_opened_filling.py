"""A model's tensors are written in full, once, with finite numbers, or the checkpoint is refused."""

from __future__ import annotations

import pytest
import torch

from megatron_moe.config.errors import ConfigError
from megatron_moe.hf.opened import fill
from megatron_moe.hf.source import Block

pytestmark = pytest.mark.engine


def held() -> dict[str, torch.Tensor]:
    return {"table": torch.ones(8, 2), "experts": torch.ones(3, 2, 2), "bias": torch.ones(4)}


def blocks() -> list[Block]:
    return [
        Block("table", (0, 0), torch.full((6, 2), 1.5), "embed"),
        *(Block("experts", (e, 0, 0), torch.full((1, 2, 2), float(e)), f"expert {e}") for e in range(3)),
        Block("bias", (0,), torch.arange(4, dtype=torch.bfloat16), "bias"),
    ]


def filled(found: list[Block]) -> dict[str, torch.Tensor]:
    tensors = held()
    fill(tensors, found, "FOLDER", {"table": 5})
    return tensors


def refused(found: list[Block]) -> str:
    with pytest.raises(ConfigError, match="^FOLDER: ") as error:
        filled(found)
    return str(error.value)


def test_blocks_go_to_their_places_and_what_pads_a_table_is_zero() -> None:
    tensors = filled(blocks())
    assert tensors["table"][:, 0].tolist() == [1.5] * 5 + [0.0] * 3
    assert tensors["experts"][:, 0, 0].tolist() == [0, 1, 2]
    assert tensors["bias"].dtype == torch.float32
    assert tensors["bias"].tolist() == [0, 1, 2, 3]


def test_a_table_may_come_in_parts_of_which_one_is_padding_alone() -> None:
    found = [block for block in blocks() if block.key != "table"]
    parts = [Block("table", (row, 0), torch.full((4, 2), float(row)), f"rows {row}") for row in (0, 4, 8)]
    assert filled([*found, *parts])["table"][:, 1].tolist() == [0.0] * 4 + [4.0] + [0.0] * 3


@pytest.mark.parametrize("left_out", range(5))
def test_a_block_that_is_left_out_is_told(left_out: int) -> None:
    found = blocks()
    gone = found.pop(left_out)
    assert f"not written once: {gone.key} (" in refused(found)


def test_a_block_that_comes_twice_is_told() -> None:
    assert "not written once: experts (16 of 12 elements)" in refused([*blocks(), blocks()[2]])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block("other", (0,), torch.ones(4), "thing"), "thing: the model has no tensor other"),
        (
            Block("bias", (1,), torch.ones(4), "thing"),
            "thing: [4] at [1] is not within bias, which has the shape [4]",
        ),
        (Block("bias", (0, 0), torch.ones(2, 2), "thing"), "thing: [2, 2] at [0, 0] is not within bias"),
        (Block("bias", (0,), torch.tensor([0, 1, 2, torch.nan]), "thing"), "thing contains NaN or infinity"),
        (Block("bias", (0,), torch.tensor([0, 1, 2, -torch.inf]), "thing"), "thing contains NaN or infinity"),
    ],
)
def test_a_block_that_cannot_be_one_is_told(block: Block, message: str) -> None:
    assert message in refused([*blocks()[:-1], block])
