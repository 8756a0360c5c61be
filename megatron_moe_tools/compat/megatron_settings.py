"""What Megatron-LM makes of its settings: its defaults, which `--defaults megatron` takes, and what it does not read.

The defaults are those of Megatron-LM's command line, 0.16 to main (August 2026); megatron-core's own classes differ in
a few, `kv_lora_rank` for one. Settings that it accepts and does not read, or reads otherwise, are left out or changed
with a note; a run of our own flags is not changed: there, the rules refuse them. This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.fields import all_fields
from megatron_moe.config.model_flags import NO_LOSSES, QUANTILE, ROPE_SETTINGS, SHARDING_STRATEGIES
from megatron_moe.config.rules.rule import UNREAD, Unread, set_among, spelled
from megatron_moe.config.rules.training import NOT_KEPT
from megatron_moe.config.run_flags import TIKTOKEN_FIELDS
from megatron_moe.config.schema import Run, build

Given = Mapping[str, Any]

# ---- Its defaults

NAMES = ("ours", "megatron")
"""The values of `--defaults`."""


def _read(given: Given, name: str) -> Any:
    return given.get(name, all_fields()[name].default)


def _experts(given: Given) -> bool:
    return _read(given, "num_experts") is not None


def _half_precision(given: Given) -> bool:
    return bool(_read(given, "bf16") or _read(given, "fp16"))


def _other_group_score(given: Given) -> bool:
    """Return whether groups of experts are scored otherwise: by other sums, or by logits instead of scores."""
    groups, group_topk = _read(given, "moe_router_num_groups"), _read(given, "moe_router_group_topk")
    if not (_experts(given) and groups and group_topk):
        return False
    if _read(given, "moe_router_score_function") == "softmax" and not _read(given, "moe_router_pre_softmax"):
        return True
    return _read(given, "moe_router_topk") // group_topk != 2


RUNS: dict[str, Callable[[Given], bool]] = {
    "always": lambda given: True,
    "a dense model": lambda given: not _experts(given),
    "experts": _experts,
    "experts without --quick-geglu": lambda given: _experts(given) and not _read(given, "quick_geglu"),
    "bf16, fp16": _half_precision,
    "experts in bf16, fp16": lambda given: _experts(given) and _half_precision(given),
    "fp16": lambda given: bool(_read(given, "fp16")),
    "fp16 without --loss-scale": lambda given: _read(given, "fp16") and _read(given, "loss_scale") is None,
    "FP8": lambda given: _read(given, "fp8_format") is not None,
    "latent attention": lambda given: bool(_read(given, "multi_latent_attention")),
    "--swiglu": lambda given: given.get("swiglu") is True,
    "an auxiliary coefficient": lambda given: _experts(given) and any(_read(given, "moe_aux_loss_coeff") or ()),
    "groups of experts ranked otherwise": _other_group_score,
    "global_aux_loss": lambda given: "global_aux_loss" in _read(given, "moe_router_load_balancing_type"),
    "EP > 1": lambda given: _experts(given) and _read(given, "expert_model_parallel_size") > 1,
    "Muon": lambda given: _read(given, "optimizer") == "muon",
    "CP > 1": lambda given: _read(given, "context_parallel_size") > 1,
}
"""The runs that a default makes a difference to."""


@dataclass(frozen=True)
class MegatronDefault:
    """A default of Megatron-LM's that is another one here: a row of `megatron_defaults.yaml`, which says of what."""

    field: str
    value: Any
    answer: str = "taken"
    where: str = "always"
    trains: bool = True
    reason: str = ""

    @property
    def theirs(self) -> str:
        """Megatron-LM's value in words."""
        return "none" if self.value is None else _shown(self.value)

    @property
    def ours(self) -> str:
        """The default here in words."""
        given = {"ffn_hidden_size": "4 x hidden-size", "accumulate_allreduce_grads_in_fp32": "on"}.get(self.field)
        return given or _shown(all_fields()[self.field].default)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value >= 2**16:
        return f"2^{value.hex().split('p+')[1]}"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


_ROWS = yaml.safe_load(Path(__file__).with_name("megatron_defaults.yaml").read_text(encoding="utf-8"))
DEFAULTS = tuple(MegatronDefault(**row) for row in _ROWS)


def closed_by(preset: Given, folder: bool) -> frozenset[str]:
    """Return the fields that a preset decides: those of each section in which it sets anything.

    A preset contains what differs from the defaults here, and so what it does not contain is decided by it too.

    Args:
        folder: whether the architecture is that of a folder, which decides it likewise.
    """
    fields = all_fields()
    sections = {"model", "moe"} if folder else set()
    for name in preset:
        sections.add(fields[name].section)
    return frozenset(name for name, field in fields.items() if field.section in sections)


def open_defaults(given: Given, closed: Collection[str]) -> Iterator[MegatronDefault]:
    """Yield the defaults of Megatron-LM's that make a difference to these settings, which leave them open.

    Args:
        closed: fields that are decided although the settings do not contain them.
    """
    for default in DEFAULTS:
        if default.field not in given and default.field not in closed and RUNS[default.where](given):
            yield default


def taken(given: Given, closed: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings with Megatron-LM's defaults for what they leave open, and notes of what that changed.

    Raises:
        ConfigError: with every setting that is left open and has no such default here.
    """
    fields = all_fields()
    missing = []
    for default in open_defaults(given, closed):
        field = fields[default.field]
        if default.answer == "to give" and default.value is None:
            missing.append(f"{field.flag}: {default.reason}; give it")
        elif default.answer == "to give":
            shown = f"{field.flag} ({_shown(default.value)} there)"
            missing.append(f"{shown}: {default.reason}; use {field.typed(field.default)}")
    if missing:
        raise ConfigError(
            listing("--defaults megatron: what the command leaves open has no such default here", missing)
        )
    # Whether a default makes a difference may follow from one that is taken before it.
    settings = dict(given)
    for default in DEFAULTS:
        if default.answer == "taken" and default in tuple(open_defaults(settings, closed)):
            value = default.value
            if default.field == "ffn_hidden_size":  # as many weights as without the gate
                value = int(8 * _read(settings, "hidden_size") / 3 / 64) * 64
            settings[default.field] = tuple(value) if isinstance(value, list) else value
    notes, kept = [], []
    typed = [fields[name].typed(settings[name]) for name in settings if name not in given]
    if typed:
        notes.append(f"--defaults megatron takes {' '.join(typed)}")
    for default in open_defaults(settings, closed):
        if default.answer == "kept":
            field = fields[default.field]
            kept.append(f"{field.typed(field.default)} ({default.theirs} there: {default.reason})")
    if kept:
        notes.append(f"--defaults megatron keeps {', '.join(kept)}")
    return settings, tuple(notes)


def note_of_open(given: Given, closed: Collection[str]) -> tuple[str, ...]:
    """Return a line that names the defaults of another training than Megatron-LM's, which the settings leave open."""
    shown = []
    for one in open_defaults(given, closed):
        if one.trains and one.answer != "kept":
            shown.append(f"{all_fields()[one.field].flag} {one.ours} ({one.theirs})")
    if not shown:
        return ()
    return (
        f"defaults that are others in Megatron-LM: {', '.join(shown)}; --defaults megatron takes or asks for those",
    )


# ---- What it does not read, or reads otherwise

Change = tuple[dict[str, Any], str]
"""New values by field, and the note."""


Find = Callable[[Run, Given], Change | None]


def _leaves_out(names: Sequence[str], where: Callable[[Run], Any], note: str, readers: Sequence[str] = ()) -> Find:
    """Return what leaves settings out of a run that does without them, `where`; the note names `readers` after them."""

    def find(run: Run, given: Given) -> Change | None:
        stray = set_among(run, names)
        if not stray or not where(run):
            return None
        return _left_out(stray), f"{_typed(run, (*stray, *readers))}: {note}"

    return find


def _shards_gradients(run: Run) -> bool:
    """Return whether gradients are sharded: ZeRO stage 2 or 3."""
    strategy = run.parallel.data_parallel_sharding_strategy
    return strategy in SHARDING_STRATEGIES[2:] or run.parallel.use_torch_fsdp2


_FINDERS: list[Find] = [
    _leaves_out(
        ["sequence_parallel"],
        lambda run: run.parallel.tensor_model_parallel_size == 1,
        "is off, as in Megatron-LM: there is one TP rank",
    ),
    _leaves_out(
        ["moe_expert_capacity_factor"],
        lambda run: (run.moe.moe_expert_capacity_factor or 0) < 0,
        "is none, as in Megatron-LM: no token is dropped",
    ),
    _leaves_out(
        ["overlap_grad_reduce", "overlap_param_gather"],
        _shards_gradients,
        "always so from ZeRO stage 2 on: each layer is gathered and reduced behind the computation of the next",
    ),
    _leaves_out(
        ["overlap_moe_expert_parallel_comm", "delay_wgrad_compute"],
        lambda run: run.moe.overlap_moe_expert_parallel_comm and _shards_gradients(run),
        "NOT OVERLAPPED from ZeRO stage 2 on, where a layer's weights are gathered when it is called as a whole; the"
        " numbers are the same",
    ),
    _leaves_out(
        ["fine_grained_activation_offloading", "offload_modules"],
        lambda run: (
            run.moe.overlap_moe_expert_parallel_comm
            and run.training.fine_grained_activation_offloading
            and run.training.offload_modules
        ),
        "ACTIVATIONS STAY ON THE DEVICE and take its memory, since --overlap-moe-expert-parallel-comm computes layers"
        " in parts; the numbers are the same",
    ),
    _leaves_out(
        ["fp8_param_gather"],
        lambda run: True,
        "NOT STORED IN FP8, weights are stored and gathered in the model's dtype and rounded to FP8 for a product,"
        " which is more exact and takes more memory and traffic",
    ),
    _leaves_out(
        ["delay_wgrad_compute"],
        lambda run: run.precision.fp8_format is not None,
        "left out, FP8 products find the gradients of rows and weights together; the numbers are the same",
    ),
    _leaves_out(
        TIKTOKEN_FIELDS,
        lambda run: run.data.tokenizer_type != "TikTokenizer",
        "left out, TikTokenizer alone reads it",
        ["tokenizer_type"],
    ),
]


def as_megatron_reads(given: Given) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings without those that Megatron-LM accepts and ignores, with a note for each change."""
    settings, notes = dict(given), []
    for find in (*_FINDERS, *map(_unread, UNREAD)):
        change = find(build(settings), settings)
        if change is not None:
            settings |= change[0]
            notes.append(change[1])
    return settings, tuple(notes)


def _unread(entry: Unread) -> Find:
    """Return what leaves out settings that the rules refuse because a run does not read them."""
    names = [name for name in entry.fields if name not in entry.refused_there]

    def is_unread(run: Run) -> bool:
        has_rule = run.moe.num_experts is None and all_fields()[names[0]].section == "moe"  # about a dense model
        return entry.in_megatron and not (has_rule or entry.is_read(run))

    return _leaves_out(names, is_unread, f"left out, {entry.reason.partition('; ')[0]}", entry.readers)


def _finder(find: Find) -> Find:
    """Add a function that looks for what Megatron-LM reads otherwise."""
    _FINDERS.append(find)
    return find


def _typed(run: Run, names: Iterable[str]) -> str:
    return ", ".join(map(partial(spelled, run), names))


def _left_out(names: Iterable[str]) -> dict[str, Any]:
    return {name: all_fields()[name].default for name in names}


@_finder
def yarn_of_latent_attention(run: Run, given: Given) -> Change | None:
    """Take yarn where a factor is given for latent attention, as Megatron-LM does by default.

    At factor 1 yarn is the plain rotation, whatever its other settings say.
    """
    read = ROPE_SETTINGS.get(run.model.rope_type, ())
    names = [name for name in set_among(run, ROPE_SETTINGS["yarn"]) if name not in (*read, "attention_factor")]
    if not names:
        return None
    if given.get("rope_type") is not None:
        return _left_out(names), f"{_typed(run, names)}: LEFT OUT, {_typed(run, ['rope_type'])} does not read it"
    if not run.model.multi_latent_attention:
        return _left_out(names), (
            f"{_typed(run, names)}: LEFT OUT, positions are rotated plainly: Megatron-LM reads it in latent attention"
            " alone; here --rope-type yarn does"
        )
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
    idle, rest = [], []
    for kind, coeff in zip(kinds, coeffs):
        if kind in NO_LOSSES or coeff:
            rest.append((kind, coeff))
        else:
            idle.append(kind)
    if not idle or len(kinds) != len(coeffs) or run.moe.num_experts is None:
        return None
    left_kinds, left_coeffs = zip(*rest or [("none", 0.0)])
    return {"moe_router_load_balancing_type": left_kinds, "moe_aux_loss_coeff": left_coeffs}, (
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
def bias_of_quantiles(run: Run, given: Given) -> Change | None:
    """Take the expert bias with quantile balancing; Megatron-LM keeps a state of another name for it."""
    if QUANTILE not in run.moe.moe_router_load_balancing_type or "moe_router_enable_expert_bias" in given:
        return None
    return {"moe_router_enable_expert_bias": True}, (
        f"{_typed(run, ['moe_router_load_balancing_type'])}: --moe-router-enable-expert-bias is TAKEN, which it sets"
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
    replaced = {"num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_layout": layout}
    return {**_left_out(names), **replaced}, note
