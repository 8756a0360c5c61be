"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers after the last one that predict further.

Depth k (from 1) takes the hidden state of depth k - 1 (depth 0: the model's own, after its final norm) and the
embedding of the k-th token ahead, merges them into one vector, runs one transformer layer over the sequence, and
predicts the token after that, k + 1 ahead. Embedding and output layer are the model's own.

The model's output is the loss of the next token, as without these layers. Its gradient includes the others: position s
of the output also contributes factor / D times the losses with which the D depths predicted that position's label, each
from k positions before. So the loss function treats all predictions of a label alike (masks them, divides by the tokens
of a micro-batch or of the global batch, scales them), whatever the layout, micro-batch size or normalisation.
DeepSeek-V3 also divides by all T tokens, though depth k has k targets fewer in every sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_moe.engine.modules import DeepcopyKeepsGroups, fp32_parameters
from megatron_moe.model.norm import residual_dtype
from megatron_moe.parallel.sequence import Documents, shifted
from megatron_moe.platform.protocols import EngineConfig, ProcessGroups


@dataclass(frozen=True)
class PredictionParts:
    """The classes that a depth is built from.

    norm: of its two inputs and of its output. column_linear: the product that merges the inputs. pg_collection: the
    process groups, since the engine passes all of them to a layer in one release and two of them in another.
    """

    norm: type
    column_linear: type
    transformer_layer: ModuleSpec
    pg_collection: ProcessGroups


class PredictionMasks(NamedTuple):
    """What a step passes as loss_mask where these layers' routers have to know the tokens' rows.

    The engine hands loss_mask on to the model's last step, and in one release padding_mask not. loss_mask: [B, S].
    padding_mask: [B, S] int64, see `moe.routes.tagged`.
    """

    loss_mask: Tensor
    padding_mask: Tensor


class MTPLayer(DeepcopyKeepsGroups, MegatronModule):
    """One depth of multi-token prediction, for the engine's MultiTokenPredictionBlock.

    Its parameters have the names of Megatron-LM's checkpoints. The engine's own layer is not used: its names change
    with the release, it numbers the layer as the first ones, skips recomputation by blocks, and merges into the model's
    dtype where the residual stream is fp32.

    Args:
        config: the engine's configuration.
        submodules: the classes it is built from.
        layer_number: the depth, from 1. Its transformer layer is number num_layers + depth of the model.
        vp_stage: the chunk of the pipeline stage.
    """

    def __init__(
        self,
        config: EngineConfig,
        submodules: PredictionParts,
        layer_number: int = 1,
        vp_stage: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        pg_collection = submodules.pg_collection
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        norm = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = submodules.norm(**norm)
        self.hnorm = submodules.norm(**norm)
        options = {"gather_output": False, "bias": False, "skip_bias_add": False, "is_expert": False}
        self.eh_proj = submodules.column_linear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            tp_group=self.tp_group,
            **options,
        )
        # The engine adds the layers of the stages before this one to the number.
        before = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.transformer_layer = build_module(
            submodules.transformer_layer,
            config=config,
            layer_number=config.num_layers + layer_number - before,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
        self.final_layernorm = submodules.norm(**norm)

    @property
    def mtp_model_layer(self) -> torch.nn.Module:
        """The transformer layer, under the name that a later release of the engine uses."""
        return self.transformer_layer

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary_pos_emb: Tensor | None,
        documents: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [S, B, H] of this depth, after its norm.

        Args:
            hidden: [S, B, H] of the depth before; this rank's part of the sequence under sequence parallelism.
            embedded: [S, B, H], the embeddings of the tokens ahead.
            rotary_pos_emb: the model's rotary table.
            documents: `Documents` as a mask; None: a sequence is one.
            padding_mask: what routers get; see `MoELayer.forward`.
        """
        inputs = (hidden, embedded, rotary_pos_emb, documents, padding_mask)
        if self.config.recompute_granularity == "full" and self.training:
            return checkpoint(self._predict, False, *inputs)
        return self._predict(*inputs)

    def _predict(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotary_pos_emb: Tensor | None,
        documents: Tensor | None,
        padding_mask: Tensor | None,
    ) -> Tensor:
        # Under sequence parallelism ranks drop out different parts of the sequence, as in the engine's block.
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            hidden, _ = self.transformer_layer(
                hidden_states=self._merge(hidden, embedded),
                attention_mask=documents,
                rotary_pos_emb=rotary_pos_emb,
                padding_mask=padding_mask,
            )
        return self.final_layernorm(hidden)

    def _merge(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        # Norms that are kept in fp32 may return fp32; in a layer that is kept as a whole, everything is fp32.
        dtype = torch.float32 if fp32_parameters(self) is not None else self.config.params_dtype
        both = torch.cat((self.enorm(embedded).to(dtype), self.hnorm(hidden).to(dtype)), dim=-1)
        part, _ = self.eh_proj(both)
        merged = gather_from_tensor_model_parallel_region(part, group=self.tp_group)
        if self.config.sequence_parallel:
            merged = scatter_to_sequence_parallel_region(merged, group=self.tp_group)
        return merged.to(residual_dtype(self.config.fp32_residual_connection, dtype))


class MultiTokenPrediction:
    """A mixin before the engine's GPTModel that adds multi-token prediction in training.

    Attributes:
        further_losses: [D, 2] fp64 or None: for each depth the unweighted sum of its losses in nats and the number of
            targets that the loss mask keeps, over all micro-batches since it was taken.
    """

    further_losses: Tensor | None = None

    def pop_mtp_losses(self) -> Tensor | None:
        """Return `further_losses` and reset it. None on a chunk without these layers, and before a micro-batch."""
        taken, self.further_losses = self.further_losses, None
        return taken

    def token_losses(self: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy [B, S] fp32 of the output layer on hidden states [S, B, H] against labels [B, S]."""
        logits, _ = self.output_layer(hidden, weight=self._tied_weight())
        return self.compute_language_model_loss(labels, logits)

    def _postprocess(self: Any, hidden_states: Tensor, *, labels: Tensor | None, **rest: Any) -> Tensor:
        """Return logits [B, S, V / TP] without labels, losses [B, S] with them: the engine's last step of a forward.

        A stage of the pipeline without the output layer returns what it sends on: its hidden states, and in training,
        if the layers are here, those of every depth after them, [(1 + D) S, B, H].
        """
        if not self.config.mtp_num_layers:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **rest)  # type: ignore[misc]
        mask, loss_mask, tags = rest.get("attention_mask"), rest.get("loss_mask"), None
        if isinstance(loss_mask, PredictionMasks):
            loss_mask, tags = loss_mask
        documents = Documents.of(mask, hidden_states.shape[1])
        ahead = (rest.get("input_ids"), rest.get("position_ids"), rest.get("rotary_pos_emb"), mask, tags)
        if not self.post_process:
            if not (self.mtp_process and self.training):
                return hidden_states
            return torch.cat([hidden_states, *self._depths(hidden_states, *ahead)])
        depths: Iterable[Tensor] = ()
        if self.training and self.mtp_process:
            depths = self._depths(hidden_states, *ahead)
        elif self.training:
            hidden_states, *depths = hidden_states.chunk(1 + self.config.mtp_num_layers)
        if labels is None:
            logits, _ = self.output_layer(
                hidden_states, weight=self._tied_weight(), runtime_gather_output=rest.get("runtime_gather_output")
            )
            return logits.transpose(0, 1).contiguous()
        losses = self.token_losses(hidden_states, labels)
        if not self.training:
            return losses
        # The loss of each depth's prediction of the label at position s, [D, B, S] fp32; 0 for the first k.
        group = self.pg_collection.cp
        found, targets = [], []
        for depth, hidden_at_depth in enumerate(depths, start=1):
            of_depth = self.token_losses(hidden_at_depth, shifted(labels, depth, group, documents))
            found.append(shifted(of_depth, -depth, group, documents))
            targets.append(shifted(torch.ones_like(labels), -depth, group, documents))
        further = torch.stack(found)
        if torch.is_grad_enabled():
            self._count(further.detach(), torch.stack(targets), loss_mask)
        weighted = further.sum(dim=0) * (self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers)
        # Adds zero, and a gradient; a non-finite loss makes the output non-finite, and the step is skipped.
        return losses + (weighted - weighted.detach())

    def further_logits(
        self: Any, hidden: Tensor, input_ids: Tensor, position_ids: Tensor, rotary_pos_emb: Tensor | None
    ) -> Iterator[Tensor]:
        """Yield the logits [B, S, V / TP] of each depth, from the model's hidden states [S, B, H].

        Depth k predicts at position s the token s + k + 1. Its last k positions have no token ahead to merge: token 0
        takes its place, and the prediction is meaningless.
        """
        for hidden_at_depth in self._depths(hidden, input_ids, position_ids, rotary_pos_emb):
            logits, _ = self.output_layer(hidden_at_depth, weight=self._tied_weight())
            yield logits.transpose(0, 1)

    def _depths(
        self: Any,
        hidden: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        rotary_pos_emb: Tensor | None,
        mask: Tensor | None = None,
        tags: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the hidden states [S, B, H] after each depth's norm; see `PredictionMasks` for the tags."""
        documents, padding_mask = Documents.of(mask, input_ids.shape[0]), tags
        if tags is None and documents is not None and self.routers_know_documents:
            padding_mask = documents.firsts
        if padding_mask is not None:
            padding_mask = self.rows_of_rank(padding_mask)
        for depth, layer in enumerate(self.mtp.layers, start=1):
            shifted_ids = shifted(input_ids, depth, self.pg_collection.cp, documents)
            embedded = self.embedding(input_ids=shifted_ids, position_ids=position_ids)
            hidden = layer(hidden, embedded, rotary_pos_emb, mask, padding_mask)
            yield hidden

    def _count(self, losses: Tensor, targets: Tensor, loss_mask: Tensor | None) -> None:
        kept = targets.double() if loss_mask is None else targets * loss_mask.double()
        sums = torch.stack([(losses.double() * kept).sum((1, 2)), kept.sum((1, 2))], dim=-1)
        self.further_losses = sums if self.further_losses is None else self.further_losses + sums

    def _tied_weight(self: Any) -> Tensor | None:
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None


def without_second_table(chunk: Any) -> None:
    """Drop the second table that the engine gives a tied output layer on the last stage, which has the embedding.

    It would not be used, and data parallelism would wait for its gradient forever.
    """
    if chunk.share_embeddings_and_output_weights and chunk.post_process and chunk.mtp_process:
        chunk.output_layer.weight = None
