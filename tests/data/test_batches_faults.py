"""Data files that are damaged, replaced or cached wrongly: a named error, or the very samples of sound files.

`test_index_file.py` and `test_checks.py` have every kind of damage; here are the doors that a run comes through.
"""

import json
import os
import shutil
import struct
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import pretrain_moe
from megatron_moe.config import cli
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, build, flatten
from megatron_moe.data import datasets
from megatron_moe.data.batches import batch_iterators
from megatron_moe.data.checks import changed_since, data_fingerprint, require_same_samples
from megatron_moe.data.datasets import build_datasets
from megatron_moe.data.tokenizers import NullTokenizer
from megatron_moe.training.callbacks.checkpointing import require_unchanged_data
from tests.data.prepared import ids
from tests.helpers.plain_steps import write_step

pytestmark = pytest.mark.usefixtures("process_group")

VOCABULARY = 1000
DOCUMENTS = [[(37 * i + 11 * j) % 900 for j in range(10)] for i in range(40)]
OTHERS = [[token + 1 for token in document] for document in DOCUMENTS]


class Scene:
    """A dataset of 40 documents with its sidecar, another one of the same size, and what a run makes of the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.other = ids(folder, "other", OTHERS, VOCABULARY)
        self.restore()

    def restore(self) -> None:
        self.prefix = ids(self.folder, "data", DOCUMENTS, VOCABULARY)

    def path(self, suffix: str) -> Path:
        return Path(self.prefix + suffix)

    def run(self, **changes: object) -> Run:
        settings = {"data_path": [self.prefix], "split": "100,0,0", "seq_length": 16, "eval_iters": 0, **changes}
        return build({"data_cache_path": str(self.folder / "cache"), **settings})

    def argv(self) -> list[str]:
        flags = f"--preset tiny --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --split 100,0,0 --eval-iters 0"
        return [*flags.split(), *f"--train-iters 9 --seq-length 16 --data-path {self.prefix}".split()]

    def verdict(self, *flags: str) -> str | None:
        """The error of `pretrain_moe.py --dry-run`, one line with exit status 2; None where there is none."""
        err = StringIO()
        with redirect_stdout(StringIO()), redirect_stderr(err):
            status = pretrain_moe.main([*self.argv(), "--dry-run", *flags])
        if status == 0:
            return None
        line = err.getvalue().strip().split("error: ", 1)[1]
        assert status == 2 and "\n" not in line and "Traceback" not in err.getvalue()
        return line

    def samples(self, **changes: object) -> list[list[int]]:
        """The S + 1 ids of the first 30 samples, one epoch and a bit, as the engine's dataset gives them."""
        train, _, _ = build_datasets(self.run(**changes), NullTokenizer(VOCABULARY), 30, 0, 0)
        rows = [train[i] for i in range(30)]  # type: ignore[index]
        return [[*row["tokens"].tolist(), int(row["labels"][-1])] for row in rows]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_damaged_or_swapped_file_ends_a_run_at_its_start(scene, suffix):
    good = scene.path(suffix).read_bytes()
    flipped = good[:60] + bytes([good[60] ^ 1]) + good[61:]
    other = Path(scene.other + suffix).read_bytes()
    for content in (flipped, good[:-3], good + b"xy", b"", *([other] if other != good else [])):
        scene.path(suffix).write_bytes(content)
        assert scene.prefix in str(scene.verdict()), content
    if suffix != ".json":
        scene.path(suffix).unlink()
        assert f"data file {scene.path(suffix)} does not exist" in str(scene.verdict())


PACKED = {"packing": "greedy", "reset_attention_mask": True}


@pytest.mark.parametrize(("position", "flags"), [(7, {}), (205, {}), (215, PACKED), (219, PACKED)])
def test_an_id_beyond_the_vocabulary_is_found_at_the_start_or_in_its_batch(scene, position, flags):
    """By the hash or by the scan; in a file too large for either, in the batch that holds it."""
    with open(scene.path(".bin"), "r+b") as file:
        file.seek(2 * position)
        file.write(struct.pack("<H", 5000))
    assert scene.verdict("--data-verify-gb", "0") is None, "the hash is not read beyond the limit"
    run = scene.run(data_verify_gb=0.0, vocab_size=VOCABULARY, **flags, seq_length=18 if flags else 16)
    batches = batch_iterators(build_datasets(run, NullTokenizer(VOCABULARY), 24, 0, 0)[0], run)[0]
    with pytest.raises(ValueError) as caught:
        for _ in range(24):
            next(batches)
    assert f"{scene.prefix}.bin: SHA-256" in str(scene.verdict())
    scene.path(".json").unlink()
    place = f"byte offset {2 * position} (document {position // 10}, token {position % 10})"
    for told in (str(caught.value), str(scene.verdict())):
        assert all(words in told for words in ("token id 5000 ", f"{scene.prefix}.bin", place))


@pytest.mark.parametrize("limit", [4.0, 0.0])
@pytest.mark.parametrize("bare", [False, True])
def test_a_file_that_is_replaced_between_save_and_resume_is_named(scene, limit, bare):
    """A file within the limit that holds what it held, copied again, is welcome."""
    run = scene.run(data_verify_gb=limit)
    accepting = scene.run(data_verify_gb=limit, accept_changed_data=True, load="somewhere")
    one_token = [*DOCUMENTS[:7], [*DOCUMENTS[7][:3], 950, *DOCUMENTS[7][4:]], *DOCUMENTS[8:]]
    for content in (DOCUMENTS, OTHERS, DOCUMENTS[:25], one_token):
        scene.restore()
        if bare:
            scene.path(".json").unlink()
        saved = data_fingerprint(run)
        ids(scene.folder, "data", content, VOCABULARY)
        os.utime(scene.path(".bin"), ns=(0, 12345))
        if bare:
            scene.path(".json").unlink()
        assert f"{scene.prefix}.bin" in str(changed_since(saved))
        now = data_fingerprint(run)
        if content is DOCUMENTS and limit > 0:
            assert require_same_samples(run, now, flatten(run), saved, "STEP") == []
            continue
        with pytest.raises(ConfigError, match="is not the file that STEP was trained on") as caught:
            require_same_samples(run, now, flatten(run), saved, "STEP")
        assert str(caught.value).startswith(scene.prefix)
        assert "WARNING" in require_same_samples(accepting, now, flatten(accepting), saved, "STEP")[0]


@pytest.mark.parametrize("kind", ["damaged", "other order", "list cut", "list gone", "listed code"])
def test_index_caches_that_are_damaged_or_of_other_data_are_built_again(scene, kind, monkeypatch):
    monkeypatch.setattr(datasets, "_SAMPLES_OF_A_SMALL_EPOCH", 0)
    bare = kind == "damaged"
    if bare:
        scene.path(".json").unlink()
    good, sentinel = scene.samples(), scene.folder / "unpickled"
    files = sorted((scene.folder / "cache").rglob("*.npy"))
    assert len(files) == 6  # of two epochs
    for path in files:
        content = path.read_bytes()
        damages = [content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]]
        if bare:
            damages += [content[:-1], content[:20], b"", f"cos\nmkdir\n(S'{sentinel}'\ntR.".encode()]
        for damaged in damages:
            path.write_bytes(damaged)
            if kind == "other order":
                path.write_bytes(content)
                numpy.save(path, numpy.load(path)[::-1])
            listing = path.parent / "verified.json"
            if kind == "listed code":
                path.write_bytes(f"cos\nmkdir\n(S'{sentinel}'\ntR.".encode())
                listed = {**json.loads(listing.read_text()), path.name: sha256(path.read_bytes()).hexdigest()}
                listing.write_text(json.dumps(listed))
            if kind == "list gone":
                listing.unlink()
            elif kind == "list cut":
                listing.write_text(listing.read_text()[:40])
            assert scene.samples() == good and path.read_bytes() == content
    assert not sentinel.exists()  # which the last of the damages makes, where it is unpickled
    # other data under the same path, of the same size and time
    times = {suffix: os.stat(scene.path(suffix)) for suffix in (".bin", ".idx")}
    ids(scene.folder, "data", [[7] * n for n in [5] * 20 + [15] * 20], VOCABULARY)
    for suffix, about in times.items():
        os.utime(scene.path(suffix), ns=(about.st_atime_ns, about.st_mtime_ns))
    if bare:
        scene.path(".json").unlink()
    samples = scene.samples()
    assert {token for row in samples for token in row} == {7}
    shutil.rmtree(scene.folder / "cache")
    assert samples == scene.samples()


def test_a_resume_on_a_replaced_file_exits_with_status_2(scene):
    root = scene.folder / "checkpoints"
    root.mkdir()
    resume = ["--load", str(root), "--save", str(root)]
    state = {"iteration": 5, "has_optimizer": True, "data": data_fingerprint(scene.run())}
    step = write_step(root, 5, config=flatten(cli.parse([*scene.argv(), *resume])), state=state)
    assert scene.verdict(*resume) is None
    ids(scene.folder, "data", OTHERS, VOCABULARY)
    told = str(scene.verdict(*resume))
    assert told.startswith(f"{scene.prefix}.bin is not the file that {step} was trained on: SHA-256")
    assert "--accept-changed-data" in told
    assert scene.verdict(*resume, "--accept-changed-data") is None
    assert "--load" in str(scene.verdict("--accept-changed-data"))


def test_a_file_that_is_replaced_or_disappears_during_the_run_stops_it_before_it_saves(scene):
    trainer = SimpleNamespace(data=data_fingerprint(scene.run()), rank_facts=SimpleNamespace(rank=0))
    require_unchanged_data(trainer.data)
    ids(scene.folder, "data", OTHERS, VOCABULARY)
    with pytest.raises(ConfigError, match=f"{scene.prefix}.bin was written to after the run began.*none is saved"):
        require_unchanged_data(trainer.data)
    os.unlink(f"{scene.prefix}.bin")
    assert changed_since(trainer.data) == f"{scene.prefix}.bin: No such file or directory"


def test_other_prefixes_are_no_replaced_files(scene):
    now, saved = data_fingerprint(scene.run()), data_fingerprint(scene.run(data_path=[scene.other]))
    assert require_same_samples(scene.run(), now, flatten(scene.run()), saved, "STEP") == []
    assert data_fingerprint(build({"mock_data": True})) == {}
