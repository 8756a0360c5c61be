"""The configuration of a run: `Run` has one frozen dataclass per topic (`model_flags.py`, `run_flags.py`).

Each field is a flag, and a key in the checkpoint's config. A field `moe_router_topk` is the flag
`--moe-router-topk`; flags carry Megatron-LM's names wherever Megatron-LM has one. Field names are unique over all
sections, so `flatten(run)` is a plain dict and `build(flat)` is its inverse. Values are checked by `rules/` and
parsed by `cli.py`; this file does not import torch.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.latent_exchange import exchange_cost
from megatron_moe.config.model_flags import SHARDING_STRATEGIES
from megatron_moe.config.pipeline_layout import Stage, stages_of
from megatron_moe.config.run_flags import RunSections


@dataclass(frozen=True)
class Run(RunSections):
    """The settings of a run. Read a value as `run.moe.moe_router_topk`; `flatten(run)` gives the flat dict.

    How the settings were read is no part of them: runs are equal, and stored, without it.

    Args:
        warnings: what to report of it at the start of the run, a line each.
        sources: field -> where the value comes from, for messages, if not from a flag of ours: "key in file", say.
        explicit: the fields that the command line names, also where the value is the default.
    """

    warnings: tuple[str, ...] = field(default=(), compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    explicit: frozenset[str] = field(default=frozenset(), compare=False)

    @cached_property
    def derived(self) -> DerivedSettings:
        """The values that follow from the settings, each computed once."""
        return DerivedSettings(self)


def sections() -> dict[str, type]:
    """Return section name -> its dataclass, in the order of `Run`."""
    return {name: f.default_factory for name, f in RunSections.__dataclass_fields__.items()}  # type: ignore[misc]


def fields_by_name() -> dict[str, tuple[str, dataclasses.Field]]:
    """Return field name -> (section name, dataclass field), over all sections."""
    table: dict[str, tuple[str, dataclasses.Field]] = {}
    for section, cls in sections().items():
        for f in dataclasses.fields(cls):
            if f.name in table:
                raise AssertionError(f"field {f.name} is in sections {table[f.name][0]} and {section}")
            table[f.name] = (section, f)
    return table


def flatten(run: Run) -> dict[str, Any]:
    """Return the run as one flat dict, field name -> value (tuples become lists, so that it is JSON)."""
    flat: dict[str, Any] = {}
    for section, cls in sections().items():
        part = getattr(run, section)
        for f in dataclasses.fields(cls):
            value = getattr(part, f.name)
            flat[f.name] = list(value) if isinstance(value, tuple) else value
    return flat


RETIRED = frozenset({"use_rope_scaling"})
"""Settings of older steps that had one value only, and are read over."""


def build(flat: dict[str, Any]) -> Run:
    """Build a `Run` from a flat dict: missing names take their defaults, unknown ones raise; lists become tuples."""
    table = fields_by_name()
    flat = {name: value for name, value in flat.items() if name not in RETIRED}
    unknown = sorted(set(flat) - set(table))
    if unknown:
        raise ValueError(f"unknown configuration keys: {', '.join(unknown)}")
    parts: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in flat.items():
        parts[table[name][0]][name] = tuple(value) if isinstance(value, list) else value
    return Run(**{section: cls(**parts[section]) for section, cls in sections().items()})


def replace(run: Run, **changes: Any) -> Run:
    """Return a copy of `run` with the named fields changed, whichever section they are in."""
    sources = {name: place for name, place in run.sources.items() if name not in changes}
    return dataclasses.replace(
        build({**flatten(run), **changes}),
        warnings=run.warnings,
        sources=sources,
        explicit=run.explicit - changes.keys(),
    )


# Derived values


class DerivedSettings:
    """The values that follow from a run's settings, each computed once: `run.derived.head_size`.

    They assume that `rules.check` has passed, unless they say otherwise. Letters: H hidden size, F expert width, E
    experts, K experts per token, S sequence length.
    """

    def __init__(self, run: RunSections) -> None:
        self._run = run

    # Layout

    @cached_property
    def model_ranks(self) -> int:
        """TP x PP x CP: ranks that one copy of the dense layers takes."""
        p = self._run.parallel
        return p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return DP, the copies of the dense layers."""
        return world_size // self.model_ranks

    @cached_property
    def expert_tensor_parallel_size(self) -> int:
        """ETP: ranks one expert is split over; TP unless the flag says otherwise."""
        etp = self._run.parallel.expert_tensor_parallel_size
        return self._run.parallel.tensor_model_parallel_size if etp is None else etp

    @cached_property
    def expert_ranks(self) -> int:
        """EP x ETP x PP: ranks that one copy of the experts takes."""
        p = self._run.parallel
        return p.expert_model_parallel_size * self.expert_tensor_parallel_size * p.pipeline_model_parallel_size

    def expert_data_parallel_size(self, world_size: int) -> int:
        """Return the copies of the experts; smaller than DP as soon as EP x ETP > TP x CP."""
        return world_size // self.expert_ranks

    @cached_property
    def pipeline_stages(self) -> tuple[Stage, ...]:
        """Every stage of the pipeline, virtual ones too, in the order in which a micro-batch goes through them.

        Raises:
            ConfigError: if the layers cannot be split in this way.
        """
        return stages_of(self._run)

    def chunks_of_pipeline_rank(self, pp_rank: int) -> tuple[Stage, ...]:
        """Return the stages of a pipeline rank, one per model chunk."""
        return self.pipeline_stages[pp_rank :: self._run.parallel.pipeline_model_parallel_size]

    @cached_property
    def pipeline_layer_counts(self) -> tuple[int, ...]:
        """Layers of the decoder of each pipeline rank; a ConfigError if they cannot be split in this way."""
        ranks = range(self._run.parallel.pipeline_model_parallel_size)
        return tuple(sum(len(stage.layers) for stage in self.chunks_of_pipeline_rank(rank)) for rank in ranks)

    @cached_property
    def virtual_pipeline_size(self) -> int | None:
        """VPP: model chunks per pipeline rank; None without the interleaved schedule, which one chunk is too."""
        chunks = len(self.pipeline_stages) // self._run.parallel.pipeline_model_parallel_size
        return chunks if chunks > 1 else None

    @cached_property
    def predictions_pipeline_rank(self) -> int | None:
        """The pipeline rank of multi-token prediction where the loss is not in its stage; None elsewhere.

        That stage has its own embedding, and sends on the hidden states of every depth.
        """
        for index, stage in enumerate(self.pipeline_stages):
            if stage.predictions and not stage.loss:
                return index % self._run.parallel.pipeline_model_parallel_size
        return None

    @cached_property
    def mla_cp_exchange(self) -> str | None:
        """What context-parallel ranks of latent attention exchange: "latent" or "expanded"; None without such ranks."""
        if not self._run.model.multi_latent_attention or self._run.parallel.context_parallel_size == 1:
            return None
        return self._run.parallel.mla_cp_exchange or exchange_cost(self._run, self.params_dtype_name).cheaper

    @cached_property
    def routers_know_documents(self) -> bool:
        """Whether routers are told `documents`, because tokens may be padding, or because they balance by documents."""
        data = self._run.data
        may_pad = data.packing != "none" or data.program_data
        return data.reset_attention_mask and (may_pad or self._run.moe.moe_seq_aux_loss_per == "document")

    @cached_property
    def keeps_routes(self) -> bool:
        """Whether routes are recorded or replayed, so that tokens carry their number."""
        replayed = self._run.moe.moe_enable_routing_replay
        return replayed is not None or self._run.logging.moe_routing_trace_path is not None

    # Batches and schedule

    def global_batch_size(self, world_size: int) -> int:
        """Return the sequences per optimizer step, after any ramp-up; default micro-batch-size x DP."""
        given = self._run.training.global_batch_size
        return self._run.training.micro_batch_size * self.data_parallel_size(world_size) if given is None else given

    def num_microbatches(self, world_size: int) -> int:
        """Return the micro-batches per rank and optimizer step, after any ramp-up."""
        return self.global_batch_size(world_size) // (
            self._run.training.micro_batch_size * self.data_parallel_size(world_size)
        )

    @cached_property
    def schedule_unit(self) -> str:
        """What the learning rate's schedule counts: "iterations", or "sequences" where a length is given in them."""
        options, training = self._run.optimizer, self._run.training
        lengths = (options.lr_decay_samples, options.lr_warmup_samples, options.lr_wsd_decay_samples)
        return "iterations" if {training.train_samples, *lengths} == {None} else "sequences"

    def _length(self, iters: int | None, samples: int | None) -> int | None:
        """Return a length in the unit of the schedule; None where neither is given."""
        if samples is not None or iters is None or self.schedule_unit == "iterations":
            return iters if samples is None else samples
        return iters * (self._run.training.global_batch_size or 1)

    @cached_property
    def lr_decay_length(self) -> int | None:
        """Length of the learning rate's decay: by the flags, else the rest of the run; None where neither is set."""
        options, training = self._run.optimizer, self._run.training
        decay = self._length(options.lr_decay_iters, options.lr_decay_samples)
        if decay is not None:
            return decay
        steps = training.train_iters
        if steps is not None:
            steps -= options.lr_restart_at or 0
        return self._length(steps, training.train_samples)

    @cached_property
    def lr_warmup_length(self) -> float:
        """Length of the linear warm-up, from a count or from the share of the decay."""
        options = self._run.optimizer
        if options.lr_warmup_fraction is None:
            return self._length(options.lr_warmup_iters or None, options.lr_warmup_samples) or 0
        share = options.lr_warmup_fraction * (self.lr_decay_length or 0)
        return share if self.schedule_unit == "sequences" else int(share)

    @cached_property
    def lr_wsd_decay_length(self) -> int | None:
        """Length of the last phase of WSD; None where neither flag is set."""
        return self._length(self._run.optimizer.lr_wsd_decay_iters, self._run.optimizer.lr_wsd_decay_samples)

    # Model

    @cached_property
    def params_dtype_name(self) -> str:
        """Dtype of weights and activations: "bfloat16", "float16" or "float32"."""
        if self._run.precision.bf16:
            return "bfloat16"
        return "float16" if self._run.precision.fp16 else "float32"

    @cached_property
    def zero_stage(self) -> int:
        """What data-parallel ranks share: 0 nothing, 1 the optimizer, 2 gradients too, 3 weights too."""
        if self._run.parallel.use_torch_fsdp2:
            return 3
        strategy = self._run.parallel.data_parallel_sharding_strategy
        if strategy is None:
            return int(self._run.optimizer.use_distributed_optimizer)
        return SHARDING_STRATEGIES.index(strategy)

    @cached_property
    def grads_in_fp32(self) -> bool:
        """Whether weight gradients are accumulated over micro-batches, and reduced over ranks, in fp32."""
        given = self._run.precision.accumulate_allreduce_grads_in_fp32
        return not self._run.precision.grad_reduce_in_bf16 if given is None else given

    @cached_property
    def fp8_format_of_experts(self) -> str | None:
        """The value of `--fp8-format` for routed experts: None where they multiply in the model's dtype."""
        precision = self._run.precision
        return precision.fp8_format if "experts" in precision.fp8_modules else None

    @cached_property
    def bf16_layers(self) -> tuple[int, ...]:
        """The layers of the decoder, from 0, that `--first-last-layers-bf16` leaves out of FP8."""
        precision, layers = self._run.precision, self._run.model.num_layers
        if not precision.first_last_layers_bf16:
            return ()
        first_last = layers - precision.num_layers_at_end_in_bf16
        return tuple(i for i in range(layers) if i < precision.num_layers_at_start_in_bf16 or i >= first_last)

    @cached_property
    def health_interval(self) -> int:
        """Iterations between health measurements; 0: none. A measured step is slower: not every one is."""
        given = self._run.logging.health_interval
        return max(self._run.logging.log_interval, 10) if given is None else given

    @cached_property
    def ffn_hidden_size(self) -> int:
        """Width of a dense layer's MLP."""
        given = self._run.model.ffn_hidden_size
        return 4 * self._run.model.hidden_size if given is None else given

    @cached_property
    def moe_ffn_hidden_size(self) -> int:
        """F: width of one expert."""
        given = self._run.moe.moe_ffn_hidden_size
        return self.ffn_hidden_size if given is None else given

    @cached_property
    def head_size(self) -> int:
        """Width of one head of grouped-query attention."""
        given = self._run.model.kv_channels
        return self._run.model.hidden_size // self._run.model.num_attention_heads if given is None else given

    @cached_property
    def num_query_groups(self) -> int:
        """Key/value heads; one per attention head unless grouped-query attention is on."""
        model = self._run.model
        return (model.group_query_attention and model.num_query_groups) or model.num_attention_heads

    @cached_property
    def max_position_embeddings(self) -> int:
        """Largest position the model is built for, and up to which its attention is the whole one."""
        model = self._run.model
        given = model.seq_length if model.max_position_embeddings is None else model.max_position_embeddings
        return given if model.dsa_indexer_topk is None else min(given, model.dsa_indexer_topk)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of the embedding table: those of the flag, or the vocabulary rounded up to aligned shares.

        The shares of the TP ranks are equal.

        Raises:
            ConfigError: `--padded-vocab-size` has fewer rows than there are tokens, or does not divide by TP.
        """
        given, tp = self._run.model.padded_vocab_size, self._run.parallel.tensor_model_parallel_size
        multiple = self._run.model.make_vocab_size_divisible_by * tp
        aligned = (vocab_size + multiple - 1) // multiple * multiple
        if given is None:
            return aligned
        if given < vocab_size or given % tp:
            raise ConfigError(
                f"--padded-vocab-size {given}: a table for {vocab_size} tokens and --tensor-model-parallel-size {tp} "
                f"has at least {vocab_size} rows, in equal shares; use --padded-vocab-size {aligned}, or drop it"
            )
        return given

    @cached_property
    def norm_topk_prob(self) -> bool:
        """Whether a token's K weights sum to one (before the scaling factor).

        By default it follows Megatron-LM: a softmax over the chosen experts sums to one by itself, a softmax over all
        experts is not normalised, and other scores are when K > 1.
        """
        given = self._run.moe.moe_router_norm_topk_prob
        if given is not None:
            return given
        if self._run.moe.moe_router_score_function != "softmax":
            return self._run.moe.moe_router_topk > 1
        return not self._run.moe.moe_router_pre_softmax

    @cached_property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Modules that `--recompute-granularity selective` recomputes; none without it. Megatron-LM's default."""
        if self._run.training.recompute_granularity != "selective":
            return ()
        given = self._run.training.recompute_modules
        return ("core_attn",) if given is None else given

    @cached_property
    def moe_layer_pattern(self) -> tuple[int, ...]:
        """One entry per layer: 1 for a MoE layer, 0 for a dense one.

        `--moe-layer-freq N` makes layer i (from 0) a MoE layer where i % N == 0; an expression like `[0]+[1]*3` spells
        the pattern out.

        Raises:
            ConfigError: the frequency is not positive, or the expression is no list of 0 and 1, one entry per layer.
        """
        layers, freq = self._run.model.num_layers, self._run.moe.moe_layer_freq
        if self._run.moe.num_experts is None:
            return (0,) * layers
        if isinstance(freq, int):
            if freq < 1:
                raise ConfigError(f"--moe-layer-freq {freq}: must be at least 1; 1 makes every layer a MoE layer")
            return tuple(int(i % freq == 0) for i in range(layers))
        return _layer_pattern("--moe-layer-freq", freq, layers, "0 (dense) or 1 (MoE)")

    @cached_property
    def window(self) -> int | None:
        """How many tokens before itself a token sees, in layers with a window; None without `--window-size`.

        Raises:
            ConfigError: it is not LEFT,0 with a LEFT of 1 or more.
        """
        given = self._run.model.window_size
        if given is None:
            return None
        left, comma, right = given.strip("() ").replace(" ", "").partition(",")
        if not (left.isdecimal() and int(left) > 0 and comma and right == "0"):
            raise ConfigError(
                f"--window-size {given}: not LEFT,0; attention is causal, and 127,0 is a window of 128 tokens"
            )
        return int(left)

    @cached_property
    def window_pattern(self) -> tuple[int, ...]:
        """One entry per layer of the decoder: 1 for a layer with a window, 0 for one that sees all before it.

        `--window-attn-skip-freq N` leaves out every N-th layer, as in Megatron-LM: layer i (from 0) where (i + 1) % N
        is 0.

        Raises:
            ConfigError: as `window` and `moe_layer_pattern`.
        """
        layers, freq = self._run.model.num_layers, self._run.model.window_attn_skip_freq
        if self.window is None:
            return (0,) * layers
        if freq is None:
            return (1,) * layers
        if isinstance(freq, int):
            if freq < 2:
                raise ConfigError(f"--window-attn-skip-freq {freq}: no layer has a window; use 2 or more")
            return tuple(int((i + 1) % freq != 0) for i in range(layers))
        return _layer_pattern("--window-attn-skip-freq", freq, layers, "0 (no window) or 1 (a window)")

    @property
    def gated(self) -> bool:
        """Whether MLPs multiply an activated half by the other one."""
        return self._run.model.swiglu or self._run.model.quick_geglu

    # Counts

    def _attention_weights(self, vectors: bool) -> int:
        m, h, n = self._run.model, self._run.model.hidden_size, self._run.model.num_attention_heads
        if m.multi_latent_attention:
            qk = m.qk_head_dim + m.qk_pos_emb_head_dim
            query = h * n * qk if m.q_lora_rank is None else m.q_lora_rank * (h + n * qk)
            down = h * (m.kv_lora_rank + m.qk_pos_emb_head_dim)
            up = m.kv_lora_rank * n * (m.qk_head_dim + m.v_head_dim)
            norms = (m.q_lora_rank or 0) + m.kv_lora_rank if vectors and m.qk_layernorm else 0
            return query + down + up + n * m.v_head_dim * h + norms
        found = 2 * h * (n + self.num_query_groups) * self.head_size
        if not vectors:
            return found
        if m.add_bias_linear or m.add_qkv_bias:
            found += (n + 2 * self.num_query_groups) * self.head_size
        if m.add_bias_linear:
            found += h
        if m.softmax_type == "learnable":
            found += n
        normed = n + self.num_query_groups if m.qk_layernorm_across_heads else 2
        return found + (normed * self.head_size if m.qk_layernorm else 0)

    def _mlp_weights(self, width: int, vectors: bool) -> int:
        h, up = self._run.model.hidden_size, (2 if self.gated else 1)
        biases = up * width + h if vectors and self._run.model.add_bias_linear else 0
        return (up + 1) * h * width + biases

    def _layer_weights(self, is_moe: int, experts_counted: int, vectors: bool = True) -> int:
        """Return the parameters of one transformer layer: matrices and, with `vectors`, norms and biases."""
        h = self._run.model.hidden_size
        found = self._attention_weights(vectors) + (2 * h if vectors else 0)
        if not is_moe:
            return found + self._mlp_weights(self.ffn_hidden_size, vectors)
        shared = self._run.moe.moe_shared_expert_intermediate_size
        found += (self._run.moe.num_experts or 0) * (h + int(vectors and self._run.model.add_bias_linear))
        found += experts_counted * self._mlp_weights(self.moe_ffn_hidden_size, vectors)
        found += self._mlp_weights(shared, vectors) if shared else 0
        return found + (h if self._run.moe.moe_shared_expert_gate else 0)

    def _parameters(self, padded_vocab: int, experts_counted: int) -> int:
        h, pattern = self._run.model.hidden_size, self.moe_layer_pattern
        tables = (2 if self._run.model.untie_embeddings_and_output_weights else 1) * padded_vocab * h
        dense, moe = (self._layer_weights(is_moe, experts_counted) for is_moe in (0, 1))
        num_moe = sum(pattern)
        decoder = (len(pattern) - num_moe) * dense + num_moe * moe + h
        # A depth: a layer like the last, the product that merges two vectors, three norms. The model's tables serve it.
        depth = (moe if pattern[-1] else dense) + 2 * h * h + 3 * h
        return tables + decoder + (self._run.model.mtp_num_layers or 0) * depth

    def parameter_count(self, padded_vocab: int) -> int:
        """Return the trainable parameters of the whole model (expert_bias is a buffer and not among them).

        The layers of multi-token prediction are among them; the two tables that these share with the model count once.
        """
        return self._parameters(padded_vocab, self._run.moe.num_experts or 0)

    def active_parameter_count(self, padded_vocab: int) -> int:
        """Return the parameters that one token meets in training: K of the E experts, everything else."""
        return self._parameters(padded_vocab, self._run.moe.moe_router_topk)

    def training_bytes(self, padded_vocab: int) -> int:
        """Return the least bytes of training over all ranks: of weights, gradients, main weights and moments."""
        width = 4 if self.params_dtype_name == "float32" else 2
        numel = self.parameter_count(padded_vocab)
        if self._run.optimizer.freeze or self._run.training.skip_train:  # gradients and moments of some or of none
            return width * numel
        gradient = 4 if self.grads_in_fp32 else width
        main_weights, average = self.main_weight_bytes(numel, width), self.average_bytes(numel)
        return (width + gradient) * numel + main_weights + self.moment_bytes(numel, numel) + average

    @property
    def packs_main_weights(self) -> bool:
        """Whether main weights are stored as the bf16 weights and their rests.

        From ZeRO's stage 2 on they are the weights' shards, which have no bf16 copy.
        """
        packed = self._run.optimizer.use_precision_aware_optimizer and self._run.precision.bf16
        return packed and self.zero_stage < 2

    def main_weight_bytes(self, numel: int, width: int) -> int:
        """Return the bytes of the main weights of `numel` weights in a model of `width` bytes each, next to these."""
        if width == 4:
            return 0
        return 2 * numel + -(-numel // 8) if self.packs_main_weights else 4 * numel

    def moment_bytes(self, numel: int, matrices: int = 0) -> int:
        """Return the bytes of Adam's two moments of `numel` weights, and of Muon's one of those that are matrices."""
        options = self._run.optimizer
        second = numel - matrices if options.optimizer == "muon" else numel
        moments = ((options.exp_avg_dtype, numel), (options.exp_avg_sq_dtype, second))
        sizes = {"fp32": 4, "bf16": 2}
        return sum(sizes[name] * each if name in sizes else each + -(-each // 128) for name, each in moments)

    def average_bytes(self, numel: int) -> int:
        """Return the bytes of the average of `numel` weights; none without `--ema-decay`."""
        return 4 * numel if self._run.optimizer.ema_decay is not None else 0

    def flops_per_token(self, padded_vocab: int, keys: float | None = None) -> float:
        """Return the FLOPs of training on one token: forward and backward, a multiply-add being 2, no recomputation.

        Matrix products and attention are counted; norms, activations and the softmax are not. The backward pass costs
        twice the forward. The planner's `meta_tracer.py` counts the same while operations run.

        Args:
            keys: keys per query; None: S / 2, the causal half. Documents apart have half of their lengths, too.
        """
        m, h, pattern = self._run.model, self._run.model.hidden_size, self.moe_layer_pattern
        widths = 2 * self.head_size  # of a query's products with a key and of a weight's with a value
        if m.multi_latent_attention:
            widths = m.qk_head_dim + m.qk_pos_emb_head_dim + m.v_head_dim
        keys = m.seq_length / 2 if keys is None else keys
        # Of a query at place p, min(p, window): half of the window's square is missing where documents begin.
        window = min(self.window or 0, 2 * keys)
        seen = sum(window - window**2 / (4 * keys) if windowed else keys for windowed in self.window_pattern)
        of_key = 2 * m.num_attention_heads * widths
        active = self._run.moe.moe_router_topk
        dense, moe = (2 * self._layer_weights(is_moe, active, vectors=False) for is_moe in (0, 1))
        num_moe, output = sum(pattern), 2 * h * padded_vocab
        forward = (m.num_layers - num_moe) * dense + num_moe * moe + of_key * seen + output
        # A depth of multi-token prediction: a layer like the last, the product of two vectors, the output layer again.
        depth = (moe if pattern[-1] else dense) + of_key * keys + 4 * h * h + output
        return 3.0 * (forward + (m.mtp_num_layers or 0) * depth)


def grouped_product_refusal(dtype_name: str, hidden_size: int, width: int) -> str | None:
    """Return why torch's grouped product cannot take experts of this width on a rank, F / ETP; None where it can."""
    multiple = {"float32": 4, "bfloat16": 8, "float16": 8}.get(dtype_name, 1)  # rows of whole 16 bytes
    if hidden_size % multiple == 0 and width % multiple == 0:
        return None
    return (
        f"in {dtype_name}, hidden size and the expert's width on a rank ({width}) have to be multiples of {multiple}; "
        "change them or use --moe-expert-backend loop"
    )


def _layer_pattern(flag: str, expression: str, layers: int, meaning: str) -> tuple[int, ...]:
    """Return what a list expression says of each layer; a ConfigError if it is no list of 0 and 1, one per layer."""
    example = f"e.g. '[0]+[1]*{layers - 1}'"
    try:
        pattern = _list_expression(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ConfigError(f"{flag} {expression!r}: not a list expression; write {example}") from None
    if any(entry not in (0, 1) for entry in pattern):
        raise ConfigError(f"{flag} {expression!r}: entries are {meaning}; {example}")
    if len(pattern) != layers:
        raise ConfigError(
            f"{flag} {expression!r}: has {len(pattern)} entries for --num-layers {layers}; one per layer, {example}"
        )
    return tuple(pattern)


def _list_expression(node: ast.expr) -> list[int]:
    """Return a list built of integer lists, `+` and `* count`: the arithmetic that layer patterns use."""
    match node:
        case ast.List(elts=items) if all(isinstance(i, ast.Constant) and type(i.value) is int for i in items):
            return [item.value for item in items]  # type: ignore[attr-defined]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list_expression(left) + _list_expression(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(count))) if 0 <= count <= 10_000:
            return _list_expression(left) * count
    raise ValueError("not a list expression")
