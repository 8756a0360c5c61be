"""Megatron-LM's defaults that differ from this project's, as data, and `--defaults megatron`, which takes them.

The values are those of Megatron-LM's command line, 0.16 to main (August 2026); megatron-core's own classes differ in a
few, `kv_lora_rank` for one. This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.fields import all_fields

NAMES = ("ours", "megatron")
"""The values of `--defaults`."""

Given = Mapping[str, Any]


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
    softmax_after_choice = _read(given, "moe_router_score_function") == "softmax" and not _read(
        given, "moe_router_pre_softmax"
    )
    return softmax_after_choice or _read(given, "moe_router_topk") // group_topk != 2


_WHERE: dict[str, Callable[[Given], bool]] = {
    "always": lambda given: True,
    "a dense model": lambda given: not _experts(given),
    "experts": _experts,
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


def _gated_width(given: Given) -> int:
    """Return two thirds of 4 x hidden-size, down to a multiple of 64: as many weights as without the gate."""
    return int(8 * _read(given, "hidden_size") / 3 / 64) * 64


@dataclass(frozen=True)
class MegatronDefault:
    """A default of Megatron-LM's that is another one here.

    Args:
        field: the schema's field.
        value: Megatron-LM's, None where it has none; or how it follows from the settings.
        answer: `taken` by `--defaults megatron`; `to give`, there is no such setting here, or no default there, and the
            command has to give one; `kept`, ours stays.
        where: the runs that it makes a difference to, a key of `_WHERE`.
        trains: whether what is trained differs, and not only what is reported or how fast.
        reason: why it is not taken, or what it is.
    """

    field: str
    value: Any
    answer: str = "taken"
    where: str = "always"
    trains: bool = True
    reason: str = ""

    @property
    def theirs(self) -> str:
        """Megatron-LM's value in words."""
        if self.value is None:
            return "none"
        if callable(self.value):
            return "8/3 x hidden-size, down to a multiple of 64"
        return _shown(self.value)

    @property
    def ours(self) -> str:
        """The default here in words."""
        given = {"ffn_hidden_size": "4 x hidden-size", "accumulate_allreduce_grads_in_fp32": "on"}.get(self.field)
        return given or _shown(all_fields()[self.field].default)

    def of(self, given: Given) -> Any:
        """Return Megatron-LM's value for these settings."""
        return self.value(given) if callable(self.value) else self.value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value >= 2**16:
        return f"2^{value.hex().split('p+')[1]}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


DEFAULTS: tuple[MegatronDefault, ...] = (
    # the model
    MegatronDefault("num_layers", None, "to give", reason="no default there"),
    MegatronDefault("hidden_size", None, "to give", reason="no default there"),
    MegatronDefault("num_attention_heads", None, "to give", reason="no default there"),
    MegatronDefault("seq_length", None, "to give", reason="no default there"),
    MegatronDefault("normalization", "LayerNorm", "to give", reason="models here have RMSNorm"),
    MegatronDefault("norm_epsilon", 1e-5),
    MegatronDefault("position_embedding_type", "learned_absolute", "to give", reason="no learned positions here"),
    MegatronDefault("swiglu", False, "to give", "experts", reason="experts here are gated"),
    MegatronDefault("swiglu", False, "taken", "a dense model"),
    MegatronDefault("ffn_hidden_size", _gated_width, "taken", "--swiglu"),
    MegatronDefault("add_bias_linear", True, "to give", "experts", reason="experts here have no biases"),
    MegatronDefault("add_bias_linear", True, "taken", "a dense model"),
    MegatronDefault("attention_dropout", 0.1),
    MegatronDefault("hidden_dropout", 0.1),
    MegatronDefault(
        "rope_type", "yarn", "taken", "latent attention", trains=False, reason="the same at --rotary-scaling-factor 1"
    ),
    MegatronDefault("kv_lora_rank", 32, "taken", "latent attention"),
    MegatronDefault(
        "transformer_impl",
        "transformer_engine",
        "kept",
        trains=False,
        reason="the same layers; ask for Transformer Engine's by the flag",
    ),
    # experts
    MegatronDefault("moe_router_load_balancing_type", ("aux_loss",), "taken", "an auxiliary coefficient"),
    MegatronDefault(
        "moe_router_group_score",
        "megatron",
        "taken",
        "groups of experts ranked otherwise",
        reason="no flag there",
    ),
    MegatronDefault("moe_global_aux_loss_counts", "running", "taken", "global_aux_loss", reason="no flag there"),
    MegatronDefault(
        "moe_router_dtype", None, "kept", "experts in bf16, fp16", reason="the router computes in fp32 at least"
    ),
    MegatronDefault(
        "moe_token_dispatcher_type",
        "allgather",
        "taken",
        "EP > 1",
        trains=False,
        reason="the same sums, in another order",
    ),
    # layout and precision
    MegatronDefault("cp_comm_type", "p2p", "kept", "CP > 1", trains=False, reason="the same attention"),
    MegatronDefault("attention_softmax_in_fp32", False, "kept", "bf16, fp16", reason="attention here has it in fp32"),
    MegatronDefault("accumulate_allreduce_grads_in_fp32", False, "taken", "fp16"),
    MegatronDefault("initial_loss_scale", 2.0**32, "taken", "fp16 without --loss-scale"),
    MegatronDefault("fp8_recipe", "delayed", "to give", "FP8", reason="scales here are per block"),
    # optimizer
    MegatronDefault("lr", None, "to give", reason="no default there"),
    MegatronDefault("lr_decay_style", "linear"),
    MegatronDefault("adam_beta2", 0.999),
    MegatronDefault("muon_extra_scale_factor", 1.0, "taken", "Muon"),
    # the run
    MegatronDefault("eval_iters", 100, trains=False),
    MegatronDefault("num_workers", 2, trains=False),
    MegatronDefault("on_nan", "stop", trains=False, reason="--no-check-for-nan-in-loss-and-grad there"),
    MegatronDefault("log_interval", 100, trains=False),
)


def closed_by(preset: Given, folder: bool) -> frozenset[str]:
    """Return the fields that a preset decides: those of each section in which it sets anything.

    A preset contains what differs from the defaults here, and so what it does not contain is decided by it too.

    Args:
        folder: whether the architecture is that of a folder, which decides it likewise.
    """
    fields = all_fields()
    sections = {fields[name].section for name in preset} | ({"model", "moe"} if folder else set())
    return frozenset(name for name, field in fields.items() if field.section in sections)


def open_defaults(given: Given, closed: Collection[str]) -> Iterator[MegatronDefault]:
    """Yield the defaults of Megatron-LM's that make a difference to these settings, which leave them open.

    Args:
        closed: fields that are decided although the settings do not contain them.
    """
    for default in DEFAULTS:
        if default.field not in given and default.field not in closed and _WHERE[default.where](given):
            yield default


def taken(given: Given, closed: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings with Megatron-LM's defaults for what they leave open, and notes of what that changed.

    Raises:
        ConfigError: with every setting that is left open and has no such default here.
    """
    fields = all_fields()
    missing = []
    for default in open_defaults(given, closed):
        if default.answer == "to give":
            there = "" if default.value is None else f" ({_shown(default.value)} there)"
            works = "give it" if default.value is None else f"use {fields[default.field].typed(_works(default))}"
            missing.append(f"{fields[default.field].flag}{there}: {default.reason}; {works}")
    if missing:
        raise ConfigError(
            listing("--defaults megatron: what the command leaves open has no such default here", missing)
        )
    # Whether a default makes a difference may follow from one that is taken before it.
    settings = dict(given)
    for default in DEFAULTS:
        if default.answer == "taken" and default in tuple(open_defaults(settings, closed)):
            settings[default.field] = default.of(settings)
    names = [name for name in settings if name not in given]
    typed = [fields[name].typed(settings[name]) for name in names]
    notes = [f"--defaults megatron takes {' '.join(typed)}"] if typed else []
    kept = [default for default in open_defaults(settings, closed) if default.answer == "kept"]
    if kept:
        shown = [f"{fields[one.field].typed(_works(one))} ({one.theirs} there: {one.reason})" for one in kept]
        notes.append(f"--defaults megatron keeps {', '.join(shown)}")
    return settings, tuple(notes)


def _works(default: MegatronDefault) -> Any:
    return all_fields()[default.field].default


def note_of_open(given: Given, closed: Collection[str]) -> tuple[str, ...]:
    """Return a line that names the defaults of another training than Megatron-LM's, which the settings leave open."""
    fields = all_fields()
    shown = [
        f"{fields[one.field].flag} {one.ours} ({one.theirs})"
        for one in open_defaults(given, closed)
        if one.trains and one.answer != "kept"
    ]
    if not shown:
        return ()
    return (
        f"defaults that are others in Megatron-LM: {', '.join(shown)}; --defaults megatron takes or asks for those",
    )
