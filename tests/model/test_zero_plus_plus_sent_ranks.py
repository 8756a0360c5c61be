"""What ZeRO++ never rounds: router weights, norms, biases, and the modules that `--keep-fp32` names."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

KEPT = ("decoder.layers.0.self_attention", "decoder.layers.1.mlp.experts")
FLAGS = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "bf16": True,
    "keep_fp32": KEPT,
    "moe_shared_expert_gate": True,
}


def gathered(flags: dict[str, Any]) -> set[str]:
    """The weights that the model computes with as the shards have them, bit for bit."""
    from megatron_moe.model.float16_module import without_wrappers
    from tests.helpers.stepped_trainer import Trainer

    (chunk,) = Trainer({**FLAGS, **flags}).model
    own: Any = dict(chunk.named_parameters())
    exact = {name: one.full_tensor().to(one.gathered_dtype) for name, one in own.items()}
    return {without_wrappers(name) for name, weight in chunk.gathered() if weight.equal(exact[name])}


def reduced(flags: dict[str, Any]) -> dict[str, Any]:
    """The reduced gradients of a first step: this rank's shards."""
    from unittest import mock

    from megatron_moe.model.float16_module import without_wrappers
    from megatron_moe.model.fully_sharded import FullyShardedDataParallel
    from tests.helpers.stepped_trainer import Trainer

    found = {}
    reduce = FullyShardedDataParallel.finish_grad_sync

    def seen(self: Any, *args: Any, **named: Any) -> None:
        reduce(self, *args, **named)
        found.update({without_wrappers(name): one.main_grad.clone() for name, one in self.named_parameters()})

    trainer = Trainer({**FLAGS, **flags})
    with mock.patch.object(FullyShardedDataParallel, "finish_grad_sync", seen):
        assert trainer.step().committed
    return found


def test_router_weights_norms_and_kept_modules_are_sent_as_they_are(gloo: Any) -> None:
    wanted = gloo.run(2, reduced, flags={})
    found = gloo.run(2, reduced, flags={"zero_quantized_gradients": "int8"})
    weights = gloo.run(2, gathered, flags={"zero_quantized_weights": True})
    names = set(wanted[0])
    kept = {one for one in names if one.startswith(KEPT) or one.endswith((".router.weight", ".gate_weight"))}
    kept |= {one for one in names if "norm" in one or one.endswith(".bias")}
    assert {len(kept & {one}) for one in names} == {0, 1} and any(one.endswith(".gate_weight") for one in kept)
    for rank in range(2):
        assert weights[rank] == kept
        # Of two ranks a sum has the same bits in either order.
        assert {name for name in names if found[rank][name].equal(wanted[rank][name])} == kept
