"""Opens a checkpoint in one process, without a launcher: the model with its weights, whatever kind of folder it is.

    with load_model(locate(Path("checkpoints"))) as found:
        logits = found.model(tokens, positions, None)

Weights are read tensor by tensor: in addition to the model, memory is needed for the largest of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as Named
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe import platform
from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config import rules, schema
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.launch import launched_world
from megatron_moe.config.schema import Run
from megatron_moe.hf.mapping import Mapping, mapping
from megatron_moe.hf.tensors import dtype_name
from megatron_moe.io.program import say
from megatron_moe.io.texts import size_text
from megatron_moe.model.build import build_model
from megatron_moe.model.engine_config import transformer_config
from megatron_moe.model.float16_module import Float16Module
from megatron_moe.parallel import groups
from megatron_moe_tools.models.source import PRECISION_FLAGS, BlockValues, ModelSource

_RESERVE = 256 * 2**20
"""Bytes for buffers of the libraries, in addition to weights and what the caller names."""
_PADDING = ("make_vocab_size_divisible_by", "padded_vocab_size")
_TABLES = {"embedding.word_embeddings.weight", "output_layer.weight"}


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A model of this process that was read from a checkpoint.

    source: where it was read. run: its settings, for one process, in the requested dtype.
    model: the chunk in evaluation mode, on this machine's device, wrapped if it is in half precision.
    chunk: the chunk without a wrapper.
    """

    source: ModelSource
    run: Run
    model: torch.nn.Module
    chunk: torch.nn.Module

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary, without padding."""
        return _vocab_size(self.run)

    @property
    def mapping(self) -> Mapping:
        """Mapping of its tensors to those of a Hugging Face folder. Raises ConfigError: it belongs to no family."""
        return mapping(self.run, self.source.family.names)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by the keys that checkpoints give them."""
        return saved_tensors(self.chunk)


@contextmanager
def load_model(
    source: ModelSource,
    *,
    dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    gradients: bool = False,
    working_bytes: int = 0,
) -> Iterator[LoadedCheckpoint]:
    """Build the model of a checkpoint and fill it; the process groups of one process exist within the block.

    Weights are widened exactly, or rounded where `dtype`, float32, bfloat16 or float16, is narrower; the router's
    biases are fp32 in any case. layers: build this many of the first, and none of multi-token prediction. gradients:
    whether their memory counts. working_bytes: needed in addition. Raises ConfigError: there is too little memory or
    more than one process, no model has these settings, or the tensors are not those of the model.
    """
    if dist.is_initialized():
        raise RuntimeError("a checkpoint is opened in a process that is in no process group")
    try:
        yield open_model(source, dtype, layers, 1 + gradients, working_bytes)
    finally:
        groups.destroy()


def open_model(
    source: ModelSource, dtype: torch.dtype, layers: int | None = None, copies: int = 1, working_bytes: int = 0
) -> LoadedCheckpoint:
    """Build and fill a model as `load_model` does; the process groups of one process stay.

    copies: of the parameters that memory is needed for.
    """
    if launched_world()[1] != 1:
        raise ConfigError(f"WORLD_SIZE {os.environ['WORLD_SIZE']}: this needs one process; start it without torchrun")
    run = one_process(source.run, dtype, layers)
    remedy = "free some, use a larger machine, or fewer and shorter sequences where those are what takes it"
    require_memory(source, run, dtype.itemsize * copies, working_bytes, remedy)
    (chunk,) = build_model(run, groups.initialize(run), _vocab_size(run), wrap=False, draw=False)
    chunk.to(platform.device())
    model: torch.nn.Module = chunk
    if run.precision.bf16 or run.precision.fp16:
        model = Float16Module(transformer_config(run), chunk)
    model.eval()
    fill(saved_tensors(chunk), source.blocks(run), str(source.path), dict.fromkeys(_TABLES, _vocab_size(run)))
    return LoadedCheckpoint(source, run, model, chunk)


def require_memory(source: ModelSource, run: Run, width: int, working_bytes: int, remedy: str) -> None:
    """Check that a model with `width` bytes a parameter fits into memory. Raises ConfigError, with `remedy`."""
    needed, available = bytes_needed(run, width, working_bytes), platform.available_memory_bytes()
    if needed > available:
        parameters = (needed - working_bytes - _RESERVE) // width
        raise ConfigError(
            f"{source.path}: {parameters:,} parameters, at {width} bytes each, take {size_text(parameters * width)}, "
            f"{size_text(needed)} with what is computed; {size_text(available)} are free on this machine "
            f"({platform.device().type}): {remedy}"
        )


def bytes_needed(run: Run, width: int, working_bytes: int) -> int:
    """Return the bytes of a model of one process with `width` bytes a parameter, and of what is computed."""
    parameters = run.derived.parameter_count(run.derived.padded_vocab_size(_vocab_size(run)))
    return parameters * width + working_bytes + _RESERVE


def one_process(run: Run, dtype: torch.dtype = torch.float32, layers: int | None = None) -> Run:
    """Return the run of one process that evaluates a model: the architecture, and defaults for everything else."""
    flat = schema.flatten(run)
    kept = {name: flat[name] for name in (*architecture_keys(), "moe_router_dtype", *_PADDING)}
    kept["max_position_embeddings"] = kept["seq_length"] = run.derived.max_position_embeddings
    kept |= {"cross_entropy_loss_fusion": False, "cross_entropy_chunk_tokens": None}
    kept |= PRECISION_FLAGS[dtype_name(dtype)]
    if layers is not None:
        kept |= {"num_layers": layers, "mtp_num_layers": None}
        if run.moe.num_experts is not None:
            kept["moe_layer_freq"] = str(list(run.derived.moe_layer_pattern[:layers]))
        windowed = run.derived.window_pattern[:layers]
        kept["window_attn_skip_freq"] = str(list(windowed))
        if not any(windowed):
            kept |= {"window_size": None, "window_attn_skip_freq": None}
    result = schema.build(kept)
    if result.moe.num_experts is not None and (result.model.hidden_size % 8 or result.derived.moe_ffn_hidden_size % 8):
        # torch's grouped product needs rows of whole 16 bytes
        result = schema.replace(result, moe_expert_backend="loop")
    rules.check_model(result, 1)
    return result


def saved_tensors(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a whole model's parameters and the buffers that are saved, by the keys that checkpoints give them."""
    state = chunk.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _vocab_size(run: Run) -> int:
    assert run.model.vocab_size is not None, "a source knows its vocabulary"
    return run.model.vocab_size


@torch.no_grad()
def fill(tensors: Named[str, Tensor], blocks: Iterable[BlockValues], where: str, rows: Named[str, int]) -> None:
    """Copy blocks, boxes that do not overlap, into a model's tensors, widened or rounded to their dtypes.

    rows: for tables that are padded, here or in the checkpoint, the number of rows that are tokens; rows after them are
    left out of the blocks, and zero in the model. Raises ConfigError, naming `where`: a tensor is not written once, a
    block belongs to no tensor or is not within it, or contains a number that is not finite.
    """
    written = dict.fromkeys(tensors, 0)
    for key, tensor in tensors.items():
        tensor.fill_(torch.nan)
        if key in rows:
            tensor[rows[key] :] = 0
            written[key] += tensor[rows[key] :].numel()
    for block in blocks:
        if block.key not in tensors:
            raise ConfigError(f"{where}: {block.name}: the model has no tensor {block.key}")
        tensor, values = tensors[block.key], block.values
        if block.key in rows:
            values = values[: max(rows[block.key] - block.start[0], 0)]
        ends, wide = list(map(int.__add__, block.start, values.shape)), tensor.shape
        if len(ends) != tensor.dim() or (values.numel() and any(map(int.__gt__, ends, wide))):
            raise ConfigError(
                f"{where}: {block.name}: {list(values.shape)} at {list(block.start)} is not within {block.key}, "
                f"which has the shape {list(tensor.shape)}"
            )
        if not torch.isfinite(values).all():
            raise ConfigError(f"{where}: {block.name} contains NaN or infinity: it is damaged, or of a faulty run")
        if values.numel():
            tensor[tuple(map(slice, block.start, ends))].copy_(values)
        written[block.key] += values.numel()
    wrong = [key for key, count in written.items() if count != tensors[key].numel()]
    if wrong:
        shown = ", ".join(f"{key} ({written[key]} of {tensors[key].numel()} elements)" for key in wrong[:10])
        raise ConfigError(f"{where}: {len(wrong)} tensors of the model are not written once: {shown}")


def transformers_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return the transformers model of a folder on the CPU, with its weights if it has any, and say so.

    Raises:
        ConfigError: transformers is missing or does not load the folder.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(f"--hf {folder}: needs the package transformers; install it") from None
    has_weights = any([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    say(f"building {folder} in {dtype_name(dtype)} with {'its' if has_weights else 'random'} weights")
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        if has_weights:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        config = AutoConfig.from_pretrained(folder, **options)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--hf {folder}: {error}") from error
