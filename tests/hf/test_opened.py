"""A checkpoint opened in one process: which folders are ones, dtypes, layers, and what is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, replace
from megatron_moe.hf.opened import one_process as one_process_of
from megatron_moe.hf.opened import opened
from megatron_moe.hf.source import locate
from megatron_moe.parallel import groups
from tests.helpers import tiny_models

pytestmark = pytest.mark.engine

BIAS = "decoder.layers.2.mlp.router.expert_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moonlight") / "hf"
    tiny_models.make("moonlight", 4, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_get_the_dtype_asked_for_and_the_routers_bias_stays_fp32(folder: Path, dtype: torch.dtype) -> None:
    stored = load_file(folder / "model.safetensors")
    with opened(locate(folder), dtype=dtype) as found:
        tensors = found.tensors
        assert {value.dtype for key, value in tensors.items() if not key.endswith("expert_bias")} == {dtype}
        assert torch.equal(tensors[BIAS], stored["model.layers.2.mlp.gate.e_score_correction_bias"])
        assert torch.equal(
            tensors["decoder.layers.0.self_attention.linear_proj.weight"],
            stored["model.layers.0.self_attn.o_proj.weight"].to(dtype),
        )
        assert not any(module.training for module in found.model.modules())
        tokens = torch.arange(6).view(1, 6)
        with torch.no_grad():
            assert torch.isfinite(found.model(tokens, tokens, None)[..., : found.vocab_size]).all()
        assert tensors.keys() == found.mapping.shapes.keys()
        assert "tokenizer.json" in found.source.companions
    assert not dist.is_initialized()


def test_the_first_layers_are_those_of_the_whole_model(folder: Path) -> None:
    with opened(locate(folder)) as found:
        whole = {key: value.detach().clone() for key, value in found.tensors.items()}
    with opened(locate(folder), layers=2) as found:
        assert {key.split(".")[2] for key in found.tensors if key.startswith("decoder.layers.")} == {"0", "1"}
        assert all(torch.equal(value, whole[key]) for key, value in found.tensors.items())


def test_groups_are_left_when_the_block_ends_in_an_error(folder: Path) -> None:
    with pytest.raises(KeyError), opened(locate(folder)):
        raise KeyError
    assert not dist.is_initialized()


def test_a_launched_job_and_a_process_with_groups_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, one_process: None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="WORLD_SIZE 2: this needs one process"), opened(locate(folder)):
        pass
    monkeypatch.undo()
    groups.initialize(Run())
    with pytest.raises(RuntimeError, match="in no process group"), opened(locate(folder)):
        pass


def test_a_run_becomes_one_process_that_evaluates(folder: Path) -> None:
    run = replace(
        locate(folder).run,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        recompute_granularity="full",
        bf16=True,
        keep_fp32=("router",),
        moe_expert_capacity_factor=1.0,
        cross_entropy_loss_fusion=True,
        transformer_impl="transformer_engine",
        moe_router_load_balancing_type=("sinkhorn",),
        moe_router_dtype="fp64",
        seq_length=17,
        max_position_embeddings=99,
    )
    alone = one_process_of(run)
    assert alone.derived.model_ranks == alone.parallel.expert_model_parallel_size == 1
    assert (alone.model.hidden_dropout, alone.model.attention_dropout) == (0.0, 0.0)
    assert alone.training.recompute_granularity is None
    assert alone.derived.params_dtype_name == "float32"
    assert alone.moe.moe_expert_capacity_factor is None
    assert alone.moe.moe_router_dtype == "fp64"
    assert alone.model.transformer_impl == "local"
    assert not alone.model.cross_entropy_loss_fusion
    assert alone.derived.max_position_embeddings == 99
    assert alone.model.num_layers == run.model.num_layers


def test_widths_that_the_grouped_product_does_not_take_are_computed_one_by_one(folder: Path) -> None:
    run = replace(locate(folder).run, moe_ffn_hidden_size=27)
    assert one_process_of(run).moe.moe_expert_backend == "loop"
    assert one_process_of(locate(folder).run).moe.moe_expert_backend == "grouped_mm"
