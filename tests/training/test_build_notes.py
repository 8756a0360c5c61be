"""A run says at its start where it departs from the model's dtype."""

from __future__ import annotations

import pytest

from megatron_moe import platform
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.platform import switches
from megatron_moe.training.build import _precision_notes

pytestmark = pytest.mark.engine


def notes(**flags):
    return _precision_notes(build({**PRESETS["tiny"], **flags}))


def test_gradients_that_are_summed_in_half_precision_are_told_in_one_line():
    (note,) = notes(bf16=True, grad_reduce_in_bf16=True)
    assert "gradients" in note and "reduced over ranks in bf16" in note
    (note,) = notes(fp16=True, accumulate_allreduce_grads_in_fp32=False)
    assert "in fp16" in note
    # fp32 gradients of an fp32 model, whatever the flag says
    assert notes(accumulate_allreduce_grads_in_fp32=False) == [] == notes(bf16=True)


def test_a_run_with_fp8_says_which_form_computes(monkeypatch):
    (note,) = notes(bf16=True, fp8_format="e4m3")
    # 5 linear layers of attention in each layer, 2 of the dense layer, 2 of each shared expert, 3 layers of experts
    assert all(words in note for words in ("--fp8-format e4m3", "31 modules emulated", "slower than bf16", "verified"))
    (note,) = notes(bf16=True, fp8_format="e4m3", fp8_modules=("experts",), first_last_layers_bf16=True)
    assert "--fp8-modules experts" in note and "of 2 modules emulated" in note
    (note,) = notes(bf16=True, fp8_format="e4m3", transformer_impl="transformer_engine", moe_expert_backend="te")
    assert "8 modules emulated" in note and "23 modules by Transformer Engine" in note
    monkeypatch.setattr(platform, "why_no_fp8_products", lambda: None)
    (note,) = notes(bf16=True, fp8_format="e4m3")
    assert "31 modules by torch's scaled product" in note and "emulated" not in note
    monkeypatch.setenv(switches.FP8, "emulated")
    (note,) = notes(bf16=True, fp8_format="e4m3")
    assert "31 modules emulated" in note


def test_kept_modules_are_named_a_few_of_them():
    assert notes(bf16=True, keep_fp32=["softmax"]) == [
        "in fp32 by --keep-fp32: " + ", ".join(f"decoder.layers.{i}.self_attention.core_attention" for i in range(4))
    ]
    (note,) = notes(bf16=True, keep_fp32=["norms"])
    assert note.endswith("and 13 more")
