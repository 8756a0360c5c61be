"""The adaptor: what it maps, when it does nothing, and that the engine's files stay as published."""

import importlib.util
import marshal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_moe.engine import import_hook
from tests.helpers.called import Called
from tests.helpers.ranks import rank_environment

pytestmark = pytest.mark.engine


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter without CUDA."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=600)


def test_constants_are_mapped_in_nested_functions_and_tuples_and_nowhere_else():
    source = textwrap.dedent(
        """
        def outer(device="cuda"):
            def inner(tensor):
                return tensor.type() in ("torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"), "cuda_graph_impl"
            return inner, device
        """
    )
    namespace: dict = {}
    exec(import_hook._map_constants(compile(source, "example", "exec")), namespace)
    inner, device = namespace["outer"]()
    assert device == "cpu"
    assert inner(torch.zeros(1, dtype=torch.bfloat16)) == (True, "cuda_graph_impl")
    assert inner(torch.zeros(1)) == (False, "cuda_graph_impl")


def test_without_cuda_the_engine_names_the_cpu_and_torch_still_reports_no_cuda():
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer.utils import get_default_causal_mask

    assert not torch.cuda.is_available()
    assert "cuda" not in clip_grads.get_grad_norm_fp32.__code__.co_consts
    assert get_default_causal_mask(4).device.type == "cpu"
    assert torch.cuda.current_device() == torch.device("cpu")


def test_the_random_state_tracker_moves_the_cpu_generator_and_puts_it_back():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    before = torch.get_rng_state()
    tracker.add("dropout", 7)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork("dropout"):
        first = torch.rand(3)
    with tracker.fork("dropout"):
        second = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(7))
    assert torch.equal(torch.cat((first, second)), expected)


def test_a_run_is_loaded_silently_without_torchs_compiler_and_tensorboard_into_which_timers_write_all_the_same(
    tmp_path,
):
    ran = python(
        f"""
        import sys
        import megatron_moe.training.run
        from megatron.core.timers import Timers
        import megatron.core.models.gpt.gpt_layer_specs, megatron.core.datasets.gpt_dataset
        print("torch._dynamo" in sys.modules, "tensorboard" in sys.modules)
        import torch
        print(torch.compile.__module__)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        timers = Timers(log_level=0, log_option="max")
        def write(writer):
            timers("of a test", log_level=0).start()
            timers("of a test").stop()
            timers.write(["of a test"], writer, iteration=1)
        write([])  # which is no writer
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter({str(tmp_path)!r})
        said = []
        writer.add_scalar = lambda *args: said.append(args[0])
        write(writer)
        print(*said)
        writer.close()
        torch.distributed.destroy_process_group()  # a process that leaves its threads may end with a word of them
        """
    )
    assert (ran.stdout, ran.stderr) == ("False False\ntorch\nof a test-time\n", "")


def test_the_bytecode_cache_stays_as_published(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    source = tmp_path / "engine_module.py"
    source.write_text('DEVICE = "cuda"\n')
    cache = Path(importlib.util.cache_from_source(str(source)))

    def device() -> str:
        namespace: dict = {}
        exec(import_hook._EngineLoader("engine_module", str(source), True).get_code("engine_module"), namespace)
        return namespace["DEVICE"]

    assert device() == "cpu" and cache.exists()
    assert "cuda" in marshal.loads(cache.read_bytes()[16:]).co_consts
    assert device() == "cpu", "the mapping also applies to code that comes from the cache"


def test_the_engine_imported_first_is_one_clear_error():
    ran = python(
        """
        import sys, types
        sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        import megatron_moe
        """
    )
    assert ran.returncode == 1
    assert "put `import megatron_moe` before the first import of megatron.core" in ran.stderr.splitlines()[-1]


def test_the_engine_imported_first_is_no_error_with_cuda_and_gets_adam(monkeypatch):
    from megatron.core import optimizer

    adjusted = []
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f) is not import_hook._EngineFinder])
    monkeypatch.setattr(import_hook, "_has_cuda", lambda: True)
    monkeypatch.setattr(import_hook, "_ALWAYS", dict.fromkeys(("megatron.core.optimizer", "absent"), adjusted.append))
    for _ in range(2):
        import_hook.install()
        assert adjusted == [optimizer]
        assert [type(finder) for finder in sys.meta_path].count(import_hook._EngineFinder) == 1
        assert type(sys.meta_path[0]) is import_hook._EngineFinder


def test_a_bucket_is_copied_by_no_collective_of_one_rank_and_any_other_tensor_is(pg):
    from megatron.core.distributed import param_and_grad_buffer as engine

    bucket = torch.arange(8.0)
    for collective in (engine.dist_all_gather_func, engine.dist_reduce_scatter_func):
        for target, called in ((bucket[:], False), (torch.zeros(8), True)):
            with Called() as seen:
                collective(target, bucket, group=dist.group.WORLD)
            assert any("c10d" in str(operation) for operation, _ in seen.calls) == called
            assert torch.equal(target, bucket) and torch.equal(bucket, torch.arange(8.0))
