"""ZeRO's stages 2 and 3 where ranks differ: experts without tokens, masks, steps that are not applied, evaluations."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_moe.engine.optimizer import parts
from megatron_moe.model.float16_module import without_wrappers
from megatron_moe.model.fully_sharded import FullyShardedDataParallel, local, shard_of
from megatron_moe.moe.router import routers
from megatron_moe.training.evaluate import evaluation_mode
from megatron_moe.training.run import _quiet_engine
from megatron_moe.training.step import forward_step
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import SMALL, Trainer

STAGES = ("optim", "optim_grads", "optim_grads_params")
STEPS = {"fp32": 2, "fp16": 3}
"""Steps: fp16 finds its scale in the first."""
UNGROUPED = {"moe_router_num_groups": None, "moe_router_group_topk": None}
ONE_RANKS_EXPERTS = {
    **UNGROUPED,
    "num_layers": 3,
    "moe_layer_freq": "[0,1,1]",
    "expert_model_parallel_size": 2,
    "micro_batch_size": 1,
    "moe_router_bias_update_rate": 0.0,
}


def trained(flags: dict[str, Any], steps: int) -> list[tuple[Any, ...]]:
    """What a few steps did, and an evaluation after each, where the experts of one rank get all tokens."""
    trainer = Trainer(flags)
    for router in routers(trainer.model):
        router.expert_bias[: trainer.run.moe.moe_router_topk] = 1e4

    class Masked(type(trainer.dataset)):  # type: ignore[misc]
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            sample = super().__getitem__(index)
            mask = sample["loss_mask"].clone()
            mask[: 3 + 5 * dist.get_rank()] = 0
            return {**sample, "loss_mask": mask}

    trainer.dataset.__class__ = Masked
    said = []
    for _ in range(steps):
        result = trainer.step()
        counts = [one.tolist() for one in result.router_update.tokens_per_expert]
        with evaluation_mode(trainer.model):
            output, _ = forward_step(iter([next(trainer.batches[0])]), trainer.model[0])
        if flags.get("data_parallel_sharding_strategy", "optim") != "optim":
            # Nothing stays gathered: a save or a comparison of replicas that follows sees shards.
            assert all(isinstance(weight, DTensor) for weight in trainer.model[0].parameters())
        evaluated = output.double().sum()
        dist.all_reduce(evaluated)
        said.append((result.committed, result.loss, result.grad_norm, result.loss_scale, counts, float(evaluated)))
    return said


CROWDS = [("fp16", "optim_grads_params"), ("fp16", "optim_grads"), ("fp16", "optim"), ("fp32", "optim_grads_params")]


@pytest.mark.parametrize(("dtype", "stage"), rows(CROWDS, test=CROWDS[:1]))
def test_all_tokens_on_one_ranks_experts_train_as_with_whole_weights(gloo: Any, once: Any, dtype, stage) -> None:
    # fp16 begins at a scale at which the first step overflows, on the ranks with tokens alone.
    scale = {"initial_loss_scale": 2.0**21, "hysteresis": 1, "loss_scale_window": 2}
    flags = {**ONE_RANKS_EXPERTS, **({"fp16": True, **scale} if dtype == "fp16" else {})}
    wanted, *_ = once(4, trained, flags=flags, steps=STEPS[dtype])
    assert all(sum(layer[2:]) == 0 and sum(layer) > 0 for *_, counts, _ in wanted for layer in counts), (
        "the experts of one rank have all tokens"
    )
    applied = [committed for committed, *_ in wanted]
    assert all(applied) if dtype == "fp32" else applied == [False, True, True]
    tolerance = 1e-6 if dtype == "fp32" else 2e-3
    staged = {**flags, "data_parallel_sharding_strategy": stage}
    for found in gloo.run(4, trained, flags=staged, steps=STEPS[dtype]):
        for got, meant in zip(found, wanted, strict=True):
            assert got[0] == meant[0] and got[3:5] == meant[3:5]
            assert [got[1], got[5]] == pytest.approx([meant[1], meant[5]], rel=tolerance)
            assert not meant[0] or got[2] == pytest.approx(meant[2], rel=tolerance)


# Three ranks, and nothing that three divides: the last rank has no element of a router or of an expert.
UNEVEN = {
    **SMALL,
    **UNGROUPED,
    "seq_length": 16,
    "num_experts": 4,
    "make_vocab_size_divisible_by": 1,
    "micro_batch_size": 1,
    "global_batch_size": 6,
    "moe_shared_expert_gate": True,
    "adam_eps": 1e-6,
}


def uneven(stage: str | None) -> dict[str, Any]:
    """What `steps_of` returns, and each warning: of views that nobody changes there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _quiet_engine()
        warnings.warn("of a test", stacklevel=1)
        found = steps_of(stage)
    return {**found, "warned": [str(one.message) for one in caught]}


def steps_of(stage: str | None) -> dict[str, Any]:
    """Losses and norms of steps of two micro-batches, the weights after them, and each weight's decay."""
    trainer = Trainer({**UNEVEN, **({} if stage is None else {"data_parallel_sharding_strategy": stage})})
    said = []
    for evaluations in (2, 1):
        result = trainer.step()
        said += [result.loss, result.grad_norm]
        for _ in range(evaluations):
            with evaluation_mode(trainer.model):
                forward_step(iter([next(trainer.batches[0])]), trainer.model[0])
    (chunk,) = trainer.model
    sharded = isinstance(chunk, FullyShardedDataParallel)
    decay = {
        id(weight): (group["wd_mult"], group["is_expert_parallel"])
        for part in parts(trainer.optimizer)
        for group in part.optimizer.param_groups
        for weight in group["params"]
    }
    own = dict(chunk.named_parameters())
    updated = {name: decay.get(id(shard_of(one) if sharded else one)) for name, one in own.items()}
    whole = {name: one.detach().clone() for name, one in (chunk.gathered() if sharded else own.items())}
    return {
        "said": said,
        "weights": {without_wrappers(name): weight for name, weight in whole.items()},
        "decay": {without_wrappers(name): kind for name, kind in updated.items() if kind is not None},
        "empty": {without_wrappers(name) for name, one in own.items() if not local(one).numel()},
    }


@pytest.mark.parametrize("stage", rows(STAGES[1:], test=STAGES[2:]))
def test_sizes_that_do_not_divide_and_accumulated_gradients_train_as_whole_weights(gloo, once, stage: str) -> None:
    wanted, *_ = once(3, uneven, stage=None)
    ranks = gloo.run(3, uneven, stage=stage)
    for found in ranks:
        assert found["said"] == pytest.approx(wanted["said"], rel=1e-6)
        for name, weight in wanted["weights"].items():
            assert float((found["weights"][name] - weight).abs().max()) < 1e-5, name
        # Norms and biases do not decay; a shard that is empty is nobody's to update.
        assert found["decay"].keys() | found["empty"] == wanted["decay"].keys()
        assert found["decay"].items() <= wanted["decay"].items() and not found["decay"].keys() & found["empty"]
        assert "of a test" in found["warned"] and not any("view tensor" in text for text in found["warned"])
    assert any("experts.weight" in name for name in ranks[2]["empty"]) and ranks[0]["empty"] == set()
    assert {decay for name, (decay, _) in wanted["decay"].items() if "norm" in name} == {0.0}


def gathered_sizes(flags: dict[str, Any]) -> list[tuple[torch.Size, torch.Size]]:
    """The sizes of each weight, in one piece and as it says of itself."""
    weights = [weight.detach() for weight in Trainer(flags).model[0].parameters()]
    return [(weight.full_tensor().shape, weight.shape) for weight in weights]


def test_a_run_after_another_in_one_process_gathers_over_its_own_groups(gloo: Any) -> None:
    """Its meshes look like those before; its groups are others."""
    flags = {"expert_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"}
    for further in ({}, {"context_parallel_size": 2}):
        for sizes in gloo.run(4, gathered_sizes, flags={**SMALL, **flags, **further}):
            assert all(whole == said for whole, said in sizes)
