"""The router: what it counts, what it refuses, and that it serves the engine's own MoE layer."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer as EngineMoELayer
from torch.fx.experimental.proxy_tensor import make_fx

from megatron_moe import Float16Module, RecordedRoutes, RoutingTrace, TopKRouter, finalize_model_grads
from megatron_moe.config.schema import Run, replace
from megatron_moe.moe.load_balance import EXACT_FP32_INTEGER
from megatron_moe.moe.router import RouterSnapshot
from megatron_moe.moe.router import routers as routers_of
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from tests.helpers import routers
from tests.helpers.routers import router, tokens
from tests.numbers.reference_moe import bias_step

pytestmark = pytest.mark.engine


def test_an_observer_sees_the_passes_that_count_or_every_pass_and_only_within_its_block() -> None:
    r, hidden = router(), tokens()
    counted: list[Any] = []
    every: list[Any] = []
    with r.observed_by(lambda _, routed: every.append(routed), every_pass=True):
        with r.observed_by(lambda seen, routed: counted.append((seen, routed))):
            decision = r.route(hidden)
            with torch.no_grad():
                r.route(hidden)
        r.eval().route(hidden)
    r.train().route(hidden)
    ((seen, routed),) = counted
    assert seen is r and [one.counted for one in every] == [True, False, False]
    assert torch.equal(routed.decision.expert_ids, decision.expert_ids) and torch.equal(routed.logits, r.gate(hidden))


def test_route_runs_the_forward_pre_hook_in_which_ddp_waits_for_the_gathered_weight() -> None:
    r, hidden = router(), tokens()
    wanted, gathered = r.route(hidden).probs, r.weight.detach().clone()
    r.register_forward_pre_hook(lambda *_: setattr(r.weight, "data", gathered))
    r.weight.data = torch.full_like(gathered, float("nan"))
    assert torch.equal(r.route(hidden).probs, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gate_computes_in_fp32_from_half_precision_storage(dtype: torch.dtype) -> None:
    r = router().to(dtype)
    hidden = tokens(dtype=dtype)
    assert r.weight.dtype == dtype
    assert torch.equal(r.gate(hidden), hidden.float() @ r.weight.float().T)
    assert r.route(hidden).probs.dtype == torch.float32
    assert router(moe_router_dtype="fp64").route(tokens()).probs.dtype == torch.float64


def test_the_gate_keeps_no_fp32_copy_of_the_hidden_states() -> None:
    gate, hidden = router().bfloat16(), tokens(64, torch.bfloat16).requires_grad_()
    kept: list[torch.dtype] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gate.gate(hidden)
    assert kept == [torch.bfloat16] * 2


def test_a_count_that_could_be_rounded_is_refused() -> None:
    r = router()
    r.step.num_tokens = EXACT_FP32_INTEGER - 5
    with pytest.raises(OverflowError, match="--global-batch-size"):
        r.route(tokens())


def test_a_replay_of_the_recorded_operations_counts_again() -> None:
    r = router()
    replay = make_fx(lambda hidden: r.route(hidden).probs)(tokens())
    r.reset_counts()
    r.route(tokens())
    counts = r.local_tokens_per_expert.clone()
    replay(tokens())
    assert r.local_num_tokens.item() == 20 and torch.equal(r.local_tokens_per_expert, 2 * counts)


def test_a_snapshot_undoes_a_step_and_drops_its_counts() -> None:
    r = router()
    r.expert_bias.copy_(torch.linspace(-1, 1, 8) / 3)
    before = r.expert_bias.clone()
    snapshot = RouterSnapshot.capture([r])
    r.route(tokens())
    r.expert_bias += 0.001
    snapshot.restore()
    assert torch.equal(r.expert_bias, before)
    assert r.local_tokens_per_expert.sum().item() == 0 and r.step.num_tokens == 0


def test_the_engines_protocol_gives_the_same_decision_in_dense_form() -> None:
    r = router().eval()
    hidden = tokens(12)
    padding = torch.tensor([[False, True]] * 6)
    probs, routing_map = r(hidden.view(6, 2, 16), padding)
    decision = r.route(hidden, padding.flatten())
    assert probs.shape == routing_map.shape == (12, 8)
    assert torch.equal(probs.gather(1, decision.expert_ids), decision.probs)
    assert routing_map.sum(1).tolist() == [2, 0] * 6


# ---- our router inside the engine's own MoE layer and GPTModel, trained with our finalize_model_grads


EXPERTS, TOPK, STEPS = 4, 2, 3


def engine_gpt_with_our_router(ep_size: int, half: str) -> Any:
    run = replace(Run(), expert_model_parallel_size=ep_size)
    pg = groups.initialize(run)
    seed_everything(run)
    config = routers.config(
        num_layers=2,
        num_moe_experts=EXPERTS,
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=ep_size,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[half],
        **{half: True},
    )
    spec = get_gpt_layer_local_spec(EXPERTS, False, False)
    mlp = spec.submodules.mlp  # a ModuleSpec in one engine version, a partial in the other
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    submodules.router = TopKRouter
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8, pg_collection=pg)
    assert isinstance(model.decoder.layers[0].mlp, EngineMoELayer)
    wrapped = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped), pg


def train(ep_size: int, half: str) -> dict[str, Any]:
    ddp, pg = engine_gpt_with_our_router(ep_size, half)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    counts = []
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        mask = torch.triu(torch.ones(1, 1, 8, 8), diagonal=1).bool()
        ddp.zero_grad_buffer()
        ddp(tokens, torch.arange(8).expand_as(tokens), mask, labels=tokens).mean().backward()
        update = finalize_model_grads([ddp], None, pg_collection=pg)
        counts.append([c.tolist() for c in update.tokens_per_expert])
    found = list(routers_of([ddp]))
    left = [r.local_tokens_per_expert.sum().item() for r in found]
    return dict(counts=counts, bias=[r.expert_bias.clone() for r in found], left=left)


@pytest.mark.parametrize(("ranks", "half"), [(1, "bf16"), (2, "fp16")])
def test_the_engines_model_trains_with_our_router(gloo: Any, ranks: int, half: str) -> None:
    found = gloo.run(ranks, train, ep_size=ranks, half=half)
    for layer in range(2):
        expected = [0.0] * EXPERTS
        for step in range(STEPS):
            counts = found[0]["counts"][step][layer]
            assert sum(counts) == 4 * 8 * TOPK
            expected = bias_step(expected, counts, 1e-3)
        for rank in found:
            assert rank["bias"][layer].dtype == torch.float32
            assert torch.equal(rank["bias"][layer].view(torch.int32), torch.tensor(expected).view(torch.int32))
            assert rank["left"] == [0.0, 0.0]
            assert rank["counts"] == found[0]["counts"]


def record_and_replay(folder: Path) -> dict[str, Any]:
    """Two micro-batches of the engine's model, recorded, and replayed by gates of the opposite sign."""
    ddp, pg = engine_gpt_with_our_router(torch.distributed.get_world_size(), "bf16")
    rank, found = torch.distributed.get_rank(), {}
    tokens = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(0))
    mine = list(range(4 * rank, 4 * rank + 4))
    mask = torch.triu(torch.ones(1, 1, 8, 8), diagonal=1).bool()

    def counts(source: Any = None) -> list[Any]:
        with contextlib.nullcontext() if source is None else source.step(mine[::-1], tokens[mine[::-1]]):
            for samples in (mine[:2], mine[2:]):
                with contextlib.nullcontext() if source is None else source.micro_batch(samples):
                    ids = tokens[samples]
                    ddp(ids, torch.arange(8).expand_as(ids), mask, labels=ids).mean().backward()
        return [c.tolist() for c in finalize_model_grads([ddp], None, pg_collection=pg).tokens_per_expert]

    trace = RoutingTrace(folder, [ddp], 8)
    found["recorded"] = counts(trace)
    trace.close()
    for gate in routers_of([ddp]):
        gate.weight.data.neg_()
    found["live"] = counts()
    torch.distributed.barrier()
    replayed = RecordedRoutes(folder, [ddp], 8)
    found["replayed"] = counts(replayed)
    replayed.begin(mine)
    with pytest.raises(RuntimeError, match="layer 1: 16 tokens are to be routed, and nothing came with them"):
        ddp(tokens[mine[:2]], torch.arange(8).expand(2, 8), mask)
    return found


def test_a_program_with_the_engines_model_records_and_replays_routes(gloo: Any, tmp_path: Path) -> None:
    for found in gloo.run(2, record_and_replay, folder=tmp_path):
        assert found["replayed"] == found["recorded"] != found["live"]
