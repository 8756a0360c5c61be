"""What the ranks do in test_per_module_precision.py."""

import copy
from typing import Any

import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build
from tests.helpers import model_cases
from tests.helpers.errors import largest

SMALL = {
    **PRESETS["tiny"],
    "seq_length": 16,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 32,
    "num_layers": 4,
    "init_method_std": 0.1,
    "clip_grad": 1.0,
    "lr": 1e-2,
    "mock_data": True,
    "vocab_size": 256,
    "train_iters": 20,
    "micro_batch_size": 2,  # a second one accumulates gradients, and fills an interleaved pipeline
}
OVERLAPPED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2, SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "DP2": (2, {}),
    "DP2, distributed optimizer": (2, OVERLAPPED),
}


def run_of(**flags: Any) -> Run:
    return build({**SMALL, **flags})


class Trainer(model_cases.Trainer):
    """A small model with its optimizer, on a fixed global batch."""

    def evaluate(self) -> float:
        from megatron_moe.training.evaluate import evaluate

        size, length = self.run.training.micro_batch_size, self.run.model.seq_length
        micro_batches = model_cases.share_of(model_cases.global_batch(length), self.groups, size)
        return evaluate(
            self.model, [iter(micro_batches) for _ in self.model], split="valid", iteration=1,
            num_micro_batches=len(micro_batches), micro_batch_size=size, seq_length=length, pg_collection=self.groups,
            in_fp32=self.run.precision.eval_in_fp32,
        ).loss  # fmt: skip

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By their names in the whole model."""
        from megatron_moe.checkpoint.state import unwrapped
        from megatron_moe.model.initialize import global_name

        return {
            global_name(unwrapped(chunk), name): parameter
            for chunk in self.model
            for name, parameter in unwrapped(chunk).named_parameters()
        }


def trained(run: Run, steps: int = 2) -> dict[str, Any]:
    """Losses and gradient norms of some steps; dtypes of weights and gradients; initial weights."""
    trainer = Trainer(run)
    weights = {name: parameter.detach().clone() for name, parameter in trainer.parameters().items()}
    results = [trainer.step() for _ in range(steps)]
    return {
        "weights": weights,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "committed": all(result.committed for result in results),
        "dtypes": {
            name: (str(parameter.dtype), str(parameter.main_grad.dtype))
            for name, parameter in trainer.parameters().items()
        },
    }


def layers_of(trainer: Trainer) -> dict[int, torch.nn.Module]:
    """By global number, from 0."""
    from megatron_moe.checkpoint.state import unwrapped

    chunks = [unwrapped(chunk) for chunk in trainer.model]
    return {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}


def residual_stream(run: Run) -> dict[str, Any]:
    """The stream at every boundary of a layer: its dtype, and whether bf16 could hold its values.

    `error` is the largest distance between what a layer returns and input + attention + MLP in fp32.
    """
    trainer = Trainer(run)
    stream: dict[str, tuple[str, bool]] = {}
    gradients, branches, errors = set(), set(), []

    def look(place: str, tensor: torch.Tensor) -> None:
        stream[place] = (str(tensor.dtype), not torch.equal(tensor.detach(), tensor.detach().bfloat16().float()))
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradients.add(str(gradient.dtype)))

    def watch(number: int, layer: torch.nn.Module) -> None:
        terms: list[torch.Tensor] = []

        def before(_: Any, args: Any, kwargs: Any) -> None:
            look(f"into layer {number}", kwargs["hidden_states"])
            terms[:] = [kwargs["hidden_states"].detach().float()]

        def branch(_: Any, args: Any, output: Any) -> None:
            branches.add(str(output[0].dtype))
            terms.append(output[0].detach().float().clone())

        def after(_: Any, args: Any, output: Any) -> None:
            look(f"out of {number}", output[0])
            errors.append((output[0].detach().float() - sum(terms)).abs().max().item())

        layer.register_forward_pre_hook(before, with_kwargs=True)
        for part in (layer.self_attention, layer.mlp):
            part.register_forward_hook(branch)
        layer.register_forward_hook(after)

    for number, layer in layers_of(trainer).items():
        watch(number, layer)
    assert trainer.step().committed
    return {"stream": stream, "gradients": gradients, "branches": branches, "error": largest(errors)}


def bits(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that an evaluation or a skipped step must leave alone."""
    from megatron_moe.checkpoint.state import unwrapped
    from megatron_moe.engine.optimizer import parts

    found = {f"weight {name}": p.detach().clone() for name, p in trainer.parameters().items()}
    for chunk in trainer.model:
        found |= {f"buffer {id(b)}": b.clone() for b in unwrapped(chunk).buffers()}
    for number, part in enumerate(parts(trainer.optimizer)):
        for index, state in enumerate(part.optimizer.state.values()):
            found |= {f"optimizer {number} {index} {key}": value.clone() for key, value in state.items()}
    return {**found, "random": torch.get_rng_state()}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def overflow_in_kept_weight(run: Run) -> dict[str, Any]:
    """fp16: a step with a good gradient, one in which a kept weight of the last rank gets an infinite one, a third."""
    trainer = Trainer(run)
    first = trainer.step()
    name = next(n for n in trainer.parameters() if n.endswith("experts.weight1"))
    parameter, before = trainer.parameters()[name], bits(trainer)
    hook = None
    if torch.distributed.get_rank() == 1:
        hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    bad = trainer.step()
    unchanged = differing(before, bits(trainer)) == []
    if hook is not None:
        hook.remove()
    return {
        "kept": str(parameter.dtype),
        "norm": first.grad_norm,
        "skipped": not bad.committed,
        "unchanged": unchanged,
        "then": trainer.step().committed,
    }


def evaluated_in_fp32(run: Run) -> dict[str, Any]:
    """Loss in fp32, in the model's dtype, and of an fp32 model of the same values; what the evaluation has changed."""
    from megatron_moe.checkpoint.state import unwrapped
    from megatron_moe.config.schema import replace
    from megatron_moe.model.build import build_model
    from megatron_moe.training.evaluate import gathered_parameters

    trainer = Trainer(run)
    twin = Trainer(run, trainer.groups)
    for each in (trainer, twin):
        each.step()
    with gathered_parameters(trainer.model):  # what an overlapped gather has left to do is not the evaluation's doing
        pass
    before, same = bits(trainer), {name: id(p) for name, p in trainer.parameters().items()}
    in_fp32 = trainer.evaluate()
    changed = differing(before, bits(trainer))
    changed += [name for name, p in trainer.parameters().items() if id(p) != same[name]]

    plain = {"bf16": False, "eval_in_fp32": False, "keep_fp32": None, "fp32_residual_connection": False}
    oracle = copy.copy(trainer)
    oracle.run = replace(run, **plain)
    oracle.model = build_model(oracle.run, trainer.groups, 256)
    for mine, theirs in zip(oracle.model, trainer.model):
        values = {name: value for name, value in unwrapped(theirs).state_dict().items() if value is not None}
        wide = {name: value.float() for name, value in values.items() if isinstance(value, torch.Tensor)}
        unwrapped(mine).load_state_dict(wide, strict=False)
    loss = oracle.evaluate()

    narrow = copy.copy(trainer)
    narrow.run = replace(run, eval_in_fp32=False)
    in_bf16 = narrow.evaluate()
    # gradients still reach the optimizer as if nothing had happened
    after = [each.step() for each in (trainer, twin)]
    if (after[0].loss, after[0].grad_norm) != (after[1].loss, after[1].grad_norm):
        changed.append("the next step")
    for name, parameter in trainer.parameters().items():
        if not torch.equal(parameter, twin.parameters()[name]):
            changed.append(f"{name} after the next step")
    return {"in fp32": in_fp32, "oracle": loss, "in bf16": in_bf16, "changed": changed}


def failed_evaluation(run: Run) -> dict[str, Any]:
    """An exception in the middle of an fp32 evaluation of a model with tied weights."""
    from megatron_moe.checkpoint.state import unwrapped

    trainer, seen = Trainer(run), {}
    before = {name: id(p) for name, p in trainer.parameters().items()}
    chunk = unwrapped(trainer.model[0])

    def fail(_: Any, args: Any, kwargs: Any) -> None:
        table = chunk.embedding.word_embeddings.weight
        seen["tied once"] = table.dtype == torch.float32 and kwargs["weight"] is table
        raise RuntimeError("on purpose")

    hook = chunk.output_layer.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        trainer.evaluate()
        raised = False
    except RuntimeError as error:
        raised = "on purpose" in str(error)
    hook.remove()
    same = before == {name: id(p) for name, p in trainer.parameters().items()}
    return {"raised": raised, "same": same, **seen, "pipeline": str(chunk.config.pipeline_dtype)}


def router_dtypes(run: Run) -> dict[str, Any]:
    """dtypes around the MoE layers of one step, and all gradients."""
    trainer = Trainer(run)
    probs, outputs, gradients = set(), set(), set()
    for layer in layers_of(trainer).values():
        if not hasattr(layer.mlp, "router"):
            continue
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: probs.add(str(args[0].probs.dtype)))
        layer.mlp.register_forward_hook(lambda _, args, output: outputs.add(str(output[0].dtype)))
        layer.mlp.register_forward_pre_hook(
            lambda _, args: args[0].register_hook(lambda gradient: gradients.add(str(gradient.dtype))) and None
        )
    trainer.step()
    parameters = trainer.parameters()
    return {
        "probs": probs,
        "layers": outputs,
        "input gradients": gradients,
        "weights": {(str(p.dtype), str(p.main_grad.dtype)) for p in parameters.values()},
        "gradients": {name: p.main_grad.detach().clone() for name, p in parameters.items()},
    }
