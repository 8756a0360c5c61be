"""The kernels in C for CPUs compute torch's bits, and where they cannot be had torch's form computes."""

import contextlib
import importlib
import os
import subprocess

import pytest
import torch

from benchmarks.launches import Launches
from megatron_moe.config.errors import ConfigError
from megatron_moe.kernels import choice
from megatron_moe.model.norm import _RMSNormFunction
from megatron_moe.moe.experts import weighted_swiglu_backward, weighted_swiglu_forward
from megatron_moe.platform import env_vars
from megatron_moe.report import Sink
from megatron_moe.training.run import pretrain
from megatron_moe_tools import compat

needs_c = pytest.mark.skipif(choice._loaded()[0] is None, reason=f"no kernels in C here: {choice._loaded()[1]}")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def no_switch(monkeypatch):
    monkeypatch.setitem(env_vars.chosen, env_vars.CPU_KERNELS, "auto")
    monkeypatch.setitem(env_vars.chosen, env_vars.KERNELS, "auto")


@pytest.fixture
def compiled_anew(monkeypatch, tmp_path):
    """An empty cache, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice._loaded.cache_clear()
    yield tmp_path / "megatron_moe"
    choice._loaded.cache_clear()


@contextlib.contextmanager
def on_threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def in_turn(shapes):
    """Each shape on one thread and on two with one dtype, each dtype with some shape."""
    return [(shape, DTYPES[number % 3]) for number, shape in enumerate(shapes)]


def both_forms(gate_up, probs, grad):
    """(hidden, grad_gate_up, grad_probs) of the kernels, and of torch's form."""
    ours = (choice.weighted_swiglu_forward(gate_up, probs), *choice.weighted_swiglu_backward(grad, gate_up, probs))
    return ours, (weighted_swiglu_forward.eager(gate_up, probs), *weighted_swiglu_backward.eager(grad, gate_up, probs))


def draw(rows, width, dtype, spread=3.0):
    generator = torch.Generator().manual_seed(rows + width)
    gate_up = (torch.randn(rows, 2 * width, generator=generator) * spread).to(dtype)
    return gate_up, torch.rand(rows, generator=generator), torch.randn(rows, width, generator=generator).to(dtype)


@needs_c
@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn([(1, 32), (64, 64), (1023, 256), (32, 1408), (2, 8192), (2, 65536), (512, 512), (256, 512)]),
)
def test_a_kernel_computes_the_bits_of_torchs_form(shape, dtype):
    for number in (1, 2):
        with on_threads(number):
            ours, theirs = both_forms(*draw(*shape, dtype))
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype == other.dtype and torch.equal(mine, other)


@needs_c
@pytest.mark.parametrize(
    ("shape", "dtype"), in_turn([(1, 1, 32), (64, 3, 100), (32, 16, 256), (48, 16, 256), (33, 15, 256), (5, 1, 7168)])
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_norm_computes_the_bits_of_torchs_form(shape, dtype, threads, monkeypatch):
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    weight, grad = torch.rand(shape[-1], generator=generator).to(dtype), torch.randn(shape, generator=generator)
    results = []
    for way in ("c", "torch"):
        monkeypatch.setitem(env_vars.chosen, env_vars.CPU_KERNELS, way)
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with on_threads(threads):
            y = _RMSNormFunction.apply(*leaves, 1e-6, dtype)
            y.backward(grad.to(dtype).transpose(0, 1).contiguous().transpose(0, 1))
        results.append((y.detach(), leaves[0].grad, leaves[1].grad))
    for mine, other in zip(*results):
        assert mine.dtype == other.dtype and torch.equal(mine, other)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("up", "prob"), [(1.5, 0.75), (1.0, 1.0)])  # the latter: ties among subnormal numbers
def test_it_does_so_for_every_gate_of_16_bits_and_passes_nan_and_infinity_on(up, prob, dtype):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(64, 1024)
    gates = bits.view(dtype if dtype.itemsize == 2 else torch.bfloat16).to(dtype)
    gate_up = torch.cat([gates, torch.full_like(gates, up)], dim=1)
    ours, theirs = both_forms(gate_up, torch.full((64,), prob), torch.full((64, 1024), -0.5, dtype=dtype))
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert theirs[0].isnan().any() and theirs[0].isinf().any()


@needs_c
@pytest.mark.parametrize("width", [1, 3, 20, 45])
def test_what_torch_computes_with_another_exponential_is_within_its_rounding(width):
    """At the end of a row that is not a whole number of vectors torch calls the C library's."""
    for mine, other in zip(*both_forms(*draw(7, width, torch.float32))):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_operation_takes_the_kernel_and_not_while_something_watches_torch(dtype, monkeypatch):
    called = []
    call = choice._call
    monkeypatch.setattr(choice, "_call", lambda *arguments: (called.append(arguments[0]), call(*arguments)))
    gate_up, probs, grad = draw(4, 32, dtype)
    weighted_swiglu_forward(gate_up, probs)
    weighted_swiglu_backward(grad.t().contiguous().t(), gate_up, probs)
    assert called == ["weighted_swiglu_forward", "weighted_swiglu_backward"]
    with Launches() as watching:
        weighted_swiglu_forward(gate_up, probs)
    assert "silu" in {one.name for one in watching.found}
    weighted_swiglu_forward(gate_up[:, ::2], probs)
    weighted_swiglu_forward(gate_up.double(), probs.double())
    monkeypatch.setitem(env_vars.chosen, env_vars.CPU_KERNELS, "torch")
    weighted_swiglu_forward(gate_up, probs)
    assert len(called) == 2


@needs_c
def test_a_compiled_library_is_kept_and_one_that_others_can_write_is_not_loaded(compiled_anew, monkeypatch):
    importlib.import_module("sentencepiece")  # has an OpenMP library of its own, which is passed over
    assert choice.why_no_c() is None
    (kept,) = compiled_anew.iterdir()
    library, builds = kept.read_bytes(), []

    def build(compiler, openmp, built):
        builds.append(built)
        built.write_bytes(library)

    monkeypatch.setattr(choice, "_compile", build)
    choice._loaded.cache_clear()
    assert choice.why_no_c() is None and not builds
    os.chmod(kept, 0o666)
    choice._loaded.cache_clear()
    assert choice.why_no_c() is None and len(builds) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # nothing can be kept: it is compiled for this process
    choice._loaded.cache_clear()
    assert choice.why_no_c() is None and len(builds) == 2


@pytest.mark.usefixtures("one_process")
def test_without_a_compiler_torch_computes_and_the_run_says_so_once(compiled_anew, monkeypatch):
    monkeypatch.setattr(choice.shutil, "which", lambda name: None)
    said = []

    class Messages(Sink):
        def message(self, text):
            said.append(text)

    flags = "--preset tiny --mock-data --vocab-size 256 --train-iters 1 --eval-iters 0"
    summary = pretrain(compat.parse(flags.split(), world_size=1), also=[Messages()])
    assert summary["cpu_kernels"] == "torch"
    (line,) = [text for text in said if "CPU kernels" in text]
    if os.uname().machine == "x86_64":
        assert "no C compiler" in line
    monkeypatch.setitem(env_vars.chosen, env_vars.CPU_KERNELS, "c")
    with pytest.raises(ConfigError, match=f"{env_vars.CPU_KERNELS}=c"):
        choice.why_no_c()


@needs_c
def test_a_compiler_that_fails_is_a_reason_and_no_error(compiled_anew, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="cc1: out of memory")
    monkeypatch.setattr(choice.subprocess, "run", lambda *_, **__: failed)
    assert "out of memory" in (choice.why_no_c() or "")


def _form_of_ranks(lacking: int) -> tuple[str | None, str | None]:
    rank = torch.distributed.get_rank()
    loaded = choice._loaded
    choice._loaded = lambda: (None, "no compiler" if rank == lacking else None)
    try:
        with choice.same_on_all_ranks():
            within = choice.why_no_c()
        return within, choice.why_no_c()
    finally:
        choice._loaded = loaded


def test_all_ranks_take_torchs_form_where_one_lacks_the_kernels(gloo):
    agreed = "rank 1: no compiler"
    assert gloo.run(2, _form_of_ranks, lacking=1) == [(agreed, None), (agreed, "no compiler")]
    assert gloo.run(2, _form_of_ranks, lacking=2) == [(None, None)] * 2
