"""What is saved is what was trained, bit for bit; what lacks a tensor or would be rounded twice is refused."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoint.checkpoint_steps import seal
from tests.helpers.trained_steps import OPTIMIZERS, SMALL, differing, main_weights, moved, refusal, tensors, trained

BIAS = "decoder.layers.1.mlp.router.expert_bias"
DISTRIBUTED = OPTIMIZERS["bf16, distributed"]


@pytest.fixture
def run(gloo):
    """What each rank of a small run of these flags returns."""
    return lambda ranks, case, flags, **more: gloo.run(ranks, case, flags={**SMALL, **flags, **more})


def own_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if not key.startswith("optimizer.") and "bias" not in key}


@pytest.fixture(scope="module")
def saved(gloo, folder):
    """A run's folder with a step of bf16 weights."""
    gloo.run(1, trained, flags={**SMALL, **DISTRIBUTED, "save": str(folder / "saved")})
    return str(folder / "saved")


@pytest.mark.engine
def test_buckets_do_not_shift_what_a_distributed_optimizer_saves(run, tmp_path):
    # Small buckets end with padding in the middle of the buffer, where the engine forgets it.
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3000}
    state = tensors(run(2, trained, {**DISTRIBUTED, **overlap}, save=str(tmp_path))[0]["checkpoint"])
    weights = own_weights(state)
    assert len(weights) > 20
    for key, weight in weights.items():
        main = state[f"optimizer.state.param.{key}"]
        assert main.dtype == torch.float32 and torch.equal(main.to(torch.bfloat16), weight), key


@pytest.mark.engine
@pytest.mark.parametrize(
    ("start", "half"), [("finetune", "fp16"), ("no_load_optim", "bf16")], ids=["other dtype", "same dtype"]
)
def test_weights_alone_start_a_new_run_rounded_once_from_the_main_weights(run, saved, tmp_path, start, half):
    run(1, moved, {half: True, start: True}, load=saved, save=str(tmp_path), train_iters=4)
    (first, *_) = sorted(tmp_path.glob("iter_*"))
    original = tensors(f"{saved}/iter_0000003")
    weights = own_weights(tensors(first))
    assert weights.keys() == own_weights(original).keys()
    dtype = torch.float16 if half == "fp16" else torch.bfloat16
    for key, weight in weights.items():
        assert torch.equal(weight, original[f"optimizer.state.param.{key}"].to(dtype)), key


@pytest.mark.engine
def test_a_step_that_lacks_a_tensor_or_has_one_too_many_is_refused_with_its_names(run, tmp_path):
    run(1, trained, {"num_layers": 3, "moe_layer_freq": "[0]+[1]*2"}, save=str(tmp_path), train_iters=1)
    config = tmp_path / "iter_0000001" / "config.json"
    content = config.read_text()

    def falsified(layers: int) -> dict[str, Any]:
        """Only the tensors can tell that the step is of another model."""
        frequency = f"[0]+[1]*{layers - 1}"
        other = content.replace('"num_layers": 3', f'"num_layers": {layers}').replace("[0]+[1]*2", frequency)
        config.write_text(other)
        seal(tmp_path / "iter_0000001", 1)
        return {"load": str(tmp_path), "num_layers": layers, "moe_layer_freq": frequency, "train_iters": 2}

    for message in run(2, refusal, falsified(2), expert_model_parallel_size=2):
        assert "in the checkpoint, but not in the model: decoder.layers.2.mlp.experts" in message
    (message,) = run(1, refusal, falsified(4))
    assert "not in the checkpoint: decoder.layers.3.mlp.router.expert_bias" in message


def saved_with_a_rounded_bias(flags: dict[str, Any]) -> dict[str, Any]:
    """Train and save, as a framework does that casts the bias with the model."""
    from megatron_moe.checkpoint import dist, writer

    stage = writer.stage

    def rounding(state: dict[str, Any], *args: Any, **kwargs: Any) -> writer.Staged:
        for tensor in dist.sharded_tensors(state):
            if tensor.key.endswith("expert_bias"):
                tensor.data, tensor.dtype = tensor.data.add(0.3).bfloat16(), torch.bfloat16
        return stage(state, *args, **kwargs)

    with mock.patch.object(writer, "stage", rounding):
        return trained(flags)


def test_a_rounded_bias_is_loaded_with_a_loud_warning_that_stays_on_record(run, tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    run(1, saved_with_a_rounded_bias, {"bf16": True}, save=str(first))
    common = {"bf16": True, "lr": 1e-30, "moe_router_bias_update_rate": 0.0}
    (summary,) = run(1, trained, common, load=str(first), save=str(second), train_iters=4)
    (warning,) = summary["precision_warnings"]  # one per MoE layer
    assert warning.startswith(f"PRECISION WARNING: {BIAS} is torch.bfloat16")
    # It was widened, not rounded once more, and is fp32 from then on.
    was, now = tensors(first / "iter_0000003")[BIAS], tensors(second / "iter_0000004")[BIAS]
    assert (was.dtype, now.dtype) == (torch.bfloat16, torch.float32) and torch.equal(now, was.float())
    (summary,) = run(1, trained, common, load=str(second), save=str(third), train_iters=5)
    assert summary["precision_warnings"] == [warning]
    assert "precision_warnings" in (third / "iter_0000005" / "state.json").read_text()


def test_other_kept_modules_need_the_main_weights_and_go_on_from_them(run, tmp_path):
    flags = {"bf16": True, "keep_fp32": ["norms"]}
    full, bare = str(tmp_path / "full"), str(tmp_path / "bare")
    step = run(1, trained, flags, save=full)[0]["checkpoint"]
    run(1, trained, flags, save=bare, no_save_optim=True, train_iters=1)
    run(1, trained, flags, load=full, keep_fp32=["*layernorm"])  # the same modules in other words
    for change, said in (
        ({"keep_fp32": None}, "--keep-fp32: checkpoint ['norms']"),
        ({"keep_fp32": ["norms", "router"]}, "--keep-fp32: checkpoint ['norms']"),
        ({"bf16": False, "fp16": True}, "--bf16: checkpoint True, this run False"),
    ):
        (message,) = run(1, refusal, {**flags, **change}, load=bare, finetune=True)
        assert said in message and "never cast silently" in message and "--dtype" in message
    run(1, moved, flags, keep_fp32=["router"], load=full, save=str(tmp_path / "other"), train_iters=4)
    before, after = tensors(step), tensors(tmp_path / "other" / "iter_0000003")
    assert differing(main_weights(before), main_weights(after)) == []
    changed = differing(own_weights(before), own_weights(after))
    assert changed and all(key.endswith(("norm.weight", "router.weight")) for key in changed)


def test_a_weight_beyond_fp16_is_refused_by_its_name(run, tmp_path):
    large = {"init_method_std": 40000.0, "on_nan": "skip"}
    run(2, trained, large, bf16=True, save=str(tmp_path), train_iters=1)
    for message in run(2, refusal, {"fp16": True}, load=str(tmp_path)):
        assert "fp16: 65504" in message and "embedding.word_embeddings.weight: " in message
        assert "layernorm" not in message
    run(2, trained, {}, load=str(tmp_path), train_iters=1)
