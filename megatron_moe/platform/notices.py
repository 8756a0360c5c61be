"""Notices of the engine and of torch that are kept out of a run's log.

They come at every start and to every user, about the engine's own code or about GPU libraries where there is no GPU:
nobody who reads the log of a run can act on them.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable

# (module that speaks, start of the message)
_NOTICES = (
    ("megatron.core.transformer.transformer_config", "full scope is deprecated"),  # its own default
    ("megatron.core.models.mimo.config.base_configs", "MimoModelConfig is experimental"),
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel: full_param_layout not provided"),
    ("megatron.core.optimizer.optimizer", "The .grad attribute of a Tensor that is not a leaf"),  # it tests views
    ("torch.distributed.c10d_logger", "`torch.distributed.reduce_scatter_tensor` is deprecated"),
    ("torch.distributed.c10d_logger", "`torch.distributed.all_gather_into_tensor` is deprecated"),
)
_NOTICES_ABOUT_GPU_LIBRARIES = (
    ("megatron.core.optimizer", "Transformer Engine and Apex are not installed"),
    ("megatron.core.optimizer.optimizer", "Transformer Engine and Apex are not installed"),
    ("megatron.core.optimizer.clip_grads", "Transformer Engine and Apex are not installed"),
    (
        "megatron.core.distributed.fsdp.src.megatron_fsdp.mixed_precision",
        "Transformer Engine and Apex are not installed",
    ),
    ("megatron.core.models.backends", "Apex is not installed"),
    ("megatron.core.models.gpt.gpt_layer_specs", "Apex is not installed"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),  # 0.19.2 imports it
    # The random state tracker moves the CPU generator, as it should here; stock warns at every dropout.
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
)


def keep_out(without_cuda: bool) -> None:
    """Drop the notices, whether they come as warnings or as log records; with CUDA, only those about other things."""
    for module, text in _NOTICES + (_NOTICES_ABOUT_GPU_LIBRARIES if without_cuda else ()):
        warnings.filterwarnings("ignore", message=re.escape(text), module=re.escape(module))
        logging.getLogger(module).addFilter(_other_than(text))


def _other_than(text: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not record.getMessage().startswith(text)
