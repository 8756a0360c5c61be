"""The experts' products in emulated FP8, against numbers rounded one at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, replace
from megatron_moe.kernels.choice import launches_seen_by
from megatron_moe.model.build import build_model
from megatron_moe.moe import grouped_gemm_fp8 as fp8
from megatron_moe.moe.experts import GroupedExperts
from megatron_moe.moe.grouped_gemm import TorchProduct
from megatron_moe.parallel import groups
from megatron_moe.platform import env_vars, hardware
from megatron_moe.training.run import pretrain
from tests.helpers import scaled_product_stub
from tests.helpers.stepped_trainer import TINY
from tests.numbers import reference_fp8 as reference

FORMATS = {"e4m3": fp8.E4M3, "e5m2": fp8.E5M2}
SHAPES = {"a row's": (1, 128), "a matrix's": (128, 128), "a feature's": (128, 1)}


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of very different sizes, so that tiles have subnormal FP8 numbers too."""
    generator = torch.Generator().manual_seed(seed)
    numbers, sizes = (torch.randn(*shape, generator=generator) for _ in range(2))
    return (numbers * torch.exp(2 * sizes)).to(dtype)


@pytest.mark.parametrize(
    ("shape", "name"), [("a row's", "e4m3"), ("a row's", "e5m2"), ("a matrix's", "e5m2"), ("a feature's", "e4m3")]
)
def test_each_number_is_within_half_a_step_and_the_nearest_one(shape, name):
    """Half a step is 2^-4 of a normal number (e4m3; 2^-3 in e5m2), and half the smallest number of a subnormal one."""
    (high, wide), known = SHAPES[shape], reference.FORMATS[name]
    values = randn(130, 131, seed=0)  # the last tiles are smaller, in both dimensions
    found = fp8.rounded_to_fp8(values, high, wide, FORMATS[name])
    half_step = 2.0 ** (-4 if name == "e4m3" else -3)
    for top in range(0, 130, high):
        for left in range(0, 131, wide):
            tile = (slice(top, top + high), slice(left, left + wide))
            exact = values[tile].double()
            step = exact.abs().max() / known[-1] * known[1]
            bound = (1 + 1e-6) * torch.maximum(half_step * exact.abs(), step / 2)
            assert ((found[tile].double() - exact).abs() <= bound).all()
    wanted = reference.rounded(values, high, wide, name)
    assert ((found.double() - wanted).abs() <= 1e-7 * wanted.abs()).all()


def test_every_number_of_a_format_stays_as_it_is():
    for name, dtype in FORMATS.items():
        known = torch.tensor(reference.FORMATS[name], dtype=torch.float32)
        assert torch.equal(fp8.rounded_to_fp8(torch.stack([known, -known]), 2, len(known), dtype)[0], known)


def test_zeros_stay_zeros_and_the_smallest_numbers_are_finite():
    assert not fp8.rounded_to_fp8(torch.zeros(3, 200), 1, 128).any()
    tiny = torch.tensor([[2.0**-149, 2.0**-127, 0.0, -(2.0**-120)]])
    found = fp8.rounded_to_fp8(tiny, 1, 128)
    assert ((found - tiny).abs() <= torch.maximum(tiny.abs() / 16, torch.tensor(2.0**-136))).all()
    huge = torch.full((1, 128), torch.finfo(torch.float32).max)
    assert torch.isfinite(fp8.rounded_to_fp8(huge, 1, 128)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_tile_alone(bad):
    for dtype in FORMATS.values():
        values = randn(2, 256, seed=1)
        clean = fp8.rounded_to_fp8(values, 1, 128, dtype)
        values[1, 200] = bad
        found = fp8.rounded_to_fp8(values, 1, 128, dtype)
        assert not torch.isfinite(found[1, 128:]).any()
        assert torch.equal(found[0], clean[0]) and torch.equal(found[1, :128], clean[1, :128])


# ---- tiles along tokens


def test_no_tile_has_rows_of_two_experts():
    counts = [0, 1, 128, 0, 129, 300, 0]
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    rows = randn(sum(counts), 8, seed=2)
    tiles = fp8.TokenTiles.of(offsets, len(rows))
    assert tiles.slots.unique().numel() == len(rows) and int(tiles.slots.max()) < tiles.places
    found = tiles.rounded(rows)
    for expert, mine in zip(rows.split(counts), found.split(counts), strict=True):
        assert not len(expert) or torch.equal(mine, fp8.rounded_to_fp8(expert, 128, 1))


# ---- the product


COUNTS = [130, 0, 3]


def case(matrices: int, out: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = randn(sum(COUNTS), width, seed=3, dtype=dtype).requires_grad_()
    weights = randn(len(COUNTS), matrices * out, width, seed=4, dtype=dtype).requires_grad_()
    grad = randn(sum(COUNTS), matrices * out, seed=5, dtype=dtype)
    return rows, weights, torch.tensor(COUNTS).cumsum(0).to(torch.int32), grad


def assert_close(found: Tensor, exact: Tensor, sizes: Tensor) -> None:
    """fp32's error of a sum whose absolute terms add up to `sizes`, and one rounding to the dtype of the result."""
    last = torch.finfo(found.dtype).eps / 2 * 1.01 * exact.abs() if found.dtype != torch.float32 else 0.0
    assert ((found.double() - exact).abs() <= 4e-6 * sizes + last).all()


@pytest.mark.parametrize(
    ("fp8_format", "dtype", "form", "number"),
    [
        ("e4m3", torch.bfloat16, "emulated", 0),
        ("e4m3", torch.float32, "scaled", 1),
        ("hybrid", torch.bfloat16, "scaled", 0),
        ("hybrid", torch.float32, "emulated", 1),
        ("e4m3", torch.float32, "triton", 0),
        ("hybrid", torch.float32, "triton", 1),
    ],
)
def test_fp8_products_and_gradients_are_those_of_fp64_from_the_same_tiles(fp8_format, dtype, form, number, monkeypatch):
    """Sizes that are no multiples of a tile, two matrices of an expert in the first product, an expert without rows."""
    scaled_product_stub.install(monkeypatch)
    kernel = fp8.fp8_products(fp8_format, form)[number]
    rows, weights, offsets, grad = case(kernel.matrices, 136, 144, dtype)
    result = kernel(rows, weights, offsets)
    result.backward(grad)
    assert result.dtype == rows.grad.dtype == weights.grad.dtype == dtype
    assert not weights.grad[COUNTS.index(0)].any()
    parts = zip(*(one.split(COUNTS) for one in (rows.detach(), grad, result.detach(), rows.grad)))
    for expert, (x, dy, output, slope) in enumerate(parts):
        if not len(x):
            continue
        stack = weights[expert].detach().unflatten(0, (kernel.matrices, -1))
        wanted = reference.products(x, stack, dy, "e5m2" if fp8_format == "hybrid" else "e4m3")
        flat = stack.flatten(0, 1).double().abs()
        sizes = (x.double().abs() @ flat.T, dy.double().abs() @ flat, dy.double().abs().T @ x.double().abs())
        assert_close(output, wanted[0], sizes[0])
        assert_close(slope, wanted[1], sizes[1])
        assert_close(weights.grad[expert], wanted[2].flatten(0, 1), sizes[2])


@pytest.mark.parametrize("form", ["emulated", "triton"])
def test_gradients_of_weights_are_added_to_their_fp32_sums_unrounded(form):
    """Without rows there is nothing to add, and to a weight without a sum the gradient is handed on."""
    rows, weights, offsets, grad = case(1, 136, 144, torch.bfloat16)
    fp8.Fp8Product(fp8.E4M3, 1, form)(rows, weights, offsets).backward(grad)
    alone, weights.grad = weights.grad, None
    kernel = fp8.Fp8Product(fp8.E4M3, 1, form, fused=True)
    kernel(rows, weights, offsets).backward(grad)
    assert torch.equal(weights.grad, alone)
    before, weights.grad = randn(*weights.shape, seed=6), None
    weights.main_grad = before.clone()
    kernel(rows, weights, offsets).backward(grad)
    assert weights.grad.is_sparse and torch.equal(weights.main_grad[1], before[1])
    added = weights.main_grad.double() - before.double()
    assert not torch.equal(added.bfloat16().double(), added)
    # the interpreter cuts bf16 off
    assert ((added - alone.double()).abs() <= 2**-7 * alone.double().abs() + 1e-6 * before.double().abs() + 1e-4).all()


def test_the_scaled_product_adds_to_no_sum():
    with pytest.raises(ConfigError, match="--gradient-accumulation-fusion, --fp8-format hybrid: .*scaled"):
        fp8.fp8_products("hybrid", "scaled", fused=True)


@pytest.mark.parametrize("form", ["emulated", "scaled", "triton"])
def test_a_linear_layer_is_one_expert_with_all_rows(form, monkeypatch):
    """Next to a second expert without rows, the rows get places, and the products are those of groups."""
    calls, found = scaled_product_stub.install(monkeypatch), []
    kernel = fp8.Fp8Product(fp8.E5M2, 1, form)
    for alone in (True, False):
        x = randn(10, 13, 144, seed=9, dtype=torch.bfloat16).requires_grad_()
        weight = randn(136, 144, seed=10, dtype=torch.bfloat16).requires_grad_()
        if alone:
            y = kernel.linear(x, weight)
        else:
            stack = torch.stack([weight, weight.detach()])
            y = kernel(x.flatten(0, 1), stack, torch.tensor([130, 130], dtype=torch.int32)).view(10, 13, -1)
        y.backward(randn(*y.shape, seed=11, dtype=torch.bfloat16))
        found.append((y.detach(), x.grad, weight.grad))
    assert all(torch.allclose(a, b, rtol=2**-7, atol=1e-3) for a, b in zip(*found))
    assert len(calls) == (6 if form == "scaled" else 0)


def test_a_linear_layer_may_have_any_widths_and_a_rank_no_rows():
    """torch's product of groups takes multiples of 16 bytes."""
    x, weight = (randn(3, 5, seed=seed, dtype=torch.bfloat16).requires_grad_() for seed in (12, 13))
    y = fp8.Fp8Product(fp8.E4M3).linear(x, weight)
    y.sum().backward()
    assert y.shape == (3, 3) and x.grad.shape == weight.grad.shape == (3, 5)
    rows, weights = torch.zeros(0, 16, requires_grad=True), torch.ones(2, 8, 16, requires_grad=True)
    fp8.fp8_products("e4m3")[1](rows, weights, torch.zeros(2, dtype=torch.int32)).sum().backward()
    assert rows.grad.shape == (0, 16) and not weights.grad.any()


def test_a_gradient_with_strides_of_zero_and_autocast_change_nothing():
    _, kernel = fp8.fp8_products("hybrid")
    found = []
    for autocast in (False, True):
        rows, weights, offsets, _ = case(1, 136, 144, torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            result = kernel(rows, weights, offsets)
            result.sum().backward()
        found.append((result.detach(), rows.grad, weights.grad))
    assert all(torch.equal(*pair) for pair in zip(*found))


# ---- the layer


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("fp8_format", [None, "e4m3", "hybrid"])
def test_the_flag_chooses_the_kernels_of_the_routed_experts(fp8_format):
    run = replace(Run(), **{**TINY, "bf16": True, "fp8_format": fp8_format})
    (chunk,) = build_model(run, groups.initialize(run), 100)
    experts = [module for module in chunk.modules() if isinstance(module, GroupedExperts)]
    kernels: Any = (TorchProduct(None),) * 2 if fp8_format is None else fp8.fp8_products(fp8_format)
    assert experts and all((one.gate_up_linear, one.grouped_linear) == kernels for one in experts)
    assert fp8_format is None or isinstance(kernels[0], fp8.Fp8Product)


# ---- which form computes


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [((9, 0), "12.9", None), ((8, 0), "13.0", "8.0"), ((12, 0), "13.0", "12.0"), ((9, 0), "12.8", "CUDA 12.8")],
)
def test_hopper_and_blackwell_have_kernels_and_hopper_alone_has_the_scaled_product(
    capability, cuda, reason, monkeypatch
):
    assert "no CUDA device" in str(platform.why_no_fp8_products()) and fp8.fp8_form() == "emulated"
    for name, found in (("has_streams", True), ("device", torch.device("cpu")), ("backend", "nccl")):
        monkeypatch.setattr(hardware, name, lambda *_, found=found: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(hardware, "capability", lambda _tensor: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(fp8, "takes_kernels", lambda _: env_vars.chosen[env_vars.KERNELS] == "auto")
    if capability[0] == 9:
        assert fp8.fp8_form() == "triton"
    monkeypatch.setitem(env_vars.chosen, env_vars.KERNELS, "torch")
    if reason is None:
        assert fp8.fp8_form() == "scaled"
    else:
        with pytest.raises(ConfigError, match=f"--fp8-format: .*{env_vars.FP8}=emulated"):
            pretrain(replace(Run(), **{**TINY, "bf16": True, "fp8_format": "e4m3"}))
    monkeypatch.setitem(env_vars.chosen, env_vars.FP8, "triton")
    with pytest.raises(ConfigError, match=f"{env_vars.FP8}=triton: "):
        fp8.fp8_form()
    monkeypatch.setitem(env_vars.chosen, env_vars.FP8, "scaled")
    if reason is not None:
        with pytest.raises(ConfigError, match=reason):
            fp8.TransformerEngineFp8("e4m3")
        with pytest.raises(ConfigError, match=f"{env_vars.FP8}=scaled: .*{reason}"):
            fp8.fp8_form()
    monkeypatch.setitem(env_vars.chosen, env_vars.FP8, "emulated")
    assert fp8.fp8_form() == "emulated"


def test_a_weight_is_cut_once_for_the_micro_batches_of_a_step():
    kernel, launched, found = fp8.Fp8Product(fp8.E4M3, 1, "triton"), [], []
    weight = torch.nn.Parameter(randn(136, 144, seed=10))
    x = randn(130, 144, seed=9).requires_grad_()
    with launches_seen_by(lambda kernel, *_: launched.append(kernel.fn.__name__)):
        for kept in (False, True):
            with fp8.blocks_kept(kept):
                for _ in range(3):
                    y = kernel.linear(x, weight)
                    found.append((y.detach(), *torch.autograd.grad(y.sum(), (x, weight))))
            assert launched.count("_cut_blocks") == (2 if kept else 6)
            launched.clear()
        assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))
        with torch.no_grad():
            weight.mul_(2)  # between steps
        assert torch.equal(kernel.linear(x, weight), 2 * found[0][0])
