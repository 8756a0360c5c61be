"""Runs on the pretended CUDA machine of `tests/helpers/cuda_on_cpu.py`, by the flags that users type.

They are forked from a process that has loaded torch and the engine, and has a Transformer Engine built for another
torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import ROOT, RankParent
from tests.platform.forked_runs import FLAGS, printed, steps_of

CUDA = ("-m", "tests.helpers.cuda_on_cpu")
RUN = f"{FLAGS} --bf16 --hidden-dropout 0.1"
SAVED = f"{RUN} --save steps --load steps"


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


def trained(parent: RankParent, folder: Path, iterations: int, flags: str, **environment: str) -> tuple[str, Any]:
    """Train up to this iteration; return what was printed, and the metrics of all steps so far."""
    command = f"{flags} --train-iters {iterations}".split()
    return printed(parent, "pretrain_moe:main", command, folder, **environment), steps_of(folder)


def assert_equal_bits(steps: Any, plain: Any) -> None:
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in steps.values()] == [step[name] for step in plain.values()]


def engine_is_as_published(_: Any) -> None:
    """What the adaptor has left of torch and the engine in a process where CUDA was reported."""
    import torch
    from megatron.core import jit, optimizer
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import random

    for name in ("current_device", "synchronize", "current_stream", "get_rng_state", "set_rng_state", "manual_seed"):
        assert "import_hook" not in str(getattr(torch.cuda, name).__module__), name
    assert "import_hook" not in torch.Tensor.cuda.__module__
    assert "cuda" in clip_grads.get_grad_norm_fp32.__code__.co_consts
    assert random._set_cuda_rng_state.__module__ == random.__name__
    assert jit.jit_fuser is torch.compile
    giving_back = getattr(random, "_get_share_storage", None)
    assert giving_back is None or giving_back.__module__ == "megatron_moe.engine.import_hook"
    assert optimizer.Adam.__module__ == "megatron_moe.engine.adam" and not optimizer.USING_PYTORCH_OPTIMIZER


@pytest.mark.engine
def test_with_cuda_reported_nothing_is_changed_but_adam_and_recomputation(cuda, tmp_path):
    printed(cuda, "tests.platform.test_hardware_pretended:engine_is_as_published", None, tmp_path)


@pytest.fixture(scope="module")
def plain(cuda: RankParent, folder: Path) -> Any:
    """Two steps with CUDA, which others are compared with."""
    return trained(cuda, folder, 2, RUN)[1]


def test_a_run_goes_on_with_another_kind_of_device(rank_parent, cuda, tmp_path):
    trained(rank_parent, tmp_path, 1, SAVED)
    with_cuda, _ = trained(cuda, tmp_path, 2, SAVED)
    on_cpu, steps = trained(rank_parent, tmp_path, 3, SAVED)
    for output in (with_cuda, on_cpu):
        assert "random states of every rank are made anew" in output and "hidden_dropout" in output
    assert list(steps) == [1, 2, 3]


def test_a_broken_transformer_engine_and_recomputation_leave_the_numbers_as_they_are(cuda, plain, tmp_path):
    compiled = tmp_path / "compiled"
    flags = f"{RUN} --recompute-granularity selective --recompute-modules layernorm moe_act mla_up_proj"
    output, steps = trained(cuda, tmp_path, 2, flags, TORCH_EXTENSIONS_DIR=str(compiled), CUDA_VISIBLE_DEVICES="0")
    assert "CUDA's allocator: PYTORCH_ALLOC_CONF=expandable_segments:True" in output
    assert "Transformer Engine is not used" in output and "AssertionError: built for another torch" in output
    assert not compiled.exists(), "neither an extension nor a lock"
    assert_equal_bits(steps, plain)


def test_with_cuda_activations_are_offloaded_without_a_change_to_the_numbers(cuda, plain, tmp_path):
    offload = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1 --offload-modules core_attn moe_act"
    output, steps = trained(cuda, tmp_path, 2, f"{RUN} {offload}")
    assert "has no effect" not in output
    assert_equal_bits(steps, plain)


def verified(cuda: RankParent, folder: Path, *flags: str) -> str:
    """Replay the recorded steps as the one rank of a launched world; return the last line."""
    launched = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    target = "megatron_moe_tools.verify_resume:main"
    return printed(cuda, target, ["steps", *flags], folder, **launched).splitlines()[-1]


def test_a_deterministic_run_records_its_settings_and_is_replayed_to_the_bit(cuda, tmp_path):
    output, _ = trained(cuda, tmp_path, 2, f"{SAVED} --deterministic-mode --save-interval 1")
    assert "deterministic mode: " in output and "NCCL_ALGO=Ring" in output
    arithmetic = json.loads((tmp_path / "steps" / "iter_0000002" / "state.json").read_text())["arithmetic"]
    assert (arithmetic["CUBLAS_WORKSPACE_CONFIG"], arithmetic["NCCL_ALGO"]) == (":4096:8", "Ring")
    assert verified(cuda, tmp_path).endswith("compared to the bit: all agree")
    told = verified(cuda, tmp_path, "--no-deterministic-mode")
    assert "within tolerances" in told and "CUDA without --deterministic-mode" in told
