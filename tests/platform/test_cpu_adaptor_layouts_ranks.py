"""megatron-core's own dense model on the CPU: every layout trains as one rank does, and its optimizer resumes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from megatron_moe.config.schema import Run, replace

pytestmark = pytest.mark.engine

STEPS = 3
LAYOUTS = {
    "TP2 with sequence parallelism": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "TP2": (2, dict(tensor_model_parallel_size=2)),
    "PP2": (2, dict(pipeline_model_parallel_size=2)),
    "DP2": (2, dict()),
    "DP2 with the distributed optimizer": (2, dict(use_distributed_optimizer=True)),
    "DP2, overlapped": (2, dict(use_distributed_optimizer=True, overlap_grad_reduce=True)),
    "TP2 x PP2": (
        4,
        dict(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            sequence_parallel=True,
            use_distributed_optimizer=True,
        ),
    ),
}
DISTRIBUTED = replace(Run(), use_distributed_optimizer=True)


@pytest.fixture(scope="module")
def dense():
    """tests/platform/dense_model.py, loaded by path."""
    path = Path(__file__).parent / "dense_model.py"
    spec = importlib.util.spec_from_file_location("dense_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["dense_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def one_rank(gloo, dense):
    """(loss, gradient norm) per step of one rank, in fp32."""
    (curve,) = gloo.run(1, dense.train_from_scratch, run=Run(), steps=STEPS)
    assert curve[-1][0] < curve[0][0] - 0.05, "the oracle learns, or the comparison would prove nothing"
    return curve


def assert_same(curve, oracle, relative=2e-6):
    assert len(curve) == len(oracle)
    for mine, reference in zip(curve, oracle, strict=True):
        assert mine == pytest.approx(reference, rel=relative)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(gloo, dense, one_rank, name):
    world_size, settings = LAYOUTS[name]
    for curve in gloo.run(world_size, dense.train_from_scratch, run=replace(Run(), **settings), steps=STEPS):
        assert_same(curve, one_rank)


def test_recomputation_repeats_dropout_exactly(gloo, dense):
    """The random states of a recomputed layer are the ones of its first pass, under TP too."""
    layout = replace(Run(), tensor_model_parallel_size=2, sequence_parallel=True)
    recomputed = replace(layout, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    plain = gloo.run(2, dense.train_from_scratch, run=layout, steps=STEPS, dropout=0.3)
    again = gloo.run(2, dense.train_from_scratch, run=recomputed, steps=STEPS, dropout=0.3)
    without = gloo.run(2, dense.train_from_scratch, run=layout, steps=1)
    assert plain == again
    assert plain[0][0] != pytest.approx(without[0][0], rel=1e-4), "dropout drops something"


@pytest.mark.parametrize("save_on, load_on", [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_the_distributed_optimizer_resumes_on_any_number_of_ranks(gloo, dense, tmp_path, save_on, load_on):
    straight = gloo.run(save_on, dense.save_and_go_on, run=DISTRIBUTED, folder=str(tmp_path))[0]
    for curve, steps in gloo.run(load_on, dense.load_and_go_on, run=DISTRIBUTED, folder=str(tmp_path)):
        assert set(steps) == {4}
        if save_on == load_on:
            assert curve == straight, "the same layout goes on bit for bit"
        else:
            assert_same(curve, straight)


def test_the_distributed_optimizer_resumes_in_another_layout(gloo, dense, tmp_path):
    straight = gloo.run(2, dense.save_and_go_on, run=DISTRIBUTED, folder=str(tmp_path))[0]
    other = replace(DISTRIBUTED, tensor_model_parallel_size=2, sequence_parallel=True)
    for curve, _ in gloo.run(2, dense.load_and_go_on, run=other, folder=str(tmp_path)):
        assert_same(curve, straight)
