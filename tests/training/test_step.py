"""A step is applied on all ranks or on none, and one that is not leaves every bit as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import Trainer, digest

pytestmark = pytest.mark.engine

EP2 = {"expert_model_parallel_size": 2, "num_layers": 2, "moe_layer_freq": "[0,1]"}


def poisoned_steps(flags: dict[str, Any]) -> dict[str, Any]:
    """At each site: a step, one that the last rank alone spoils, and what has changed."""
    trainer = Trainer(flags)
    spoils = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    seen = {}
    for site in ("loss", "mlp.experts", "final_layernorm"):
        good = trainer.step()
        before = trainer.state()
        hooks = []
        if spoils and site == "loss":
            hooks = [trainer.model[0].register_forward_hook(lambda _module, _inputs, losses: losses * float("nan"))]
        elif spoils:
            param = next(p for name, p in trainer.model[0].named_parameters() if site in name)
            hooks = [param.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))]
        bad = trainer.step()
        after = trainer.state()
        for hook in hooks:
            hook.remove()
        seen[site] = [good.committed, bad.committed, [name for name in before if before[name] != after[name]]]
    trainer.step()
    seen["moved by a good step"] = {name for name in after if after[name] != trainer.state()[name]}
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("distributed_optimizer", rows([False, True], test=[True]))
def test_a_step_that_one_rank_spoils_changes_nothing_on_any_rank(gloo, precision, distributed_optimizer):
    flags = {**EP2, "use_distributed_optimizer": distributed_optimizer, "initial_loss_scale": 1024.0}
    if precision != "fp32":
        flags[precision] = True
    for seen in gloo.run(2, poisoned_steps, flags=flags):
        # The state that is compared is all that moves, or the comparison would show nothing.
        assert seen.pop("moved by a good step") == {"weights", "main weights", "moments", "steps", "schedule", "bias"}
        assert seen == {site: [True, False, []] for site in ("loss", "mlp.experts", "final_layernorm")}


def overflows() -> dict[str, Any]:
    """fp16 with gradients of the dense weights alone overflowing, three times."""
    from megatron_moe.training.optimizer import parts

    trainer = Trainer({**EP2, "fp16": True, "initial_loss_scale": 1024.0, "hysteresis": 2})
    param = next(p for name, p in trainer.model[0].named_parameters() if "final_layernorm" in name)
    hook = param.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    seen = []
    for _ in range(3):
        assert not trainer.step().committed
        seen.append([part.get_loss_scale().item() for part in parts(trainer.optimizer)])
    hook.remove()
    assert trainer.step().committed
    return {"scales": seen}


def test_dense_and_expert_optimizers_keep_one_loss_scale(gloo):
    for rank in gloo.run(2, overflows):
        # hysteresis 2: the first overflow is forgiven
        assert rank["scales"] == [[1024.0, 1024.0], [512.0, 512.0], [256.0, 256.0]]


def evaluated() -> dict[str, Any]:
    """A split whose ranks keep different numbers of tokens, and what evaluation leaves behind."""
    from megatron_moe.training.evaluate import evaluate

    trainer = Trainer({**EP2, "hidden_dropout": 0.1})
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
    return {
        "loss": record.loss,
        "tokens": record.tokens,
        "sum": sum(sums),
        "kept": int(sum(b["loss_mask"].sum() for b in seen[:2])),
        "unchanged": unchanged,
        "training": training,
    }


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
    from megatron_moe.training.optimizer import shared_loss_scale

    def state() -> dict[str, str]:
        scale = shared_loss_scale(trainer.optimizer)
        return {**trainer.state(), "loss scale": digest(None if scale is None else scale.state_dict())}

    trainer = Trainer({"moe_aux_loss_coeff": (0.1,), "moe_router_load_balancing_type": ("seq_aux_loss",), **flags})
    take, taken, masked = type(trainer.batches[0]).__next__, [0], range(0)

    def next_batch(iterator: Any) -> Any:
        batch = take(iterator)
        if taken[0] in masked and batch["loss_mask"] is not None:
            batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        taken[0] += 1
        return batch

    type(trainer.batches[0]).__next__ = next_batch
    try:
        seen = {}
        for name, number in (("none", 0), ("all", 100), ("the first", 1), ("none again", 0)):
            taken[0], masked = 0, range(number)
            before = state()
            result = trainer.step()
            after = state()
            changed = sorted(kind for kind in before if before[kind] != after[kind])
            seen[name] = (result.committed, result.empty, result.overflow, result.tokens > 0, changed)
    finally:
        type(trainer.batches[0]).__next__ = take
    return seen


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, {}, marks=pytest.mark.test_all),
        (1, {"fp16": True, "initial_loss_scale": 1024.0, "loss_scale_window": 2}),
        pytest.param(1, {"bf16": True, "calculate_per_token_loss": True}, marks=pytest.mark.test_all),
        (2, {**EP2, "use_distributed_optimizer": True, "bf16": True}),
        (2, {"pipeline_model_parallel_size": 2, "mtp_num_layers": 1}),
        (2, {"context_parallel_size": 2, "cross_entropy_loss_fusion": True}),
    ],
    ids=["fp32", "fp16", "loss per token", "EP2", "PP2, MTP", "CP2"],
)
def test_a_batch_without_a_token_that_counts_changes_nothing(gloo, ranks, flags):
    moved = ["bias", "main weights", "moments", "schedule", "steps", "weights"]
    fp16 = ["loss scale"] if flags.get("fp16") else []
    for seen in gloo.run(ranks, masked_steps, flags=flags):
        assert seen.pop("all") == (False, True, False, False, [])
        for result in seen.values():
            assert result == (True, False, False, True, sorted(moved + fp16))
