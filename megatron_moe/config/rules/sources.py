"""Rules about data, tokenizer, checkpoint folders and files to write. Contents are checked where they are read."""

from __future__ import annotations

import math
import os
from pathlib import Path
from urllib.parse import urlsplit

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.fields import all_fields
from megatron_moe.config.paths import (
    is_url,
    require_store,
    require_writable_file,
    require_writable_folder,
)
from megatron_moe.config.rules.rule import FILES, Refusal, refuse, rule, set_among, unread, value
from megatron_moe.config.run_flags import TIKTOKEN_FIELDS, TOKENIZER_FILES
from megatron_moe.config.schema import Run

_SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")


@rule(needs=FILES)
def one_data_source(run: Run) -> None:
    """Require one source of tokens: made up, one blend that is split, or one blend per split."""
    per_split = set_among(run, _SPLIT_PATHS)
    sources = set_among(run, ("mock_data", "program_data", "data_config", "data_path")) + per_split[:1]
    if not sources:
        raise Refusal(
            ("data_path", "train_data_path", "mock_data"),
            "say where the tokens come from: --data-path PREFIX, or --mock-data for made-up ones",
        )
    if len(sources) > 1:
        raise Refusal(sources, "choose one source of tokens and drop the others")
    if per_split and "train_data_path" not in per_split and not run.training.skip_train:
        raise Refusal((*per_split, "train_data_path"), "there is nothing to train on; add --train-data-path")


@rule(needs=FILES)
def blend_is_weighted(run: Run) -> None:
    """Require of a blend one prefix, or pairs of a weight, which is finite and above 0, and a prefix."""
    for name in ("data_path", *_SPLIT_PATHS):
        words = value(run, name) or ()
        if len(words) < 2:
            continue
        if len(words) % 2:
            raise Refusal(
                (name,), f"{len(words)} words are no pairs; write WEIGHT PREFIX WEIGHT PREFIX ..., or one PREFIX"
            )
        for word, prefix in zip(words[::2], words[1::2]):
            weight = _number(word)
            if weight is None:
                raise Refusal((name,), "every prefix needs a weight before it; e.g. 0.3 PREFIX_A 0.7 PREFIX_B")
            if not math.isfinite(weight) or weight <= 0:
                raise Refusal(
                    (name,),
                    f"weight {word} of {prefix} must be a number above zero; to leave data out, drop its prefix",
                )
            if _number(prefix) is not None:  # a file of such a name can be written ./7
                raise Refusal(
                    (name,), f"{prefix} is a number where a prefix is expected; WEIGHT PREFIX WEIGHT PREFIX ..."
                )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


@rule(needs=FILES)
def split_is_three_shares(run: Run) -> None:
    """Require a share of train, valid and test each, of which train's is not zero, and one blend to split."""
    text = run.data.split
    if text is None:
        return
    if per_split := set_among(run, ("data_config", *_SPLIT_PATHS)):
        raise Refusal(("split", *per_split), "each split has its own data; drop --split")
    shares = [share for share in map(_number, text.split(",")) if share is not None and 0 <= share < math.inf]
    if len(shares) != 3 or text.count(",") != 2 or not shares[0]:
        raise Refusal(("split",), "takes three shares with commas, train's above 0; e.g. --split 969,30,1")


unread(
    ("document_boundaries",),
    "reset_attention_mask",
    "documents are not told apart; add --reset-attention-mask or drop it",
)
refuse(
    "packed_documents_are_apart",
    ("packing", "reset_attention_mask"),
    "what is packed does not belong together; add --reset-attention-mask, or use --packing none",
    when=lambda run: run.data.packing != "none" and not run.data.reset_attention_mask,
)
refuse(
    "program_packs_its_own_data",
    ("packing", "program_data"),
    "the samples of a program are taken as they are; say in their `documents` what belongs together, and use"
    " --packing none",
    when=lambda run: run.data.packing != "none" and run.data.program_data,
)


@rule(needs=FILES)
def tokenizer_is_given(run: Run) -> None:
    """Require a tokenizer, which has the vocabulary; made-up tokens need its size alone."""
    made = set_among(run, ("mock_data", "program_data"))
    if run.data.tokenizer_type is not None or not (made or set_among(run, ("data_config", "data_path", *_SPLIT_PATHS))):
        return
    if not made:
        raise Refusal(
            ("tokenizer_type",),
            "data needs the tokenizer that made it; e.g. --tokenizer-type HuggingFaceTokenizer --tokenizer-model PATH",
        )
    if run.model.vocab_size is None:
        raise Refusal(
            ("vocab_size", "tokenizer_type", *made),
            "tokens without files need a range; add --vocab-size, e.g. 8192, or a tokenizer",
        )


@rule(needs=FILES)
def tokenizer_files_go_with_their_type(run: Run) -> None:
    """Require the files of a tokenizer that is read from files; refuse files that it does not read."""
    kind = run.data.tokenizer_type
    needed = TOKENIZER_FILES.get(kind or "", ())
    missing = [name for name in needed if value(run, name) is None]
    if missing:
        flags = " ".join(f"{all_fields()[name].flag} PATH" for name in missing)
        raise Refusal(("tokenizer_type", *needed), f"is read from files; add {flags}")
    for name in set_among(run, ("tokenizer_model", "vocab_file", "merge_file")):
        if name not in needed:
            readers = " or ".join(of for of, names in TOKENIZER_FILES.items() if name in names)
            raise Refusal((name, "tokenizer_type"), f"is read by {readers}; name that type or drop the file")
    stray = set_among(run, TIKTOKEN_FIELDS)
    if stray and kind != "TikTokenizer":
        raise Refusal((*stray, "tokenizer_type"), "TikTokenizer alone reads it; name that type or drop it")
    if kind == "NullTokenizer" and run.model.vocab_size is None:
        raise Refusal(("tokenizer_type", "vocab_size"), "has only a size; add --vocab-size, e.g. 8192")


refuse(
    "sample_needs_tokenizer",
    ("sample_prompt", "tokenizer_type"),
    "a prompt needs a tokenizer that reads text; add one or drop the prompt",
    when=lambda run: run.logging.sample_prompt is not None and run.data.tokenizer_type in (None, "NullTokenizer"),
    needs=FILES,
)
unread(
    ("sample_tokens",), "sample_prompt", "nothing would be generated; add --sample-prompt TEXT or drop it", needs=FILES
)
unread(
    (
        "save_interval",
        "save_retain_interval",
        "no_save_optim",
        "no_save_rng",
        "async_save",
        "keep_last_k",
        "on_save_error",
    ),
    "save",
    "NOTHING IS SAVED; add --save FOLDER or drop it",
    needs=FILES,
    in_megatron=True,
    refused_there=("keep_last_k", "on_save_error"),
)


@rule(needs=FILES)
def retained_steps_are_saved(run: Run) -> None:
    """Require that the steps to retain are saved."""
    every, interval = run.checkpoint.save_retain_interval, run.checkpoint.save_interval
    if every is not None and (interval is None or every % interval):
        works = f"e.g. --save-retain-interval {10 * interval}" if interval else "add --save-interval"
        raise Refusal(
            ("save_retain_interval", "save_interval"),
            f"checkpoints that stay are multiples of both, so the one has to be a multiple of the other; {works}",
        )


unread(("local_save_interval",), "local_save", "no local step is kept; add --local-save DIR or drop it", needs=FILES)


@rule(needs=FILES)
def local_steps_stand_before_durable_ones(run: Run) -> None:
    """Require that local steps come more often than those of `--save`, which a restart with both continues."""
    options = run.checkpoint
    if options.local_save is None:
        return
    if options.local_save_interval is None:
        raise Refusal(("local_save", "local_save_interval"), "when? add --local-save-interval, e.g. 10")
    if options.save is None or os.path.normpath(options.save) != os.path.normpath(options.load or ""):
        raise Refusal(
            ("local_save", "save", "load"),
            "local steps are taken where they are newer than those of one folder; give it to --save and --load",
        )
    if options.save_interval is not None and options.save_interval <= options.local_save_interval:
        raise Refusal(
            ("local_save_interval", "save_interval"), "is for steps between those of --save; use a smaller one"
        )
    if options.no_save_optim or options.no_load_optim or options.finetune:
        names = set_among(run, ("no_save_optim", "no_load_optim", "finetune"))
        raise Refusal(("local_save", *names), "a local step is the whole state, to go on from; drop one")


refuse(
    "warm_restarts_fork",
    ("warm_restarts", "save", "load"),
    "a store's library has threads by then, and a process with threads cannot be forked; save to a folder, or drop"
    " --warm-restarts",
    when=lambda run: (
        run.faults.warm_restarts is not None
        and any(is_url(given or "") for given in (run.checkpoint.save, run.checkpoint.load))
    ),
    needs=FILES,
)
_LOADING = ("finetune", "no_load_optim", "no_load_rng", "ckpt_step", "exit_on_missing_checkpoint")
unread(
    _LOADING,
    "load",
    "nothing would be loaded; add --load FOLDER or drop it",
    is_read=lambda run: run.checkpoint.load is not None or run.checkpoint.load_hf is not None,
    needs=FILES,
    in_megatron=True,
)
unread(
    ("use_checkpoint_args", "accept_changed_data", "verify_checkpoint", "lr_restart_at", *_LOADING),
    "load",
    "nothing would be loaded; add --load FOLDER or drop it",
    needs=FILES,
)
unread(
    ("use_checkpoint_opt_param_scheduler",),
    "load",
    "there is no checkpoint to take it from; add --load FOLDER or drop it",
    needs=FILES,
    in_megatron=True,
)
refuse(
    "imported_weights_are_a_start",
    ("load_hf",),
    "weights and architecture come from the folder where --load holds no step yet, and a step that it holds is"
    " continued; drop --load-hf or the other",
    when=lambda run: run.checkpoint.load_hf is not None,
    any_of=("finetune", "exit_on_missing_checkpoint", "use_checkpoint_args"),
    needs=FILES,
)
unread(("allow_suspicious_weights",), "load_hf", "is about the folder of --load-hf; drop it", needs=FILES)


_WRITTEN_FILES = ("metrics_file", "plot_file", "report_file", "summary_file", "prometheus_file")


_WRITTEN_FOLDERS = ("save", "tensorboard_dir", "fault_dir", "wandb_save_dir", "moe_routing_trace_path")


@rule(needs=FILES)
def written_paths_are_writable(run: Run) -> None:
    """Require that the files of a run can be written, before the first step and not when they are due."""
    audit = ("audit_precision_output",) if run.precision.audit_precision else ()
    for name in _WRITTEN_FOLDERS:
        if value(run, name) is not None:
            given = value(run, name)
            if name == "save" and is_url(given):
                require_store("--save", given)
            else:
                require_writable_folder(all_fields()[name].flag, given)
    for name in (*_WRITTEN_FILES, *audit):
        if value(run, name) is not None:
            require_writable_file(all_fields()[name].flag, value(run, name), in_new_folder=True)


@rule(needs=FILES)
def written_files_differ(run: Run) -> None:
    """Require that each file that a run writes has its own path, which is none of its folders."""
    taken: dict[Path, str] = {}
    for name in (*_WRITTEN_FOLDERS, *_WRITTEN_FILES):
        if value(run, name) is None:
            continue
        path = Path(os.path.abspath(value(run, name)))
        if path in taken and not (name in _WRITTEN_FOLDERS and taken[path] in _WRITTEN_FOLDERS):
            raise Refusal((taken[path], name), "one would overwrite the other; give each its own path")
        taken.setdefault(path, name)


refuse(
    "prometheus_file_is_collected",
    ("prometheus_file",),
    "node_exporter reads names that end in .prom alone; e.g. --prometheus-file FOLDER/moe.prom",
    when=lambda run: not (run.logging.prometheus_file or ".prom").endswith(".prom"),
    needs=FILES,
)
unread(
    ("straggler_interval",), "log_straggler", "no rank's time is exchanged; add --log-straggler or drop it", needs=FILES
)
# They are drawn from the metrics file, and so include interrupted runs.
unread(
    ("plot_file", "report_file"),
    "metrics_file",
    "it is drawn from the metrics; add --metrics-file FILE.jsonl",
    needs=FILES,
)


@rule(needs=FILES)
def profile_is_a_range_of_steps(run: Run, world_size: int) -> None:
    """Require a step to profile, on ranks that exist, and a folder for traces."""
    options = run.logging
    if not options.profile:
        return
    if options.profile_step_end <= options.profile_step_start:
        raise Refusal(
            ("profile", "profile_step_start", "profile_step_end"),
            f"no step is between these; use --profile-step-end {options.profile_step_start + 2}",
        )
    beyond = [rank for rank in options.profile_ranks if rank >= world_size]
    if beyond:
        raise Refusal(("profile", "profile_ranks"), f"there are {world_size} ranks, from 0; use --profile-ranks 0")
    has_folder = run.checkpoint.save is not None and not is_url(run.checkpoint.save)
    if options.use_pytorch_profiler and options.tensorboard_dir is None and not has_folder:
        raise Refusal(
            ("use_pytorch_profiler", "tensorboard_dir", "save"),
            "traces need a folder on a disk; add --tensorboard-dir, or --save",
        )


READ_WITH = {
    "manual_gc": ("manual_gc_interval", "manual_gc_eval"),
    "profile": ("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"),
    "qk_clip": ("qk_clip_alpha", "qk_clip_threshold"),
    "tensorboard_dir": ("tensorboard_queue_size",),
    "wandb_project": ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
}
"""Flag -> settings that are read with it alone, in Megatron-LM too."""

SCALARS = (
    "tensorboard_log_interval",
    "log_timers_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_world_size_to_tensorboard",
)
"""Settings that are read where scalars go to TensorBoard, Weights & Biases or MLflow."""


_ALONE = "the first are read with the last alone; add it, or drop them"
for _flag, _names in READ_WITH.items():
    unread(_names, _flag, _ALONE, needs=FILES, in_megatron=True)
unread(
    SCALARS,
    "tensorboard_dir",
    _ALONE,
    is_read=lambda run: run.logging.tensorboard_dir or run.logging.wandb_project or run.logging.mlflow_experiment,
    needs=FILES,
    in_megatron=True,
)
unread(
    ("mlflow_tracking_uri", "mlflow_run_name"),
    "mlflow_experiment",
    "nothing goes to MLflow; add --mlflow-experiment NAME",
    needs=FILES,
)


@rule(needs=FILES)
def mlflow_uri_is_public(run: Run) -> None:
    """Refuse a place of MLflow's runs that is none, or that has a password in it; the message does not repeat one."""
    given = run.logging.mlflow_tracking_uri
    if given is None:
        return
    try:
        parts = urlsplit(given)
        secret = parts.password is not None or (parts.scheme in ("http", "https") and parts.username is not None)
    except ValueError as error:
        raise Refusal(("mlflow_tracking_uri",), f"is no URI ({error}); e.g. http://HOST:PORT") from None
    if secret:
        raise ConfigError(
            "--mlflow-tracking-uri: has a user or a password in it, which everybody sees in the list of processes and "
            "in the run's files; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead, or for a database "
            "MLFLOW_TRACKING_URI in place of the flag"
        )
