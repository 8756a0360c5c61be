"""Recomputation changes no number, counts no token twice, and keeps less."""

import contextlib
import functools

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, replace
from megatron_moe.model.build import build_model
from megatron_moe.model.loss import loss_func
from megatron_moe.moe.router import routers
from megatron_moe.parallel import groups
from megatron_moe.parallel.groups import seed_everything
from megatron_moe.training.finalize_model_grads import finalize_model_grads
from tests.helpers import model_cases as cases
from tests.helpers.rows import rows
from tests.helpers.trained_steps import SMALL
from tests.model import test_build_ranks as layouts

pytestmark = pytest.mark.engine

VOCAB = 128
LATENT = {**PRESETS["tiny"], **SMALL, "init_method_std": 0.1}
GROUPED = {
    **LATENT,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
}
MODULES = ["core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts"]
WITHOUT_MOE = [module for module in MODULES if module != "moe"]


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def full(method, layers):
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


@contextlib.contextmanager
def model_of(run):
    pg_collection = groups.initialize(run)
    try:
        seed_everything(run)
        (chunk,) = build_model(run, pg_collection, VOCAB)
        chunk.zero_grad_buffer()
        yield chunk
    finally:
        groups.destroy()


def losses_of(chunk, tokens):
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    return chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])


def batch(run):
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCAB, (4, run.model.seq_length + 1), generator=generator)


def one_step(run, micro_batch_size=4):
    """Losses, gradients, the counts before the bias step and the bias after it, bytes kept, of four sequences."""
    with model_of(run) as chunk:
        losses, kept = [], []
        for tokens in batch(run).split(micro_batch_size):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(keeper(saved), lambda tensor: tensor):
                output = losses_of(chunk, tokens)
            kept.append(held_bytes(saved, chunk.module))
            saved.clear()
            losses.append(output.detach())
            loss_func(torch.ones_like(output), output)[0].backward()
        found = list(routers([chunk]))
        counts = torch.stack([router.local_tokens_per_expert.clone() for router in found])
        finalize_model_grads([chunk])
        gradients = {name: parameter.main_grad.clone() for name, parameter in chunk.named_parameters()}
        biases = torch.stack([router.expert_bias.clone() for router in found])
        return torch.cat(losses), gradients, counts, biases, max(kept)


def keeper(saved):
    def keep(tensor):
        saved.append(tensor)
        return tensor

    return keep


def held_bytes(saved, chunk):
    """Bytes of what the graph keeps once the forward pass is over, each storage once, without the weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*chunk.parameters(), *chunk.buffers()]}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved}
    return sum(storage.nbytes() for storage in storages.values() if storage.data_ptr() not in weights)


@pytest.fixture(scope="module")
def without():
    return functools.cache(one_step)


def assert_equal(got, wanted):
    for index, what in ((0, "losses"), (2, "counts"), (3, "biases")):
        assert torch.equal(got[index], wanted[index]), what
    assert got[1].keys() == wanted[1].keys()
    for name in wanted[1]:
        assert torch.equal(got[1][name], wanted[1][name]), name


HALF = {"bf16": True, "attention_dropout": 0.1, "hidden_dropout": 0.2}
LOOP = {"moe_expert_backend": "loop"}
# name -> (model, precision and backend, what is recomputed)
CASES = {
    **{f"{module}, bf16, dropout": (LATENT, HALF, selective(module)) for module in MODULES},
    **{f"{module}, fp32": (LATENT, {}, selective(module)) for module in MODULES},
    "moe_act, loop": (LATENT, LOOP, selective("moe_act")),
    "all but moe": (LATENT, HALF, selective(*WITHOUT_MOE)),
    "moe and others": (LATENT, HALF, selective("moe", "layernorm", "mlp", "mla_up_proj")),
    "grouped, core_attn": (GROUPED, HALF, selective("core_attn")),
    "grouped, layernorm": (GROUPED, HALF, selective("layernorm")),
    "uniform, 1": (LATENT, {}, full("uniform", 1)),
    "uniform, 2": (LATENT, HALF, full("uniform", 2)),
    "block, 1": (LATENT, HALF, full("block", 1)),
}


@pytest.mark.parametrize(
    "case", rows(CASES, test=[name for name in CASES if "fp32" not in name and "block" not in name])
)
def test_recomputing_keeps_less_and_changes_no_bit(without, case):
    model, precision, changes = CASES[case]
    run = replace(Run(), **{**model, **precision})
    wanted = without(run)
    assert wanted[2].sum() == 4 * run.model.seq_length * run.moe.moe_router_topk
    got = one_step(replace(run, **changes))
    assert_equal(got, wanted)
    assert got[4] < wanted[4]


def test_dropout_is_drawn_at_all(without):
    """Otherwise the cases above would prove nothing about it."""
    run = replace(Run(), **LATENT, **HALF)
    assert not torch.equal(without(run)[0], without(replace(run, attention_dropout=0.0, hidden_dropout=0.0))[0])


@pytest.mark.parametrize(
    "changes",
    rows([selective(*WITHOUT_MOE), full("uniform", 1)], test=[selective(*WITHOUT_MOE)]),
    ids=["selective", "full"],
)
def test_accumulated_micro_batches_agree_with_one(without, changes):
    run = replace(Run(), **LATENT, moe_router_load_balancing_type=("none",), moe_aux_loss_coeff=(0.0,))
    wanted = without(run)
    got = one_step(replace(run, **changes), micro_batch_size=1)
    assert torch.equal(got[2], wanted[2])
    assert torch.equal(got[3], wanted[3])
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-5)
    for name, gradient in wanted[1].items():
        assert (got[1][name] - gradient).norm() < 1e-5 * gradient.norm().clamp_min(1e-12), name


def test_nothing_is_counted_in_evaluation():
    run = replace(Run(), **LATENT, **selective(*WITHOUT_MOE))
    with model_of(run) as chunk, torch.no_grad():
        chunk.eval()
        assert torch.equal(losses_of(chunk, batch(run)), losses_of(chunk, batch(run)))
        assert all(not router.local_tokens_per_expert.any() for router in routers([chunk]))


# ---- recomputation where the model is split: the same bits as without it


EVERYTHING = ("core_attn", "mlp", "moe_act", "layernorm", "mla_up_proj", "shared_experts")
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": EVERYTHING}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODEL = {**layouts.MODELS["experts"], "moe_layer_freq": "[0,1,1,1]", "attention_dropout": 0.1, "hidden_dropout": 0.1}
LAYOUTS = [
    ({**layouts.SP2, **layouts.EP2, "expert_tensor_parallel_size": 1}, SELECTIVE),
    (layouts.VPP2, FULL),
    (layouts.SP2, FULL),
    (layouts.VPP2, SELECTIVE),
]


@pytest.mark.parametrize(("layout", "recomputed"), rows(LAYOUTS, test=LAYOUTS[:2]))
def test_a_split_model_has_the_same_bits(once, layout, recomputed):
    run = replace(Run(), **{**MODEL, **layout})
    pairs = zip(once(2, cases.one_step, run=replace(run, **recomputed)), once(2, cases.one_step, run=run), strict=True)
    for got, wanted in pairs:
        assert got["loss"] == wanted["loss"]
        assert got["grad_norm"] == wanted["grad_norm"]
        for name, (_, _, grad) in wanted["tensors"].items():
            assert torch.equal(got["tensors"][name][2], grad), name
