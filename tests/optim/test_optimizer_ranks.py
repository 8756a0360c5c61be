"""What a step does to every weight: gradients by autograd alone, clipping, schedule and AdamW in fp64.

The gradient is that of the loss as it is defined, of this model's forward pass, without the engine's schedule, buffers
or reduction. Epsilon is of the size of the gradients and all gradients are clipped: else Adam's update would be the
same for any multiple of them, and neither the threshold nor a scale could be seen.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from tests.helpers import model_cases
from tests.helpers.errors import relative
from tests.model import mtp_cases
from tests.numbers.reference_adamw import AdamW, clipped, joint_norm, learning_rate

pytestmark = pytest.mark.engine

STEPS = 3
# A step of warm-up, the peak, and one of the decay.
RATES: dict[str, Any] = {"lr_warmup_init": 2e-3, "lr": 1e-2, "min_lr": 1e-3, "lr_warmup_iters": 1, "lr_decay_iters": 3}
RATES["lr_decay_style"] = "cosine"
ADAM = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-3, "weight_decay": 0.3, "clip_grad": 0.2}
# fp16's loss scale doubles after every second step.
SCALES = {"initial_loss_scale": 1024.0, "loss_scale_window": 2}
FLAGS = {**RATES, **ADAM, **SCALES, "micro_batch_size": 1, "train_iters": 9}
DISTRIBUTED = {"use_distributed_optimizer": True}
PER_TOKEN = {"calculate_per_token_loss": True}
FURTHER = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.7}
SIZES = {"seq_length": 16, "hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4}
EXPERTS = {**PRESETS["tiny"], **SIZES, "moe_layer_freq": "[0,1]", "moe_ffn_hidden_size": 24, "init_method_std": 0.1}
EXPERTS |= {"moe_shared_expert_gate": True}
BIASED = {**SIZES, "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True, "add_bias_linear": True}
BIASED |= {"moe_ffn_hidden_size": None, "init_method_std": 0.2}
# model, ranks, flags: each pair of precision, ranks, optimizer and kind of loss once
CASES = {
    "experts, fp16, per token": (EXPERTS, 1, {"fp16": True, **PER_TOKEN}),
    "experts, bf16, distributed optimizer": (EXPERTS, 1, {"bf16": True, **DISTRIBUTED}),
    "experts, DP2, bf16, packed": (EXPERTS, 2, {"bf16": True, "use_precision_aware_optimizer": True, **DISTRIBUTED}),
    "experts, DP2, distributed optimizer, per token": (EXPERTS, 2, {**DISTRIBUTED, **PER_TOKEN}),
    "experts, DP2, fp16, further predictions": (EXPERTS, 2, {"fp16": True, **FURTHER}),
    "experts, DP2": (EXPERTS, 2, {}),
    "biases and norms, DP2, bf16, per token": (BIASED, 2, {"bf16": True, **PER_TOKEN}),
}
# Gradients are rounded to the model's dtype, and may be rounded the other way where a sum's order differs.
TOLERANCE = {"bf16": 2e-3, "fp16": 2e-3}


Batches = list[dict[str, torch.Tensor]]


def batches_of(run: Run, pg: Any) -> Batches:
    """This rank's micro-batches, with unequally many tokens that have a loss."""
    micro_batches = mtp_cases.share_of_global_batch(run, pg)
    for number, batch in enumerate(micro_batches):
        batch["loss_mask"] = batch["loss_mask"].clone()
        batch["loss_mask"][:, : 1 + 3 * number + pg.dp.rank()] = 0
    return micro_batches


def what_a_step_should_see(model: Any, batches: Batches, run: Run, scale: float) -> dict[str, Any]:
    """fp64 gradients over all ranks' micro-batches: of the mean over the tokens that have a loss, or of the mean over
    micro-batches of that, times the loss scale on the way; and the losses, each a mean over its tokens."""
    per_token = run.optimizer.calculate_per_token_loss
    named = dict(model.named_parameters())
    total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
    sums = torch.zeros(2 + 2 * (run.model.mtp_num_layers or 0), dtype=torch.float64)
    left = {name: parameter.main_grad.clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.main_grad.zero_()
    for batch in batches:
        mask = {"loss_mask": batch["loss_mask"]} if run.model.mtp_num_layers else {}
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **mask)
        losses = losses * batch["loss_mask"]
        sums[:2] += torch.stack([losses.detach().double().sum(), batch["loss_mask"].double().sum()])
        if mask:
            sums[2:] += model.further_losses.flatten()
            model.further_losses = None
        loss = losses.sum() * scale
        loss = loss if per_token else loss / batch["loss_mask"].sum() / len(batches)
        # The gradients of `backward` would go into the engine's buffers.
        for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values()))):
            if gradient.is_sparse:  # zeros: the product that makes it has added it to the buffer
                gradient = named[name].main_grad.clone()
                named[name].main_grad.zero_()
            total[name] += gradient.double() / scale
    for name, parameter in named.items():
        parameter.main_grad.copy_(left[name])  # which the step has to clear
    for tensor in (sums, *total.values()):
        dist.all_reduce(tensor)
    divisor = sums[1] if per_token else dist.get_world_size()
    loss, *further = (sums[::2] / sums[1::2]).tolist()
    return {
        "gradients": {name: g / divisor for name, g in total.items()},
        "losses": {"loss": loss, "tokens": int(sums[1]), **{f"depth {n}": x for n, x in enumerate(further)}},
    }


def optimizer_state(chunk: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Master weights and moments by name of the weight, put together from the ranks' shards."""
    from megatron_moe.checkpoint.state import unwrapped
    from megatron_moe.engine.optimizer import parts
    from megatron_moe.optim.optimizer import main_param, named_main_params, named_optimizer_state, owned_part

    names = {id(p): name for name, p in unwrapped(chunk).named_parameters()}
    sharded = any(hasattr(part, "model_param_gbuf_map") for part in parts(optimizer))
    state: dict[str, dict[str, torch.Tensor]] = {"main param": {}, "exp_avg": {}, "exp_avg_sq": {}}
    stored = [found for found in named_optimizer_state([chunk], optimizer) if found[1] != "main param"]
    mains = [
        (parameter, "main param", main_param(optimizer, main))
        for parameter, main in named_main_params([chunk], optimizer)
    ]
    for parameter, kind, tensor in (*mains, *stored):
        if kind not in state:
            continue
        assert tensor.dtype == torch.float32
        whole = torch.zeros(parameter.shape)
        part = owned_part(optimizer, parameter).of(whole)
        part.copy_(tensor.detach().view_as(part))
        state[kind][names[id(parameter)]] = whole
    for name, parameter in unwrapped(chunk).named_parameters():
        for tensors in state.values():
            whole = tensors.setdefault(name, torch.zeros(parameter.shape))
            if sharded:
                dist.all_reduce(whole)
    return state


def trained(run: Run, steps: int = STEPS) -> dict[str, Any]:
    """The weights at the start, and of every step what it was given, said and left behind."""
    from megatron_moe.checkpoint.state import unwrapped

    trainer = model_cases.Trainer(run)
    (chunk,) = trainer.model
    model = unwrapped(chunk)
    start = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    micro_batches, of_steps = batches_of(run, trainer.groups), []
    for number in range(steps):
        scale = 1024.0 * 2 ** (number // 2) if run.precision.fp16 else 1.0
        wanted = what_a_step_should_see(model, micro_batches, run, scale)
        result = trainer.step_of([iter(micro_batches)], len(micro_batches))
        assert result.committed
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        said = {"loss": result.loss, "tokens": result.tokens, "grad_norm": result.grad_norm}
        said |= {"rate": result.learning_rate, "scale": result.loss_scale}
        said |= {f"depth {n}": loss for n, loss in enumerate(result.mtp_losses)}
        told = {"said": said, "scale": scale, "weights": weights}
        of_steps.append({**wanted, **told, **optimizer_state(chunk, trainer.optimizer)})
    return {"start": start, "steps": of_steps}


def rate_of(step: int) -> float:
    """The learning rate of RATES."""
    return learning_rate(step, first=2e-3, peak=1e-2, least=1e-3, warm_up_steps=1, decay_steps=3)


def require_same_on_all_ranks(results: list[dict[str, Any]]) -> None:
    """Weights are the same on each rank of a data-parallel group, and so is what a step says."""
    for result in results[1:]:
        for step, first in zip(result["steps"], results[0]["steps"], strict=True):
            assert step["said"] == first["said"]
            assert all(torch.equal(weight, first["weights"][name]) for name, weight in step["weights"].items())


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_clipped_adamw_in_fp64(gloo: Any, case: str) -> None:
    model, ranks, flags = CASES[case]
    run = replace(Run(), **{**model, **FLAGS, **flags})
    tolerance = next((TOLERANCE[flag] for flag in TOLERANCE if flag in flags), 2e-5)
    results = gloo.run(ranks, trained, run=run)
    require_same_on_all_ranks(results)
    start = {name: weight.double() for name, weight in results[0]["start"].items()}
    adam = AdamW(start, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3)
    for number, step in enumerate(results[0]["steps"]):
        rate = rate_of(number)
        norm = joint_norm(step["gradients"])
        assert norm > 2.5 * ADAM["clip_grad"], "twice the threshold would clip nothing"
        wanted = {**step["losses"], "grad_norm": norm, "rate": rate, "scale": step["scale"]}
        assert step["said"] == pytest.approx(wanted, rel=tolerance)
        adam.step(clipped(step["gradients"], ADAM["clip_grad"]), rate)
        assert set(step["weights"]) == set(start)
        for name, weight in step["weights"].items():
            told = f"step {number}: {name}"
            assert relative(step["exp_avg"][name], adam.first[name]) < tolerance, told
            assert relative(step["exp_avg_sq"][name], adam.second[name]) < 2 * tolerance, told
            master, exact = step["main param"][name], adam.weights[name]
            # beside the gradient's error that of fp32 itself, in every step
            limit = 2 * tolerance * (exact - start[name]).norm() + 1e-7 * (number + 1) * exact.norm()
            assert (master.double() - exact).norm() < limit, told
            assert torch.equal(weight, master.to(weight.dtype)), told
