"""What is saved is what was trained, bit for bit; what lacks a tensor or would be rounded twice is refused."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_moe.config.schema import build
from megatron_moe_tools.plan.layouts import Machine
from megatron_moe_tools.plan.meta_tracer import LiveBytes
from megatron_moe_tools.plan.plan import loading_memory
from megatron_moe_tools.plan.tracing import trace_ranks
from tests.checkpoint.checkpoint_steps import seal
from tests.helpers import stepped_trainer
from tests.helpers.rows import rows
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
    from megatron_moe.checkpoint import writer

    stage = writer.stage

    def rounding(shards: list[Any], *args: Any, **kwargs: Any) -> writer.Staged:
        for number, shard in enumerate(shards):
            if shard.key.endswith("expert_bias"):
                shards[number] = replace(shard, values=shard.values.add(0.3).bfloat16(), dtype=torch.bfloat16)
        return stage(shards, *args, **kwargs)

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


LAYOUTS: dict[str, dict[str, Any]] = {
    "DP4, ZeRO 1": DISTRIBUTED,
    "DP2 x EP2, ZeRO 1": {**DISTRIBUTED, "expert_model_parallel_size": 2, "ema_decay": 0.9},
    "DP4, whole state": {"bf16": True, "ema_decay": 0.9},
    "DP2 x EP2, whole state": {"fp16": True, "initial_loss_scale": 256.0, "expert_model_parallel_size": 2},
    "DP4, ZeRO 3": {"bf16": True, "data_parallel_sharding_strategy": "optim_grads_params"},
    "DP2 x EP2, packed state": {**DISTRIBUTED, "expert_model_parallel_size": 2, "use_precision_aware_optimizer": True},
}
AT_ONCE = {"DP4, ZeRO 1", "DP4, whole state"}
"""Layouts in which one piece is all that a rank reads of a group's tensors."""


class HostBytes(LiveBytes):
    """Counts what has memory."""

    def _see(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            super()._see(tensor)


def carried(flags: dict[str, Any], piece: int) -> dict[str, Any]:
    """Bytes that this rank writes and reads of weights and of optimizer state; its shards before and after.

    `taken` is the largest memory that the load took besides the state.
    """
    from megatron_moe.checkpoint import dist, writer
    from megatron_moe.checkpoint.load import load
    from megatron_moe.checkpoint.plan import plan
    from megatron_moe.checkpoint.state import model_shards
    from megatron_moe.checkpoint.step_reader import StepReader

    written, read = {"weights": 0, "optimizer": 0}, {"weights": 0, "optimizer": 0}
    resolve, read_tensor, read_bytes = writer.Staged.resolve_data, StepReader.read, StepReader._bytes
    kind = "weights"

    def kind_of(key: str) -> str:
        return "optimizer" if key.startswith("optimizer.") else "weights"

    def resolved(self: Any, item: Any) -> torch.Tensor:
        value = resolve(self, item)
        written[kind_of(item.index.fqn)] += value.nbytes
        return value

    def named(self: StepReader, key: str, *box: Any) -> torch.Tensor:
        nonlocal kind
        kind = kind_of(key)
        return read_tensor(self, key, *box)

    def counted(self: StepReader, *place: Any) -> torch.Tensor:
        content = read_bytes(self, *place)
        read[kind] += content.nbytes
        return content

    with (
        HostBytes() as live,
        mock.patch.object(dist, "PIECE_BYTES", piece),
        mock.patch.object(writer.Staged, "resolve_data", resolved),
        mock.patch.object(StepReader, "read", named),
        mock.patch.object(StepReader, "_bytes", counted),
    ):
        trainer = stepped_trainer.Trainer({**stepped_trainer.STORED, **flags})
        trainer.step()
        trainer.save()
        before = trainer.tensors()
        trainer.step()
        trainer.optimizer.zero_grad()
        for shard in model_shards(trainer.trained):
            shard.values.fill_(torch.nan)
        held = live.live
        live.restart_peak()
        load(trainer.run, plan(trainer.run).source, trainer.trained)
        taken = live.peak - held
    after = trainer.tensors()
    return {"written": written, "read": read, "before": (None, before), "after": (None, after), "taken": taken}


@pytest.mark.engine
@pytest.mark.parametrize("layout", rows(LAYOUTS, test=["DP4, ZeRO 1", "DP2 x EP2, whole state"]))
def test_each_rank_writes_and_reads_its_share_in_the_memory_that_is_planned(gloo, tmp_path, monkeypatch, layout):
    flags = {**LAYOUTS[layout], "save": str(tmp_path), "load": str(tmp_path), "no_load_rng": True}
    piece = 2**25 if layout in AT_ONCE else 4096
    found = gloo.run(4, carried, flags=flags, piece=piece)
    for carry in ("written", "read"):
        for kind in ("weights", "optimizer"):
            sizes = [rank[carry][kind] for rank in found]
            assert max(sizes) * 4 == pytest.approx(sum(sizes), rel=0.1)
            # No byte is on two ranks: all of them together carry a step.
            assert sum(sizes) == pytest.approx(sum(rank["written"][kind] for rank in found), rel=0.1)
    stepped_trainer.require_same_bits([rank["before"] for rank in found], [rank["after"] for rank in found])
    monkeypatch.setattr("megatron_moe.checkpoint.dist.PIECE_BYTES", piece)
    run = build({**stepped_trainer.TINY, **stepped_trainer.STORED, **flags})
    traces = trace_ranks(run, 4, run.derived.padded_vocab_size(100), device="cpu", imbalance=1.0)
    plan = loading_memory(run, traces, Machine(device="cpu"))
    assert plan["host_rank"] == pytest.approx(max(rank["taken"] for rank in found), rel=0.05)


def refused_by_one_rank(flags: dict[str, Any]) -> str:
    """What a run is told of which the second rank cannot read a weight that all ranks hold."""
    from megatron_moe.checkpoint.step_reader import StepReader
    from megatron_moe.config.errors import ConfigError

    def unreadable(self: StepReader, key: str, *box: Any) -> torch.Tensor:
        if torch.distributed.get_rank() == 1 and key.endswith("router.weight"):
            raise ConfigError("__1_0.distcp ends early")
        return read(self, key, *box)

    read = StepReader.read
    with mock.patch.object(StepReader, "read", unreadable):
        return refusal(flags)


def test_what_one_rank_cannot_read_all_of_them_refuse(run, saved):
    assert run(2, refused_by_one_rank, DISTRIBUTED, load=saved, train_iters=4) == ["__1_0.distcp ends early"] * 2
