"""The offload of activations changes no bit of a training, in any layout; what it frees is freed, and comes back."""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.model.activation_offload import ActivationOffload, _Layer
from megatron_moe.platform.pinned_memory import CopyStream
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import Trainer
from tests.model.offloading import MODULES, offloading, on_a_cpu

pytestmark = pytest.mark.engine

ALL = offloading(*MODULES)
SELECTIVE = {"recompute_granularity": "selective"}
FP8 = {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}
GROUPED = {**PRESETS["tiny-gqa"], "moe_layer_freq": 1, "vocab_size": 100, "micro_batch_size": 4}
THREE_LAYERS = {"num_layers": 3, "moe_layer_freq": "[0,1,1]"}
FOUR_LAYERS = {"num_layers": 4, "moe_layer_freq": "[0,1,1,1]"}
PP2 = {**FOUR_LAYERS, "pipeline_model_parallel_size": 2}
PP4 = {**FOUR_LAYERS, "pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Ett|tt|m|L"}
RECOMPUTED = {**SELECTIVE, "recompute_modules": ("layernorm", "moe_act", "mla_up_proj")}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "multi-token prediction": (1, {**ALL, "mtp_num_layers": 2}),
    "outputs recomputed": (1, {**offloading("attn_norm", "mlp_norm", "expert_fc1", "moe_act"), **RECOMPUTED}),
    "frozen first layers": (1, {**ALL, "freeze": ("embedding.*", "decoder.layers.0.*")}),
    "PP2, interleaved": (2, {**ALL, **PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    "attention recomputed": (1, {**ALL, **SELECTIVE, "recompute_modules": ("core_attn", "moe_act", "shared_experts")}),
    "fp32, dropout": (1, {**ALL, "bf16": False, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "grouped-query attention": (1, {**GROUPED, **ALL}),
    "FP8": (1, {**ALL, **FP8}),
    "DP2, ZeRO 1": (2, {**ALL, "micro_batch_size": 2, "use_distributed_optimizer": True}),
    "DP2, ZeRO 3": (2, {**ALL, "micro_batch_size": 2, "use_torch_fsdp2": True}),
    "TP2, sequence parallel": (2, {**ALL, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "CP2 x EP2": (4, {**ALL, "micro_batch_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 2}),
    "PP4, predictions alone": (4, {**ALL, **PP4, "mtp_num_layers": 1, "micro_batch_size": 2}),
}


def trained(flags: dict[str, Any]) -> tuple[list[Any], dict[str, str], list[str], list[str]]:
    """Loss and gradient norm of a step, digests of the state after it, what was offloaded, and what of it stayed.

    A rank has two micro-batches, or more: its share of eight sequences.
    """
    moved: list[tuple[str, Any, Any]] = []
    stayed = set()
    move = ActivationOffload._move

    def noted(self: ActivationOffload, name: str, *tensors: torch.Tensor) -> None:
        layer = self._layer
        before = set() if layer is None else set(layer.moved)
        move(self, name, *tensors)
        if layer is not None:
            stayed.update(name for of, other, one in moved if of == name and other is not layer and one.is_leaving)
            moved.extend((name, layer, one) for storage, one in layer.moved.items() if storage not in before)

    with on_a_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationOffload, "_move", noted)
        trainer = Trainer({"micro_batch_size": 4, "seq_length": 32, **THREE_LAYERS, **flags})
        step = trainer.step()
    return [step.loss, step.grad_norm], trainer.state(), sorted({name for name, *_ in moved}), sorted(stayed)


@pytest.mark.parametrize("layout", rows(LAYOUTS, test=list(LAYOUTS)[:5]))
def test_no_bit_is_changed(layout, gloo):
    world_size, flags = LAYOUTS[layout]
    plain = {name: value for name, value in flags.items() if "offload" not in name}
    expected, found = (gloo.run(world_size, trained, flags=some) for some in (plain, flags))
    offloaded = set()
    for (losses, state, nothing, _), (own_losses, own_state, moved, stayed) in zip(expected, found):
        assert (own_losses, own_state) == (losses, state)
        assert nothing == [] and stayed == []
        offloaded |= set(moved)
    # attn_proj's input is core_attn's output where attention computes in the model's dtype and width.
    assert offloaded | {"attn_proj"} == {*flags["offload_modules"], "attn_proj"}


def test_a_backward_pass_brings_back_the_layer_before_and_not_the_pass_before():
    layers: list[_Layer] = []
    for number in (1, 2, 1, 2):  # two micro-batches, of which neither has gone back yet
        layers.append(_Layer(number, CopyStream(), layers[-1] if layers else None))
        layers[-1].moved[0] = mock.Mock(**{"return_to_device.return_value": None})
    returned = [layer.moved[0].return_to_device for layer in layers]
    layers[3].return_all(torch.zeros(1))
    assert [one.called for one in returned] == [False, False, True, True]
    layers[2].return_all(torch.zeros(1))
    assert [one.called for one in returned] == [False, False, True, True]
