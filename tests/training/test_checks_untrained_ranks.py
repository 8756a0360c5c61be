"""A weight that does not train is named with its cause, whatever makes it stay; nothing else is an alarm."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.errors import RunFault
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.engine.optimizer import OwnedPart, named_main_params, parts
from megatron_moe.moe.router import routers
from megatron_moe.report.sink import Sink
from megatron_moe.training.callback import Callback
from megatron_moe.training.callbacks import checks
from megatron_moe_tools.doctor.small_copy import small_copy
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, TP2, ZERO_2, ZERO_3
from tests.helpers.trained_steps import SMALL, TINY

FIRST, RARE = 2, 4
EVERY: dict[str, Any] = {
    **TINY,
    **SMALL,
    "bf16": True,
    "qk_layernorm": True,
    "moe_shared_expert_gate": True,
    "mtp_num_layers": 1,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "seq_length": 32,
    "global_batch_size": 4,
    "train_iters": RARE,
    "watchdog": False,
}
"""Each kind of weight: latent attention, tables, norms, a router, experts, a gated shared one, a further prediction."""


def weight(trainer: Any, end: str) -> tuple[Any, str, Any]:
    """Module, key and parameter of a name in the whole model; None where another rank has it."""
    from megatron_moe.checkpoint.state import unwrapped
    from megatron_moe.training.state_checks import global_names

    for chunk in map(unwrapped, trainer.trained.model):
        names = global_names(chunk)
        for name, parameter in chunk.named_parameters():
            if names[name].endswith(end):
                module, _, key = name.rpartition(".")
                return chunk.get_submodule(module), key, parameter
    return None, "", None


def main_of(trainer: Any, parameter: Any) -> Any:
    """The main param of a parameter, or this rank's shard of it."""
    mains = named_main_params(trainer.trained.model, trainer.trained.optimizer)
    return next((main for owner, main in mains if owner is parameter), None)


class Fault(Callback):
    """Makes a weight stay where it is, on the ranks that have it."""

    def __init__(self, end: str) -> None:
        self.end = end

    def before_training(self) -> None:
        self.module, self.key, self.parameter = weight(self.trainer, self.end)
        self.main = main_of(self.trainer, self.parameter)
        if self.module is not None:
            self.plant()

    def plant(self) -> None: ...


class Detached(Fault):
    """The module computes with the weight's values, and not with the weight."""

    def plant(self) -> None:
        weights, key, kept = self.module._parameters, self.key, {}

        def before(*_: Any) -> None:
            kept[key] = weights[key]
            weights[key] = kept[key].detach()

        self.module.register_forward_pre_hook(before)
        self.module.register_forward_hook(lambda *_: weights.update(kept))


class ZeroedExpert(Fault):
    """No gradient comes to expert 5 of the whole model."""

    def plant(self) -> None:
        row = torch.tensor([5 - self.module.first_expert])
        if 0 <= row < self.module.num_local_experts:
            self.module.register_forward_pre_hook(lambda *_: self.zero(row))

    def zero(self, row: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            used = self.module._parameters[self.key]  # of a sharded model the gathered weight
            used.register_hook(lambda gradient: gradient.index_fill(0, row, 0.0))


class NeverChosen(Fault):
    """An expert has a bias that no score makes up for."""

    expert = 3

    def plant(self) -> None:
        self.bias(-1e4)

    def bias(self, value: float) -> None:
        for router in routers(self.trainer.trained.model):
            if router.layer_number == 2:
                router.expert_bias[self.expert] = value


class ChosenLater(NeverChosen):
    """Until the weights are judged for the first time."""

    expert = 1

    def after_step(self, step: Any, result: Any) -> None:
        self.bias(-1e4 if step.iteration < FIRST else 1.0)


class ZeroInput(Fault):
    def plant(self) -> None:
        self.module.linear_fc1.register_forward_pre_hook(lambda _, inputs: (torch.zeros_like(inputs[0]), *inputs[1:]))


class RequiresNone(Fault):
    def plant(self) -> None:
        self.parameter.requires_grad_(False)


class LeftOut(Fault):
    """No group of the optimizer has the weight."""

    def plant(self) -> None:
        for part in parts(self.trainer.trained.optimizer):
            for group in part.param_groups:
                group["params"] = [param for param in group["params"] if param is not self.main]


class Zeroed(Fault):
    """A program's callback takes the gradient away."""

    def before_update(self, step: Any) -> None:
        if self.module is not None:
            self.parameter.main_grad.zero_()


class Negative(Fault):
    """A gradient without a positive element is one all the same."""

    def before_update(self, step: Any) -> None:
        if self.module is not None and self.parameter.main_grad.numel():
            self.parameter.main_grad.clamp_(max=0.0)[..., :1] = 0.0


class Stays(Fault):
    """The weight has a gradient, and is not updated."""

    def stored(self) -> list[torch.Tensor]:
        return [one.detach() for one in (self.parameter, self.main) if one is not None]

    def plant(self) -> None:
        self.kept = [one.clone() for one in self.stored()]

    def after_step(self, step: Any, result: Any) -> None:
        if self.module is not None:
            for one, kept in zip(self.stored(), self.kept):
                one.copy_(kept)


class NotCopied(Stays):
    """The main weight is updated, and the model's is not."""

    def stored(self) -> list[torch.Tensor]:
        return super().stored()[:1]


LAYER, PREDICTED = "decoder.layers.1.", "mtp.layers.0.transformer_layer."
ROUTED, SHARED = LAYER + "mlp.experts.weight", LAYER + "mlp.shared_experts."
Planted = tuple[type[Fault], str, checks.Reason, tuple[str, ...] | None]
FAULTS: dict[str, Planted] = {
    "query norm": (Detached, "decoder.layers.0.self_attention.q_layernorm.weight", checks.NO_GRADIENT, ()),
    "gate": (Detached, SHARED + "gate_weight", checks.NO_GRADIENT, ()),
    "router": (Detached, LAYER + "mlp.router.weight", checks.NO_GRADIENT, ()),
    "experts": (Detached, PREDICTED + "mlp.experts.weight2", checks.NO_GRADIENT, ()),
    "prediction": (Detached, "mtp.layers.0.eh_proj.weight", checks.NO_GRADIENT, ()),
    "table": (Detached, "embedding.word_embeddings.weight", checks.NO_GRADIENT, ()),
    "dense": (Detached, "decoder.layers.0.mlp.linear_fc1.weight", checks.NO_GRADIENT, ()),
    "latent norm": (Detached, LAYER + "self_attention.kv_layernorm.weight", checks.NO_GRADIENT, ()),
    "norm of prediction": (Detached, "mtp.layers.0.enorm.weight", checks.NO_GRADIENT, ()),
    "zero input": (
        ZeroInput,
        PREDICTED + "mlp.shared_experts.gate_weight",
        checks.NO_GRADIENT,
        (PREDICTED + "mlp.shared_experts.*",),
    ),
    "callback": (Zeroed, "output_layer.weight", checks.NO_GRADIENT, ()),
    "negative": (Negative, "decoder.layers.0.self_attention.linear_kv_up_proj.weight", checks.NO_GRADIENT, None),
    "no gradient": (RequiresNone, LAYER + "input_layernorm.weight", checks.NOT_TRAINABLE, ()),
    "frozen": (RequiresNone, PREDICTED + "self_attention.linear_proj.weight", checks.NOT_TRAINABLE, ()),
    "router's group": (LeftOut, PREDICTED + "mlp.router.weight", checks.NOT_OPTIMIZED, ()),
    "group": (LeftOut, "decoder.layers.0.mlp.linear_fc2.weight", checks.NOT_OPTIMIZED, ()),
    "copy": (NotCopied, "decoder.final_layernorm.weight", checks.NOT_STORED, ()),
    "stays": (Stays, "decoder.layers.0.self_attention.linear_proj.weight", checks.NOT_MOVED, ()),
    "norm copy": (NotCopied, LAYER + "pre_mlp_layernorm.weight", checks.NOT_STORED, ()),
    "one expert": (ZeroedExpert, ROUTED + "1", checks.NO_GRADIENT_OF_EXPERT, (ROUTED + "1 (experts 5)",)),
    "no token": (NeverChosen, ROUTED + "2", checks.NO_TOKEN, (ROUTED + "1 (experts 3)", ROUTED + "2 (experts 3)")),
    "late token": (ChosenLater, ROUTED + "2", checks.NO_TOKEN, None),
}
"""What is done to which weight, the reason that is told, and the names: () is the weight's alone, None is no fault."""


class Kept(Sink):
    """What a run says of its weights."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, record: Any) -> None:
        if record.text.startswith("weights after") or "do not train" in record.text:
            self.lines.append(record.text)


def said(run: Run | dict[str, Any], faults: Sequence[str] = (), rare: int = RARE) -> list[str]:
    """What a run of a few steps says of its weights."""
    from megatron_moe.training.run import pretrain

    kept = Kept()
    planted = [kind(end) for kind, end, *_ in map(FAULTS.__getitem__, faults)]
    if isinstance(run, dict):
        run = build({**EVERY, **run})
    with mock.patch.multiple(checks, FIRST_STEPS=FIRST, RARE_STEPS=rare):
        try:
            pretrain(run, (kept,), callbacks=planted)
        except RunFault as fault:
            kept.lines.append(str(fault))
    return kept.lines


def told(lines: list[str]) -> dict[str, set[str]]:
    """Reason -> names of the weights that are named."""
    found: dict[str, set[str]] = {}
    for line in lines:
        if "do not train: " in line:
            for reason in line.split("do not train: ")[1].split("; "):
                text, _, names = reason.rpartition(": ")
                found.setdefault(text, set()).update(names.split(", "))
    return found


def test_a_flat_shard_is_cut_where_experts_begin():
    experts, length = 4, 6
    weight = torch.nn.Parameter(torch.arange(experts * length).view(experts, 2, 3).float())
    for begin, end in itertools.combinations(range(experts * length + 1), 2):
        own, seen = OwnedPart(None, begin, end), []
        for span in checks._spans(10, experts, weight, own):
            rows = checks.WatchedRows(*span, weight, own, None, None)
            assert torch.equal(rows.of(weight), rows.of_own(own.of(weight)))
            for number in range(rows.count):
                elements = rows.single(number).of(weight).flatten().tolist()
                assert elements == rows.of(weight)[number].tolist()
                assert {element // length for element in elements} == {rows.first + number - 10}
                seen += elements
        assert seen == list(range(begin, end))


LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one rank": (1, {}, [*FAULTS]),
    "DP4 x EP2, ZeRO 1": (4, {**EP2, **DISTRIBUTED}, [*FAULTS]),
    "DP4 x EP2, ZeRO 3": (4, {**EP2, **ZERO_3}, [fault for fault in FAULTS if not fault.endswith("copy")]),
    "PP2": (2, {**PP2, "num_layers": 2}, [*FAULTS]),
}


@pytest.mark.engine
@pytest.mark.parametrize("layout", rows(LAYOUTS, test=["one rank", "DP4 x EP2, ZeRO 3"]))
def test_each_weight_that_stays_is_named_with_its_cause(gloo, layout):
    ranks, flags, faults = LAYOUTS[layout]
    lines = gloo.run(ranks, said, run=flags, faults=faults)[0]
    wanted: dict[str, set[str]] = {}
    for _, end, reason, names in map(FAULTS.__getitem__, faults):
        if names is not None:
            wanted.setdefault(reason.text, set()).update(names or (end,))
    assert told(lines) == wanted


def require_healthy(lines: list[str]) -> None:
    """After the first steps nothing is left to wait for."""
    (line,) = lines
    assert " 0 of " in line and ", 0 more" in line and line.endswith("itself)")


def test_a_run_stops_on_all_ranks_and_saves_nothing(gloo, tmp_path):
    flags = {**EP2, "on_untrained_weights": "stop", "save": str(tmp_path), "save_interval": 1}
    first, second = gloo.run(2, said, run=flags, faults=["gate"])
    assert first[-1] == second[-1] and "iteration 2: 1 of 76 weights do not train: gradient 0" in first[-1]
    assert first[-1].endswith("gate_weight; stopped (--on-untrained-weights stop)")
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


def test_a_resumed_run_is_watched_again(gloo, tmp_path):
    flags: dict[str, Any] = {"save": str(tmp_path), "load": str(tmp_path)}
    require_healthy(gloo.run(1, said, run=flags)[0])
    (after,) = gloo.run(1, said, run={**flags, "train_iters": 2 * RARE}, faults=["gate"])
    assert told(after) == {checks.NO_GRADIENT.text: {SHARED + "gate_weight"}} and "iteration 6: " in after[1]


def test_a_rate_too_small_for_fp32_is_no_fault(gloo):
    (lines,) = gloo.run(1, said, run={"lr": 1e-10})
    assert not told(lines) and "16 more have not moved" in lines[0] and "watched until step 4" in lines[0]
    assert lines[1].endswith("; a learning rate of 1e-10 at most is too small to change 16 of them")


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
HEALTHY: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32, tied, average": (1, {"bf16": False, "ema_decay": 0.9, "untie_embeddings_and_output_weights": False}),
    "fp16 after skipped steps": (1, {"bf16": False, "fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1}),
    "warm-up from 0": (1, {"lr_warmup_iters": 3, "lr": 1e-4}),
    "Muon, packed, QK-clip": (1, {"optimizer": "muon", "use_precision_aware_optimizer": True, "qk_clip": True}),
    "Muon, offloaded": (1, {"optimizer": "muon", "optimizer_cpu_offload": True}),
    "int8 moments": (1, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}),
    "FP8": (1, {"fp8_format": "e4m3", "fp8_modules": ("experts", "attention", "mlp", "shared_experts")}),
    "frozen": (1, {"freeze": ("router", "decoder.layers.0"), "lr_mult": ("embedding=1e-3",)}),
    "fp32 islands": (1, {"keep_fp32": ("router", "norms", "last_layer")}),
    "recomputation, bf16 gradients": (1, {**RECOMPUTED, "accumulate_allreduce_grads_in_fp32": False}),
    "ZeRO 1, packed": (2, {**DISTRIBUTED, "use_precision_aware_optimizer": True, "ema_decay": 0.9}),
    "ZeRO 1, overlapped": (2, {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "ZeRO 2, offloaded": (2, {**ZERO_2, "optimizer_cpu_offload": True}),
    "ZeRO++": (2, {**ZERO_3, "zero_quantized_weights": True, "zero_quantized_gradients": "int8"}),
    "ZeRO 3, EP2, Muon": (2, {**ZERO_3, **EP2, "optimizer": "muon"}),
    "TP2, ETP1": (2, {**TP2, **EP2, "expert_tensor_parallel_size": 1}),
    "CP2": (2, {"context_parallel_size": 2}),
    "PP2, VPP2": (2, {**PP2, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1, "moe_layer_freq": 1}),
}


@pytest.mark.parametrize("case", rows(HEALTHY, test=["fp16 after skipped steps", "frozen", "ZeRO 3, EP2, Muon"]))
def test_what_trains_is_no_alarm(gloo, case):
    ranks, flags = HEALTHY[case]
    require_healthy(gloo.run(ranks, said, run={"train_iters": 12, **flags})[0])


@pytest.mark.parametrize("preset", rows(PRESETS, test=["qwen2-57b-a14b"]))
def test_a_small_copy_of_each_preset_trains(gloo, preset):
    run = replace(small_copy(replace(Run(), **PRESETS[preset])), train_iters=RARE, bf16=True, watchdog=False)
    require_healthy(gloo.run(1, said, run=run)[0])
