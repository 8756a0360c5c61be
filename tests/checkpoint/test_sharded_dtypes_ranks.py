"""Checkpoints of a model of which some weights stay in fp32: every tensor under its own name, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import reshard_cases
from tests.helpers import trained_steps as roundtrip
from tests.helpers.rows import rows

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


@pytest.mark.engine
@pytest.mark.parametrize(
    "optimizer", rows(["whole", "distributed", "distributed, small buckets"], test=["distributed"])
)
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


@pytest.mark.engine
@pytest.mark.parametrize("optimizer", rows(["whole", "distributed", "fp16, whole"], test=["distributed"]))
def test_a_resumed_mixed_run_goes_on_bit_for_bit(gloo, tmp_path, optimizer):
    flags = {**OPTIMIZERS[optimizer], **KEPT, "train_iters": 4, "lr_decay_iters": 4}
    through = gloo.run(2, roundtrip.trained, flags={**flags, "save": str(tmp_path / "through")})[0]["checkpoint"]
    gloo.run(2, roundtrip.trained, flags={**flags, "save": str(tmp_path / "cut"), "exit_interval": 2})
    flags = {**flags, "load": str(tmp_path / "cut"), "save": str(tmp_path / "cut")}
    resumed = gloo.run(2, roundtrip.trained, flags=flags)[0]["checkpoint"]
    assert Path(resumed).name == Path(through).name == "iter_0000004"
    assert roundtrip.differing(roundtrip.tensors(through), roundtrip.tensors(resumed)) == []


def test_other_kept_modules_need_the_main_weights_and_go_on_from_them(gloo, tmp_path):
    flags = {"bf16": True, "keep_fp32": ["norms"]}
    full, bare = str(tmp_path / "full"), str(tmp_path / "bare")
    step = gloo.run(1, roundtrip.trained, flags={**flags, "save": full})[0]["checkpoint"]
    gloo.run(1, roundtrip.trained, flags={**flags, "save": bare, "no_save_optim": True})
    # the same modules in other words are the same model
    gloo.run(1, roundtrip.trained, flags={**flags, "load": full, "keep_fp32": ["*layernorm"]})
    for change in ({"keep_fp32": None}, {"keep_fp32": ["norms", "router"]}):
        (message,) = gloo.run(1, roundtrip.refusal, flags={**flags, **change, "load": bare, "finetune": True})
        assert "--keep-fp32: checkpoint ['norms']" in message and "never cast silently" in message
    other = {**flags, "keep_fp32": ["router"], "load": full, "save": str(tmp_path / "other")}
    before, after = (
        roundtrip.tensors(gloo.run(1, roundtrip.trained, flags=other)[0]["checkpoint"]),
        roundtrip.tensors(step),
    )
    main = "optimizer.state.param."
    differ = roundtrip.differing(before, after)
    assert differ and not any(key.startswith(main) for key in differ)
    assert all(key.endswith(("norm.weight", "router.weight")) for key in differ)


@pytest.mark.engine
@pytest.mark.parametrize("start", rows(["finetune", "no_load_optim"], test=["finetune"]))
def test_weights_alone_are_rounded_once_from_the_main_weights(gloo, tmp_path, start):
    flags = {"data_path": (reshard_cases.corpus(tmp_path),), "train_iters": 2}
    gloo.run(1, reshard_cases.trained, flags={**flags, "bf16": True, "save": str(tmp_path / "0")})
    original = roundtrip.tensors(tmp_path / "0" / "iter_0000002")
    load = {"fp16": True, "load": str(tmp_path / "0"), "save": str(tmp_path / "1"), start: True}
    gloo.run(1, reshard_cases.moved, flags={**flags, **load})  # saves what it loaded
    (first, *_) = sorted((tmp_path / "1").glob("iter_*"))
    weights = own_tensors(roundtrip.tensors(first))
    assert weights.keys() == own_tensors(original).keys()
    for key, weight in weights.items():
        assert torch.equal(weight, original[f"optimizer.state.param.{key}"].half()), key


def test_a_weight_beyond_fp16_is_refused_by_its_name(gloo, tmp_path):
    large = {"bf16": True, "save": str(tmp_path), "init_method_std": 40000.0, "train_iters": 1, "on_nan": "skip"}
    gloo.run(2, roundtrip.trained, flags=large)
    for message in gloo.run(2, roundtrip.refusal, flags={"fp16": True, "load": str(tmp_path)}):
        assert "fp16: 65504" in message and "embedding.word_embeddings.weight: " in message
        assert "layernorm" not in message
    gloo.run(2, roundtrip.trained, flags={"load": str(tmp_path), "train_iters": 1})


def test_a_step_without_main_weights_is_refused_with_the_flags_that_decide_its_dtypes(gloo, tmp_path):
    gloo.run(1, roundtrip.trained, flags={"bf16": True, "save": str(tmp_path), "no_save_optim": True})
    (message,) = gloo.run(1, roundtrip.refusal, flags={"fp16": True, "load": str(tmp_path), "finetune": True})
    assert "--bf16: checkpoint True, this run False" in message and "--dtype" in message
