"""One token per forward pass against whole forward passes, on one process; nothing of it is left in the model."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import build_model
from megatron_moe.model.generate import Sampling, cached, continuation, generate, next_token_logits
from megatron_moe.parallel import groups
from tests.helpers.errors import relative
from tests.helpers.rows import rows
from tests.model.test_build_ranks import MODELS

pytestmark = pytest.mark.engine

VOCAB, LENGTH = 97, 14
LATENT = {**MODELS["experts"], "seq_length": 32, "num_layers": 3, "moe_layer_freq": "[0,1,1]"}
GROUPED = {
    "multi_latent_attention": False,
    "qk_layernorm": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "q_lora_rank": None,
}
FACTORS = {
    "qk_layernorm": True,
    "qk_layernorm_after_rotation": True,
    "rotary_interleaved": True,
    "softmax_scale": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
MORE = {"rotary_percent": 0.5, "qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 24}
YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 8.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rotary_scaling_factor": 3.0,
    "original_max_position_embeddings": 12,
    "short_factor": (1.0, 1.5, 2.0, 2.5),
    "long_factor": (1.0, 3.0, 6.0, 9.0),
}
CASES = {
    "latent attention": {},
    "latent, no query latent": {"q_lora_rank": None},
    "latent, yarn": {**YARN, "attention_dropout": 0.5, "hidden_dropout": 0.5},
    "latent, wide values, no norms": {"v_head_dim": 40, "qk_layernorm": False},
    "latent, no positions": {"position_embedding_type": "none"},
    "latent, more predictions": {"mtp_num_layers": 1},
    "grouped-query": GROUPED,
    "grouped-query, part rotated, norms, bias": {**GROUPED, **MORE},
    "grouped-query, norms after the rotation, factors": {**GROUPED, **FACTORS},
    "grouped-query, yarn": {**GROUPED, **YARN, "attention_factor": 1.5},
    # From the thirteenth token on, all are rotated at the frequencies of long sequences
    "grouped-query, longrope": {**GROUPED, **LONGROPE},
    "grouped-query, norms of all heads and behind": {
        **GROUPED,
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "reordered_norm": True,
    },
    "grouped-query, sinks, windows": {
        **GROUPED,
        **{"softmax_type": "learnable", "window_size": "4,0", "window_attn_skip_freq": 2, "add_bias_linear": True},
    },
    "grouped-query, no positions": {**GROUPED, "position_embedding_type": "none"},
}
IMPLIED = ("latent attention", "grouped-query")
DENSE = {"num_experts": None, "moe_layer_freq": 1, "moe_router_enable_expert_bias": False}


@pytest.fixture
def build(one_process):
    def model(flags, wrap=False, **changes):
        run = replace(Run(), **{**LATENT, **flags, **changes})
        (chunk,) = build_model(run, groups.initialize(run), VOCAB, wrap=wrap)
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in chunk.parameters():
                noise = torch.randn(parameter.shape)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.25 * noise)
        return chunk

    return model


def tokens(batch):
    return torch.randint(0, VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(5))


def one_by_one(model, ids, prompt):
    """[LENGTH - prompt + 1, B, V]: logits behind the prompt and every token after it."""
    with cached(model, LENGTH) as step:
        rest = [ids[:, at : at + 1] for at in range(prompt, LENGTH)]
        return torch.stack([step(new) for new in (ids[:, :prompt], *rest)])[..., :VOCAB]


def whole(model, ids, prompt):
    ends = [(at, at + 2 - at % 2) for at in range(prompt - 1, LENGTH)]  # passes of an even length
    return torch.stack([next_token_logits([model], ids[:, :end], at) for at, end in ends])[..., :VOCAB]


@pytest.mark.parametrize("case", rows(CASES, test=[case for case in CASES if case not in IMPLIED]))
def test_one_token_per_pass_gives_the_logits_of_whole_passes(build, case):
    model = build(CASES[case])
    for batch, prompt in ((1, 1), (2, 9)):
        ids = tokens(batch)
        got, wanted = one_by_one(model, ids, prompt), whole(model, ids, prompt)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=0, atol=3e-5 * wanted.abs().max().item())


ISLANDS = {
    "latent": {},
    "latent, attention in fp32": {"keep_fp32": ("attention",)},
    "latent, up-projection in fp32": {"keep_fp32": ("*.linear_kv_up_proj",)},
    "latent, core in fp32": {"keep_fp32": ("softmax", "norms")},
    "grouped": GROUPED,
    "grouped, attention in fp32": {**GROUPED, "keep_fp32": ("attention",)},
}


@pytest.mark.parametrize("island", rows(ISLANDS, test=[name for name in ISLANDS if " in fp32" in name]))
def test_in_bfloat16_it_differs_by_no_more_than_bfloat16_does(build, island):
    model = build({**DENSE, **ISLANDS[island]}, bf16=True)
    got, wanted = one_by_one(model, tokens(2), 3), whole(model, tokens(2), 3)
    assert relative(got, wanted) < 0.02


def test_the_model_is_as_it_was_and_has_counted_nothing(build):
    model = build({})
    before = {name: type(module) for name, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    one_by_one(model, tokens(2), 4)
    with pytest.raises(KeyError), cached(model, 8) as step:
        step(tokens(1)[:, :2])
        raise KeyError
    some = continuation(model, [1, 2], 9, vocab_size=VOCAB)  # which is not taken to its end
    assert len(list(itertools.islice(some, 2))) == 2
    assert {name: type(module) for name, module in model.named_modules()} != before
    some.close()
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.training
    assert any("tokens_per_expert" in name for name in state)
    after = {**model.state_dict(), **dict(model.named_buffers())}
    assert all(torch.equal(after[name], value) for name, value in state.items())


def test_latent_attention_keeps_the_latent_and_one_key_for_all_heads(build):
    model = build({})
    with cached(model, LENGTH) as step:
        step(tokens(2)[:, :4])
        attention = model.decoder.layers[1].self_attention
        assert attention._kept._rows.shape == (2, 1, LENGTH, 32 + 8)


def test_what_does_not_fit_is_refused(build):
    model = build({})
    with pytest.raises(ValueError, match="at least one token"):
        next(continuation(model, [], 3, vocab_size=VOCAB))
    with pytest.raises(ValueError, match="33 tokens: the model has 32 positions"), cached(model, 33):
        pass
    with cached(model, 6) as step:
        step(tokens(1)[:, :5])
        with pytest.raises(ValueError, match="2 tokens behind 5: the key-value cache has room for 6"):
            step(tokens(1)[:, :2])
        step(tokens(1)[:, :1])
        with pytest.raises(ValueError, match="1 tokens behind 6"):
            step(tokens(1)[:, :1])
    with cached(model, 6) as step:
        step(tokens(1)[:, :2])
        with pytest.raises(ValueError, match="tokens come one by one"):
            step(tokens(1)[:, :2])
    one, two = (SimpleNamespace(size=lambda size=size: size) for size in (1, 2))
    for name in ("tp", "pp", "cp", "ep"):
        model.pg_collection = SimpleNamespace(**{**dict.fromkeys(("tp", "pp", "cp", "ep"), one), name: two})
        with pytest.raises(ValueError, match=f"the whole model in one process, not .*'{name}': 2"), cached(model, 4):
            pass


def test_a_continuation_is_what_whole_passes_generate(build):
    model = build({})
    prompt = tokens(1)[0, :5].tolist()
    for temperature in (0.0, 0.8):
        wanted = generate([model], prompt, 9, 32, vocab_size=VOCAB, temperature=temperature, seed=7)
        got = continuation(model, prompt, 9, vocab_size=VOCAB, sampling=Sampling(temperature), seed=7)
        assert list(got) == wanted

    def drawn(seed, end_ids=(), **options):
        sampling = Sampling(1.5, **options)
        return list(continuation(model, prompt, 12, vocab_size=VOCAB, sampling=sampling, seed=seed, end_ids=end_ids))

    first = drawn(1)
    assert first == drawn(1) != drawn(2)
    assert drawn(1, top_k=1) == list(continuation(model, prompt, 12, vocab_size=VOCAB))
    assert drawn(1, end_ids={VOCAB, first[4]}) == first[: first.index(first[4]) + 1]
