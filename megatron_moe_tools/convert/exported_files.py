"""Makes the files of an exported folder beside its weights: its tokenizer, and its model card. Loads no torch.

Which tokenizer the folder gets, and its ids for the configuration:

    --no-tokenizer       none
    named by flags       that one, if it is the one that the model was trained with
    imported model       the files that came with it, byte for byte, unless it was trained with another tokenizer
    trained here         the tokenizer of the run's flags, if its files are still what they were

A tokenizer that should be there and is not is an error before anything is written: a folder without one is asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_moe import __version__
from megatron_moe.checkpoint import folder, manifest, origin
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.schema import Run
from megatron_moe.data.hugging_face_folder import ADDED, JSON, SETTINGS, SPECIAL, TEMPLATE, chat_template_of
from megatron_moe.data.tiktoken_models import KIMI_FILE, kimi_tokenizer
from megatron_moe.data.tokenizer_choice import tokenizer_of_step
from megatron_moe.data.tokenizers import HuggingFaceTokenizer
from megatron_moe.data.transformers_files import PIECES, transformers_files
from megatron_moe.hf.family import Family

GENERATION = "generation_config.json"
_NULL = "NullTokenizer"
_VOCABULARIES = (JSON, PIECES, KIMI_FILE, "vocab.json")
_TOKENIZER_FILES = {*_VOCABULARIES, SETTINGS, TEMPLATE, "merges.txt", SPECIAL, ADDED, "vocab.txt", "chat_template.json"}


@dataclass(frozen=True)
class ExportedTokenizer:
    """The tokenizer of an exported folder.

    files: name -> content of files to write. left_out: names of the files that came with the model and are not copied.
    ids: `bos_token_id`, `eos_token_id` and `pad_token_id` for the configuration; None where they stay as they came.
    words: the tokenizer in words. notes: what a user should know.
    """

    words: str
    files: dict[str, bytes] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    ids: dict[str, int | None] | None = None
    notes: tuple[str, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return what a certificate and the identity of a conversion say of it."""
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(self.files.items())}
        return {"words": self.words, "ids": self.ids, "files": hashes, "left_out": sorted(self.left_out)}


AS_IT_CAME = ExportedTokenizer("as it came with the model")


def exported_tokenizer(step: Path, given: Mapping[str, Any], without: bool) -> ExportedTokenizer:
    """Return the tokenizer that the export of a step gets.

    given: the flags of a tokenizer, by field. without: `--no-tokenizer`. Raises ConfigError: it is not known, its files
    are gone or have changed, or transformers would read it otherwise.
    """
    config, state = folder.read_json(step / folder.CONFIG), folder.read_json(step / folder.STATE)
    trained_with = state.get("tokenizer") or {}
    prefix = f"{origin.FOLDER}/"
    came = {}
    for name, entry in manifest.read(step).files.items():
        if name.startswith(prefix):
            came[name.removeprefix(prefix)] = entry
    names = frozenset(came.keys() & _TOKENIZER_FILES)
    if without:
        if given:
            flags = ", ".join(all_fields()[name].flag for name in given)
            raise ConfigError(f"--no-tokenizer, {flags}: one says to write no tokenizer, the other which; keep one")
        end = trained_with.get("eod")
        if trained_with.get("type") == _NULL and config.get("tokenizer_type") is None:  # ids that nobody named
            end = None
        ids = None if came else _ids(end, trained_with.get("bos"), None)
        return ExportedTokenizer("none: --no-tokenizer", {}, names, ids)
    if not given and names & set(_VOCABULARIES):
        # A model that was trained here on texts was so with the tokenizer that came with it.
        wanted = trained_with.get("sha256")
        if wanted is None or trained_with.get("type") == _NULL:
            return AS_IT_CAME
        found, pair = {came[name]["sha256"] for name in (JSON, PIECES) if name in came}, ("vocab.json", "merges.txt")
        if came.keys() >= set(pair):
            contents = [(step / origin.FOLDER / name).read_bytes() for name in pair]
            found.add(hashlib.sha256(b"\0".join(contents)).hexdigest())
        if wanted not in found and KIMI_FILE in came:
            found.add(kimi_tokenizer(step / origin.FOLDER).sha256)
        if wanted not in found and JSON in came:
            found.add(HuggingFaceTokenizer(step / origin.FOLDER).sha256)
        if wanted in found:
            return AS_IT_CAME
        there = config.get("tokenizer_model") or config.get("vocab_file")
        raise ConfigError(
            f"--load {step}: was trained with {trained_with.get('type')} {there} (SHA-256 {wanted[:12]}...), and the "
            "model came with another tokenizer: name the first with --tokenizer-type and --tokenizer-model to export "
            "it, or write none: --no-tokenizer"
        )
    imported = state.get(origin.FOLDER) is not None
    if not given and imported and trained_with.get("type", _NULL) == _NULL:
        note = "no tokenizer is written: the model came without one; --tokenizer-type and its files name one"
        return ExportedTokenizer("none: the model came without one", notes=(note,))
    if not given and not trained_with:
        raise ConfigError(
            f"--tokenizer-type is missing: --load {step} does not say which tokenizer its model has; name it with its "
            "files, e.g. --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH, or write none: --no-tokenizer"
        )
    vocab_size = config.get("vocab_size") or state.get("vocab_size") or 0
    try:
        tokenizer, data = tokenizer_of_step(config, trained_with, given, vocab_size, f"--load {step}")
    except ConfigError as error:
        raise ConfigError(f"{error}; --no-tokenizer writes none") from None
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"--tokenizer-type {tokenizer.name}: has {tokenizer.vocab_size} ids, the model {vocab_size}; name the one "
            "that it was trained with, or write none: --no-tokenizer"
        )
    length = config.get("max_position_embeddings") or config.get("seq_length") or 0
    model_file = None if data.tokenizer_model is None else Path(data.tokenizer_model)
    made = transformers_files(tokenizer, model_file, length)
    words = f"{tokenizer.name}, SHA-256 {tokenizer.sha256}"
    if made is None:
        note = f"no tokenizer is written: the model was trained with {tokenizer.name}, on ids that stand for no text"
        note += f"; eos_token_id is {json.dumps(tokenizer.eos)}"
        return ExportedTokenizer(f"none: {words}", {}, names, _ids(tokenizer.eos, tokenizer.bos, None), (note,))
    ids = _ids(made.eos, made.bos, made.pad)
    words += f"; its ids are those of {JSON} on {made.texts} texts"
    return ExportedTokenizer(words, made.contents, names, ids, made.notes)


def with_template(exported: ExportedTokenizer, step: Path) -> ExportedTokenizer:
    """Return the tokenizer with the chat template of the conversations that the step was trained on."""
    template = (folder.read_json(step / folder.STATE).get("tokenizer") or {}).get("chat_template")
    if template is None or (exported is not AS_IT_CAME and not exported.files):
        return exported
    if exported is AS_IT_CAME and chat_template_of(step / origin.FOLDER) == template:
        return exported
    return replace(
        exported,
        files={**exported.files, TEMPLATE: template.encode()},
        left_out=exported.left_out | {TEMPLATE},
        notes=(*exported.notes, f"{TEMPLATE} is the template of the conversations that the model was trained on"),
    )


def _ids(eos: int | None, bos: int | None, pad: int | None) -> dict[str, int | None]:
    """Return all three keys: without them transformers would take the ids of its family's defaults."""
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}


def generation_ids(ids: Mapping[str, int | None]) -> dict[str, int]:
    """Return the ids of generation_config.json. Batches are filled up with the end's where there is none of its own."""
    found = {name: i for name, i in ids.items() if i is not None}
    if "eos_token_id" in found:
        found.setdefault("pad_token_id", found["eos_token_id"])
    return found


# ---- The model card: README.md with front matter, of facts that the checkpoint knows.

CARD = "README.md"
CARD_OF_THE_FIRST = "README_base_model.md"
"""The name of the card that came with a model, where the model was trained since."""
FROM_MEMORY = "from_memory"
"""Key of a step's state: a program had the model in memory, and may have changed its weights."""

_FRONT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- megatron_moe
- mixture-of-experts
- {family}
---"""
_LOADING = """\
## Loading

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
model = AutoModelForCausalLM.from_pretrained(folder)
{lines}```
"""
_WITH_TOKENIZER = """\
tokenizer = AutoTokenizer.from_pretrained(folder)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32, do_sample=False)[0]))
"""


def model_card(
    run: Run,
    family: Family,
    dtype: str,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    tokenizer: str,
) -> str:
    """Return a model card in Markdown.

    run: the model, with its vocabulary. dtype: of the weights as they are written, in words. config: the settings of
    the step, by field. state: its state. tokenizer: in words; "none: ..." where the folder has none.
    """
    model, moe = run.model, run.moe
    count = run.derived.parameter_count(model.vocab_size or 0)
    loading = "" if tokenizer.startswith("none") else _WITH_TOKENIZER
    attention, experts = f"{model.num_attention_heads}", f"{moe.moe_router_topk}"
    if model.multi_latent_attention:
        attention += ", latent"
    if moe.moe_shared_expert_intermediate_size:
        experts += f", and a shared one of width {moe.moe_shared_expert_intermediate_size}"
    of_model = [
        ("architecture", f"{family.architecture} (`{family.model_types[0]}`)"),
        ("parameters", f"{count:,}"),
        ("parameters used for a token", f"{run.derived.active_parameter_count(model.vocab_size or 0):,}"),
        ("dtype of the weights", dtype),
        ("layers", f"{model.num_layers}, of which {sum(run.derived.moe_layer_pattern)} with experts"),
        ("hidden size", f"{model.hidden_size}"),
        ("attention heads", attention),
        ("experts of a layer", f"{moe.num_experts} of width {run.derived.moe_ffn_hidden_size}"),
        ("experts of a token", experts),
        ("vocabulary", f"{model.vocab_size}"),
        ("positions", f"{run.derived.max_position_embeddings}"),
        ("tokenizer", tokenizer),
    ]
    if moe.num_experts is None:
        of_model[4] = ("layers", f"{model.num_layers}")
        del of_model[7:9], of_model[2]  # of experts, and of what a token meets of them
    if model.mtp_num_layers:
        depths = f"{model.mtp_num_layers}, which transformers leaves out"
        of_model.insert(5, ("layers of multi-token prediction", depths))
    sequences, length = state.get("consumed_samples", 0), config.get("seq_length") or 0
    started = "random weights"
    if state.get("hf") is not None:
        started = "the weights of another model"
    precision = next((name for name in ("bf16", "fp16") if config.get(name)), "fp32")
    if config.get("fp8_format"):
        precision += f", products in fp8 ({config['fp8_format']})"
    files = []
    for prefix, parts in (state.get("data") or {}).items():  # without folders: a card is published
        files.append(f"`{Path(prefix).name}`")
        if digest := (parts.get(".bin") or {}).get("sha256"):
            files[-1] += f" (SHA-256 {digest})"
    data = ", ".join(files) or "not known"
    if config.get("mock_data"):
        data = "made-up tokens (`--mock-data`)"
    versions = state.get("versions") or {}
    of_training = [
        ("started from", started),
        ("optimizer steps", f"{state.get('iteration', 0) - state.get('skipped_iterations', 0):,}"),
        ("sequences", f"{sequences:,} of {length} tokens"),
        ("tokens", f"{sequences * length:,}"),
        ("sequences of a step", f"{config.get('global_batch_size')}"),
        ("learning rate", f"{config.get('lr')}, {config.get('lr_decay_style')}"),
        ("precision", precision),
        ("data", data),
        ("versions", ", ".join(map(" ".join, sorted(versions.items())))),
    ]
    size = str(count)
    for limit, unit in ((10**3, "K"), (10**6, "M"), (10**9, "B")):
        if count >= limit:
            size = f"{count / limit:.3g}{unit}"
    how, of_program, training = "exported", "", []
    if state.get("iteration"):
        how, training = "trained and exported", ["## Training", _table(of_training)]
    if state.get(FROM_MEMORY):
        of_program = "It comes from a program's memory, and the program may have changed the weights. "
        if training:
            training[0] += " of the checkpoint it comes from"
    return "\n\n".join(
        [
            _FRONT.format(family=family.name),
            f"# {family.architecture}, {size} parameters",
            f"A mixture-of-experts language model, {how} with megatron_moe {__version__}. "
            f"{of_program}This card "
            "says what the checkpoint knows of itself; licence, intended use, evaluation and the texts' origin are for "
            "its authors to add. `conversion_certificate.json` has the SHA-256 of every tensor.",
            "## Model",
            _table(of_model),
            *training,
            _LOADING.format(lines=loading),
        ]
    )


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *itertools.starmap("| {} | {} |".format, rows)])
