"""Pipeline, tensor parallelism, schedules and modules of the engine: each known defect shows there, and not in ours."""

import importlib.metadata
import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import common
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as engine_random
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_moe import platform
from megatron_moe.checkpoint import manifest
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import LOCAL, layer_spec
from megatron_moe.model.engine_config import LayerSettings, transformer_config
from megatron_moe.model.initialize import normal
from megatron_moe.model.loss import loss_func
from megatron_moe.model.norm import RMSNorm
from megatron_moe.moe.experts import without_output
from megatron_moe.parallel import groups
from megatron_moe.parallel.collectives import all_reduce_sum, shared_by_ranks
from megatron_moe.training.finalize_model_grads import update_routers
from tests.checkpoint.checkpoint_steps import flip, make_step
from tests.engine.stock import engine_linear, forget_logged_losses, present, small_config
from tests.helpers.moe_cases import build_layer, random_case

pytestmark = pytest.mark.engine

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
NO_ENGINE_EXTENSION = pytest.mark.skipif(platform.have_transformer_engine(), reason="Transformer Engine is here")


def as_published(module: ModuleType) -> ModuleType:
    """An engine module loaded once more, without what the platform's adaptor adjusts in it."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_as_published", module.__file__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


# ---- pipeline


def exchanged() -> dict[str, Any]:
    """Two stages, each the other's neighbour on both sides, exchange four messages at once."""
    pg = groups.initialize(replace(Run(), **PP2))
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    found: dict[str, Any] = {"right": (10.0 * other + 2, 10.0 * other + 1)}
    for name, exchange in (("batched", p2p_communication._batched_p2p_ops), ("single", p2p_communication._p2p_ops)):
        received, to_prev, to_next = torch.zeros(2), torch.tensor([10.0 * rank + 1]), torch.tensor([10.0 * rank + 2])
        messages = dict(tensor_send_prev=to_prev, tensor_recv_prev=received[:1])
        messages |= dict(tensor_send_next=to_next, tensor_recv_next=received[1:])
        requests = exchange(**messages, group=pg.pp, prev_pipeline_rank=other, next_pipeline_rank=other)
        for request in requests.values() if isinstance(requests, dict) else requests:
            request.wait()
        found[name] = tuple(received.tolist())
    return found


def test_batched_messages_between_two_stages_are_swapped(gloo):
    for rank in gloo.run(2, exchanged):
        assert rank["single"] == rank["right"]
        assert present("S1") == (rank["batched"] == rank["right"][::-1])
    interleaved = replace(Run(), **PP2, num_layers=4, num_layers_per_virtual_pipeline_stage=1)
    assert transformer_config(interleaved).batch_p2p_comm is False


# ---- tensor parallelism


def of_two_ranks() -> dict[str, Any]:
    """Gradient of a tensor that the heads of both ranks use, rank r with weight r + 1; sums of one in other strides."""
    pg = groups.initialize(replace(Run(), **TP2))
    weight = float(dist.get_rank() + 1)
    part = torch.ones(1, 1, 2, requires_grad=True)  # this rank's columns of what both will have whole
    (mappings.gather_from_tensor_model_parallel_region(part) * weight).sum().backward()
    whole = torch.ones(1, 1, 4, requires_grad=True)
    (shared_by_ranks(whole, pg.tp) * weight).sum().backward()
    transposed = torch.arange(6.0).view(2, 3).t()
    ours = all_reduce_sum(transposed.clone(memory_format=torch.preserve_format), pg.tp)
    return {
        "gradients": (part.grad.unique().tolist(), whole.grad.unique().tolist()),
        "weight": weight,
        "sums": (mappings._reduce(transposed, pg.tp).tolist(), ours.tolist()),
    }


def test_a_key_shared_by_all_heads_gets_the_gradient_of_one_ranks_heads(once):
    """The engine's latent attention takes the rotary key out of such a gathered tensor and sums nothing."""
    for rank in once(2, of_two_ranks):
        stock, ours = rank["gradients"]
        assert ours == [3.0]
        assert present("S2") == (stock == [rank["weight"]])


def test_a_tensor_that_is_not_contiguous_is_not_reduced(once):
    once_each, twice = [[0, 3], [1, 4], [2, 5]], [[0, 6], [2, 8], [4, 10]]
    for rank in once(2, of_two_ranks):
        assert rank["sums"] == (once_each if present("S4") else twice, twice)


def expert_weights() -> dict[str, Any]:
    """The first expert of each of two expert-parallel ranks, from equal random states."""
    layer, pg = build_layer({**random_case(0), "num_experts": 4, "bias": False}, {"expert_model_parallel_size": 2})
    layer.experts.reset_parameters(partial(normal, 1), 1.0, 1.0)
    torch.manual_seed(1)
    config = small_config(num_moe_experts=4, expert_model_parallel_size=2)
    stock = engine_linear(config, pg.expt_tp, is_expert=True)
    return {"stock": stock.weight.detach(), "ours": layer.experts.local_weights()[0][0].detach().clone()}


def test_expert_parallel_ranks_start_with_the_same_experts(gloo):
    first, second = gloo.run(2, expert_weights)
    assert present("S6") == torch.equal(first["stock"], second["stock"])
    assert not torch.equal(first["ours"], second["ours"])


# ---- schedules and losses


def scheduled(function: Any, output: torch.Tensor, cp_size: int = 1) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss that the engine differentiates, of 4 micro-batches, and what it hands to the log."""
    logged: list[dict[str, torch.Tensor]] = []
    loss, _ = schedules.forward_step_calc_loss(
        None, output, function, small_config(), None, False, 4, logged, cp_group_size=cp_size, is_last_stage=True
    )
    return loss.item(), logged[0]


def test_the_logged_loss_is_divided_with_the_other_unless_it_is_a_copy(pg):
    def naive(output: torch.Tensor) -> Any:
        total = output.sum()
        return total, {"lm loss": total.detach()}

    loss, logged = scheduled(naive, torch.full((1, 8), 2.0))
    assert loss == 4.0 and present("S21") == (logged["lm loss"].item() == 4.0)
    loss, logged = scheduled(partial(loss_func, torch.ones(1, 8)), torch.full((1, 8), 2.0))
    assert loss == 0.5 and logged["lm loss"].tolist() == [16.0, 8.0]


def test_a_loss_of_two_values_is_multiplied_by_the_context_parallel_size(pg):
    output = torch.full((1, 8), 2.0)
    loss, _ = scheduled(lambda losses: (losses.mean(), {}), output, cp_size=2)
    assert present("S22") == (loss == 2 * 2.0 / 4)
    loss, _ = scheduled(partial(loss_func, torch.ones(1, 8)), output, cp_size=2)
    assert loss == 2.0 / 4


def test_a_stage_without_moe_layers_has_no_losses_to_log(pg):
    forget_logged_losses()
    message = ""
    try:
        moe_utils.reduce_aux_losses_tracker_across_ranks(["of no layer here"], pg_collection=pg)
    except KeyError as error:
        message = str(error)
    assert present("S25") == (message == "'of no layer here'")
    assert update_routers([torch.nn.Linear(2, 2)]).aux_losses == ()


def test_layers_that_are_not_recomputed_are_not_told_the_padding(pg):
    told: list[torch.Tensor | None] = []

    class Layer(TransformerLayer):
        def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
            torch.nn.Module.__init__(self)
            self.config, self.layer_number = config, layer_number

        def forward(self, hidden_states, padding_mask=None, **_):
            told.append(padding_mask)
            return hidden_states, None

    config = small_config(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    layers = TransformerBlockSubmodules(layer_specs=[ModuleSpec(module=Layer)] * 2)
    block = TransformerBlock(config, layers, post_layer_norm=False, pg_collection=pg)
    hidden, mask = torch.ones(4, 1, 8, requires_grad=True), torch.zeros(1, 4, dtype=torch.bool)
    block(hidden, None, padding_mask=mask)
    assert told[0] is not None and present("N14") == (told[1] is None)


# ---- what needs Transformer Engine without saying so


@NO_ENGINE_EXTENSION
def test_the_gate_looks_for_a_name_that_is_not_there():
    published = as_published(moe_utils)
    assert present("S10") == (not hasattr(published, "te_general_gemm"))
    product = published.RouterGatingLinearFunction.forward
    assert "te_general_gemm" in product.__code__.co_names


@NO_ENGINE_EXTENSION
def test_recomputing_without_output_asks_for_fp8_by_default(pg):
    published = as_published(engine_random)
    assert present("S11") == published.CheckpointWithoutOutput().fp8
    x = torch.ones(2, requires_grad=True)
    without_output(lambda x: x * 2, lambda y: y.square(), x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 8.0))


def test_the_first_recomputation_compiles_an_extension(monkeypatch):
    published, compiled = as_published(engine_random), []

    def load_inline(name: str, **_: Any) -> Any:
        compiled.append(name)
        return SimpleNamespace(share_storage=None)

    monkeypatch.setattr(published, "load_inline", load_inline, raising=False)
    if present("S27"):
        published._get_share_storage()
        engine_random._get_share_storage()
    assert compiled == ["share_storage_ext"] * present("S27")
    assert present("S27") == hasattr(engine_random, "_get_share_storage")


def test_a_transformer_engine_that_cannot_be_loaded_ends_the_import(monkeypatch, tmp_path):
    (tmp_path / "transformer_engine.py").write_text("raise OSError('libcudart.so.11.0: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    with pytest.raises(OSError, match="libcudart"):
        as_published(engine_random)
    assert present("S28")


def test_the_fused_gelu_is_another_function():
    x = torch.linspace(-4, 4, 100)
    assert present("S29") == (not torch.allclose(bias_gelu(torch.zeros(1), x), torch.nn.functional.gelu(x), atol=1e-5))
    approximation = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(bias_gelu(torch.zeros(1), x), approximation, atol=1e-6, rtol=0)


@NO_ENGINE_EXTENSION
def test_latent_attention_and_layer_specs_of_the_engine_cannot_be_built(pg):
    config = MLATransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, q_lora_rank=8,
        kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8, rope_type="rope",
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(multi_latent_attention=True)
    with pytest.raises(Exception) as error:
        build_module(layer.submodules.self_attention, config=config, layer_number=1, pg_collection=pg)
    assert present("S12") and isinstance(error.value, (TypeError, NameError, ValueError, AttributeError))
    with pytest.raises((NameError, TypeError)):
        get_gpt_layer_with_transformer_engine_spec()
    assert present("S15")


def test_layer_specs_without_transformer_engine_rename_norms_in_checkpoints(pg):
    run = replace(Run(), num_experts=4, moe_ffn_hidden_size=8)
    config = transformer_config(run)
    engine = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    renamed = engine.submodules.sharded_state_dict_keys_map
    assert present("S20") == (renamed.get("pre_mlp_layernorm.") == "mlp.linear_fc1.layer_norm_")
    ours = layer_spec(config, LayerSettings.from_run(run), LOCAL, pg, moe=True)
    assert not ours.submodules.sharded_state_dict_keys_map


def test_a_missing_common_state_is_an_error_of_another_kind(tmp_path):
    """Ours is found before: tests/checkpoint/test_folder.py."""
    load = common.load_common if hasattr(common, "load_common") else common.TorchCommonLoadStrategy().load_common
    with pytest.raises((AttributeError, CheckpointingException)) as error:
        load(str(tmp_path))
    assert present("S16") == (error.type is AttributeError)


def test_the_norm_refuses_sequence_parallelism():
    config = small_config(
        **TP2, sequence_parallel=True, normalization="RMSNorm", persist_layer_norm=False, params_dtype=torch.float32
    )
    assert present("S13")
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config, 8)
    assert RMSNorm(config, 8).weight.sequence_parallel


def test_the_engines_attention_refuses_context_parallelism(pg):
    """Ours: tests/model/test_context_parallel_ranks.py."""
    assert present("S26")
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        DotProductAttention(small_config(context_parallel_size=2), 1, AttnMaskType.causal, "self", pg_collection=pg)


def test_the_engine_needs_a_package_that_it_does_not_ask_for():
    asked_for = [name for name in importlib.metadata.requires("megatron-core") or () if "extra ==" not in name]
    assert present("S9") == (not any(name.startswith("psutil") for name in asked_for))
    assert importlib.util.find_spec("psutil") is not None


def test_a_flipped_bit_of_a_checkpoint_is_loaded(pg, tmp_path):
    stock, value = tmp_path / "stock", torch.arange(1.0, 1025.0)
    stock.mkdir()
    saved, wanted = (ShardedTensor.from_rank_offsets("weight", one) for one in (value.clone(), torch.zeros(1024)))
    dist_checkpointing.save({"weight": saved}, str(stock))
    stored = value[512:].numpy().tobytes()
    (file,) = [path for path in stock.glob("*.distcp") if stored in path.read_bytes()]
    flip(file, file.read_bytes().index(stored))
    assert present("S24") and not torch.equal(dist_checkpointing.load({"weight": wanted}, str(stock))["weight"], value)
    step = make_step(tmp_path / "ours", 50)
    flip(step / "__0_0.distcp")
    assert "its SHA-256 is another" in (manifest.content_defect(step, ["__0_0.distcp"]) or "")
