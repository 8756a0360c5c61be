"""A step is counted and weighed alike on all ranks, and one without a token that counts leaves every bit as it was."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, SMALL, Trainer, digest


def overflows() -> list[list[float]]:
    """The loss scales in fp16 with gradients of the dense weights alone overflowing, three times."""
    from megatron_moe.engine.optimizer import parts

    flags = {**EP2, "fp16": True, "initial_loss_scale": 1024.0, "hysteresis": 2}
    trainer = Trainer({**SMALL, "seq_length": 32, "micro_batch_size": 4, **flags})
    param = next(p for name, p in trainer.model[0].named_parameters() if "final_layernorm" in name)
    hook = param.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    seen = []
    for _ in range(3):
        assert not trainer.step().committed
        seen.append([part.get_loss_scale().item() for part in parts(trainer.optimizer)])
    hook.remove()
    assert trainer.step().committed
    return seen


@pytest.mark.engine
def test_dense_and_expert_optimizers_keep_one_loss_scale(gloo):
    # hysteresis 2: the first overflow is forgiven
    assert gloo.run(2, overflows) == [[[1024.0] * 2, [512.0] * 2, [256.0] * 2]] * 2


def evaluated() -> dict[str, Any]:
    """A split whose ranks keep different numbers of tokens, and what evaluation leaves behind."""
    from megatron_moe.training.evaluate import evaluate

    trainer = Trainer({**SMALL, **EP2, "hidden_dropout": 0.1})
    trainer.step()
    rank = torch.distributed.get_rank()
    seen = []

    def masked() -> Any:
        for number, batch in enumerate(trainer.batches[0]):
            mask = torch.zeros_like(batch["loss_mask"])
            mask[:, : 5 + 20 * rank + number] = 1.0
            seen.append({**batch, "loss_mask": mask})
            yield seen[-1]

    before, generator = trainer.state(), digest(torch.get_rng_state())
    record = evaluate(
        trainer.model, [masked()], split="valid", iteration=1, num_micro_batches=2, micro_batch_size=2, seq_length=64,
        pg_collection=trainer.groups,
    )  # fmt: skip
    unchanged = before == trainer.state() and generator == digest(torch.get_rng_state())
    training = all(module.training for module in trainer.model[0].modules())
    trainer.model[0].eval()
    with torch.no_grad():
        losses = [trainer.model[0](b["tokens"], b["position_ids"], None, labels=b["labels"]) for b in seen[:2]]
    sums = [float((loss.double() * b["loss_mask"].double()).sum()) for loss, b in zip(losses, seen)]
    kept = int(sum(b["loss_mask"].sum() for b in seen[:2]))
    told = {"loss": record.loss, "tokens": record.tokens, "sum": sum(sums), "kept": kept}
    return {**told, "unchanged": unchanged, "training": training}


def test_evaluation_weighs_every_token_alike_and_leaves_no_trace(gloo):
    ranks = gloo.run(2, evaluated)
    total, tokens = sum(rank["sum"] for rank in ranks), sum(rank["kept"] for rank in ranks)
    assert tokens == 2 * (5 + 6 + 25 + 26)
    for rank in ranks:
        assert rank["tokens"] == tokens
        assert rank["loss"] == pytest.approx(total / tokens, rel=1e-6)
        assert rank["unchanged"] and rank["training"]


def masked_steps(flags: dict[str, Any]) -> dict[str, Any]:
    """A step, one whose tokens are all masked, and one whose first micro-batch is: what they report and change."""
    from megatron_moe.optim.optimizer import shared_loss_scale

    def state() -> dict[str, str]:
        scale = shared_loss_scale(trainer.optimizer)
        return {**trainer.state(), "loss scale": digest(None if scale is None else scale.state_dict())}

    losses = {"moe_aux_loss_coeff": (0.1,), "moe_router_load_balancing_type": ("seq_aux_loss",)}
    trainer = Trainer({**SMALL, "seq_length": 32, "micro_batch_size": 4, **losses, **flags})
    take, taken, masked = type(trainer.batches[0]).__next__, [0], range(0)

    def next_batch(iterator: Any) -> Any:
        batch = take(iterator)
        if taken[0] in masked and batch["loss_mask"] is not None:
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        taken[0] += 1
        return batch

    seen = {}
    with mock.patch.object(type(trainer.batches[0]), "__next__", next_batch):
        for name, number in (("none", 0), ("all", 100), ("the first", 1), ("none again", 0)):
            taken[0], masked = 0, range(number)
            before = state()
            result = trainer.step()
            after = state()
            changed = sorted(kind for kind in before if before[kind] != after[kind])
            seen[name] = (result.committed, result.empty, result.overflow, result.tokens > 0, changed)
    return seen


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, {"fp16": True, "initial_loss_scale": 1024.0, "loss_scale_window": 2}),
        (2, {**EP2, **DISTRIBUTED, "bf16": True, "calculate_per_token_loss": True, "micro_batch_size": 2}),
        (2, {**PP2, "moe_layer_freq": "[1,1]", "mtp_num_layers": 1}),
        (2, {"context_parallel_size": 2, "cross_entropy_loss_fusion": True}),
    ],
    ids=["fp16", "EP2, loss per token", "PP2, MTP", "CP2"],
)
def test_a_batch_without_a_token_that_counts_changes_nothing(gloo, ranks, flags):
    moved = ["bias", "main weights", "moments", "schedule", "steps", "weights"]
    fp16 = ["loss scale"] if flags.get("fp16") else []
    for seen in gloo.run(ranks, masked_steps, flags=flags):
        assert seen.pop("all") == (False, True, False, False, [])
        for result in seen.values():
            assert result == (True, False, False, True, sorted(moved + fp16))
