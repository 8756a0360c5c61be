"""What the environment asks for reaches every program, and what it cannot ask for ends each with one message."""

import os
import subprocess
import sys
import tempfile

import pytest

from megatron_moe.platform import env_vars
from tests.helpers.sources import ROOT


@pytest.mark.parametrize(("program", "rank"), [("pretrain_moe.py", "0"), ("tools/merge_datasets.py", "1")])
def test_a_program_ends_with_one_message_from_rank_0(program, rank):
    environment = {**os.environ, "RANK": rank, "PYTHONPATH": str(ROOT), env_vars.HALF_PRODUCTS: "fp16"}
    done = subprocess.run([sys.executable, ROOT / program, "--help"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    if rank == "0":
        assert done.stderr.startswith(f"megatron_moe: error: {env_vars.HALF_PRODUCTS}=fp16: ")
        assert all(way in done.stderr for way in ("auto", "native", "fp32"))
    assert done.stderr.count("\n") == (rank == "0")


@pytest.mark.parametrize(("value", "way"), [("", "auto"), ("native", "native"), ("fp32", "fp32")])
def test_the_way_of_half_products_is_that_of_the_variable(value, way, monkeypatch):
    monkeypatch.setitem(env_vars.chosen, env_vars.HALF_PRODUCTS, "")
    monkeypatch.setenv(env_vars.HALF_PRODUCTS, value)
    env_vars.check()
    assert env_vars.chosen[env_vars.HALF_PRODUCTS] == way


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A node whose environment names a GPU and nothing else, with its own folder for temporary files."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", *env_vars.ALLOCATOR):
        monkeypatch.setenv(name, "")  # so that what is set in the test goes with it
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_triton_keeps_an_unknown_users_kernels_on_the_node(gpu, tmp_path):
    kept = "import megatron_moe, triton; print(triton.runtime.cache.get_cache_manager('A' * 52).cache_dir)"
    environment = {**os.environ, "HOME": "/", "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", kept], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path / f"megatron_moe_{os.getuid()}" / "triton")), done.stderr


@pytest.mark.parametrize("told", [("TRITON_HOME", "/mine"), ("CUDA_VISIBLE_DEVICES", ""), None])
def test_triton_keeps_its_folder_where_one_is_named_no_gpu_is_or_others_could_write(told, gpu, tmp_path, monkeypatch):
    if told is not None:
        monkeypatch.setenv(*told)
    else:
        (tmp_path / f"megatron_moe_{os.getuid()}").mkdir()
        (tmp_path / f"megatron_moe_{os.getuid()}").chmod(0o777)
    env_vars.keep_kernels_on_this_node()
    assert "TRITON_CACHE_DIR" not in os.environ


def test_segments_grow_unless_the_user_or_a_cpu_says_otherwise(gpu, monkeypatch):
    for name, value in (("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512"), ("CUDA_VISIBLE_DEVICES", "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            env_vars.let_segments_grow()
            assert "PYTORCH_ALLOC_CONF" not in os.environ
    env_vars.let_segments_grow()
    assert env_vars.allocator_setting() == "PYTORCH_ALLOC_CONF=expandable_segments:True"
