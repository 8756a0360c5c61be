"""`megatron-moe evaluate STEP`: the loss of a step on named validation sets, and lm-eval's tasks, at any layout.

    megatron-moe evaluate runs/a/checkpoints --data-config valid.yaml --nproc-per-node 2 --tensor-model-parallel-size 2

It is `train --skip-train` with the settings of the step: architecture, precision, tokenizer, documents. Neither
optimizer state nor gradients are allocated, nothing is written to the step's folder, and no training data is read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_moe.checkpoint import folder
from megatron_moe.config import rules
from megatron_moe.config.command_line import Parser
from megatron_moe.config.errors import ConfigError, MissingPackage
from megatron_moe.config.fields import all_fields, from_file
from megatron_moe.config.launch import launched_world, local_world_size, rank_that_prints, require_rendezvous
from megatron_moe.config.paths import require_on_disk
from megatron_moe.config.run_flags import TOKENIZER_FIELDS
from megatron_moe.config.schema import Run, build, flatten, replace
from megatron_moe.data.mixture import FLAG, read_data_config
from megatron_moe.data.tokenizer_choice import build_tokenizer, tokenizer_of_step
from megatron_moe.hf.config import filled_in
from megatron_moe.io.files import replace_json, require_writable
from megatron_moe.io.program import DONE, end_interrupted, note, run_program, say, stage
from megatron_moe.platform import env_vars
from megatron_moe.report.records import EvalRecord
from megatron_moe.report.sink import Sink
from megatron_moe.training.plan import check_start
from megatron_moe.training.signals import die_with_launcher
from megatron_moe_tools import compat
from megatron_moe_tools.launch.node_ranks import split, start
from megatron_moe_tools.models.source import PRECISION_FLAGS, ModelSource, beginning_of_text, companions_folder, locate

NAME = "megatron-moe evaluate"

_OF_STEP = (
    *("seq_length", "transformer_impl", "attention_backend", "cross_entropy_loss_fusion", "cross_entropy_chunk_tokens"),
    *("moe_expert_backend", "bf16", "fp16", "keep_fp32", "fp32_residual_connection", "attention_softmax_in_fp32"),
    *("fp8_format", "fp8_modules", "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
    *("num_layers_at_end_in_bf16", "allow_tf32", "eval_in_fp32", "seed", "micro_batch_size"),
)
_OF_DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "document_boundaries", "packing", "eod_mask_loss")
"""Settings that are the step's, unless flags change them, besides the architecture."""
_SECTIONS = ("model", "moe", "parallel", "precision", "data")
_OTHER_FLAGS = ("micro_batch_size", "global_batch_size", "seed", "deterministic_mode", "use_distributed_optimizer")
_WITH_LM_EVAL = "megatron_moe_tools.models.harness"
"""What needs lm-eval, and takes seconds to load."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the tool's own flags; all others are those of megatron-moe train."""
    p = Parser(
        prog=NAME,
        usage="%(prog)s STEP [--data-config FILE] [--tasks NAME,...] [launch options] [flags of layout and data]",
        description="Evaluate a checkpoint at any layout: its loss on the validation sets of a file, and lm-eval's "
        "tasks. Architecture, precision, tokenizer and batch size are the step's; flags of megatron-moe train, such "
        "as --tensor-model-parallel-size 2, --eval-in-fp32 or --seq-length, change the rest.",
        epilog="--nproc-per-node and torchrun's other options start the ranks, as with megatron-moe train; torchrun "
        "... -m megatron_moe evaluate does as well. The table goes to stdout, the log to stderr; nothing is written "
        "to STEP. Exit status: that of megatron-moe train.",
        allow_abbrev=False,
    )
    p.add_argument("step", metavar="STEP", help="folder of a run, iter_* or Hugging Face's")
    p.add_argument("--ckpt-step", type=int, metavar="N", help="which step of a run's folder (default: the newest)")
    p.add_argument("--output", metavar="FILE", help="JSON to write")
    p.add_argument("--tasks", metavar="NAME,...", help="lm-eval's tasks (pip install lm_eval)")
    p.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question of the tasks")
    p.add_argument("--limit", type=int, metavar="N", help="the first N questions of each task")
    p.add_argument("--include-path", metavar="DIR", help="a folder of tasks of your own, in lm-eval's YAML")
    return p


def main(argv: list[str]) -> int:
    """Launch, or run one rank, and return the exit status; under torchrun every rank calls this."""
    die_with_launcher()
    return run_program(NAME, _main, argv)


def _main(argv: list[str]) -> int:
    launch, words = split(argv)
    flags, rest = parser().parse_known_args(words)
    require_writable("--output", flags.output)
    require_on_disk("STEP", flags.step)
    if not Path(flags.step).exists():
        raise ConfigError(f"{flags.step}: is not there; name the folder of a run, of a step or of a model")
    source = locate(Path(flags.step), flags.ckpt_step)
    if flags.output is not None and Path(flags.output).resolve().is_relative_to(Path(flags.step).resolve()):
        raise ConfigError(f"--output {flags.output}: is in {flags.step}, which is left as it is; name another folder")
    _, world_size = (0, launch.world_size) if launch is not None else launched_world()
    run = run_of(source, flags, rest, world_size)
    rules.check(run, world_size)
    here = local_world_size(world_size) if launch is None else launch.nproc_per_node
    check_start(run, world_size, here)
    if launch is not None:
        note(f"{NAME}: starting {launch.world_size} ranks ...")
        return start(launch, words, NAME, __name__)
    require_rendezvous(world_size)
    env_vars.let_segments_grow()
    try:
        found = evaluated(run, source, flags)
    except KeyboardInterrupt:
        end_interrupted()
    if rank_that_prints() == 0:
        say(table(found))
        if flags.output is not None:
            replace_json(Path(flags.output), found)
    return DONE


def run_of(source: ModelSource, flags: argparse.Namespace, rest: list[str], world_size: int) -> Run:
    """Return the run that evaluates a step: the step's settings, changed by the flags that are left.

    Raises:
        ConfigError: a flag is none of an evaluation's or contradicts the step, or there is nothing to evaluate.
    """
    typed = compat.parse(rest, None, world_size)
    flat, changes = flatten(typed), dict[str, Any]()
    for name in typed.explicit:
        field, changes[name] = all_fields()[name], flat[name]
        if field.section not in _SECTIONS and name not in _OTHER_FLAGS:
            raise ConfigError(
                f"{field.flag}: is a flag of training; {NAME} takes those of the layout, of precision and of data"
            )
    path = changes.get("data_config")
    if path is None and flags.tasks is None:
        raise ConfigError(f"{FLAG} is missing: give a file with `validation:`, or --tasks NAME,...")
    for name in ("num_fewshot", "limit", "include_path"):
        if flags.tasks is None and getattr(flags, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: is of lm-eval's tasks; add --tasks NAME,...")
    if flags.tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise MissingPackage(f"--tasks {flags.tasks}: needs the package lm_eval; install it: pip install lm_eval")
    settings = _of_step(source)
    settings |= _tokenizer(source, changes)
    settings |= {"skip_train": True, "eval_iters": 1}
    settings["max_position_embeddings"] = source.run.derived.max_position_embeddings
    if path is None:  # what is made up is not read
        settings |= {"eval_iters": 0, "mock_data": True}
        for name in _OF_DOCUMENTS:
            settings[name] = all_fields()[name].default
    else:
        sets = read_data_config(path, trains=False).validation
        if not sets:
            raise ConfigError(f"{FLAG} {path}: has no sets; write `NAME: {{path: PREFIX}}` below `validation:`")
        if any(one.batches for one in sets):  # which are those of the training
            settings["global_batch_size"] = _global_batch_size(source)
    run = build(filled_in(settings | changes))
    if run.training.global_batch_size is None and run.derived.virtual_pipeline_size is not None:
        stages = run.parallel.pipeline_model_parallel_size  # a round has as many micro-batches
        size = run.training.micro_batch_size * run.derived.data_parallel_size(world_size) * stages
        run = replace(run, global_batch_size=size)
    return dataclasses.replace(run, warnings=typed.warnings)


def _of_step(source: ModelSource) -> dict[str, Any]:
    """Return the settings that come from a step."""
    if not (source.path / folder.STATE).is_file():
        settings: dict[str, Any] = {"load_hf": str(source.path), **PRECISION_FLAGS[source.dtype]}
        return {**settings, "seq_length": source.run.derived.max_position_embeddings}
    where = source.path / folder.CONFIG
    config, fields = folder.read_json(where), all_fields()
    number = folder.read_json(source.path / folder.STATE)["iteration"]
    settings = {"load": str(source.path.parent), "ckpt_step": number, "use_checkpoint_args": True}
    for name in (*_OF_STEP, *_OF_DOCUMENTS):
        if name in config:
            settings[name] = from_file(fields[name], config[name], f"{where}: {name}")
    return settings


def _global_batch_size(source: ModelSource) -> int | None:
    """Return the sequences of a global batch of the training; None for a folder of Hugging Face's."""
    if not (source.path / folder.STATE).is_file():
        return None
    config, state = folder.read_json(source.path / folder.CONFIG), folder.read_json(source.path / folder.STATE)
    unknown = config.keys() - all_fields().keys()
    for name in unknown:
        del config[name]
    return build(config).derived.global_batch_size(state["layout"]["world_size"])


def _tokenizer(source: ModelSource, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of the tokenizer that came with the model, else of the run's own; none if its type is given."""
    if "tokenizer_type" in changes:
        return {}
    given = {name: changes[name] for name in TOKENIZER_FIELDS if name in changes}
    there = companions_folder(source)
    if not given and source.companions.keys() & {"tokenizer.json", "tiktoken.model"}:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(there)}
    if not given and "tokenizer.model" in source.companions:
        return {
            "tokenizer_type": "SentencePieceTokenizer",
            "tokenizer_model": str(source.companions["tokenizer.model"]),
        }
    if there == source.path:
        raise ConfigError(f"{source.path}: came without a tokenizer; name one with --tokenizer-type, --tokenizer-model")
    config = folder.read_json(source.path / folder.CONFIG)
    trained_with = folder.read_json(source.path / folder.STATE).get("tokenizer") or {}
    _, data = tokenizer_of_step(config, trained_with, given, source.run.model.vocab_size or 0, str(source.path))
    return {name: getattr(data, name) for name in TOKENIZER_FIELDS}


class _Evaluations(Sink):
    """Keeps the records of the evaluations."""

    def __init__(self) -> None:
        self.records: list[EvalRecord] = []

    def evaluation(self, record: EvalRecord) -> None:
        self.records.append(record)


def evaluated(run: Run, source: ModelSource, flags: argparse.Namespace) -> dict[str, Any]:
    """Return what is found of a step, on rank 0. Collective over all ranks.

    Keys: `step`; `sets`, name -> loss in nats per token, perplexity, bits_per_byte, tokens, seconds; `tasks`, name ->
    metric -> value, as lm-eval names them.
    """
    stage("loading torch and the engine")
    from megatron_moe.training.run import pretrain

    kept, callbacks, tasks = _Evaluations(), [], {}
    if flags.tasks is not None:
        tokenizer = build_tokenizer(run.data, run.model.vocab_size)
        options = {"num_fewshot": flags.num_fewshot, "limit": flags.limit}
        evaluation = import_module(_WITH_LM_EVAL).TaskEvaluation(
            tokenizer, beginning_of_text(source, tokenizer), flags.tasks.split(","), flags.include_path, options
        )
        callbacks, tasks = [evaluation], evaluation.results
    with contextlib.redirect_stdout(sys.stderr):
        pretrain(run, [kept], stage=stage, callbacks=callbacks)
    sets: dict[str, dict[str, Any]] = {}
    for one in kept.records:
        sets[one.split] = {"loss": None, "perplexity": None, "bits_per_byte": None}
        if one.tokens:
            perplexity = math.exp(min(one.loss, 700.0))
            sets[one.split] = {"loss": one.loss, "perplexity": perplexity, "bits_per_byte": one.bits_per_byte}
        sets[one.split] |= {"tokens": one.tokens, "seconds": one.seconds}
    return {"step": str(source.path), "sets": sets, "tasks": tasks}


def table(found: dict[str, Any]) -> str:
    """Return what `evaluated` found, as aligned text."""
    rows = []
    if found["sets"]:
        rows.append(("set", "loss", "perplexity", "bits per byte", "tokens"))
    for name, values in found["sets"].items():
        numbers = map(_number, (values["loss"], values["perplexity"], values["bits_per_byte"]))
        rows.append((name, *numbers, f"{values['tokens']:,}"))
    if found["tasks"]:
        rows.append(("task", "metric", "value", "stderr", ""))
    for task, metrics in found["tasks"].items():
        for metric, value in metrics.items():
            name, comma, how = metric.partition(",")
            if not name.endswith("_stderr"):
                rows.append((task, metric, _number(value), _number(metrics.get(f"{name}_stderr{comma}{how}")), ""))
    shown = Table(box=None, pad_edge=False, header_style=None, show_header=False)
    for place in range(5):
        shown.add_column(justify="right" if place else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=1000, color_system=None).print(shown)
    return "\n".join(map(str.rstrip, (found["step"], *text.getvalue().splitlines())))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
