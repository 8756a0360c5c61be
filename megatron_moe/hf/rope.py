"""Converts the rotary embedding's keys of config.json into settings and back. Loads no torch.

transformers 5 writes one dictionary, `rope_parameters`; published models have `rope_theta`, `rope_scaling` and
`partial_rotary_factor` as separate keys. Both are read, and both are written.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_moe.config.model_flags import ROPE_SETTINGS
from megatron_moe.config.rotary import amplitude, yarn_magnitude
from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import Keys

_NAMES = {
    "rotary_scaling_factor": "factor",
    "yarn_correction_range_round_to_int": "truncate",
}
"""Settings that have another name in config.json."""
_SPELLED_OUTSIDE = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_REFUSED = {"dynamic": "its frequencies follow the length of each batch, so that a model would depend on its data"}


def rope_settings(
    keys: Keys, width: int, *, latent: bool = False, partly_rotated: bool = False, share: float | None = None
) -> dict[str, Any]:
    """Return the fields of the rotary embedding.

    Args:
        width: of a head, or of its rotary part in latent attention.
        latent: whether it is for latent attention, which is stretched by yarn alone.
        partly_rotated: whether the family rotates a share of each head, which the file then has to give.
        share: that share, where it has been read from another key.

    Raises:
        ConfigError: the kind of rotary embedding is not computed here, or the spellings contradict each other.
    """
    v5, hub = _nested(keys, "rope_parameters"), _nested(keys, "rope_scaling")
    base = _agreed(keys, "rope_theta", v5, hub)
    if base is None:
        raise keys.refusal("rope_theta", "the base of the rotary frequencies has to be given; Mixtral's is 1000000.0")
    partial = _agreed(keys, "partial_rotary_factor", v5, hub)
    if share is not None and partial not in (None, share):
        raise keys.refusal("rotary_dim", f"is {share} of a head, and partial_rotary_factor is {partial}")
    partial = share if partial is None else partial
    if v5 is not None and hub is not None:
        mine, other = (
            {key: value for key, value in part.values.items() if key not in _SPELLED_OUTSIDE} for part in (v5, hub)
        )
        if _kind(v5) != _kind(hub) or mine != other:
            raise keys.refusal("rope_scaling", f"contradicts rope_parameters {v5.values!r}, which means the same")
    stretched = hub if hub is not None else v5
    flat: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": base, "rotary_percent": 1.0}
    if partly_rotated:
        if partial is None or partial > 1.0:
            raise keys.refusal("partial_rotary_factor", "the share of a head that is rotated, up to 1; GLM-4.5: 0.5")
        flat["rotary_percent"] = partial
    elif partial not in (None, 1.0):
        raise keys.refusal("partial_rotary_factor", f"{partial}: this family rotates whole heads; 1.0 works, or none")
    rotated = int(width * flat["rotary_percent"])
    if rotated % 2 or not rotated:
        raise keys.refusal("head_dim", f"of {width} channels {flat['rotary_percent']} are rotated, which is no pair")
    kind = "default" if stretched is None else _kind(stretched)
    if kind == "default" or stretched is None:
        if stretched is not None and stretched.number("factor", default=1.0) != 1.0:
            raise stretched.refusal("factor", "a rotary embedding of type 'default' is not stretched; drop one of them")
        return flat
    computed = ("yarn",) if latent else tuple(ROPE_SETTINGS)
    if kind not in computed:
        raise stretched.refusal(
            "rope_type" if "rope_type" in stretched.values else "type",
            f"{_REFUSED.get(kind, 'this rotary embedding is not computed here')}; these are computed: "
            f"'default', {', '.join(map(repr, computed))}; null converts a model that was trained without it",
        )
    return {**flat, "rope_type": kind, **_stretched(stretched, kind, base, rotated)}


def _stretched(keys: Keys, kind: str, base: float, width: int) -> dict[str, Any]:
    """Return the settings of a kind, `width` channels being rotated."""
    names = {_NAMES.get(name, name) for name in ROPE_SETTINGS[kind]}
    if stray := sorted(keys.values.keys() - names - _SPELLED_OUTSIDE):
        raise keys.refusal(stray[0], f"is not a setting of {kind}; these are: {', '.join(sorted(names))}")
    factor = keys.number("factor")
    if factor < 1.0 or (factor == 1.0 and kind in ("linear", "llama3")):
        least = "at least 1" if kind in ("yarn", "longrope") else "above 1"
        raise keys.refusal("factor", f"{kind} stretches the context; a factor has to be {least}")
    fields: dict[str, Any] = {"rotary_scaling_factor": factor}
    if kind == "linear":
        return fields
    # transformers takes max_position_embeddings where it is missing, DeepSeek's own code 4096: so it is asked for
    fields["original_max_position_embeddings"] = keys.integer("original_max_position_embeddings", low=2)
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            fields[name] = keys.number(name)
        if fields["low_freq_factor"] >= fields["high_freq_factor"]:
            raise keys.refusal("low_freq_factor", "has to be below high_freq_factor; Llama 3.1: 1.0 and 4.0")
        return fields
    fields["attention_factor"] = keys.number("attention_factor", default=None)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            found = keys.raw(name)
            if not isinstance(found, list) or len(found) != width // 2 or not all(map(_is_positive, found)):
                raise keys.refusal(name, f"has to be a list of {width // 2} numbers above 0, one for each rotated pair")
            fields[name] = tuple(map(float, found))
        return fields
    return {**fields, **_yarn(keys, fields, base, width)}


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]


def _nested(keys: Keys, name: str) -> Keys | None:
    values = keys.dictionary(name)
    if values is None:
        return None
    for key, value in values.items():
        if isinstance(value, dict):
            raise keys.refusal(name, f"holds another rotary embedding for {key!r}; one for all layers is computed")
    return keys.nested(values, f"{name}.") if values else None


def _kind(nested: Keys) -> str:
    kind = nested.raw("rope_type", "type")
    return "default" if kind is None else str(kind)


def _agreed(keys: Keys, name: str, *nested: Keys | None) -> float | None:
    """Return a number that may be given outside or inside the dictionaries, and has to be the same in all of them."""
    found: list[tuple[str, float]] = []
    for part in (keys, *nested):
        if part is not None:
            value = part.number(name, default=None)
            if value is not None:
                found.append((part.prefix + name, value))
    for spelled, value in found:
        if value != found[0][1]:
            raise keys.refusal(name, f"{found[0][0]} is {found[0][1]} and {spelled} is {value}; they mean the same")
    return found[0][1] if found else None


def _yarn(keys: Keys, fields: dict[str, Any], base: float, width: int) -> dict[str, Any]:
    """Return the settings of yarn with which amplitudes and the scale of the softmax are those of transformers.

    In transformers, the amplitude is `attention_factor` where it is given; the ratio of the magnitudes of mscale and
    mscale_all_dim where both are given and not 0; else the magnitude of 1. Latent attention's softmax is scaled by the
    square of mscale_all_dim's magnitude. Here the amplitude is always that ratio unless it is given.
    """
    mscale = keys.number("mscale", positive=False, default=0.0)
    all_dim = keys.number("mscale_all_dim", positive=False, default=0.0)
    found = {
        "beta_fast": keys.number("beta_fast", positive=False, default=32.0) or 32.0,
        "beta_slow": keys.number("beta_slow", positive=False, default=1.0) or 1.0,
        "yarn_correction_range_round_to_int": keys.boolean("truncate", default=True),
        "mscale": mscale if mscale and all_dim else 1.0,
        "mscale_all_dim": all_dim,
    }
    if fields["attention_factor"] is None and bool(mscale) != bool(all_dim):
        keys.notes.append(
            f"{keys.prefix}mscale {mscale} and mscale_all_dim {all_dim}: with one of them alone the amplitude follows "
            "from factor, as in transformers; DeepSeek's own code scales by the one"
        )
        if all_dim:
            found["attention_factor"] = yarn_magnitude(fields["rotary_scaling_factor"], 1.0)
    if found["beta_fast"] < found["beta_slow"]:
        raise keys.refusal("beta_fast", f"has to be at least beta_slow {found['beta_slow']}")
    # A ramp outside of the channels is cut off by each implementation in its own way; a base of 1 has none.
    low, high = 1.0, 0.0
    if base != 1.0:
        context, turns = fields["original_max_position_embeddings"], (found["beta_fast"], found["beta_slow"])
        low, high = (width * math.log(context / (turn * 2 * math.pi)) / (2 * math.log(base)) for turn in turns)
    if max(math.floor(low), 0) > min(math.ceil(high), width - 1):
        raise keys.refusal(
            "original_max_position_embeddings",
            f"with beta_fast {found['beta_fast']}, beta_slow {found['beta_slow']} and rope_theta {base} yarn's ramp "
            f"is outside of the {width // 2} frequencies; a context of some thousand positions works",
        )
    return found


def rope_keys(run: Run, partly_rotated: bool = False) -> dict[str, Any]:
    """Return the rotary embedding's keys of config.json, in both spellings, as `rope_settings` reads them."""
    model = run.model
    parameters: dict[str, Any] = {"rope_type": "default" if model.rope_type == "rope" else model.rope_type}
    for name in ROPE_SETTINGS.get(model.rope_type, ()):
        value = getattr(model, name)
        if value is not None and (name, value) != ("yarn_correction_range_round_to_int", True):
            parameters[_NAMES.get(name, name)] = list(value) if isinstance(value, tuple) else value
    if model.rope_type == "yarn" and not model.mscale_all_dim:  # without both, transformers reads neither
        if model.mscale != 1.0:
            parameters["attention_factor"] = amplitude(model)
        if not model.multi_latent_attention:  # whose other implementations look for both
            del parameters["mscale"], parameters["mscale_all_dim"]
    hub = None if model.rope_type == "rope" else {"type": model.rope_type, **parameters}
    spelled: dict[str, Any] = {"rope_theta": model.rotary_base}
    if partly_rotated:
        spelled["partial_rotary_factor"] = model.rotary_percent
    return {**spelled, "rope_scaling": hub, "rope_parameters": {**spelled, **parameters}}
