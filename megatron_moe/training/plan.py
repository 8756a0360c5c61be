"""The plan of a run, made from flags, data and folders before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise

from megatron_moe.checkpoint import origin
from megatron_moe.checkpoint.plan import CheckpointPlan
from megatron_moe.checkpoint.plan import plan as plan_checkpoint
from megatron_moe.config.schema import Run
from megatron_moe.data.checks import check_data
from megatron_moe.data.fingerprint import Fingerprint, data_fingerprint, require_same_data, require_same_order
from megatron_moe.data.tokenizer_choice import build_tokenizer
from megatron_moe.data.tokenizers import Tokenizer
from megatron_moe.hf.import_plan import Import, plan_import
from megatron_moe.training.batch_size import BatchSchedule, batch_schedule


@dataclass(frozen=True)
class RunPlan:
    """What is known of a run before its ranks meet."""

    run: Run
    schedule: BatchSchedule
    start_from: CheckpointPlan
    """The checkpoint to load, if there is one, as far as its small files say."""
    imported: Import | None
    """The Hugging Face folder to load, where there is no checkpoint of the training yet."""
    tokenizer: Tokenizer
    data: Fingerprint
    data_notes: list[str]
    """Notes of the checks of the data."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without padding."""
        return self.run.model.vocab_size or self.tokenizer.vocab_size

    @property
    def notes(self) -> list[str]:
        """All notes of the plan, in the order to show."""
        return [
            *self.run.notes,
            *_stage_notes(self.run),
            *self.start_from.notes,
            *(self.imported.notes if self.imported else ()),
            *self.data_notes,
        ]


def _stage_notes(run: Run) -> list[str]:
    """Return what each pipeline rank has where the stages are given by letters; like neighbours are shown once."""
    if run.parallel.pipeline_model_parallel_layout is None:
        return []
    shown: list[tuple[int, str]] = []
    for rank in range(run.parallel.pipeline_model_parallel_size):
        text = " | ".join(stage.letters or "-" for stage in run.derived.chunks_of_pipeline_rank(rank))
        if not shown or shown[-1][1] != text:
            shown.append((rank, text))
    firsts = [rank for rank, _ in shown] + [run.parallel.pipeline_model_parallel_size]
    spans = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(firsts)]
    ranks = ", ".join(f"{span}: {text}" for span, (_, text) in zip(spans, shown))
    return [f"stages of the pipeline's ranks: {ranks}"]


def plan_run(run: Run) -> RunPlan:
    """Read the folders, the tokenizer and the data of a run, and plan it; change nothing.

    Raises:
        ConfigError: one of them does not fit the flags.
    """
    schedule = batch_schedule(run, int(os.environ.get("WORLD_SIZE", "1")))
    start_from = plan_checkpoint(run)
    # A step that training has saved since goes before the folder that the training began with.
    is_imported = run.checkpoint.load_hf is not None and start_from.source is None
    imported = plan_import(run) if is_imported else None
    tokenizer = build_tokenizer(run.data, run.model.vocab_size)
    run.derived.padded_vocab_size(run.model.vocab_size or tokenizer.vocab_size)  # refused here where it does not fit
    data_notes = check_data(run, tokenizer)
    data = data_fingerprint(run)
    return RunPlan(
        run=run,
        schedule=schedule,
        start_from=start_from,
        imported=imported,
        tokenizer=tokenizer,
        data=data,
        data_notes=[*data_notes, *same_data_notes(run, data, start_from)],
    )


def same_data_notes(run: Run, data: Fingerprint, start_from: CheckpointPlan) -> list[str]:
    """Refuse to continue on other data than the checkpoint was trained on; return notes where that is accepted.

    Raises:
        ConfigError: the data differ.
    """
    source = start_from.source
    if source is None or source.weights_only or run.checkpoint.finetune:
        return []
    if origin.is_of_megatron(source.state):
        samples = source.state["consumed_samples"]
        return [
            f"{source.step} is Megatron-LM's, whose data are not known: samples go on at number {samples} of this run"
        ]
    saved = source.state.get("data", {})
    return [
        *require_same_data(run, data, saved, str(source.step)),
        *require_same_order(run, data, source.config, saved, str(source.step)),
    ]


def evaluates_test_split(run: Run) -> bool:
    """Return whether the run evaluates a test split: it was named, or `--split` gives it a share."""
    if run.training.eval_iters == 0 or run.data.mock_data:
        return False
    shares = [float(share) for share in (run.data.split or "").split(",") if share]
    return run.data.test_data_path is not None or (len(shares) > 2 and shares[2] > 0)
