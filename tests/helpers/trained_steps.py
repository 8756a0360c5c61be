"""Small runs that save, on the ranks of a case, and what their steps hold."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build

TINY = {
    **PRESETS["tiny"],
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "make_vocab_size_divisible_by": 64,
    "global_batch_size": 4,
    "train_iters": 3,
    "eval_iters": 0,
}
VOCABULARY = 257
SMALL = {
    "num_layers": 2,
    "moe_layer_freq": "[0,1]",
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 16,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "health_interval": 0,
}
"""Where four layers show no more than two."""


def trained(flags: dict[str, Any], *callbacks: Any) -> dict[str, Any]:
    """A whole run on this case's ranks; returns its summary."""
    from megatron_moe.training.run import pretrain

    return pretrain(build({**TINY, **flags}), callbacks=callbacks)


def moved(flags: dict[str, Any]) -> list[dict[str, Any]]:
    """A run that saves what it loaded before it trains, and nothing else; the exact records of its own steps."""
    from megatron_moe.training.callback import Callback
    from megatron_moe.training.callbacks.checkpointing import save

    found: list[dict[str, Any]] = []

    class SavingFirst(Callback):
        def before_training(self) -> None:
            self.trainer.saved = None
            save(self.trainer)
            self.trainer.saver.finish()
            self.trainer.saver = None
            self.before = len(self.trainer.records)

        def after_training(self) -> None:
            found.extend(list(self.trainer.records)[self.before :])

    trained(flags, SavingFirst())
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of metrics."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def refusal(flags: dict[str, Any]) -> str:
    """The message of the ConfigError that a run ends with."""
    from megatron_moe.config.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        trained(flags)
    return str(error.value)


def tensors(step: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a step, whole, by its key: read with torch alone."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    saved = FileSystemReader(step).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(kind.size, dtype=kind.properties.dtype)
        for key, kind in saved.items()
        if isinstance(kind, TensorStorageMetadata)
    }
    load(state, storage_reader=FileSystemReader(step), no_dist=True)
    return state


_MAIN, _MOMENT = "optimizer.state.param.", "optimizer.state.exp_avg."


def main_weights(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fp32 main weights among the tensors of a step, by the weight's key."""
    keys = [key.removeprefix(_MOMENT) for key in state if key.startswith(_MOMENT)]
    return {key: state.get(_MAIN + key, state[key]) for key in keys}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose bits, dtypes or presence differ, but for the vocabulary's padding, which depends on TP."""
    first, second = ({key: _unpadded(key, value) for key, value in state.items()} for state in (first, second))
    return sorted(
        key
        for key in first.keys() | second.keys()
        if key not in first
        or key not in second
        or first[key].dtype != second[key].dtype
        or not torch.equal(first[key].view(torch.uint8), second[key].view(torch.uint8))
    )


def _unpadded(key: str, value: torch.Tensor) -> torch.Tensor:
    table = key.endswith(("word_embeddings.weight", "output_layer.weight"))
    return (value[:VOCABULARY] if table else value).contiguous()


OPTIMIZERS = {
    "bf16, distributed": {"bf16": True, "use_distributed_optimizer": True},
    "fp16": {"fp16": True, "initial_loss_scale": 256.0},
    "fp32": {},
}
