"""The trainers that the doctor knows, by the name that --target takes.

A target's module has `load(path)`, which reads what the user gives and returns a `TestedTrainer`. It is imported only
when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_moe.config.errors import ConfigError

if TYPE_CHECKING:  # the table is read before torch is loaded
    from megatron_moe_tools.doctor.trainers.protocol import TestedTrainer

TARGETS = {
    "script": "a Python file with build, step and named_gradients",
    "transformers": "a folder with config.json, or a YAML or JSON file of TrainingArguments and model_name_or_path",
    "deepspeed": "DeepSpeed's JSON file with model_name_or_path beside its keys, or TrainingArguments with deepspeed",
    "megatron-core": "a file with Megatron-LM's flags, or a launch script that has them",
}
"""Name -> what CONFIG is."""
PACKAGES = ("transformers", "accelerate", "deepspeed")
"""Whose releases the page names, where they are installed, beside those that every run names."""
REFUSED = {
    "torchtitan": "its Trainer takes torch.cuda where there is no accelerator (torchtitan.tools.utils.get_device_info, "
    "0.3.0), so it makes no step on gloo ranks; --target script checks its model and parallelisation in your own loop",
}
"""Name -> why it cannot be checked, and what can."""


def load_trainer(target: str, config: Path) -> TestedTrainer:
    """Return the trainer that a configuration describes.

    Raises:
        ConfigError: the file is not what the target reads, a package that it needs is missing, or it does not run here.
    """
    if target in REFUSED:
        raise ConfigError(f"--target {target}: {REFUSED[target]}")
    if target == "script":
        from megatron_moe_tools.doctor.trainers.protocol import load_script

        return load_script(config)  # type: ignore[return-value]  # a module with the functions of a Trainer
    module = import_module(f"megatron_moe_tools.doctor.trainers.{target.replace('-', '_')}_target")
    if not config.exists():
        raise ConfigError(f"{config}: does not exist; --target {target} takes {TARGETS[target]}")
    trainer: TestedTrainer = module.load(config)
    return trainer
