"""An overflow or a NaN, wherever it arises and on whichever rank, leaves no trace: no step is applied, on any rank."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, SMALL, TP2, Trainer
from tests.training.fault_cases import SITES


def injected(flags: dict[str, Any]) -> dict[str, Any]:
    """At each site: was the step applied, and what has changed; one rank spoils, with an infinity or a NaN."""
    trainer = Trainer({**SMALL, "seq_length": 32, **flags})
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    good = [trainer.step().committed]
    seen: dict[str, Any] = {}
    for number, (name, site) in enumerate(SITES.items()):
        before = trainer.state()
        value = (float("inf"), float("nan"))[number % 2]
        with site(trainer, value) if rank == number // 2 % world else nullcontext():
            applied = trainer.step().committed
        after = trainer.state()
        seen[name] = [applied, [part for part in before if before[part] != after[part]]]
        good.append(trainer.step().committed)
    moved = {part for part, digest in trainer.state().items() if digest != after[part]}
    return {"good": good, "seen": seen, "moved by a good step": moved}


FP16 = {"fp16": True, "initial_loss_scale": 1024.0, "min_loss_scale": 1024.0}
# One micro-batch for each data-parallel rank.
CASES = {
    "fp32": (1, {"micro_batch_size": 8}),
    "fp16, EP2, distributed optimizer": (2, {**FP16, **EP2, **DISTRIBUTED, "micro_batch_size": 4}),
    "bf16, TP2, ETP1": (2, {"bf16": True, **TP2, **EP2, "expert_tensor_parallel_size": 1, "micro_batch_size": 8}),
}


@pytest.mark.engine
@pytest.mark.parametrize("case", CASES)
def test_an_overflow_or_nan_on_one_rank_leaves_every_bit_of_every_rank(gloo: Any, case: str) -> None:
    ranks, flags = CASES[case]
    for result in gloo.run(ranks, injected, flags=flags):
        assert result["good"] == [True] * (len(SITES) + 1)
        assert result["seen"] == {site: [False, []] for site in SITES}
        # The state that is compared is all that moves, or the comparison would show nothing.
        moved = {"weights", "main weights", "moments", "steps", "schedule", "bias"}
        assert result["moved by a good step"] == moved
