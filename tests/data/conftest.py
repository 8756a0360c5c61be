"""What the data tests share: small indexed datasets, written by the project's own preprocessing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_moe.config.schema import build
from megatron_moe.parallel import groups
from megatron_moe_tools.prepare import preprocess
from megatron_moe_tools.prepare.inputs import plan_shards
from tests.data.prepared import ids


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """The groups of one process, for all tests of a module."""
    groups.initialize(build({}))
    yield
    groups.destroy()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """`write_jsonl(texts, name)`: a .jsonl file of {"text": ...}; returns its path."""

    def write(texts: list[str], name: str = "input.jsonl") -> str:
        path = tmp_path / name
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        path.write_text("".join(lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def shards_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """`shards_of(number)`: from now on a worker reads so many bytes at a time."""
    return lambda size: monkeypatch.setattr(preprocess, "plan_shards", lambda files: plan_shards(files, size))


@pytest.fixture
def write_ids(tmp_path: Path) -> Callable[..., str]:
    """`write_ids(documents, name, vocab_size)`: a dataset of these ids, no end-of-document ids; returns its prefix."""
    return lambda documents, name="data", vocab_size=1000: ids(tmp_path, name, documents, vocab_size)
