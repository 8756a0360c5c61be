"""Runs on the pretended CUDA machine of `tests/helpers/cuda_on_cpu.py`, by the flags that users type.

They are forked from a process that has loaded torch and the engine, and has a Transformer Engine built for another
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import ROOT, Child, RankParent

CUDA = ("-m", "tests.helpers.cuda_on_cpu")
FLAGS = (
    "--preset tiny --mock-data --vocab-size 512 --seq-length 32 --max-position-embeddings 32 --bf16 --eval-iters 0 "
    "--micro-batch-size 1 --global-batch-size 2 --lr-decay-iters 6 --hidden-dropout 0.1 --num-layers 2 "
    "--moe-layer-freq [0]+[1]*1 --save steps --load steps"
)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankParent]:
    """A process with the pretended CUDA and a Transformer Engine that cannot be loaded, which forks others."""
    library = tmp_path_factory.mktemp("libraries") / "transformer_engine"
    library.mkdir()
    (library / "__init__.py").write_text("raise AssertionError('built for another torch')")
    parent = RankParent(("-W", "ignore", *CUDA, str(ROOT / "tests" / "helpers" / "ranks.py")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(library.parent))
        parent.statuses([])  # starts it
    yield parent
    parent.close()


def printed(parent: RankParent, target: str, argv: list[str] | None, folder: Path, **environment: str) -> str:
    """Run a program in `folder`, which has to succeed; return what it printed."""
    log = folder / f"printed{len(list(folder.glob('printed*')))}"
    pids = parent.fork([Child(target, argv, str(log), str(folder), environment)])
    assert parent.statuses(pids, 300.0) == [0], log.read_text()
    return log.read_text()


def command(iterations: int, flags: str) -> list[str]:
    return [*flags.split(), "--train-iters", str(iterations), "--metrics-file", "metrics.jsonl"]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of all steps so far."""
    return [step for step in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in step]


def trained(parent: RankParent, folder: Path, iterations: int, flags: str = FLAGS) -> tuple[str, list[dict[str, Any]]]:
    """Train up to this iteration; return what was printed, and the metrics of all steps so far."""
    return printed(parent, "pretrain_moe:main", command(iterations, flags), folder), steps_of(folder)


def engine_is_as_published(_: Any) -> None:
    """What the adaptor has left of torch and the engine in a process where CUDA was reported."""
    import torch
    from megatron.core import jit, optimizer
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import random

    for name in ("current_device", "synchronize", "current_stream", "get_rng_state", "set_rng_state", "manual_seed"):
        assert "cpu_adaptor" not in str(getattr(torch.cuda, name).__module__), name
    assert "cpu_adaptor" not in torch.Tensor.cuda.__module__
    assert "cuda" in clip_grads.get_grad_norm_fp32.__code__.co_consts
    assert random._set_cuda_rng_state.__module__ == random.__name__
    assert jit.jit_fuser is torch.compile
    giving_back = getattr(random, "_get_share_storage", None)
    assert giving_back is None or giving_back.__module__ == "megatron_moe.platform.cpu_adaptor"
    assert optimizer.Adam.__module__ == "megatron_moe.platform.adam" and not optimizer.USING_PYTORCH_OPTIMIZER


@pytest.mark.engine
def test_with_cuda_reported_nothing_is_changed_but_adam_and_recomputation(cuda, tmp_path):
    printed(cuda, "tests.platform.test_devices_pretended:engine_is_as_published", None, tmp_path)


@pytest.fixture(scope="module")
def plain(cuda: RankParent, tmp_path_factory: Any) -> list[dict[str, Any]]:
    """Two steps with CUDA, which others are compared with."""
    return trained(cuda, tmp_path_factory.mktemp("plain"), 2, FLAGS.partition(" --save")[0])[1]


def test_a_run_goes_on_with_another_kind_of_device(rank_parent, cuda, tmp_path):
    trained(rank_parent, tmp_path, 1)
    with_cuda, _ = trained(cuda, tmp_path, 2)
    on_cpu, steps = trained(rank_parent, tmp_path, 3)
    for output in (with_cuda, on_cpu):
        assert "random states of every rank are made anew" in output and "hidden_dropout" in output
    assert [step["iteration"] for step in steps] == [1, 2, 3]


def test_a_broken_transformer_engine_and_recomputation_leave_the_numbers_as_they_are(cuda, plain, tmp_path):
    compiled = tmp_path / "compiled"
    flags = f"{FLAGS.partition(' --save')[0]} --recompute-granularity selective"
    flags += " --recompute-modules layernorm moe_act mla_up_proj"
    extensions = {"TORCH_EXTENSIONS_DIR": str(compiled)}
    output = printed(cuda, "pretrain_moe:main", command(2, flags), tmp_path, **extensions)
    assert "Transformer Engine is not used" in output and "AssertionError: built for another torch" in output
    assert not compiled.exists(), "neither an extension nor a lock"
    steps = steps_of(tmp_path)
    assert [step["loss"] for step in steps] == [step["loss"] for step in plain]
    assert [step["grad_norm"] for step in steps] == [step["grad_norm"] for step in plain]


def test_with_cuda_activations_are_offloaded_without_a_change_to_the_numbers(cuda, plain, tmp_path):
    flags = FLAGS.partition(" --save")[0]
    offload = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules core_attn moe_act"
    output, steps = trained(cuda, tmp_path, 2, f"{flags} {offload}")
    assert "has no effect" not in output
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [
        (step["loss"], step["grad_norm"]) for step in plain
    ]


def verified(cuda: RankParent, folder: Path, *flags: str) -> str:
    """Replay the recorded steps as the one rank of a launched world; return the last line."""
    launched = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    target = "megatron_moe.apps.verify_resume.cli:main"
    return printed(cuda, target, ["steps", *flags], folder, **launched).splitlines()[-1]


def test_a_deterministic_run_records_its_settings_and_is_replayed_to_the_bit(cuda, tmp_path):
    output, _ = trained(cuda, tmp_path, 2, f"{FLAGS} --deterministic-mode --save-interval 1")
    assert "deterministic mode: " in output and "NCCL_ALGO=Ring" in output
    arithmetic = json.loads((tmp_path / "steps" / "iter_0000002" / "state.json").read_text())["arithmetic"]
    assert (arithmetic["CUBLAS_WORKSPACE_CONFIG"], arithmetic["NCCL_ALGO"]) == (":4096:8", "Ring")
    assert verified(cuda, tmp_path).endswith("compared to the bit: all agree")
    told = verified(cuda, tmp_path, "--no-deterministic-mode")
    assert "within tolerances" in told and "CUDA without --deterministic-mode" in told
