"""What Megatron-LM's checkpoints call things, and how ours are called: tensors, arguments, plain values, both ways.

Our checkpoints are made of the engine's layers, so most names of tensors agree; these do not:

    theirs                                              ours
    decoder.layers.X            [L, ...]                decoder.layers.N.X      layers in one tensor, or by their number
    self_attention.linear_qkv.layer_norm_weight         input_layernorm.weight  a norm within the product after it
    mlp.experts.experts.linear_fc1.weight [E, 2F, H]    mlp.experts.weight1     [E, 2, F, H]
    mlp.experts.experts.linear_fc2.weight [E, H, F]     mlp.experts.weight2     [E, H, F]

In files of the format `torch` a process writes its own part, and experts have a name each, or one for all of a process.

The arguments that a checkpoint keeps are those of the whole command, every default included, so that nothing is
guessed: each setting of the architecture is read by its name, and what would make another model than any here is
refused by its flag. Weights alone are written as a `release`, Megatron-LM's form without optimizer and iteration: it
loads them as they are, in any layout, and starts at iteration 0. A step with an optimizer keeps its number; a
distributed optimizer loads it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.fields import all_fields, from_file
from megatron_moe.config.model_flags import ROPE_SETTINGS
from megatron_moe.config.rules import check_model
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.hf.transforms import Shape
from megatron_moe_tools.compat import megatron_flags, megatron_settings

# ---- Names of tensors.

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


# The other way: names of a checkpoint that Megatron-LM loads.


def theirs(key: str, *, transformer_engine: bool, latent: bool, moe: bool) -> str:
    """Return Megatron-LM's name in torch_dist of a weight of ours, with layers by their number.

    transformer_engine: whether its layers are Transformer Engine's; local ones name some norms otherwise. latent:
    whether attention is latent. moe: whether the layer has experts.
    """
    layer = _LAYER.match(key)
    if layer is None:
        return key
    prefix, inner = key[: layer.end()], key[layer.end() :]
    experts = "mlp.experts.experts.linear_fc{}.weight"
    renamed = {f"mlp.experts.weight{number}": experts.format(number) for number in (1, 2)}
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


def extra_states(shapes: Mapping[str, Shape]) -> list[str]:
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


# ---- The model's settings.

_ALSO_TAKEN = ("seq_length", "max_position_embeddings", "make_vocab_size_divisible_by", "mtp_loss_scaling_factor")
"""Settings that are no architecture, and that a run without others should have."""
_OTHER_NAMES = {"norm_epsilon": ("layernorm_epsilon",), "num_experts": ("num_moe_experts",)}
"""Field -> names of newer releases."""
_LATENT_EPSILON = 1e-6
"""The epsilon of the latents' norms here, whatever --norm-epsilon is."""

ELSEWHERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "apply_layernorm_1p layernorm_zero_centered_gamma apply_residual_connection_post_layernorm "
            "squared_relu quick_geglu qk_l2_norm attention_output_gate moe_apply_probs_on_input "
            "is_hybrid_model mtp_use_repeated_layer enable_hyper_connections use_mup use_legacy_models"
        ).split(),
        (False,),
    ),
    "glu_linear_offset": (0.0,),
    **dict.fromkeys(
        (
            "activation_func_clamp_value no_rope_freq mrope_section window_size linear_attention_freq "
            "experimental_attention_variant moe_latent_size heterogeneous_layers_config_path "
            "heterogeneous_layers_config_encoded_json hybrid_override_pattern hybrid_layer_pattern "
            "mtp_hybrid_override_pattern spec"
        ).split(),
        (),
    ),
    "softmax_type": ("vanilla",),
}
"""Argument -> its values, in addition to None, that leave the model as it is here. Others make another model."""


_ROPE_NOT_THERE = (
    "attention_factor yarn_correction_range_round_to_int low_freq_factor high_freq_factor short_factor long_factor"
).split()
"""Settings of the rotary embedding that Megatron-LM has no argument for."""
_FACTORS_NOT_THERE = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
"""Granite's, of which it has none either."""
_LLAMA3 = {
    **{"rope_type": "llama3", "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""What --use-rope-scaling is there."""
_READ_BY: dict[str, Callable[[Run], bool]] = {
    "moe_": lambda run: run.moe.num_experts is not None,
    "moe_router_group_score": lambda run: False,  # Megatron-LM has no such argument, and one such score
    **dict.fromkeys(
        ("rope_type", "kv_lora_rank", "qk_head_dim", "qk_pos", "v_head"), lambda run: run.model.multi_latent_attention
    ),
    **dict.fromkeys(ROPE_SETTINGS["yarn"], lambda run: run.model.rope_type == "yarn"),
    **dict.fromkeys((*_ROPE_NOT_THERE, *_FACTORS_NOT_THERE), lambda run: False),
}
"""Beginnings of settings -> whether a model reads these."""


def run_of(args: Mapping[str, Any], given: Mapping[str, Any], rows: int, where: str) -> tuple[Run, list[str]]:
    """Return the run of a checkpoint's arguments, without the dtypes of its weights, and notes for the user.

    given: settings that go before the checkpoint's, by field. rows: of the embedding table, as stored. where: the
    checkpoint, as messages name it. Raises ConfigError: the model is none of those here; each argument is named.
    """
    fields = all_fields()
    args = {**args, **_stretched(args)}
    flat: dict[str, Any] = {}
    problems: list[str] = []
    for name in (*architecture_keys(), *_ALSO_TAKEN):
        if name in given or name in ELSEWHERE:
            continue
        value = _plain(name, next((args[known] for known in _names(name) if args.get(known) is not None), None))
        if value is None:
            continue
        try:
            flat[name] = from_file(fields[name], value, fields[name].flag)
        except ConfigError as error:
            row = megatron_flags.row_for(fields[name].flag, [str(value)])
            if row is not None and row.values:
                error = ConfigError(f"{error}: {row.reason}")
            problems.append(str(error))
    for name, neutral in ELSEWHERE.items():
        value = _plain(name, args.get(name))
        if value is None or value in neutral:
            continue
        flag, reason = f"--{name.replace('_', '-')}", "models with it are not converted between the two"
        row = megatron_flags.row_for(flag, [str(value)])
        if row is not None and row.answer == "refused":
            reason = row.reason
        problems.append(f"{flag} {value}: {reason}")
    if problems:
        raise ConfigError(listing(f"{where}: is a model that is not here, by its arguments:", problems))
    notes, size = [], given.get("vocab_size", flat.get("vocab_size"))
    if size is None:
        size = flat["vocab_size"] = rows
        notes.append(
            f"{where}: does not say how many of its {rows} rows are tokens: all are; --vocab-size says it, and the "
            "rest then take no part in the softmax"
        )
    if size > rows:
        raise ConfigError(f"--vocab-size {size}: {where} has {rows} rows of tokens, fewer than that")
    flat |= {**given, "padded_vocab_size": rows}
    missing = [name for name in architecture_keys() if name not in given and args.keys().isdisjoint(_names(name))]
    closed = frozenset(name for name, field in fields.items() if field.section not in ("model", "moe"))
    flat, _ = megatron_settings.taken(flat, closed)
    flat, ignored = megatron_settings.as_megatron_reads(flat)
    of_model = {*architecture_keys(), *_ALSO_TAKEN, "padded_vocab_size", *given}
    run = build({name: value for name, value in flat.items() if name in of_model})
    if run.model.add_bias_linear:
        raise ConfigError(
            f"{where}: --add-bias-linear: models with biases in all linear layers are not converted; "
            "--disable-bias-linear models are, with --add-qkv-bias too"
        )
    if not run.model.swiglu:
        raise ConfigError(f"{where}: --no-swiglu: models without gated layers are not converted; those of --swiglu are")
    try:
        check_model(run, 1)
    except ConfigError as error:
        raise ConfigError(f"{where}: by its arguments: {error}") from None
    notes += [*ignored, *_defaults_taken(run, missing, where)]
    if run.model.multi_latent_attention and run.model.norm_epsilon != _LATENT_EPSILON:
        notes.append(
            f"--norm-epsilon {run.model.norm_epsilon}: the norms of the latents have {_LATENT_EPSILON} here, so that "
            "logits differ by a little from Megatron-LM's"
        )
    return run, notes


def _stretched(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of the rotary frequencies that arguments of grouped-query attention stretch."""
    if args.get("multi_latent_attention"):
        return {}
    if args.get("use_rope_scaling"):
        return {**_LLAMA3, "rotary_scaling_factor": args.get("rope_scaling_factor") or 8.0}
    factor = args.get("rotary_seq_len_interpolation_factor") or 1
    return {} if factor == 1 else {"rope_type": "linear", "rotary_scaling_factor": factor}


def stretched_there(run: Run) -> dict[str, Any] | None:
    """Return the arguments that stretch a model's rotary frequencies; None if Megatron-LM has none for its kind."""
    model, kind = run.model, run.model.rope_type
    found: dict[str, Any] = {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None}
    if kind == "rope" or model.multi_latent_attention:
        as_there = model.attention_factor is None and model.yarn_correction_range_round_to_int
        return found if as_there else None
    found |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if kind == "linear":
        return {**found, "rotary_seq_len_interpolation_factor": model.rotary_scaling_factor}
    if kind == "llama3" and all(getattr(model, name) == value for name, value in _LLAMA3.items()):
        return {**found, "use_rope_scaling": True, "rope_scaling_factor": model.rotary_scaling_factor}
    return None


def _names(field: str) -> tuple[str, ...]:
    return (field, *_OTHER_NAMES.get(field, ()))


def _plain(name: str, value: Any) -> Any:
    """Return an argument as our setting has it: of a member of an enumeration its value."""
    arguments = getattr(value, "arguments", None)
    if isinstance(arguments, tuple) and len(arguments) == 1:
        value = arguments[0]
    if name == "moe_layer_freq" and isinstance(value, (list, tuple)):
        return f"[{','.join(map(str, value))}]"
    if name == "moe_layer_freq" and isinstance(value, str) and re.fullmatch(r"\d+", value):
        return int(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def _defaults_taken(run: Run, missing: list[str], where: str) -> list[str]:
    """Return a note with the settings that the arguments, of another release, do not have, where the model reads them.

    What is None or off by default is a part that such a model does not have.
    """
    unread = tuple(prefix for prefix, is_read in _READ_BY.items() if not is_read(run))
    values, taken = flatten(run), []
    for name in missing:
        if values[name] not in (None, False) and not name.startswith(unread) and name not in ELSEWHERE:
            taken.append(all_fields()[name].typed(values[name]))
    if not taken:
        return []
    return [
        f"{where}: its arguments do not have {', '.join(taken)}: these DEFAULTS ARE TAKEN; flags given to the "
        "conversion go before them"
    ]


# ---- The optimizer: step counts and groups of weights. Its tensors are mapped by their names.
#
# Learning rate, betas and epsilon are settings of a run: the groups carry them, and loading replaces them here by the
# run's own.

STATE = "optimizer.state."
MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "param"
SETTINGS = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
"""Settings that the groups of weights carry. Megatron-LM trains on with the betas and the epsilon of a checkpoint."""
WITHOUT = "add --no-optim to convert the weights alone"


def optimizer_keys(weights: Mapping[str, Any], fp32_state: frozenset[str], *, half: bool) -> dict[str, Any]:
    """Return what our optimizer has for a model's weights, by key, with the weights' values.

    An fp32 run has no main weights besides its weights.
    """
    found = {}
    for kind in (MAIN, *MOMENTS):
        for key, value in weights.items():
            if key not in fp32_state and (half or kind != MAIN):
                found[f"{STATE}{kind}.{key}"] = value
    return found


def optimizer_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `SETTINGS` that arguments or a configuration have. Raises ConfigError: one is no number."""
    fields = all_fields()
    found = {}
    for name in SETTINGS:
        if values.get(name) is not None:
            found[name] = from_file(fields[name], values[name], fields[name].flag)
    return found


def updates_of(common: Mapping[str, Any], where: str) -> int:
    """Return how many updates the optimizer has made. Raises ConfigError: its groups do not say it, or disagree."""
    steps = set(_updates(common.get("optimizer")))
    if len(steps) != 1:
        shown = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError(f"{where}: its optimizer has no one number of updates (found: {shown}); {WITHOUT}")
    return steps.pop()


def _updates(state: Any) -> Iterator[int]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            if key in ("step", "common_step"):
                number = value.item() if hasattr(value, "item") else value
                if isinstance(number, (int, float)) and number == int(number):
                    yield int(number)
            else:
                yield from _updates(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _updates(value)


def plain_values(run: Run, step: int) -> dict[Any, Any]:
    """Return the plain values of our optimizer: one for all weights but the routed experts', one for these."""

    def group(*, experts: bool, decays: bool) -> dict[str, Any]:
        options = run.optimizer
        return {
            "is_expert_parallel": experts,
            "default_config": True,
            "wd_mult": float(decays),
            "lr_mult": 1.0,
            "is_decoupled_lr": False,
            "max_lr": options.lr,
            "min_lr": options.min_lr,
            "lr": options.lr,
            "betas": (options.adam_beta1, options.adam_beta2),
            "eps": options.adam_eps,
            "weight_decay": options.weight_decay * decays,
            "step": step,
        }

    dense = [group(experts=False, decays=True), group(experts=False, decays=False)]
    first = {"optimizer": {"param_groups": dense}}
    if not any(run.derived.moe_layer_pattern):
        return first
    return {0: first, 1: {"optimizer": {"param_groups": [group(experts=True, decays=True)]}}}


def schedule_after(run: Run, steps: int) -> dict[str, Any]:
    """Return a schedule's state after a number of steps; all else of it is a setting, which the next run has."""
    options = run.optimizer
    return {
        "max_lr": options.lr,
        "min_lr": options.min_lr,
        "lr_warmup_steps": 0,
        "num_steps": steps,
        "lr_decay_style": options.lr_decay_style,
        "lr_decay_steps": max(steps, 1),
        "start_wd": options.weight_decay,
        "end_wd": options.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": max(steps, 1),
    }


# ---- The other way: what Megatron-LM reads besides tensors.

RELEASE = "release"
_CONTENT = {
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}
"""How tensors are named, which Megatron-LM reads before it asks for them: layers by their number."""
_NORMS_NOT_THERE = {"qk_layernorm_across_heads", "reordered_norm"}
_NOT_THERE = frozenset(
    {
        "dsa_indexer_topk",
        *_FACTORS_NOT_THERE,
        "moe_router_group_score",
        "moe_router_norm_topk_prob",
        *_NORMS_NOT_THERE,
        *_ROPE_NOT_THERE,
    }
)
"""Settings that Megatron-LM has no argument for."""


@dataclass(frozen=True)
class Continued:
    """What a run goes on from besides its weights.

    iteration, consumed_samples: how far it had come. updates: of the optimizer. scheduler: our schedule's state, which
    counts iterations. batch: sequences of an iteration. experts_apart: whether experts are spread over ranks there, and
    then have an optimizer of their own.
    """

    iteration: int
    consumed_samples: int
    updates: int
    scheduler: Mapping[str, Any]
    batch: int
    experts_apart: bool


def common(run: Run, *, transformer_impl: str, half: str | None, continued: Continued | None) -> dict[str, Any]:
    """Return the plain values of a checkpoint that Megatron-LM loads, of a run or, without `continued`, weights alone.

    transformer_impl: whose layers it is to be loaded into. half: `bf16` or `fp16`, of the weights; None: fp32.
    """
    iteration = consumed_samples = 0
    if continued is not None:
        iteration, consumed_samples = continued.iteration, continued.consumed_samples
    there = {*architecture_keys()} - _NOT_THERE
    values = {name: value for name, value in flatten(run).items() if name in there}
    values |= {
        "layernorm_epsilon": run.model.norm_epsilon,
        "kv_channels": run.derived.head_size,
        "ffn_hidden_size": run.derived.ffn_hidden_size,
        "moe_ffn_hidden_size": None,
        "num_query_groups": run.derived.num_query_groups,
        "moe_layer_freq": 1,
        "moe_grouped_gemm": run.moe.num_experts is not None,
        "seq_length": run.model.seq_length,
        "max_position_embeddings": run.model.max_position_embeddings or run.model.seq_length,
        "make_vocab_size_divisible_by": run.model.make_vocab_size_divisible_by,
        "padded_vocab_size": run.model.padded_vocab_size,
        "add_position_embedding": True,
        **(stretched_there(run) or {}),
        "transformer_impl": transformer_impl,
        "bf16": half == "bf16",
        "fp16": half == "fp16",
        "ckpt_format": "torch_dist",
        "no_save_optim": continued is None,
        "no_save_rng": True,
        "iteration": iteration,
        "consumed_train_samples": consumed_samples,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    if run.moe.num_experts is not None:
        values["moe_ffn_hidden_size"] = run.derived.moe_ffn_hidden_size
        values["moe_layer_freq"] = list(run.derived.moe_layer_pattern)
    layout = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    values |= dict.fromkeys((*layout, "context_parallel_size", "world_size", "data_parallel_size"), 1)
    args = argparse.Namespace(**values)
    found = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    found["content_metadata"] = dict(_CONTENT)
    if continued is None:
        return found
    sharding = {"param_state_sharding_type": _CONTENT["distrib_optim_sharding_type"]}
    plain = plain_values(run, continued.updates)
    own: dict[Any, Any] = {**plain, **sharding}
    if 0 in plain:  # the second has the experts
        own = {number: {**plain[number], **sharding} for number in (0, 1)}
        if not continued.experts_apart:
            own = own[0]
    # The schedule's state counts sequences there.
    schedule, batch = dict(continued.scheduler), continued.batch
    if schedule.pop("in_samples", False):
        batch = 1
    for name in ("lr_warmup_steps", "lr_decay_steps", "wd_incr_steps"):
        schedule[name] *= batch
    begun = schedule.pop("begun", {"samples": 0})
    schedule["num_steps"] = continued.consumed_samples - begun["samples"]
    return {**found, "optimizer": own, "opt_param_scheduler": schedule}
