"""What is saved is what was trained, bit for bit, in every layout that reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_steps import seal
from tests.helpers.rows import rows
from tests.helpers.trained_steps import LAYOUTS, OPTIMIZERS, differing, refusal, tensors, trained


@pytest.mark.engine
@pytest.mark.parametrize("optimizer", rows(OPTIMIZERS, test=["bf16, distributed"]))
def test_a_checkpoint_travels_through_all_layouts_and_comes_back_equal(gloo, tmp_path, optimizer):
    flags = OPTIMIZERS[optimizer]
    first = gloo.run(2, trained, flags={**flags, **LAYOUTS["EP2"][1], "save": str(tmp_path / "0")})[0]["checkpoint"]
    original = tensors(first)
    assert {value.dtype for key, value in original.items() if "expert_bias" in key} == {torch.float32}
    assert any(value.any() for key, value in original.items() if "expert_bias" in key)
    for number, layout in enumerate(("one rank", "TP2", "PP2", "EP2"), start=1):
        world_size, sizes = LAYOUTS[layout]
        # nothing is left to train: the run loads, and saves what it has loaded
        source, target = str(tmp_path / str(number - 1)), str(tmp_path / str(number))
        gloo.run(world_size, trained, flags={**flags, **sizes, "load": source, "save": target})
        assert differing(original, tensors(f"{target}/iter_0000003")) == [], layout


@pytest.mark.engine
def test_buckets_do_not_shift_what_a_distributed_optimizer_saves(gloo, tmp_path):
    # Small buckets end with padding in the middle of the buffer, where the engine forgets it.
    flags = {
        "bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 3000,
        "save": str(tmp_path),
    }  # fmt: skip
    step = gloo.run(2, trained, flags=flags)[0]["checkpoint"]
    state = tensors(step)
    weights = {key: value for key, value in state.items() if not key.startswith("optimizer.") and "bias" not in key}
    assert len(weights) > 40
    for key, weight in weights.items():
        main = state[f"optimizer.state.param.{key}"]
        assert main.dtype == torch.float32 and torch.equal(main.to(torch.bfloat16), weight), key


def test_weights_alone_start_a_new_run(gloo, tmp_path):
    flags = {"bf16": True, "use_distributed_optimizer": True}
    saved = gloo.run(1, trained, flags={**flags, "save": str(tmp_path / "0")})[0]["checkpoint"]
    # another optimizer, a learning rate that moves nothing: the weights that come out are those that went in
    for name, change in {"finetune": {"finetune": True}, "no_load_optim": {"no_load_optim": True}}.items():
        target = str(tmp_path / name)
        new = {**flags, "use_distributed_optimizer": False, "lr": 1e-30, "train_iters": 4, **change}
        step = gloo.run(1, trained, flags={**new, "load": str(tmp_path / "0"), "save": target})[0]["checkpoint"]
        unequal = [key for key in differing(tensors(saved), tensors(step)) if not key.startswith("optimizer.")]
        assert unequal and all(key.endswith("expert_bias") for key in unequal), name


@pytest.mark.engine
def test_a_step_that_lacks_a_tensor_or_has_one_too_many_is_refused_with_its_names(gloo, tmp_path):
    gloo.run(1, trained, flags={"save": str(tmp_path)})
    config = tmp_path / "iter_0000003" / "config.json"
    saved = config.read_text()
    config.write_text(saved.replace('"num_layers": 4', '"num_layers": 3').replace("[0]+[1]*3", "[0]+[1]*2"))
    # the configuration was falsified, so only the tensors can tell; both ranks do
    seal(tmp_path / "iter_0000003", 3)
    flags = {"load": str(tmp_path), "num_layers": 3, "moe_layer_freq": "[0]+[1]*2", "train_iters": 4}
    for message in gloo.run(2, refusal, flags={**flags, "expert_model_parallel_size": 2}):
        assert "in the checkpoint, but not in the model: decoder.layers.3.mlp.experts" in message
    config.write_text(saved.replace('"num_layers": 4', '"num_layers": 5').replace("[0]+[1]*3", "[0]+[1]*4"))
    seal(tmp_path / "iter_0000003", 3)
    for message in gloo.run(1, refusal, flags={**flags, "num_layers": 5, "moe_layer_freq": "[0]+[1]*4"}):
        assert "not in the checkpoint: decoder.layers.4.mlp.router.expert_bias" in message


def saved_with_a_rounded_bias(flags: dict[str, Any]) -> dict[str, Any]:
    """Train and save, as a framework does that casts the bias with the model."""
    from megatron_moe.checkpoint import dist, writer

    stage = writer.stage

    def rounding(state: dict[str, Any], *args: Any, **kwargs: Any) -> writer.Staged:
        for tensor in dist.sharded_tensors(state):
            if tensor.key.endswith("expert_bias"):
                tensor.data, tensor.dtype = tensor.data.add(0.3).bfloat16(), torch.bfloat16
        return stage(state, *args, **kwargs)

    writer.stage = rounding
    try:
        return trained(flags)
    finally:
        writer.stage = stage


def test_a_rounded_bias_is_loaded_with_a_loud_warning_that_stays_on_record(gloo, tmp_path, capfd):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    gloo.run(1, saved_with_a_rounded_bias, flags={"bf16": True, "save": str(first)})
    common = {"bf16": True, "lr": 1e-30, "moe_router_bias_update_rate": 0.0}
    (summary,) = gloo.run(1, trained, flags={**common, "load": str(first), "save": str(second), "train_iters": 4})
    assert len(summary["precision_warnings"]) == 3  # one per MoE layer
    warning = summary["precision_warnings"][0]
    assert warning.startswith("PRECISION WARNING: decoder.layers.1.mlp.router.expert_bias is torch.bfloat16")
    # It was widened, not rounded once more, and is fp32 from then on.
    was, now = tensors(first / "iter_0000003"), tensors(second / "iter_0000004")
    key = "decoder.layers.1.mlp.router.expert_bias"
    assert now[key].dtype == torch.float32 and was[key].dtype == torch.bfloat16
    assert torch.equal(now[key], was[key].float())
    (summary,) = gloo.run(1, trained, flags={**common, "load": str(second), "save": str(third), "train_iters": 5})
    assert len(summary["precision_warnings"]) == 3 and summary["precision_warnings"][0] == warning
    assert "precision_warnings" in (third / "iter_0000005" / "state.json").read_text()
