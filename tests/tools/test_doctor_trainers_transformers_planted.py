"""The doctor on transformers with errors planted in the installed release: its models, its Trainer, and torch's DDP.

The doctor compares two runs of the same trainer, so it cannot see an error that both make. `NOT_VISIBLE` lists such
errors; its test fails once the doctor finds one.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.engine.patching import replaced
from megatron_moe_tools.doctor.trainers import rank
from tests.helpers.rows import rows
from tests.tools.test_doctor_trainers_ranks import fork_ranks
from tests.tools.test_doctor_trainers_transformers import found_in


def run_planted(argument: dict[str, Any], plant: str) -> str:
    """Run a request on this rank, with an error planted."""
    planted = (PLANTED | NOT_VISIBLE)[plant]
    with planted.plant():
        return rank.run_into(argument)


@dataclass(frozen=True)
class Planted:
    """An error: how it is planted, part of the cause to name, the check that finds it, and the model and settings."""

    plant: Callable[[], AbstractContextManager]
    cause: str
    check: str = "layout"
    kind: str = "qwen3_moe"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NotVisible:
    """An error that no check finds, and why."""

    plant: Callable[[], AbstractContextManager]
    reason: str
    kind: str = "qwen3_moe"
    settings: dict[str, Any] = field(default_factory=dict)


# ---- Errors, a few lines each.


def around(owner: str, name: str, new: Callable[..., Any]) -> AbstractContextManager:
    """Call new(old, ...) in place of a function of the module or class that `owner` names."""
    holder = resolve_name(owner)
    old = vars(holder)[name]
    if isinstance(old, staticmethod):
        return replaced([holder], **{name: staticmethod(partial(new, old.__func__))})
    return replaced([holder], **{name: lambda *given, **options: new(old, *given, **options)})


def on_ranks() -> bool:
    return dist.get_world_size() > 1


MODELS = "transformers.models"
QWEN = f"{MODELS}.qwen3_moe.modeling_qwen3_moe"
DEEPSEEK = f"{MODELS}.deepseek_v3.modeling_deepseek_v3"
TRAINER = "transformers.trainer:Trainer"
DDP = "torch.nn.parallel:DistributedDataParallel"


def reduced_by(hook: Callable[[Tensor], Tensor], mean: bool = True) -> AbstractContextManager:
    """Let DDP sum what `hook` makes of a bucket's gradients, and divide."""

    def reduce(_, bucket):  # DDP refuses other annotations than its own
        sent = hook(bucket.buffer() / (dist.get_world_size() if mean else 1))
        return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: done.value()[0])

    def new(old: Any, wrapper: Any, *given: Any, **options: Any) -> None:
        old(wrapper, *given, **options)
        wrapper.register_comm_hook(None, reduce)

    return around(DDP, "__init__", new)


def summed_gradients() -> AbstractContextManager:
    return reduced_by(lambda gradients: gradients, mean=False)


def gradients_sent_in_bf16() -> AbstractContextManager:
    return reduced_by(lambda gradients: gradients.bfloat16().float())


def not_reduced(pattern: str) -> Callable[[], AbstractContextManager]:
    def new(old: Any, wrapper: Any, model: Any, *given: Any, **options: Any) -> None:
        names = [name for name, _ in model.named_parameters() if re.search(pattern, name)]
        type(wrapper)._set_params_and_buffers_to_ignore_for_model(model, names)
        old(wrapper, model, *given, **options)

    return lambda: around(DDP, "__init__", new)


def scaled(pattern: str, factor: float) -> Callable[[], AbstractContextManager]:
    """Scale gradients on ranks, as a collective over a wrong group would: before Trainer clips them."""

    def new(old: Any, *given: Any) -> Any:
        for name, weight in given[-1].named_parameters():
            if re.search(pattern, name) and weight.grad is not None and on_ranks():
                weight.grad *= factor
        return old(*given)

    return lambda: around(TRAINER, "_clip_grad_norm", new)


def scaled_in_a_plain_loop(pattern: str, factor: float) -> Callable[[], AbstractContextManager]:
    def new(old: Any, model: Any) -> Any:
        for name, weight in model.named_parameters():
            if re.search(pattern, name) and on_ranks():
                weight.grad *= factor
        return old(model)

    return lambda: around("megatron_moe_tools.doctor.trainers.transformers_target", "_gradients", new)


def mean_of_micro_batches() -> AbstractContextManager:
    return around(TRAINER, "_get_num_items_in_batch", lambda *_: None)


def mean_of_ranks() -> AbstractContextManager:
    def new(old: Any, trainer: Any, *given: Any) -> Any:
        with replaced([trainer.args], average_tokens_across_devices=False):
            return old(trainer, *given) * dist.get_world_size()

    return around(TRAINER, "_get_num_items_in_batch", new)


def loss_not_multiplied() -> AbstractContextManager:
    return around(
        TRAINER, "compute_loss", lambda old, *given, **options: old(*given, **options) / dist.get_world_size()
    )


def loss_of_one_rank_logged() -> AbstractContextManager:
    return around("transformers.trainer", "nested_gather", lambda old, tensor, *_: tensor)


def labels_moved(by: int) -> Callable[[], AbstractContextManager]:
    def new(old: Any, logits: Tensor, labels: Tensor, *given: Any, **options: Any) -> Tensor:
        return old(logits, labels.roll(by), *given, **options)

    return lambda: around("transformers.loss.loss_utils", "fixed_cross_entropy", new)


def padding_in_the_auxiliary_loss() -> AbstractContextManager:
    return around(QWEN, "load_balancing_loss_func", lambda old, gates, experts, k, *_: old(gates, experts, k))


def auxiliary_loss_of_one_layer() -> AbstractContextManager:
    def new(old: Any, gates: Any, *given: Any) -> Any:
        return old(gates[:1] if on_ranks() else gates, *given)

    return around(QWEN, "load_balancing_loss_func", new)


def documents_together() -> AbstractContextManager:
    return around(QWEN, "create_causal_mask", lambda old, **options: old(**{**options, "position_ids": None}))


def not_causal() -> AbstractContextManager:
    return around(QWEN, "create_causal_mask", lambda old, **options: torch.zeros_like(old(**options)))


def attention_mask_ignored() -> AbstractContextManager:
    return around(QWEN, "create_causal_mask", lambda old, **options: old(**{**options, "attention_mask": None}))


def another_window(everywhere: bool) -> Callable[[], AbstractContextManager]:
    def new(old: Any, config: Any, **options: Any) -> Any:
        with replaced([config], sliding_window=config.sliding_window - (everywhere or on_ranks())):
            return old(config=config, **options)

    return lambda: around(f"{MODELS}.gpt_oss.modeling_gpt_oss", "create_sliding_window_causal_mask", new)


def local_norm() -> AbstractContextManager:
    def new(_: Any, __: Any, weights: Any, most: float, *___: Any) -> Tensor:
        weights = list(weights)
        shard = [weight.grad for weight in weights[dist.get_rank() :: dist.get_world_size()]]
        norm = torch.nn.utils.get_total_norm(shard)
        torch.nn.utils.clip_grads_with_norm_(weights, most, norm)
        return norm

    return around("accelerate:Accelerator", "clip_grad_norm_", new)


def clipped_per_micro_batch() -> AbstractContextManager:
    def new(old: Any, trainer: Any, model: Any, *given: Any) -> Tensor:
        loss = old(trainer, model, *given)
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        return loss

    return around(TRAINER, "training_step", new)


def learning_rate_times_ranks() -> AbstractContextManager:
    def new(old: Any, *given: Any) -> Any:
        kind, options = old(*given)
        return kind, {**options, "lr": options["lr"] * dist.get_world_size()}

    return around(TRAINER, "get_optimizer_cls_and_kwargs", new)


def not_loaded(owner: str) -> Callable[[], AbstractContextManager]:
    return lambda: around(owner, "load_state_dict", lambda *_, **__: None)


def schedule_times_ranks() -> AbstractContextManager:
    def new(old: Any, schedule: Any, *given: Any) -> None:
        for _ in range(dist.get_world_size() if schedule.last_epoch >= 0 else 1):
            old(schedule, *given)

    return around("torch.optim.lr_scheduler:LRScheduler", "step", new)


def gradients_not_zeroed() -> AbstractContextManager:
    return around("torch.nn:Module", "zero_grad", lambda *_, **__: None)


def router_in_bf16(everywhere: bool) -> Callable[[], AbstractContextManager]:
    def new(old: Any, router: Any, hidden: Tensor) -> Any:
        return old(router, hidden.bfloat16().float() if everywhere or on_ranks() else hidden)

    return lambda: around(f"{QWEN}:Qwen3MoeTopKRouter", "forward", new)


def weights_not_renormalised() -> AbstractContextManager:
    def new(old: Any, router: Any, config: Any) -> None:
        old(router, config)
        router.norm_topk_prob = not on_ranks()

    return around(f"{QWEN}:Qwen3MoeTopKRouter", "__init__", new)


def router_detached() -> AbstractContextManager:
    def new(old: Any, *given: Any) -> Any:
        logits, weights, chosen = old(*given)
        return logits, weights.detach(), chosen

    return around(f"{QWEN}:Qwen3MoeTopKRouter", "forward", new)


def capacity_of_the_largest_weights() -> AbstractContextManager:
    def new(old: Any, *given: Any) -> Any:
        logits, weights, chosen = old(*given)
        of_expert = torch.zeros_like(logits).scatter(1, chosen, weights)
        least = of_expert.topk(4, dim=0).values[-1]
        return logits, weights * (weights >= least[chosen]), chosen

    return around(f"{QWEN}:Qwen3MoeTopKRouter", "forward", new)


def bias_in_bf16() -> AbstractContextManager:
    def new(old: Any, router: Any, hidden: Tensor) -> Any:
        if on_ranks():
            router.e_score_correction_bias.copy_(router.e_score_correction_bias.bfloat16())
        return old(router, hidden)

    return around(f"{DEEPSEEK}:DeepseekV3TopkRouter", "forward", new)


def bias_not_used(everywhere: bool) -> Callable[[], AbstractContextManager]:
    def new(old: Any, router: Any, hidden: Tensor) -> Any:
        bias = router.e_score_correction_bias
        router.e_score_correction_bias = bias * (0 if everywhere or on_ranks() else 1)
        try:
            return old(router, hidden)
        finally:
            router.e_score_correction_bias = bias

    return lambda: around(f"{DEEPSEEK}:DeepseekV3TopkRouter", "forward", new)


def a_token_dropped() -> AbstractContextManager:
    def new(old: Any, block: Any, hidden: Tensor) -> Tensor:
        kept = torch.ones_like(hidden[:, :, :1])
        kept[:, 1] = not on_ranks()
        return old(block, hidden) * kept

    return around(f"{QWEN}:Qwen3MoeSparseMoeBlock", "forward", new)


def a_token_lost_on_the_way_back() -> AbstractContextManager:
    def new(old: Any, *given: Any) -> Tensor:
        found = old(*given)
        kept = torch.ones_like(found[:, :1])
        kept[1] = 0
        return found * kept

    return around("transformers.distributed.expert_parallel:AllToAllEP", "_combine_tokens", new)


def recomputed_from_other_inputs() -> AbstractContextManager:
    def new(old: Any, block: Any, hidden: Tensor) -> Tensor:
        in_backward = torch._C._current_graph_task_id() != -1
        return old(block, hidden * (1.01 if in_backward else 1.0))

    return around(f"{QWEN}:Qwen3MoeSparseMoeBlock", "forward", new)


EP, TP = {"ep_size": 2, "fsdp_size": 2}, {"tp_size": 2}
PLANTED = {
    "gradients summed": Planted(summed_gradients, "every weight, 2 times as large"),
    "gradients sent in bf16": Planted(gradients_sent_in_bf16, "a gradient that ranks exchange"),
    "experts not reduced": Planted(not_reduced(r"\.experts\."), "it is not averaged over the ranks"),
    "experts x EP": Planted(scaled_in_a_plain_loop(r"\.experts\.", 2), "experts' gradients are summed", settings=EP),
    "router / DP": Planted(
        scaled(r"\.gate\.", 0.5), "the router's gradient is summed or averaged over the wrong group"
    ),
    "shared expert's gradient twice": Planted(
        scaled_in_a_plain_loop(r"shared_experts", 2), "shared expert", kind="deepseek_v3", settings=TP
    ),
    "tied embeddings' gradient twice": Planted(
        scaled("embed_tokens", 2), "if they are tied, twice (of model.embed_tokens.weight, 2 times", kind="tied"
    ),
    "mean of micro-batches": Planted(mean_of_micro_batches, "weighed alike", "micro-batches"),
    "mean of ranks": Planted(mean_of_ranks, "over different numbers of tokens"),
    "loss not multiplied": Planted(loss_not_multiplied, "every weight, 0.5 times as large: 1 / DP"),
    "one rank's loss logged": Planted(loss_of_one_rank_logged, "is logged otherwise than it is used"),
    "labels not shifted": Planted(labels_moved(1), "labels are not shifted", "later-tokens"),
    "labels shifted twice": Planted(labels_moved(-1), "labels are shifted twice", "token-before"),
    "padding in the auxiliary loss": Planted(
        padding_in_the_auxiliary_loss, "padded tokens are", "padding", settings={"router_aux_loss_coef": 0.05}
    ),
    "auxiliary loss of one layer": Planted(
        auxiliary_loss_of_one_layer, "an auxiliary loss", settings={"router_aux_loss_coef": 0.05}
    ),
    "documents together": Planted(
        documents_together, "does not tell documents apart", "documents", settings={"packing": True}
    ),
    "not causal": Planted(not_causal, "the mask is not causal", "later-tokens"),
    "another window": Planted(another_window(False), "other inputs of the router", kind="gpt_oss"),
    "local norm": Planted(local_norm, "gradients are right, their norm is not", settings={"max_grad_norm": 0.1}),
    "clipped per micro-batch": Planted(
        clipped_per_micro_batch, "clipped or reduced one by one", "micro-batches", settings={"max_grad_norm": 0.1}
    ),
    "learning rate x ranks": Planted(learning_rate_times_ranks, "the update is not"),
    "schedule x ranks": Planted(schedule_times_ranks, "the update is not"),
    "moments not loaded": Planted(
        not_loaded("accelerate.optimizer:AcceleratedOptimizer"), "part of the state is not saved", "resume", "llama"
    ),
    "gradients not zeroed": Planted(gradients_not_zeroed, "part of the state is not saved", "resume", "llama"),
    "router in bf16 on ranks": Planted(router_in_bf16(False), "the forward pass differs"),
    "weights not renormalised": Planted(weights_not_renormalised, "the forward pass differs"),
    "router detached": Planted(router_detached, "detached", "gradients"),
    "capacity of the largest weights": Planted(
        capacity_of_the_largest_weights, "a capacity lets later tokens displace earlier ones", "later-tokens"
    ),
    "expert bias in bf16": Planted(bias_in_bf16, "expert_bias is not", kind="deepseek_v3", settings=TP),
    "expert bias not used on ranks": Planted(
        bias_not_used(False), "tokens go to other experts", kind="deepseek_v3", settings=TP
    ),
    "a token dropped": Planted(a_token_dropped, "the forward pass differs"),
    "a token lost on the way back": Planted(a_token_lost_on_the_way_back, "the forward pass differs", settings=EP),
    "recomputed from other inputs": Planted(
        recomputed_from_other_inputs, "recomputed from other inputs", settings={"activation_checkpointing": True}
    ),
}
NOT_VISIBLE = {
    "router in bf16 everywhere": NotVisible(
        router_in_bf16(True), "one process rounds alike; transformers has no other router to compare with"
    ),
    "expert bias not used anywhere": NotVisible(
        bias_not_used(True), "one process chooses alike", kind="deepseek_v3"
    ),
    "another window everywhere": NotVisible(another_window(True), "one process has the same window", kind="gpt_oss"),
    "schedule not loaded": NotVisible(
        not_loaded("torch.optim.lr_scheduler:LambdaLR"),
        "the optimizer's state holds the second step's learning rate; a third step is not trained",
        kind="llama",
    ),
    "attention mask ignored": NotVisible(
        attention_mask_ignored, "rows are padded behind, where no trained token looks: nothing trained changes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", rows(PLANTED, test=["labels shifted twice", "gradients summed"]))
def test_a_planted_error_is_found_and_its_cause_is_named(name, gloo, tmp_path, monkeypatch, capsys):
    fork_ranks(monkeypatch, gloo, tmp_path, run_planted, plant=name)
    one = PLANTED[name]
    wrong, found = found_in(one.kind, one.settings, tmp_path, one.check)
    assert wrong == {one.check}, capsys.readouterr().out
    assert any(one.cause in text for text in found[one.check]["causes"]), capsys.readouterr().out


@pytest.mark.parametrize("name", rows(NOT_VISIBLE, test=["attention mask ignored"]))
def test_an_error_that_every_process_makes_is_not_visible(name, gloo, tmp_path, monkeypatch, capsys):
    fork_ranks(monkeypatch, gloo, tmp_path, run_planted, plant=name)
    one = NOT_VISIBLE[name]
    checks = ["later-tokens", "token-before", "padding", "padding-contents", "micro-batches", "layout", "gradients"]
    if one.kind == "llama":  # an expert is never restored, a fault of transformers
        checks.append("resume")
    wrong, _ = found_in(one.kind, one.settings, tmp_path, *checks)
    assert wrong == set(), capsys.readouterr().out
