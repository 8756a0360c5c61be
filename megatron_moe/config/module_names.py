"""The parts of a model by name, from a run alone: modules, parameters, dtypes, and patterns that name them.

One record for each kind of module has its names, parameters, state and dtypes. The words of `--keep-fp32`, what a
module kept in fp32 emits, the state that is always fp32 and the printed precision contract follow from these records;
a test compares them with built models. A new kind of module is a record here, its class, and how its parameters are
split over tensor-parallel ranks (`model/initialize.py`).

Names are those of the whole model, as in a checkpoint: layers are numbered from 0 over all pipeline stages. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from megatron_moe.config.model_flags import LATENT, QUANTILE
from megatron_moe.config.schema import Run

Condition = Callable[[Run], bool]

# Dtypes: fp32, fp64, bf16, fp16, int64, int32, or a word that stands for one of them in a given run

SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
SHORT |= {"int64": "int64", "int32": "int32"}
NONE = "-"
MODEL, RESIDUAL, ROUTER, GRADIENTS, EVALUATION = "{model}", "{residual}", "{router}", "{gradients}", "{evaluation}"
PRODUCTS, GRADIENTS_OF_PRODUCTS = "{products}", "{gradients_of_products}"
"""The dtypes in which a part multiplies, and multiplies the gradients of its outputs: OWN without FP8."""
OWN = "{own}"
"""The dtype of a part's own weights: the model's, or fp32 where `--keep-fp32` names the part."""
INPUT = "{input}"
"""The dtype of a module's first floating input."""


def dtype_words(run: Run) -> dict[str, str]:
    """Return the dtype that each word stands for in this run, without those that depend on the module."""
    model = SHORT[run.derived.params_dtype_name]
    return {
        "model": model,
        "residual": "fp32" if run.precision.fp32_residual_connection else model,
        "router": run.moe.moe_router_dtype,
        "gradients": "fp32" if run.derived.grads_in_fp32 else model,
        "evaluation": "fp32" if run.precision.eval_in_fp32 else model,
    }


def _always(run: Run) -> bool:
    return True


@dataclass(frozen=True)
class TensorClass:
    """One line of the precision contract; "-" is an empty entry.

    stored: between steps. computed: in arithmetic, before the result is rounded to the stored dtype or passed
    on. accumulated: sums on one rank. reduced: sums over ranks. saved: in a checkpoint. when: in which runs.
    """

    name: str
    stored: str
    computed: str = NONE
    accumulated: str = NONE
    reduced: str = NONE
    saved: str = NONE
    note: str = ""
    when: Condition = _always


def _weights(name: str, *, computed: str = OWN, accumulated: str = "fp32", reduced: str = NONE) -> TensorClass:
    """Return a class of weights. A product adds in fp32 inside the kernel and rounds to the dtype it computes in."""
    return TensorClass(name, OWN, computed, accumulated, reduced, OWN)


# Kinds of modules, in the order of the forward pass


@dataclass(frozen=True, eq=False)
class ModelPart:
    """One kind of module of the model.

    parameters: the module's own parameters, by name, and the runs in which they exist.
    when: the runs in which a module that may contain this part does.
    alias: the word of `--keep-fp32` that names all modules of this kind.
    tensors: its lines of the precision contract; the first is that of its weights and of those inside it.
    state: buffers that stay fp32 under casts, and their lines of the contract, which say when they exist.
    fp8: the word of `--fp8-modules` for its products: its own, or those of the linear layers inside it.
    emits: as an fp32 island, the dtype of what it returns; OWN leaves it in fp32, ROUTER is for a router, which casts
        for itself. Its arguments are the run and the modules that are kept.
    parts: the modules inside, by name.
    """

    parameters: Mapping[str, Condition] = field(default_factory=dict)
    when: Condition = _always
    alias: str | None = None
    tensors: tuple[TensorClass, ...] = ()
    state: Mapping[str, TensorClass] = field(default_factory=dict)
    fp8: str | None = None
    emits: Callable[[Run, tuple[str, ...]], str] = lambda run, kept: INPUT
    parts: Mapping[str, ModelPart] = field(default_factory=dict)


WEIGHT: Mapping[str, Condition] = {"weight": _always}


def _is_latent(run: Run) -> bool:
    return run.model.multi_latent_attention


def _has_query_latent(run: Run) -> bool:
    return _is_latent(run) and run.model.q_lora_rank is not None


def _norms_query_latent(run: Run) -> bool:
    return run.model.qk_layernorm and _has_query_latent(run)


def _norms_heads(run: Run, after_rotation: bool) -> bool:
    model = run.model
    return model.qk_layernorm and not _is_latent(run) and model.qk_layernorm_after_rotation == after_rotation


def _norm_emits(run: Run, kept: tuple[str, ...]) -> str:
    """Return the model's dtype if a norm reads an fp32 residual stream, otherwise that of its input."""
    return MODEL if run.precision.fp32_residual_connection else INPUT


NORM = ModelPart(
    WEIGHT,
    alias="norms",
    tensors=(replace(_weights("norms", computed="fp32"), note="rounded once"),),
    emits=_norm_emits,
)
FINAL_NORM = replace(NORM, emits=lambda run, kept: OWN if "output_layer" in kept else _norm_emits(run, kept))


def _is_biased(run: Run) -> bool:
    return run.model.add_bias_linear


LINEAR = ModelPart({**WEIGHT, "bias": _is_biased})

EMBEDDING = ModelPart(
    alias="embedding",
    tensors=(_weights("embedding"), TensorClass("residual stream", RESIDUAL, RESIDUAL)),
    emits=lambda run, kept: RESIDUAL,  # it starts the stream
    parts={"word_embeddings": ModelPart(WEIGHT, emits=lambda run, kept: RESIDUAL)},
)

ATTENTION = ModelPart(
    alias="attention",
    fp8="attention",
    tensors=(
        _weights("attention weights", computed=PRODUCTS, reduced=OWN),
        TensorClass("attention softmax", NONE, "fp32", "fp32"),
        TensorClass(
            "mean squares of all heads",
            NONE,
            "fp32",
            "fp32",
            "fp32",
            note="reduced: over TP ranks",
            when=lambda run: run.model.qk_layernorm_across_heads,
        ),
        TensorClass(
            "keys and values over CP ranks",
            OWN,
            reduced="fp32",
            note="reduced: their gradients",
            when=lambda run: run.parallel.context_parallel_size > 1 and run.derived.mla_cp_exchange != LATENT,
        ),
        TensorClass(
            "latents over CP ranks",
            OWN,
            reduced="fp32",
            note="reduced: their gradients",
            when=lambda run: run.derived.mla_cp_exchange == LATENT,
        ),
    ),
    parts={
        # grouped-query attention
        "linear_qkv": ModelPart(
            {**WEIGHT, "bias": lambda run: run.model.add_bias_linear or run.model.add_qkv_bias},
            when=lambda run: not _is_latent(run),
        ),
        # multi-latent attention
        "linear_q_proj": ModelPart(WEIGHT, when=lambda run: _is_latent(run) and not _has_query_latent(run)),
        "linear_q_down_proj": ModelPart(WEIGHT, when=_has_query_latent),
        "linear_q_up_proj": ModelPart(WEIGHT, when=_has_query_latent),
        "linear_kv_down_proj": ModelPart(WEIGHT, when=_is_latent),
        "linear_kv_up_proj": ModelPart(WEIGHT, when=_is_latent),
        "kv_layernorm": replace(NORM, when=lambda run: _is_latent(run) and run.model.qk_layernorm),
        # both
        "q_layernorm": replace(NORM, when=lambda run: _norms_heads(run, False) or _norms_query_latent(run)),
        "k_layernorm": replace(NORM, when=lambda run: _norms_heads(run, False)),
        "core_attention": ModelPart(
            {"softmax_offset": lambda run: run.model.softmax_type == "learnable"},
            alias="softmax",
            parts={
                "q_layernorm": replace(NORM, when=lambda run: _norms_heads(run, True)),
                "k_layernorm": replace(NORM, when=lambda run: _norms_heads(run, True)),
            },
        ),
        "linear_proj": LINEAR,
    },
)

DENSE_MLP = ModelPart(
    fp8="mlp",
    tensors=(_weights("dense MLP weights", computed=PRODUCTS, reduced=OWN),),
    parts={"linear_fc1": LINEAR, "linear_fc2": LINEAR},
)

_COUNTS = TensorClass("token counts", "fp32", "int64", "fp32", "int64", note="whole numbers, exact; 0 between steps")
_DROPPED = replace(
    _COUNTS,
    name="dropped choices",
    note="as the token counts, next to them",
    when=lambda run: run.moe.moe_expert_capacity_factor is not None,
)
_TOKENS = TensorClass("counted tokens", "int64", "int64", "int64", "int64", note="of a layer; 0 between steps")
_DIFFERENCES = TensorClass(
    "histogram of quantiles",
    "int32",
    "int64",
    "int64",
    "int64",
    note="with quantile_balancing; 0 between steps",
    when=lambda run: QUANTILE in run.moe.moe_router_load_balancing_type,
)
_BIAS = TensorClass(
    "expert_bias",
    "fp32",
    "fp32",
    saved="fp32",
    note="sign of the step in int64; its quantile in fp64",
    when=lambda run: run.moe.moe_router_enable_expert_bias,
)

TOP_K_ROUTER = ModelPart(
    {**WEIGHT, "bias": _is_biased},
    alias="router",
    tensors=(
        _weights("router weight", computed=ROUTER, accumulated=ROUTER),
        TensorClass("router logits", ROUTER, ROUTER, ROUTER),
        TensorClass("router scores", ROUTER, ROUTER, ROUTER),
        TensorClass("router probs", ROUTER, ROUTER, ROUTER),
        TensorClass("auxiliary losses", ROUTER, ROUTER, ROUTER, "fp64"),
    ),
    state={
        "local_tokens_per_expert": _COUNTS,
        "local_dropped_per_expert": _DROPPED,
        "local_num_tokens": _TOKENS,
        "local_differences": _DIFFERENCES,
        "expert_bias": _BIAS,
    },
    emits=lambda run, kept: ROUTER,
)


EXPERTS = ModelPart(
    {"weight1": _always, "weight2": _always, "bias1": _is_biased, "bias2": _is_biased},
    alias="experts",
    fp8="experts",
    tensors=(
        _weights("expert weights", computed=PRODUCTS, reduced="fp32"),
        TensorClass("experts' activation", MODEL, "fp32", note="rounded once"),
        TensorClass("combine of the experts", MODEL, "fp32", "fp32", "fp32", note="rounded once"),
    ),
)

SHARED_EXPERTS = replace(
    DENSE_MLP,
    parameters={"gate_weight": lambda run: run.moe.moe_shared_expert_gate},
    when=lambda run: bool(run.moe.moe_shared_expert_intermediate_size),
    alias="shared_experts",
    fp8="shared_experts",
    tensors=(_weights("shared expert weights", computed=PRODUCTS, reduced=OWN),),
)

MOE_MLP = ModelPart(parts={"router": TOP_K_ROUTER, "experts": EXPERTS, "shared_experts": SHARED_EXPERTS})


def _layer(mlp: ModelPart) -> ModelPart:
    before = replace(NORM, when=lambda run: not run.model.reordered_norm)
    behind = replace(NORM, when=lambda run: run.model.reordered_norm)
    attention = {"input_layernorm": before, "self_attention": ATTENTION, "post_self_attn_layernorm": behind}
    return ModelPart(parts={**attention, "pre_mlp_layernorm": before, "mlp": mlp, "post_mlp_layernorm": behind})


DENSE_LAYER, MOE_LAYER = _layer(DENSE_MLP), _layer(MOE_MLP)

OUTPUT_LAYER = ModelPart(
    WEIGHT,
    alias="output_layer",
    tensors=(
        _weights("output layer"),
        TensorClass("loss", "fp32", "fp32", "fp32", "fp64", note="sums and token counts over ranks in fp64"),
    ),
    emits=lambda run, kept: OWN,  # the loss alone reads logits, in fp32
)

# Its transformer layer is like the model's last, and is added by `placed`.
PREDICTION = ModelPart(
    parts={
        "enorm": NORM,
        "hnorm": NORM,
        "eh_proj": ModelPart(
            WEIGHT,
            tensors=(
                _weights("merge of further predictions", reduced=OWN),
                TensorClass("further losses", "fp32", "fp32", "fp32", "fp64", note="logged sums and counts in fp64"),
            ),
        ),
        "final_layernorm": FINAL_NORM,
    }
)

# The model

MODEL_PARTS = (EMBEDDING, DENSE_LAYER, MOE_LAYER, FINAL_NORM, OUTPUT_LAYER, PREDICTION)
"""The outermost parts, in the order of the precision contract's lines."""


def placed(run: Run) -> Iterator[tuple[str, ModelPart]]:
    """Yield the outermost modules of a run's model: name in the whole model, and kind."""
    pattern = run.derived.moe_layer_pattern
    kinds = [MOE_LAYER if is_moe else DENSE_LAYER for is_moe in pattern]
    yield "embedding", EMBEDDING
    for layer, kind in enumerate(kinds):
        yield f"decoder.layers.{layer}", kind
    yield "decoder.final_layernorm", FINAL_NORM
    for depth in range(run.model.mtp_num_layers or 0):
        yield f"mtp.layers.{depth}", PREDICTION
        yield f"mtp.layers.{depth}.transformer_layer", kinds[-1]
    yield "output_layer", OUTPUT_LAYER


def every_part(parts: Iterable[ModelPart] = MODEL_PARTS) -> Iterator[ModelPart]:
    """Yield every kind of module, each before those inside it; one that is in several is yielded several times."""
    for part in parts:
        yield part
        yield from every_part(part.parts.values())


# Modules and parameters by name


def parts(run: Run) -> dict[str, ModelPart]:
    """Return every module by name, with its kind; a module comes before those inside it.

    These are the modules that have weights or contain one that has, and core attention. The chain of layers as a whole
    is not among them: each layer computes for itself.
    """

    def inside(name: str, part: ModelPart) -> Iterator[tuple[str, ModelPart]]:
        yield name, part
        for child, kind in part.parts.items():
            if kind.when(run):
                yield from inside(f"{name}.{child}", kind)

    return {name: part for outermost in placed(run) for name, part in inside(*outermost)}


def modules(run: Run) -> dict[str, tuple[str, ...]]:
    """Return every module with the names of its own parameters, without those of modules inside it."""
    return {
        name: tuple(parameter for parameter, when in part.parameters.items() if when(run))
        for name, part in parts(run).items()
    }


def aliases(run: Run) -> dict[str, tuple[str, ...]]:
    """Return the words of `--keep-fp32` that name something in this model, and the modules they stand for."""
    found: dict[str, tuple[str, ...]] = {}
    for name, part in parts(run).items():
        if part.alias is not None:
            found[part.alias] = (*found.get(part.alias, ()), name)
    first, last = "decoder.layers.0", f"decoder.layers.{run.model.num_layers - 1}"
    return {**found, "first_layer": (first,), "last_layer": (last,)}


def kept_in_fp32(run: Run) -> tuple[str, ...]:
    """Return the modules that `--keep-fp32` keeps in fp32, outermost only: modules inside one are kept with it.

    A pattern names modules or parameters. For a parameter it keeps the parameter's module, because a module computes in
    one dtype.
    """
    chosen: set[str] = set()
    for pattern in run.precision.keep_fp32 or ():
        chosen.update(matches(run, pattern))
    return tuple(name for name in (parts(run) if chosen else ()) if name in chosen and not is_inside(name, chosen))


def matches(run: Run, pattern: str) -> tuple[str, ...]:
    """Return the modules that one pattern of `--keep-fp32` names, which may be none."""
    if pattern in (words := aliases(run)):
        return words[pattern]
    return tuple(
        name
        for name, own in modules(run).items()
        if fnmatchcase(name, pattern) or any(fnmatchcase(f"{name}.{parameter}", pattern) for parameter in own)
    )


def patterns_of(run: Run, parameters: Collection[str]) -> tuple[str, ...]:
    """Return patterns of `--keep-fp32` that keep the modules of these parameters, and no others, in fp32."""
    owners = {f"{name}.{parameter}": name for name, own in modules(run).items() for parameter in own}
    chosen = {owners[name] for name in parameters}
    found: list[str] = []
    covered: set[str] = set()
    names = sorted(chosen)
    for pattern in dict.fromkeys((*aliases(run), *(f"*.{name.rpartition('.')[2]}" for name in names), *names)):
        named = set(matches(run, pattern))
        inside = {name for name in owners.values() if name in named or is_inside(name, named)}
        if inside - covered and inside <= chosen:
            found.append(pattern)
            covered |= inside
    if "embedding" in found and not run.model.untie_embeddings_and_output_weights:
        found.append("output_layer")
    return tuple(found)


def parameters_of(run: Run, pattern: str) -> tuple[str, ...]:
    """Return the parameters that a pattern of `--freeze` names, if any; a module stands for all inside it."""
    named = set(aliases(run).get(pattern, ()))
    own = modules(run)
    named.update(name for name in own if fnmatchcase(name, pattern))
    every = (f"{name}.{parameter}" for name, parameters in own.items() for parameter in parameters)
    return tuple(name for name in every if fnmatchcase(name, pattern) or is_inside(name, named))


def frozen(run: Run) -> frozenset[str]:
    """Return the parameters that `--freeze` names, by their names in the whole model."""
    patterns = run.optimizer.freeze or ()
    return frozenset(name for pattern in patterns for name in parameters_of(run, pattern))


def at_ends(names: Collection[str]) -> tuple[bool, bool]:
    """Return whether there are names of the embedding, and of the output layer."""
    return any(name.startswith("embedding") for name in names), any(name.startswith("output_layer") for name in names)


def near_names(run: Run, pattern: str) -> list[str]:
    """Return up to three names or words similar to a pattern without a match; all words if none is."""
    words = list(aliases(run))
    names = list(dict.fromkeys([*words, *parts(run)]))  # the output layer is a word and a part
    found = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    last = pattern.rsplit(".", 1)[-1].strip("*")
    tails = sorted({name.rsplit(".", 1)[-1] for name in names if not name[-1].isdigit()})
    return found or [f"*.{tail}" for tail in difflib.get_close_matches(last, tails, n=3, cutoff=0.5)] or words


def multiplied_in_fp8(run: Run) -> tuple[str, ...]:
    """Return the modules whose products are in FP8: routed experts and single linear layers."""
    precision, found = run.precision, []
    if precision.fp8_format is None:
        return ()
    every, in_bf16 = parts(run), {f"decoder.layers.{layer}" for layer in run.derived.bf16_layers}
    for name, part in every.items():
        if part.fp8 not in precision.fp8_modules or is_inside(name, in_bf16):
            continue
        linear = [f"{name}.{child}" for child in part.parts if child.startswith("linear_")]
        found += [child for child in linear if child in every] if part.parts else [name]
    return tuple(found)


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Return whether a module or parameter is inside one of these modules."""
    path = name.split(".")
    return any(".".join(path[:length]) in modules for length in range(1, len(path)))


# Parameter groups: multiples of the learning rate and of the weight decay
#
# `--lr-mult` and `--weight-decay-mult` take words PATTERN=X, with the patterns of `--freeze`; of several that match a
# parameter the last one decides. `--decoupled-lr` gives the tables of the vocabulary a schedule of their own, which
# `--lr-mult` multiplies as it does the other one.

MULTIPLES = ("lr_mult", "weight_decay_mult")
"""The fields whose words are PATTERN=X."""
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
"""The parameters with `--decoupled-lr`, Megatron-LM's `is_embedding_or_output_parameter`; where tied, one weight."""


@dataclass(frozen=True)
class GroupSettings:
    """What sets a parameter apart from others.

    lr_mult: its rate is this multiple of its schedule's. weight_decay_mult: its decay, as a multiple of
    `--weight-decay`; None leaves it to the rule that norms and biases are not decayed. is_decoupled: its schedule is
    that of `--decoupled-lr`.
    """

    lr_mult: float = 1.0
    weight_decay_mult: float | None = None
    is_decoupled: bool = False


def group_words(run: Run, field: str) -> tuple[str, ...]:
    """Return the words of one of `MULTIPLES`, none where it is not given."""
    return getattr(run.optimizer, field) or ()


def parameters_of_group(run: Run, pattern: str) -> frozenset[str]:
    """Return the parameters that a pattern names; a tied table has two names, and either one names both."""
    found = set(parameters_of(run, pattern))
    if not run.model.untie_embeddings_and_output_weights and found.intersection(TABLES):
        found.update(TABLES)
    return frozenset(found)


def deciding_words(run: Run, field: str) -> dict[str, str]:
    """Return parameter -> the last word of one of `MULTIPLES` that matches it; frozen ones are in no group."""
    found: dict[str, str] = {}
    for word in group_words(run, field):
        found.update(dict.fromkeys(parameters_of_group(run, word.rpartition("=")[0]), word))
    left_out = frozen(run)
    return {name: word for name, word in found.items() if name not in left_out}


def group_settings(run: Run) -> dict[str, GroupSettings]:
    """Return the settings of each parameter that has any of its own, by its name in the whole model."""
    rates, decays = (deciding_words(run, field) for field in MULTIPLES)
    tables = TABLES if run.optimizer.decoupled_lr is not None else ()
    found = {name: GroupSettings(is_decoupled=name in tables) for name in (*rates, *decays, *tables)}
    for name, word in rates.items():
        found[name] = replace(found[name], lr_mult=float(word.rpartition("=")[2]))
    for name, word in decays.items():
        found[name] = replace(found[name], weight_decay_mult=float(word.rpartition("=")[2]))
    return found


def decoupled_range(run: Run) -> tuple[float, float]:
    """Return the peak and the least rate of the schedule of `--decoupled-lr`, which is given."""
    options = run.optimizer
    assert options.decoupled_lr is not None
    least = options.min_lr if options.decoupled_min_lr is None else options.decoupled_min_lr
    return options.decoupled_lr, least
