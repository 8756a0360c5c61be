"""Context parallelism: sequences split over ranks train, evaluate and continue as on one rank."""

from __future__ import annotations

import contextlib
import copy
import io
import json

import pytest
import torch

from megatron_moe.config.model_parts import SHORT
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.parallel.sequence import in_order
from megatron_moe.precision import table
from tests.helpers import model_cases as cases
from tests.helpers.rows import rows
from tests.model.test_attention import WIDTHS, inputs, reference
from tests.model.test_build_ranks import EP2, MODELS, PP2, SP2, VPP2, oracle, relative_error  # noqa: F401
from tests.model.test_build_ranks import test_a_layout_agrees_with_one_rank as agrees

pytestmark = pytest.mark.engine

CP2 = {"context_parallel_size": 2}
CP4 = {"context_parallel_size": 4}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS = [
    ("dense mla", 2, CP2),
    ("dense mla", 4, CP4),
    ("dense mla", 2, {**CP2, **SHARDED}),
    ("dense mla", 2, {**CP2, **FULL}),
    ("dense mla", 4, {**CP2, **VPP2}),
    ("grouped, biased", 2, CP2),
    ("grouped, biased", 2, {**CP2, **CORE}),
    ("grouped, biased", 4, {**CP2, **SP2}),
    ("experts", 2, CP2),
    ("experts", 2, {**CP2, "cross_entropy_loss_fusion": True, "calculate_per_token_loss": True}),
    ("experts", 2, {**CP2, **EP2}),
    ("experts", 4, {**CP2, **SP2, **EP2, "expert_tensor_parallel_size": 2}),
    ("experts", 4, {**CP2, **PP2}),
    ("experts", 4, CP2),  # and DP2
]
EITHER = [
    ("dense mla", 4, CP4),
    ("dense mla", 2, {**CP2, **SHARDED}),
    ("grouped, biased", 4, {**CP2, **SP2}),
    ("experts", 2, {**CP2, "cross_entropy_loss_fusion": True, "calculate_per_token_loss": True}),
    ("experts", 4, {**CP2, **SP2, **EP2, "expert_tensor_parallel_size": 2}),
    ("experts", 4, {**CP2, **PP2}),
]


@pytest.mark.parametrize(
    ("model", "ranks", "layout"),
    rows(LAYOUTS, test=EITHER),
    ids=[f"{m}-{r}-{'-'.join(x)}" for m, r, x in LAYOUTS],
)
def test_a_layout_with_split_sequences_agrees_with_one_rank(gloo, oracle, model, ranks, layout):  # noqa: F811
    agrees(gloo, oracle, model, ranks, layout)


# ---- the attention alone


DTYPES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def attention_on_a_rank() -> dict[tuple, list[torch.Tensor]]:
    """By (widths, dtype, path), this rank's part of the output, and of the gradients of query, key and value."""
    from types import SimpleNamespace

    from megatron.core.transformer.enums import AttnMaskType

    from megatron_moe.model.attention import SDPACoreAttention
    from megatron_moe.model.context_parallel import OverRanks, attend_lower_right
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.sequence import context_parallel_slice

    world = torch.distributed.get_world_size()
    pg_collection = groups.initialize(replace(Run(), context_parallel_size=world))
    place = pg_collection.cp.rank(), world
    config = SimpleNamespace(context_parallel_size=world, attention_dropout=0.0, sequence_parallel=False)
    found = {}
    for path in ("this machine's", "torch's"):
        attention = SDPACoreAttention(config, 1, AttnMaskType.causal, softmax_scale=0.3, pg_collection=pg_collection)
        if path == "torch's":
            attention._kernel = OverRanks(attend_lower_right, pg_collection.cp)
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


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_ranks_is_attention_over_the_sequence(gloo, size):
    """Ours rounds once, to the operands' dtype; torch's own for half precision on a CPU rounds in between."""
    results = gloo.run(size, attention_on_a_rank)
    for name, dtype, path in results[0]:
        widths, bound = WIDTHS[name], DTYPES[dtype] * (3 if path == "torch's" else 1)
        whole = [tensor.detach().double().requires_grad_() for tensor in inputs(widths, dtype)]
        output = reference(*whole, scale=0.3)
        output.backward(upstream(widths, dtype).double())
        ranks = zip(*(rank[name, dtype, path] for rank in results))
        for parts, wanted in zip(ranks, (output, *(tensor.grad for tensor in whole)), strict=True):
            assert parts[0].dtype == dtype
            assert relative_error(in_order(torch.cat(parts), size), wanted) < bound, (name, dtype, path)


def dtypes_sent() -> dict[str, set[str]]:
    """Dtypes of what an attention in bf16 sends, by collective."""
    from types import SimpleNamespace

    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_moe.model.attention import SDPACoreAttention
    from megatron_moe.parallel import groups

    pg_collection = groups.initialize(replace(Run(), **CP2))
    config = SimpleNamespace(context_parallel_size=2, attention_dropout=0.0, sequence_parallel=False)
    attention = SDPACoreAttention(config, 1, AttnMaskType.causal, pg_collection=pg_collection)
    seen: dict[str, set[str]] = {"all_gather_into_tensor": set(), "reduce_scatter_tensor": set()}
    stock = {name: getattr(dist, name) for name in seen}

    def noting(name: str) -> object:
        def collective(output: torch.Tensor, *args: object, **options: object) -> object:
            seen[name].add(SHORT[str(output.dtype).removeprefix("torch.")])
            return stock[name](output, *args, **options)

        return collective

    try:
        for name in seen:
            setattr(dist, name, noting(name))
        attention(
            *(tensor.detach().requires_grad_() for tensor in inputs(WIDTHS["latent"], torch.bfloat16))
        ).sum().backward()
    finally:
        for name in seen:
            setattr(dist, name, stock[name])
    return seen


def test_keys_and_values_travel_in_the_dtypes_of_the_contract(gloo):
    rows = {row.name: row for row in table.contract(build({**TINY, **CP2, "bf16": True}))}
    row = rows["keys and values over CP ranks"]
    for seen in gloo.run(2, dtypes_sent):
        assert seen == {"all_gather_into_tensor": {row.stored}, "reduce_scatter_tensor": {row.reduced}}
    assert "keys and values over CP ranks" not in {r.name for r in table.contract(build(TINY))}


def kept_bytes(size: int) -> int:
    """Bytes that autograd keeps of an attention."""
    from types import SimpleNamespace

    from megatron.core.transformer.enums import AttnMaskType

    from megatron_moe.model.attention import SDPACoreAttention
    from megatron_moe.parallel import groups

    pg_collection = groups.initialize(replace(Run(), context_parallel_size=size))
    config = SimpleNamespace(context_parallel_size=size, attention_dropout=0.0, sequence_parallel=False)
    attention = SDPACoreAttention(config, 1, AttnMaskType.causal, pg_collection=pg_collection)
    own = [torch.randn(512 // size, 1, 4, width).bfloat16().requires_grad_() for width in (24, 24, 16)]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*own)
    return sum(kept.values())


def test_what_a_rank_keeps_for_the_backward_pass_falls_with_the_number_of_ranks(gloo):
    per_token = 2 * 4 * (24 + 24 + 16) + 4 * 4 * 16 + 4 * 4  # query, key, value; context and logsumexp in fp32
    for size in (2, 4):
        assert gloo.run(size, kept_bytes, size=size) == [512 // size * per_token] * size


def dropped(rate: float) -> dict[str, torch.Tensor]:
    from types import SimpleNamespace

    from megatron.core.transformer.enums import AttnMaskType

    from megatron_moe.model.attention import SDPACoreAttention
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything

    run = replace(Run(), context_parallel_size=2)
    pg_collection = groups.initialize(run)
    seed_everything(run)
    config = SimpleNamespace(context_parallel_size=2, attention_dropout=rate, sequence_parallel=False)
    attention = SDPACoreAttention(config, 1, AttnMaskType.causal, pg_collection=pg_collection)
    ones = [torch.ones(24, 1, 4, 16) for _ in range(3)]
    trained = attention(*ones)
    return {"trained": trained, "evaluated": attention.eval()(*ones)}


def test_dropout_drops_weights_in_training_only_and_differently_on_each_rank(gloo):
    one, other = gloo.run(2, dropped, rate=0.5)
    for found in (one, other):
        assert torch.allclose(found["evaluated"], torch.ones(24, 1, 64))  # weights add up to one
        assert (found["trained"][-12:] != 1).any()
        assert abs(found["trained"].mean() - 1) < 0.3  # what is kept is scaled up
    assert not torch.equal(one["trained"], other["trained"])


# ---- the loss


def masked_step(run: Run, masks: str) -> dict[str, object]:
    """`cases.one_step` with other loss masks, and the routers' bias after it."""
    from megatron_moe.moe.state import routers

    plain, found = cases.global_batch, []

    def batch(length: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(cases.SEQUENCES, length)
        if masks == "uneven":
            for row in range(cases.SEQUENCES):
                mask[row, : 3 * row + 1] = 0
        if masks == "one rank without":
            mask[:, length // 4 : -(length // 4)] = 0  # of two ranks the second
        return {**plain(length), "loss_mask": mask}

    def seen(chunk: torch.nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, object]:
        found.extend(router.expert_bias.clone() for router in routers([chunk]))
        return tensors(chunk, weights)

    tensors = cases._tensors
    cases.global_batch, cases._tensors = batch, seen
    try:
        return {**cases.one_step(run), "biases": found}
    finally:
        cases.global_batch, cases._tensors = plain, tensors


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of micro-batches", "mean of tokens"])
@pytest.mark.parametrize("masks", ["uneven", "one rank without"])
def test_ranks_with_unequally_many_loss_tokens_have_the_loss_and_gradients_of_one_rank(gloo, masks, per_token):
    run = replace(Run(), **MODELS["experts"], calculate_per_token_loss=per_token)
    wanted = gloo.run(1, masked_step, run=run, masks=masks)[0]
    for rank in gloo.run(2, masked_step, run=replace(run, **CP2), masks=masks):
        assert rank["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert rank["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)
        for name, (_, _, grad) in rank["tensors"].items():
            assert relative_error(grad, wanted["tensors"][name][2]) < 2e-6, name
        assert len(rank["biases"]) == len(wanted["biases"]) > 0
        for got, bias in zip(rank["biases"], wanted["biases"]):
            assert bias.any()
            assert torch.equal(got.view(torch.int32), bias.view(torch.int32))


# ---- the rest of a run


@pytest.mark.parametrize("layout", [CP4, {**CP2, **SP2}, {**CP2, **VPP2}], ids=["CP4", "CP2-SP2", "CP2-VPP2"])
def test_a_prompt_is_continued_as_on_one_rank(gloo, layout):
    run = replace(Run(), **{**MODELS["experts"], "init_method_std": 0.2})
    wanted = gloo.run(1, cases.continuation, run=run, temperature=1.0)[0]
    assert gloo.run(4, cases.continuation, run=replace(run, **layout), temperature=1.0) == [wanted] * 4


def copied(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a model and of its copy."""
    from megatron_moe.model.build import build_model
    from megatron_moe.model.generate import next_token_logits
    from megatron_moe.parallel import groups
    from megatron_moe.parallel.groups import seed_everything

    pg_collection = groups.initialize(run)
    seed_everything(run)
    chunks = build_model(run, pg_collection, cases.VOCAB, wrap=False)
    tokens = cases.global_batch(run.model.seq_length)["tokens"][:1]
    return tuple(next_token_logits(model, tokens, position=9) for model in (chunks, copy.deepcopy(chunks)))


def test_a_copied_model_shares_the_group(gloo):
    for logits, of_the_copy in gloo.run(2, copied, run=replace(Run(), **MODELS["grouped, biased"], **CP2)):
        assert torch.equal(logits, of_the_copy)


TINY = {
    **PRESETS["tiny"],
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "make_vocab_size_divisible_by": 192,
    "train_iters": 4,
    "eval_iters": 1,
    "global_batch_size": 4,
    "seq_length": 32,
    "health_interval": 1,
    "sample_prompt": "of the",
    "sample_tokens": 3,
}


def trained(flags: dict[str, object]) -> dict[str, object]:
    """A whole run; its summary, and what it printed."""
    from megatron_moe.apps.audit.step import auditing
    from megatron_moe.training.run import pretrain

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return {**pretrain(build({**TINY, **flags}), audit=auditing), "printed": printed.getvalue()}


def told(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_evaluates_samples_saves_and_is_measured_as_on_one_rank(gloo, tmp_path):
    """Two steps under CP2, then two on one rank, and the other way round: each the second half of the same run."""
    wanted = gloo.run(1, trained, flags={"metrics_file": str(tmp_path / "whole")})[0]
    whole = told(tmp_path / "whole")
    for name, first, second in (("out of CP2", CP2, {}), ("into CP2", {}, CP2)):
        shared = {"metrics_file": str(tmp_path / name), "save": str(tmp_path / f"{name} saved")}
        ranks = [sizes.get("context_parallel_size", 1) for sizes in (first, second)]
        gloo.run(ranks[0], trained, flags={**shared, **first, "exit_interval": 2})
        summary = gloo.run(ranks[1], trained, flags={**shared, **second, "load": shared["save"]})[0]
        assert f"CP {ranks[1]}, " in summary["printed"]
        assert summary["sample"] == wanted["sample"]
        assert summary["valid_loss"] == pytest.approx(wanted["valid_loss"], rel=1e-5)
        steps = told(tmp_path / name)
        assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
        for got, step in zip(steps, whole, strict=True):
            assert got["loss"] == pytest.approx(step["loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
            assert got["tokens"] == step["tokens"]
            assert got["expert_bias_max"] == step["expert_bias_max"]
            for layer, health in step["health"]["layers"].items():
                found = got["health"]["layers"][layer]
                assert found["sampled_tokens"] == health["sampled_tokens"]
                assert found["max_logit"] == pytest.approx(health["max_logit"], rel=1e-4)


def test_the_precision_audit_of_a_rank_with_split_sequences_is_clean(gloo, tmp_path):
    flags = {"bf16": True, "audit_precision": True, "audit_precision_output": str(tmp_path / "audit"), **CP2}
    gloo.run(2, trained, flags={**flags, "eval_iters": 0, "train_iters": 2})
    found = json.loads((tmp_path / "audit.json").read_text())
    assert not found["failed"]
    assert found["ranks"] == 2
