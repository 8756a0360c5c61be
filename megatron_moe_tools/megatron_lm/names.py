"""The names of Megatron-LM's tensors and ours, as data.

Our checkpoints are made of the engine's layers, so most names agree; these do not:

    theirs                                              ours
    decoder.layers.X            [L, ...]                decoder.layers.N.X      layers in one tensor, or by their number
    self_attention.linear_qkv.layer_norm_weight         input_layernorm.weight  a norm within the product after it
    mlp.experts.experts.linear_fc1.weight [E, 2F, H]    mlp.experts.weight1     [E, 2, F, H]
    mlp.experts.experts.linear_fc2.weight [E, H, F]     mlp.experts.weight2     [E, H, F]

In files of the format `torch` a process writes its own part, and experts have a name each, or one for all of a process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_moe.config.schema import Run
from megatron_moe.hf.transforms import Shape

_WITHIN_LAYER = (
    # Norms that Transformer Engine computes within the product that follows, and local layers store by its names too.
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
    (r"self_attention\.linear_(?:q|kv|qkv)_down_proj\.layer_norm_weight", "input_layernorm.weight"),
    (r"self_attention\.linear_q_proj\.layer_norm_weight", "input_layernorm.weight"),
    (r"self_attention\.linear_q_up_proj\.layer_norm_weight", "self_attention.q_layernorm.weight"),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_weight", "self_attention.kv_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
_LAYER = re.compile(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(?:(?:transformer|mtp_model)_layer\.)?")
_EXPERTS = re.compile(r"mlp\.experts\.(?:(?:experts|local_experts)\.)?(?:(\d+)\.)?linear_fc([12])\.weight(\d+)?")
_OPTIMIZER = re.compile(r"optimizer\.state\.(fp32_param|param|exp_avg|exp_avg_sq)\.")
_OF_STATE = {"fp32_param": "param"}

DROPPED: tuple[tuple[str, str], ...] = (
    (r"\._extra_state\d*(/|$)", "scales of FP8, or nothing: they are made anew"),
    (r"\.(local|global)_tokens_per_expert(/|$)|\.ga_steps(/|$)", "counts of the micro-batches of one step"),
    (r"rotary_pos_emb\.inv_freq(/|$)", "follows from the configuration"),
    (r"^rng_state(/|$)", "random states belong to the ranks that drew them: new ones are made from --seed"),
    (r"^rerun_state_machine_state(/|$)", "what repeats a step after a fault"),
    (r"^(common_state|chained_\d+\.)?common_state/", "plain values, read as such"),
)
"""Patterns of names, each with the reason why the tensors or values are left out."""


@dataclass(frozen=True)
class Name:
    """What a name in a checkpoint of Megatron-LM stands for.

    key: our tensor's name; where `stacked`, {} stands for the layer's number. expert: the number of the one expert that
    the tensor is of, if it is. half: 0 for the gate alone, 1 for up alone. state: the optimizer's part of it, `param`,
    `exp_avg` or `exp_avg_sq`; None for a weight.
    """

    key: str
    stacked: bool = False
    expert: int | None = None
    half: int | None = None
    state: str | None = None

    @property
    def full_key(self) -> str:
        """The name in a step, the optimizer's prefix included."""
        return self.key if self.state is None else f"optimizer.state.{self.state}.{self.key}"


def dropped(name: str) -> str | None:
    """Return why a tensor or value is left out; None if it is not."""
    return next((reason for pattern, reason in DROPPED if re.search(pattern, name)), None)


def ours(name: str) -> Name:
    """Return what a name of the format torch_dist stands for."""
    state = None
    if found := _OPTIMIZER.match(name):
        state, name = _OF_STATE.get(found[1], found[1]), name[found.end() :]
    layer = _LAYER.match(name)
    if layer is None:
        return Name(name, state=state)
    inner, half = name[layer.end() :], None
    if inner.endswith((".weight_w", ".weight_v")):  # a gate and up that each have a name
        inner, half = inner[:-2], "wv".index(inner[-1])
    expert = None
    if found := _EXPERTS.fullmatch(inner):
        inner = f"mlp.experts.weight{found[2]}"
        if found[1] or found[3]:
            expert = int(found[1] or found[3])
    for pattern, native in _WITHIN_LAYER:
        inner = re.sub(rf"^{pattern}$", native, inner)
    if layer[0].endswith(("transformer_layer.", "mtp_model_layer.")):
        inner = f"transformer_layer.{inner}"
    return Name(f"{layer[1]}.layers.{layer[2] or '{}'}.{inner}", layer[2] is None, expert, half, state)


# ---- The other way: names of a checkpoint that Megatron-LM loads.


def theirs(key: str, *, transformer_engine: bool, latent: bool, moe: bool) -> str:
    """Return Megatron-LM's name in torch_dist of a tensor of ours, with layers by their number.

    Args:
        key: our name, without the optimizer's prefix.
        transformer_engine: whether its layers are Transformer Engine's; local ones name some norms otherwise.
        latent: whether attention is latent.
        moe: whether the layer has experts.
    """
    layer = _LAYER.match(key)
    if layer is None:
        return key
    prefix, inner = key[: layer.end()], key[layer.end() :]
    renamed = {
        "mlp.experts.weight1": "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.weight2": "mlp.experts.experts.linear_fc2.weight",
    }
    if not latent:
        renamed["input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    if latent and transformer_engine:
        renamed["self_attention.q_layernorm.weight"] = "self_attention.linear_q_up_proj.layer_norm_weight"
        renamed["self_attention.kv_layernorm.weight"] = "self_attention.linear_kv_up_proj.layer_norm_weight"
    # Megatron-LM's local layers with grouped-query attention have this name with experts too.
    if (transformer_engine and not moe) or (not transformer_engine and not latent):
        renamed["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    return prefix + renamed.get(inner, inner)


def weight_of(key: str) -> str:
    """Return the weight that a key of the optimizer belongs to, or the key itself."""
    if key.startswith("optimizer.state."):
        return key.split(".", 3)[3]
    return key


def shape_there(key: str, shape: Shape) -> Shape:
    """Return the shape in Megatron-LM's checkpoints of one of our tensors, or of a box of whole experts of it."""
    if key.endswith(".mlp.experts.weight1"):
        return (shape[0], shape[1] * shape[2], shape[3])
    return shape


def name_there(key: str, run: Run, transformer_impl: str) -> str:
    """Return the name in Megatron-LM's checkpoints of one of our weights, or of what the optimizer has for it."""
    weight, pattern = weight_of(key), run.derived.moe_layer_pattern
    found, layer = _LAYER.match(weight), -1  # depths of multi-token prediction are as the last layer is
    if found is not None and found[1] == "decoder":
        layer = int(found[2])
    return key.removesuffix(weight) + theirs(
        weight,
        transformer_engine=transformer_impl == "transformer_engine",
        latent=run.model.multi_latent_attention,
        moe=bool(pattern[layer]),
    )


def extra_states(shapes: Mapping[str, Shape], run: Run) -> list[str]:
    """Return the names of the values that layers ask for and that are empty without FP8, whosever layers they are."""
    found: dict[str, None] = {}
    for key, shape in shapes.items():
        there = theirs(key, transformer_engine=False, latent=True, moe=True)
        module = there.removesuffix(".weight").removesuffix(".bias")
        if module == there or key.endswith("mlp.router.weight"):
            continue
        if key.endswith((".experts.weight1", ".experts.weight2")):
            for expert in range(shape[0]):
                found[f"{module}._extra_state/shard_{expert}_{shape[0]}"] = None
            continue
        found[f"{module}._extra_state/shard_0_1"] = None
        if module.endswith("self_attention.linear_proj"):
            found[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_0_1"] = None
    return list(found)
