"""The learning rate follows its flags, in committed iterations; kernels for GPUs get no empty or offloaded shards."""

import math
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_moe.config.schema import Run, replace
from megatron_moe.engine.adam import Adam
from megatron_moe.engine.optimizer import parts
from megatron_moe.model.fully_sharded import FullyShardedDataParallel
from megatron_moe.optim.adam import AdamWithMomentsOnHost
from megatron_moe.optim.optimizer import build_scheduler
from megatron_moe.parallel import groups
from tests.helpers.stepped_trainer import ZERO_3, Trainer, digest

pytestmark = pytest.mark.engine


def rates(iterations: int, **flags: object) -> list[float]:
    """The rate that each of the first steps uses."""
    run = replace(Run(), **{"lr": 1.0, "min_lr": 0.1, "train_iters": 20, "weight_decay": 0.5, **flags})
    group = {"wd_mult": 1.0, "max_lr": run.optimizer.lr, "min_lr": run.optimizer.min_lr}
    scheduler = build_scheduler(run, SimpleNamespace(param_groups=[group]))
    used = []
    for _ in range(iterations):
        used.append(group["lr"])
        assert group["weight_decay"] == 0.5
        scheduler.advance(run.training.global_batch_size or 1)
    return used


SHAPES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear warm-up": ({"lr_warmup_iters": 4, "lr_warmup_init": 0.2}, [0.2, 0.4, 0.6, 0.8, 1.0]),
    "warm-up as a share of the decay": ({"lr_warmup_fraction": 0.1, "lr_decay_iters": 40}, [0.0, 0.25, 0.5, 0.75, 1.0]),
    "warm-up of the whole run": ({"lr_warmup_iters": 20}, [n / 19 for n in range(20)]),
    "constant": ({}, [1.0] * 30),
    "linear": ({"lr_decay_style": "linear"}, [*(1.0 - 0.9 * n / 20 for n in range(21)), *[0.1] * 4]),
    "cosine": ({"lr_decay_style": "cosine"}, [0.1 + 0.45 * (1 + math.cos(math.pi * n / 20)) for n in range(21)]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_rate_of_each_step_is_that_of_its_formula(name):
    flags, wanted = SHAPES[name]
    assert rates(len(wanted), **{"lr_decay_style": "constant", **flags}) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("style", "middle"), [("linear", 0.55), ("cosine", 0.55), ("exponential", 0.1 + 0.9 * (math.sqrt(2.0) - 1.0))]
)
def test_wsd_is_stable_and_then_decays(style, middle):
    used = rates(21, lr_decay_style="WSD", lr_wsd_decay_iters=8, lr_wsd_decay_style=style)
    assert used[:13] == [1.0] * 13
    assert used[16] == pytest.approx(middle)
    assert used[20] == pytest.approx(0.1)
    # Over the last tenth, unless told otherwise.
    used = rates(21, lr_decay_style="WSD", lr_wsd_decay_style="linear")
    assert used[18] == 1.0 and used[19] == pytest.approx(0.55) and used[20] == pytest.approx(0.1)


@pytest.mark.parametrize("style", ["cosine", "linear", "WSD"])
def test_a_schedule_in_sequences_goes_by_those_committed_through_any_change_of_batch(style: str) -> None:
    """Also over resumes with another batch, and from a step that counted iterations. The oracle is never resumed."""
    rng = random.Random(style)
    for _ in range(20):
        total, warmup, last = rng.randrange(200, 900), rng.randrange(90), rng.randrange(1, 90)
        flags = {"lr_decay_samples": total, "lr_warmup_samples": warmup, "lr_decay_style": style, "min_lr": 0.1}
        flags |= {"lr_wsd_decay_samples": last, "lr_wsd_decay_style": "linear"} if style == "WSD" else {}
        group = {"wd_mult": 1.0, "max_lr": 1.0, "min_lr": 0.1}
        theirs = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[group]), init_lr=0.0, max_lr=1.0, min_lr=0.1, start_wd=0.0, end_wd=0.0,
            lr_warmup_steps=warmup, lr_decay_steps=total, lr_decay_style=style, wd_incr_steps=total,
            wd_incr_style="constant", wsd_decay_steps=last, lr_wsd_decay_style="linear",
        )  # fmt: skip
        parts = [(rng.choice((2, 4, 8, 24)), rng.choice((None, 3, 40))) for _ in range(4)]
        state: dict[str, Any] | None = None
        steps = samples = 0
        for batch, iters in parts:
            # A part of the run without a length in sequences counts iterations.
            here = flags if iters is None else {"lr_decay_iters": iters, "lr_warmup_iters": 0}
            run = replace(Run(), **{"lr": 1.0, "global_batch_size": batch, "train_iters": 999, **here})
            own = {"wd_mult": 1.0, "max_lr": 1.0, "min_lr": 0.1}
            ours = build_scheduler(run, SimpleNamespace(param_groups=[own]))
            if state is not None:
                ours.load(state, committed_steps=steps, committed_samples=samples)
            taken = [(rng.choice((batch, batch // 2)), rng.random() < 0.8) for _ in range(rng.randrange(1, 20))]
            for size, committed in taken:  # of a step that is left out nothing is counted
                assert own["lr"] == group["lr"] or iters is not None
                if committed:
                    ours.advance(size)
                    theirs.step(increment=size)
            state = ours.state_dict()
            steps += sum(committed for _, committed in taken)
            samples += sum(size for size, committed in taken if committed)


@pytest.mark.parametrize(("unit", "each"), [("iters", 1), ("samples", 8)])
def test_a_schedule_that_begins_anew_leaves_out_what_was_not_committed(unit: str, each: int) -> None:
    """Also in sequences, where the first one counted iterations; `committed` steps of 30 were."""
    committed, flags = 27, {"lr": 1.0, "lr_decay_style": "linear", "train_iters": 90, "global_batch_size": 8}
    first, group = replace(Run(), **flags), {"wd_mult": 1.0, "max_lr": 1.0, "min_lr": 0.0}
    before = build_scheduler(first, SimpleNamespace(param_groups=[group]))
    for _ in range(committed):
        before.advance(8)
    lengths = {f"lr_decay_{unit}": 20 * each, f"lr_warmup_{unit}": 4 * each, "lr_restart_at": 30}
    state, used = before.state_dict(), []
    for step in range(24):
        again = build_scheduler(replace(first, **lengths), SimpleNamespace(param_groups=[group]))
        again.load(state, committed_steps=committed + step, committed_samples=8 * (committed + step))
        used.append(group["lr"])
        again.advance(8)
        state = again.state_dict()
    assert used == pytest.approx([*(n / 4 for n in range(5)), *(1 - n / 16 for n in range(1, 17)), 0, 0, 0])
    assert state["begun"] == {"iteration": 30, "steps": committed, "samples": 8 * committed}
    whole = build_scheduler(replace(first, lr_restart_at=0), SimpleNamespace(param_groups=[group]))
    whole.load(state, committed_steps=51, committed_samples=8 * 51)  # back to the schedule of the run
    assert group["lr"] == pytest.approx(1 - 51 / 90)


def test_lengths_in_iterations_beside_those_in_sequences_are_so_many_batches() -> None:
    flags = {"lr_decay_style": "linear", "global_batch_size": 8}
    mixed = rates(21, **flags, train_samples=167, lr_warmup_iters=2)
    assert mixed == rates(21, **flags, lr_decay_samples=167, lr_warmup_samples=16)
    assert mixed == pytest.approx([0.0, 0.5, *(1.0 - 0.9 * n * 8 / 151 for n in range(19))])


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
