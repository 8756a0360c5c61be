"""Checkpoints of a model of which some weights stay in fp32: every tensor under its own name, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import trained_steps as roundtrip

# The first parameter of the model is bf16 and the fp32 ones are spread among the others, so that no two orders agree.
KEPT = {"keep_fp32": ["norms", "decoder.layers.2.mlp.experts", "*.mlp.router", "decoder.layers.1.self_attention"]}
OPTIMIZERS = {
    "whole": {"bf16": True},
    "distributed": {"bf16": True, "use_distributed_optimizer": True},
    "distributed, small buckets": {
        "bf16": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 3000,
    },
    "fp16, whole": {"fp16": True, "initial_loss_scale": 256.0},
}


def is_kept(key):
    return (
        key.endswith(("layernorm.weight", "router.weight"))
        or key.startswith("decoder.layers.1.self_attention.")
        or key.startswith("decoder.layers.2.mlp.experts.")
    )


def own_tensors(state):
    """Weights of the model: what is not the optimizer's, and no buffer."""
    return {key: value for key, value in state.items() if not key.startswith("optimizer.") and "bias" not in key}


@pytest.mark.claim("Checkpoints of mixed dtypes are read by all layouts and resumed bit for bit.")
@pytest.mark.parametrize("optimizer", ["whole", "distributed", "distributed, small buckets"])
def test_mixed_weights_masters_and_moments_travel_through_all_layouts(gloo, tmp_path, optimizer):
    flags = {**OPTIMIZERS[optimizer], **KEPT}
    first = gloo.run(2, roundtrip.trained, flags={**flags, "save": str(tmp_path / "0")})[0]["checkpoint"]
    original = roundtrip.tensors(first)
    (main,) = {key.split(".decoder")[0] for key in original if "final_layernorm" in key and "param" in key}
    for key, weight in own_tensors(original).items():
        assert weight.dtype == (torch.float32 if is_kept(key) else torch.bfloat16), key
        # a master under another's name would not round to this weight
        master = original[f"{main}.{key}"]
        assert master.dtype == torch.float32 and torch.equal(master.to(weight.dtype), weight), key
        for moment in ("exp_avg", "exp_avg_sq"):
            assert original[f"optimizer.state.{moment}.{key}"].shape == weight.shape, key
    for number, layout in enumerate(("one rank", "TP2", "PP2", "EP2"), start=1):
        world_size, sizes = roundtrip.LAYOUTS[layout]
        source, target = str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        gloo.run(world_size, roundtrip.trained, flags={**flags, **sizes, "load": source, "save": target})
        assert roundtrip.differing(original, roundtrip.tensors(f"{target}/iter_0000003")) == [], layout


@pytest.mark.claim("Checkpoints of mixed dtypes are read by all layouts and resumed bit for bit.")
@pytest.mark.parametrize("optimizer", ["whole", "distributed", "fp16, whole"])
def test_a_resumed_mixed_run_goes_on_bit_for_bit(gloo, tmp_path, optimizer):
    flags = {**OPTIMIZERS[optimizer], **KEPT, "train_iters": 4, "lr_decay_iters": 4}
    through = gloo.run(2, roundtrip.trained, flags={**flags, "save": str(tmp_path / "through")})[0]["checkpoint"]
    gloo.run(2, roundtrip.trained, flags={**flags, "save": str(tmp_path / "cut"), "exit_interval": 2})
    flags = {**flags, "load": str(tmp_path / "cut"), "save": str(tmp_path / "cut")}
    resumed = gloo.run(2, roundtrip.trained, flags=flags)[0]["checkpoint"]
    assert Path(resumed).name == Path(through).name == "iter_0000004"
    assert roundtrip.differing(roundtrip.tensors(through), roundtrip.tensors(resumed)) == []


def test_a_checkpoint_of_other_kept_modules_is_refused_by_the_flags_name(gloo, tmp_path):
    flags = {"bf16": True, "save": str(tmp_path), "keep_fp32": ["norms"]}
    gloo.run(1, roundtrip.trained, flags=flags)
    load = {"bf16": True, "load": str(tmp_path), "train_iters": 4}
    for change in ({}, {"keep_fp32": ["norms", "router"]}, {"finetune": True}):
        (message,) = gloo.run(1, roundtrip.refusal, flags={**load, **change})
        assert "--keep-fp32: checkpoint ['norms']" in message and "never cast silently" in message
    # the same modules in other words are the same model
    gloo.run(1, roundtrip.trained, flags={**load, "keep_fp32": ["*layernorm"], "train_iters": 3})


def test_weights_of_another_dtype_are_refused_with_the_flags_that_decide_it(gloo, tmp_path):
    gloo.run(1, roundtrip.trained, flags={"bf16": True, "save": str(tmp_path), "keep_fp32": ["norms"]})
    (message,) = gloo.run(1, roundtrip.refusal, flags={"load": str(tmp_path), "finetune": True})
    assert "--keep-fp32" in message
    assert "embedding.word_embeddings.weight: saved as torch.bfloat16, wanted as torch.float32" in message
    assert "layernorm" not in message
