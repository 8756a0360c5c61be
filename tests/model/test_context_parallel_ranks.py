"""Context parallelism: sequences split over ranks train, evaluate and continue as on one rank."""

import contextlib
import copy
import io
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch.profiler import ProfilerActivity, profile

from megatron_moe.config.latent_exchange import exchange_cost
from megatron_moe.config.model_flags import ModelConfig
from megatron_moe.config.module_names import SHORT
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.model.build import build_model
from megatron_moe.model.context_parallel import (
    OverRanks,
    attend_packed,
    attend_pieces,
    attend_with_torch,
    piece_gradients,
    pieces_of,
)
from megatron_moe.model.generate import next_token_logits
from megatron_moe.model.mla import Rotary, rotated
from megatron_moe.model.rotary import Rotation
from megatron_moe.parallel import groups
from megatron_moe.parallel.sequence import Documents, by_rank, context_parallel_slice, holder, in_order
from megatron_moe.precision import table
from megatron_moe.training.run import pretrain
from tests.helpers import cuda_on_cpu, trained_steps
from tests.helpers import model_cases as cases
from tests.helpers.errors import relative
from tests.helpers.rows import rows
from tests.model import mtp_cases, test_mla
from tests.model.test_attention import WIDTHS, core_attention, inputs, reference
from tests.model.test_build_ranks import CP2, MODELS, OVERLAPPED, SP2, TP2, agrees, over

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
# What the layout matrix has not.
LAYOUTS = [
    ("grouped, biased", 2, {**CP2, **CORE}),
    ("experts", 2, {**CP2, "cross_entropy_loss_fusion": True, "calculate_per_token_loss": True}),
    ("dense mla", 2, {**CP2, **OVERLAPPED}),
    ("dense mla", 2, {**CP2, **FULL}),
    ("grouped, biased", 4, {**CP2, **SP2}),
    ("experts", 4, CP2),  # and DP2
]


@over(LAYOUTS, test=LAYOUTS[:2])
def test_a_layout_with_split_sequences_agrees_with_one_rank(once, model, ranks, layout):
    agrees(once, model, ranks, layout)


# ---- the attention alone


DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def attention_on_a_rank() -> dict[str, Any]:
    """What a rank computes, sends, keeps and drops of an attention over all ranks."""
    run = replace(Run(), context_parallel_size=torch.distributed.get_world_size())
    pg_collection = groups.initialize(run)
    groups.seed_everything(run)
    found = {"sent": dtypes_sent(pg_collection), "kept": kept_bytes(pg_collection), "dropped": dropped(pg_collection)}
    return {**found, "computed": computed(pg_collection)}


def computed(pg_collection: Any) -> dict[tuple, list[torch.Tensor]]:
    """By (widths, dtype, path), this rank's part of the output, and of the gradients of query, key and value."""
    place = pg_collection.cp.rank(), pg_collection.cp.size()
    found = {}
    for path in ("this machine's", "torch's"):
        attention = core_attention(0.3, pg_collection=pg_collection)
        if path == "torch's":
            attention._kernel = OverRanks(attend_with_torch, pg_collection.cp)
        for name, widths in WIDTHS.items():
            for dtype in DTYPES:
                whole = [tensor.detach() for tensor in inputs(widths, dtype)]
                own = [context_parallel_slice(tensor, *place, dim=0).requires_grad_() for tensor in whole]
                output = attention(*own)
                output.backward(context_parallel_slice(upstream(widths, dtype), *place, dim=0))
                found[name, dtype, path] = [output.detach(), *(tensor.grad for tensor in own)]
    return found


def upstream(widths, dtype):
    shape = (24, 2, widths[0] * widths[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@contextlib.contextmanager
def noting() -> Iterator[list[tuple[str, str, Any, int]]]:
    """Of each collective in this context its name, dtype, group, and the numbers that it sends to each other rank."""
    seen: list[tuple[str, str, Any, int]] = []

    def noted(name: str) -> Any:
        stock = getattr(dist, name)

        def collective(output: torch.Tensor, input: torch.Tensor, group: Any) -> object:
            dtype = SHORT[str(output.dtype).removeprefix("torch.")]
            seen.append((name, dtype, group, min(output.numel(), input.numel())))
            return stock(output, input, group=group)

        return mock.patch.object(dist, name, collective)

    with noted("all_gather_into_tensor"), noted("reduce_scatter_tensor"):
        yield seen


def dtypes_sent(pg_collection: Any) -> dict[str, set[str]]:
    """Dtypes of what an attention in bf16 sends, by collective."""
    own = [tensor.detach().requires_grad_() for tensor in inputs(WIDTHS["latent"], torch.bfloat16)]
    with noting() as seen:
        core_attention(pg_collection=pg_collection)(*own).sum().backward()
    return {name: {dtype for other, dtype, *_ in seen if other == name} for name, *_ in seen}


def kept_bytes(pg_collection: Any) -> int:
    """Bytes that autograd keeps of an attention over 512 tokens."""
    size = pg_collection.cp.size()
    own = [torch.randn(512 // size, 1, 4, width).bfloat16().requires_grad_() for width in (24, 24, 16)]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        core_attention(pg_collection=pg_collection)(*own)
    return sum(kept.values())


def dropped(pg_collection: Any) -> dict[str, torch.Tensor]:
    """What an attention of ones over ones returns, in training and in evaluation."""
    attention = core_attention(pg_collection=pg_collection, attention_dropout=0.5)
    ones = [torch.ones(24, 1, 4, 16) for _ in range(3)]
    trained = attention(*ones)
    return {"trained": trained, "evaluated": attention.eval()(*ones)}


@pytest.mark.parametrize("size", rows([2, 4], test=[4]))
def test_attention_over_ranks_is_attention_over_the_sequence(once, size):
    """Ours rounds once, to the operands' dtype; torch's own for half precision on a CPU rounds in between."""
    results = [rank["computed"] for rank in once(size, attention_on_a_rank)]
    for name, dtype, path in results[0]:
        widths, bound = WIDTHS[name], DTYPES[dtype] * (3 if path == "torch's" else 1)
        whole = [tensor.detach().double().requires_grad_() for tensor in inputs(widths, dtype)]
        output = reference(*whole, scale=0.3)
        output.backward(upstream(widths, dtype).double())
        ranks = zip(*(rank[name, dtype, path] for rank in results))
        for parts, wanted in zip(ranks, (output, *(tensor.grad for tensor in whole)), strict=True):
            assert parts[0].dtype == dtype
            assert relative(in_order(torch.cat(parts), size), wanted) < bound, (name, dtype, path)


def test_keys_and_values_travel_in_the_dtypes_of_the_contract(once):
    contract = {row.name: row for row in table.contract(build({**TINY, **CP2, **EXPANDED, "bf16": True}))}
    row = contract["keys and values over CP ranks"]
    for rank in once(4, attention_on_a_rank):
        assert rank["sent"] == {"all_gather_into_tensor": {row.stored}, "reduce_scatter_tensor": {row.reduced}}
    assert not {"keys and values over CP ranks", LATENTS} & {r.name for r in table.contract(build(TINY))}


@pytest.mark.parametrize("size", rows([2, 4], test=[4]))
def test_what_a_rank_keeps_for_the_backward_pass_falls_with_the_number_of_ranks(once, size):
    per_token = 2 * 4 * (24 + 24 + 16) + 4 * 4 * 16 + 4 * 4  # query, key, value; context and logsumexp in fp32
    assert [rank["kept"] for rank in once(size, attention_on_a_rank)] == [512 // size * per_token] * size


def test_dropout_drops_weights_in_training_only_and_differently_on_each_rank(once):
    one, other, *rest = (rank["dropped"] for rank in once(4, attention_on_a_rank))
    for found in (one, other, *rest):
        assert torch.allclose(found["evaluated"], torch.ones(24, 1, 64))  # weights add up to one
        assert (found["trained"][-12:] != 1).any()
        assert abs(found["trained"].mean() - 1) < 0.3  # what is kept is scaled up
    assert not torch.equal(one["trained"], other["trained"])


# ---- latent attention alone, whose ranks exchange latents or what they expand them to


LATENTS = "latents over CP ranks"
EXPANDED = {"mla_cp_exchange": "expanded"}
BATCH, TOKENS = 2, 24
RECOMPUTED = [(), ("core_attn",), ("mla_up_proj",), ("core_attn", "mla_up_proj")]
SHARED_SEQUENCE = {"CP4": {"context_parallel_size": 4}, "CP2 TP2": {**CP2, **TP2}, "CP2 SP2": {**CP2, **SP2}}
CUT_AT = {"linear_q_up_proj.weight": 0, "linear_kv_up_proj.weight": 0, "linear_proj.weight": 1}


def latent_run(**flags: Any) -> Run:
    return replace(Run(), **{**test_mla.SIZES, "seq_length": TOKENS, **flags})


def latent_attention(
    run: Run, weights: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A rank's part of the output and of all gradients, summed as a step sums them; and what its CP ranks exchange."""
    layer, p = test_mla.layer_of(run), run.parallel
    tp, cp = layer.tp_group, parallel_state.get_context_parallel_group()
    cuts = {name: CUT_AT.get(name) for name, _ in layer.named_parameters()}
    if weights is not None:
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(part_of(weights[name], cuts[name], tp))
    x, grad = torch.randn(2, TOKENS, BATCH, 32, generator=torch.Generator().manual_seed(2)).to(layer.linear_proj.weight)

    def own(whole: torch.Tensor) -> torch.Tensor:
        part = context_parallel_slice(whole, cp.rank(), cp.size(), dim=0) if cp.size() > 1 else whole
        return part_of(part, 0 if p.sequence_parallel else None, tp).clone()

    x = own(x).requires_grad_()
    with noting() as calls:
        output, _ = layer(x)
        output.backward(own(grad))
    found = {"output": output.detach(), "input": x.grad}
    for name, parameter in layer.named_parameters():
        dist.all_reduce(parameter.grad, group=cp)
        if p.sequence_parallel and cuts[name] is None:
            dist.all_reduce(parameter.grad, group=tp)
        found[name] = parameter.grad
    sent: dict[str, int] = Counter()
    for name, dtype, group, numbers in calls:
        if group is cp:
            sent[f"{name.split('_')[0]} {dtype}"] += numbers
    values = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    return found, {"cp": (cp.rank(), cp.size()), "tp": (tp.rank(), tp.size()), "sent": sent, "weights": values}


def part_of(whole: torch.Tensor, axis: int | None, group: Any) -> torch.Tensor:
    return whole if axis is None else whole.chunk(group.size(), axis)[group.rank()]


@pytest.mark.engine
@pytest.mark.parametrize("exchange", ["latent", "expanded"])
@pytest.mark.parametrize("layout", rows(SHARED_SEQUENCE, test=["CP2 TP2", "CP2 SP2"]))
def test_latent_attention_over_ranks_has_the_gradients_of_one_rank(gloo, once, layout, exchange):
    ((wanted, one),) = once(1, latent_attention, run=latent_run())
    for modules in RECOMPUTED:
        recomputed = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
        run = latent_run(**SHARED_SEQUENCE[layout], **recomputed, mla_cp_exchange=exchange)
        for found, rank in gloo.run(4, latent_attention, run=run, weights=one["weights"]):
            for name, got in found.items():
                whole, (tp_rank, tp) = wanted[name], rank["tp"]
                if name in ("output", "input"):
                    whole = context_parallel_slice(whole, *rank["cp"], dim=0)
                    whole = whole.chunk(tp)[tp_rank] if run.parallel.sequence_parallel else whole
                elif name in CUT_AT:
                    whole = whole.chunk(tp, CUT_AT[name])[tp_rank]
                assert relative(got, whole) < 1e-6, (modules, name)


@pytest.mark.parametrize("layout", rows(SHARED_SEQUENCE, test=["CP2 SP2"]))
def test_a_latent_is_all_that_is_sent_of_a_token_and_its_gradient_all_that_comes_back(gloo, once, layout):
    for exchange in ("latent", "expanded"):
        run = latent_run(**SHARED_SEQUENCE[layout], bf16=True, mla_cp_exchange=exchange)
        contract = {row.name: row for row in table.contract(build({**TINY, **CP2, "bf16": True}))}
        numbers = getattr(exchange_cost(run, "bfloat16"), exchange)
        for _, rank in gloo.run(4, latent_attention, run=run):
            cp, tp = rank["cp"][1], rank["tp"][1] if layout == "CP2 SP2" and exchange == "latent" else 1
            once_each = numbers * BATCH * TOKENS // cp // tp
            again = 1 if exchange == "latent" else 2  # a CPU keeps a rank's own keys and values, and gathers twice
            assert rank["sent"] == {
                f"all {contract[LATENTS].stored}": again * once_each,
                f"reduce {contract[LATENTS].reduced}": once_each,
            }


def test_latents_are_exchanged_where_expanding_them_again_costs_less_than_sending_what_they_expand_to():
    deepseek = {**PRESETS["deepseek-v3"], "context_parallel_size": 2, "bf16": True}
    cost = exchange_cost(build(deepseek), "bfloat16")
    assert (cost.latent, cost.expanded, cost.bytes_per_number) == (576, 40_960, 6)
    assert cost.flops == 3 * 2 * 512 * 128 * (128 + 128)
    for tp, chosen in {1: "latent", 8: "latent", 32: "latent", 64: "expanded"}.items():
        assert build({**deepseek, "tensor_model_parallel_size": tp}).derived.mla_cp_exchange == chosen
    assert build({**deepseek, **EXPANDED}).derived.mla_cp_exchange == "expanded"
    assert build({**deepseek, "context_parallel_size": 1}).derived.mla_cp_exchange is None


# ---- the loss


POSITIONS = torch.arange(16).expand(cases.SEQUENCES, 16)
LOSS_MASKS = {
    "uneven": (3 * torch.arange(cases.SEQUENCES).unsqueeze(1) < POSITIONS).float(),
    "one rank without": ((POSITIONS < 4) | (POSITIONS >= 12)).float(),  # of two ranks the second
}
MASKS = [("uneven", True), ("one rank without", False), ("uneven", False), ("one rank without", True)]


@pytest.mark.parametrize(("masks", "per_token"), rows(MASKS, test=MASKS[:2]))
def test_ranks_with_unequally_many_loss_tokens_have_the_loss_and_gradients_of_one_rank(gloo, masks, per_token):
    run = replace(Run(), **{**MODELS["experts"], "micro_batch_size": 1}, calculate_per_token_loss=per_token)
    mask = LOSS_MASKS[masks]
    (wanted,) = gloo.run(1, mtp_cases.steps, run=run, loss_mask=mask)
    for rank in gloo.run(2, mtp_cases.steps, run=replace(run, **CP2), loss_mask=mask):
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert rank["grad_norms"] == pytest.approx(wanted["grad_norms"], rel=1e-6)
        for name, (_, _, grad) in rank["tensors"].items():
            assert relative(grad, wanted["tensors"][name][2]) < 2e-6, name
        assert len(rank["biases"]) == len(wanted["biases"]) > 0
        for got, bias in zip(rank["biases"], wanted["biases"]):
            assert bias.any()
            assert torch.equal(got.view(torch.int32), bias.view(torch.int32))


# ---- the rest of a run


def copied(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a model and of its copy."""
    pg_collection = groups.initialize(run)
    groups.seed_everything(run)
    chunks = build_model(run, pg_collection, cases.VOCAB, wrap=False)
    tokens = cases.global_batch(run.model.seq_length)["tokens"][:1]
    return tuple(next_token_logits(model, tokens, position=9) for model in (chunks, copy.deepcopy(chunks)))


def test_a_copied_model_shares_the_group(gloo):
    for logits, of_the_copy in gloo.run(2, copied, run=replace(Run(), **MODELS["grouped, biased"], **CP2)):
        assert torch.equal(logits, of_the_copy)


TINY = {
    **trained_steps.TINY,
    "train_iters": 2,
    "eval_iters": 1,
    "seq_length": 32,
    "health_interval": 1,
    "sample_prompt": "of the",
    "sample_tokens": 3,
}


def trained(flags: dict[str, object]) -> dict[str, object]:
    """A whole run; its summary, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return {**pretrain(build({**TINY, **flags})), "printed": printed.getvalue()}


EXACT = ("tokens", "data_hash", "expert_bias_hash")
WAYS = {"out of CP2": (CP2, {}), "into CP2": ({}, CP2)}


@pytest.mark.parametrize("way", rows(WAYS, test=["out of CP2"]))
def test_a_run_evaluates_samples_saves_and_is_measured_as_on_one_rank(gloo, once, folder, tmp_path, way):
    """A step under CP2, then one on one rank, or the other way round: each the second half of the same run."""
    (wanted,) = once(1, trained, flags={"metrics_file": str(folder / "whole")})
    shared = {"metrics_file": str(tmp_path / "metrics"), "save": str(tmp_path / "saved")}
    first, second = WAYS[way]
    ranks = [sizes.get("context_parallel_size", 1) for sizes in (first, second)]
    gloo.run(ranks[0], trained, flags={**shared, **first, "exit_interval": 1})
    summary = gloo.run(ranks[1], trained, flags={**shared, **second, "load": shared["save"]})[0]
    assert f"CP {ranks[1]}, " in summary["printed"]
    assert summary["sample"] == wanted["sample"]
    assert summary["valid_loss"] == pytest.approx(wanted["valid_loss"], rel=1e-5)
    steps = trained_steps.lines(tmp_path / "metrics")
    assert [step["iteration"] for step in steps] == [1, 2]
    for got, step in zip(steps, trained_steps.lines(folder / "whole"), strict=True):
        assert got["loss"] == pytest.approx(step["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
        assert [got[name] for name in EXACT] == [step[name] for name in EXACT]
        for layer, health in step["health"]["layers"].items():
            found = got["health"]["layers"][layer]
            assert found["sampled_tokens"] == health["sampled_tokens"]
            assert found["max_logit"] == pytest.approx(health["max_logit"], rel=1e-4)


# ---- context parallelism in one process: where tokens lie, their positions, and what a rank holds


SCALE = 0.3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_by_rank_and_in_order_are_each_others_inverse_and_a_position_is_with_its_holder(size):
    rows = torch.arange(48).view(24, 2)
    parts = torch.cat([context_parallel_slice(rows, rank, size, dim=0) for rank in range(size)])
    assert torch.equal(by_rank(rows, size), parts) if size > 1 else True
    assert torch.equal(in_order(parts, size), rows)
    for position in range(24):
        rank, index = holder(position, 24, size)
        assert context_parallel_slice(torch.arange(24), rank, size)[index] == position


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_latent_attention_rotates_a_rank_s_rows_for_their_positions_in_the_whole_sequence(rank):
    rotation = Rotation(ModelConfig(rotary_base=100.0), 8)
    x = torch.randn(24, 2, 3, 8)
    wanted = context_parallel_slice(rotated(x, *Rotary(rotation).tables(len(x), x.device)), rank, 4, dim=0)
    part = context_parallel_slice(x, rank, 4, dim=0)
    assert torch.equal(rotated(part, *Rotary(rotation, rank, 4).tables(len(part), x.device)), wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names the CPU's kernels")
def test_chunks_of_one_token_add_up_to_the_gradients_of_the_sequence():
    query, key, value, grad = whole = torch.randn(4, 1, 2, 6, 8).unbind()
    wanted = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    F.scaled_dot_product_attention(*wanted, is_causal=True, scale=SCALE).backward(grad)
    keys, values = torch.zeros_like(key), torch.zeros_like(value)
    for rank in range(3):
        own, upstream, grad_query = (
            context_parallel_slice(one, rank, 3, dim=2) for one in (query, grad, wanted[0].grad)
        )
        pieces = pieces_of(2, rank, 3)
        results = attend_pieces(own, key, value, SCALE, pieces)
        found = piece_gradients(upstream, own, key, value, *results, SCALE, pieces)
        torch.testing.assert_close(found[0], grad_query)
        keys, values = keys + found[1], values + found[2]
    torch.testing.assert_close((keys, values), (wanted[1].grad, wanted[2].grad))


@pytest.mark.parametrize("widths", ["grouped", "latent", "wide values"])
def test_documents_in_one_call_of_the_kernel_attend_as_in_pieces(monkeypatch, widths):
    """With a stand-in for torch's kernel for CUDA."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", cuda_on_cpu.varlen_attn)
    n, g, dk, dv = WIDTHS[widths]
    documents = Documents.of(torch.tensor([[0] * 5 + [5] + [6] * 18, [0] * 14 + [-1] * 2 + [16] * 8] * 2), 2)
    over = OverRanks(attend_with_torch, SimpleNamespace(rank=lambda: 0, size=lambda: 1), gathers=False)
    query, key, value = torch.randn(2, n, 24, dk), torch.randn(2, g, 24, dk), torch.randn(2, g, 24, dv)
    wanted = attend_with_torch(query, key, value, SCALE, 0.0, over, documents)
    torch.testing.assert_close(attend_packed(query, key, value, SCALE, over, documents), wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="names the CPU's kernels")
def test_a_rank_holds_no_score_matrix():
    """Neither of the whole sequence nor of its own queries."""
    length, (n, g, dk, dv) = 1024, WIDTHS["latent"]
    query, grad = torch.randn(1, n, length // 2, dk), torch.randn(1, n, length // 2, dv)
    key, value = torch.randn(1, g, length, dk), torch.randn(1, g, length, dv)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        pieces = pieces_of(length // 2, 1, 2)
        context, logsumexp = attend_pieces(query, key, value, SCALE, pieces)
        piece_gradients(grad, query, key, value, context, logsumexp, SCALE, pieces)
    assert max(event.cpu_memory_usage for event in trace.events()) < length // 2 * length * n
