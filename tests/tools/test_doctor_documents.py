"""The doctor's probe of documents: models that keep them apart, and planted leaks, each of which it finds and places.

They are leaks that trained models have had: a mask that is lost or off by one, on one rank, in one layer, in further
predictions, in evaluation, in a key/value cache or in the backward pass alone.
"""

import json
import shlex
from contextlib import nullcontext
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import masking_utils

from megatron_moe.config.schema import replace
from megatron_moe.hf.config import filled_in
from megatron_moe.model import attention, build, context_parallel, generate, mtp
from megatron_moe.moe import dispatch, layer, router
from megatron_moe.parallel import sequence
from megatron_moe.parallel.sequence import Documents
from megatron_moe_tools import compat
from megatron_moe_tools.doctor import cli
from megatron_moe_tools.doctor.documents import probe
from megatron_moe_tools.doctor.layouts import Layout, LayoutChoice, combinations_of, documents_choice
from megatron_moe_tools.doctor.leaks import changes, finding_of, leaks_at
from megatron_moe_tools.doctor.small_copy import small_copy

GQA, LATENT = "--preset tiny-gqa", "--preset tiny"
FURTHER, TWO_FURTHER = (f"{GQA} --mtp-num-layers {depths}" for depths in (1, 2))
AGAIN = f"{GQA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DROPPED, SHARDED = f"{GQA} --attention-dropout 0.1", f"{GQA} --data-parallel-sharding-strategy optim_grads_params"
SOME = [change for change in changes() if change.sample != 2 and change.first in (0, 1, 8, 11)]


@cache
def run_of(flags, layout="one-process"):
    own = compat.parse(shlex.split(flags), filled_in)
    layouts = [Layout("one-process", 1, {}, frozenset()), *combinations_of(own, {"TP", "PP", "CP", "EP", "DP"}, 4)]
    copies = [Layout(one.name, one.ranks, one.flags, one.kinds, copy=small_copy(own)) for one in layouts]
    choice = documents_choice(LayoutChoice([one for one in copies if one.name == layout], [], ""), own)
    return replace(choice.layouts[0].run, num_layers=2, moe_layer_freq=1)


def instead(owner, name, wrong):
    """A function or method is what `wrong` makes of it."""
    return owner, name, wrong(getattr(owner, name))


def after(owner, name, wrong):
    """The result is what `wrong` makes of it and the arguments."""
    return instead(owner, name, lambda own: lambda *args, **options: wrong(own(*args, **options), *args))


def pieces(change):
    """Every piece of an attention's work is what `change` makes of it."""
    return after(context_parallel, "pieces_of", lambda found, *_: list(map(change, found)))


def firsts(change, only=lambda size: True):
    """Every attention is told other first tokens of documents, which `change` makes of the right ones [B, S]."""

    def told(known, size):
        return known if known is None or not only(size) else known._replace(firsts=change(known.firsts))

    return instead(context_parallel, "pieces_of", lambda own: lambda length, rank, size, known=None: own(
        length, rank, size, told(known, size)))  # fmt: skip


def masks(when):
    """The mask is lost where `when` says so of the core attention."""

    def wrong(core, forward, query, key, value, attention_mask=None, **options):
        if attention_mask is not None and when(core):
            known = Documents.of(attention_mask, query.shape[1])
            attention_mask = known._replace(firsts=torch.zeros_like(known.firsts)).as_mask()
        return forward(core, query, key, value, attention_mask, **options)

    core = attention.SDPACoreAttention
    return instead(core, "forward", lambda own: lambda self, *args, **options: wrong(self, own, *args, **options))


def nth(number, of):
    """Whether an attention is that one of the layers', in every micro-batch of the training."""
    calls = []

    def when(core):
        calls.extend([0] * core.training)
        return core.training and (len(calls) - 1) % of == number

    return when


def attended(change):
    """The attention's arguments query, key, value [B, n, S, d] and pieces are what `change` makes of them."""
    return instead(context_parallel, "attend_pieces", lambda own: lambda query, key, value, scale, pieces: own(
        *change(query, key, value), scale, pieces))  # fmt: skip


def backward(change):
    """The gradients of queries, keys and values [B, n, S, d] are what `change` makes of them."""
    return after(context_parallel, "piece_gradients", lambda found, *_: change(*found))


def without_documents(wrong):
    """Further predictions look ahead over the documents where `wrong` says so of the dtype and the distance."""
    return instead(mtp, "shifted", lambda own: lambda x, by, group, known=None: own(
        x, by, group, None if wrong(x.dtype, by) else known))  # fmt: skip


def on_rank(rank, change=torch.zeros_like):
    """One rank's attentions have lost the mask, or have what `change` makes of it."""
    return firsts(change, lambda _: dist.get_rank() == rank)


def before(mix):
    """Every result is mixed with the one before."""
    kept = []

    def wrong(found, *_):
        kept.append(found.detach().clone())
        return mix(found, kept[-2:][0])

    return wrong


def late(firsts):
    return firsts.roll(1, 1).index_fill(1, torch.tensor(0), 0).clamp_max(torch.arange(firsts.shape[1]))


def wider(one, by=1):
    """A piece sees `by` more keys."""
    return one._replace(earlier=slice(max(one.earlier.start - by, 0), one.earlier.stop))


HERE, EXPERTS = "decoder.layers.0.self_attention", "decoder.layers.0.mlp"
ABOVE = "backward, from what reads decoder.layers.0"
LATER, FURTHER_ATTENTION = "decoder.layers.1.self_attention", "mtp.layers.0.transformer_layer.self_attention"
CONTINUED, EVALUATED = "generation: output_layer", f"evaluation: {HERE}"
LOST = firsts(torch.zeros_like)
ONE_KEY = pieces(wider)
FIRST_KEY = pieces(
    lambda one: one._replace(earlier=slice(0, max(one.earlier.stop - one.earlier.start, one.own.start > 0)))
)
ROLLED = lambda found, *_: found + 1e-3 * found.roll(1, 0)  # noqa: E731
ROLLED_BACK = lambda found, *_: found + (ROLLED(found) - ROLLED(found).detach())  # noqa: E731
# What a hook of context parallelism did, which replaced every layer's mask by a causal one (trl #6843).
PUBLISHED = firsts(torch.zeros_like, only=lambda size: size > 1)

# name: flags, layout, what is replaced, where it leaks
PLANTS = {
    # one key, one position
    "one key too many": (GQA, "", ONE_KEY, HERE),
    "one key too many, latent": (LATENT, "", ONE_KEY, HERE),
    "one key too many in one sequence": (GQA, "", pieces(lambda one: wider(one, int(one.rows.start or 0))), HERE),
    "one key too many, torch's kernel": (DROPPED, "", ONE_KEY, HERE),
    "the first document's first key": (GQA, "", FIRST_KEY, HERE),
    "the first document's first key, latent": (LATENT, "", FIRST_KEY, HERE),
    "keys one position back": (GQA, "", attended(lambda q, k, v: (q, k.roll(1, 2), v.roll(1, 2))), HERE),
    "values one position on": (GQA, "", attended(lambda q, k, v: (q, k, v.roll(-1, 2))), HERE),
    "keys of the other sequence, latent": (LATENT, "", attended(lambda q, k, v: (q, k.flip(0), v)), HERE),
    "the embedding of the token before": (GQA, "", after(
        build.ExactEmbedding, "forward", lambda found, *_: found + found.roll(1, 1)), "embedding"),
    # a mask that is lost
    "no mask": (GQA, "", LOST, HERE),
    "no mask, latent": (LATENT, "", LOST, HERE),
    "no mask, torch's kernel": (f"{LATENT} --attention-dropout 0.1", "cp2", LOST, HERE),
    "no mask in one sequence": (GQA, "", firsts(lambda one: one * torch.tensor([[1], [0]])), HERE),
    "the other sequence's mask": (GQA, "", firsts(lambda one: one.flip(0)), HERE),
    "the mask of the first micro-batch": (GQA, "", instead(context_parallel, "once", lambda own, made={}: (
        lambda tensor, what, make: made.get(what) or made.setdefault(what, make()))), HERE),
    "no mask in the last layer": (GQA, "", masks(nth(1, 2)), LATER),
    "no mask in training": (GQA, "", masks(lambda core: core.training), HERE),
    "no mask in evaluation": (GQA, "", masks(lambda core: not core.training), EVALUATED),
    "no mask in evaluation, latent": (LATENT, "", masks(lambda core: not core.training), EVALUATED),
    "no mask where a layer is computed again": (AGAIN, "", masks(nth(2, 4)), "decoder.layers.1.mlp.router"),
    # boundaries
    "boundaries one token late": (GQA, "", firsts(late), HERE),
    "boundaries one token late, latent": (LATENT, "", firsts(late), HERE),
    "boundaries one token early": (GQA, "", firsts(lambda one: one.roll(-1, 1)), HERE),
    "boundaries at blocks of 4 alone": (GQA, "", firsts(lambda one: one // 4 * 4), HERE),
    "the first boundary lost": (GQA, "", firsts(lambda one: one * (one > one.clamp_min(1).amin(1, True))), HERE),
    "each token alone": (GQA, "", firsts(lambda one: torch.arange(32).expand(2, -1)), HERE),
    "no token beyond a window": (GQA, "", firsts(lambda one: one.maximum(torch.arange(32) - 2)), HERE),
    # further predictions
    "further inputs cross": (FURTHER, "", without_documents(
        lambda dtype, by: dtype == torch.int64 and by > 0), "mtp.layers.0.embedding"),
    "inputs two further cross": (TWO_FURTHER, "", without_documents(
        lambda dtype, by: dtype == torch.int64 and by > 1), "mtp.layers.1.embedding"),
    "further losses cross": (FURTHER, "", without_documents(lambda dtype, by: by < 0), "backward, from what reads"),
    "further inputs are rolled twice": (FURTHER, "", instead(mtp, "shifted", lambda own: lambda x, by, *rest: own(
        x, by * 2 if by > 0 else by, *rest)), "mtp.layers.0.embedding"),
    "no mask in further predictions": (FURTHER, "", masks(nth(2, 3)), FURTHER_ATTENTION),
    "further predictions add neighbours": (FURTHER, "", after(mtp.MTPLayer, "forward", ROLLED), "mtp.layers.0.output"),
    # backward
    "backward: no mask": (GQA, "", instead(context_parallel, "piece_gradients", lambda own: lambda *args: own(
        *args[:-1], context_parallel.pieces_of(args[1].shape[2], 0, 1))), ABOVE),
    "backward: one key too many": (GQA, "", instead(context_parallel, "piece_gradients", lambda own: lambda *args: own(
        *args[:-1], list(map(wider, args[-1])))), ABOVE),
    "backward: keys one off": (GQA, "", backward(lambda q, k, v: (q, k.roll(1, 2), v)), ABOVE),
    "backward: values one off, latent": (LATENT, "", backward(lambda q, k, v: (q, k, v.roll(1, 2))), ABOVE),
    "backward: the other sequence": (LATENT, "", backward(lambda q, k, v: (q, k, v + v.flip(0))), ABOVE),
    "backward: a little": (LATENT, "", backward(lambda q, k, v: (q + 1e-30, k, v)), ABOVE),
    "backward: through the experts": (GQA, "", after(
        layer.MoELayer, "mixture", ROLLED_BACK), "backward, from what reads decoder.layers.1"),
    "backward: through shared experts": (LATENT, "", after(
        layer.SharedExperts, "forward", ROLLED_BACK), "backward, from what reads decoder.layers.1"),
    # experts, losses, what is kept
    "weights over all tokens": (GQA, "", after(router, "route", lambda decision, *_: decision._replace(
        probs=decision.probs * decision.probs.max())), EXPERTS),
    "a choice by all tokens": (GQA, "", after(router, "chosen_experts", lambda found, options, groups, logits, *_: (
        found + int(logits.sum().abs() * 1e4)) % 8), f"{EXPERTS}.router"),
    "rows of the token before": (GQA, "", after(dispatch.LocalDispatcher, "combine", ROLLED), EXPERTS),
    "shared experts add neighbours": (LATENT, "", after(layer.SharedExperts, "forward", ROLLED), EXPERTS),
    "losses over all tokens": (GQA, "", after(
        build.LanguageModel, "compute_language_model_loss", lambda found, *_: found + found.mean()), "loss"),
    "a layer keeps what it put out last": (GQA, "", after(
        layer.MoELayer, "mixture", before(lambda found, last: found + 1e-3 * last[:1, -1:])), EXPERTS),
    # generation
    "a cache with a key twice": (GQA, "", after(
        generate._Rows, "put", lambda rows, *_: torch.cat((rows[:, :, :1], rows), 2)), CONTINUED),
    "a cache without its first key": (LATENT, "", after(
        generate._Rows, "put", lambda rows, *_: rows[:, :, rows.shape[2] > 1 :]), CONTINUED),
    "a cache of what it was before": (GQA, "", after(generate._Rows, "put", before(
        lambda rows, last: torch.cat((last[:, :, :1], rows[:, :, 1:]), 2))), CONTINUED),
    "a cache without positions": (LATENT, "", instead(
        generate._CachedLatentAttention, "_rotated", lambda own: lambda self, x: x), CONTINUED),
    "keys one off in a cache": (GQA, "", instead(generate, "attend_with_last", lambda own: lambda q, k, *rest: own(
        q, k.roll(1, 2), *rest)), CONTINUED),
    # one rank
    "the published case": (GQA, "cp2", PUBLISHED, HERE),
    "the published case, latent": (LATENT, "cp2", PUBLISHED, HERE),
    "no mask on one rank of a sequence": (GQA, "cp2", on_rank(1), HERE),
    "a key too many on one rank of a sequence": (LATENT, "cp2", on_rank(0, lambda one: (one - 1).clamp_min(0)), HERE),
    "keys in another order on one rank": (GQA, "cp2", instead(sequence, "in_order", lambda own: (
        lambda rows, size, *at: own(rows, size, *(() if dist.get_rank() else at)))), HERE),
    "backward: gradients to the other rank": (
        GQA, "cp2", after(context_parallel, "by_rank", lambda rows, *_: rows.flip(0)), ABOVE),
    "no mask on one rank of heads": (GQA, "tp2", on_rank(1), HERE),
    "one key too many on one rank of heads": (LATENT, "tp2", on_rank(0, late), HERE),
    "no mask on one rank of experts": (GQA, "dp2-ep2", on_rank(0), HERE),
    "rows of the token before, from other ranks": (
        GQA, "dp2-ep2", after(dispatch.AllToAllDispatcher, "combine", ROLLED), EXPERTS),
    "no mask on one rank of sharded weights": (SHARDED, "dp2", on_rank(1), HERE),
    "no mask on the last stage": (GQA, "pp2", on_rank(1), LATER),
    # nothing
    "none": (f"{LATENT} --mtp-num-layers 2 --reset-position-ids --packing greedy", "", (), ""),
    "none, heads": (FURTHER, "", (), ""),
    "none, torch's kernel": (DROPPED, "cp2", (), ""),
    "none, heads and stages": (FURTHER, "tp2-pp2-ep2-etp1", (), ""),
    "none, parts of a sequence": (FURTHER, "cp2-ep2", (), ""),
}  # fmt: skip
SLOW = pytest.mark.test_all(instead="tests/tools/test_doctor_documents.py::test_leaks_are_found_where_they_are")
FAST = {"one key too many", "no mask in evaluation", "boundaries one token late", "further inputs cross", "none, heads"}
FAST |= {"backward: a little", "a choice by all tokens", "a cache of what it was before", "the published case"}
ROWS = [pytest.param(name, marks=() if name in FAST else SLOW) for name in PLANTS]


def found(name):
    flags, layout, patch, _ = PLANTS[name]
    run = run_of(flags, layout or "one-process")
    with mock.patch.object(*patch) if patch else nullcontext():
        return probe(run, SOME if patch else None)


@pytest.mark.parametrize("name", ROWS)
def test_leaks_are_found_where_they_are(name, gloo):
    _, layout, _, place = PLANTS[name]
    ranks = 2 ** sum(kind in layout for kind in ("tp2", "pp2", "cp2", "dp2"))
    of = Layout(name, ranks, {}, frozenset())
    finding = finding_of(of, gloo.run(ranks, found, name=name) if layout else [found(name)])
    if place:
        assert finding.leaks and leaks_at(finding.leaks).startswith(place), finding.result()
    else:
        assert finding.good and finding.compared > 500, finding.result()


def test_a_model_of_transformers_is_probed_with_packed_input(tmp_path, capsys):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    found = after(masking_utils, "find_packed_sequence_indices", lambda indices, *_: indices)
    late_by_one = after(masking_utils, "find_packed_sequence_indices", lambda indices, *_: indices.roll(1, 1))
    lost = masking_utils, "find_packed_sequence_indices", lambda *_: None
    for kind, patch, status, says in (
        ("llama", found, 0, "no document sees another"),
        ("llama", late_by_one, 1, "model.layers.0.self_attn"),
        ("llama", lost, 1, "model.layers.0.self_attn"),
        ("bloom", found, 1, "transformer.h.0.self_attention"),
    ):
        config = {**sizes, "model_type": kind, "num_hidden_layers": 2, "n_layer": 2, "n_head": 4}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with mock.patch.object(*patch):
            assert cli.main(["--documents", "--hf", str(tmp_path), "--json", str(tmp_path / "report")]) == status
        assert says in capsys.readouterr().out
        told = json.loads((tmp_path / "report").read_text())
        assert told["failed"] == bool(status) and (told["layouts"][0]["leaks_at"] or says) in says


@SLOW
def test_a_run_is_probed_on_ranks_without_what_lets_tokens_compete(capsys):
    flags = f"{GQA} --moe-expert-capacity-factor 1 --moe-router-load-balancing-type seq_aux_loss --documents"
    flags += " --moe-aux-loss-coeff 0.1 --moe-seq-aux-loss-per document --reset-attention-mask --packing best-fit"
    assert cli.main([*flags.split(), "--layouts", "one-process", "dp2"]) == cli.SAME
    told = capsys.readouterr().out
    for said in ("--moe-expert-capacity-factor 1: tokens of all documents compete", "] one-process ", "] dp2 "):
        assert said in told, told
