"""Writes the model card of an exported folder: README.md with front matter, of facts that the checkpoint knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_moe import __version__
from megatron_moe.config.schema import Run
from megatron_moe.hf.families import Family

NAME = "README.md"
NAME_OF_THE_FIRST = "README_base_model.md"
"""The name of the card that came with a model, where the model was trained since."""

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

    Args:
        run: the model, with its vocabulary.
        dtype: the dtype of the weights as they are written, in words.
        config: the settings of the step, by field. state: its state.
        tokenizer: the tokenizer in words; "none: ..." where the folder has none.
    """
    name = f"{family.architecture}, {_count(run.derived.parameter_count(run.model.vocab_size or 0))} parameters"
    tags = ("megatron_moe", "mixture-of-experts", family.name)
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    front += [*(f"- {tag}" for tag in tags), "---"]
    loading = _LOADING.format(lines="" if tokenizer.startswith("none") else _WITH_TOKENIZER)
    parts = [
        "\n".join(front),
        f"# {name}",
        f"A mixture-of-experts language model, trained and exported with megatron_moe {__version__}. This card says "
        "what the checkpoint knows of itself; licence, intended use, evaluation and the texts' origin are for its "
        "authors to add. `conversion_certificate.json` has the SHA-256 of every tensor.",
        "## Model",
        _table(_model_rows(run, family, dtype, tokenizer)),
        "## Training",
        _table(_training_rows(config, state)),
        loading,
    ]
    return "\n\n".join(parts)


def _model_rows(run: Run, family: Family, dtype: str, tokenizer: str) -> list[tuple[str, str]]:
    model, moe = run.model, run.moe
    rows_of_tokens = model.vocab_size or 0
    shared = moe.moe_shared_expert_intermediate_size
    rows = [
        ("architecture", f"{family.architecture} (`{family.model_types[0]}`)"),
        ("parameters", f"{run.derived.parameter_count(rows_of_tokens):,}"),
        ("parameters used for a token", f"{run.derived.active_parameter_count(rows_of_tokens):,}"),
        ("dtype of the weights", dtype),
        ("layers", f"{model.num_layers}, of which {sum(run.derived.moe_layer_pattern)} with experts"),
        ("hidden size", f"{model.hidden_size}"),
        ("attention heads", f"{model.num_attention_heads}{', latent' if model.multi_latent_attention else ''}"),
        ("experts of a layer", f"{moe.num_experts} of width {run.derived.moe_ffn_hidden_size}"),
        ("experts of a token", f"{moe.moe_router_topk}" + (f", and a shared one of width {shared}" if shared else "")),
        ("vocabulary", f"{model.vocab_size}"),
        ("positions", f"{run.derived.max_position_embeddings}"),
        ("tokenizer", tokenizer),
    ]
    if model.mtp_num_layers:
        rows.insert(5, ("layers of multi-token prediction", f"{model.mtp_num_layers}, which transformers leaves out"))
    return rows


def _training_rows(config: Mapping[str, Any], state: Mapping[str, Any]) -> list[tuple[str, str]]:
    sequences, length = state.get("consumed_samples", 0), config.get("seq_length") or 0
    started = "the weights of another model" if state.get("hf") is not None else "random weights"
    precision = next((name for name in ("bf16", "fp16") if config.get(name)), "fp32")
    if config.get("fp8_format"):
        precision += f", products in fp8 ({config['fp8_format']})"
    rows = [
        ("started from", started),
        ("optimizer steps", f"{state.get('iteration', 0) - state.get('skipped_iterations', 0):,}"),
        ("sequences", f"{sequences:,} of {length} tokens"),
        ("tokens", f"{sequences * length:,}"),
        ("sequences of a step", f"{config.get('global_batch_size')}"),
        ("learning rate", f"{config.get('lr')}, {config.get('lr_decay_style')}"),
        ("precision", precision),
        ("data", _data(config, state)),
    ]
    versions = state.get("versions") or {}
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))))
    return rows


def _data(config: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return the data files by name and hash. Their folders are left out: a card is published."""
    if config.get("mock_data"):
        return "made-up tokens (`--mock-data`)"
    files = []
    for prefix, parts in (state.get("data") or {}).items():
        digest = (parts.get(".bin") or {}).get("sha256")
        files.append(f"`{Path(prefix).name}`" + (f" (SHA-256 {digest})" if digest else ""))
    return ", ".join(files) or "not known"


def _count(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return str(number)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
