"""Maps the tensors of a Hugging Face folder to ours, by one table per family that is read in both directions.

A row names a tensor of ours, the tensors of a folder that it is made of, the transform between them, and the models
that have it. Names are relative to the layer's prefix: `decoder.layers.L.` here, `model.layers.L.` there; a layer of
multi-token prediction is layer N + i there and `mtp.layers.i.transformer_layer.` here. `mapping` applies the rows to a
model; importing, exporting, training from a folder and naming gradients all use its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as Named
from dataclasses import dataclass

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run
from megatron_moe.hf.families import TensorNames
from megatron_moe.hf.transforms import (
    Copy,
    ExpertDown,
    ExpertGateUp,
    GateThenUp,
    QueryKeyValue,
    Shape,
    Transform,
    Vocabulary,
)


@dataclass(frozen=True)
class MappedBlock:
    """A block of one of our tensors and the tensors of a folder that it is made of.

    key: our tensor, as checkpoints name it. start: the block's first element in it; zeros if the block is all of it.
    hf: names in the folder, in the transform's order. fp32: float32 on both sides, whatever the model's dtype.
    """

    key: str
    start: Shape
    hf: tuple[str, ...]
    transform: Transform
    fp32: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether it is a weight of attention, an MLP or an expert: those that DeepSeek multiplies and stores in FP8.

        Others are embeddings, the output layer, norms, routers, gates, biases and the merging of multi-token
        prediction.
        """
        linear = ".linear_" in self.key and self.key.endswith(".weight")
        return linear or self.key.endswith((".experts.weight1", ".experts.weight2"))


@dataclass(frozen=True)
class Mapping:
    """The mapping of a whole model.

    pieces: they cover each of our tensors without overlap, and each of a folder's tensors is in one of them.
    shapes: the shapes of our tensors, by key.
    copies: names that a folder may contain in addition, each with the name of the tensor that it has to be equal to: a
        tied output layer, and the tables that the layers of multi-token prediction share with the model.
    """

    pieces: tuple[MappedBlock, ...]
    shapes: dict[str, Shape]
    copies: dict[str, str]

    @property
    def by_place(self) -> dict[tuple[str, Shape], MappedBlock]:
        """The pieces by our tensor and their first element in it."""
        return {(piece.key, piece.start): piece for piece in self.pieces}

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        """The shapes of the folder's tensors, by name."""
        return {name: shape for piece in self.pieces for name, shape in zip(piece.hf, piece.transform.hf_shapes)}


@dataclass(frozen=True)
class MappingRule:
    """A row of a table. `when` and `make` take the run; {e} in names of experts is the expert's number."""

    native: str
    hf: tuple[str, ...]
    make: Callable[[Run], Transform]
    when: Callable[[Run], bool] = lambda run: True
    fp32: bool = False


def _hidden(run: Run) -> Transform:
    return Copy((run.model.hidden_size,))


def _latent(run: Run) -> bool:
    return run.model.multi_latent_attention


def _low_rank_query(run: Run) -> bool:
    return _latent(run) and run.model.q_lora_rank is not None


def _grouped(run: Run) -> bool:
    return not _latent(run)


def _heads_normed(run: Run) -> bool:
    return _grouped(run) and run.model.qk_layernorm


def _latent_normed(run: Run) -> bool:
    return _latent(run) and run.model.qk_layernorm


def _query_width(run: Run) -> int:
    return run.model.num_attention_heads * (run.model.qk_head_dim + run.model.qk_pos_emb_head_dim)


def _key_value_width(run: Run) -> int:
    return run.model.num_attention_heads * (run.model.qk_head_dim + run.model.v_head_dim)


def _packed(run: Run, width: int | None) -> Transform:
    return QueryKeyValue(run.model.num_attention_heads, run.derived.num_query_groups, run.derived.head_size, width)


def _attention_output(run: Run) -> Transform:
    model = run.model
    per_head = model.v_head_dim if _latent(run) else run.derived.head_size
    return Copy((model.hidden_size, model.num_attention_heads * per_head))


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

ATTENTION = (
    MappingRule("input_layernorm.weight", ("input_layernorm.weight",), _hidden),
    MappingRule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), _hidden),
    MappingRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), _attention_output),
    # grouped-query attention
    MappingRule(
        "self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in _QKV),
        lambda run: _packed(run, run.model.hidden_size),
        _grouped,
    ),
    MappingRule(
        "self_attention.linear_qkv.bias",
        tuple(f"{name}.bias" for name in _QKV),
        lambda run: _packed(run, None),
        lambda run: _grouped(run) and run.model.add_qkv_bias,
    ),
    MappingRule(
        "self_attention.q_layernorm.weight",
        ("self_attn.q_norm.weight",),
        lambda run: Copy((run.derived.head_size,)),
        _heads_normed,
    ),
    MappingRule(
        "self_attention.k_layernorm.weight",
        ("self_attn.k_norm.weight",),
        lambda run: Copy((run.derived.head_size,)),
        _heads_normed,
    ),
    # latent attention
    MappingRule(
        "self_attention.linear_q_proj.weight",
        ("self_attn.q_proj.weight",),
        lambda run: Copy((_query_width(run), run.model.hidden_size)),
        lambda run: _latent(run) and not _low_rank_query(run),
    ),
    MappingRule(
        "self_attention.linear_q_down_proj.weight",
        ("self_attn.q_a_proj.weight",),
        lambda run: Copy((run.model.q_lora_rank or 0, run.model.hidden_size)),
        _low_rank_query,
    ),
    MappingRule(
        "self_attention.q_layernorm.weight",
        ("self_attn.q_a_layernorm.weight",),
        lambda run: Copy((run.model.q_lora_rank or 0,)),
        lambda run: _low_rank_query(run) and _latent_normed(run),
    ),
    MappingRule(
        "self_attention.linear_q_up_proj.weight",
        ("self_attn.q_b_proj.weight",),
        lambda run: Copy((_query_width(run), run.model.q_lora_rank or 0)),
        _low_rank_query,
    ),
    MappingRule(
        "self_attention.linear_kv_down_proj.weight",
        ("self_attn.kv_a_proj_with_mqa.weight",),
        lambda run: Copy((run.model.kv_lora_rank + run.model.qk_pos_emb_head_dim, run.model.hidden_size)),
        _latent,
    ),
    MappingRule(
        "self_attention.kv_layernorm.weight",
        ("self_attn.kv_a_layernorm.weight",),
        lambda run: Copy((run.model.kv_lora_rank,)),
        _latent_normed,
    ),
    MappingRule(
        "self_attention.linear_kv_up_proj.weight",
        ("self_attn.kv_b_proj.weight",),
        lambda run: Copy((_key_value_width(run), run.model.kv_lora_rank)),
        _latent,
    ),
)

DENSE = (
    MappingRule(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        lambda run: GateThenUp(run.derived.ffn_hidden_size, run.model.hidden_size),
    ),
    MappingRule(
        "mlp.linear_fc2.weight",
        ("mlp.down_proj.weight",),
        lambda run: Copy((run.model.hidden_size, run.derived.ffn_hidden_size)),
    ),
)


def _has_shared(run: Run) -> bool:
    return run.moe.moe_shared_expert_intermediate_size is not None


def _shared_width(run: Run) -> int:
    return run.moe.moe_shared_expert_intermediate_size or 0


def moe_rows(names: TensorNames) -> tuple[MappingRule, ...]:
    """Return the rows of a MoE layer without the routed experts."""
    shared = names.shared
    return (
        MappingRule(
            "mlp.router.weight",
            (names.router,),
            lambda run: Copy((run.moe.num_experts or 0, run.model.hidden_size)),
        ),
        MappingRule(
            "mlp.router.expert_bias",
            (names.router.replace(".weight", ".e_score_correction_bias"),),
            lambda run: Copy((run.moe.num_experts or 0,)),
            lambda run: run.moe.moe_router_enable_expert_bias,
            fp32=True,
        ),
        MappingRule(
            "mlp.shared_experts.linear_fc1.weight",
            (f"{shared}gate_proj.weight", f"{shared}up_proj.weight"),
            lambda run: GateThenUp(_shared_width(run), run.model.hidden_size),
            _has_shared,
        ),
        MappingRule(
            "mlp.shared_experts.linear_fc2.weight",
            (f"{shared}down_proj.weight",),
            lambda run: Copy((run.model.hidden_size, _shared_width(run))),
            _has_shared,
        ),
        MappingRule(
            "mlp.shared_experts.gate_weight",
            (f"{shared.removesuffix('.')}_gate.weight",),
            lambda run: Copy((1, run.model.hidden_size)),
            lambda run: _has_shared(run) and run.moe.moe_shared_expert_gate,
        ),
    )


def expert_rows(names: TensorNames) -> tuple[MappingRule, ...]:
    """Return the rows of one routed expert, a block of the tensors of all experts of a layer."""
    gate, up, down = (f"{names.experts}{matrix}.weight" for matrix in names.matrices)
    return (
        MappingRule(
            "mlp.experts.weight1",
            (gate, up),
            lambda run: ExpertGateUp(run.derived.moe_ffn_hidden_size, run.model.hidden_size),
        ),
        MappingRule(
            "mlp.experts.weight2",
            (down,),
            lambda run: ExpertDown(run.derived.moe_ffn_hidden_size, run.model.hidden_size),
        ),
    )


# The tensors of a depth of multi-token prediction, except those of its transformer layer.
PREDICTION = (
    MappingRule("enorm.weight", ("enorm.weight",), _hidden),
    MappingRule("hnorm.weight", ("hnorm.weight",), _hidden),
    MappingRule(
        "eh_proj.weight", ("eh_proj.weight",), lambda run: Copy((run.model.hidden_size, 2 * run.model.hidden_size))
    ),
    MappingRule("final_layernorm.weight", ("shared_head.norm.weight",), _hidden),
)
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def mapping(run: Run, names: TensorNames) -> Mapping:
    """Return the mapping of a model.

    Args:
        run: the model; `vocab_size` is set. Layout and dtype influence the padding alone.
        names: the names of its family.
    """
    model = run.model
    assert model.vocab_size is not None, "a folder's configuration says how large its vocabulary is"
    table = Vocabulary(model.vocab_size, run.derived.padded_vocab_size(model.vocab_size), model.hidden_size)
    whole = [MappingRule("embedding.word_embeddings.weight", (_EMBEDDING,), lambda run: table)]
    whole.append(MappingRule("decoder.final_layernorm.weight", ("model.norm.weight",), _hidden))
    copies: dict[str, str] = {}
    if model.untie_embeddings_and_output_weights:
        whole.append(MappingRule("output_layer.weight", (_OUTPUT,), lambda run: table))
    else:
        copies[_OUTPUT] = _EMBEDDING
    pieces = list(_pieces(run, whole, "", ""))
    pattern = run.derived.moe_layer_pattern
    for layer, is_moe in enumerate(pattern):
        pieces += _layer(run, names, bool(is_moe), f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    for depth in range(model.mtp_num_layers or 0):
        here, there = f"mtp.layers.{depth}.", f"model.layers.{model.num_layers + depth}."
        pieces += _pieces(run, PREDICTION, here, there)
        pieces += _layer(run, names, bool(pattern[-1]), f"{here}transformer_layer.", there)
        copies[f"{there}embed_tokens.weight"] = _EMBEDDING
        copies[f"{there}shared_head.head.weight"] = _OUTPUT if model.untie_embeddings_and_output_weights else _EMBEDDING
    shapes: dict[str, Shape] = {}
    for piece in pieces:
        shapes[piece.key] = piece.transform.native_shape
        if piece.key.endswith(("experts.weight1", "experts.weight2")):
            shapes[piece.key] = (run.moe.num_experts or 0, *piece.transform.native_shape[1:])
    return Mapping(tuple(pieces), shapes, copies)


def _layer(run: Run, names: TensorNames, is_moe: bool, here: str, there: str) -> Iterator[MappedBlock]:
    yield from _pieces(run, ATTENTION, here, there)
    if not is_moe:
        yield from _pieces(run, DENSE, here, there)
        return
    yield from _pieces(run, moe_rows(names), here, there)
    for expert in range(run.moe.num_experts or 0):
        for row in expert_rows(names):
            transform = row.make(run)
            start = (expert, *(0,) * (len(transform.native_shape) - 1))
            yield MappedBlock(
                here + row.native, start, tuple(there + name.format(e=expert) for name in row.hf), transform
            )


def _pieces(run: Run, rows: Iterable[MappingRule], here: str, there: str) -> Iterator[MappedBlock]:
    for row in rows:
        if row.when(run):
            transform = row.make(run)
            start = (0,) * len(transform.native_shape)
            yield MappedBlock(here + row.native, start, tuple(there + name for name in row.hf), transform, row.fp32)


_RECOMPUTED = ".rotary_emb.inv_freq"
"""Suffix of the names of tensors in older folders that follow from the configuration."""


def require_tensors(table: Mapping, found: Named[str, Shape], where: str) -> tuple[list[str], list[str]]:
    """Check that a folder has exactly the tensors of a model, by the names and shapes of its headers.

    Returns:
        The names that are copies of other tensors, and those of tensors that are not used.

    Raises:
        ConfigError: tensors are missing, unknown or of another shape; the message lists them.
    """
    fused = next((name for name in found if name.endswith(".experts.gate_up_proj")), None)
    if fused is not None:
        raise ConfigError(
            f"{where}: {fused} holds the experts of a layer in one tensor, as transformers 5 does in memory, and "
            "folders have a matrix for each expert here; save the model with save_pretrained(PATH, "
            "save_original_format=True)"
        )
    wanted = table.hf_shapes
    copies = [name for name in table.copies if name in found]
    dropped = sorted(name for name in found if name.endswith(_RECOMPUTED))
    unknown = sorted(found.keys() - wanted.keys() - set(copies) - set(dropped))
    expected = {**wanted, **{name: wanted[table.copies[name]] for name in copies}}
    lines = [f"missing: {name}" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"unexpected: {name}" for name in unknown]
    lines += [
        f"{name}: shape {list(found[name])}, its configuration says {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if tuple(found[name]) != tuple(expected[name])
    ]
    if lines:
        raise ConfigError(listing(f"{where}: its tensors are not those of its config.json:", lines))
    return copies, dropped
