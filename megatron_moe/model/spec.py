"""The layer specs of a pipeline stage: the classes that each layer is built from, and their options.

Every norm, linear layer and attention is a module with its own name, so that the checkpoint's keys are the same for the
engine's classes and for Transformer Engine's. Fused modules, which would be named differently, are not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_moe import platform
from megatron_moe.config.schema import Run
from megatron_moe.model.attention import MeasuredCoreAttention, SDPACoreAttention
from megatron_moe.model.mla import LatentAttention, MLASubmodules
from megatron_moe.model.mtp import MTPLayer, PredictionParts
from megatron_moe.model.norm import RMSNorm, fp32_bias_dropout_add
from megatron_moe.moe.layer import MoELayer, MoESubmodules
from megatron_moe.moe.options import MoEOptions
from megatron_moe.platform.protocols import EngineConfig, ProcessGroups


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


@dataclass(frozen=True)
class LayerSettings:
    """The options of our own modules in a layer, which the engine's configuration does not have.

    moe: options of the MoE layers; None for a dense model. recomputed: see `derived.recomputed_modules`. rotary:
    whether attention rotates queries and keys. bf16_layers: the layers of the decoder whose experts are not in FP8.
    """

    moe: MoEOptions | None
    recomputed: tuple[str, ...]
    rotary: bool
    bf16_layers: tuple[int, ...] = ()

    @classmethod
    def from_run(cls, run: Run) -> LayerSettings:
        """Read the settings from a run that has passed `config.rules.check`."""
        rotary = run.model.position_embedding_type == "rope"
        return cls(MoEOptions.from_run(run), run.derived.recomputed_modules, rotary, run.derived.bf16_layers)

    def of_layer(self, layer: int) -> LayerSettings:
        """Return the settings of one layer of the decoder, by its number from 0 in the whole model."""
        if self.moe is None or layer not in self.bf16_layers:
            return self
        return replace(self, moe=replace(self.moe, fp8_format=None))


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
    params: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *, config: EngineConfig, **_: Any) -> Any:
        """Build the module, for 0.19.2, which calls the spec."""
        return self.module(config=config, submodules=self.submodules, **self.params)


def block_spec(
    config: EngineConfig, settings: LayerSettings, pg_collection: ProcessGroups, layers: Iterable[int]
) -> TransformerBlockSubmodules:
    """Return the layers of one stage of the pipeline.

    Args:
        config: from `engine_config.transformer_config`; its moe_layer_freq has one entry per layer of the model.
        settings: the settings of the same run.
        pg_collection: process groups.
        layers: the stage's, numbered from 0 in the whole model.
    """
    chosen = parts(config.transformer_impl)
    specs = [
        layer_spec(config, settings.of_layer(layer), chosen, pg_collection, bool(config.moe_layer_freq[layer]))
        for layer in layers
    ]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=chosen.norm)


def prediction_spec(
    config: EngineConfig, settings: LayerSettings, pg_collection: ProcessGroups
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the layers of multi-token prediction, or None without the flag.

    Each has a transformer layer of the kind of the model's last one.
    """
    if not config.mtp_num_layers:
        return None
    chosen = parts(config.transformer_impl)
    last = layer_spec(config, settings, chosen, pg_collection, bool(config.moe_layer_freq[-1]))
    submodules = PredictionParts(chosen.norm, chosen.column_linear, last, pg_collection)
    depth = ModuleSpec(module=MTPLayer, submodules=submodules)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[depth] * config.mtp_num_layers)


def layer_spec(
    config: EngineConfig, settings: LayerSettings, chosen: Parts, pg_collection: ProcessGroups, moe: bool
) -> ModuleSpec:
    """Return one transformer layer: attention, then the MoE layer or a dense MLP, each after its norm."""
    add = fp32_bias_dropout_add if config.fp32_residual_connection else get_bias_dropout_add
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=chosen.norm,
            self_attention=_attention(config, settings, chosen),
            self_attn_bda=add,
            pre_mlp_layernorm=chosen.norm,
            mlp=(_moe if moe else _dense)(config, settings, chosen, pg_collection),
            mlp_bda=add,
        ),
    )


def _attention(config: EngineConfig, settings: LayerSettings, chosen: Parts) -> ModuleSpec:
    head_norm = chosen.norm if config.qk_layernorm else None
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    core = MeasuredCoreAttention if config.log_max_attention_logit else chosen.core_attention
    if config.multi_latent_attention:
        module: type = LatentAttention
        submodules: Any = MLASubmodules(chosen.column_linear, chosen.row_linear, head_norm, core)
        params |= {"recomputed": settings.recomputed, "rotary": settings.rotary}
    else:
        module = SelfAttention
        submodules = SelfAttentionSubmodules(
            linear_qkv=chosen.column_linear,
            core_attention=core,
            linear_proj=chosen.row_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        )
    return ModuleSpec(module=module, params=params, submodules=submodules)


def _dense(config: EngineConfig, settings: LayerSettings, chosen: Parts, pg_collection: ProcessGroups) -> MLPSpec:
    linears = MLPSubmodules(linear_fc1=chosen.column_linear, linear_fc2=chosen.row_linear)
    module = RecomputedMLP if "mlp" in settings.recomputed else MLP
    return MLPSpec(module, linears, {"tp_group": pg_collection.tp, "ffn_hidden_size": config.ffn_hidden_size})


def _moe(config: EngineConfig, settings: LayerSettings, chosen: Parts, pg_collection: ProcessGroups) -> MLPSpec:
    if settings.moe is not None and settings.moe.backend == "te":  # the layer's own error gets the engine's words
        platform.require_transformer_engine("--moe-expert-backend te", "--moe-expert-backend grouped_mm")
    linears = MoESubmodules(linear_fc1=chosen.column_linear, linear_fc2=chosen.row_linear)
    return MLPSpec(MoELayer, linears, {"pg_collection": pg_collection, "options": settings.moe})
