"""FLOPs that MFU goes by are those that torch counts, and those that a plan counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_moe.apps.plan.meta_tracer import FORMULAS, attention_flops
from megatron_moe.apps.plan.tracing import trace_ranks
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build
from megatron_moe.model.build import build_model
from megatron_moe.parallel import groups

pytestmark = pytest.mark.engine

# Keys as wide as values: torch's kernel for CPU would otherwise be given padded ones, which count.
MLA = {**PRESETS["tiny"], "vocab_size": 1000, "v_head_dim": 24}
DENSE = {
    "num_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
}
MODELS = {
    "latent attention, shared expert": MLA,
    "bf16": {**MLA, "bf16": True},
    "no query latent": {**MLA, "q_lora_rank": None},
    "grouped-query attention": {**PRESETS["tiny-gqa"], "vocab_size": 1000},
    "all experts are dense layers": {**PRESETS["tiny-gqa"], "vocab_size": 1000, **DENSE},
    "gated shared expert": {
        **PRESETS["tiny-gqa"],
        "vocab_size": 1000,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
    },
    "multi-token prediction": {**MLA, "mtp_num_layers": 2},
    "loop over experts": {**MLA, "moe_expert_backend": "loop"},
}


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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plan_counts_the_same(device):
    run = build({**MLA, "mtp_num_layers": 1})
    vocabulary = run.derived.padded_vocab_size(1000)
    trace = trace_ranks(run, 1, vocabulary, device=device, imbalance=1.0)[0]
    tokens = run.training.micro_batch_size * run.model.seq_length
    assert trace.chunks[0].flops == run.derived.flops_per_token(vocabulary) * tokens


def test_recomputation_is_computed_and_not_in_the_models_flops():
    plain, full = (
        build({**MLA, **changes})
        for changes in (
            {},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        )
    )
    vocabulary = plain.derived.padded_vocab_size(1000)
    once, twice = (
        trace_ranks(run, 1, vocabulary, device="cuda", imbalance=1.0)[0].chunks[0].flops for run in (plain, full)
    )
    head = 2 * plain.model.hidden_size * vocabulary * plain.training.micro_batch_size * plain.model.seq_length
    assert twice - head * 3 == (once - head * 3) * 4 / 3
    assert plain.derived.flops_per_token(vocabulary) == full.derived.flops_per_token(vocabulary)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_logits_that_are_measured_are_computed_and_not_in_the_models_flops(device, dtype):
    plain, measured = (build({**MLA, dtype: True, **changes}) for changes in ({}, {"log_max_attention_logit": True}))
    vocabulary, model = plain.derived.padded_vocab_size(1000), plain.model
    once, more = (
        trace_ranks(run, 1, vocabulary, device=device, imbalance=1.0)[0].chunks[0].flops for run in (plain, measured)
    )
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
