"""What the environment asks for reaches every program, and what it cannot ask for ends each with one message."""

import os
import subprocess
import sys

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
