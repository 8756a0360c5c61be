"""Runs with Transformer Engine's own Python over a stub of its extension (`tests/helpers/te_stub.py`).

The flags are those that users type; the machine is the pretended one of `tests/helpers/cuda_on_cpu.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launchers import Forked
from tests.helpers.ranks import ROOT, RankParent
from tests.helpers.rows import rows
from tests.helpers.trained_steps import differing, tensors
from tests.platform.forked_runs import FLAGS, printed, steps_of

ENGINE = "--transformer-impl transformer_engine --moe-expert-backend te"
LAYOUT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --use-distributed-optimizer"
)
PREPARED = ("-m", "tests.helpers.cuda_on_cpu", "--transformer-engine", str(ROOT / "tests/helpers/ranks.py"))


@pytest.fixture(scope="module")
def te_parent() -> Iterator[RankParent]:
    """A process with the pretended CUDA and Transformer Engine, which forks ranks."""
    parent = RankParent(PREPARED)
    yield parent
    parent.close()


def trained(launcher: Forked, world_size: int, folder: Path, *flags: str) -> dict[int, dict[str, Any]]:
    """Train in `folder`, which the flags name paths relative to; return the metrics of each iteration."""
    folder.mkdir(exist_ok=True)
    launcher.start(" ".join((FLAGS, *flags)).split(), world_size, folder, folder / "log")
    assert launcher.wait(300) == 0, (folder / "log").read_text()
    return steps_of(folder)


@pytest.fixture(scope="module")
def with_te(te_parent) -> Forked:
    return Forked(te_parent, "tests.platform.te_cases:trained")


@pytest.fixture(scope="module")
def local(rank_parent, tmp_path_factory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """The oracle: four steps of the local implementation on one rank, without CUDA."""
    folder = tmp_path_factory.mktemp("local")
    return folder, trained(
        Forked(rank_parent), 1, folder, "--train-iters 4 --save-interval 3 --save . --use-distributed-optimizer"
    )


@pytest.fixture(scope="module")
def whole(with_te, tmp_path_factory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """Three steps of Transformer Engine's modules on two ranks, saved after the second and the third."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained(with_te, 2, folder, ENGINE, LAYOUT, "--train-iters 3 --save-interval 2 --save .")


def assert_equal_steps(ours: dict[int, dict[str, Any]], reference: dict[int, dict[str, Any]], rel: float) -> None:
    for iteration, step in ours.items():
        for name in ("loss", "grad_norm"):
            assert step[name] == pytest.approx(reference[iteration][name], rel=rel), (iteration, name)


def test_its_step_is_audited(te_parent, tmp_path):
    said = printed(te_parent, "megatron_moe_tools.audit.cli:main", f"{FLAGS} {ENGINE} --bf16".split(), tmp_path)
    for words in ("unintended promotions  0", "mixed matmuls          0", "fp32 state violations  0", "GroupedExperts"):
        assert words in said


def test_the_grouped_product_is_the_loop_over_experts(te_parent, tmp_path):
    printed(te_parent, "tests.platform.te_cases:products", None, tmp_path)


def test_its_grouped_product_in_fp8_is_the_emulation_of_the_same_tiles(te_parent, tmp_path):
    printed(te_parent, "tests.platform.te_cases:fp8_products", None, tmp_path)


def test_stage_9_of_make_gpu_compares_both_backends(te_parent, tmp_path):
    printed(te_parent, "tests.platform.te_cases:stage_9", [str(tmp_path / "notes"), str(tmp_path)], tmp_path)
    checks = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert [check["status"] for check in checks if "status" in check] == ["pass"] * 4


@pytest.mark.engine
def test_its_modules_train_as_the_local_ones_and_save_the_same_keys(local, whole):
    folder, steps = whole
    assert sorted(steps) == [1, 2, 3]
    assert_equal_steps(steps, local[1], rel=1e-5)
    for rank in (0, 1):
        calls = json.loads((folder / f"calls.{rank}.json").read_text())
        assert {"GroupedLinear", "Linear", "RMSNorm", "DotProductAttention", "FusedAdam"} <= set(calls), calls
        assert calls["GroupedLinear"] <= 2 * 3 * 2  # two products, three steps of two micro-batches; less where empty
    ours, reference = (tensors(one / "iter_0000003") for one in (folder, local[0]))
    moments = [key for key in reference if key.startswith("optimizer.state.exp_avg.")]
    assert len(moments) > 10
    for key in moments:  # sums of gradients
        scale = reference[key].abs().max().item()
        torch.testing.assert_close(ours[key], reference[key], rtol=0, atol=1e-4 * scale)
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in reference.items()}
    assert not any("_extra_state" in key for key in ours)
    assert any(key.endswith("experts.weight1") for key in ours)


@pytest.mark.engine
def test_a_resumed_run_is_the_uninterrupted_one(with_te, whole, tmp_path):
    flags = f"--train-iters 3 --load {whole[0]} --ckpt-step 2 --save {tmp_path}"
    trained(with_te, 2, tmp_path, ENGINE, LAYOUT, flags)
    expected, found = (tensors(folder / "iter_0000003") for folder in (whole[0], tmp_path))
    assert found and differing(expected, found) == []


def test_another_backend_and_layout_goes_on_and_back(local, whole, rank_parent, with_te, tmp_path):
    there, back = tmp_path / "there", tmp_path / "back"
    flags = f"--train-iters 3 --load {whole[0]} --ckpt-step 2 --save {there} --moe-expert-backend loop"
    assert_equal_steps(trained(Forked(rank_parent), 1, there, flags), local[1], rel=1e-5)
    steps = trained(with_te, 1, back, ENGINE, f"--train-iters 4 --load {there}")
    assert list(steps) == [4]
    assert_equal_steps(steps, local[1], rel=1e-5)


@pytest.mark.parametrize("dtype", rows(["bf16", "fp16"], test=["bf16"]))
def test_half_precision_trains_and_resumes(dtype, local, with_te, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    flags = f"--{dtype} --moe-expert-backend te --train-iters 2 --save-interval 1"
    steps = trained(with_te, 1, first, flags, f"--save {first}")
    assert_equal_steps(steps, local[1], rel=2e-2)
    trained(with_te, 1, second, flags, f"--load {first} --ckpt-step 1 --save {second}")
    expected, found = (tensors(folder / "iter_0000002") for folder in (first, second))
    assert found and differing(expected, found) == []


def test_fp8_trains_and_is_near_the_emulation(rank_parent, with_te, tmp_path):
    flags = "--bf16 --fp8-format e4m3 --hidden-size 128 --moe-ffn-hidden-size 128 --train-iters 1"
    steps = trained(with_te, 1, tmp_path / "te", ENGINE, flags)
    assert "by Transformer Engine" in (tmp_path / "te" / "log").read_text()
    emulated = trained(Forked(rank_parent), 1, tmp_path / "ours", flags)
    assert_equal_steps(steps, emulated, rel=1e-2)
