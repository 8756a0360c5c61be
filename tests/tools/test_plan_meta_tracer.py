"""Operations on the meta device are those of torch; live bytes and FLOPs are counted as they come and go."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.model.build import build_model
from megatron_moe.parallel import groups
from megatron_moe_tools.plan.layouts import Machine
from megatron_moe_tools.plan.meta_tracer import FORMULAS, LiveBytes, attention_flops, meta_device, storage_bytes
from megatron_moe_tools.plan.tracing import trace_ranks


def described(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type, tensor.untyped_storage().nbytes()


def operations():
    """Results of operations that a key might confuse, by name."""
    whole = torch.empty(4, 6, dtype=torch.int64, device="meta")
    half = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")
    return {
        "integer": whole * 1, "float": whole * 1.0, "boolean": whole + True, "plain": half + half,
        "transposed": half.t() + half.t(), "mixed": half + half.float(), "product": half @ half.t(),
        "sum": half.sum(dim=1), "kept sum": half.sum(dim=1, keepdim=True),
        "joined": torch.cat([half, half.float()], dim=1), "wide": half.to(torch.float32),
        "random": torch.rand_like(half),
    }  # fmt: skip


def test_a_result_that_is_looked_up_is_the_one_that_torch_computes():
    expected = {name: described(result) for name, result in operations().items()}
    with meta_device("cuda", (1, 1)) as tracer:
        for _ in range(2):
            tracer.flops = 0
            results = operations()
            assert {name: described(result) for name, result in results.items()} == expected
            assert tracer.flops == 2 * 4 * 6 * 4
            assert len({result.untyped_storage()._cdata for result in results.values()}) == len(results)


def test_values_and_views_are_not_looked_up():
    real = torch.arange(3)
    with meta_device("cuda", (1, 1)):
        base = torch.empty(4, 6, device="meta")
        for _ in range(2):
            assert real.mul(2).tolist() == [0, 2, 4] and real.clone().add_(1).tolist() == [1, 2, 3]
            assert torch.empty(4, 6, device="meta").t_().shape == (6, 4)
            for view in (base.view(6, 4), torch.ops.aten._unsafe_view(base, [24]), base.add_(1), base.nan_to_num_()):
                assert view.untyped_storage()._cdata == base.untyped_storage()._cdata


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_made_counts_until_it_is_freed(device):
    with LiveBytes() as live:
        one = torch.empty(100, dtype=torch.float32, device=device)
        two = one + 1
        view = two[:10]
        assert (live.live, live.peak) == (800, 800)
        del two
        assert live.live == 800  # the view holds it
        del view
        assert (live.live, live.peak) == (400, 800)
        live.restart_peak()
        assert live.peak == 400


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_that_is_freed_and_refilled_without_an_operation_counts_so(device):
    resize = torch.UntypedStorage.resize_
    with LiveBytes() as live:
        one = torch.empty(100, device=device)
        one.untyped_storage().resize_(0)
        assert live.live == 0
        one.untyped_storage().resize_(400)
        assert (live.live, live.peak) == (400, 400)
    assert torch.UntypedStorage.resize_ is resize


def test_the_backward_pass_is_counted():
    with LiveBytes() as live:
        weight = torch.ones(64, 64, requires_grad=True)
        before = live.live
        kept = (weight * weight).exp()
        assert live.live - before == 2 * 64 * 64 * 4 - 64 * 64 * 4  # the product is freed, its exponential kept
        kept.sum().backward()
        del kept
        assert live.live - before == 64 * 64 * 4  # the gradient


def test_labels_have_peaks_of_their_own():
    with LiveBytes() as live:
        with live.labelled("rows"):
            one = torch.empty(100, dtype=torch.uint8)
        rest = torch.empty(900, dtype=torch.uint8)
        del one
        with live.labelled("rows"):
            torch.empty(50, dtype=torch.uint8)
        assert (live.label_peaks["rows"], live.peak) == (100, 1000)
    assert storage_bytes([rest, rest[:3]]) == 900


# Keys as wide as values: torch's kernel for CPU would otherwise be given padded ones, which count.
MLA = {**PRESETS["tiny"], "vocab_size": 1000, "v_head_dim": 24}
GQA = {**PRESETS["tiny-gqa"], "vocab_size": 1000}
DENSE = {
    "num_experts": None, "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None, "moe_layer_freq": 1,
}  # fmt: skip
MODELS = {
    "latent attention, shared expert, bf16": {**MLA, "bf16": True},
    "no query latent, loop over experts": {**MLA, "q_lora_rank": None, "moe_expert_backend": "loop"},
    "all experts are dense layers": {**GQA, **DENSE},
    "grouped-query attention, gated shared expert": {
        **GQA, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True,
    },
    "multi-token prediction": {**MLA, "mtp_num_layers": 2},
}  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("model", MODELS)
def test_flops_per_token_are_those_that_torch_counts(model):
    run = build({**MODELS[model], "micro_batch_size": 2})
    try:
        chunk = build_model(run, groups.initialize(run), run.derived.padded_vocab_size(1000))[0]
        ids = torch.randint(0, 1000, (2, run.model.seq_length))
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            chunk(ids, torch.arange(run.model.seq_length).expand_as(ids), None, labels=ids).sum().backward()
    finally:
        groups.destroy()
    wanted = run.derived.flops_per_token(run.derived.padded_vocab_size(1000)) * ids.numel()
    assert counter.get_total_flops() == wanted


def planned_flops(run, device, **options):
    ranks, vocabulary = run.parallel.context_parallel_size, run.derived.padded_vocab_size(1000)
    (trace,) = trace_ranks(run, ranks, vocabulary, device=device, imbalance=1.0, **options)
    return trace.chunks[0].flops


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plan_counts_the_same(device, cp):
    run = build({**MLA, "mtp_num_layers": 1, "context_parallel_size": cp, "mla_cp_exchange": "expanded"})
    tokens, vocabulary = run.training.micro_batch_size * run.model.seq_length, run.derived.padded_vocab_size(1000)
    assert planned_flops(run, device) * cp == run.derived.flops_per_token(vocabulary) * tokens
    machine = Machine(mean_document_length=run.model.seq_length / 8)
    apart = planned_flops(run, device, attended=machine.attended_share(run.model.seq_length))
    assert apart * cp == run.derived.flops_per_token(vocabulary, run.model.seq_length / 16) * tokens


def test_a_list_of_frequencies_is_planned():
    pairs = GQA["hidden_size"] // GQA["num_attention_heads"] // 2
    lists = {"short_factor": (1.0,) * pairs, "long_factor": (2.0,) * pairs}
    stretched = build({**GQA, "rope_type": "longrope", "original_max_position_embeddings": 8, **lists})
    assert planned_flops(stretched, "cuda") == planned_flops(build(GQA), "cuda")


def test_recomputation_is_computed_and_not_in_the_models_flops():
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, full = build(MLA), build({**MLA, **recomputed})
    vocabulary = plain.derived.padded_vocab_size(1000)
    once, twice = planned_flops(plain, "cuda"), planned_flops(full, "cuda")
    head = 2 * plain.model.hidden_size * vocabulary * plain.training.micro_batch_size * plain.model.seq_length
    assert twice - head * 3 == (once - head * 3) * 4 / 3
    assert plain.derived.flops_per_token(vocabulary) == full.derived.flops_per_token(vocabulary)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bf16"), ("cpu", "fp16")])
def test_logits_that_are_measured_are_computed_and_not_in_the_models_flops(device, dtype):
    plain, measured = build({**MLA, dtype: True}), build({**MLA, dtype: True, "log_max_attention_logit": True})
    vocabulary, model = plain.derived.padded_vocab_size(1000), plain.model
    once, more = planned_flops(plain, device), planned_flops(measured, device)
    squares = model.num_layers * plain.training.micro_batch_size * model.num_attention_heads * model.seq_length**2
    assert more - once == 2 * squares * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    assert plain.derived.flops_per_token(vocabulary) == measured.derived.flops_per_token(vocabulary)


def test_causal_attention_is_half_of_the_square_and_two_chunks_are_the_whole():
    whole = attention_flops((1, 2, 64, 24), (1, 2, 64, 24), (1, 2, 64, 16), causal=True)
    assert whole == 2 * 2 * 64 * 32 * (24 + 16)
    # The four chunks of a sequence, as two context-parallel ranks have them.
    chunks = [
        attention_flops((1, 2, 16, 24), (1, 2, 16 * (n + 1), 24), (1, 2, 16 * (n + 1), 16), causal=True)
        for n in range(4)
    ]
    assert sum(chunks) == whole
