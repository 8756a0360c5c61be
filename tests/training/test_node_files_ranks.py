"""Two nodes that open the same relative paths, each in a working directory of its own: other files, other folders."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import build
from megatron_moe.parallel import groups
from megatron_moe.training import node_files
from megatron_moe.training.plan import plan_run
from tests.data.prepared import ids

DATA, JSON = "data_text_document", "data_text_document.json"


def compared(root: str, cache: str, verified_gb: float, own_tokenizer: bool) -> str:
    """What a rank that is a node of its own says: the notes, or the error."""
    rank = torch.distributed.get_rank()
    flags = {"data_path": [DATA], "split": "1,0,0", "seq_length": 8, "eval_iters": 0, "vocab_size": 100}
    flags |= {"tokenizer_type": "NullTokenizer", "data_cache_path": cache, "data_verify_gb": verified_gb}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(root) / str(rank))
        for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(node_files, "_SECONDS_TO_APPEAR", 0.0)
        run = build({**flags, "train_iters": 1})
        groups.initialize(run)
        planned = plan_run(run, 2, deep=False)
        if own_tokenizer:
            patch.setattr(planned.tokenizer, "sha256", str(rank), raising=False)
        try:
            return "\n".join(node_files.require_one_view(planned, groups.rank_facts()))
        except ConfigError as error:
            return str(error)


def flipped(node: Path) -> None:
    content = bytearray((node / f"{DATA}.bin").read_bytes())
    content[-3] ^= 1
    (node / f"{DATA}.bin").write_bytes(content)


CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "copies": (lambda node: None, {}, "3 files"),
    "another bit": (flipped, {}, f"{DATA}.bin: has other content"),
    "another bit, parts read": (flipped, {"verified_gb": 0.0}, f"{DATA}.bin: has other content"),
    "another size": (lambda node: (node / JSON).write_text((node / JSON).read_text() + "\n"), {}, "bytes for rank 1"),
    "no sidecar": (lambda node: (node / JSON).unlink(), {}, f"{JSON}: is not there for rank 1"),
    "a tokenizer": (lambda node: None, {"own_tokenizer": True}, "tokenizer of rank 1"),
    "a cache of its own": (lambda node: None, {"cache": "cache"}, "--data-cache-path cache: rank 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_nodes_read_and_share_is_compared(gloo: Any, tmp_path: Path, case: str) -> None:
    change, how, said = CASES[case]
    (tmp_path / "0").mkdir()
    ids(tmp_path / "0", "data", [[n % 90 for n in range(40)]] * 30, 100)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    change(tmp_path / "1")
    given = {"cache": str(tmp_path / "shared"), "verified_gb": 1.0, "own_tokenizer": False, **how}
    first, second = gloo.run(2, compared, root=str(tmp_path), **given)
    assert first == second and said in first, first
    assert not list((tmp_path / "shared").glob(".*"))
