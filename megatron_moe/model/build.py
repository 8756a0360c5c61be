"""Building a run's model on this rank: its chunks are built, initialised, cast and wrapped, in this order."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.module_names import frozen
from megatron_moe.config.schema import Run
from megatron_moe.engine.layers import (
    gather_from_tensor_model_parallel_region,
    DistributedDataParallel,
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_moe.engine.modules import DeepcopyKeepsGroups, with_class
from megatron_moe.model.activation_offload import ActivationOffload
from megatron_moe.model.cross_entropy import cross_entropy
from megatron_moe.model.engine_config import ddp_config, transformer_config
from megatron_moe.model.float16_module import Float16Module, keep_in_fp32, model_dtypes
from megatron_moe.model.fully_sharded import FullyShardedDataParallel, Sharding
from megatron_moe.model.initialize import global_name, initialize_weights
from megatron_moe.model.linear_fp8 import multiply_in_fp8
from megatron_moe.model.loss import FusedLoss, OutputLayer, OutputLayerWithLoss, TokenLoss
from megatron_moe.model.mla import ReplicatedLinear
from megatron_moe.model.mtp import MultiTokenPrediction, without_second_table
from megatron_moe.model.overlap import ChunkPlan
from megatron_moe.model.spec import LOCAL, LayerSettings, block_spec, prediction_spec
from megatron_moe.moe.experts import GroupedExperts
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


# Modules whose input and weights need one dtype. Transformer Engine's modules check this themselves.
_PRODUCTS = (LOCAL.column_linear, LOCAL.row_linear, ReplicatedLinear, GroupedExperts)
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
    """

    moe_options: MoEOptions | None = None
    token_loss: TokenLoss | None = None

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
            if losses.shape != labels.shape:
                raise ValueError(f"the loss has the shape {list(losses.shape)}; it has to be [B, S] {list(labels.shape)}")
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


class _Vocabulary(NamedTuple):
    """The number of tokens, and of rows of the embedding and output tables."""

    size: int
    padded: int


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
    vocabulary = _Vocabulary(vocab_size, padded_vocab_size or run.derived.padded_vocab_size(vocab_size))
    num_chunks = run.derived.virtual_pipeline_size
    stages = [None] if num_chunks is None else list(range(num_chunks))
    chunks: list[torch.nn.Module] = [
        _chunk(run, config, settings, pg_collection, vocabulary, stage, draw) for stage in stages
    ]
    for chunk in chunks:
        chunk.token_loss = token_loss
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
        # Only the first chunk's reduction is on the critical path, as Megatron-LM has it.
        without_buckets = bool(wrapped)
        replica = DistributedDataParallel(
            config=config,
            ddp_config=ddp_config(run),
            module=chunk,
            disable_bucketing=without_buckets,
            pg_collection=pg_collection,
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
    vocabulary: _Vocabulary,
    vp_stage: int | None,
    draw: bool,
) -> LanguageModel:
    """Build one virtual stage, move it to the device and initialise it."""
    stage = run.derived.chunks_of_pipeline_rank(pg_collection.pp.rank())[vp_stage or 0]
    model_class = FusedLossLanguageModel if run.model.cross_entropy_loss_fusion else LanguageModel
    with _quiet("megatron.core.models.gpt.gpt_model"):  # 0.19.2 announces the end of GPTModel on every construction
        chunk = model_class(
            config=config,
            transformer_layer_spec=block_spec(config, settings, pg_collection, stage.layers),
            vocab_size=vocabulary.padded,
            max_sequence_length=run.derived.max_position_embeddings,
            pre_process=stage.embedding,
            post_process=stage.loss,
            parallel_output=True,
            share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
            position_embedding_type=run.model.position_embedding_type,
            rotary_percent=run.model.rotary_percent,
            rotary_base=run.model.rotary_base,
            mtp_block_spec=prediction_spec(config, settings, pg_collection) if stage.predictions else None,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
    chunk.moe_options = settings.moe
    without_second_table(chunk)
    if chunk.post_process:
        layer_class = OutputLayerWithLoss if run.model.cross_entropy_loss_fusion else OutputLayer
        chunk.output_layer = with_class(layer_class, chunk.output_layer)
        chunk.output_layer.vocab_size = vocabulary.size
    if isinstance(chunk.output_layer if chunk.post_process else None, OutputLayerWithLoss):
        chunk.output_layer.chunk_tokens = run.model.cross_entropy_chunk_tokens
        chunk.output_layer.fused_gradient = run.precision.gradient_accumulation_fusion is not False
    if hasattr(chunk, "embedding"):
        chunk.embedding.word_embeddings = with_class(ExactEmbedding, chunk.embedding.word_embeddings)
    multiply_in_fp8(chunk, run)
    if draw:
        chunk.to(platform.device())
    keep_in_fp32(chunk, run, config)
    if draw:
        initialize_weights(chunk, run.training.seed)
    if left_alone := frozen(run):
        freeze(chunk, left_alone)
    install_gates(chunk, lambda module: isinstance(module, _PRODUCTS))
    return chunk


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
        embedding.register_forward_hook(_require_gradient)


def _require_gradient(_module: object, _inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def count_frozen(model: Sequence[torch.nn.Module], pg_collection: ProcessGroups) -> int:
    """Return the elements of all frozen parameters of the whole model. Collective over all ranks."""
    total = torch.zeros((), dtype=torch.float64, device=platform.device())
    for chunk in model:
        for parameter in chunk.parameters():
            if not parameter.requires_grad:
                total += parameter.numel() / _copies(parameter, pg_collection)
    torch.distributed.all_reduce(total)
    return round(total.item())


def _copies(parameter: torch.nn.Parameter, pg_collection: ProcessGroups) -> int:
    """Return how many ranks have the same part of a parameter."""
    if not getattr(parameter, "allreduce", True):
        return pg_collection.expt_dp.size()
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return pg_collection.dp_cp.size() if is_split else pg_collection.tp_dp_cp.size()
