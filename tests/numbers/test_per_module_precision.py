"""fp32 exceptions in bf16 and fp16 models: weights and compute, the residual stream, gradients, evaluation, layouts."""

import pytest
import torch

from tests.helpers import trained_steps
from tests.helpers.rows import rows
from tests.numbers import precision_cases as cases

ALL = {"keep_fp32": ("*",), "fp32_residual_connection": True}
SOME = {"keep_fp32": ("norms", "router", "decoder.layers.1", "decoder.layers.2.mlp.experts", "output_layer", "softmax")}
FP32, BF16 = ("torch.float32", "torch.float32"), ("torch.bfloat16", "torch.float32")


@pytest.fixture
def trained(once):
    """Two steps under flags and a layout, run once each: results of all ranks."""

    def of(layout="one rank", **flags):
        ranks, sizes = cases.LAYOUTS[layout]
        return once(ranks, cases.trained, run=cases.run_of(**{**flags, **sizes}))

    return of


@pytest.mark.parametrize("layout", rows(cases.LAYOUTS, test=["DP2, distributed optimizer"]))
def test_a_bf16_model_of_which_all_is_kept_trains_as_an_fp32_model_does(trained, layout):
    for got, wanted in zip(trained(layout, bf16=True, **ALL), trained(layout)):
        # the very same numbers: nothing anywhere passes through bf16, from the drawn weights to the second step
        assert got["losses"] == wanted["losses"]
        assert got["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
        assert {dtype for pair in got["dtypes"].values() for dtype in pair} == {"torch.float32"}
        for name, weight in wanted["weights"].items():
            assert torch.equal(got["weights"][name], weight), name
    assert wanted["losses"] == pytest.approx(trained()[0]["losses"], rel=1e-6)


TP2_SP, PP2 = cases.LAYOUTS["TP2, SP"][1], cases.LAYOUTS["PP2"][1]
PARTS_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "core_attn", "moe")}
TIED = {"untie_embeddings_and_output_weights": False}
OTHERS = {
    "interleaved stages": (2, {**PP2, "num_layers_per_virtual_pipeline_stage": 1}),
    "four ranks": (4, {**TP2_SP, **PP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "fused loss, recomputed": (1, {**PARTS_AGAIN, "cross_entropy_loss_fusion": True}),
    "further predictions, tied over stages": (2, {**PP2, **TIED, "mtp_num_layers": 1}),
}


@pytest.mark.engine
@pytest.mark.parametrize("case", rows(OTHERS, test=["four ranks", "further predictions, tied over stages"]))
def test_other_models_and_schedules_of_which_all_is_kept_are_fp32_too(gloo, case):
    ranks, flags = OTHERS[case]
    fp32 = gloo.run(ranks, cases.trained, run=cases.run_of(**flags))[0]
    kept = gloo.run(ranks, cases.trained, run=cases.run_of(bf16=True, **ALL, **flags))[0]
    assert kept["losses"] == fp32["losses"]
    assert kept["norms"] == pytest.approx(fp32["norms"], rel=1e-6)


def _is_kept(name):
    kept = ("layernorm.weight", "router.weight")
    return name.endswith(kept) or name.startswith(("decoder.layers.1.", "decoder.layers.2.mlp.experts", "output_layer"))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("layout", "half"),
    rows(
        [*((layout, "bf16") for layout in cases.LAYOUTS), ("EP2", "fp16"), ("DP2, distributed optimizer", "fp16")],
        test=[("TP2, SP", "bf16"), ("EP2", "fp16")],
    ),
)
def test_kept_weights_are_fp32_wherever_they_lie_and_the_others_are_not(trained, layout, half):
    flags = {"fp16": True, "initial_loss_scale": 256.0} if half == "fp16" else {"bf16": True}
    fp32, wanted, seen = trained(layout), trained(**flags, **SOME)[0], set()
    for rank, result in enumerate(trained(layout, **flags, **SOME)):
        assert result["committed"]
        for name, dtypes in result["dtypes"].items():
            narrow = (f"torch.{'bfloat16' if half == 'bf16' else 'float16'}", "torch.float32")
            assert dtypes == (FP32 if _is_kept(name) else narrow), name
            if _is_kept(name):  # drawn in fp32, and never rounded on the way
                assert torch.equal(result["weights"][name], fp32[rank]["weights"][name]), name
        seen |= set(result["dtypes"])
        # tensor parallelism sums partial products that are rounded to the model's dtype; the others change no sum there
        bound = 1e-2 if layout == "TP2, SP" else 1e-3
        assert result["losses"] == pytest.approx(wanted["losses"], rel=bound)
        # the norm counts every parameter once, of either dtype and on whichever rank
        assert result["norms"][0] == pytest.approx(wanted["norms"][0], rel=bound)
    assert seen == set(wanted["dtypes"])


ALL_AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    rows(
        [*((layout, {}) for layout in ("one rank", "TP2, SP", "PP2", "EP2")), ("TP2, SP", ALL_AGAIN)],
        test=[("one rank", {}), ("TP2, SP", ALL_AGAIN)],
    ),
)
def test_the_fp32_residual_is_fp32_at_every_boundary_and_holds_more_than_bf16_can(gloo, layout, recompute):
    ranks, sizes = cases.LAYOUTS[layout]
    run = cases.run_of(bf16=True, fp32_residual_connection=True, **sizes, **recompute)
    for seen in gloo.run(ranks, cases.residual_stream, run=run):
        for place, (dtype, wider_than_bf16) in seen["stream"].items():
            assert dtype == "torch.float32", place
            # the embedding's rows are bf16 weights; everything added to them is kept in full
            assert wider_than_bf16 or place in ("into layer 0", "embedding"), place
        assert seen["gradients"] == {"torch.float32"}  # of the stream, on its way back
        assert seen["branches"] == {"torch.bfloat16"}
        if layout == "one rank":
            assert seen["error"] == 0.0  # the sum of its branches to the last bit


@pytest.mark.parametrize("layout", rows(cases.LAYOUTS, test=["EP2"]))
def test_gradients_accumulate_and_reduce_in_bf16_but_for_kept_weights(trained, layout):
    flags = {"bf16": True, "grad_reduce_in_bf16": True, "keep_fp32": ("norms", "decoder.layers.1", "output_layer")}
    kept = ("decoder.layers.1.", "output_layer")
    wanted = trained(**{**flags, "grad_reduce_in_bf16": False})[0]
    for result in trained(layout, **flags):
        assert result["committed"]
        for name, dtypes in result["dtypes"].items():
            is_kept = name.startswith(kept) or name.endswith("layernorm.weight")
            assert dtypes == (FP32 if is_kept else ("torch.bfloat16", "torch.bfloat16")), name
        assert result["norms"][0] == pytest.approx(wanted["norms"][0], rel=1e-2)
        assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-2)


@pytest.mark.engine
@pytest.mark.parametrize("optimizer", rows([False, True], test=[True]))
def test_an_overflow_in_a_kept_weight_skips_the_step_and_its_gradient_is_unscaled(gloo, trained, optimizer):
    run = cases.run_of(
        fp16=True, initial_loss_scale=512.0, keep_fp32=("experts",), expert_model_parallel_size=2,
        use_distributed_optimizer=optimizer,
    )  # fmt: skip
    for rank in gloo.run(2, cases.overflow_in_kept_weight, run=run):
        assert rank["kept"] == "torch.float32"
        # were a kept gradient not unscaled, the norm would be 512 times as large
        assert rank["norm"] == pytest.approx(trained()[0]["norms"][0], rel=2e-2)
        assert rank["skipped"] and rank["unchanged"] and rank["then"]


@pytest.mark.parametrize(
    "layout", rows(["one rank", "TP2, SP", "PP2", "EP2", "DP2, distributed optimizer"], test=["one rank", "PP2"])
)
def test_evaluation_in_fp32_has_the_loss_of_an_fp32_model_of_the_same_weights(gloo, layout):
    ranks, sizes = cases.LAYOUTS[layout]
    keep = None if layout == "one rank" else ("norms", "decoder.layers.3", "embedding")
    run = cases.run_of(bf16=True, eval_in_fp32=True, keep_fp32=keep, fp32_residual_connection=bool(keep), **sizes)
    for rank in gloo.run(ranks, cases.evaluated_in_fp32, run=run):
        assert rank["in fp32"] == rank["oracle"]
        assert rank["in bf16"] != rank["oracle"]
        assert rank["changed"] == []


def test_an_evaluation_that_fails_puts_the_weights_back(gloo):
    (seen,) = gloo.run(1, cases.failed_evaluation, run=cases.run_of(bf16=True, eval_in_fp32=True, **TIED))
    assert seen == {"raised": True, "same": True, "tied once": True, "pipeline": "torch.bfloat16"}


def test_an_fp64_router_in_a_bf16_run_leaks_no_dtype(gloo):
    (got,) = gloo.run(1, cases.router_dtypes, run=cases.run_of(bf16=True, moe_router_dtype="fp64"))
    (wanted,) = gloo.run(1, cases.router_dtypes, run=cases.run_of(bf16=True))
    assert got.pop("probs") == {"torch.float64"} and wanted.pop("probs") == {"torch.float32"}
    assert got["layers"] == {"torch.bfloat16"} and got["weights"] == {("torch.bfloat16", "torch.float32")}
    assert got["input gradients"] == {"torch.bfloat16"}
    for name, grad in wanted["gradients"].items():
        assert torch.allclose(got["gradients"][name], grad, rtol=2e-2, atol=2e-2 * grad.abs().max().item()), name


def test_a_run_evaluates_in_fp32_if_it_is_told_to(gloo):
    flags = {**trained_steps.SMALL, "bf16": True, "train_iters": 1, "eval_iters": 1}
    plain, told = (
        gloo.run(1, trained_steps.trained, flags={**flags, "eval_in_fp32": told})[0]["valid_loss"]
        for told in (False, True)
    )
    assert plain != told and plain == pytest.approx(told, rel=1e-2)
