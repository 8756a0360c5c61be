"""Building a run's model on this rank: its chunks are built, initialised, cast and wrapped, in this order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_moe import platform
from megatron_moe.config import module_names
from megatron_moe.config.schema import Run
from megatron_moe.engine.layers import (
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    DistributedDataParallel,
    IdentityOp,
    MLPSubmodules,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerLayer,
    TransformerLayerSubmodules,
    VocabParallelEmbedding,
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_moe.engine.modules import DeepcopyKeepsGroups, pass_on_padding_mask, with_class
from megatron_moe.model.activation_offload import ActivationOffload
from megatron_moe.model.attention import (
    MeasuredCoreAttention,
    MeasuredNormedCoreAttention,
    NormedCoreAttention,
    SDPACoreAttention,
)
from megatron_moe.model.cross_entropy import cross_entropy
from megatron_moe.model.engine_config import LayerSettings, ddp_config, transformer_config
from megatron_moe.model.float16_module import Float16Module, keep_in_fp32, model_dtypes
from megatron_moe.model.fully_sharded import FullyShardedDataParallel, Sharding
from megatron_moe.model.initialize import global_name, initialize_weights
from megatron_moe.model.loss import FusedLoss, OutputLayer, OutputLayerWithLoss, TokenLoss
from megatron_moe.model.mla import LatentAttention, MLASubmodules, ReplicatedLinear
from megatron_moe.model.mtp import MTPLayer, MultiTokenPrediction, PredictionParts, without_second_table
from megatron_moe.model.norm import (
    ReorderedNormLayer,
    RMSNorm,
    SelfAttentionNormedAcrossHeads,
    fp32_bias_dropout_add,
    multiplied,
)
from megatron_moe.model.overlap import ChunkPlan
from megatron_moe.model.rotary import Angles
from megatron_moe.moe.experts import GroupedExperts, LocalExperts
from megatron_moe.moe.grouped_gemm_fp8 import (
    Fp8Product,
    fp8_products,
    require_fp8_of_transformer_engine,
    transformer_engine_in_fp8,
)
from megatron_moe.moe.layer import MoELayer, MoESubmodules
from megatron_moe.moe.options import MoEOptions
from megatron_moe.platform.protocols import AutogradContext, EngineConfig, ProcessGroups
from megatron_moe.precision.contract import PrecisionGuard, install_gates, returns_wider


class _Lookup(torch.autograd.Function):
    """The lookup weight[ids], whose backward adds each row's gradients in fp32 or wider and rounds them once.

    torch's kernels round in between. On a CPU every token's addition is rounded to the gradient's dtype: in bf16 a row
    stops growing once it is 256 times as large as an addend, and 4,096 tokens of one id with gradients of 0.01 give 4
    instead of 41, without an error. On CUDA so does `weight[ids]`, the engine's lookup in its deterministic mode, and
    `embedding` rounds after every 32 tokens where there are at most 3,072. Frequent tokens would be trained with too
    small gradients.

    On CUDA `index_add_` adds in any order unless torch's deterministic algorithms are on.
    """

    @staticmethod
    def forward(ctx: AutogradContext, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[None, Tensor]:
        ids = ctx.saved_tensors[0].flatten()
        wide = torch.promote_types(ctx.dtype, torch.float32)
        # Sums for the tokens and not for the table, which is much larger: all tokens of an id add to one row.
        row = torch.searchsorted(ids.sort().values, ids)
        total = torch.zeros((ids.numel(), ctx.shape[1]), dtype=wide, device=grad.device)
        total.index_add_(0, row, grad.reshape(-1, ctx.shape[1]).to(wide))
        table = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        # Tokens of one id write the same bits, in whichever order.
        return None, table.index_copy_(0, ids, total.to(ctx.dtype).index_select(0, row))


class ExactEmbedding(DeepcopyKeepsGroups, VocabParallelEmbedding):
    """The engine's embedding table [V/TP, H] with the exact lookup, and the same weights, keys and outputs."""

    def forward(self, input_: Tensor) -> Tensor:
        """Return embeddings [B, S, H] of token ids [B, S], summed over TP; [S/TP, B, H] with sequence parallelism."""
        if self.tp_group.size() == 1:
            rows = _Lookup.apply(input_, self.weight)
        else:
            elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
            ids = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
            rows = _Lookup.apply(ids, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            rows = rows.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)


_EXTRA_STATE = "_extra_state"


@returns_wider("the loss per token is fp32")
class LanguageModel(MultiTokenPrediction, DeepcopyKeepsGroups, GPTModel):
    """The engine's GPTModel with one set of checkpoint keys.

    Parallel linear layers and all Transformer Engine modules have an `_extra_state` that is empty without FP8. It is
    left out, so that the keys are those of the weights, whichever classes were chosen.

    Attributes:
        moe_options: the options of the model's MoE layers, also on a pipeline stage that has none of them; None for a
            dense model.
        token_loss: a program's own loss; None: cross entropy.
        routers_know_documents: whether a step passes the tokens' `documents` as padding_mask too.
        rows_of_step: returns the rows of the step's tokens from their numbers (`moe/routes.py`); None: none is kept.
        rotates_by_position: whether the engine's attention rotates by position_ids, or by places in the sequence.
    """

    moe_options: MoEOptions | None = None
    token_loss: TokenLoss | None = None
    routers_know_documents: bool = False
    rows_of_step: Callable[[Tensor], Tensor] | None = None
    rotates_by_position = False

    def rows_of_rank(self, rows: Tensor) -> Tensor:
        """Return [B, S / TP] of `rows` [B, S], one number per token, under sequence parallelism; else all of them."""
        if not self.config.sequence_parallel:
            return rows
        group = self.pg_collection.tp
        return rows.chunk(group.size(), dim=1)[group.rank()].contiguous()

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        *args: Any,
        padding_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Return what the engine's method does, its second part the angles [S / CP, 1 or B, 1, width], if any.

        The engine splits padding_mask over ranks on the first stage alone.
        """
        if padding_mask is not None and not self.pre_process:
            padding_mask = self.rows_of_rank(padding_mask)
        options["padding_mask"] = padding_mask
        found, angles, *rest = super()._preprocess(input_ids, position_ids, *args, **options)
        if angles is not None and position_ids is not None and self.rotates_by_position:
            every = self.rotary_pos_emb.get_emb(position_ids.shape[1] * self.config.context_parallel_size)
            angles = every[position_ids.t(), 0]
        return (found, angles, *rest)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the engine's sharded state without extra states."""
        return _without_extra_state(super().sharded_state_dict(prefix, sharded_offsets, metadata))

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the losses [B, S] fp32 of logits [S, B, V / TP], which the backward pass overwrites; labels [B, S]."""
        if self.token_loss is not None:
            whole = gather_from_tensor_model_parallel_region(logits, group=self.pg_collection.tp)
            losses = self.token_loss(whole.transpose(0, 1)[..., : self.output_layer.vocab_size].float(), labels)
            shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            if shape != list(labels.shape):
                raise ValueError(
                    f"the loss returns {shape}; it has to return a loss for each token, [B, S] {list(labels.shape)}, "
                    "as torch's losses do with reduction='none'"
                )
            if logits.requires_grad and not losses.requires_grad:
                raise ValueError("the loss has no gradient: something in it is detached, and nothing would be trained")
            return losses.float()
        losses = cross_entropy(logits.flatten(0, 1), labels.transpose(0, 1).reshape(-1), self.pg_collection.tp)
        return losses.view(logits.shape[:2]).transpose(0, 1).contiguous()

    def build_schedule_plan(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> ChunkPlan:
        """Return the plan of a forward and backward pass, for the engine's schedule of two micro-batches at a time.

        The arguments are those of `forward` in training.
        """
        return ChunkPlan(self, input_ids, position_ids, attention_mask, **options)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the engine's state without extra states."""
        return _without_extra_state(super().state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars))

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights, with or without extra states in the dict."""
        empty = {key: None for key in self.state_dict() if key.endswith(_EXTRA_STATE)}
        return super().load_state_dict({**empty, **state_dict}, strict=strict, assign=assign)


class FusedLossLanguageModel(FusedLoss, LanguageModel):
    """The language model with `--cross-entropy-loss-fusion`."""


def _without_extra_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not key.endswith(_EXTRA_STATE)}


# ---- The spec of a layer: the classes that it is built from, and their options.
#
# Every norm, linear layer and attention is a module with its own name, so that the checkpoint's keys are the same for
# the engine's classes and for Transformer Engine's. Fused modules, which would be named differently, are not used.


@dataclass(frozen=True)
class Parts:
    """The classes that `--transformer-impl` chooses."""

    column_linear: type
    row_linear: type
    norm: type
    core_attention: type


LOCAL = Parts(ColumnParallelLinear, RowParallelLinear, RMSNorm, SDPACoreAttention)


def parts(transformer_impl: str) -> Parts:
    """Return the classes of an implementation.

    Raises:
        ConfigError: Transformer Engine is chosen and cannot be used here.
    """
    if transformer_impl == "local":
        return LOCAL
    platform.require_transformer_engine(f"--transformer-impl {transformer_impl}", "--transformer-impl local")
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TENorm,
        TERowParallelLinear,
    )

    return Parts(TEColumnParallelLinear, TERowParallelLinear, TENorm, TEDotProductAttention)


class RecomputedMLP(MLP):
    """The engine's dense MLP, recomputed in the backward pass: its input alone is kept in training."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Compute the engine's MLP, under a checkpoint in training."""
        forward = partial(super().forward, **options)
        return checkpoint(forward, False, hidden_states, *args) if self.training else forward(hidden_states, *args)


@dataclass
class MLPSpec:
    """The spec of a layer's MLP, which contains the process groups.

    The engine's layer passes process groups to the classes it knows (0.16.1), or to all (0.19.2). To the former this is
    a ModuleSpec and to the latter a constructor, and both build the same module.
    """

    module: type
    submodules: Any
    params: dict[str, Any]

    def __call__(self, *, config: EngineConfig, **_: Any) -> Any:
        """Build the module, for 0.19.2, which calls the spec."""
        return self.module(config=config, submodules=self.submodules, **self.params)


def layer_spec(
    config: EngineConfig, settings: LayerSettings, chosen: Parts, pg_collection: ProcessGroups, moe: bool
) -> ModuleSpec:
    """Return one transformer layer: attention, then the MoE layer or a dense MLP, each after its norm or before it."""
    head_norm = chosen.norm if config.qk_layernorm else None
    core = MeasuredCoreAttention if config.log_max_attention_logit else chosen.core_attention
    if settings.qk_layernorm_after_rotation:
        head_norm = IdentityOp  # 0.19.2 asks for norms in the spec
        core = MeasuredNormedCoreAttention if config.log_max_attention_logit else NormedCoreAttention
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    attention: type = SelfAttentionNormedAcrossHeads if settings.qk_layernorm_across_heads else SelfAttention
    submodules: Any = SelfAttentionSubmodules(
        linear_qkv=chosen.column_linear,
        core_attention=core,
        linear_proj=chosen.row_linear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    if config.multi_latent_attention:
        attention = LatentAttention
        submodules = MLASubmodules(chosen.column_linear, chosen.row_linear, head_norm, core)
        params |= {"recomputed": settings.recomputed, "rotation": settings.rotation}
        params["gathers_latents"] = settings.gathers_latents
    if moe:
        if settings.moe is not None and settings.moe.backend == "te":  # the layer's own error gets the engine's words
            platform.require_transformer_engine("--moe-expert-backend te", "--moe-expert-backend grouped_mm")
        shared = MoESubmodules(linear_fc1=chosen.column_linear, linear_fc2=chosen.row_linear)
        mlp = MLPSpec(MoELayer, shared, {"pg_collection": pg_collection, "options": settings.moe})
    else:
        linears = MLPSubmodules(linear_fc1=chosen.column_linear, linear_fc2=chosen.row_linear)
        dense = RecomputedMLP if "mlp" in settings.recomputed else MLP
        mlp = MLPSpec(dense, linears, {"tp_group": pg_collection.tp, "ffn_hidden_size": config.ffn_hidden_size})
    add = fp32_bias_dropout_add if config.fp32_residual_connection else get_bias_dropout_add
    if settings.residual_multiplier != 1.0:
        add = multiplied(add, settings.residual_multiplier)
    norm_before = IdentityOp if settings.reordered_norm else chosen.norm
    return ModuleSpec(
        module=ReorderedNormLayer if settings.reordered_norm else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before,
            self_attention=ModuleSpec(module=attention, params=params, submodules=submodules),
            self_attn_bda=add,
            pre_mlp_layernorm=norm_before,
            mlp=mlp,
            mlp_bda=add,
        ),
    )


# ---- Linear layers that multiply in FP8: the engine's parallel ones, those of latent attention, Transformer Engine's.
#
# Tiles are those of `moe/grouped_gemm_fp8.py`, cut on each rank's part of a weight: where TP cuts a dimension at
# multiples of 128, they are those of the whole weight. A layer keeps its weights, keys, checkpoints and communication.


class _InFp8:
    """A mixin for the engine's parallel linear layers: their product, with the communication around it."""

    fp8_product: Fp8Product

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        **_: Any,
    ) -> Tensor:
        """Return [S, B, out / TP] for an input [S, B, in], or [S / TP, B, in] under sequence parallelism.

        Backward: the input's gradients are summed over TP ranks, in the model's dtype. The gathered input is kept for
        it, which the engine's layers gather again.
        """
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = self.fp8_product.linear(input, weight)
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(_InFp8, ColumnParallelLinear):
    """The engine's column-parallel linear layer in FP8."""


class Fp8RowParallelLinear(_InFp8, RowParallelLinear):
    """The engine's row-parallel linear layer in FP8."""


class Fp8ReplicatedLinear(ReplicatedLinear):
    """The down projections of latent attention in FP8."""

    fp8_product: Fp8Product

    def forward(self, x: Tensor) -> Tensor:
        """See `ReplicatedLinear.forward`."""
        return self.fp8_product.linear(x, self.weight)


class _ByTransformerEngine:
    """A mixin for Transformer Engine's linear layers, which cut a gated layer's two matrices as one."""

    fp8_format: str

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute the layer in FP8, forward and, as it remembers this, backward."""
        with transformer_engine_in_fp8(self.fp8_format):
            return super().forward(*args, **options)  # type: ignore[misc]


_CLASSES: dict[type, type] = {
    ColumnParallelLinear: Fp8ColumnParallelLinear,
    RowParallelLinear: Fp8RowParallelLinear,
    ReplicatedLinear: Fp8ReplicatedLinear,
}


def multiply_in_fp8(chunk: GPTModel, run: Run) -> None:
    """Replace the linear layers of a GPTModel chunk that `--fp8-format` names by those that multiply in FP8.

    Routed experts have been built with their own kernels.

    Raises:
        ConfigError: Transformer Engine has no FP8 on this device.
    """
    names = set(module_names.multiplied_in_fp8(run))
    if not names:
        return
    gate_up, single = fp8_products(run.precision.fp8_format or "")
    for name, module in list(chunk.named_modules()):
        if global_name(chunk, name) not in names or isinstance(module, LocalExperts):
            continue
        stock: type = type(module)
        made: Any
        if stock in _CLASSES:
            # The gate and the up projection of a gated layer are two matrices.
            gated = name.endswith(".linear_fc1") and chunk.config.gated_linear_unit
            made = with_class(_CLASSES[stock], module)
            made.fp8_product = gate_up if gated else single
        else:
            require_fp8_of_transformer_engine("--transformer-impl transformer_engine")
            made = with_class(type(f"Fp8{stock.__name__}", (_ByTransformerEngine, stock), {}), module)
            made.fp8_format = run.precision.fp8_format
        chunk.set_submodule(name, made)


# ---- Building.


# Modules whose input and weights need one dtype. Transformer Engine's modules check this themselves.
_PRODUCTS = (LOCAL.column_linear, LOCAL.row_linear, ReplicatedLinear, GroupedExperts)


def build_model(
    run: Run,
    pg_collection: ProcessGroups,
    vocab_size: int,
    wrap: bool = True,
    guard: PrecisionGuard | None = None,
    draw: bool = True,
    padded_vocab_size: int | None = None,
    offload: ActivationOffload | None = None,
    token_loss: TokenLoss | None = None,
) -> list[torch.nn.Module]:
    """Build this rank's part of the model, one chunk per virtual pipeline stage.

    Without the interleaved schedule there is one chunk.

    Args:
        run: a run that has passed `config.rules.check`.
        pg_collection: process groups from `parallel.groups.initialize`.
        vocab_size: tokens of the vocabulary. The tables are padded to rows that divide among the TP ranks; the padding
            has logits that take no part in the softmax.
        wrap: whether to wrap in Float16Module where the run is bf16 or fp16, and for data parallelism: in the engine's
            DistributedDataParallel, or in FullyShardedDataParallel from ZeRO's stage 2 on.
        guard: checks the dtypes after building and after each wrapping; a new one if None.
        draw: whether to draw the weights, on this machine's device. Otherwise they stay as they were allocated, for a
            model on torch's meta device, which has shapes and no storage. What has no storage cannot be spread over
            ranks: such a model has no wrapper for data parallelism from ZeRO's stage 2 on.
        padded_vocab_size: rows of the tables, a multiple of TP; default: `derived.padded_vocab_size`.
        offload: moves activations to host memory; default: what the run's flags say.
        token_loss: a program's own loss of logits [B, S, V] fp32 and labels [B, S], for each token [B, S].

    Returns:
        The chunks, in training mode and on this machine's device, weights drawn from the run's seed.

    Raises:
        ConfigError: for Transformer Engine where it is missing.
    """
    config, settings = transformer_config(run), LayerSettings.from_run(run)
    padded = padded_vocab_size or run.derived.padded_vocab_size(vocab_size)
    num_chunks = run.derived.virtual_pipeline_size
    stages = [None] if num_chunks is None else list(range(num_chunks))
    chunks: list[torch.nn.Module] = []
    for stage in stages:
        built = _chunk(run, config, settings, pg_collection, vocab_size, padded, stage, draw)
        if token_loss is not None:
            built.token_loss = partial(token_loss)  # a module would become a part of the model
        chunks.append(built)
    if offload := offload or ActivationOffload.from_run(run):
        for chunk in chunks:
            offload.attach(chunk)
    guard = guard or PrecisionGuard()
    guard.check("building", model_dtypes(run, chunks))
    if not wrap:
        return chunks
    if run.precision.bf16 or run.precision.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
        guard.check("wrapping in Float16Module", model_dtypes(run, chunks))
    if run.derived.zero_stage >= 2:
        if not draw:
            return chunks
        sharding = Sharding.from_run(run)
        chunks = [FullyShardedDataParallel(config, ddp_config(run), chunk, sharding, pg_collection) for chunk in chunks]
        guard.check("wrapping in FullyShardedDataParallel", model_dtypes(run, chunks))
        return chunks
    wrapped: list[Any] = []
    for chunk in chunks:
        # Without buckets but for the first chunk, whose reduction alone is on the critical path, as Megatron-LM has it.
        replica = DistributedDataParallel(
            config, ddp_config(run), chunk, disable_bucketing=bool(wrapped), pg_collection=pg_collection
        )
        wrapped.append(replica)
    for replica in wrapped:
        # Equal by construction; this keeps ranks equal also where their libraries are not.
        replica.broadcast_params()
    guard.check("wrapping in DistributedDataParallel", model_dtypes(run, wrapped))
    return wrapped


def _chunk(
    run: Run,
    config: EngineConfig,
    settings: LayerSettings,
    pg_collection: ProcessGroups,
    vocab_size: int,
    padded_vocab_size: int,
    vp_stage: int | None,
    draw: bool,
) -> LanguageModel:
    """Build one virtual stage, move it to the device and initialise it."""
    stage = run.derived.chunks_of_pipeline_rank(pg_collection.pp.rank())[vp_stage or 0]
    chosen = parts(config.transformer_impl)
    layers = [
        layer_spec(config, settings.of_layer(layer), chosen, pg_collection, bool(config.moe_layer_freq[layer]))
        for layer in stage.layers
    ]
    predictions = None
    if stage.predictions:  # each has a transformer layer of the kind of the model's last one
        last = layer_spec(config, settings, chosen, pg_collection, bool(config.moe_layer_freq[-1]))
        parts_of_depth = PredictionParts(chosen.norm, chosen.column_linear, last, pg_collection)
        depths = [ModuleSpec(module=MTPLayer, submodules=parts_of_depth)] * (config.mtp_num_layers or 0)
        predictions = MultiTokenPredictionBlockSubmodules(layer_specs=depths)
    model_class = FusedLossLanguageModel if run.model.cross_entropy_loss_fusion else LanguageModel
    with _quiet("megatron.core.models.gpt.gpt_model"):  # 0.19.2 announces the end of GPTModel on every construction
        chunk = model_class(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=chosen.norm),
            vocab_size=padded_vocab_size,
            max_sequence_length=run.derived.max_position_embeddings,
            pre_process=stage.embedding,
            post_process=stage.loss,
            parallel_output=True,
            share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
            position_embedding_type=run.model.position_embedding_type,
            rotary_percent=run.model.rotary_percent,
            rotary_base=run.model.rotary_base,
            mtp_block_spec=predictions,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
    chunk.moe_options = settings.moe
    chunk.routers_know_documents = run.derived.routers_know_documents
    chunk.rotates_by_position = run.data.reset_attention_mask
    if settings.rotation is not None and not config.multi_latent_attention:
        chunk.rotary_pos_emb = with_class(Angles, chunk.rotary_pos_emb)
        chunk.rotary_pos_emb.rotation = settings.rotation
    without_second_table(chunk)
    if run.training.recompute_method == "block":
        pass_on_padding_mask(chunk.decoder)
    if chunk.post_process:
        layer_class = OutputLayerWithLoss if run.model.cross_entropy_loss_fusion else OutputLayer
        chunk.output_layer = with_class(layer_class, chunk.output_layer)
        chunk.output_layer.vocab_size = vocab_size
        if run.model.logits_scaling != 1.0:
            chunk.output_layer.register_forward_pre_hook(partial(_scale_hidden, run.model.logits_scaling))
    if chunk.post_process and run.model.cross_entropy_loss_fusion:
        chunk.output_layer.chunk_tokens = run.model.cross_entropy_chunk_tokens
        chunk.output_layer.fused_gradient = run.precision.gradient_accumulation_fusion is not False
    if hasattr(chunk, "embedding"):
        chunk.embedding.word_embeddings = with_class(ExactEmbedding, chunk.embedding.word_embeddings)
        if run.model.embedding_multiplier != 1.0:
            chunk.embedding.word_embeddings.register_forward_hook(partial(_scale_rows, run.model.embedding_multiplier))
    multiply_in_fp8(chunk, run)
    if draw:
        chunk.to(platform.device())
    keep_in_fp32(chunk, run, config)
    if draw:
        initialize_weights(chunk, run.training.seed)
    if left_alone := module_names.frozen(run):
        freeze(chunk, left_alone)
    install_gates(chunk, lambda module: isinstance(module, _PRODUCTS))
    return chunk


def _scale_rows(factor: float, module: torch.nn.Module, inputs: tuple[Tensor], rows: Tensor) -> Tensor:
    return rows * factor


def _scale_hidden(divisor: float, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Divide the output layer's input, H numbers per token, and so its logits, of which there are V."""
    hidden, *rest = inputs
    return (hidden / divisor, *rest)


@contextlib.contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Silence this logger below errors within the block."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# ---- Parameters that `--freeze` leaves out of the training.
#
# The engine gives a parameter that requires no gradient no place in its gradient buffers and in its optimizers. So a
# frozen one has no gradient, no moments, no fp32 copy and no weight decay, and no share of the gradient's norm.


def freeze(chunk: torch.nn.Module, names: Collection[str]) -> None:
    """Freeze what has these names in the whole model, before the chunk is wrapped.

    Behind a frozen embedding the hidden states require a gradient as if it were trained: layers that are recomputed,
    and a stage of the pipeline, have a backward pass only if their input has a gradient.
    """
    for name, parameter in chunk.named_parameters():
        if global_name(chunk, name) in names:
            parameter.requires_grad_(False)
    embedding = getattr(chunk, "embedding", None)
    if embedding is not None and not any(parameter.requires_grad for parameter in embedding.parameters()):
        embedding.register_forward_hook(
            lambda module, inputs, output: output.requires_grad_() if torch.is_grad_enabled() else output
        )


def count_frozen(model: Sequence[torch.nn.Module], pg_collection: ProcessGroups) -> int:
    """Return the elements of all frozen parameters of the whole model. Collective over all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=platform.device())
    for chunk in model:
        for parameter in chunk.parameters():
            if not parameter.requires_grad:
                copies = pg_collection.tp_dp_cp  # the ranks that have the same part of it
                if not getattr(parameter, "allreduce", True):
                    copies = pg_collection.expt_dp
                elif getattr(parameter, "tensor_model_parallel", False):
                    copies = pg_collection.dp_cp
                total += parameter.numel() / copies.size()
    torch.distributed.all_reduce(total)
    return round(total.item())
