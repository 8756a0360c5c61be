"""Converts config.json to the settings of a run and back, in both spellings of transformers. Loads no torch.

`settings` reads the architecture and refuses by key what is not computed here. `filled_in` adds it to a run's settings
before torch is loaded, and refuses a flag or key of a file that contradicts it; `plan_import` compares the folder's
headers. `config_of` writes it for a model that was trained here from scratch, and refuses a model that would be read
back with other settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder as checkpoints
from megatron_moe.checkpoint import origin
from megatron_moe.checkpoint.origin import Provenance
from megatron_moe.checkpoint.plan import architecture_keys
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields, from_file
from megatron_moe.config.model_flags import ROPE_SETTINGS, ModelConfig, MoEConfig
from megatron_moe.config.rotary import ROTARY_FIELDS, amplitude, change
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.hf.config_keys import MOST_LAYERS, Keys
from megatron_moe.hf.families import FAMILIES, family_of
from megatron_moe.hf.family import Family
from megatron_moe.hf.folder import HFFolder, configuration_alone
from megatron_moe.hf.mapping import Mapping, mapping, require_tensors
from megatron_moe.hf.rope import rope_keys
from megatron_moe.io.object_storage import location

_BALANCING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
_OF_TRAINING = {
    "router_aux_loss_coef": _BALANCING,
    "aux_loss_alpha": _BALANCING,
    "seq_aux": _BALANCING,
    "output_router_logits": _BALANCING,  # transformers adds the loss where this is true
    "router_jitter_noise": ("moe_input_jitter_eps",),
    "attention_dropout": ("attention_dropout",),
}
"""How a model was trained: key -> fields that decide it in a run, which does not take it from the folder."""
_WITHOUT_MEANING = {
    # keys of training, of serving, of the tokenizer, or of the file's origin
    *_OF_TRAINING,
    *"architectures auto_map transformers_version _name_or_path model_type initializer_range use_cache".split(),
    *"bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id".split(),
    *"pretraining_tp ep_size num_experts_per_device is_encoder_decoder return_dict output_attentions".split(),
    *"output_hidden_states id2label label2id problem_type chunk_size_feed_forward task_specific_params".split(),
    *"unsloth_version use_mla max_window_layers tokenizer_class moe_router_dtype".split(),
}


@dataclass(frozen=True)
class FolderSettings:
    """The settings that a config.json describes.

    family: the family whose format it is. flat: the fields of `Run` that make the architecture. notes: what was
    assumed, and keys that are not known.
    """

    family: Family
    flat: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def settings(config: dict[str, Any], *, has_prediction_layers: bool, where: str) -> FolderSettings:
    """Return the architecture that a config.json describes.

    Args:
        has_prediction_layers: whether the folder contains the tensors of multi-token prediction.
        where: the folder, as messages name it, e.g. "--load-hf models/x".

    Raises:
        ConfigError: the family is not converted, or a key is missing, out of range, contradicts another one, or
            requires something that is not computed here.
    """
    family = family_of(config, where)
    keys = Keys(family.text_of(config), where, "" if family.text is None else f"{family.text}.")
    quantization = keys.dictionary("quantization_config")
    packed = quantization is not None and quantization.get("quant_method") == "mxfp4" and family.names.interleaved
    if quantization is not None and not packed:  # fp8 with a scale per block is read
        nested = keys.nested(quantization, "quantization_config.")
        if nested.raw("quant_method") != "fp8":
            works = '"fp8" in blocks is read, and "mxfp4" of gpt-oss; dequantise the model first'
            raise nested.refusal("quant_method", works)
        nested.only("fmt", ("e4m3", "float8_e4m3fn"), "fp8 weights are e4m3")
        block = nested.raw("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
            works = "has to be two sizes, e.g. [128, 128]: one scale per block is read"
            raise nested.refusal("weight_block_size", works)
    keys.only("hidden_act", ("silu",), "MLPs and experts are gated by SiLU here")
    keys.only("clip_qkv", (), "queries, keys and values are not clipped here")
    if not keys.has("hidden_act"):
        keys.assumed("hidden_act", "silu")
    tied = keys.boolean("tie_word_embeddings", default=None)
    if tied is None:
        tied = False
        keys.assumed("tie_word_embeddings", tied)
    if keys.raw("dtype", "torch_dtype") not in (None, "bfloat16", "float16", "float32", "auto"):
        raise keys.refusal(keys.spelled(("dtype", "torch_dtype")), "weights are bfloat16, float16 or float32")
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    predictions = keys.integer(*names, low=0, high=MOST_LAYERS, default=0)
    if family.carries_predictions and predictions:
        keys.notes.append(f"{names[0]} {predictions}: {family.name}'s layers of multi-token prediction are not trained")
        predictions, has_prediction_layers = 0, False
    if not family.predicts and (predictions or has_prediction_layers):
        raise keys.refusal(names[0], f"{family.name} has no multi-token prediction here; 0 works")
    if has_prediction_layers and not predictions:
        raise keys.refusal(
            names[0], "the folder contains layers beyond num_hidden_layers; give their number, DeepSeek-V3's: 1"
        )
    if predictions and not has_prediction_layers:
        keys.notes.append(
            f"WARNING: config.json has num_nextn_predict_layers {predictions}, and the folder none of their tensors: "
            "transformers drops them when it saves a model. The model is read without these layers; to train them, take"
            " the published folder"
        )
    flat = {
        **_defaults(),
        "vocab_size": keys.integer("vocab_size", low=2),
        "num_layers": keys.integer("num_hidden_layers", high=MOST_LAYERS),
        "hidden_size": keys.integer("hidden_size"),
        "num_attention_heads": keys.integer("num_attention_heads"),
        "norm_epsilon": keys.number("rms_norm_eps"),
        "untie_embeddings_and_output_weights": not tied,
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        **family.read(keys),
        "mtp_num_layers": (predictions or None) if has_prediction_layers else None,
    }
    if (selected := flat.get("dsa_indexer_topk")) is not None:
        keys.notes.append(
            f"config.json: attention selects index_topk {selected} keys; sequences of up to {selected} tokens are "
            "trained, with all keys, which is the same; the indexer has no gradient from them"
        )
    unknown = sorted(set(keys.unread()) - _WITHOUT_MEANING)
    if unknown:
        keys.notes.append(f"config.json has keys that are not known and not read: {', '.join(unknown)}")
    return FolderSettings(family, flat, keys.notes)


def _defaults() -> dict[str, Any]:
    """Return the schema's defaults of the fields that a folder's configuration decides."""
    fields = [f for section in (ModelConfig, MoEConfig) for f in dataclasses.fields(section)]
    decided = set(architecture_keys())
    return {f.name: f.default for f in fields if f.name in decided}


def config_of(run: Run, family: Family, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model that was trained here from scratch.

    Args:
        run: its settings, including `vocab_size`.
        dtype: the dtype in which its weights are written, e.g. "bfloat16".

    Raises:
        ConfigError: the family's format cannot describe the model.
    """
    model = run.model
    if family.dense != (run.moe.num_experts is None):
        works = "a family with experts, or no --num-experts" if family.dense else "a dense family, or --num-experts"
        kind = "with" if family.dense else "without"
        raise ConfigError(f"a model {kind} experts is not written as {family.name}: choose {works}")
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_types[0],
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.max_position_embeddings or run.derived.max_position_embeddings,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "initializer_range": model.init_method_std,
        "attention_dropout": model.attention_dropout,
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
        **family.write(run),
    }
    where = f"this model as {family.name}"
    try:
        written = settings(config, has_prediction_layers=model.mtp_num_layers is not None, where=where)
    except ConfigError as error:
        raise ConfigError(f"this model does not fit the format of {family.name}: {error}") from None
    differing = differences(run, written.flat)
    if differing:
        raise ConfigError(
            f"this model does not fit the format of {family.name}; it would be read with other settings:\n  "
            + "\n  ".join(differing)
        )
    return config


def family_of_run(run: Run) -> Family:
    """Return the first family whose format describes a model trained here from scratch.

    If there is none, the closest one is returned, for which `config_of` says what it can't describe.
    """
    for family in FAMILIES.values():
        with contextlib.suppress(ConfigError):
            config_of(run, family, "bfloat16")
            return family
    if run.moe.num_experts is None:
        return FAMILIES["qwen3" if run.model.qk_layernorm else "qwen2" if run.model.add_qkv_bias else "llama"]
    sigmoid = run.moe.moe_router_score_function == "sigmoid"
    if run.model.multi_latent_attention:
        return FAMILIES["deepseek-v3" if sigmoid else "deepseek-v2"]
    if sigmoid:
        return FAMILIES["glm4-moe"]
    shared = run.moe.moe_shared_expert_intermediate_size is not None
    return FAMILIES["qwen2-moe" if shared or run.model.add_qkv_bias else "qwen3-moe"]


def with_positions(config: dict[str, Any], positions: int) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a config.json for another number of positions, and notes for the user.

    The rotary embedding, with yarn's factor and original_max_position_embeddings, stays: the model was trained with it.
    A sliding window as long as the context had no effect; it becomes null where the context is longer now.
    """
    text = config.get("text_config")
    if "max_position_embeddings" not in config and isinstance(text, dict):
        inner, notes = with_positions(text, positions)
        return {**config, "text_config": inner}, notes
    changed, before = {**config, "max_position_embeddings": positions}, config["max_position_embeddings"]
    if before == positions:
        return changed, []
    notes = [f"config.json: max_position_embeddings {before} is {positions} now, as in the run"]
    window, kinds = config.get("sliding_window"), config.get("layer_types") or ()
    if isinstance(window, int) and before <= window < positions and "sliding_attention" not in kinds:
        changed["sliding_window"] = None
        notes.append(f"config.json: sliding_window {window} is null now: the model has none")
    yarn: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = yarn.get("original_max_position_embeddings")
    if original and "yarn" in yarn.values() and yarn.get("factor") != positions / original:
        notes.append(
            f"config.json: yarn's factor stays {yarn.get('factor')}, as trained; transformers 5 computes with it, and "
            f"warns that it is not {positions} / {original}"
        )
    return changed, notes


def with_rotation(config: dict[str, Any], flat: dict[str, Any], run: Run) -> tuple[dict[str, Any], list[str]]:
    """Return a config.json with a run's rotary settings, if it was trained on with others, and notes for the user.

    flat: the settings that the file is read as.
    """
    said = change(build(flat).model, run.model)
    if said is None:
        return config, []
    if "text_config" in config:
        inner, notes = with_rotation(config["text_config"], flat, run)
        return {**config, "text_config": inner}, notes
    spellings = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    others = {key: value for key, value in config.items() if key not in spellings}
    inside = [config.get(key) or {} for key in spellings[1:3]]
    partly = any("partial_rotary_factor" in keys for keys in (config, *inside))
    if not run.model.multi_latent_attention:
        others["head_dim"] = run.derived.head_size  # transformers reads it for frequencies that are stretched
    return {**others, **rope_keys(run, partly)}, [f"config.json: {said}"]


def differences(run: Run, flat: dict[str, Any]) -> list[str]:
    """Return the settings in which a run's architecture differs from another's, as `--flag: run's, other's`.

    Settings are compared by their meaning. Equal are, for example: a head's width that is given and one that follows
    from others; no scaling factor and 1; a norm over the chosen experts after a softmax over all and a softmax over the
    chosen ones; megatron-core's score of a group, where it adds up one expert or two, and that score by its name.
    """
    mine, other = _meaning(run), _meaning(build(flat))
    return [
        f"--{name.replace('_', '-')}: {mine[name]} in the run, {other[name]} in config.json"
        for name in mine
        if mine[name] != other[name]
    ]


def _meaning(run: Run) -> dict[str, Any]:
    """Return the architecture with one spelling for all settings of the same meaning."""
    flat = flatten(run)
    meaning = {name: flat[name] for name in _defaults()}
    moe, pattern = run.moe, run.derived.moe_layer_pattern
    latent, normed = run.model.multi_latent_attention, run.derived.norm_topk_prob
    meaning |= {
        "dsa_indexer_topk": None,  # what trains is the same; the longest sequence is another
        "ffn_hidden_size": None if all(pattern) else run.derived.ffn_hidden_size,
        "group_query_attention": None,
        "num_query_groups": None if latent else run.derived.num_query_groups,
        "kv_channels": None if latent else run.derived.head_size,
        "window_size": run.derived.window,
        "window_attn_skip_freq": run.derived.window_pattern,
        "swiglu": run.derived.gated,
        "add_qkv_bias": run.model.add_qkv_bias or run.model.add_bias_linear,
        "rotary_interleaved": run.model.rotary_interleaved and not latent,
        "softmax_scale": None if latent else run.model.softmax_scale or run.derived.head_size**-0.5,
        # of the amplitude, and of latent attention's logits
        "mscale": None,
        "mscale_all_dim": run.model.mscale_all_dim if latent else None,
        "attention_factor": round(amplitude(run.model), 12),
        "moe_layer_freq": pattern,
        "moe_ffn_hidden_size": run.derived.moe_ffn_hidden_size,
        "moe_router_norm_topk_prob": normed,
        "moe_router_topk_scaling_factor": moe.moe_router_topk_scaling_factor or 1.0,
        "moe_router_pre_softmax": moe.moe_router_score_function == "softmax" and not normed,
        "moe_router_group_score": _group_score(run),
        # a loss that balances leaves the model as it is; sinkhorn chooses and weighs the experts otherwise
        "moe_router_load_balancing_type": "sinkhorn" if "sinkhorn" in moe.moe_router_load_balancing_type else "a loss",
    }
    return meaning


def _group_score(run: Run) -> str:
    """Describe the score of a group of experts with the sizes of this run, in the words of the flag's help."""
    moe = run.moe
    summed = {"max": 1, "top2": 2}.get(moe.moe_router_group_score)
    logits = False
    if summed is None:
        summed = moe.moe_router_topk // (moe.moe_router_group_topk or 1)
        after_choice = moe.moe_router_score_function == "softmax" and not moe.moe_router_pre_softmax
        logits = after_choice and not moe.moe_router_enable_expert_bias
    if summed == 1:
        return "its best expert"  # by its logit or its score
    return f"the sum of its best {'two' if summed == 2 else summed}" + (" logits" if logits else "")


# The architecture of a run that starts from a folder

_ALSO_FILLED_IN = ("max_position_embeddings", "moe_router_dtype")
"""Settings that may differ from the folder's; the folder's are used where none was given."""

# The meaning of settings that can be written in several ways.
_MEANING = {
    "ffn_hidden_size": "ffn_hidden_size",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "group_query_attention": "num_query_groups",
    "num_query_groups": "num_query_groups",
    "kv_channels": "head_size",
    "window_size": "window",
    "window_attn_skip_freq": "window_pattern",
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
    imported, verify = given.get("load_hf"), given.get("verify_checkpoint", True)
    if (pretrained := given.get("pretrained_checkpoint")) is not None:
        if imported is not None:
            raise ConfigError(
                f"--pretrained-checkpoint {pretrained}, --load-hf {imported}: both say where the weights come from;"
                " keep one"
            )
        # It is `--load FOLDER --finetune` until the run has saved a step, as in Megatron-LM.
        load = given.get("load")
        if load is None or checkpoints.find_step(location(load), None, verify=verify)[0] is None:
            given = {**given, "load": pretrained, "finetune": True}
    if given.get("load") is not None and (imported is not None or given.get("use_checkpoint_args")):
        root = location(given["load"])
        step, _ = checkpoints.find_step(root, given.get("ckpt_step"), verify=verify)
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
            described = family_of(config, where).text_of(config)
            predicts = bool(described.get("num_nextn_predict_layers"))
            return _merged(given, settings(config, has_prediction_layers=predicts, where=where).flat, where)
        return _merged(given, settings_of(HFFolder.open(Path(imported), "--load-hf"), where).flat, where)
    return given


def settings_of(folder: HFFolder, where: str) -> FolderSettings:
    """Return the architecture of a Hugging Face folder, with notes for the user.

    Its tensors decide whether there are layers of multi-token prediction: transformers does not save these, but leaves
    their number in the configuration.
    """
    family = family_of(folder.config, where)
    layers = family.text_of(folder.config).get("num_hidden_layers")
    first = f"{family.names.model}layers.{layers}."
    extra = isinstance(layers, int) and any(name.startswith(first) for name in folder.tensors)
    return settings(folder.config, has_prediction_layers=extra, where=where)


def _rotation(given: dict[str, Any], folders: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings in place of a folder's, where --rope-type is given with others, and the context.

    What is not given stays as it is there; of another kind it has the defaults, and the folder's context before
    extension. `change` says at the start of the run what it comes to.
    """
    kind = given.get("rope_type")
    if kind is None:
        return {}
    found = {name: given.get(name, folders[name]) for name in ROTARY_FIELDS}
    if kind != folders["rope_type"]:
        fields, original = all_fields(), "original_max_position_embeddings"
        found = {name: given.get(name, fields[name].default) for name in ROTARY_FIELDS}
        found["rotary_base"] = given.get("rotary_base", folders["rotary_base"])
        if original in ROPE_SETTINGS.get(kind, ()):
            found[original] = given.get(original, folders["max_position_embeddings"])
    if all(found[name] == folders[name] for name in ROTARY_FIELDS):
        return {}
    length = max(folders["max_position_embeddings"], given.get("seq_length") or 1)
    if kind == "yarn":
        length = max(length, round(found["original_max_position_embeddings"] * found["rotary_scaling_factor"]))
    return {**found, "max_position_embeddings": length}


def _merged(given: dict[str, Any], folders: dict[str, Any], where: str) -> dict[str, Any]:
    fields, folders = all_fields(), {**folders, **_rotation(given, folders)}
    complete = {name: folders[name] for name in architecture_keys() if name in folders}
    theirs = build(complete)
    wrong = []
    for name in complete:
        if name not in given:
            continue
        same = given[name] == complete[name]
        if not same and (meaning := _MEANING.get(name)) is not None:
            derived = build({**complete, name: given[name]}).derived
            same = getattr(derived, meaning) == getattr(theirs.derived, meaning)
        if not same:
            wrong.append(name)
    if wrong:
        shown = [f"{fields[name].flag} {_shown(given[name])} (there: {_shown(complete[name])})" for name in wrong[:3]]
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(
            f"{', '.join(shown)}{more}: contradicts {where}; leave it out of flags, --config and --preset: the "
            "architecture comes from there"
            + ("; --rope-type beside it trains on with other rotary settings" if wrong[0] in ROTARY_FIELDS else "")
        )
    return {**folders, **given, **complete}


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _training_notes(config: dict[str, Any], run: Run) -> list[str]:
    """Say in a line which settings of training a folder has, and what the run has in their place."""
    there = [key for key in _OF_TRAINING if config.get(key) and isinstance(config[key], (bool, int, float))]
    if not there:
        return []
    flat, fields = flatten(run), all_fields()
    used = dict.fromkeys(name for key in there for name in _OF_TRAINING[key])
    return [
        f"config.json has {', '.join(f'{key} {config[key]}' for key in there)}, which training does not read; this run "
        f"has {' '.join(f'{fields[name].flag} {_shown(flat[name])}' for name in used)}"
    ]


def carried_note(names: list[str]) -> list[str]:
    """Return a note on the tensors of a folder that a model here does not have; none where there are none."""
    if not names:
        return []
    return [
        f"{len(names)} tensors ({names[0]}, ...) are of parts that the model here does not have: they are not trained, "
        "and an export takes them from this folder again, with --carry-from"
    ]


@dataclass(frozen=True)
class Import:
    """A folder that fits the run according to its headers and configuration."""

    folder: HFFolder
    family: Family
    table: Mapping
    copies: list[str]
    """Names that the folder contains in addition to the table's, equal to others."""
    dropped: list[str]
    notes: list[str]

    @property
    def state(self) -> dict[str, object]:
        """Part of the import that every step of the training saves, for an export."""
        return {"family": self.family.name, "copies": self.copies, **self.table.left_out(self.dropped)}

    def origin(self) -> tuple[Provenance, list[str]]:
        """Return `state` with the folder's small files, and notes for the user. Called on rank 0, which writes them."""
        sizes = {name: self.folder.identities[name].size for name in self.folder.companions}
        files, notes = origin.read(sizes, self.folder.companion, self.folder.path)
        return Provenance(self.state, files), notes


def plan_import(run: Run) -> Import:
    """Check that the folder of `--load-hf` fits the run, from its headers; allocate nothing.

    Raises:
        ConfigError: the folder is malformed, of a family that is not supported, or does not have the run's tensors.
    """
    where = f"--load-hf {run.checkpoint.load_hf}"
    folder = HFFolder.open(Path(run.checkpoint.load_hf or ""), "--load-hf")
    architecture = settings_of(folder, where)
    family = architecture.family
    table = mapping(run, architecture.family.names)
    copies, dropped = require_tensors(table, folder.shapes(), where)
    notes = [*folder.notes, *architecture.notes, *_training_notes(family.text_of(folder.config), run)]
    notes += carried_note(table.left_out(dropped)["carried"])
    if stretched := change(build(architecture.flat).model, run.model):
        notes.append(stretched)
    return Import(folder, architecture.family, table, copies, dropped, notes)
