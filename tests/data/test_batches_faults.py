"""The twenty kinds of bad data, ten random variants each: a named error with exit status 2, or proven harmless.

Harmless means: the run gets the very samples that it gets from the undamaged files.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_moe.config import cli
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import flatten
from megatron_moe.data.batches import batch_iterator
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.fingerprint import changed_since, data_fingerprint, require_same_data
from megatron_moe.data.tokenizers import NullTokenizer
from megatron_moe.parallel import groups
from megatron_moe.training.trainer import Trainer
from tests.helpers import data_faults as faults
from tests.helpers.data_faults import VOCABULARY, Scene
from tests.helpers.plain_steps import write_step

pytestmark = pytest.mark.engine

TRIALS = 10
Fault = Callable[[Scene, random.Random], str]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    groups.initialize(faults.build({}))
    yield Scene(tmp_path_factory.mktemp("faults"))
    groups.destroy()


def trials(scene: Scene, name: str, number: int = TRIALS) -> Iterator[random.Random]:
    """A generator for each trial, over restored files."""
    for trial in range(number):
        scene.restore()
        yield random.Random(f"{name} {trial}")


def always_named(scene: Scene, fault: Fault, number: int = TRIALS) -> None:
    """Every trial ends with an error that holds the words which the fault returns."""
    for rng in trials(scene, fault.__name__, number):
        words = fault(scene, rng)
        told = scene.verdict()
        assert told is not None, f"{fault.__name__}: not seen, {words} was expected"
        assert words in told


def named_or_harmless(scene: Scene, fault: Fault, number: int = TRIALS) -> None:
    for rng in trials(scene, fault.__name__, number):
        words = fault(scene, rng)
        told = scene.verdict()
        if told is None:
            assert scene.samples() == scene.good_samples, f"{fault.__name__}: other samples, and not a word"
        else:
            assert words in told


def test_the_undamaged_files_pass(scene: Scene) -> None:
    scene.restore()
    assert scene.verdict() is None
    assert scene.samples() == scene.good_samples
    os.unlink(f"{scene.prefix}.json")
    assert scene.verdict() is None


STRUCTURAL = (
    faults.missing, faults.empty, faults.bad_magic, faults.bad_version, faults.unknown_dtype, faults.truncated_index,
    faults.bad_count, faults.bad_length, faults.bad_pointer, faults.shorter_bin, faults.longer_bin,
)  # fmt: skip
OF_CONTENT = (faults.swapped, faults.other_dtype, faults.flipped_bits)


@pytest.mark.parametrize("fault", STRUCTURAL, ids=lambda fault: fault.__name__)
def test_a_fault_of_structure_is_named(scene: Scene, fault: Fault) -> None:
    always_named(scene, fault)


@pytest.mark.parametrize("fault", OF_CONTENT, ids=lambda fault: fault.__name__)
def test_a_fault_of_content_is_named_or_harmless(scene: Scene, fault: Fault) -> None:
    named_or_harmless(scene, fault)


def test_token_beyond_vocabulary(scene: Scene) -> None:
    token_beyond_vocabulary(scene, TRIALS)


def token_beyond_vocabulary(scene: Scene, number: int) -> None:
    """Found at the start by the scan or by the hash; in a file too large for either, in the batch that holds it."""
    for trial, rng in enumerate(trials(scene, "token", number)):
        place, token = faults.token_beyond_vocabulary(scene, rng)
        if trial % 2:
            told = scene.verdict("--data-verify-gb", "0")
            assert told is None, "the hash is not read beyond the limit"
            run = scene.run(data_verify_gb=0.0, vocab_size=VOCABULARY)
            train, _, _ = build_datasets(run, NullTokenizer(VOCABULARY), 24, 0, 0)
            batches = batch_iterator(train, run)
            try:
                for _ in range(24):
                    next(batches)
            except ValueError as error:
                told = str(error)
            else:  # in the part of a sequence that every epoch leaves over
                assert not [row for row in scene.samples()[:24] if max(row) >= VOCABULARY]
                continue
        else:
            assert f"{scene.prefix}.bin: SHA-256" in str(scene.verdict())
            os.unlink(f"{scene.prefix}.json")
            told = scene.verdict()
        assert told is not None and f"token id {token} " in told
        assert f"{scene.prefix}.bin" in told and place in told


def test_file_replaced_between_save_and_resume(scene: Scene) -> None:
    file_replaced(scene, TRIALS)


def file_replaced(scene: Scene, number: int) -> None:
    """With and without sidecars; a file within the limit that holds what it held, copied again, is welcome."""
    for rng in trials(scene, "replaced", number):
        run = scene.run(data_verify_gb=rng.choice((4.0, 0.0)))
        bare = rng.random() < 0.5
        if bare:
            os.unlink(f"{scene.prefix}.json")
        saved = data_fingerprint(run)
        path, same = faults.replaced(scene, rng)
        if bare:
            Path(f"{scene.prefix}.json").unlink(missing_ok=True)
        assert changed_since(saved) is not None and str(path) in str(changed_since(saved))
        now = data_fingerprint(run)
        if same and (path.endswith(".idx") or run.data.data_verify_gb > 0):
            assert require_same_data(run, now, saved, "STEP") == []
            continue
        with pytest.raises(ConfigError, match="is not the file that STEP was trained on") as caught:
            require_same_data(run, now, saved, "STEP")
        assert str(caught.value).startswith(scene.prefix)
        accepting = scene.run(data_verify_gb=run.data.data_verify_gb, accept_changed_data=True, load="somewhere")
        assert "WARNING" in require_same_data(accepting, now, saved, "STEP")[0]


def test_a_resume_on_a_replaced_file_exits_with_status_2(scene: Scene) -> None:
    scene.restore()
    root = scene.folder / "checkpoints"
    root.mkdir()
    resume = ["--load", str(root), "--save", str(root)]
    step = write_step(
        root,
        5,
        config=flatten(cli.parse([*scene.argv(), *resume])),
        state={"iteration": 5, "has_optimizer": True, "data": data_fingerprint(scene.run())},
    )
    assert scene.verdict(*resume) is None
    changed = faults.documents(1)
    changed[7][3] = 950
    faults.write(scene.folder, "data", changed)
    told = scene.verdict(*resume)
    assert told is not None and told.startswith(
        f"{scene.prefix}.bin is not the file that {step} was trained on: SHA-256"
    )
    assert "--accept-changed-data" in told
    assert scene.verdict(*resume, "--accept-changed-data") is None
    assert "--load" in str(scene.verdict("--accept-changed-data"))


def test_a_file_replaced_during_the_run_stops_it_before_it_saves(scene: Scene) -> None:
    scene.restore()
    trainer = SimpleNamespace(data=data_fingerprint(scene.run()), rank_facts=SimpleNamespace(rank=0))
    Trainer.check_data(trainer)  # type: ignore[arg-type]
    faults.write(scene.folder, "data", faults.documents(3))
    with pytest.raises(ConfigError, match=f"{scene.prefix}.bin was written to after the run began.*none is saved"):
        Trainer.check_data(trainer)  # type: ignore[arg-type]


def test_a_file_that_disappears_during_the_run_is_named(scene: Scene) -> None:
    scene.restore()
    saved = data_fingerprint(scene.run())
    assert changed_since(saved) is None
    os.unlink(f"{scene.prefix}.bin")
    assert changed_since(saved) == f"{scene.prefix}.bin: No such file or directory"


def test_other_prefixes_are_no_replaced_files(scene: Scene) -> None:
    scene.restore()
    now, saved = data_fingerprint(scene.run()), data_fingerprint(scene.run(data_path=[scene.other]))
    assert require_same_data(scene.run(), now, saved, "STEP") == []
    assert data_fingerprint(faults.build({"mock_data": True})) == {}


def test_too_few_tokens(scene: Scene) -> None:
    too_few_tokens(scene, TRIALS)


def too_few_tokens(scene: Scene, number: int) -> None:
    for rng in trials(scene, "too few", number):
        flag, length = faults.too_few_tokens(scene, rng).split()
        told = scene.verdict(flag, length, "--max-position-embeddings", "4096")
        assert told is not None and f"{scene.prefix}.bin: the train split has" in told
        assert f"needs {int(length) + 1}" in told


def test_bad_weights(scene: Scene) -> None:
    bad_weights(scene, TRIALS)


def bad_weights(scene: Scene, number: int) -> None:
    for rng in trials(scene, "weights", number):
        words = faults.bad_weights(scene, rng)
        told = scene.verdict(data_path=words)
        assert told is not None and "--data-path" in told, words


def test_stale_index_cache(scene: Scene) -> None:
    stale_cache(scene, TRIALS)


def stale_cache(scene: Scene, number: int) -> None:
    """Damaged caches, and caches of other data under the same path, size and time: the samples are the data's own."""
    for trial, rng in enumerate(trials(scene, "cache", number)):
        faults.stale_cache(scene, rng)
        assert scene.samples() == scene.good_samples
        if trial % 3 == 0:
            about = os.stat(f"{scene.prefix}.idx")
            faults.write(scene.folder, "data", [[7] * n for n in [5] * 20 + [15] * 20])
            for suffix in (".bin", ".idx"):
                os.utime(scene.prefix + suffix, ns=(about.st_atime_ns, about.st_mtime_ns))
            if trial % 2:
                os.unlink(f"{scene.prefix}.json")
            assert {token for row in scene.samples() for token in row} == {7}
            fresh = scene.samples(data_cache_path=str(scene.folder / f"fresh{trial}"))
            assert scene.samples() == fresh


def test_bad_text_in_preprocessing(scene: Scene) -> None:
    bad_text(scene, TRIALS)


def bad_text(scene: Scene, number: int) -> None:
    for rng in trials(scene, "text", number):
        words = faults.bad_text(scene, rng)
        told = faults.preprocessing_says(scene)
        assert told is not None and told.startswith(words)
        assert not list(scene.folder.glob("bad_*"))
