"""Names of the model's modules and parameters, from a run alone, and which of them `--keep-fp32` keeps.

Names are those of the whole model, as in a checkpoint: layers are numbered from 0 over all pipeline stages. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from megatron_moe.config import derived
from megatron_moe.config.schema import Run

EMBEDDING, FINAL_NORM, OUTPUT_LAYER = "embedding", "decoder.final_layernorm", "output_layer"


def aliases(run: Run) -> dict[str, str]:
    """Short words of `--keep-fp32` and the patterns they stand for."""
    return {
        "embedding": EMBEDDING,
        "output_layer": OUTPUT_LAYER,
        "norms": "*norm",
        "router": "*.mlp.router",
        "experts": "*.mlp.experts",
        "shared_experts": "*.mlp.shared_experts",
        "attention": "*.self_attention",
        "softmax": "*.core_attention",
        "first_layer": "decoder.layers.0",
        "last_layer": f"decoder.layers.{run.model.num_layers - 1}",
    }


def modules(run: Run) -> dict[str, tuple[str, ...]]:
    """Module name -> names of the parameters it holds itself; a module comes before those inside it.

    Every module that has weights, or contains one that has, and core attention. Not the chain of layers as a whole:
    each layer computes for itself.
    """
    found: dict[str, tuple[str, ...]] = {EMBEDDING: (), f"{EMBEDDING}.word_embeddings": ("weight",)}
    pattern = derived.moe_layer_pattern(run)
    for layer, is_moe in enumerate(pattern):
        found.update(_layer(run, f"decoder.layers.{layer}", is_moe))
    found[FINAL_NORM] = ("weight",)
    for depth in range(run.model.mtp_num_layers or 0):
        name = f"mtp.layers.{depth}"
        found.update({name: (), **{f"{name}.{part}": ("weight",) for part in ("enorm", "hnorm", "eh_proj")}})
        found.update(_layer(run, f"{name}.transformer_layer", pattern[-1]))
        found[f"{name}.final_layernorm"] = ("weight",)
    found[OUTPUT_LAYER] = ("weight",)
    return found


def kept_in_fp32(run: Run) -> tuple[str, ...]:
    """The modules that `--keep-fp32` keeps in fp32, outermost only: what lies inside one is kept with it.

    A pattern names modules, or parameters: then it keeps the module that holds the parameter, because a module computes
    in one dtype.
    """
    chosen: set[str] = set()
    for pattern in run.precision.keep_fp32 or ():
        chosen.update(matches(run, pattern))
    return tuple(name for name in modules(run) if name in chosen and not _inside(name, chosen))


def matches(run: Run, pattern: str) -> tuple[str, ...]:
    """Modules that one pattern of `--keep-fp32` names; empty if there is none."""
    pattern = aliases(run).get(pattern, pattern)
    return tuple(
        name
        for name, own in modules(run).items()
        if fnmatchcase(name, pattern) or any(fnmatchcase(f"{name}.{parameter}", pattern) for parameter in own)
    )


def usable_aliases(run: Run) -> list[str]:
    """The short words that name something in this model: a dense one has no experts."""
    return [alias for alias in aliases(run) if matches(run, alias)]


def near_names(run: Run, pattern: str) -> list[str]:
    """Up to three names or short words that look like a pattern that names nothing."""
    names = [*usable_aliases(run), *modules(run)]
    found = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    last = pattern.rsplit(".", 1)[-1].strip("*")
    tails = sorted({name.rsplit(".", 1)[-1] for name in names if not name[-1].isdigit()})
    return found or [f"*.{tail}" for tail in difflib.get_close_matches(last, tails, n=3, cutoff=0.5)]


def _inside(name: str, chosen: Iterable[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in chosen for length in range(1, len(parts)))


def _layer(run: Run, name: str, is_moe: int) -> dict[str, tuple[str, ...]]:
    mlp = _experts(run) if is_moe else _mlp(run)
    return {
        name: (),
        f"{name}.input_layernorm": ("weight",),
        **{f"{name}.self_attention{tail}": own for tail, own in _attention(run).items()},
        f"{name}.pre_mlp_layernorm": ("weight",),
        **{f"{name}.mlp{tail}": own for tail, own in mlp.items()},
    }


def _attention(run: Run) -> dict[str, tuple[str, ...]]:
    model = run.model
    output = ("weight", "bias") if model.add_bias_linear else ("weight",)
    norm = {".q_layernorm": ("weight",)} if model.qk_layernorm else {}
    if not model.multi_latent_attention:
        query_key_value = ("weight", "bias") if model.add_bias_linear or model.add_qkv_bias else ("weight",)
        norm = {**norm, ".k_layernorm": ("weight",)} if norm else {}
        return {"": (), ".core_attention": (), ".linear_proj": output, ".linear_qkv": query_key_value, **norm}
    query: dict[str, tuple[str, ...]] = {".linear_q_proj": ("weight",)}
    if model.q_lora_rank is not None:
        query = {".linear_q_down_proj": ("weight",), **norm, ".linear_q_up_proj": ("weight",)}
    latent_norm = {".kv_layernorm": ("weight",)} if model.qk_layernorm else {}
    key_value = {".linear_kv_down_proj": ("weight",), **latent_norm, ".linear_kv_up_proj": ("weight",)}
    return {"": (), **query, **key_value, ".linear_proj": output, ".core_attention": ()}


def _mlp(run: Run) -> dict[str, tuple[str, ...]]:
    own = ("weight", "bias") if run.model.add_bias_linear else ("weight",)
    return {"": (), ".linear_fc1": own, ".linear_fc2": own}


def _experts(run: Run) -> dict[str, tuple[str, ...]]:
    moe = run.moe
    shared: dict[str, tuple[str, ...]] = {}
    if moe.moe_shared_expert_intermediate_size:
        gate = ("gate_weight",) if moe.moe_shared_expert_gate else ()
        shared = {f".shared_experts{tail}": own or gate for tail, own in _mlp(run).items()}
    return {"": (), ".router": ("weight",), ".experts": ("weight1", "weight2"), **shared}
