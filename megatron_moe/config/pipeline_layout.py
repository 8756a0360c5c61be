"""What each stage of the pipeline has: embedding, layers, multi-token prediction, loss; without importing torch.

`stages_of` is where the package reads it, however it was asked for: evenly, by the layers of the first or last stage,
by the layers of a virtual stage, or by letters with `--pipeline-model-parallel-layout`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.run_flags import RunSections

# Megatron-LM's letters, and the engine's names of them.
LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
FLAG = "--pipeline-model-parallel-layout"

# More letters than any model has layers; a count that is a slip of the keys ends here.
_MOST_LETTERS = 100_000


@dataclass(frozen=True)
class Stage:
    """The part of the model between two messages of the pipeline: a virtual stage, or all that a rank has.

    Attributes:
        embedding: whether it has the embedding, which begins the model.
        layers: numbers, from 0 in the whole model, of its layers of the decoder.
        predictions: layers of multi-token prediction, all of them or none.
        loss: whether it has the output layer and the loss, which end the model.
        receives: hidden states [S, B, H] of a micro-batch that come from the stage before; those of every depth of
            multi-token prediction are among them behind its stage.
    """

    embedding: bool
    layers: range
    predictions: int
    loss: bool
    receives: int

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs a batch: tokens for an embedding, labels for the loss."""
        return self.embedding or self.predictions > 0 or self.loss

    @property
    def letters(self) -> str:
        """The stage as `--pipeline-model-parallel-layout` spells it: `Ettt`."""
        return "E" * self.embedding + "t" * len(self.layers) + "m" * self.predictions + "L" * self.loss


def spelled_out(layout: str) -> list[str]:
    """Return the letters of each stage: `Et*3|(tt|)*2L` gives `Ettt`, `tt`, `tt`, `L`.

    Stages are separated by bars, `x*3` repeats a letter and `(...)*3` what is in parentheses; commas mean nothing.

    Raises:
        ConfigError: it cannot be read so.
    """
    text = "".join(layout.split()).replace(",", "")
    text = _repeated(layout, r"\(([^()]+)\)\*(\d+)", text)
    text = _repeated(layout, r"([^()*])\*(\d+)", text)
    stray = re.search(r"[^EtmL|]", text)
    if stray is not None:
        raise ConfigError(
            f"{FLAG} {layout}: {stray[0]!r} is none of E (embedding), t (layer), m (multi-token prediction), L (loss),"
            " | (next stage), or * and a number after one of them or after parentheses, which do not nest; e.g."
            " 'Et*3|(tt|)*4,m|L'"
        )
    return text.split("|")


def _repeated(layout: str, pattern: str, text: str) -> str:
    total = len(text) + sum(len(part) * int(count) for part, count in re.findall(pattern, text))
    if total > _MOST_LETTERS:
        raise ConfigError(f"{FLAG} {layout}: stands for {total} letters; there are no models of so many layers")
    return re.sub(pattern, lambda found: found[1] * int(found[2]), text)


def stages_of(run: RunSections) -> tuple[Stage, ...]:
    """Return every stage of the pipeline, in the order in which a micro-batch goes through them.

    Stage i is chunk i // PP of pipeline rank i % PP.

    Raises:
        ConfigError: the layers cannot be split in this way, or the layout by letters cannot be read.
    """
    if run.parallel.pipeline_model_parallel_layout is not None:
        stages = spelled_out(run.parallel.pipeline_model_parallel_layout)
    else:
        stages = ["t" * count for count in _counts_of_stages(run)]
        stages[0] = "E" + stages[0]
        stages[-1] += "m" * (run.model.mtp_num_layers or 0) + "L"
    found, first, arriving = [], 0, 0
    for letters in stages:
        count, depths = letters.count("t"), letters.count("m")
        found.append(Stage("E" in letters, range(first, first + count), depths, "L" in letters, arriving))
        first += count
        arriving = max(arriving, 1) + depths
    return tuple(found)


def _counts_of_stages(run: RunSections) -> list[int]:
    """Return the layers of each stage where none are given by letters."""
    layout, layers, ranks = run.parallel, run.model.num_layers, run.parallel.pipeline_model_parallel_size
    per_chunk = layout.num_layers_per_virtual_pipeline_stage
    if per_chunk is not None and layers % (ranks * per_chunk) == 0:
        return [per_chunk] * (layers // per_chunk)
    stages = ranks * (layout.num_virtual_stages_per_pipeline_rank or 1)
    if stages > ranks and layers % stages == 0:
        return [layers // stages] * stages
    first, last = layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers
    # Stages without a count of their own share what is left; with one stage, a count of its own must be all of it.
    even_stages = ranks - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if even_stages < 0 or rest < 0 or (rest != 0 if even_stages == 0 else rest % even_stages != 0):
        raise ConfigError(
            f"--num-layers {layers} cannot be spread over --pipeline-model-parallel-size {ranks}"
            f" (first stage: {first or 'even'}, last stage: {last or 'even'})"
        )
    counts = [rest // even_stages if even_stages else 0] * ranks
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts
