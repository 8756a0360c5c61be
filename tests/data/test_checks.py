"""Bad data is refused before a run, in one message; nothing on disk changes; no torch is needed."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_moe.config.schema import Run, build
from megatron_moe.data.checks import check_data
from megatron_moe.data.index_file import read_sidecar
from megatron_moe.data.tokenizers import ByteTokenizer, NullTokenizer, Tokenizer
from tests.config.refused import refused

VOCABULARY = 1000
DOCUMENTS = [[i % 900, 3, 7, 8, (7 * i) % 900] for i in range(100)]


@pytest.fixture
def prefix(write_ids: Callable[..., str]) -> str:
    return write_ids(DOCUMENTS, vocab_size=VOCABULARY)


def make_run(prefix: str, **changes: object) -> Run:
    return build({"data_path": [prefix], "split": "80,20,0", "seq_length": 16, "eval_iters": 1, **changes})


def check(run: Run, tokenizer: Tokenizer | None = None, deep: bool | None = True) -> list[str]:
    return check_data(run, tokenizer or NullTokenizer(VOCABULARY), deep=deep)


def refuse(run: Run, words: str, tokenizer: Tokenizer | None = None, deep: bool = True) -> None:
    refused(lambda: check(run, tokenizer, deep), words)


def test_the_log_says_what_was_verified_and_nothing_changes_on_the_disk(prefix, tmp_path):
    def state() -> dict[str, tuple[int, int]]:
        return {p.name: (p.stat().st_size, p.stat().st_mtime_ns) for p in tmp_path.iterdir()}

    before = state()
    (line,) = check(make_run(prefix))
    assert "500 tokens" in line and "SHA-256 of .bin and .idx verified" in line
    (line,) = check(make_run(prefix, data_verify_gb=0.0))
    assert "SHA-256 of .idx" in line and "--data-verify-gb" in line
    refuse(make_run(prefix), "tokenizer", ByteTokenizer())
    assert state() == before


@pytest.mark.parametrize("deep", [True, False])
def test_data_of_another_tokenizer_is_refused(prefix, deep):
    refuse(make_run(prefix), "--tokenizer-type ByteTokenizer", ByteTokenizer(), deep=deep)
    refuse(make_run(prefix), "(1001 ids)", NullTokenizer(VOCABULARY + 1), deep=deep)


def test_the_index_is_hashed_even_where_the_bin_is_too_large(prefix):
    """A swap of two lengths that keeps every sum but one pointer in order is not possible; document marks are."""
    path = Path(prefix + ".idx")
    damaged = bytearray(path.read_bytes())
    damaged[-16] ^= 1  # the mark before the last: still in order
    path.write_bytes(damaged)
    check(make_run(prefix, data_verify_gb=0.0), deep=False)
    refuse(make_run(prefix, data_verify_gb=0.0), "SHA-256")


@pytest.mark.parametrize("deep", [True, False])
def test_a_sidecar_with_an_id_at_the_vocabulary_is_refused(prefix, deep):
    facts = read_sidecar(prefix)
    for changes, word in (({"max_id": VOCABULARY}, "1000"), ({"min_id": -1}, "-1")):
        Path(prefix + ".json").write_text(dataclasses.replace(facts, **changes).to_json())
        refuse(make_run(prefix), f"token id {word}, outside the vocabulary of 1000 ids", deep=deep)


def test_without_a_sidecar_every_id_is_read_and_the_first_bad_one_is_located(write_ids):
    documents = [list(document) for document in DOCUMENTS]
    documents[31][2] = 950
    prefix = write_ids(documents, vocab_size=VOCABULARY)
    os.unlink(prefix + ".json")
    run = make_run(prefix)
    (line,) = check(run, NullTokenizer(951))
    assert "no sidecar" in line and "ids 0 to 950" in line
    place = "token id 950 at byte offset 314 (document 31, token 2)"
    refuse(run, f"{place} is outside the vocabulary of 950", NullTokenizer(950))
    check(run, NullTokenizer(940), deep=False)  # the other ranks leave the reading to rank 0


def test_only_rank_0_reads_everything(prefix, monkeypatch):
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        assert ("SHA-256" in check(make_run(prefix), deep=None)[0]) == (rank == 0)


def test_settings_that_the_data_do_not_fit_are_refused(prefix):
    refuse(make_run(prefix, vocab_size=999), "--vocab-size 999")
    refuse(make_run(prefix, vocab_size=999, load_hf="a/model"), "the vocabulary of a/model, 999,")
    check(make_run(prefix, vocab_size=2000))  # the model may have more ids than the tokenizer
    check(make_run(prefix, seq_length=99))  # 20 documents of 5: exactly 99 + 1
    refuse(make_run(prefix, seq_length=100), "the valid split has 100 tokens in 20 documents under --split 80,20,0")
    refuse(make_run(prefix, split="0,100,0"), "the train split has 0 tokens")
    check(make_run(prefix, seq_length=100, eval_iters=0))
    refuse(make_run(prefix, seq_length=400, eval_iters=0), "one sequence needs 401 (--seq-length 400")
    alone = {"data_path": None, "split": None, "train_data_path": [prefix]}
    refuse(make_run(prefix, **alone), "--eval-iters 1 needs --valid-data-path")
    check(make_run(prefix, **alone, eval_iters=0))
    refuse(make_run(prefix, data_cache_path=prefix + ".json"), "--data-cache-path")
    assert check(build({"mock_data": True})) == ["data: made up (--mock-data)"]


def test_every_part_of_a_blend_is_checked(prefix, write_ids):
    small = write_ids([[1, 2, 3]], name="small", vocab_size=VOCABULARY)
    refuse(make_run(prefix, data_path=["1", prefix, "1", small], eval_iters=0), f"{small}.bin: the train split")
    refuse(make_run(prefix, data_path=["1", prefix, "1", "/nowhere/x"]), "/nowhere/x.idx")


def test_checking_and_the_tools_load_no_torch(prefix, tmp_path):
    code = f"""
import contextlib, sys
from megatron_moe_tools.prepare import merge, preprocess
from megatron_moe.config.schema import build
from megatron_moe_tools.prepare import output  # which a worker imports
from megatron_moe.data.checks import check_data
from megatron_moe.data.tokenizers import NullTokenizer
check_data(build({{"data_path": [{prefix!r}], "split": "80,20,0", "seq_length": 16}}), NullTokenizer({VOCABULARY}))
for main in (preprocess.main, merge.main):
    assert main(["--input", "nowhere", "--output-prefix", "out"]) == 2
    with contextlib.suppress(SystemExit):
        main(["--help"])
print([name for name in ("torch", "megatron.core", "pyarrow", "transformers") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
