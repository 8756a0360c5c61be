"""The built model: its checkpoint keys, its wrapping, what it refuses, and its loss."""

import math
import warnings

import pytest
import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from megatron_moe import platform
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.config.schema import build as build_run
from megatron_moe.engine.modules import with_class
from megatron_moe.model.attention import SDPACoreAttention
from megatron_moe.model.build import ExactEmbedding, build_model
from megatron_moe.model.engine_config import transformer_config
from megatron_moe.model.loss import loss_func
from megatron_moe.model.norm import RMSNorm
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import groups

pytestmark = pytest.mark.engine

QUERIES, KEYS = "linear_q_down_proj q_layernorm linear_q_up_proj", "linear_kv_down_proj kv_layernorm linear_kv_up_proj"
LATENT = f"{QUERIES} {KEYS} linear_proj".split()
GROUPED = "linear_qkv q_layernorm k_layernorm linear_proj".split()
DENSE = "linear_fc1.weight linear_fc2.weight".split()
EXPERTS = "router.weight router.expert_bias experts.weight1 experts.weight2".split()
MOE = [*EXPERTS, *(f"shared_experts.{name}" for name in DENSE)]


def keys(attention, mlps):
    """The keys of a model whose layers have the same attention, and each its own MLP."""
    found = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    for index, mlp in enumerate(mlps):
        own = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        own += [f"self_attention.{module}.weight" for module in attention] + [f"mlp.{name}" for name in mlp]
        found |= {f"decoder.layers.{index}.{name}" for name in own}
    return found


def build(wrap=False, **changes):
    run = replace(Run(), **changes)
    return build_model(run, groups.initialize(run), vocab_size=256, wrap=wrap)


ONE_LAYER = {**PRESETS["tiny"], "num_layers": 1, "moe_layer_freq": "[1]"}
MODELS = {
    "latent, experts": ({**PRESETS["tiny"], "num_layers": 2, "moe_layer_freq": "[0,1]"}, keys(LATENT, [DENSE, MOE])),
    "grouped, dense": (
        {
            "num_layers": 2,
            "hidden_size": 32,
            "group_query_attention": True,
            "num_query_groups": 2,
            "qk_layernorm": True,
            "untie_embeddings_and_output_weights": True,
        },
        keys(GROUPED, [DENSE, DENSE]),
    ),
}


@pytest.mark.parametrize(("changes", "wanted"), MODELS.values(), ids=MODELS)
def test_checkpoint_keys_are_the_canonical_ones(changes, wanted, one_process):
    """One key per layer and tensor under its natural name, nothing else; not renamed, not stacked over layers."""
    (chunk,) = build(**changes)
    sharded = chunk.sharded_state_dict()
    assert set(sharded) == wanted
    assert {tensor.key for tensor in sharded.values()} == wanted


def test_a_state_dict_loads_into_another_model(one_process):
    (source,) = build(wrap=True, **MODELS["latent, experts"][0], bf16=True)
    groups.destroy()
    (other,) = build(wrap=True, **MODELS["latent, experts"][0], bf16=True, seed=5)
    saved = source.module.state_dict_for_save_checkpoint()
    assert not any(key.endswith("_extra_state") for key in saved)
    wanted, found = dict(source.named_parameters()), dict(other.named_parameters())
    assert not torch.equal(*(one["module.module.output_layer.weight"] for one in (wanted, found)))
    other.module.load_state_dict(saved, strict=True)
    assert wanted.keys() == found.keys() and all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_layers_norms_and_attention_are_ours_and_the_pattern_decides_which_are_moe(one_process):
    (chunk,) = build(**{**PRESETS["tiny"], "moe_layer_freq": "[0,1,0,1]"})
    numbers = [layer.mlp.layer_number for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]
    assert numbers == [2, 4]
    layer = chunk.decoder.layers[0]
    assert isinstance(layer.self_attention.core_attention, SDPACoreAttention)
    norms = (layer.input_layernorm, layer.pre_mlp_layernorm, chunk.decoder.final_layernorm)
    assert all(isinstance(norm, RMSNorm) and norm.eps == 1e-6 for norm in norms)


def test_building_is_silent(one_process, capfd):
    """No warning of the engine's on the user's screen, neither of a deprecation nor of a class it does not know."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(wrap=True, **MODELS["latent, experts"][0])
    assert capfd.readouterr().err == ""


def test_the_loss_counts_masked_tokens_only():
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], requires_grad=True)
    total, tokens, logged = loss_func(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]), losses)
    assert total.item() == 21.0
    assert tokens.item() == 3
    assert tokens.dtype == torch.int
    total.backward()
    assert losses.grad.tolist() == [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    with torch.no_grad():
        total /= 2  # as the schedule does: what is logged does not follow
    assert logged["lm loss"].tolist() == [21.0, 3.0] and not logged["lm loss"].requires_grad
    # A source of both sequences, one of the second alone, and one of none: what is not finite stays its own.
    sources = torch.tensor([[True, False], [False, True], [False, False]])
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    logged = loss_func(mask, losses * torch.tensor([[1.0], [math.inf]]), sources=sources)[2]
    assert logged["source losses"].tolist() == [[5.0, math.inf, 0.0], [2.0, 3.0, 0.0]]


def test_a_table_has_the_rows_of_the_flag(one_process):
    run = replace(Run(), **ONE_LAYER, padded_vocab_size=140)
    (chunk,) = build_model(run, groups.initialize(run), 131, wrap=False)
    tables = [p.shape[0] for name, p in chunk.named_parameters() if "word_embeddings" in name or "output_layer" in name]
    assert tables == [140, 140]


OF_LOSS = {"plain": {}, "fused": {"cross_entropy_loss_fusion": True}, "further predictions": {"mtp_num_layers": 1}}


@pytest.mark.parametrize(
    ("model", "tied"), [("plain", True), ("fused", False), ("fused", True), ("further predictions", False)]
)
def test_what_pads_the_vocabulary_is_in_no_loss_no_gradient_and_no_logit(one_process, model, tied):
    """The loss would depend on the padding, which depends on the layout: ln 256 in place of ln 131 at the start."""
    run = replace(Run(), **ONE_LAYER)
    run = replace(run, **OF_LOSS[model], untie_embeddings_and_output_weights=not tied)
    pg_collection, found = groups.initialize(run), []
    for rows in (131, 256):
        (chunk,) = build_model(run, pg_collection, 131, wrap=False, padded_vocab_size=rows)
        tokens = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(4))
        positions = torch.arange(8).expand(2, 8)
        losses = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        losses.sum().backward()
        gradients = {name: parameter.grad for name, parameter in chunk.named_parameters()}
        with torch.no_grad():
            found.append((losses.detach(), gradients, chunk(tokens[:, :-1], positions, None)))
    (losses, gradients, logits), (padded_losses, padded_gradients, padded_logits) = found
    torch.testing.assert_close(padded_losses, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded_logits[..., :131], logits, rtol=1e-6, atol=1e-6)
    assert padded_logits.shape[-1] == 256
    assert (padded_logits[..., 131:] == torch.finfo(torch.float32).min).all()
    for name, gradient in gradients.items():
        padded = padded_gradients[name]
        rows = len(gradient)
        torch.testing.assert_close(padded[:rows], gradient, rtol=1e-5, atol=1e-6, msg=name)
        assert (padded[rows:] == 0).all(), name


# ---- the embedding's lookup is the engine's, and its gradient loses no token


def of_both_embeddings() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output and weight gradient in bf16, on this rank's rows, for 4096 ids of which one is very frequent."""
    world = torch.distributed.get_world_size()
    run = replace(Run(), tensor_model_parallel_size=world, sequence_parallel=world > 1, bf16=True)
    tp, found = groups.initialize(run).tp, {}
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16().chunk(world)[tp.rank()]
    ids = torch.full((2, 2048), 3)
    ids[1, ::8] = 9
    options = {"init_method": lambda _: None, "config": transformer_config(run), "tp_group": tp}
    for name in ("engine", "ours"):
        embedding = VocabParallelEmbedding(16, 8, reduce_scatter_embeddings=world > 1, **options)
        if name == "ours":
            embedding = with_class(ExactEmbedding, embedding)
        embedding.weight.data.copy_(weight)
        output = embedding(ids)
        output.backward(torch.full_like(output, 0.01))
        found[name] = (output.detach(), embedding.weight.grad)
    return found


def test_outputs_are_the_engines_and_gradients_are_those_of_every_token_on_any_ranks(gloo):
    (whole,), parts = (gloo.run(ranks, of_both_embeddings) for ranks in (1, 2))
    assert all(torch.equal(found["ours"][0], found["engine"][0]) for found in (whole, *parts))
    unit, gradient = torch.tensor(0.01).bfloat16(), whole["ours"][1]
    wanted = {3: 4096 - 256, 9: 256}
    assert gradient[:, 0].tolist() == [(wanted.get(row, 0) * unit.double()).bfloat16().item() for row in range(16)]
    assert torch.equal(torch.cat([found["ours"][1] for found in parts]), gradient)
    # The engine's own loses nine tenths of them on a CPU, 4 of 38 are left: our reason for a lookup of our own.
    assert whole["engine"][1][3, 0] == 4.0


def test_a_model_on_cuda_has_the_exact_lookup_too(one_process):
    run = build_run({**PRESETS["tiny"], "vocab_size": 128, "bf16": True})
    pg_collection = groups.initialize(run)
    with platform.fake_device("cuda", {}), torch.device("meta"):
        (chunk,) = build_model(run, pg_collection, 128, draw=False, wrap=False)
    assert type(chunk.embedding.word_embeddings) is ExactEmbedding
