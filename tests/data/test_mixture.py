"""Named sources: the file that names them, and which source each sample of a run is of."""

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build, flatten, replace
from megatron_moe.data.checks import require_same_samples
from megatron_moe.data.datasets import build_named
from megatron_moe.data.mixture import DataSource, Mixture, Weight, read_data_config
from megatron_moe.data.tokenizers import NullTokenizer
from tests.helpers.trained_steps import SMALL, refusal, trained

S = 8


def source(name: str, *values: float, at: tuple[int, ...] = (0,), linear: bool = False, **ends: Any) -> DataSource:
    return DataSource(name=name, prefixes=(name,), weight=Weight(at, values, linear), **ends)


def counts(mixture: Mixture, begin: int, end: int) -> list[int]:
    found = Counter(mixture.at(number)[0] for number in range(begin, end))
    return [found[place] for place in range(len(mixture.sources))]


@pytest.mark.parametrize("seed", range(8))
def test_shares_are_those_of_any_schedule_within_half_a_percent_of_any_500_samples(seed):
    """Steps and lines, to 0 and from it, with sources that end: at no sample a source is 1.25 samples off."""
    draw = random.Random(seed)
    sources, epochs = [], []
    for name in "abcdef"[: draw.randint(2, 6)]:
        at = (0, *sorted(draw.sample(range(1, 3000), draw.randint(0, 4))))
        weights = [draw.choice((0.0, draw.random(), draw.random() ** 4)) for _ in at]
        if name == "a":  # something is left at every time
            weights, ends = [weight + 1e-3 for weight in weights], {}
        else:
            ends = draw.choice(({}, {"epochs": draw.choice((0.5, 2.5)), "when_done": "drop"}))
        points = tuple(S * place for place in at)
        sources.append(source(name, *weights, at=points, linear=draw.random() < 0.5, **ends))
        epochs.append(2 * draw.randint(20, 200))
    mixture, wanted, taken = Mixture(sources, epochs, S), [0.0] * len(sources), [0] * len(sources)
    for number in range(4000):
        weights = []
        for one, size, count in zip(sources, epochs, taken):
            times, values = one.weight.tokens, one.weight.values
            weight = values[sum(time <= number * S for time in times) - 1]
            if one.weight.linear:
                weight = numpy.interp(number * S, times, values)
            weights.append(weight if count < (one.epochs or math.inf) * size else 0.0)
        taken[mixture.at(number)[0]] += 1
        wanted = [share + weight / sum(weights) for share, weight in zip(wanted, weights)]
        assert max(abs(count - share) for count, share in zip(taken, wanted)) < 1.25


def test_kills_and_edits_of_the_future_lose_and_repeat_no_sample():
    """40 restarts at any sample, each from what the one before kept, most with other weights, some without a source."""
    draw = random.Random(3)
    epochs = {"a": 900, "b": 70, "c": 5000}
    names, seen, first, saved = list(epochs), dict.fromkeys(epochs, 0), 0, None
    for restart in range(40):
        used = names if restart % 5 else draw.sample(names, 2)
        sources = [source(name, draw.random(), draw.random(), at=(0, S * draw.randrange(1, 9999))) for name in used]
        mixture = Mixture(sources, [epochs[name] for name in used], S, first, saved)
        for number in range(first, first + draw.randrange(1, 700)):
            place, index = mixture.at(number)
            assert index == seen[used[place]]
            seen[used[place]] += 1
        first += sum(seen.values()) - first
        saved = mixture.state(first)
    assert {name: facts["samples"] for name, facts in saved.items()} == seen


def test_an_unedited_restart_goes_on_as_if_there_was_none():
    sources = [source("a", 0.7), source("b", 0.1, 0.5, at=(0, 60_000), linear=True), source("c", 2.0, epochs=0.5)]
    sources[2] = source("c", 0.2, epochs=2, when_done="drop")
    mixture = Mixture(sources, [1000, 500, 300], S)
    whole = [mixture.at(number) for number in range(10_000)]
    assert counts(mixture, 0, 10_000)[2] == 600  # two epochs, and no more
    for first in (1, 4096, 7777):
        again = Mixture(sources, [1000, 500, 300], S, first, mixture.state(first))
        assert [again.at(number) for number in range(first, 10_000)] == whole[first:]
    assert mixture.at(5) == whole[5]  # a sample that is read again
    for number in (0, 1, 4096, 4097, 9000):
        samples = [facts["samples"] for facts in mixture.state(number).values()]
        assert list(mixture.epochs(number).values()) == [samples[0] / 1000, samples[1] / 500, samples[2] / 300]


def test_a_source_that_stops_ends_the_run_and_dropped_ones_end_it_together():
    mixture = Mixture([source("a", 1), source("b", 1, epochs=1, when_done="stop")], [100, 10], S)
    assert mixture.lasts(20) and not mixture.lasts(22)
    with pytest.raises(IndexError):
        mixture.at(22)
    drops = [source("a", 1, epochs=1, when_done="drop"), source("b", 1, epochs=3, when_done="drop")]
    mixture = Mixture(drops, [100, 10], S)
    assert mixture.lasts(130) and not mixture.lasts(131) and counts(mixture, 0, 130) == [100, 30]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sources: [a]", "sources: ['a']; write `NAME: {path: PREFIX}`"),
        ("source: {}", "unknown key 'source'; it takes sources, validation"),
        ("sources: {a b: {path: x}}", "sources.a b: a name has letters"),
        ("sources: {a: x}", "sources.a: 'x'; write {path: PREFIX, ...}"),
        ("sources: {a: {path: x, weigth: 1}}", "sources.a: unknown key 'weigth'; it takes path, weight"),
        ("sources: {a: {weight: 1}}", "sources.a.path: None; give the prefix"),
        ("sources: {a: {path: no/such*, weight: 1}}", "sources.a.path: no dataset is called no/such*"),
        ("sources: {a: {path: x}}", "sources.a.weight: None; write a number"),
        ("sources: {a: {path: x, weight: -1}}", "sources.a.weight: -1; write a number"),
        ("sources: {a: {path: x, weight: {step: 1}}}", "a schedule is {steps: [[TOKENS, WEIGHT], ...]}"),
        ("sources: {a: {path: x, weight: {steps: [1, 2]}}}", "weight.steps: [1, 2]; write pairs"),
        ("sources: {a: {path: x, weight: {steps: [[5, 1]]}}}", "tokens [5.0]; they begin at 0 and rise"),
        ("sources: {a: {path: x, weight: {linear: [[0, 1], [1e9, 0]]}}}", "after 1000000000 tokens every weight is 0"),
        ("sources: {a: {path: x, weight: 1, when_done: end}}", "when_done: 'end'; write stop, repeat or drop"),
        (
            "sources: {a: {path: x, weight: 1, epochs: 2, when_done: repeat}}",
            "limits nothing where when_done",
        ),
        ("sources: {a: {path: x, weight: 1, epochs: 0}}", "epochs: is 0; leave the source out"),
        ("sources: {a: {path: x, weight: 1, split: 9}}", "split: 9; write three shares"),
        ("validation: {v: {path: x, batches: 0}}", "validation.v.batches: 0; write a whole number above 0"),
        ("sources: {a: {}, a: {}}", "key a is given twice"),
    ],
)
def test_mistakes_in_the_file_are_named_with_what_works(tmp_path, text, told):
    file = tmp_path / "data.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_data_config(str(file))
    assert str(error.value).startswith(f"--data-config {file}") and told in str(error.value)


@pytest.fixture
def write_config(tmp_path: Path, write_ids: Callable[..., str]) -> Callable[[str], str]:
    """`write_config(weight of a)`: a file with sources of one and of two datasets, and two validation sets."""
    prefixes = [
        write_ids([[100 * i + k % 90 for k in range(j, j + 20)] for j in range(30)], name=name)
        for i, name in enumerate(("a", "b1", "b2", "v"))
    ]

    def write(weight: str) -> str:
        (tmp_path / "data.yaml").write_text(
            f"sources:\n  a: {{path: {prefixes[0]}, weight: {weight}}}\n  b: {{path: '{tmp_path}/b?_*', weight: 1}}\n"
            f"validation:\n  whole: {{path: {prefixes[3]}}}\n"
            f"  part: {{path: {prefixes[1]}, batches: 2, split: '5,5,0'}}\n"
        )
        return str(tmp_path / "data.yaml")

    return write


@pytest.mark.engine
@pytest.mark.usefixtures("process_group")
def test_a_sample_of_a_source_depends_on_seed_name_and_number_alone(write_config):
    def built(weight: str, **state: Any) -> tuple[Any, dict[str, Any]]:
        run = build({"seq_length": S, "seed": 5, "data_config": write_config(weight)})
        return build_named(run, NullTokenizer(1000), 400, 4, 16, **state)

    def samples(data: Any, first: int, end: int) -> dict[tuple[int, int], list[int]]:
        return {data.mixture.at(number): data[number]["tokens"].tolist() for number in range(first, end)}

    before, sets = built("1")
    first = samples(before, 0, 300)
    assert len(first) == 300  # no sample twice
    b = [tokens for (place, _), tokens in first.items() if place == 1]
    per_epoch = before.mixture.epoch_samples[1]
    assert Counter(tokens[0] // 100 for tokens in b[:per_epoch]) == {1: 74, 2: 74}
    assert {tokens[0] // 100 for tokens in b[:20]} == {1, 2}  # the files of a source are mixed
    edited, _ = built("3", first=150, saved=before.mixture.state(150))
    after = samples(edited, 150, 300)
    assert {key: tokens for key, tokens in after.items() if key in first}.items() <= first.items()
    assert sum(place == 0 for place, _ in after) == pytest.approx(0.75 * 150, abs=1)
    # Evaluated samples: all of them, then none that counts, until the rounds are full.
    whole, part = sets["valid/whole"], sets["valid/part"]
    assert (whole.count, len(whole), part.count, len(part)) == (74, 80, 8, 16)
    assert [bool(whole[i]["loss_mask"].any()) for i in (0, 73, 74, 79)] == [True, True, False, False]
    assert torch.cat([whole[i]["tokens"] for i in range(74)]).min() >= 300


def test_a_source_of_a_checkpoint_keeps_its_data(write_config):
    run = build({"seq_length": S, "data_config": write_config("1"), "vocab_size": 1000})
    (a, b), _ = (named := read_data_config(run.data.data_config)).sources, named.validation
    saved = Mixture([a, b], [10, 10], S).state(5)
    assert require_same_samples(run, {}, flatten(run), {}, "STEP", saved) == []
    saved["a"]["prefixes"], saved["b"]["split"] = ["other"], "9,1,0"
    with pytest.raises(ConfigError, match=r"source a: checkpoint other(.|\n)*source b: checkpoint split 9,1,0"):
        require_same_samples(run, {}, flatten(run), {}, "STEP", saved)
    with pytest.raises(ConfigError, match="--data-config: checkpoint None"):
        require_same_samples(run, {}, flatten(replace(run, data_config=None, mock_data=True)), {}, "STEP")


def test_a_source_that_comes_back_has_the_files_that_it_had(gloo, tmp_path, write_ids):
    def write(*names: str) -> None:
        lines = [f"  {name}: {{path: {tmp_path}/{name}_text_document, weight: 1}}\n" for name in names]
        (tmp_path / "data.yaml").write_text("sources:\n" + "".join(lines))

    for name in "ab":
        write_ids([[place % 90 for place in range(40)]] * 3, name=name, vocab_size=100)
    root, data = str(tmp_path / "c"), str(tmp_path / "data.yaml")
    flags = {**SMALL, "mock_data": False, "data_config": data, "tokenizer_type": "NullTokenizer", "vocab_size": 100}
    flags |= {"seq_length": 8, "save": root, "load": root}
    for step, names in enumerate(("ab", "a", "a"), 1):  # the last step is of a run that began without it
        write(*names)
        gloo.run(1, trained, flags={**flags, "train_iters": step})
    write("a", "b")
    write_ids([[place % 7 for place in range(40)]] * 3, name="b", vocab_size=100)
    (told,) = gloo.run(1, refusal, flags={**flags, "train_iters": 4})
    assert "b_text_document.bin is not the file that" in told
