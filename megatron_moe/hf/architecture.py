"""Takes a run's architecture from the folder that its weights come from, as from a preset. Loads no torch.

The command line is read before torch is loaded. Settings of the folder's architecture are filled in, and a setting that
contradicts them is an error, whether it is a flag or in a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder as checkpoints
from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields, from_file
from megatron_moe.config.schema import Run, build
from megatron_moe.hf.config import Settings, settings
from megatron_moe.hf.folder import HFFolder, configuration_alone

_ALSO_FILLED_IN = ("max_position_embeddings", "moe_router_dtype")
"""Settings that may differ from the folder's; the folder's are used where none was given."""

# The meaning of settings that can be written in several ways.
_MEANING = {
    "ffn_hidden_size": "ffn_hidden_size",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "group_query_attention": "num_query_groups",
    "num_query_groups": "num_query_groups",
    "kv_channels": "head_size",
    "moe_layer_freq": "moe_layer_pattern",
}
"""Field -> name in `run.derived`."""


def filled_in(given: dict[str, Any], *, weights: bool = True) -> dict[str, Any]:
    """Return settings with the architecture of the folder that they name; `cli.parse` calls this.

    A run that has saved a step since it was imported takes it from that step: the folder may be gone by then.

    Args:
        given: the settings of flags, `--config` and `--preset`, by field name.
        weights: whether the folder has to hold them. Otherwise a config.json does, and the layers of multi-token
            prediction are those that it names.

    Returns:
        The settings with the folder's architecture and vocabulary; `given` itself where it names no such folder.

    Raises:
        ConfigError: the folder cannot be read or used, or a setting contradicts it.
    """
    given = _started_from_pretrained(given)
    imported = given.get("load_hf")
    if given.get("load") is not None and (imported is not None or given.get("use_checkpoint_args")):
        root = Path(given["load"])
        step, _ = checkpoints.find_step(root, given.get("ckpt_step"), verify=given.get("verify_checkpoint", True))
        if step is not None:
            where = f"--use-checkpoint-args {step}" if imported is None else f"{step}, which --load goes on from"
            fields, path = all_fields(), step / checkpoints.CONFIG
            saved = checkpoints.read_json(path)
            names = [name for name in (*architecture_keys(), *_ALSO_FILLED_IN) if name in saved]
            theirs = {name: from_file(fields[name], saved[name], f"{path}: {name}") for name in names}
            return _merged(given, theirs, where)
        if imported is None:
            raise ConfigError(
                f"--use-checkpoint-args: --load {root} has no step yet to take the architecture from; give it with "
                "--preset, --config or flags"
            )
    if imported is not None:
        where = f"--load-hf {imported}"
        config = None if weights else configuration_alone(Path(imported))
        if config is not None:
            predicts = bool(config.get("num_nextn_predict_layers"))
            return _merged(given, settings(config, has_prediction_layers=predicts, where=where).flat, where)
        return _merged(given, settings_of(HFFolder.open(Path(imported), "--load-hf"), where).flat, where)
    return given


def _started_from_pretrained(given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with `--pretrained-checkpoint` as `--load FOLDER --finetune` where `--load` has no step yet.

    A step that the run has saved since goes before it, as in Megatron-LM.
    """
    pretrained = given.get("pretrained_checkpoint")
    if pretrained is None:
        return given
    if given.get("load_hf") is not None:
        raise ConfigError(
            f"--pretrained-checkpoint {pretrained}, --load-hf {given['load_hf']}: both say where the weights come from;"
            " keep one"
        )
    load, verify = given.get("load"), given.get("verify_checkpoint", True)
    if load is not None and checkpoints.find_step(Path(load), None, verify=verify)[0] is not None:
        return given
    return {**given, "load": pretrained, "finetune": True}


def settings_of(folder: HFFolder, where: str) -> Settings:
    """Return the architecture of a Hugging Face folder, with notes for the user.

    Its tensors decide whether there are layers of multi-token prediction: transformers does not save these, but leaves
    their number in the configuration.
    """
    layers = folder.config.get("num_hidden_layers")
    extra = isinstance(layers, int) and any(name.startswith(f"model.layers.{layers}.") for name in folder.tensors)
    return settings(folder.config, has_prediction_layers=extra, where=where)


def _merged(given: dict[str, Any], folders: dict[str, Any], where: str) -> dict[str, Any]:
    fields = all_fields()
    complete = {name: folders[name] for name in architecture_keys() if name in folders}
    theirs = build(complete)
    wrong = [name for name in complete if name in given and not _same(name, given[name], theirs, complete)]
    if wrong:
        shown = [f"{fields[name].flag} {_shown(given[name])} (there: {_shown(complete[name])})" for name in wrong[:3]]
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(
            f"{', '.join(shown)}{more}: contradicts {where}; leave it out of flags, --config and --preset: the "
            "architecture comes from there"
        )
    return {**folders, **given, **complete}


def _same(name: str, value: Any, theirs: Run, complete: dict[str, Any]) -> bool:
    if value == complete[name]:
        return True
    meaning = _MEANING.get(name)
    if meaning is None:
        return False
    return getattr(build({**complete, name: value}).derived, meaning) == getattr(theirs.derived, meaning)


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
