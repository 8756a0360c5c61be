"""Converts the rotary embedding's keys of config.json into settings and back. Loads no torch.

transformers 5 writes one dictionary, `rope_parameters`; published models have `rope_theta`, `rope_scaling` and
`partial_rotary_factor` as separate keys. Both are read, and both are written.
"""

from __future__ import annotations

import math
from typing import Any

from megatron_moe.config.schema import Run
from megatron_moe.hf.config_keys import Keys

_YARN_KEYS = {
    *"type rope_type rope_theta partial_rotary_factor factor original_max_position_embeddings".split(),
    *"beta_fast beta_slow mscale mscale_all_dim attention_factor truncate".split(),
}
_SPELLED_OUTSIDE = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}


def rope_settings(
    keys: Keys, latent_width: int | None = None, partly_rotated: bool = False, share: float | None = None
) -> dict[str, Any]:
    """Return the fields of the rotary embedding.

    Args:
        latent_width: width of the rotary part of latent attention; None for other attention. Yarn is computed for
            latent attention, and no other kind of scaling is computed.
        partly_rotated: whether the family rotates a share of each head, which the file then has to give.
        share: that share, where it has been read from another key.

    Raises:
        ConfigError: the kind of rotary embedding is not computed here, or the spellings contradict each other.
    """
    latent = latent_width is not None
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
    kind = "default" if stretched is None else _kind(stretched)
    if kind == "default" or stretched is None:
        if stretched is not None and stretched.number("factor", default=1.0) != 1.0:
            raise stretched.refusal("factor", "a rotary embedding of type 'default' is not stretched; drop one of them")
        return flat
    if kind != "yarn" or not latent:
        works = "'yarn' and 'default' are computed" if latent else "'default' is computed"
        raise stretched.refusal(
            "rope_type" if "rope_type" in stretched.values else "type",
            f"this rotary embedding is not computed {'here' if latent else 'for grouped-query attention'}; {works}: "
            "set it to null to convert a model that was trained without it",
        )
    return {**flat, **_yarn(stretched, base, latent_width or 0)}


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


def _magnitude(factor: float, mscale: float) -> float:
    """Return the growth of the attention logits for a context `factor` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(keys: Keys, base: float, width: int) -> dict[str, Any]:
    """Return the settings of yarn with which amplitudes and the scale of the softmax are those of transformers.

    In transformers, the amplitude is `attention_factor` where it is given; the ratio of the magnitudes of mscale and
    mscale_all_dim where both are given and not 0; else the magnitude of 1. The softmax is scaled by the square of
    mscale_all_dim's magnitude. Here the amplitude is always that ratio, so mscale is solved for where needed.
    """
    stray = sorted(keys.values.keys() - _YARN_KEYS)
    if stray:
        raise keys.refusal(stray[0], f"is not a setting of yarn; these are: {', '.join(sorted(_YARN_KEYS))}")
    keys.only("truncate", (True,), "yarn's ramp begins and ends at whole channels here")
    factor = keys.number("factor")
    if factor < 1.0:
        raise keys.refusal("factor", "yarn stretches the context; a factor has to be at least 1")
    mscale = keys.number("mscale", positive=False, default=0.0)
    all_dim = keys.number("mscale_all_dim", positive=False, default=0.0)
    given = keys.number("attention_factor", default=None)
    ratio = given is None and bool(mscale and all_dim)
    if given is None and bool(mscale) != bool(all_dim):
        keys.notes.append(
            f"{keys.prefix}mscale {mscale} and mscale_all_dim {all_dim}: with one of them alone the amplitude follows "
            "from factor, as in transformers; DeepSeek's own code scales by the one"
        )
    amplitude = _magnitude(factor, 1.0) if given is None else given
    fields = {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        # transformers takes max_position_embeddings where it is missing, DeepSeek's own code 4096: so it is asked for
        "original_max_position_embeddings": keys.integer("original_max_position_embeddings"),
        "beta_fast": keys.number("beta_fast", positive=False, default=32.0) or 32.0,
        "beta_slow": keys.number("beta_slow", positive=False, default=1.0) or 1.0,
        "mscale_all_dim": all_dim,
        "mscale": mscale if ratio else 1.0,
    }
    if not ratio and amplitude != _magnitude(factor, 1.0) / _magnitude(factor, all_dim):
        if factor <= 1.0:
            raise keys.refusal("attention_factor", "a context that is not stretched has the amplitude 1; drop it")
        fields["mscale"] = (amplitude * _magnitude(factor, all_dim) - 1.0) / (0.1 * math.log(factor))
        if fields["mscale"] <= 0.0:
            least = 1.0 / _magnitude(factor, all_dim)
            raise keys.refusal("attention_factor", f"with this factor and mscale_all_dim it has to be above {least}")
    if fields["beta_fast"] < fields["beta_slow"]:
        raise keys.refusal("beta_fast", f"has to be at least beta_slow {fields['beta_slow']}")
    # A ramp outside of the channels is cut off by each implementation in its own way; a base of 1 has none.
    low, high = 1.0, 0.0
    if base != 1.0:
        context, turns = fields["original_max_position_embeddings"], (fields["beta_fast"], fields["beta_slow"])
        low, high = (width * math.log(context / (turn * 2 * math.pi)) / (2 * math.log(base)) for turn in turns)
    if max(math.floor(low), 0) > min(math.ceil(high), width - 1):
        raise keys.refusal(
            "original_max_position_embeddings",
            f"with beta_fast {fields['beta_fast']}, beta_slow {fields['beta_slow']} and rope_theta {base} yarn's ramp "
            f"is outside of the {width // 2} frequencies; a context of some thousand positions works",
        )
    return fields


def amplitude(run: Run) -> float:
    """Return the factor of the cosines and sines of latent attention."""
    model = run.model
    if model.rope_type != "yarn":
        return 1.0
    factor = model.rotary_scaling_factor
    return _magnitude(factor, model.mscale) / _magnitude(factor, model.mscale_all_dim)


def rope_keys(run: Run, partly_rotated: bool = False) -> dict[str, Any]:
    """Return the rotary embedding's keys of config.json, in both spellings, as `rope_settings` reads them."""
    model = run.model
    parameters: dict[str, Any] = {"rope_type": "default"}
    if model.rope_type == "yarn":
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        parameters = {"rope_type": "yarn", "factor": model.rotary_scaling_factor}
        parameters |= {name: getattr(model, name) for name in names}
        if not model.mscale_all_dim and model.mscale != 1.0:
            parameters["attention_factor"] = amplitude(run)  # without both, transformers reads neither
    hub = {"type": "yarn", **parameters} if model.rope_type == "yarn" else None
    spelled: dict[str, Any] = {"rope_theta": model.rotary_base}
    if partly_rotated:
        spelled["partial_rotary_factor"] = model.rotary_percent
    return {**spelled, "rope_scaling": hub, "rope_parameters": {**spelled, **parameters}}
