"""A whole run on the pool's ranks learns, and its logged counts are the oracle of the bias."""

import json
import math
from typing import Any

import pytest
import torch

from megatron_moe.config.schema import build
from tests.data import prepared
from tests.data.prepared import ids
from tests.helpers import model_cases
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, TP2, ZERO_3
from tests.helpers.trained_steps import TINY, lines, trained

SHORT = {"num_layers": 2, "seq_length": 32}


def loaded_biases(flags: dict[str, Any]) -> dict[int, tuple[str, str, list[float]]]:
    """Build a model, load a checkpoint into it: per MoE layer the dtypes of bias and counts, and the bias."""
    from megatron_moe.checkpoint.load import load
    from megatron_moe.checkpoint.plan import plan
    from megatron_moe.checkpoint.state import TrainState
    from megatron_moe.moe.router import routers

    trainer = model_cases.Trainer(build({**TINY, **flags}), vocabulary=320)
    source = plan(trainer.run).source
    assert source is not None
    load(trainer.run, source, TrainState(trainer.model, trainer.optimizer, trainer.scheduler, trainer.groups))
    return {
        r.layer_number: (str(r.expert_bias.dtype), str(r.local_tokens_per_expert.dtype), r.expert_bias.tolist())
        for r in routers(trainer.model)
    }


COUNTED: dict[str, dict[str, Any]] = {
    # A scale that overflows at first: those steps are skipped and must not move the bias.
    "fp16": {"fp16": True, "initial_loss_scale": 2.0**24, "hysteresis": 1},
    # The bias is on the softmax over all experts, the weights are a softmax over the chosen.
    "softmax": {"moe_router_score_function": "softmax", "bf16": True},
}


@pytest.mark.parametrize("case", rows(COUNTED, test=["fp16"]))
def test_after_many_steps_and_a_reload_the_bias_has_the_bits_of_the_counts(gloo, tmp_path, case):
    metrics, root = tmp_path / "metrics.jsonl", str(tmp_path / "c")
    flags = {**SHORT, "moe_layer_freq": "[1,1]", **COUNTED[case], **EP2, "train_iters": 24}
    gloo.run(2, trained, flags={**flags, "metrics_file": str(metrics), "save": root})
    steps = lines(metrics)
    assert len(steps) == 24 and any(step["skipped"] for step in steps) == (case == "fp16")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    expected = {layer: torch.zeros(8, dtype=torch.float32) for layer in (1, 2)}
    for step in steps:
        for layer, bias in expected.items():
            counts = torch.tensor(step["tokens_per_expert"][str(layer)], dtype=torch.int64)
            if not step["skipped"]:
                bias += torch.sign(counts.sum() - counts * 8).to(torch.float32) * 1e-3
    assert all(bias.abs().max() > 0.5e-3 for bias in expected.values())
    # loaded on one rank, without the expert parallelism that trained it
    for ranks in (2, 1):
        loading = {**flags, "load": root, "expert_model_parallel_size": ranks}
        biases = gloo.run(ranks, loaded_biases, flags=loading)[-1]
        assert set(biases) == set(expected)
        for layer, (bias_dtype, counts_dtype, bias) in biases.items():
            assert (bias_dtype, counts_dtype) == ("torch.float32", "torch.float32")
            assert bias == expected[layer].tolist()


def skipped(flags: dict[str, Any]) -> dict[str, Any]:
    """The summary of a run with --skip-train, with how many tensors of gradients and of an optimizer it had."""
    from megatron_moe.optim.optimizer import optimizer_tensors
    from megatron_moe.training.callback import Callback

    found: list[Any] = []

    class Looking(Callback):
        def before_training(self) -> None:
            state = self.trainer.trained
            gradients = [
                p for chunk in state.model for p in chunk.parameters() if getattr(p, "main_grad", None) is not None
            ]
            found.extend([*gradients, *optimizer_tensors(state.optimizer)])

    return {**trained(flags, Looking()), "training tensors": len(found)}


def test_skip_train_evaluates_both_splits_as_the_training_did_on_every_layout_and_writes_no_step(gloo, tmp_path):
    root, metrics = tmp_path / "c", tmp_path / "c" / "metrics.jsonl"
    prefix = ids(tmp_path, "text", [[(place * step) % 90 for place in range(40)] for step in range(1, 21)], 100)
    flags = {**SHORT, "moe_layer_freq": "[0,1]", "lr": 3e-3, "eval_iters": 2, "seq_length": 8}
    flags |= {"mock_data": False, "data_path": (prefix,), "split": "50,25,25", "tokenizer_type": "NullTokenizer"}
    flags |= {"vocab_size": 100, "save": str(root), "save_interval": 2, "metrics_file": str(metrics)}
    wanted = gloo.run(1, trained, flags={**flags, "train_iters": 3, "no_save_optim": True})[0]
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    flags |= {"load": str(root), "skip_train": True, "train_iters": 20, "ema_decay": 0.9}
    spread = {**TP2, **EP2, **DISTRIBUTED, "expert_tensor_parallel_size": 1}
    for layout in ({}, spread, PP2, ZERO_3):
        found = gloo.run(2 if layout else 1, skipped, flags={**flags, **layout})[0]
        assert found["training tensors"] == 0
        for split in ("valid_loss", "test_loss"):
            assert found[split] == pytest.approx(wanted[split], rel=1e-6 if layout else 0), layout
        assert (found["iterations"], found["checkpoint"]) == (3, None)
    other = {"ckpt_step": 2, "data_path": None, "split": None, "valid_data_path": (prefix,)}
    assert gloo.run(1, trained, flags={**flags, **other})[0]["valid_loss"] != wanted["valid_loss"]
    evaluations = lines(root / "metrics.eval.jsonl")
    assert [line["iteration"] for line in evaluations] == [3] * 10 + [2]
    del files[root / "metrics.eval.jsonl"]
    assert files == {path: path.read_bytes() for path in files}
    assert {path for path in root.rglob("*") if path.is_file()} == {*files, root / "metrics.eval.jsonl"}


@pytest.mark.test_all(
    instead="tests/data/test_mixture.py::test_a_sample_of_a_source_depends_on_seed_name_and_number_alone"
)
def test_named_sources_go_on_with_other_ranks_batches_and_weights_and_sets_have_one_loss(gloo, tmp_path):
    root, metrics = tmp_path / "c", tmp_path / "metrics.jsonl"

    def text(name: str) -> str:
        documents = [name.join(f"{place * step} " for place in range(12)) for step in range(1, 6)]
        (tmp_path / name).write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        return prepared.run([tmp_path / name], tmp_path / f"data_{name}")

    a, b = text("a.jsonl"), text("b.jsonl")

    def write(weight: float, end: str = "", name: str = "a") -> None:
        (tmp_path / "data.yaml").write_text(
            f"sources:\n  {name}: {{path: {a}, weight: {weight}, split: '7,3,0'}}\n  b: {{path: {b}, weight: 1{end}}}\n"
            f"validation:\n  whole: {{path: {a}, split: '7,3,0'}}\n  part: {{path: {b}, batches: 1}}\n"
        )

    def run(ranks: int = 1, **changes: Any) -> dict[str, Any]:
        return gloo.run(ranks, trained, flags={**flags, **changes})[0]

    def hashes(first: int, last: int) -> tuple[int, ...]:
        """The sums of the halves of the samples' hashes, over the steps from `first` to `last`."""
        found = [step["data_hash"] for step in lines(metrics) if first <= step["iteration"] <= last]
        return tuple(sum(int(each[at : at + 8], 16) for each in found) % 2**32 for at in (0, 8))

    write(3)
    flags = {**SHORT, "moe_layer_freq": "[0,1]", "seq_length": 8, "mock_data": False, "eval_iters": 1}
    flags |= {"data_config": str(tmp_path / "data.yaml")}
    flags |= {"global_batch_size": 4, "micro_batch_size": 2, "metrics_file": str(metrics)}
    run(train_iters=8)
    whole, of_sources = hashes(5, 8), lines(metrics)[-1]["sources"]
    flags |= {"save": str(root), "load": str(root)}
    metrics = tmp_path / "pieces.jsonl"
    flags |= {"metrics_file": str(metrics)}
    wanted = run(train_iters=4, eval_at_start=True)
    found = lines(tmp_path / "pieces.eval.jsonl")
    for line in found:  # nearly every token is a byte, the others end documents
        assert 0.9 * line["tokens"] < line["bytes"] <= line["tokens"]
        assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2) * line["tokens"] / line["bytes"])
    names = ["valid/whole", "valid/part"]
    assert [(line["iteration"], line["split"]) for line in found] == [(step, name) for step in (0, 4) for name in names]
    for layout in ({**EP2, **DISTRIBUTED}, PP2):
        again = run(2, train_iters=4, skip_train=True, save=None, **layout)
        for name in names:
            assert again[f"{name}_loss"] == pytest.approx(wanted[f"{name}_loss"], rel=1e-6)
    run(2, train_iters=6, global_batch_size=8)
    assert hashes(5, 6) == whole
    for name, facts in lines(metrics)[-1]["sources"].items():
        assert facts["epochs"] == of_sources[name]["epochs"] > 0
    write(0.5, ", epochs: 0.5, when_done: stop", name="c")
    summary = run(train_iters=999, global_batch_size=8)
    assert summary["iterations"] < 20
    state = json.loads((root / f"iter_{summary['iterations']:07d}" / "state.json").read_text())
    assert sum(facts["samples"] for facts in state["sources"].values()) == state["consumed_samples"]
    for step in lines(metrics):
        assert step["sources"].keys() == ({"a", "b"} if step["iteration"] <= 6 else {"c", "b"})
        assert sum(facts["tokens"] for facts in step["sources"].values()) == step["tokens"]
        found = [facts["tokens"] * (facts["loss"] or 0.0) for facts in step["sources"].values()]
        assert sum(found) == pytest.approx(step["loss"] * step["tokens"], rel=1e-6)
    assert 0 < step["sources"]["b"]["epochs"] <= 0.5 and step["sources"]["c"]["epochs"] < of_sources["a"]["epochs"]
