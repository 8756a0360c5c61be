"""Gradients, optimizer and loss scale of the engine: each known defect shows there, and not in ours."""

import math
from contextlib import ExitStack
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
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module as EngineFloat16Module
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from megatron_moe.config.schema import Run, replace
from megatron_moe.engine.optimizer import settle_positions
from megatron_moe.model.build import build_model
from megatron_moe.model.initialize import Split, _mark
from megatron_moe.model.mtp import without_second_table
from megatron_moe.moe.experts import mark_expert_parameter
from megatron_moe.moe.router import RouterSnapshot
from megatron_moe.optim.optimizer import SharedLossScale, build_optimizer
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.training.finalize_model_grads import finalize_model_grads
from tests.engine.stock import BF16, SP2, both_routers, engine_linear, one_hot_logits, present, small_config

pytestmark = pytest.mark.engine

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


def distributed(module: Any, pg: Any, **settings: Any) -> tuple[Any, MegatronOptimizer, Any]:
    """A wrapped module, its distributed optimizer, and the only one of those that this is made of."""
    model = wrapped(module, pg, use_distributed_optimizer=True)
    optimizer = optimizer_of(model, pg, use_distributed_optimizer=True, **settings)
    return model, optimizer, getattr(optimizer, "chained_optimizers", [optimizer])[0]


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
        linear = engine_linear(config, pg.expt_tp, is_expert=True)
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


def split_marks() -> tuple[bool, bool]:
    pg = groups.initialize(replace(Run(), **SP2))
    weight = engine_linear(small_config(**SP2, perform_initialization=False), pg.tp).weight
    stock = bool(getattr(weight, "tensor_model_parallel", False))
    _mark(weight, Split(0))
    return stock, weight.tensor_model_parallel


def test_weights_initialised_elsewhere_are_not_marked_as_split(gloo: Any) -> None:
    assert gloo.run(2, split_marks) == [(not present("N3"), True)] * 2


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


def test_a_skipped_step_has_moved_the_bias(pg: Any) -> None:
    """E14: four tokens for expert 0 of 4, then an fp16 overflow."""
    biases = []
    routers = both_routers(pg, 4, moe_router_enable_expert_bias=True, **FP16)
    for router, finalize in zip(routers, (engine_finalize, finalize_model_grads)):
        model = wrapped(EngineFloat16Module(router.config, router), pg)
        optimizer = optimizer_of(model, pg, **FP16)
        snapshot = RouterSnapshot.capture([model])
        probs, _ = model(one_hot_logits([0, 0, 0, 0], 4))
        (probs.sum() * math.inf).backward()
        finalize([model], None, pg_collection=pg)
        committed, _, _ = optimizer.step()
        assert not committed
        if finalize is finalize_model_grads:
            snapshot.restore()  # as training/step.py does
        biases.append(router.expert_bias.float().tolist())
    assert biases[1] == [0.0] * 4
    assert present("E14") == any(biases[0])


@pytest.mark.parametrize("half", [{}, BF16], ids=["fp32", "bf16"])
def test_a_step_of_nan_is_taken_by_the_engines_optimizer(pg: Any, half: dict[str, Any]) -> None:
    """Ours skips it: tests/training/test_step.py, tests/training/test_faults_ranks.py."""
    model = wrapped(Weights(small_config(num_moe_experts=2, **half)), pg)
    optimizer = optimizer_of(model, pg, **half)
    for parameter in model.parameters():
        parameter.main_grad.fill_(math.nan)
    taken, _, _ = optimizer.step()
    assert present("S23") == (taken and bool(model.module.dense.isnan().all()))


# ---- fp16's loss scale


def test_chained_optimizers_scale_apart(pg: Any) -> None:
    """N1: an overflow in the dense weight alone; the scales of the dense and of the expert optimizer."""
    model, scales = wrapped(Weights(small_config(num_moe_experts=2, **FP16)), pg), []
    for name in ("stock", "ours"):
        optimizer = optimizer_of(model, pg, **FP16, initial_loss_scale=1024.0, hysteresis=1)
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
        scales.append([part.grad_scaler.scale.item() for part in chained])
    assert scales[1] == [512.0, 512.0]
    assert present("N1") == (scales[0] == [512.0, 1024.0])


def test_hysteresis_is_not_in_a_row_and_ours_is_the_same() -> None:
    stock, inner = (DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, growth_interval=1000, hysteresis=2) for _ in range(2))
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


def test_all_parameters_share_the_step_of_a_resumed_torch_adam(pg: Any) -> None:
    """S7: the step counts of two parameters' moments, one update after their state was loaded."""
    found = []
    for patches in (torchs_adam(), ()):
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            module = MegatronModule(small_config())
            module.first, module.second = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
            model, optimizer, part = distributed(module, pg)
            step_of_ones(model, optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            step_of_ones(model, optimizer)
            groups_ = part.optimizer.param_groups
            states = [part.optimizer.state[p] for group in groups_ for p in group["params"]]
            in_state = {float(state["step"]) for state in states if "step" in state}
            found.append(in_state or {float(group["step"]) for group in groups_})
    assert found[1] == {2.0}
    assert present("S7") == (found[0] == {3.0})


def saved_in_buckets() -> list[str]:
    """Weights that the engine would save with another's main weight. Small buckets: their padding is in the middle."""
    from megatron_moe.checkpoint.sharded import sharded_tensors
    from megatron_moe.checkpoint.state import metadata, unwrapped
    from tests.helpers.stepped_trainer import SMALL, Trainer

    overlap = {"overlap_grad_reduce": True, "ddp_bucket_size": 1000}
    trainer = Trainer({**SMALL, "bf16": True, "use_distributed_optimizer": True, **overlap})
    trainer.step()
    form = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    options = {**metadata(trainer.groups), **form}
    weights = unwrapped(trainer.model[0]).sharded_state_dict(metadata=options)
    state = trainer.optimizer.sharded_state_dict(weights, is_loading=False, metadata=options)
    mains = {(one.key, one.global_offset): one.data.bfloat16() for one in sharded_tensors(state)}
    known = [one for one in sharded_tensors(weights) if one.dtype == torch.bfloat16]
    assert len(known) > 25
    return [
        one.key
        for one in known
        if not torch.equal(mains[f"optimizer.state.param.{one.key}", one.global_offset], one.data)
    ]


def test_state_saved_from_padded_buckets_is_another_weights(gloo: Any) -> None:
    """Ours: tests/checkpoint/test_dist.py."""
    for rank in gloo.run(2, saved_in_buckets):
        assert present("E16") == (len(rank) > 5)


def test_the_default_format_of_the_distributed_optimizer_cannot_be_saved(pg: Any, tmp_path: Path) -> None:
    """Ours: tests/checkpoint/test_dist.py."""
    module = Weights(small_config(num_moe_experts=2))
    model, optimizer, _ = distributed(module, pg)
    step_of_ones(model, optimizer)
    assert present("S17")
    with pytest.raises(Exception, match="flattened_range is not supported"):
        state = optimizer.sharded_state_dict(module.sharded_state_dict())
        dist_checkpointing.save({"optimizer": state}, str(tmp_path))


def test_weights_of_two_dtypes_are_looked_up_in_the_wrong_places(pg: Any) -> None:
    """N2: a bf16, an fp32 and a bf16 weight: the main weights, and where the engine believes them to stand."""
    module = MegatronModule(small_config(**BF16))
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float32), ("c", torch.bfloat16)):
        module.register_parameter(name, torch.nn.Parameter(torch.full((64,), float(ord(name)), dtype=dtype)))
    _, _, part = distributed(module, pg, **BF16)
    mains = part.optimizer.param_groups[0]["params"]
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def believed() -> list[tuple[str, str]]:
        return sorted(
            (names[id(parameter)], chr(int(mains[order].flatten()[0])))
            for parameter, (_, order) in part.model_param_group_index_map.items()
        )

    right = [("a", "a"), ("b", "b"), ("c", "c")]
    assert present("N2") == (believed() != right)
    settle_positions(part)
    assert believed() == right


def test_groups_that_differ_in_their_learning_rates_are_mixed_up_by_a_load() -> None:
    same = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "min_lr": 0.0}
    groups_ = [{**same, "max_lr": rate, "params": [number]} for number, rate in enumerate((1e-3, 1e-4))]
    loaded = MegatronOptimizer._filter_and_reorder_param_groups(groups_, [dict(group) for group in groups_])
    assert present("E17") == ([group["max_lr"] for group in loaded] == [1e-4, 1e-4])


# ---- losses of the next token and of further ones


VOCABULARY, SEQUENCE = 32, 8


def engine_model(pg: Any, **changes: Any) -> GPTModel:
    """The engine's dense GPT with one layer that predicts a token further."""
    config = small_config(
        num_layers=1, mtp_num_layers=1, hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False,
        masked_softmax_fusion=False, gradient_accumulation_fusion=False, persist_layer_norm=False,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec()
    further = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return GPTModel(
        config, layer, VOCABULARY, SEQUENCE, position_embedding_type="rope", mtp_block_spec=further, pg_collection=pg,
        **changes,
    )  # fmt: skip


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions, an attention mask, labels; one sequence."""
    drawn = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    future = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return drawn[:, :-1], torch.arange(SEQUENCE)[None], future, drawn[:, 1:]


def test_a_micro_batch_without_further_targets_has_nan_gradients(pg: Any) -> None:
    """N9: only the first position has a loss: no token further on has one."""
    run = replace(
        Run(), num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=SEQUENCE, mtp_num_layers=1,
        ffn_hidden_size=32, make_vocab_size_divisible_by=1,
    )  # fmt: skip
    seed_everything(run)
    ids, positions, future, labels = tokens()
    mask = torch.zeros(1, SEQUENCE)
    mask[:, 0] = 1.0
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    stock, (ours,) = engine_model(pg), build_model(run, pg, VOCABULARY)
    for model, attention_mask in ((stock, future), (ours, None)):
        (model(ids, positions, attention_mask, labels=labels, loss_mask=mask.clone()) * mask).sum().backward()
    assert all(p.main_grad.isfinite().all() for p in ours.parameters())
    finite = all(p.grad.isfinite().all() for p in stock.parameters() if p.grad is not None)
    assert present("N9") == (not finite)


def test_a_tied_output_layer_has_a_table_that_is_never_used(pg: Any) -> None:
    """N10: weights without a gradient on a last pipeline stage with tied embeddings."""
    ids, positions, future, labels = tokens()
    stock, ours = (engine_model(pg, pre_process=False, share_embeddings_and_output_weights=True) for _ in range(2))
    without_second_table(ours)
    unused = []
    for model in (stock, ours):
        model.set_input_tensor(torch.ones(SEQUENCE, 1, 8))
        model(ids, positions, future, labels=labels).sum().backward()
        unused.append([key for key, weight in model.named_parameters() if weight.grad is None])
    assert unused[1] == []
    assert present("N10") == (unused[0] == ["output_layer.weight"])


def test_the_loss_depends_on_the_padding_of_the_vocabulary(pg: Any) -> None:
    """N12: a model's losses with 8 rows of padding behind the vocabulary, and with none."""
    run = replace(Run(), num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=SEQUENCE)
    seed_everything(run)
    ids, positions, future, labels = tokens()
    losses: dict[str, list[torch.Tensor]] = {"stock": [], "ours": []}
    for rows in (VOCABULARY, VOCABULARY + 8):
        config = small_config(num_layers=1, hidden_dropout=0.0, attention_dropout=0.0, masked_softmax_fusion=False)
        stock = GPTModel(
            config, get_gpt_layer_local_spec(), rows, SEQUENCE, position_embedding_type="rope", pg_collection=pg
        )
        (ours,) = build_model(run, pg, VOCABULARY, wrap=False, padded_vocab_size=rows)
        for model, mask, name in ((stock, future, "stock"), (ours, None, "ours")):
            for weight in model.parameters():
                weight.data.fill_(0.1)
            losses[name].append(model(ids, positions, mask, labels=labels).detach())
    assert torch.allclose(*losses["ours"])
    assert present("N12") == (not torch.allclose(*losses["stock"]))


def groups_of_the_table() -> dict[str, bool]:
    """Whether this stage's table of the vocabulary is in a group with the decoupled rate: by the engine, and by us."""
    run = replace(
        Run(), num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=SEQUENCE, mtp_num_layers=1,
        ffn_hidden_size=32, untie_embeddings_and_output_weights=True, pipeline_model_parallel_size=2, decoupled_lr=0.5,
    )  # fmt: skip
    pg = groups.initialize(run)
    model = build_model(run, pg, VOCABULARY)
    table = next(weight for name, weight in model[0].named_parameters() if name.endswith("word_embeddings.weight"))
    config = OptimizerConfig(lr=0.1, decoupled_lr=0.5)
    optimizers = {
        "stock": get_megatron_optimizer(config, model, use_gloo_process_groups=False, pg_collection=pg),
        "ours": build_optimizer(run, model, pg),
    }
    return {
        name: any(one is table for group in optimizer.param_groups if group["max_lr"] == 0.5 for one in group["params"])
        for name, optimizer in optimizers.items()
    }


def test_a_copy_of_the_table_is_not_marked_for_the_decoupled_rate(gloo: Any) -> None:
    first, last = gloo.run(2, groups_of_the_table)
    assert first == {"stock": True, "ours": True} and last["ours"]
    assert present("N13") == (not last["stock"])
