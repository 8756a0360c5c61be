"""A run says at its start where it departs from the model's dtype."""

from __future__ import annotations

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.training.build import _precision_notes


def notes(**flags):
    return _precision_notes(build({**PRESETS["tiny"], **flags}))


def test_gradients_that_are_summed_in_half_precision_are_told_in_one_line():
    (note,) = notes(bf16=True, grad_reduce_in_bf16=True)
    assert "gradients" in note and "reduced over ranks in bf16" in note
    (note,) = notes(fp16=True, accumulate_allreduce_grads_in_fp32=False)
    assert "in fp16" in note
    # fp32 gradients of an fp32 model, whatever the flag says
    assert notes(accumulate_allreduce_grads_in_fp32=False) == [] == notes(bf16=True)


def test_a_run_with_fp8_says_that_it_is_emulated():
    (note,) = notes(bf16=True, fp8_format="e4m3")
    assert all(words in note for words in ("--fp8-format e4m3", "emulated", "slower than bf16", "not verified"))


def test_kept_modules_are_named_a_few_of_them():
    assert notes(bf16=True, keep_fp32=["softmax"]) == [
        "in fp32 by --keep-fp32: " + ", ".join(f"decoder.layers.{i}.self_attention.core_attention" for i in range(4))
    ]
    (note,) = notes(bf16=True, keep_fp32=["norms"])
    assert note.endswith("and 13 more")
