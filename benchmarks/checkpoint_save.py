"""What saving costs: ours, hashes included, beside the engine's own save of the same state, and in the background.

Run from the repository's root:

    python -m benchmarks.checkpoint_save                         # two minutes on 2 cores, 0.8 GB a step
    python -m benchmarks.checkpoint_save --folder /scratch/x     # on the disk that matters

One process trains one step of a small model in bf16 with a distributed optimizer, and then saves what it has again and
again: with `megatron.core.dist_checkpointing.save` as published, with ours at once, with ours in the background, in
turn. Each includes gathering the optimizer's state. Ratios are of the medians of one run. All of them put their files
onto the disk (fsync); ours also hashes them and syncs folders.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_moe.checkpoint import folder as folder_module
from megatron_moe.checkpoint.save import Saver, SaveTarget
from megatron_moe.checkpoint.state import TrainingProgress, TrainState, metadata, unwrapped
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build, replace
from megatron_moe.training.run import pretrain

SYNC_LIMIT, ASYNC_LIMIT = 1.15, 0.1
"""Our save over the engine's; what the training waits for in the background over our save at once."""
BACKGROUND = ("async_blocked", "async_copied", "async_whole")
"""Until the next step may begin; until its update may, which it waits for; until the step is there."""

MODEL = {
    **PRESETS["tiny"],
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "bf16": True,
    "use_distributed_optimizer": True,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "train_iters": 1,
    "eval_iters": 0,
}


class _Done(Exception):
    """The training was only there for the state."""


def measure(hidden_size: int, layers: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds of each way to save, one list per way, and the bytes of a step."""
    run = build(
        {
            **MODEL,
            "num_layers": layers,
            "moe_layer_freq": f"[0]+[1]*{layers - 1}",
            "hidden_size": hidden_size,
            "ffn_hidden_size": 4 * hidden_size,
            "moe_ffn_hidden_size": hidden_size,
            "save": str(folder / "ours"),
        }
    )
    found: dict[str, Any] = {}
    save = Saver.save

    def instead(_: Saver, trained: TrainState, progress: TrainingProgress, facts: dict[str, Any]) -> bool:
        Saver.save = save  # type: ignore[method-assign]
        found.update(_contest(run, trained, progress, facts, folder, repeats))
        raise _Done

    Saver.save = instead  # type: ignore[method-assign]
    try:
        pretrain(run)
    except _Done:
        return found
    finally:
        Saver.save = save  # type: ignore[method-assign]
    raise AssertionError("the run did not save")


def _contest(
    run: Run, trained: TrainState, progress: TrainingProgress, facts: dict[str, Any], folder: Path, repeats: int
) -> dict[str, Any]:
    from megatron.core import dist_checkpointing  # behind our package, which adapts it

    seconds: dict[str, list[float]] = {name: [] for name in ("engine", "sync", *BACKGROUND)}
    ours, theirs = folder_module.step_folder(folder / "ours", progress.iteration), folder / "engine"
    at_once = Saver(run, SaveTarget.of(run), lambda *_, **__: None)
    background = Saver(replace(run, async_save=True), SaveTarget.of(run), lambda *_, **__: None)

    def save_as_the_engine() -> None:
        theirs.mkdir()
        form = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        options = {**metadata(trained.pg_collection), **form}
        model: Any = unwrapped(trained.model[0])
        weights = model.sharded_state_dict(metadata=options)
        state = trained.optimizer.sharded_state_dict(weights, is_loading=False, metadata=options)
        dist_checkpointing.save({"model": weights, "optimizer": state}, str(theirs))

    for repeat in range(repeats + 1):
        spent = {"engine": _timed(save_as_the_engine)}
        size = sum(path.stat().st_size for path in theirs.rglob("*"))
        shutil.rmtree(theirs)
        spent["sync"] = _timed(lambda: at_once.save(trained, progress, facts))
        shutil.rmtree(ours)
        spent["async_blocked"] = _timed(lambda: background.save(trained, progress, facts))
        spent["async_copied"] = spent["async_blocked"] + _timed(background.wait_until_copied)
        spent["async_whole"] = spent["async_copied"] + _timed(background.finish)
        shutil.rmtree(ours)
        if repeat:  # the first round pays what is paid once: the engine's manager process, our buffers
            for name, value in spent.items():
                seconds[name].append(value)
    return {"bytes": size, "seconds": seconds}


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main(argv: list[str]) -> int:
    """Returns 0 where both ratios are within their limits, 1 where not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder of temporary files")
    parser.add_argument("--hidden-size", type=int, default=512, help="of the model, default 512")
    parser.add_argument("--layers", type=int, default=6, help="of the model, default 6")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count, default 7")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-save-") as made:
        found = measure(options.hidden_size, options.layers, Path(made), options.repeats)
    median = {name: statistics.median(values) for name, values in found["seconds"].items()}
    ratios = {"sync_over_engine": median["sync"] / median["engine"],
              "async_over_sync": median["async_blocked"] / median["sync"]}  # fmt: skip
    versions = {name: version(name) for name in ("megatron-core", "torch")}
    if options.json:
        print(json.dumps({**found, "median": median, **ratios, "versions": versions}))
    else:
        print(", ".join(f"{name} {number}" for name, number in versions.items()))
        print(f"{found['bytes'] / 1e6:.0f} MB a step, median of {options.repeats} rounds (lowest to highest)")
        for name, value in median.items():
            low, high = min(found["seconds"][name]), max(found["seconds"][name])
            print(f"{name:14} {value:7.3f} s   ({low:.3f} to {high:.3f})")
        print(f"our save / the engine's:             {ratios['sync_over_engine']:.2f}   (limit {SYNC_LIMIT})")
        print(f"training waits, background / at once: {ratios['async_over_sync']:.3f}  (limit {ASYNC_LIMIT})")
    return int(ratios["sync_over_engine"] > SYNC_LIMIT or ratios["async_over_sync"] >= ASYNC_LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
