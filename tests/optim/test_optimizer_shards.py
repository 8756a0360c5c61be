"""Shards in the engine's optimizers: kernels for GPUs get neither empty lists nor what is offloaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_moe.engine.adam import Adam
from megatron_moe.engine.optimizer import parts
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.optim.adam import AdamWithMomentsOnHost
from megatron_moe.parallel import groups
from tests.helpers.stepped_trainer import ZERO_3, Trainer, digest

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {"num_layers": 2, "moe_layer_freq": 1, "seq_length": 32, "micro_batch_size": 8}
STAGE_3 = {**SIZES, **ZERO_3}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("offload", [False, True])
def test_a_step_in_fp16_and_its_health_call_no_kernel_of_apex(monkeypatch: pytest.MonkeyPatch, offload: bool) -> None:
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as engine_optimizer

    from megatron_moe.training.gradients import part_grad_norms

    trainer = Trainer({**STAGE_3, "fp16": True, "initial_loss_scale": 256.0, "optimizer_cpu_offload": offload})
    wanted = float(trainer.optimizer.get_grad_norm())
    # Kernels of Transformer Engine or apex want lists of tensors in a GPU's memory, with one tensor at least.
    refusing = mock.Mock(side_effect=AssertionError)
    for module in (clip_grads, engine_optimizer):
        monkeypatch.setattr(module, "multi_tensor_applier", refusing)
    result = trainer.step()
    assert result.committed and wanted == 0.0
    dense, experts = part_grad_norms(trainer.optimizer)
    assert dense > 0 and experts > 0
    trainer.optimizer.reload_model_params()  # as a load of weights without moments does


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("stage", "precision"), [("no_shard", {}), ("no_shard", {"fp16": True}), ("optim", {"bf16": True})]
)
def test_moments_on_the_host_train_the_same_model(stage: str, precision: dict[str, bool]) -> None:
    flags = {**SIZES, "data_parallel_sharding_strategy": stage, **precision}
    digests = []
    for offload in (False, True):
        trainer = Trainer({**flags, "initial_loss_scale": 256.0, "optimizer_cpu_offload": offload})
        kinds = {type(part.optimizer) for part in parts(trainer.optimizer)}
        assert kinds == {AdamWithMomentsOnHost if offload else Adam}
        for _ in range(2):
            assert trainer.step().committed
        digests.append(digest([list(chunk.parameters()) for chunk in trainer.model]))
        groups.destroy()
    assert digests[0] == digests[1]


def test_a_factor_on_the_device_scales_gradients_on_the_host() -> None:
    with FakeTensorMode():
        weights = [SimpleNamespace(main_grad=torch.ones(2, 3)) for _ in range(2)]
        FullyShardedDataParallel.scale_gradients(SimpleNamespace(_weights=weights), torch.ones(1, device="cuda"))  # type: ignore[arg-type]
        assert {weight.main_grad.device.type for weight in weights} == {"cpu"}


@pytest.mark.usefixtures("one_process")
def test_experts_compute_in_the_gathered_dtype_under_an_autocast() -> None:
    from megatron_moe.training.evaluate import evaluation_mode
    from megatron_moe.training.step import forward_step

    trainer = Trainer({**STAGE_3, "bf16": True})
    batch = next(trainer.batches[0])
    losses = []
    for enabled in (False, True):
        with evaluation_mode(trainer.model), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses.append(forward_step(iter([batch]), trainer.model[0])[0])
    assert torch.isfinite(losses[1]).all() and torch.allclose(losses[0], losses[1], rtol=2e-2)
