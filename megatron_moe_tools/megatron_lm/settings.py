"""Takes a model's settings from the arguments that a checkpoint of Megatron-LM keeps. Loads no torch.

The arguments are those of the whole command, every default included, so that nothing is guessed: each setting of the
architecture is read by its name, and what would make another model than any here is refused by its flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config import megatron_defaults, megatron_flags
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.fields import Field, all_fields, from_file
from megatron_moe.config.rules import check_model
from megatron_moe.config.rules.ignored import YARN_FIELDS, as_megatron_reads
from megatron_moe.config.schema import Run, build, flatten

_ALSO_TAKEN = ("seq_length", "max_position_embeddings", "make_vocab_size_divisible_by", "mtp_loss_scaling_factor")
"""Settings that are no architecture, and that a run without others should have."""
_OTHER_NAMES = {"norm_epsilon": ("layernorm_epsilon",), "num_experts": ("num_moe_experts",)}
"""Field -> names of newer releases."""
_LATENT_EPSILON = 1e-6
"""The epsilon of the latents' norms here, whatever --norm-epsilon is."""

ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (),
    "use_rope_scaling": (False,),
    "rotary_seq_len_interpolation_factor": (1, 1.0),
    "no_rope_freq": (),
    "mrope_section": (),
    "window_size": (),
    "softmax_type": ("vanilla",),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "linear_attention_freq": (),
    "experimental_attention_variant": (),
    "moe_latent_size": (),
    "moe_apply_probs_on_input": (False,),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "hybrid_override_pattern": (),
    "hybrid_layer_pattern": (),
    "is_hybrid_model": (False,),
    "mtp_hybrid_override_pattern": (),
    "mtp_use_repeated_layer": (False,),
    "enable_hyper_connections": (False,),
    "use_mup": (False,),
    "use_legacy_models": (False,),
    "spec": (),
}
"""Argument -> its values, in addition to None, that leave the model as it is here. Others make another model."""


_READ_BY: dict[str, Callable[[Run], bool]] = {
    "moe_": lambda run: run.moe.num_experts is not None,
    "moe_router_group_score": lambda run: False,  # Megatron-LM has no such argument, and one such score
    **dict.fromkeys(YARN_FIELDS, lambda run: run.model.rope_type == "yarn"),
    **dict.fromkeys(
        ("rope_type", "kv_lora_rank", "qk_head_dim", "qk_pos", "v_head"), lambda run: run.model.multi_latent_attention
    ),
}
"""Beginnings of settings -> whether a model reads these."""


def run_of(args: Mapping[str, Any], given: Mapping[str, Any], rows: int, where: str) -> tuple[Run, list[str]]:
    """Return the run of a checkpoint's arguments, without the dtypes of its weights, and notes for the user.

    Args:
        args: the arguments by name.
        given: settings that go before the checkpoint's, by field.
        rows: of the embedding table, as stored.
        where: the checkpoint, as messages name it.

    Raises:
        ConfigError: the model is none of those here; the message names each argument with its value.
    """
    fields = all_fields()
    flat: dict[str, Any] = {}
    problems: list[str] = []
    for name in (*architecture_keys(), *_ALSO_TAKEN):
        if name in given:
            continue
        value = _plain(_found(args, name))
        if value is None:
            continue
        try:
            flat[name] = from_file(fields[name], _as_here(name, value), fields[name].flag)
        except ConfigError as error:
            problems.append(f"{error}{_reason(fields[name], value)}")
    problems += _of_other_models(args)
    if problems:
        raise ConfigError(listing(f"{where}: is a model that is not here, by its arguments:", problems))
    notes = _vocabulary(flat, given, rows, where)
    flat |= {**given, "padded_vocab_size": rows}
    missing = [name for name in architecture_keys() if name not in given and args.keys().isdisjoint(_names(name))]
    closed = frozenset(name for name, field in fields.items() if field.section not in ("model", "moe"))
    flat, _ = megatron_defaults.taken(flat, closed)
    flat, ignored = as_megatron_reads(flat)
    run = build({name: value for name, value in flat.items() if name in (*architecture_keys(), *_KEPT, *given)})
    _require_convertible(run, where)
    try:
        check_model(run, 1)
    except ConfigError as error:
        raise ConfigError(f"{where}: by its arguments: {error}") from None
    return run, [*notes, *ignored, *_defaults_taken(run, missing, where), *_epsilon_notes(run)]


_KEPT = (*_ALSO_TAKEN, "padded_vocab_size")


def _names(field: str) -> tuple[str, ...]:
    return (field, *_OTHER_NAMES.get(field, ()))


def _found(args: Mapping[str, Any], name: str) -> Any:
    for known in _names(name):
        if args.get(known) is not None:
            return args[known]
    return None


def _plain(value: Any) -> Any:
    """Return the value of a member of an enumeration, and other values as they are."""
    arguments = getattr(value, "arguments", None)
    return arguments[0] if isinstance(arguments, tuple) and len(arguments) == 1 else value


def _as_here(name: str, value: Any) -> Any:
    if name == "moe_layer_freq":
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(str, value))}]"
        return int(value) if isinstance(value, str) and re.fullmatch(r"\d+", value) else value
    return list(value) if isinstance(value, tuple) else value


def _reason(field: Field, value: Any) -> str:
    row = megatron_flags.row_for(field.flag, [str(value)])
    return "" if row is None or not row.values else f": {row.reason}"


def _of_other_models(args: Mapping[str, Any]) -> list[str]:
    found = []
    for name, neutral in ELSEWHERE.items():
        value = _plain(args.get(name))
        if value is None or value in neutral:
            continue
        flag = f"--{name.replace('_', '-')}"
        row = megatron_flags.row_for(flag, [str(value)])
        reason = "it makes another model" if row is None or row.answer != "refused" else row.reason
        found.append(f"{flag} {value}: {reason}")
    return found


def _vocabulary(flat: dict[str, Any], given: Mapping[str, Any], rows: int, where: str) -> list[str]:
    """Fill in how many rows of the table are tokens, if the arguments do not say it."""
    size = given.get("vocab_size", flat.get("vocab_size"))
    if size is None:
        flat["vocab_size"] = rows
        return [
            f"{where}: does not say how many of its {rows} rows are tokens: all are; --vocab-size says it, and the "
            "rest then take no part in the softmax"
        ]
    if size > rows:
        raise ConfigError(f"--vocab-size {size}: {where} has {rows} rows of tokens, fewer than that")
    return []


def _defaults_taken(run: Run, missing: list[str], where: str) -> list[str]:
    """Return a note with the settings that the arguments, of another release, do not have, where the model reads them.

    What is None or off by default is a part that such a model does not have.
    """
    unread = [prefix for prefix, is_read in _READ_BY.items() if not is_read(run)]
    values = flatten(run)
    taken = [
        all_fields()[name].typed(values[name])
        for name in missing
        if values[name] not in (None, False) and not name.startswith(tuple(unread))
    ]
    if not taken:
        return []
    return [
        f"{where}: its arguments do not have {', '.join(taken)}: these DEFAULTS ARE TAKEN; flags given to the "
        "conversion go before them"
    ]


def _require_convertible(run: Run, where: str) -> None:
    if run.model.add_bias_linear:
        raise ConfigError(
            f"{where}: --add-bias-linear: models with biases in all linear layers are not converted; "
            "--disable-bias-linear models are, with --add-qkv-bias too"
        )
    if not run.model.swiglu:
        raise ConfigError(f"{where}: --no-swiglu: models without gated layers are not converted; those of --swiglu are")


def _epsilon_notes(run: Run) -> list[str]:
    if not run.model.multi_latent_attention or run.model.norm_epsilon == _LATENT_EPSILON:
        return []
    return [
        f"--norm-epsilon {run.model.norm_epsilon}: the norms of the latents have {_LATENT_EPSILON} here, so that "
        "logits differ by a little from Megatron-LM's"
    ]
