"""A program's own callbacks: what they see and change, and that one rank's wish or error is every rank's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.config.errors import RunFault
from tests.helpers.trained_steps import SMALL, trained


def accompanied(flags: dict[str, Any], ends_at: int, fails_in: str) -> dict[str, Any]:
    """A run whose gradients a callback sets to 0 in its second step; rank 1 alone ends it, or fails."""
    from megatron_moe.training.callback import Callback

    seen: list[Any] = []
    second_rank = torch.distributed.get_rank() == 1

    def act(hook: str) -> None:
        if hook == fails_in and second_rank:
            raise ValueError("of this rank")

    class Own(Callback):
        def before_step(self, step: Any) -> None:
            act("before_step")

        def before_update(self, step: Any) -> None:
            act("before_update")
            self.tokens = torch.cat([batch["tokens"] for batch in step.micro_batches[0]])
            if step.iteration == 2:
                for parameter in self.trainer.trained.model[0].parameters():
                    parameter.main_grad.zero_()

        def after_step(self, step: Any, result: Any) -> None:
            seen.append((step.iteration, list(self.tokens.shape), result.grad_norm > 0, step.record.loss))
            if second_rank and step.iteration == ends_at:
                self.trainer.end_run("(loss is good enough)")

        def close(self) -> None:
            seen.append("closed")

    error = ""
    try:
        trained({**SMALL, "num_layers": 1, "moe_layer_freq": "[1]", "train_iters": 5, **flags}, Own())
    except RunFault as fault:
        error = str(fault)
    return {"seen": seen, "error": error}


def test_a_callback_reads_the_step_changes_gradients_and_ends_the_run_saved(gloo: Any, tmp_path: Path) -> None:
    flags = {"global_batch_size": 4, "save": str(tmp_path)}
    first, second = gloo.run(2, accompanied, flags=flags, ends_at=3, fails_in="")
    assert first == second and first["error"] == ""
    assert [step[:3] for step in first["seen"][:-1]] == [(1, [2, 16], True), (2, [2, 16], False), (3, [2, 16], True)]
    assert first["seen"][-1] == "closed" and len({loss for *_, loss in first["seen"][:-1]}) == 3
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]


@pytest.mark.parametrize("hook", ["before_step", "before_update"])
def test_what_a_callback_raises_on_one_rank_ends_the_run_on_all(gloo: Any, hook: str) -> None:
    for told in gloo.run(2, accompanied, flags={}, ends_at=0, fails_in=hook):
        assert told["error"] == f"the callback's Own.{hook} failed: ValueError: of this rank (rank 1)"
        assert told["seen"] == ["closed"]
