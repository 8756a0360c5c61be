"""Ranks that were given different flags are told so before they build anything."""

from __future__ import annotations

import torch.distributed as dist

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, replace
from megatron_moe.parallel import groups


def refusal(odd_rank: int) -> str:
    """One rank asks for fp16 where the others ask for bf16."""
    mine = {"fp16": True} if dist.get_rank() == odd_rank else {"bf16": True}
    try:
        groups.initialize(replace(Run(), **mine))
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_fp16_on_one_rank_and_bf16_on_the_others_is_refused_on_all(gloo):
    wanted = (
        "all ranks need the same flags: --bf16 is False on rank 1 and True on rank 0; --fp16 is True on rank 1 and "
        "False on rank 0; start every node with the same command"
    )
    assert gloo.run(2, refusal, odd_rank=1) == [wanted] * 2
    assert gloo.run(2, refusal, odd_rank=-1) == ["accepted"] * 2
