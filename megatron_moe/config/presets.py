"""Presets: named settings of a model, read from `presets.yaml`, which says where its figures come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_moe.config.schema import Run, replace


def _read(group: str) -> dict[str, dict[str, Any]]:
    presets = _TABLE[group]
    for settings in presets.values():
        for name, value in settings.items():
            if isinstance(value, list):
                settings[name] = tuple(value)
    return presets


# PyYAML's parser in Python takes ten times as long as libyaml's, which most builds have.
_TABLE = yaml.load(
    Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
PUBLISHED = _read("published")
PRESETS = {**_read("small"), **PUBLISHED}

_FIRST_FP16_SCALE = 2.0**12


def with_made_up_data(run: Run) -> Run:
    """Return `run` with what one step needs and its flags do not set: made-up tokens, a vocabulary, a length.

    fp16 starts at a loss scale without an overflow in the first step, so that the optimizer updates the weights.
    """
    changes: dict[str, Any] = {"eval_iters": 0, "eval_interval": 0, "skip_train": False}
    if run.training.train_iters is None:
        changes["train_iters"] = 2 + run.optimizer.lr_warmup_iters
    if run.data.data_path is None and run.data.train_data_path is None and run.data.data_config is None:
        changes["mock_data"] = True
        if run.model.vocab_size is None and run.data.tokenizer_type is None:
            changes["vocab_size"] = 1024
    if run.precision.fp16 and run.precision.loss_scale is None:
        changes["initial_loss_scale"] = min(run.precision.initial_loss_scale, _FIRST_FP16_SCALE)
    return replace(run, **changes)
