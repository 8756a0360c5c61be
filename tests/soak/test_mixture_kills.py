"""A mixture under kills: other ranks, batches, layouts and futures of the mixture at every start, and no sample lost.

The oracle is the data itself: sample i of each source, read in this process. Every line of any incarnation has to have
the hash of the samples that the sources owe at this place, each source's own ones in order, none lost and none twice.
"""

import contextlib
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml

from megatron_moe.config.schema import build
from megatron_moe.data.batches import KEYS, added, hex_of, sample_words
from megatron_moe.data.datasets import build_named
from megatron_moe.data.mixture import Mixture, read_data_config
from megatron_moe.data.tokenizers import NullTokenizer
from tests.data.prepared import ids
from tests.helpers import kills
from tests.helpers.launchers import Launcher, Torchrun
from tests.soak.conftest import Figure, Scaled

S = 8
DOCUMENTS = {"a": (220, 220), "b": (60,), "c": (25,), "d": (90,)}
"""Of 20 tokens, in each file of a source: some sources are read many times over."""
LAYOUTS: dict[str, tuple[int, int, list[str]]] = {
    # ranks, data-parallel ranks, flags
    "one": (1, 1, []),
    "DP4": (4, 4, []),
    "TP2 x EP2": (4, 2, kills.LAYOUTS["TP2xEP2"][1]),
    **{name: (2, 1, kills.LAYOUTS[name][1]) for name in ("TP2", "PP2")},
    **{name: (2, 2, kills.LAYOUTS[name][1]) for name in ("DP2", "EP2", "ZeRO 2")},
}
MODEL = [
    "--preset", "tiny", "--num-layers", "2", "--moe-layer-freq", "[0]+[1]", "--hidden-size", "32",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--seq-length", str(S), "--micro-batch-size", "1",
    "--eval-iters", "0", "--health-interval", "0", "--save-interval", "3", "--data-config", "data.yaml",
    "--metrics-file", "metrics.jsonl", "--save", "checkpoints", "--load", "checkpoints",
]  # fmt: skip


def future(draw: random.Random, prefixes: dict[str, str], tokens: int) -> dict[str, Any]:
    """A mixture of at least two sources from now on: numbers, steps and lines, and an end for one of them."""
    chosen = draw.sample(sorted(prefixes), draw.choice((2, 3, 4)))
    sources: dict[str, Any] = {}
    for name in chosen:
        points = [[0, draw.uniform(0.1, 1)], [tokens + S * draw.randrange(1, 300), draw.choice((0.1, 0.5, 1.0))]]
        weight = draw.choice((points[0][1], {"steps": points}, {"linear": points}))
        sources[name] = {"path": prefixes[name], "weight": weight}
    ending = draw.choice(chosen)
    if ending not in chosen[:1] and draw.random() < 0.5:
        sources[ending] |= {"epochs": draw.choice((0.5, 2, 3.5)), "when_done": "drop"}
    return {"sources": sources}


class History:
    """What the sources have given after each iteration, followed from the metrics of all incarnations."""

    def __init__(self, folder: Path, prefixes: dict[str, str]) -> None:
        self.after: dict[int, tuple[int, dict[str, Any], Counter[str]]] = {0: (0, {}, Counter())}
        """Iteration -> samples read, what a checkpoint keeps, and the samples of each source."""
        self.found: list[str] = []
        self.furthest = 0.0
        self.reread = 0
        self._data, self._sizes = {}, {}
        for name, prefix in prefixes.items():
            (folder / "one.yaml").write_text(yaml.safe_dump({"sources": {name: {"path": prefix, "weight": 1}}}))
            run = build({"seq_length": S, "data_config": str(folder / "one.yaml"), "eval_iters": 0})
            train, _ = build_named(run, NullTokenizer(1000), 10**6, 0, 1)
            assert train is not None
            self._data[name], self._sizes[name] = train, train.mixture.epoch_samples[0]

    def follow(self, config: Path, lines: list[dict[str, Any]]) -> int:
        """Check the lines of one incarnation; return the iteration that it began after."""
        sources = read_data_config(str(config)).sources
        names, began = [source.name for source in sources], lines[0]["iteration"] - 1
        samples, saved, taken = self.after[began]
        self.reread += max(self.after) - began
        self.after = {iteration: known for iteration, known in self.after.items() if iteration <= began}
        mixture = Mixture(sources, [self._sizes[name] for name in names], S, samples, saved)
        limits = {s.name: int(s.epochs * self._sizes[s.name]) for s in sources if s.epochs is not None}
        taken, expected, first = taken.copy(), Counter[str](), taken.copy()
        for line in lines:
            words = []
            for number in range(samples, line["consumed_samples"]):
                weights = {s.name: s.weight.at(number * S) for s in sources if taken[s.name] < limits.get(s.name, 9e9)}
                for name, weight in weights.items():
                    expected[name] += weight / sum(weights.values())  # type: ignore[assignment]
                place, index = mixture.at(number)
                name = names[place]
                if index != taken[name] or name not in weights:
                    self.found.append(f"sample {number}: {name}'s {index}, of which {taken[name]} were read")
                taken[name] += 1
                sample = self._data[name][taken[name] - 1]
                words.append(sample_words(number, torch.stack([sample[key] for key in KEYS]).to(torch.int64)))
                self.furthest = max(self.furthest, *(abs(taken[n] - first[n] - expected[n]) for n in names))
            samples = line["consumed_samples"]
            if line["data_hash"] != hex_of(*added(words)):
                self.found.append(f"iteration {line['iteration']}: other samples than the mixture's")
            self.after[line["iteration"]] = samples, mixture.state(samples), taken.copy()
        return began


def trial(launcher: Launcher, folder: Path, number: int, seed: str) -> dict[str, object]:
    """Starts that are killed until there were `number` kills, and a last one that comes to its end."""
    folder.mkdir()
    draw = random.Random(seed)
    numbers = numpy.random.default_rng(len(seed))
    prefixes = {}
    for name, files in DOCUMENTS.items():
        for place, count in enumerate(files):
            ids(folder, f"{name}{place}", numbers.integers(0, 999, (count, 20)).tolist(), 1000)
        prefixes[name] = str(folder / f"{name}?_*")
    history = History(folder, prefixes)
    metrics, config = folder / "metrics.jsonl", folder / "data.yaml"
    written: list[bytes] = []
    used, in_a_save, edits = Counter[str](), 0, 0
    for start in range(number + 1):
        samples = history.after[max(history.after)][0]
        if start == 0 or draw.random() < 0.8:
            config.write_text(yaml.safe_dump(future(draw, prefixes, samples * S)))
            edits += 1
        layout = draw.choice(sorted(LAYOUTS))
        used[layout] += 1
        world_size, replicas, flags = LAYOUTS[layout]
        batch = replicas * draw.randint(1, 6)
        iterations = max(history.after) + (12 if start == number else 10_000)
        argv = [*MODEL, *flags, "--train-iters", str(iterations), "--global-batch-size", str(batch)]
        argv += ["--async-save"] if draw.random() < 0.5 else []
        launcher.start(argv, world_size, folder, folder / "log.txt")
        status, began = None, time.time()
        if start == number:
            status = launcher.wait(600)
            assert status == 0, f"status {status}:\n{kills.tail(folder)}"
        else:
            # Within the start now and then; else some lines after it, at any time of a step or a save.
            if draw.random() < 0.1:
                status = launcher.wait(draw.uniform(0, 2))
            else:
                wanted = draw.randint(1, 16)
                while status is None and _count(metrics, written) < wanted:
                    status = launcher.wait(0.02)
                if draw.random() < 0.5:
                    while status is None and not _being_saved(folder, began):
                        status = launcher.wait(0.005)
                status = launcher.wait(draw.uniform(0, 0.1)) if status is None else status
            assert status is None, f"status {status}:\n{kills.tail(folder)}"
            launcher.kill(draw.choice((None, draw.randrange(world_size))))
            in_a_save += _being_saved(folder, began)
        lines = kills.raw_lines(metrics)
        fresh = [json.loads(line) for line in lines if line not in written]
        written = lines
        if fresh:
            history.follow(config, fresh)
        history.found += kills.steps_in(folder / "checkpoints")[1]
    samples, _, taken = history.after[max(history.after)]
    state = json.loads((sorted((folder / "checkpoints").glob("iter_*"))[-1] / "state.json").read_text())
    kept = {name: facts["samples"] for name, facts in state["sources"].items()}
    if (kept, sum(kept.values())) != (dict(taken), samples):
        history.found.append(f"the last step keeps {kept} of {samples}, and {dict(taken)} were read")
    return {
        "trials": number,
        "failures": len(history.found),
        "edits": edits,
        "in_a_save": in_a_save,
        "layouts": dict(used),
        "samples": samples,
        "of_sources": dict(taken),
        "iterations_read_again": history.reread,
        "furthest_from_the_weights": history.furthest,
        "found": history.found[:20],
    }


def _count(metrics: Path, written: list[bytes]) -> int:
    return sum(line not in written for line in kills.raw_lines(metrics))


def _being_saved(folder: Path, began: float) -> bool:
    """Whether a start of that time is writing a step, or was when it was killed."""
    with contextlib.suppress(FileNotFoundError):  # it has just been renamed
        return any(path.stat().st_mtime >= began for path in (folder / "checkpoints").glob(".iter_*"))
    return False


@pytest.mark.parametrize("way", ["forked", "torchrun"])
def test_kills_and_edits_lose_and_repeat_no_sample_of_a_source(
    forked: Launcher, tmp_path: Path, scaled: Scaled, figure: Figure, way: str
) -> None:
    launcher, number = (forked, 28) if way == "forked" else (Torchrun(), 12)
    result = trial(launcher, tmp_path / "job", scaled(number), way)
    figure("R16", **result, launcher=way)
    assert result["found"] == [] and result["furthest_from_the_weights"] <= 2
