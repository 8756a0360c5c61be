"""Multi-token prediction on one process: a readable reference, and what it leaves alone."""

import pytest
import torch

from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import build_model
from megatron_moe.model.generate import next_token_logits
from megatron_moe.model.loss import loss_func
from megatron_moe.moe.router import routers
from megatron_moe.parallel import groups
from tests.helpers.errors import relative
from tests.model.test_build_ranks import MODELS
from tests.numbers import reference_mtp

pytestmark = pytest.mark.engine

VOCAB, DEPTHS, FACTOR = 128, 3, 0.4
DENSE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "seq_length": 12,
    "position_embedding_type": "none",
    "init_method_std": 0.2,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = {**MODELS["experts"], "num_layers": 2, "moe_layer_freq": "[0,1]"}
MTP = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": FACTOR}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


@pytest.fixture
def model(one_process):
    def build(flags):
        groups.destroy()
        run = replace(Run(), **flags)
        pg_collection = groups.initialize(run)
        groups.seed_everything(run)
        return build_model(run, pg_collection, VOCAB, wrap=False)[0]

    return build


def batch(length, sequences=3):
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (sequences, length + 1), generator=generator)
    mask = torch.ones(sequences, length)
    mask[0, 2:5] = 0
    mask[2, -2:] = 0
    return tokens[:, :-1], tokens[:, 1:], mask, torch.arange(length).expand(sequences, length)


def losses_and_gradients(chunk, length):
    tokens, labels, mask, positions = batch(length)
    output = chunk(tokens, positions, None, labels=labels, loss_mask=mask)
    total, count, _ = loss_func(mask, output)
    (total / count).backward()
    gradients = {name: parameter.grad for name, parameter in chunk.named_parameters()}
    return output.detach(), chunk.pop_mtp_losses(), gradients


@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "one table"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain loss", "fused loss"])
def test_losses_and_all_gradients_are_those_of_the_reference(model, tied, fused):
    flags = {**DENSE, **MTP, "untie_embeddings_and_output_weights": not tied, "cross_entropy_loss_fusion": fused}
    chunk = model(flags)
    output, further, gradients = losses_and_gradients(chunk, DENSE["seq_length"])
    weights = {name: p.detach().clone().requires_grad_() for name, p in chunk.named_parameters()}
    named = dict(weights)
    if tied:
        named["output_layer.weight"] = named["embedding.word_embeddings.weight"]
    tokens, labels, mask, _ = batch(DENSE["seq_length"])
    wanted = reference_mtp.language_model(
        tokens, labels, mask, named, layers=2, depths=DEPTHS, heads=4, factor=FACTOR, eps=chunk.config.layernorm_epsilon
    )
    wanted.total.backward()
    # The value is the next token's loss alone; the gradient is that of all losses.
    torch.testing.assert_close(output, wanted.next_token.detach(), rtol=1e-5, atol=1e-5)
    means = further[:, 0] / further[:, 1]
    torch.testing.assert_close(means.float(), torch.stack(wanted.depths).detach(), rtol=1e-5, atol=0)
    # of 36 positions each depth has one target less per sequence, and the mask keeps these
    assert further[:, 1].tolist() == [float(mask[:, depth:].sum()) for depth in (1, 2, 3)]
    assert set(gradients) == set(weights)
    for name, gradient in gradients.items():
        assert relative(gradient, weights[name].grad) < 2e-5, name


def test_losses_evaluation_and_generation_are_the_next_tokens(model):
    tokens, labels, _, positions = batch(EXPERTS["seq_length"])

    def passes(flags):
        chunk = model(flags)
        trained = chunk(tokens, positions, None, labels=labels)
        numbers = [router.layer_number for router in routers([chunk])]
        counts = [router.local_tokens_per_expert.clone() for router in routers([chunk])]
        chunk.pop_mtp_losses()
        with torch.no_grad():
            seen = chunk(tokens, positions, None, labels=labels)
            evaluated = chunk.eval()(tokens, positions, None, labels=labels)
            logits = next_token_logits([chunk], tokens, position=6)
        # Neither a pass without gradients nor an evaluation logs a loss or counts a token.
        assert chunk.pop_mtp_losses() is None
        assert all(map(torch.equal, counts, (router.local_tokens_per_expert for router in routers([chunk]))))
        return numbers, [trained, seen, evaluated, logits]

    (plain_numbers, plain), (numbers, found) = passes(EXPERTS), passes({**EXPERTS, **MTP})
    assert all(map(torch.equal, found, plain))
    assert (plain_numbers, numbers) == ([2], [2, 3, 4, 5])  # routers of predictions have numbers of their own


def test_a_prediction_that_is_not_finite_shows_in_the_loss(model):
    tokens, labels, _, positions = batch(EXPERTS["seq_length"])
    chunk = model({**EXPERTS, **MTP})
    with torch.no_grad():
        chunk.mtp.layers[1].eh_proj.weight[0, 0] = torch.inf
    assert not chunk(tokens, positions, None, labels=labels).isfinite().all()


RECOMPUTED = {
    "full, uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "full, block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "moe_act", "layernorm", "mla_up_proj", "shared_experts"),
    },
}


@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_recomputation_changes_no_bit(model, recomputed):
    flags = {**EXPERTS, **MTP, **DROPOUT}
    output, further, gradients = losses_and_gradients(model(flags), EXPERTS["seq_length"])
    got = losses_and_gradients(model({**flags, **RECOMPUTED[recomputed]}), EXPERTS["seq_length"])
    assert torch.equal(got[0], output)
    assert torch.equal(got[1], further)
    for name, gradient in gradients.items():
        assert torch.equal(got[2][name], gradient), name


def test_full_recomputation_keeps_less_of_the_predictions(model):
    def kept(flags):
        chunk, sizes = model(flags), []

        def pack(tensor):
            sizes.append(tensor.numel())
            return tensor

        tokens, labels, _, positions = batch(EXPERTS["seq_length"])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            chunk(tokens, positions, None, labels=labels)
        return sum(sizes)

    full = RECOMPUTED["full, block"]
    without, alone = kept({**EXPERTS, **MTP}), kept(EXPERTS)
    recomputed, alone_recomputed = kept({**EXPERTS, **MTP, **full}), kept({**EXPERTS, **full})
    assert recomputed - alone_recomputed < 0.5 * (without - alone)
