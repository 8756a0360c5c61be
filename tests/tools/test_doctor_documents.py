"""The doctor's probe of documents: models that keep them apart, and planted leaks, each of which it finds and places.

They are leaks that trained models have had: a mask that is lost or off by one, on one rank, in one layer, in further
predictions or in the backward pass alone.
"""

import json
import shlex
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.schema import replace
from megatron_moe.hf.config import filled_in
from megatron_moe.model import build, context_parallel, mtp
from megatron_moe.moe import router
from megatron_moe.parallel import sequence
from megatron_moe_tools import compat
from megatron_moe_tools.doctor import cli
from megatron_moe_tools.doctor.documents import DocumentsRequest, changes, probe
from megatron_moe_tools.doctor.layouts import Layout, LayoutChoice, combinations_of, documents_choice
from megatron_moe_tools.doctor.leaks import finding_of, leaks_at
from megatron_moe_tools.doctor.small_copy import small_copy

GQA, LATENT = "--preset tiny-gqa", "--preset tiny"
FURTHER = f"{GQA} --mtp-num-layers 1"
SOME = [change for change in changes() if change.sample != 2 and change.first in (0, 1, 8, 11)]
PIECES, GRADIENTS = context_parallel.pieces_of, context_parallel.piece_gradients
ROUTE, CHOOSE, EMBED, OUTPUT = router.route, router.chosen_experts, build.ExactEmbedding.forward, sequence.in_order
SHIFTED, LOGITS = mtp.shifted, build.OutputLayer.forward


@cache
def request_of(flags, layout="one-process"):
    own = compat.parse(shlex.split(flags), filled_in)
    layouts = [Layout("one-process", 1, {}, frozenset()), *combinations_of(own, {"TP", "PP", "CP", "EP", "DP"}, 4)]
    copies = [Layout(one.name, one.ranks, one.flags, one.kinds, copy=small_copy(own)) for one in layouts]
    choice = documents_choice(LayoutChoice([one for one in copies if one.name == layout], [], ""))
    return DocumentsRequest(replace(choice.layouts[0].run, num_layers=2, moe_layer_freq=1), 256)


def pieces(change):
    """Every piece of an attention's work is what `change` makes of it."""
    return context_parallel, "pieces_of", lambda *args: list(map(change, PIECES(*args)))


def firsts(change, only=lambda size: True):
    """Every attention is told other first tokens of documents, which `change` makes of the right ones [B, S]."""

    def pieces_of(length, rank, size, documents=None):
        if documents is not None and only(size):
            documents = documents._replace(firsts=change(documents.firsts))
        return PIECES(length, rank, size, documents)

    return context_parallel, "pieces_of", pieces_of


def nth(number, of=2, wrong=torch.zeros_like):
    """The mask is lost in one of the layers' attentions, in every micro-batch."""
    calls = []

    def change(firsts):
        calls.append(0)
        return wrong(firsts) if (len(calls) - 1) % of == number else firsts

    return firsts(change)


def backward(change):
    """The gradients of queries, keys and values [B, n, S, d] are what `change` makes of them."""
    return context_parallel, "piece_gradients", lambda *args: change(*GRADIENTS(*args))


def without_documents(wrong):
    """Further predictions look ahead over the documents where `wrong` says so of the dtype and the distance."""

    def shifted(x, by, group, documents=None):
        return SHIFTED(x, by, group, None if wrong(x.dtype, by) else documents)

    return mtp, "shifted", shifted


def on_rank(rank):
    return lambda _: dist.get_rank() == rank


def scaled(decision):
    return decision._replace(probs=decision.probs * decision.probs.max())


def late(firsts):
    return firsts.roll(1, 1).index_fill(1, torch.tensor(0), 0).clamp_max(torch.arange(firsts.shape[1]))


HERE = "decoder.layers.0.self_attention"
ABOVE = "backward, from what reads decoder.layers.0"
LOST = firsts(torch.zeros_like)
ONE_KEY = pieces(lambda one: one._replace(earlier=slice(max(one.earlier.start - 1, 0), one.earlier.stop)))
FIRST_KEY = pieces(
    lambda one: one._replace(earlier=slice(0, max(one.earlier.stop - one.earlier.start, one.own.start > 0)))
)
# What a hook of context parallelism did, which replaced every layer's mask by a causal one (trl #6843).
PUBLISHED = firsts(torch.zeros_like, only=lambda size: size > 1)

# name: flags, layout, what is replaced, where it leaks
PLANTS = {
    "one key too many": (GQA, "", ONE_KEY, HERE),
    "one key too many, latent": (LATENT, "", ONE_KEY, HERE),
    "the first document's first key": (GQA, "", FIRST_KEY, HERE),
    "the first document's first key, latent": (LATENT, "", FIRST_KEY, HERE),
    "no mask": (GQA, "", LOST, HERE),
    "no mask, latent": (LATENT, "", LOST, HERE),
    "a boundary one token late": (GQA, "", firsts(late), HERE),
    "a boundary one token late, latent": (LATENT, "", firsts(late), HERE),
    "no mask in one sequence": (GQA, "", firsts(lambda one: one * torch.tensor([[1], [0]])), HERE),
    "the other sequence's mask": (GQA, "", firsts(lambda one: one.flip(0)), HERE),
    "each token alone": (GQA, "", firsts(lambda one: torch.arange(32).expand(2, -1)), HERE),
    "keys one position off": (GQA, "", pieces(lambda one: one._replace(
        own=slice(max(one.own.start - 1, 0), max(one.own.stop - 1, one.own.stop - one.own.start)))), HERE),
    "no mask in the last layer": (GQA, "", nth(1), "decoder.layers.1.self_attention"),
    "the embedding of the token before": (
        GQA, "", (build.ExactEmbedding, "forward", lambda *args: EMBED(*args) + EMBED(*args).roll(1, 1)), "embedding"),
    "weights over all tokens": (GQA, "", (router, "route", lambda *args: scaled(ROUTE(*args))), "decoder.layers.0.mlp"),
    "a choice by all tokens": (GQA, "", (router, "chosen_experts", lambda options, groups, logits, *rest: (
        CHOOSE(options, groups, logits, *rest) + int(logits.sum().abs() * 1e4)) % 8), "decoder.layers.0.mlp.router"),
    "backward: no mask": (GQA, "", (context_parallel, "piece_gradients", lambda *args: GRADIENTS(
        *args[:-1], PIECES(args[1].shape[2], 0, 1))), ABOVE),
    "backward: keys one off": (GQA, "", backward(lambda q, k, v: (q, k.roll(1, 2), v)), ABOVE),
    "backward: the other sequence": (LATENT, "", backward(lambda q, k, v: (q, k, v + v.flip(0))), ABOVE),
    "backward: a little": (LATENT, "", backward(lambda q, k, v: (q + 1e-30, k, v)), ABOVE),
    "further inputs cross": (FURTHER, "", without_documents(lambda dtype, by: dtype == torch.int64 and by > 0),
        "mtp.layers.0.embedding"),
    "further losses cross": (FURTHER, "", without_documents(lambda dtype, by: by < 0), "backward, from what reads"),
    "no mask in further predictions": (
        FURTHER, "", nth(2, 3), "mtp.layers.0.transformer_layer.self_attention"),
    "the published case": (GQA, "cp2", PUBLISHED, HERE),
    "the published case, latent": (LATENT, "cp2", PUBLISHED, HERE),
    "no mask on one rank of heads": (GQA, "tp2", firsts(torch.zeros_like, on_rank(1)), HERE),
    "no mask on one replica": (GQA, "dp2", firsts(torch.zeros_like, on_rank(1)), HERE),
    "no mask on the last stage": (GQA, "pp2", firsts(torch.zeros_like, on_rank(1)), "decoder.layers.1.self_attention"),
    "keys in another order on one rank": (GQA, "cp2", (sequence, "in_order", lambda rows, size, places=None: OUTPUT(
        rows, size, None if dist.get_rank() else places)), HERE),
    "none": (f"{LATENT} --mtp-num-layers 2 --reset-position-ids", "", (), ""),
    "none, heads and stages": (FURTHER, "tp2-pp2-ep2-etp1", (), ""),
    "none, parts of a sequence": (FURTHER, "cp2-ep2", (), ""),
}  # fmt: skip
SLOW = pytest.mark.test_all(instead="tests/tools/test_doctor_documents.py::test_leaks_are_found_where_they_are")
ROWS = [pytest.param(name, marks=SLOW if " latent" in name or "stages" in name else ()) for name in PLANTS]


def found(name):
    flags, layout, patch, _ = PLANTS[name]
    request = request_of(flags, layout or "one-process")
    if not patch:
        return probe(request)
    with mock.patch.object(*patch):
        return probe(request, SOME)


@pytest.mark.parametrize("name", ROWS)
def test_leaks_are_found_where_they_are(name, gloo):
    _, layout, patch, place = PLANTS[name]
    ranks = 2 ** sum(kind in layout for kind in ("tp2", "pp2", "cp2", "dp2"))
    finding = finding_of(name, gloo.run(ranks, found, name=name) if layout else [found(name)])
    if patch:
        assert finding.leaks and leaks_at(finding.leaks).startswith(place), finding.line()
    else:
        assert finding.good and finding.compared > 500, finding.line()


def test_a_model_of_transformers_is_probed_with_packed_input(tmp_path, capsys):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    for kind, status, says in (
        ("llama", 0, "no document sees another"),
        ("bloom", 1, "transformer.h.0.self_attention"),
    ):
        config = {**sizes, "model_type": kind, "num_hidden_layers": 2, "n_layer": 2, "n_head": 4}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert cli.main(["--documents", "--hf", str(tmp_path)]) == status
        assert says in capsys.readouterr().out


@SLOW
def test_a_run_is_probed_on_ranks_without_what_lets_tokens_compete(capsys):
    flags = f"{GQA} --moe-expert-capacity-factor 1 --documents --layouts dp2 --timeout 60"
    assert cli.main(flags.split()) == cli.SAME
    told = capsys.readouterr().out
    assert "--moe-expert-capacity-factor 1: tokens of all documents compete" in told and "dp2" in told, told
