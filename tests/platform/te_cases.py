"""What a process with Transformer Engine over its stub runs for the tests: training, and the grouped product alone."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch


def trained(argv: list[str]) -> int:
    """Run pretrain_moe.py; write how often Transformer Engine's parts were called into `calls.RANK.json`."""
    from transformer_engine.pytorch import DotProductAttention, GroupedLinear, Linear, RMSNorm
    from transformer_engine.pytorch.optimizers import FusedAdam

    import pretrain_moe

    calls: Counter[str] = Counter()
    for owner, name in ((GroupedLinear, "forward"), (Linear, "forward"), (RMSNorm, "forward"), (FusedAdam, "step"),
                        (DotProductAttention, "forward")):  # fmt: skip
        setattr(owner, name, _counted(getattr(owner, name), calls, owner.__name__))
    status = pretrain_moe.main(argv)
    Path(f"calls.{os.environ['RANK']}.json").write_text(json.dumps(calls))
    return status


def _counted(stock: Any, calls: Counter[str], name: str) -> Any:
    def counted(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return stock(*args, **options)

    return counted


def products(_: Any) -> None:
    """Compare the kernel with the loop over experts: results, gradients, in all dtypes, with experts without rows."""
    import transformer_engine_torch

    from megatron_moe.moe.grouped_gemm import TransformerEngineProduct, grouped_linear_loop

    kernel = TransformerEngineProduct()
    for dtype, counts in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), ((3, 0, 8, 1), (0, 0, 0, 12), (5, 1, 2, 4), (0, 0, 0, 0))
    ):
        case = _case(counts, (24, 16), dtype)
        for ours, reference in zip(_results(kernel, *case), _results(grouped_linear_loop, *case), strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours, reference)
    assert len(kernel._modules) == 1 and not list(next(iter(kernel._modules.values()))[0].parameters())
    with pytest.raises(NotImplementedError, match="moe_permute_fwd"):
        transformer_engine_torch.moe_permute_fwd(torch.zeros(1))


def fp8_products(_: Any) -> None:
    """Compare the kernel in FP8 with the emulation of the same tiles, in both formats, with experts without rows."""
    from megatron_moe.moe.grouped_gemm_fp8 import E4M3, E5M2, Fp8Product, TransformerEngineFp8

    for name, gradients in (("e4m3", E4M3), ("hybrid", E5M2)):
        kernel, emulated = TransformerEngineFp8(name), Fp8Product(gradients, form="emulated")
        for counts in ((130, 0, 128, 3), (0, 0, 0, 0)):
            case = _case(counts, (128, 128), torch.bfloat16)
            for ours, reference in zip(_results(kernel, *case), _results(emulated, *case), strict=True):
                torch.testing.assert_close(ours, reference, rtol=2**-7, atol=1e-3)


def stage_9(argv: list[str]) -> None:
    """Run stage 9 of `make gpu`: NOTES FOLDER."""
    from tests.gpu.speed import transformer_engine
    from tests.gpu.stage import Stage

    transformer_engine(Stage(*map(Path, argv), dry=True, seconds=300.0))


def _case(counts: tuple[int, ...], size: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, weights, offsets and the gradient of the product; size: (out, in) of an expert's matrix."""
    generator = torch.Generator().manual_seed(sum(counts))
    rows, weights, grad = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((sum(counts), size[1]), (len(counts), *size), (sum(counts), size[0]))
    )
    return rows, weights, torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), grad


def _results(product: Any, rows: Any, weights: Any, offsets: Any, grad: Any) -> list[torch.Tensor]:
    operands = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    output = product(*operands, offsets)
    # The views of the stack are as good as its parameter for the gradient; a second use adds to the first.
    gradients = torch.autograd.grad(output, operands, grad)
    with torch.no_grad():
        assert torch.equal(product(*operands, offsets), output)
    return [output, *gradients]
