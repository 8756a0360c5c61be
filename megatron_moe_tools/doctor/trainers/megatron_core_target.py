"""The target megatron-core: the engine as Megatron-LM runs it, on a small copy of what a launch script trains.

Model, layer specs, router, gradient buffers, reduction of gradients, optimizer and schedule are the engine's own, and
none of this project's replacements for its defects is in use. What the engine cannot do without CUDA or Transformer
Engine is done in its place in `its_own_layers_run`, or is left out and named in `leaves_out`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.model_flags import QUANTILE
from megatron_moe.config.paths import read_settings
from megatron_moe.config.schema import Run, flatten
from megatron_moe.engine.import_hook import its_own_layers_run
from megatron_moe.engine.optimizer import owned_part
from megatron_moe_tools import compat
from megatron_moe_tools.compat.flags import read_script, read_test_case
from megatron_moe_tools.doctor.small_copy import AUX_LOSS_COEFF, Z_LOSS_COEFF, small_copy
from megatron_moe_tools.doctor.trainers.protocol import Held
from megatron_moe_tools.doctor.trainers.samples import IGNORED, MicroBatch, Sizes

try:  # since 0.19
    from megatron.core.transformer.moe import moe_logging
except ImportError:
    moe_logging = None

_ADAM = ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
_LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
_AXES = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
}


MOST_RANKS = 4
_RENAMED = {"norm_epsilon": "layernorm_epsilon", "num_experts": "num_moe_experts"}
_OWN_WAY = frozenset(
    "activation_func attention_backend moe_layer_freq moe_router_load_balancing_type moe_aux_loss_coeff"
    " moe_enable_routing_replay recompute_modules transformer_impl window_size window_attn_skip_freq"
    " moe_enable_deepep moe_flex_dispatcher_backend cross_entropy_loss_fusion cross_entropy_fusion_impl".split()
)
"""Fields of a run that have another meaning or type in the engine's configuration, or change no number."""
_NEEDS_CUDA = frozenset(
    "overlap_moe_expert_parallel_comm delay_wgrad_compute cuda_graph_impl cuda_graph_scope"
    " fine_grained_activation_offloading offload_modules".split()
)
_RECOMPUTED_ALONE = ("core_attn", "mlp", "moe", "shared_experts")
"""Of --recompute-modules, those that need neither grouped GEMM nor Transformer Engine."""
_DISPATCHERS = ("allgather", "alltoall")
_SINKS = "softmax_offset"
"""A core attention's weight [heads], drawn at random by the engine, and cut along TP as heads are."""
# What a script may ask for, and cannot be built from the engine's own parts on a CPU.
_REFUSED = {
    "dsa_indexer_topk": "the engine's sparse attention needs Transformer Engine",
    "use_torch_fsdp2": "the engine's fully sharded models need CUDA",
}


def reduced_layout(run: Run) -> dict[str, int]:
    """Return the sizes of the run's axes, each at most 2; one stage where the ranks would be too many."""
    parallel, etp = run.parallel, run.derived.expert_tensor_parallel_size
    layout = {
        "tp": min(parallel.tensor_model_parallel_size, 2),
        "pp": min(parallel.pipeline_model_parallel_size, 2),
        "ep": min(parallel.expert_model_parallel_size, 2),
        "etp": min(etp, 2),
    }
    if ranks_of(layout) > MOST_RANKS:
        layout["pp"] = 1
    return layout


def ranks_of(layout: dict[str, int]) -> int:
    """Return the ranks that the layout takes at least."""
    return layout["pp"] * math.lcm(layout["tp"], layout["ep"] * layout["etp"])


def left_out(run: Run) -> dict[str, str]:
    """Return the names of checks and other things that are not checked, with the reason; refuse what cannot run."""
    given, defaults = flatten(run), flatten(Run())
    for name, reason in _REFUSED.items():
        if given[name] != defaults[name]:
            raise ConfigError(f"--{name.replace('_', '-')}: is not checked; {reason}. Leave it out of the file")
    kinds = run.moe.moe_router_load_balancing_type
    if {QUANTILE} & set(kinds):
        raise ConfigError("--moe-router-load-balancing-type quantile_balancing: is not the engine's")
    padding = "Megatron-LM's batches have none; routers are told of none"
    found = {"padding": padding, "padding-contents": padding}
    if run.moe.moe_expert_capacity_factor is not None:
        found["micro-batches"] = "a capacity is one of each micro-batch"
        if run.moe.moe_token_drop_policy != "position":
            found["later-tokens"] = "a capacity lets later tokens displace earlier ones"
    elif {"aux_loss", "global_aux_loss", "sinkhorn"} & set(kinds) and run.moe.num_experts is not None:
        found["micro-batches"] = f"{', '.join(kinds)} balances each micro-batch"
    dispatcher, optimizer = run.moe.moe_token_dispatcher_type, run.optimizer.optimizer
    others = {
        "context parallelism": (
            run.parallel.context_parallel_size > 1,
            "attention without Transformer Engine refuses it",
        ),
        "norms' marks for sequence parallelism": (
            run.parallel.sequence_parallel,
            "norms without Transformer Engine set none",
        ),
        "pipeline stages": (
            run.parallel.pipeline_model_parallel_size > reduced_layout(run)["pp"] == 1,
            f"with TP, EP and ETP more than {MOST_RANKS} ranks; check them with --expert-tensor-parallel-size 1",
        ),
        "virtual pipeline stages": (run.derived.virtual_pipeline_size is not None, "each rank has one stage"),
        f"optimizer {optimizer}": (optimizer != "adam", "Adam steps in its place"),
        "windows of attention": (
            run.model.window_size is not None,
            "attention without Transformer Engine looks at the whole sequence",
        ),
        "grouped GEMM": (run.moe.num_experts is not None, "experts multiply one after the other"),
        f"dispatcher {dispatcher}": (dispatcher not in _DISPATCHERS, "needs CUDA; alltoall takes its place"),
        "--overlap-param-gather": (run.parallel.overlap_param_gather, "weights are gathered after the step"),
    }
    for name, (is_given, reason) in others.items():
        if is_given:
            found[name] = reason
    for name in sorted(_NEEDS_CUDA & given.keys()):
        if given[name] != defaults[name]:
            found[f"--{name.replace('_', '-')}"] = "needs CUDA"
    for name in run.training.recompute_modules or ():
        if name not in _RECOMPUTED_ALONE:
            found[f"--recompute-modules {name}"] = "needs grouped GEMM or Transformer Engine"
    return found


def config_class(run: Run) -> type[TransformerConfig]:
    """Return the class of the engine's configuration."""
    if run.model.multi_latent_attention:
        return MLATransformerConfig
    return TransformerConfig


def config_fields(run: Run, copy: Run, layout: dict[str, int], plain: bool) -> dict[str, Any]:
    """Return the fields of the engine's configuration.

    Args:
        run: what the file says. copy: its small copy.
        plain: whether nothing is recomputed, and experts are reached in the simplest way: one process.
    """
    known = frozenset(map(attrgetter("name"), fields(config_class(copy))))
    found: dict[str, Any] = {}
    for name, value in flatten(copy).items():
        engine_name = _RENAMED.get(name, name)
        if engine_name in known and value is not None and name not in _OWN_WAY | _NEEDS_CUDA:
            found[engine_name] = value
    derived, model, moe = copy.derived, copy.model, run.moe
    found |= {
        "num_layers": len(derived.moe_layer_pattern) if len(set(derived.moe_layer_pattern)) > 1 else 2,
        "ffn_hidden_size": derived.ffn_hidden_size,
        "num_query_groups": max(derived.num_query_groups, 2),  # the engine wants one on each TP rank
        "kv_channels": derived.head_size,
        "gated_linear_unit": derived.gated,
        "activation_func": torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        "tensor_model_parallel_size": layout["tp"],
        "sequence_parallel": run.parallel.sequence_parallel and layout["tp"] > 1,
        "pipeline_model_parallel_size": layout["pp"],
        "expert_model_parallel_size": layout["ep"],
        "expert_tensor_parallel_size": layout["etp"],
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "deallocate_pipeline_outputs": False,  # gloo may still read them
    }
    if run.training.recompute_modules is not None:
        found["recompute_modules"] = list(filter(_RECOMPUTED_ALONE.__contains__, run.training.recompute_modules))
    if plain:
        found["recompute_granularity"] = found["recompute_method"] = found["recompute_num_layers"] = None
    if moe.num_experts is None:
        return found
    kinds, coefficients = list(moe.moe_router_load_balancing_type), []
    for value in moe.moe_aux_loss_coeff:
        coefficients.append(value and max(value, AUX_LOSS_COEFF))
    balancing: Any = (kinds, coefficients)
    if len(kinds) == 1:  # then the engine wants no lists
        balancing = (kinds[0], coefficients[0])
    dispatcher = moe.moe_token_dispatcher_type
    if dispatcher not in _DISPATCHERS:
        dispatcher = "alltoall"
    if plain and moe.moe_expert_capacity_factor is None:
        dispatcher = "allgather"
    found |= {
        "moe_layer_freq": list(derived.moe_layer_pattern)[: found["num_layers"]],
        "moe_ffn_hidden_size": derived.moe_ffn_hidden_size,
        "moe_router_load_balancing_type": balancing[0],
        "moe_aux_loss_coeff": balancing[1],
        "moe_z_loss_coeff": moe.moe_z_loss_coeff and max(moe.moe_z_loss_coeff, Z_LOSS_COEFF),
        "moe_token_dispatcher_type": dispatcher,
        "moe_grouped_gemm": False,
        "moe_shared_expert_overlap": False,  # needs CUDA's streams
    }
    return found


def load(path: Path) -> MegatronTrainer:
    """Return the trainer of a launch script, a text file of flags, or a YAML file of either.

    Raises:
        ConfigError: the file has no flags, or some that cannot be checked.
    """
    text = read_settings("--target megatron-core", str(path), "launch script")
    is_yaml = path.suffix in (".yaml", ".yml")
    script = read_test_case(text, str(path)) if is_yaml else read_script(text)
    argv: list[str] = []
    for flag, values in script.flags:
        argv += (flag, *map(script.resolved, values))
    if is_yaml and not argv:
        argv = ["--config", str(path)]
    if not argv:
        raise ConfigError(f"{path}: has no command of a .py program with flags, and no flags")
    return trainer_of(argv)


def trainer_of(argv: Sequence[str]) -> MegatronTrainer:
    """Return the trainer of a command's flags. Without --transformer-impl Megatron-LM uses Transformer Engine."""
    is_local = ("--transformer-impl", "local") in pairwise(argv)
    return MegatronTrainer(compat.parse(["--defaults", "megatron", *argv]), is_local)


class MegatronTrainer:
    """A `TestedTrainer` of the engine's own parts.

    Attributes:
        ranks: the layout's ranks.
        leaves_out: what is not checked, and why.

    Args:
        run: what is trained.
        is_local: whether it is trained without Transformer Engine.
    """

    vocabulary = Sizes.vocabulary

    def __init__(self, run: Run, is_local: bool = False) -> None:
        self._run, self._copy, self._is_local = run, small_copy(run), is_local
        self._layout = reduced_layout(run)
        self.ranks = ranks_of(self._layout)
        self.leaves_out = left_out(run)
        self.loss = "micro-batches"
        if run.optimizer.calculate_per_token_loss:
            self.loss = "tokens"
        self.packed = run.data.reset_attention_mask
        self._seen: dict[str, Tensor] = {}
        try:
            self._engine_config(parallel=True)
        except (ValueError, AssertionError) as error:
            raise ConfigError(f"megatron-core refuses the flags: {error}") from error

    def _engine_config(self, parallel: bool) -> TransformerConfig:
        layout = self._layout if parallel else dict.fromkeys(self._layout, 1)
        return config_class(self._copy)(**config_fields(self._run, self._copy, layout, plain=not parallel))

    def build(self, rank: int, world: int) -> None:
        """Build the engine's model and optimizer with weights that depend on their names alone."""
        parallel = world > 1
        layout = self._layout if parallel else dict.fromkeys(self._layout, 1)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            layout["tp"],
            layout["pp"],
            expert_model_parallel_size=layout["ep"],
            expert_tensor_parallel_size=layout["etp"],
            create_gloo_process_groups=False,
        )
        _forget_losses()
        model_parallel_cuda_manual_seed(1)
        sharded = parallel and self._run.derived.zero_stage > 0
        overlap = parallel and self._run.parallel.overlap_grad_reduce
        self._config = self._engine_config(parallel)
        self._tied = not self._copy.model.untie_embeddings_and_output_weights
        with its_own_layers_run():
            model = self._model()
        for name, module in self._routers(model):
            module.register_forward_hook(partial(self._count, name))
        for name, weight, cuts in self._weights_of(model):
            if weight.dim() > 1 or name.endswith(_SINKS):
                weight.data.copy_(_drawn(name, weight, cuts))
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
        )
        self._chunk = DistributedDataParallel(self._config, buffers, model)
        options = {name: getattr(self._copy.optimizer, name) for name in _ADAM}
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", use_distributed_optimizer=sharded, **options),
            [self._chunk],
            use_gloo_process_groups=False,
        )
        self._config.finalize_model_grads_func = finalize_model_grads
        self._config.grad_scale_func = self._optimizer.scale_loss
        if overlap:
            self._config.no_sync_func = self._chunk.no_sync

    def _model(self) -> GPTModel:
        model = self._copy.model
        spec = get_gpt_decoder_block_spec(self._config, use_transformer_engine=False, normalization=model.normalization)
        if model.multi_latent_attention and not self._is_local:
            # Transformer Engine's down projections are whole on each rank, the local spec's are cut.
            for layer in spec.layer_specs:
                attention = layer.submodules.self_attention.submodules
                attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        depths = None
        if self._config.mtp_num_layers and parallel_state.is_pipeline_last_stage():
            depths = get_gpt_mtp_block_spec(self._config, spec, use_transformer_engine=False)
        return GPTModel(
            self._config,
            spec,
            self.vocabulary,
            mtp_block_spec=depths,
            max_sequence_length=4 * Sizes.length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type=model.position_embedding_type,
            rotary_base=model.rotary_base,
            rotary_percent=model.rotary_percent,
            share_embeddings_and_output_weights=self._tied,
        )

    def step(self, batch: Sequence[MicroBatch]) -> Mapping[str, Any]:
        """Run the engine's schedule over the micro-batches; it reduces the gradients at its end."""
        self._seen = {}
        self._micro_batches = len(batch)
        self._chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        rows, length = batch[0]["input_ids"].shape
        with its_own_layers_run():
            said = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iter(batch),
                model=[self._chunk],
                num_microbatches=len(batch),
                seq_length=length,
                micro_batch_size=rows,
                forward_only=False,
            )
        # As Megatron-LM logs it: the sum over all micro-batches over the number of their tokens.
        total = torch.zeros(2)
        if parallel_state.is_pipeline_last_stage():
            total = torch.stack([one["lm loss"] for one in said]).sum(0)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
        return {"loss": float(total[0] / total[1])}

    def _forward_step(self, micro_batches: Iterator[MicroBatch], model: DistributedDataParallel) -> tuple[Tensor, Any]:
        batch = next(micro_batches)
        tokens, length = batch["input_ids"], batch["input_ids"].shape[1]
        # Labels here are the tokens themselves; Megatron-LM's are those that come next.
        labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        loss_mask = (labels != IGNORED).float()
        hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        if self.packed:
            documents = batch["documents"]
            hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
        losses = model(tokens, batch["position_ids"], hidden, labels=labels.clamp_min(0))
        return losses, partial(_loss, loss_mask)

    def _routers(self, model: GPTModel) -> Iterator[tuple[str, TopKRouter]]:
        for name, module in model.named_modules():
            if isinstance(module, TopKRouter):
                yield _global_name(model, name, (0, 1)), module

    def _count(self, name: str, _: TopKRouter, _inputs: object, outputs: tuple[Tensor, Tensor]) -> None:
        """Count what a router chose. A recomputed layer's first pass is without gradients, and not counted.

        Weights are counted, not the map: slots that pad an expert to its capacity are in the map.
        """
        if torch.is_grad_enabled():
            counts = (outputs[0] != 0).sum(0)
            self._seen[name] = self._seen.get(name, 0) + counts.to(torch.int64)

    def named_gradients(self) -> Iterator[tuple[str, Held]]:
        """Yield gradients as they are in the engine's buffers, reduced."""
        for name, weight, cuts in self._weights_of(self._chunk.module):
            part = owned_part(self._optimizer, weight)
            yield name, (cuts, getattr(weight, "main_grad"), (part.axis, part.begin, part.end))  # noqa: B009

    def named_weights(self) -> Iterator[tuple[str, Held]]:
        """Yield the model's weights."""
        for name, weight, cuts in self._weights_of(self._chunk.module):
            yield name, (cuts, weight.data, (None, 0, weight.numel()))

    def update(self) -> float:
        """Make the engine's optimizer step."""
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def routers(self) -> dict[str, dict[str, Any]]:
        """Return what the routers did; the bias is what `finalize_model_grads` has left."""
        losses = _logged_losses(self._config, self._micro_batches)
        found = {}
        for name, module in self._routers(self._chunk.module):
            counts = self._seen[name].clone()
            dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
            found[name] = {
                "counts": counts,
                "expert_bias": module.expert_bias,
                "bias_rate": self._config.moe_router_bias_update_rate,
                "aux_losses": {kind: float(values[module.layer_number - 1]) for kind, values in losses.items()},
            }
        return found

    def place(self) -> dict[str, tuple[int, int]]:
        """Return this rank's coordinates."""
        found = {}
        for axis, name in _AXES.items():
            rank = getattr(parallel_state, f"get_{name}_rank")()
            found[axis] = rank, getattr(parallel_state, f"get_{name}_world_size")()
        return found

    def save(self, folder: str) -> None:
        """Save model and optimizer by the engine's distributed checkpoint."""
        path = Path(folder, "engine")
        path.mkdir(exist_ok=True)
        dist_checkpointing.save(self._sharded_state(loading=False), str(path))

    def load(self, folder: str) -> None:
        """Load what `save` has saved."""
        found = dist_checkpointing.load(self._sharded_state(loading=True), str(Path(folder, "engine")))
        self._chunk.module.load_state_dict(found["model"])
        self._optimizer.load_state_dict(found["optimizer"])

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        how = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": group}
        model = self._chunk.module.sharded_state_dict(metadata=how)
        return {"model": model, "optimizer": self._optimizer.sharded_state_dict(model, loading, metadata=how)}

    def _weights_of(self, model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter, tuple]]:
        """Yield every weight with its name in the whole model and its cuts.

        Which axis a module splits is its class's; the marks that the engine puts on weights are not asked, since they
        are among what is checked.
        """
        place = self.place()
        for path, module in model.named_modules():
            for own, weight in module.named_parameters(recurse=False):
                name = _global_name(model, f"{path}.{own}", place["ep"])
                axis, stride, of = None, 1, "tp"
                if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding) or own == _SINKS:
                    axis = 0
                elif isinstance(module, RowParallelLinear) and own == "weight":
                    axis = 1
                if getattr(module, "is_expert", False):
                    of = "etp"
                if path.endswith("linear_fc1") and self._config.gated_linear_unit:
                    stride = 2  # gate and up are each split
                cuts: tuple[tuple[int, int, int, int], ...] = ()
                if axis is not None and place[of][1] > 1:
                    cuts = ((axis, *place[of], stride),)
                if self._tied and name == "output_layer.weight":  # the last stage's copy of the embedding
                    name = "embedding.word_embeddings.weight"
                yield name, weight, cuts


def _loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a micro-batch's loss as Megatron-LM's pretrain_gpt.py does: the sum, its tokens, and both to be logged."""
    total, tokens = (losses.float() * mask).sum(), mask.sum()
    return total, tokens.to(torch.int), {"lm loss": torch.stack([total.detach().clone(), tokens])}


def _drawn(name: str, weight: Tensor, cuts: tuple) -> Tensor:
    """Return a rank's share of a weight [of the whole model's shape] that its name alone decides."""
    shape = list(weight.shape)
    for axis, _, parts, _ in cuts:
        shape[axis] *= parts
    full = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.1
    for axis, part, parts, stride in cuts:
        full = torch.cat([block.chunk(parts, axis)[part] for block in full.chunk(stride, axis)], axis)
    return full


def _global_name(model: GPTModel, name: str, ep: tuple[int, int]) -> str:
    """Return a weight's name in the whole model: layers and experts are numbered on each rank for themselves."""
    words = name.split(".")
    if "layers" in words and words[0] == "decoder":  # the last stage has all depths of multi-token prediction
        at = words.index("layers") + 1
        words[at] = str(model.decoder.layers[int(words[at])].layer_number - 1)
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        words[at] = str(int(words[at]) + ep[0] * model.config.num_moe_experts // ep[1])
    return ".".join(words)


def _forget_losses() -> None:
    if moe_logging is None:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        moe_logging.destroy_moe_metrics_tracker()


def _logged_losses(config: TransformerConfig, micro_batches: int) -> dict[str, list[float]]:
    """Return each auxiliary loss of each layer as the engine logs it, over all ranks, and forget it.

    A stage without MoE layers takes part with zeros, as Megatron-LM has it (which asks for CUDA to do so).
    """
    kinds, names = config.moe_router_load_balancing_type, []
    for kind, name in _LOGGED.items():
        if kind == kinds or (isinstance(kinds, list) and kind in kinds):
            names.append(name)
    if config.moe_z_loss_coeff:
        names.append("z_loss")
    if config.num_moe_experts is None or not names:
        return {}
    layers = config.num_layers + (config.mtp_num_layers or 0)
    if moe_logging is None:
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        for name in names:
            tracker.setdefault(name, {"values": torch.zeros(layers)})
        moe_utils.reduce_aux_losses_tracker_across_ranks(names)
        values = [tracker[name]["values"] for name in names]
    else:
        metrics = moe_logging.get_moe_metrics_tracker()
        for name in names:
            metrics.ensure_initialized(name, layers)
        metrics._sync_metrics(names)
        values = [metrics.metrics[name].values for name in names]
    found = {name: (of_layers / micro_batches).tolist() for name, of_layers in zip(names, values)}
    _forget_losses()
    return found
