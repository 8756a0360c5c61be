"""Settings that Megatron-LM accepts and does not read, or reads otherwise: its command is taken with a note.

A run of our own flags is not changed: there, the rules refuse these settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron_moe.config.fields import all_fields
from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.rules.model import YARN_FIELDS
from megatron_moe.config.rules.rule import UNREAD, set_among, spelled
from megatron_moe.config.rules.training import NOT_KEPT
from megatron_moe.config.run_flags import TIKTOKEN_FIELDS
from megatron_moe.config.schema import Run, build

Given = dict[str, Any]
Change = tuple[Given, str]
"""New values by field, and the note."""
Find = Callable[[Run, Given], Change | None]

_FINDERS: list[Find] = []


def as_megatron_reads(given: Given) -> tuple[Given, tuple[str, ...]]:
    """Return the settings without those that Megatron-LM accepts and ignores, with a note for each change."""
    notes: list[str] = []
    for find in (*_FINDERS, *_unread()):
        change = find(build(given), given)
        if change is not None:
            given = {**given, **change[0]}
            notes.append(change[1])
    return given, tuple(notes)


def _unread() -> Iterator[Find]:
    """Yield what leaves settings out that the rules refuse because a run does not read them."""
    for entry in UNREAD:
        if not entry.in_megatron:
            continue
        names = [name for name in entry.fields if name not in entry.refused_there]
        why, _, _ = entry.reason.partition("; ")
        yield _leaves_out(names, entry.readers, entry.is_read, why)
    yield _leaves_out(
        ["use_rope_scaling"],
        ("rope_type",),
        lambda run: not run.model.multi_latent_attention,
        "latent attention does not read it; its positions are scaled by --rope-type yarn",
    )
    yield _leaves_out(
        TIKTOKEN_FIELDS,
        ("tokenizer_type",),
        lambda run: run.data.tokenizer_type == "TikTokenizer",
        "TikTokenizer alone reads it",
    )


def _leaves_out(names: Iterable[str], readers: tuple[str, ...], is_read: Callable[[Run], Any], why: str) -> Find:
    def find(run: Run, given: Given) -> Change | None:
        stray = set_among(run, names)
        if not stray or is_read(run):
            return None
        if run.moe.num_experts is None and all_fields()[stray[0]].section == "moe":
            return None  # a dense model has a rule about all of them
        return _left_out(stray), f"{_typed(run, (*stray, *readers))}: left out, {why}"

    return find


def _finder(find: Find) -> Find:
    """Add a function that looks for what Megatron-LM reads otherwise."""
    _FINDERS.append(find)
    return find


def _typed(run: Run, names: Iterable[str]) -> str:
    return ", ".join(spelled(run, name) for name in names)


def _left_out(names: Iterable[str]) -> Given:
    return {name: all_fields()[name].default for name in names}


@_finder
def sequence_parallelism_of_one_rank(run: Run, given: Given) -> Change | None:
    """Switch sequence parallelism off without TP, since it splits activations over the TP ranks."""
    if not run.parallel.sequence_parallel or run.parallel.tensor_model_parallel_size != 1:
        return None
    return {"sequence_parallel": False}, "--sequence-parallel: is off, as in Megatron-LM: there is one TP rank"


@_finder
def yarn_of_latent_attention(run: Run, given: Given) -> Change | None:
    """Take yarn where a factor is given for latent attention, as Megatron-LM does by default.

    At factor 1 yarn is the plain rotation, whatever its other settings say.
    """
    names = set_among(run, YARN_FIELDS)
    if not names or run.model.rope_type == "yarn":
        return None
    if not run.model.multi_latent_attention:
        return _left_out(names), (
            f"{_typed(run, names)}: LEFT OUT, positions are rotated plainly: latent attention alone reads it, in"
            " Megatron-LM too"
        )
    if given.get("rope_type") is not None:
        return _left_out(names), f"{_typed(run, names)}: LEFT OUT, --rope-type rope rotates plainly; yarn reads it"
    if "rotary_scaling_factor" in names:
        return {"rope_type": "yarn"}, (
            f"{_typed(run, names)}: --rope-type yarn is TAKEN, which is Megatron-LM's default for latent attention;"
            " give --rope-type rope for the plain rotation"
        )
    return _left_out(names), f"{_typed(run, names)}: left out, at --rotary-scaling-factor 1 yarn rotates plainly"


@_finder
def losses_without_weight(run: Run, given: Given) -> Change | None:
    """Leave out auxiliary losses whose coefficient is 0."""
    kinds, coeffs = run.moe.moe_router_load_balancing_type, run.moe.moe_aux_loss_coeff
    idle = [kind for kind, coeff in zip(kinds, coeffs) if kind not in ("none", "sinkhorn") and not coeff]
    if not idle or len(kinds) != len(coeffs) or run.moe.num_experts is None:
        return None
    rest = [(kind, coeff) for kind, coeff in zip(kinds, coeffs) if kind not in idle] or [("none", 0.0)]
    return {
        "moe_router_load_balancing_type": tuple(kind for kind, _ in rest),
        "moe_aux_loss_coeff": tuple(coeff for _, coeff in rest),
    }, (
        f"--moe-router-load-balancing-type {' '.join(idle)}: NOT ADDED, its coefficient is 0, Megatron-LM's default;"
        " --moe-aux-loss-coeff 0.01 adds it"
    )


@_finder
def coefficients_without_losses(run: Run, given: Given) -> Change | None:
    """Leave out coefficients where the command says that there is no auxiliary loss.

    Where it does not say so, Megatron-LM has one.
    """
    if given.get("moe_router_load_balancing_type") != ("none",) or not any(run.moe.moe_aux_loss_coeff):
        return None
    names = ["moe_aux_loss_coeff"]
    return _left_out(names), f"{_typed(run, names)}: LEFT OUT, --moe-router-load-balancing-type none has no loss"


@_finder
def capacity_below_zero(run: Run, given: Given) -> Change | None:
    """Take a capacity below zero for none."""
    factor = run.moe.moe_expert_capacity_factor
    if factor is None or factor >= 0:
        return None
    return {"moe_expert_capacity_factor": None}, (
        f"--moe-expert-capacity-factor {factor}: is none, as in Megatron-LM: no token is dropped"
    )


def _shards_gradients(run: Run) -> bool:
    """Return whether gradients are sharded: ZeRO stage 2 or 3."""
    strategy = run.parallel.data_parallel_sharding_strategy
    return strategy in SHARDING_STRATEGIES[2:] or run.parallel.use_torch_fsdp2


@_finder
def buckets_of_sharded_gradients(run: Run, given: Given) -> Change | None:
    """Leave out the overlap of the engine's buckets from ZeRO stage 2 on, which has none and overlaps by itself."""
    names = set_among(run, ("overlap_grad_reduce", "overlap_param_gather"))
    if not names or not _shards_gradients(run):
        return None
    return _left_out(names), (
        f"{_typed(run, names)}: always so from ZeRO stage 2 on: each layer is gathered and reduced behind the"
        " computation of the next"
    )


@_finder
def overlap_of_sharded_layers(run: Run, given: Given) -> Change | None:
    """Leave out from ZeRO stage 2 on the overlap of two micro-batches, which takes sharded layers apart."""
    names = set_among(run, ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"))
    if not run.moe.overlap_moe_expert_parallel_comm or not _shards_gradients(run):
        return None
    return _left_out(names), (
        f"{_typed(run, names)}: NOT OVERLAPPED from ZeRO stage 2 on, where a layer's weights are gathered when it is"
        " called as a whole; the numbers are the same"
    )


@_finder
def offload_of_overlapping_batches(run: Run, given: Given) -> Change | None:
    """Leave out the offload of activations where micro-batches overlap, whose layers are computed in parts."""
    names = set_among(run, ("fine_grained_activation_offloading", "offload_modules"))
    if len(names) < 2 or not run.moe.overlap_moe_expert_parallel_comm:
        return None
    return _left_out(names), (
        f"{_typed(run, names)}: ACTIVATIONS STAY ON THE DEVICE and take its memory, since"
        " --overlap-moe-expert-parallel-comm computes layers in parts; the numbers are the same"
    )


@_finder
def offload_of_what_is_not_kept(run: Run, given: Given) -> Change | None:
    """Leave out of the offloaded modules those whose inputs are recomputed."""
    modules, recomputed = run.training.offload_modules or (), run.training.recompute_modules or ()
    lost = [name for module in recomputed for name in NOT_KEPT.get(module, ()) if name in modules]
    if not lost:
        return None
    left = tuple(name for name in modules if name not in lost)
    changed = {"offload_modules": left} if left else {"fine_grained_activation_offloading": False}
    return {"offload_modules": None, **changed}, (
        f"{_typed(run, ['offload_modules'])}: without {' '.join(lost)}, which"
        f" {_typed(run, ['recompute_modules'])} does not keep"
    )


@_finder
def weights_in_fp8(run: Run, given: Given) -> Change | None:
    """Store and gather in the model's dtype what Megatron-LM stores in FP8: a product rounds the weight itself."""
    if not run.precision.fp8_param_gather:
        return None
    return {"fp8_param_gather": False}, (
        "--fp8-param-gather: NOT STORED IN FP8, weights are stored and gathered in the model's dtype and rounded to FP8"
        " for a product, which is more exact and takes more memory and traffic"
    )


@_finder
def later_gradients_of_fp8_products(run: Run, given: Given) -> Change | None:
    """Compute the gradients of FP8 products' weights in their place: they are found together with those of rows."""
    if not run.moe.delay_wgrad_compute or run.precision.fp8_format is None:
        return None
    return {"delay_wgrad_compute": False}, (
        "--delay-wgrad-compute: left out, FP8 products find the gradients of rows and weights together; the numbers are"
        " the same"
    )


@_finder
def tokenizer_of_the_gpt_files(run: Run, given: Given) -> Change | None:
    """Take the tokenizer that Megatron-LM's pretrain_gpt.py has by default, where its two files are given."""
    if run.data.tokenizer_type is not None or None in (run.data.vocab_file, run.data.merge_file):
        return None
    return {"tokenizer_type": "GPT2BPETokenizer"}, (
        f"{_typed(run, ('vocab_file', 'merge_file'))}: --tokenizer-type GPT2BPETokenizer is TAKEN, the default of"
        " Megatron-LM's pretrain_gpt.py"
    )


@_finder
def split_that_counts_embedding_and_loss(run: Run, given: Given) -> Change | None:
    """Write as letters a split of the pipeline in which the embedding or the loss counts as a layer.

    Megatron-LM adds them to the layers, splits evenly, and takes one layer from the first or the last chunk. A split
    that is not even is left to the rules.
    """
    first, last = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
    names = set_among(run, (first, last))
    if not names:
        return None
    ranks = run.parallel.pipeline_model_parallel_size
    if ranks == 1:
        return _left_out(names), f"{_typed(run, names)}: left out, there is one stage"
    counted = run.model.num_layers + len(names)
    per_chunk = run.parallel.num_layers_per_virtual_pipeline_stage or counted // ranks
    others = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if set_among(run, others) or per_chunk < 1 or counted % (ranks * per_chunk):
        return None
    chunks = ["t" * per_chunk] * (counted // per_chunk)
    for name, chunk in ((first, 0), (last, -1)):
        chunks[chunk] = chunks[chunk][name in names :]
    chunks[-1] += "m" * (run.model.mtp_num_layers or 0)
    layout = f"E{'|'.join(chunks)}L"
    note = f"{_typed(run, names)}: --pipeline-model-parallel-layout '{layout}' here"
    replaced: Given = {"num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_layout": layout}
    return {**_left_out(names), **replaced}, note
