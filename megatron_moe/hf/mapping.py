"""Maps the tensors of a Hugging Face folder to ours, by one table per family that is read in both directions.

A row names a tensor of ours, the tensors of a folder that it is made of, and the transform between them; the model's
settings say which rows it has. Names are relative to the layer's prefix: `decoder.layers.L.` here, `model.layers.L.`
there; a layer of multi-token prediction is layer N + i there and `mtp.layers.i.transformer_layer.` here. Importing,
exporting, training from a folder and naming gradients all use the `mapping` of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Named
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from megatron_moe.config.errors import ConfigError, listing
from megatron_moe.config.schema import Run
from megatron_moe.hf.family import TensorNames
from megatron_moe.hf.transforms import (
    Copy,
    ExpertDown,
    ExpertGateUp,
    FusedQueryKeyValue,
    GateThenUp,
    QueryKeyValue,
    Reshape,
    Shape,
    StackedDown,
    StackedGateUp,
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
    carried: parts of the names of further tensors of a folder, which the model here does not have.
    """

    pieces: tuple[MappedBlock, ...]
    shapes: dict[str, Shape]
    copies: dict[str, str]
    carried: tuple[str, ...] = ()

    def carries(self, name: str) -> bool:
        """Whether a tensor of a folder is one that the model here does not have."""
        return any(part in name for part in self.carried)

    def left_out(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Sort tensors that are not used into those that follow from the configuration and those that are carried."""
        found: dict[str, list[str]] = {"dropped": [], "carried": []}
        for name in names:
            found["carried" if self.carries(name) else "dropped"].append(name)
        return found

    @property
    def by_place(self) -> dict[tuple[str, Shape], MappedBlock]:
        """The pieces by our tensor and their first element in it."""
        return {(piece.key, piece.start): piece for piece in self.pieces}

    @property
    def hf_shapes(self) -> dict[str, Shape]:
        """The shapes of the folder's tensors, by name."""
        return {name: shape for piece in self.pieces for name, shape in zip(piece.hf, piece.transform.hf_shapes)}


class MappingRule(NamedTuple):
    """A row of the table. Names are relative to the layer's prefixes; fp32: see `MappedBlock`."""

    native: str
    hf: tuple[str, ...]
    transform: Transform
    fp32: bool = False


def _attention(run: Run, names: TensorNames) -> Iterator[MappingRule]:
    """Yield the rows of the norms and the attention of a layer."""
    model, hidden, heads = run.model, run.model.hidden_size, run.model.num_attention_heads
    latent = model.multi_latent_attention
    per_head = model.v_head_dim if latent else run.derived.head_size
    here, there = "self_attention.", "self_attn."
    behind = ("post_self_attn_layernorm", "post_mlp_layernorm")
    norms = behind if model.reordered_norm else ("input_layernorm", "pre_mlp_layernorm")
    yield MappingRule(f"{norms[0]}.weight", (names.norms[0],), Copy((hidden,)))
    yield MappingRule(f"{norms[1]}.weight", (names.norms[1],), Copy((hidden,)))
    output = Copy((hidden, heads * per_head))
    yield MappingRule(f"{here}linear_proj.weight", (f"{names.attention_output}.weight",), output)
    if not latent:
        sizes, packed = (heads, run.derived.num_query_groups, run.derived.head_size), names.query_key_value
        pack = QueryKeyValue if len(packed) == 3 else FusedQueryKeyValue
        weights, biases = tuple(f"{name}.weight" for name in packed), tuple(f"{name}.bias" for name in packed)
        yield MappingRule(f"{here}linear_qkv.weight", weights, pack(*sizes, hidden))
        if model.add_qkv_bias or model.add_bias_linear:
            yield MappingRule(f"{here}linear_qkv.bias", biases, pack(*sizes))
        if model.add_bias_linear:
            yield MappingRule(f"{here}linear_proj.bias", (f"{names.attention_output}.bias",), Copy((hidden,)))
        if model.softmax_type == "learnable":
            yield MappingRule(f"{here}core_attention.softmax_offset", (f"{there}sinks",), Copy((heads,)))
        if model.qk_layernorm:
            place = f"{here}core_attention." if model.qk_layernorm_after_rotation else here
            queries, keys = (heads, sizes[1]) if model.qk_layernorm_across_heads else (1, 1)
            yield MappingRule(f"{place}q_layernorm.weight", (names.head_norms[0],), Copy((queries * per_head,)))
            yield MappingRule(f"{place}k_layernorm.weight", (names.head_norms[1],), Copy((keys * per_head,)))
        return
    query, rotated, kv_rank = model.qk_head_dim, model.qk_pos_emb_head_dim, model.kv_lora_rank
    query_width, rank = heads * (query + rotated), model.q_lora_rank
    if rank is None:
        yield MappingRule(f"{here}linear_q_proj.weight", (f"{there}q_proj.weight",), Copy((query_width, hidden)))
    else:
        yield MappingRule(f"{here}linear_q_down_proj.weight", (f"{there}q_a_proj.weight",), Copy((rank, hidden)))
        if model.qk_layernorm:
            yield MappingRule(f"{here}q_layernorm.weight", (f"{there}q_a_layernorm.weight",), Copy((rank,)))
        yield MappingRule(f"{here}linear_q_up_proj.weight", (f"{there}q_b_proj.weight",), Copy((query_width, rank)))
    down, up = Copy((kv_rank + rotated, hidden)), Copy((heads * (query + model.v_head_dim), kv_rank))
    yield MappingRule(f"{here}linear_kv_down_proj.weight", (f"{there}kv_a_proj_with_mqa.weight",), down)
    if model.qk_layernorm:
        yield MappingRule(f"{here}kv_layernorm.weight", (f"{there}kv_a_layernorm.weight",), Copy((kv_rank,)))
    yield MappingRule(f"{here}linear_kv_up_proj.weight", (f"{there}kv_b_proj.weight",), up)


def _mlp(run: Run, here: str, there: str, width: int) -> Iterator[MappingRule]:
    """Yield the rows of a gated MLP: that of a dense layer, or the shared expert."""
    hidden, gate_and_up = run.model.hidden_size, (f"{there}gate_proj.weight", f"{there}up_proj.weight")
    yield MappingRule(f"{here}linear_fc1.weight", gate_and_up, GateThenUp(width, hidden))
    yield MappingRule(f"{here}linear_fc2.weight", (f"{there}down_proj.weight",), Copy((hidden, width)))


def _moe(run: Run, names: TensorNames) -> Iterator[MappingRule]:
    """Yield the rows of the MLP of a MoE layer without routed experts that have tensors of their own."""
    moe, hidden, experts = run.moe, run.model.hidden_size, run.moe.num_experts or 0
    yield MappingRule("mlp.router.weight", (names.router,), Copy((experts, hidden)))
    if run.model.add_bias_linear:
        yield MappingRule("mlp.router.bias", (names.router.replace(".weight", ".bias"),), Copy((experts,)))
    if names.stacked is not None:
        width, both, down = run.derived.moe_ffn_hidden_size, f"{names.stacked}gate_up_proj", f"{names.stacked}down_proj"
        both_of = partial(StackedGateUp, names.interleaved, experts, width)
        yield MappingRule("mlp.experts.weight1", (both,), both_of(hidden))
        yield MappingRule("mlp.experts.weight2", (down,), StackedDown(experts, width, hidden))
        if run.model.add_bias_linear:
            yield MappingRule("mlp.experts.bias1", (f"{both}_bias",), both_of())
            yield MappingRule("mlp.experts.bias2", (f"{down}_bias",), Copy((experts, hidden)))
    if moe.moe_router_enable_expert_bias:
        bias = Reshape((1, experts), (experts,)) if names.bias_is_row else Copy((experts,))
        yield MappingRule("mlp.router.expert_bias", (names.router_bias,), bias, fp32=True)
    if moe.moe_shared_expert_intermediate_size is not None:
        yield from _mlp(run, "mlp.shared_experts.", names.shared, moe.moe_shared_expert_intermediate_size)
        if moe.moe_shared_expert_gate:
            yield MappingRule("mlp.shared_experts.gate_weight", (names.shared_gate,), Copy((1, hidden)))


def mapping(run: Run, names: TensorNames) -> Mapping:
    """Return the mapping of a model.

    Args:
        run: the model; `vocab_size` is set. Layout and dtype influence the padding alone.
        names: the names of its family.
    """
    model = run.model
    assert model.vocab_size is not None, "a folder's configuration says how large its vocabulary is"
    table = Vocabulary(model.vocab_size, run.derived.padded_vocab_size(model.vocab_size), model.hidden_size)
    norm = Copy((model.hidden_size,))
    embedding = f"{names.model}{names.embedding}"
    whole = [MappingRule("embedding.word_embeddings.weight", (embedding,), table)]
    whole.append(MappingRule("decoder.final_layernorm.weight", (f"{names.model}norm.weight",), norm))
    copies: dict[str, str] = {}
    untied = model.untie_embeddings_and_output_weights
    if untied:
        whole.append(MappingRule("output_layer.weight", (names.output,), table))
    else:
        copies[names.output] = embedding
    pieces = list(_pieces(whole, "", ""))
    pattern = run.derived.moe_layer_pattern
    # The tensors of a depth of multi-token prediction, except those of its transformer layer.
    prediction = (
        MappingRule("enorm.weight", ("enorm.weight",), norm),
        MappingRule("hnorm.weight", ("hnorm.weight",), norm),
        MappingRule("eh_proj.weight", ("eh_proj.weight",), Copy((model.hidden_size, 2 * model.hidden_size))),
        MappingRule("final_layernorm.weight", ("shared_head.norm.weight",), norm),
    )
    for layer, is_moe in enumerate(pattern):
        pieces += _layer(run, names, bool(is_moe), f"decoder.layers.{layer}.", f"{names.model}layers.{layer}.")
    for depth in range(model.mtp_num_layers or 0):
        here, there = f"mtp.layers.{depth}.", f"{names.model}layers.{model.num_layers + depth}."
        pieces += _pieces(prediction, here, there)
        pieces += _layer(run, names, bool(pattern[-1]), f"{here}transformer_layer.", there)
        copies[f"{there}embed_tokens.weight"] = embedding
        copies[f"{there}shared_head.head.weight"] = names.output if untied else embedding
    shapes: dict[str, Shape] = {}
    for piece in pieces:
        shapes[piece.key] = piece.transform.native_shape
        if piece.key.endswith(("experts.weight1", "experts.weight2")):
            shapes[piece.key] = (run.moe.num_experts or 0, *piece.transform.native_shape[1:])
    return Mapping(tuple(pieces), shapes, copies, names.carried)


def _layer(run: Run, names: TensorNames, is_moe: bool, here: str, there: str) -> Iterator[MappedBlock]:
    yield from _pieces(_attention(run, names), here, there)
    if not is_moe:
        yield from _pieces(_mlp(run, "mlp.", "mlp.", run.derived.ffn_hidden_size), here, there)
        return
    yield from _pieces(_moe(run, names), here, there)
    if names.stacked is not None:
        return
    *gate_and_up, down = (f"{there}{names.experts}{matrix}.weight" for matrix in names.matrices)
    experts, width, hidden = run.moe.num_experts or 0, run.derived.moe_ffn_hidden_size, run.model.hidden_size
    if "{e}" not in names.experts:
        stacked = Reshape((experts, 2 * width, hidden), (experts, 2, width, hidden))
        yield MappedBlock(f"{here}mlp.experts.weight1", (0, 0, 0, 0), tuple(gate_and_up), stacked)
        yield MappedBlock(f"{here}mlp.experts.weight2", (0, 0, 0), (down,), Copy((experts, hidden, width)))
        return
    first, second = ExpertGateUp(width, hidden), ExpertDown(width, hidden)
    for e in range(experts):  # each is a block of the tensors of all experts
        both = tuple(name.format(e=e) for name in gate_and_up)
        yield MappedBlock(f"{here}mlp.experts.weight1", (e, 0, 0, 0), both, first)
        yield MappedBlock(f"{here}mlp.experts.weight2", (e, 0, 0), (down.format(e=e),), second)


def _pieces(rows: Iterable[MappingRule], here: str, there: str) -> Iterator[MappedBlock]:
    for native, names, transform, fp32 in rows:
        start = (0,) * len(transform.native_shape)
        yield MappedBlock(here + native, start, tuple(there + name for name in names), transform, fp32)


_RECOMPUTED = ".rotary_emb.inv_freq"
"""Suffix of the names of tensors in older folders that follow from the configuration."""


def require_tensors(table: Mapping, found: Named[str, Shape], where: str) -> tuple[list[str], list[str]]:
    """Check that a folder has exactly the tensors of a model, by the names and shapes of its headers.

    Returns:
        The names that are copies of other tensors, and those of tensors that are not used.

    Raises:
        ConfigError: tensors are missing, unknown or of another shape; the message lists them.
    """
    wanted = table.hf_shapes
    fused = next((name for name in found if name.endswith(".experts.gate_up_proj")), None)
    if fused is not None and fused not in wanted:
        raise ConfigError(
            f"{where}: {fused} holds the experts of a layer in one tensor, as transformers 5 does in memory, and "
            "folders have a matrix for each expert here; save the model with save_pretrained(PATH, "
            "save_original_format=True)"
        )
    copies = [name for name in table.copies if name in found]
    dropped = sorted(name for name in found if name.endswith(_RECOMPUTED) or table.carries(name))
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
