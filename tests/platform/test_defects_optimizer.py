"""Gradients, optimizer and loss scale of the engine: each known defect shows there, and not in ours."""

from __future__ import annotations

import math
import tempfile
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import optimizer as engine_optimizer
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as engine_finalize
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module as EngineFloat16Module
from megatron.core.transformer.module import MegatronModule

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.initialize import Split, _mark
from megatron_moe.moe.experts import mark_expert_parameter
from megatron_moe.moe.state import RouterSnapshot
from megatron_moe.parallel import groups
from megatron_moe.training.finalize_model_grads import finalize_model_grads
from megatron_moe.training.optimizer import SharedLossScale, _settle_positions
from tests.platform.stock import both_routers, one_hot_logits, present
from tests.platform.test_defects_engine import small_config

pytestmark = pytest.mark.engine

SP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FP16 = {"fp16": True, "params_dtype": torch.float16}


class Weights(MegatronModule):
    """A dense weight, and an expert's as an engine module leaves it that does not mark it as split."""

    def __init__(self, config: Any, ours: bool = False) -> None:
        super().__init__(config)
        self.dense = torch.nn.Parameter(torch.ones(4, dtype=config.params_dtype))
        self.expert = torch.nn.Parameter(torch.ones(4, dtype=config.params_dtype))
        if ours:
            mark_expert_parameter(self.expert, partition_dim=0)
        else:
            self.expert.allreduce = False  # type: ignore[attr-defined]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix)


def wrapped(module: Any, pg: Any, **ddp: Any) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
    return DistributedDataParallel(module.config, settings, module, pg_collection=pg)


def optimizer_of(model: Any, pg: Any, **settings: Any) -> MegatronOptimizer:
    config = OptimizerConfig(lr=0.1, **settings)
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False, pg_collection=pg)


# ---- gradients of experts and of split weights


def expert_gradient_norm() -> dict[str, float]:
    """Two ranks, TP2 and EP2: a dense gradient of 1 on both, an expert's of 2 and of 4, with four entries each."""
    run = replace(Run(), **SP2, num_experts=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    pg = groups.initialize(run)
    layout = {**SP2, "num_moe_experts": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    found = {"right": math.sqrt(4 * (1 + 4 + 16)), "without the second rank's": math.sqrt(4 * (1 + 4))}
    for name in ("stock", "ours"):
        model = wrapped(Weights(small_config(**layout), ours=name == "ours"), pg)
        optimizer = optimizer_of(model, pg)
        model.module.dense.main_grad.fill_(1.0)
        model.module.expert.main_grad.fill_(2.0 + 2.0 * dist.get_rank())
        optimizer.prepare_grads()
        found[name] = float(optimizer.get_grad_norm())
    return found


def test_the_gradient_norm_misses_experts_of_tensor_parallel_ranks(gloo: Any) -> None:
    for rank in gloo.run(2, expert_gradient_norm):
        assert rank["ours"] == pytest.approx(rank["right"])
        assert rank["stock"] == pytest.approx(rank["without the second rank's" if present("E6") else "right"])


def expert_gradient_sum() -> dict[str, float]:
    """Two TP ranks that hold the same expert, whole, with gradients 1 and 3."""
    pg = groups.initialize(replace(Run(), **SP2, num_experts=2, expert_tensor_parallel_size=1))
    config = small_config(**SP2, num_moe_experts=2, expert_tensor_parallel_size=1, calculate_per_token_loss=True)
    found = {}
    for name in ("stock", "ours"):
        linear = ColumnParallelLinear(
            8, 8, config=config, init_method=config.init_method, bias=False, is_expert=True, tp_group=pg.expt_tp
        )
        if name == "ours":
            mark_expert_parameter(linear.weight, partition_dim=0)
        module = MegatronModule(config)
        module.linear = linear
        model = wrapped(module, pg)
        linear.weight.main_grad.fill_(1.0 + 2.0 * dist.get_rank())
        model.finish_grad_sync()
        found[name] = linear.weight.main_grad.mean().item()
    return {**found, "own": 1.0 + 2.0 * dist.get_rank()}


def test_experts_held_by_all_tensor_parallel_ranks_are_not_reduced(gloo: Any) -> None:
    for rank in gloo.run(2, expert_gradient_sum):
        assert rank["ours"] == 4.0
        assert rank["stock"] == (rank["own"] if present("S5") else 4.0)


def split_marks() -> dict[str, bool]:
    pg = groups.initialize(replace(Run(), **SP2))
    config = small_config(**SP2, perform_initialization=False)
    weight = ColumnParallelLinear(
        8, 8, config=config, init_method=config.init_method, bias=False, tp_group=pg.tp
    ).weight
    stock = bool(getattr(weight, "tensor_model_parallel", False))
    _mark(weight, Split(0))
    return {"stock": stock, "ours": weight.tensor_model_parallel}


def test_weights_initialised_elsewhere_are_not_marked_as_split(gloo: Any) -> None:
    for rank in gloo.run(2, split_marks):
        assert rank["ours"] and present("N3") == (not rank["stock"])


def query_norm_gradient() -> dict[str, float]:
    """The norm of a query's latent, the same on both TP ranks, with the whole gradient, 1, on each."""
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    from megatron_moe.model.build import build_model

    run = replace(
        Run(), tensor_model_parallel_size=2, num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=8,
        multi_latent_attention=True, q_lora_rank=8, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8,
        qk_layernorm=True, ffn_hidden_size=16, make_vocab_size_divisible_by=1,
    )  # fmt: skip
    pg = groups.initialize(run)
    (ours,) = build_model(run, pg, 32)
    stock = MegatronModule(small_config(tensor_model_parallel_size=2, qk_layernorm=True))
    stock.q_layernorm = torch.nn.RMSNorm(8)
    found = {}
    for name, model in (("stock", wrapped(stock, pg)), ("ours", ours)):
        (weight,) = (weight for key, weight in model.named_parameters() if "q_layernorm" in key)
        weight.main_grad.fill_(1.0)
        _allreduce_non_tensor_model_parallel_grads([model], model.config, pg.tp)
        found[name] = weight.main_grad.mean().item()
    return found


def test_the_query_norm_of_latent_attention_is_summed_over_ranks_that_have_the_same(gloo: Any) -> None:
    for rank in gloo.run(2, query_norm_gradient):
        assert rank["ours"] == 1.0
        assert present("N11") == (rank["stock"] == 2.0)


# ---- steps that should be skipped


def skipped_step() -> dict[str, Any]:
    """Four tokens for expert 0 of 4, then an fp16 overflow."""
    pg = groups.initialize(Run())
    biases, committed = {}, {}
    routers = both_routers(pg, 4, moe_router_enable_expert_bias=True, **FP16)
    for name, router, finalize in zip(("stock", "ours"), routers, (engine_finalize, finalize_model_grads)):
        model = wrapped(EngineFloat16Module(router.config, router), pg)
        optimizer = optimizer_of(model, pg, fp16=True, params_dtype=torch.float16)
        snapshot = RouterSnapshot.capture([model])
        probs, _ = model(one_hot_logits([0, 0, 0, 0], 4))
        (probs.sum() * math.inf).backward()
        finalize([model], None, pg_collection=pg)
        committed[name], _, _ = optimizer.step()
        if name == "ours" and not committed[name]:
            snapshot.restore()  # as training/step.py does
        biases[name] = router.expert_bias.float().tolist()
    return {"committed": committed, "biases": biases}


def test_a_skipped_step_has_moved_the_bias(gloo: Any) -> None:
    (found,) = gloo.run(1, skipped_step)
    assert found["committed"] == {"stock": False, "ours": False}
    assert found["biases"]["ours"] == [0.0] * 4
    assert present("E14") == any(found["biases"]["stock"])


def nan_step(precision: str) -> dict[str, Any]:
    pg = groups.initialize(Run())
    half = {"bf16": True, "params_dtype": torch.bfloat16} if precision == "bf16" else {}
    model = wrapped(Weights(small_config(num_moe_experts=2, **half)), pg)
    optimizer = optimizer_of(model, pg, **half)
    for parameter in model.parameters():
        parameter.main_grad.fill_(math.nan)
    taken, _, _ = optimizer.step()
    return {"taken": taken, "spoilt": bool(model.module.dense.isnan().all())}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_nan_is_taken_by_the_engines_optimizer(gloo: Any, precision: str) -> None:
    """Ours skips it: tests/training/test_step.py, tests/training/test_step_overflow_ranks.py."""
    (found,) = gloo.run(1, nan_step, precision=precision)
    assert present("S23") == (found == {"taken": True, "spoilt": True})


# ---- fp16's loss scale


def scales_after_an_overflow() -> dict[str, Any]:
    """An overflow in the dense weight alone; the scales of the dense and of the expert optimizer."""
    pg = groups.initialize(Run())
    model = wrapped(Weights(small_config(num_moe_experts=2, **FP16)), pg)
    found = {}
    for name in ("stock", "ours"):
        optimizer = optimizer_of(
            model, pg, fp16=True, params_dtype=torch.float16, initial_loss_scale=1024.0, hysteresis=1
        )
        chained = optimizer.chained_optimizers
        if name == "ours":
            shared = SharedLossScale(chained[0].grad_scaler)
            for part in chained:
                part.grad_scaler = shared
        model.module.dense.main_grad.fill_(math.inf)
        model.module.expert.main_grad.fill_(1.0)
        overflow = optimizer.prepare_grads()
        if name == "ours":
            shared.commit(found_inf=overflow)
        found[name] = [part.grad_scaler.scale.item() for part in chained]
    return found


def test_chained_optimizers_scale_apart(gloo: Any) -> None:
    (found,) = gloo.run(1, scales_after_an_overflow)
    assert found["ours"] == [512.0, 512.0]
    assert present("N1") == (found["stock"] == [512.0, 1024.0])


def test_hysteresis_is_not_in_a_row_and_ours_is_the_same() -> None:
    def scaler() -> DynamicGradScaler:
        return DynamicGradScaler(
            initial_scale=1024.0, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000,
            hysteresis=2,
        )  # fmt: skip

    stock, inner = scaler(), scaler()
    ours = SharedLossScale(inner)
    for overflow in (True, False, False, False, True):
        stock.update(overflow)
        ours.commit(overflow)
    assert present("S18") == (stock.scale.item() == 512.0)
    assert ours.scale.item() == stock.scale.item()


# ---- resuming


def torchs_adam() -> Any:
    """The engine as it is without the platform's Adam."""
    plain = {"Adam": torch.optim.AdamW, "USING_PYTORCH_OPTIMIZER": True}
    shared = {"Adam": torch.optim.AdamW, "HAVE_APEX_OR_TE": False, "USING_APEX_OPTIMIZER": False}
    return mock.patch.multiple(engine_optimizer, **plain), mock.patch.multiple(distrib_optimizer, **shared)


def step_of_ones(model: Any, optimizer: MegatronOptimizer) -> None:
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.step()


def resumed_steps() -> dict[str, list[float]]:
    """The step counts of two parameters' moments, one update after their state was loaded."""
    pg = groups.initialize(Run())
    found = {}
    for name in ("stock", "ours"):
        with ExitStack() as stack:
            for patch in torchs_adam() if name == "stock" else ():
                stack.enter_context(patch)
            module = MegatronModule(small_config())
            module.first, module.second = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
            model = wrapped(module, pg, use_distributed_optimizer=True)
            optimizer = optimizer_of(model, pg, use_distributed_optimizer=True)
            (part,) = getattr(optimizer, "chained_optimizers", [optimizer])
            step_of_ones(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            step_of_ones(model, optimizer)
            groups_ = part.optimizer.param_groups
            states = [part.optimizer.state[p] for group in groups_ for p in group["params"]]
            in_state = [float(state["step"]) for state in states if "step" in state]
            found[name] = in_state or [float(group["step"]) for group in groups_]
    return found


def test_all_parameters_share_the_step_of_a_resumed_torch_adam(gloo: Any) -> None:
    (found,) = gloo.run(1, resumed_steps)
    assert set(found["ours"]) == {2.0}
    assert present("S7") == (set(found["stock"]) == {3.0})


def saved_in_buckets(folder: str, as_published: bool) -> list[str]:
    """Names of weights whose saved fp32 main weight is another's. Small buckets: their padding is in the middle."""
    from megatron_moe.checkpoint import optimizer as optimizer_state
    from tests.helpers.trained_steps import tensors, trained

    flags = {
        "bf16": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 3000,
        "train_iters": 1, "save": folder,
    }  # fmt: skip
    with ExitStack() as stack:
        if as_published:
            stack.enter_context(mock.patch.object(optimizer_state, "_compact_buckets", nullcontext))
        state = tensors(trained(flags)["checkpoint"])
    weights = {key: value for key, value in state.items() if not key.startswith("optimizer.") and "bias" not in key}
    assert len(weights) > 40
    mains = {key: state[f"optimizer.state.param.{key}"].to(torch.bfloat16) for key in weights}
    return [key for key, weight in weights.items() if not torch.equal(mains[key], weight)]


def test_state_saved_from_padded_buckets_is_another_weights(gloo: Any, tmp_path: Path) -> None:
    """Both sides are the engine's; ours tells it where the parameters lie."""
    for rank in gloo.run(2, saved_in_buckets, folder=str(tmp_path / "stock"), as_published=True):
        assert present("E16") == (len(rank) > 10)
    for rank in gloo.run(2, saved_in_buckets, folder=str(tmp_path / "ours"), as_published=False):
        assert rank == []


def default_format() -> str:
    pg = groups.initialize(Run())
    module = Weights(small_config(num_moe_experts=2))
    model = wrapped(module, pg, use_distributed_optimizer=True)
    optimizer = optimizer_of(model, pg, use_distributed_optimizer=True)
    step_of_ones(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        try:
            state = optimizer.sharded_state_dict(module.sharded_state_dict())
            dist_checkpointing.save({"optimizer": state}, folder)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_the_default_format_of_the_distributed_optimizer_cannot_be_saved(gloo: Any) -> None:
    """Ours: tests/checkpoint/test_dist.py."""
    (message,) = gloo.run(1, default_format)
    assert present("S17") == ("flattened_range is not supported" in message), message


def mixed_positions() -> dict[str, Any]:
    """A bf16, an fp32 and a bf16 weight: the order of the main weights, and where the engine believes them to stand."""
    pg = groups.initialize(Run())
    module = MegatronModule(small_config(bf16=True, params_dtype=torch.bfloat16))
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.bfloat16)):
        module.register_parameter(name, torch.nn.Parameter(torch.full((64,), float(ord(name)), dtype=dtype)))
    model = wrapped(module, pg, use_distributed_optimizer=True)
    optimizer = optimizer_of(model, pg, use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16)
    (part,) = getattr(optimizer, "chained_optimizers", [optimizer])
    mains = part.optimizer.param_groups[0]["params"]
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def believed() -> list[tuple[str, str]]:
        return sorted(
            (names[id(parameter)], chr(int(mains[order].flatten()[0])))
            for parameter, (_, order) in part.model_param_group_index_map.items()
        )

    stock = believed()
    _settle_positions(part)
    return {"stock": stock, "ours": believed()}


def test_weights_of_two_dtypes_are_looked_up_in_the_wrong_places(gloo: Any) -> None:
    (found,) = gloo.run(1, mixed_positions)
    assert found["ours"] == [("a", "a"), ("b", "b"), ("c", "c")]
    assert present("N2") == (found["stock"] != found["ours"])


def test_groups_that_differ_in_their_learning_rates_are_mixed_up_by_a_load() -> None:
    same = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "min_lr": 0.0}
    groups_ = [{**same, "max_lr": rate, "params": [number]} for number, rate in enumerate((1e-3, 1e-4))]
    loaded = MegatronOptimizer._filter_and_reorder_param_groups(groups_, [dict(group) for group in groups_])
    assert present("E17") == ([group["max_lr"] for group in loaded] == [1e-4, 1e-4])
