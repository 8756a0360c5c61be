"""A resume that would read another order of samples is refused with every setting that differs."""

import pytest

from megatron_moe.config.errors import ConfigError
from megatron_moe.config.schema import Run, flatten, replace
from megatron_moe.data.checks import require_same_samples

RUN = replace(Run(), data_path=("0.3", "a", "0.7", "b"), seed=1, seq_length=64, train_iters=10)


def files(**digests: str | None) -> dict:
    def entry(digest: str | None, suffix: str) -> dict:
        return {"bytes": 10, "mtime_ns": 1, "sha256": digest and digest + suffix, "verified": True}

    return {
        prefix: {suffix: entry(digest, suffix) for suffix in (".bin", ".idx")} for prefix, digest in digests.items()
    }


SAVED = files(a="aa", b="bb")


def order(changes: dict, now: dict | None = None) -> list[str]:
    return require_same_samples(replace(RUN, **changes), SAVED if now is None else now, flatten(RUN), SAVED, "STEP")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 2}, "--seed: checkpoint 1, this run 2"),
        ({"seq_length": 128}, "--seq-length: checkpoint 64, this run 128"),
        ({"packing": "greedy"}, "--packing: checkpoint none, this run greedy"),
        ({"split": "90,10,0"}, "--split: checkpoint 969,30,1, this run 90,10,0"),
        ({"data_path": ("0.4", "a", "0.6", "b")}, "weights of the training data: checkpoint (0.3, 0.7)"),
        ({"data_path": ("0.3", "b", "0.7", "a")}, "training data: checkpoint a, this run b"),
        ({"data_path": ("a",)}, "weights of the training data"),
        ({"data_path": None, "mock_data": True}, "--mock-data: checkpoint False, this run True"),
    ],
)
def test_what_decides_the_order_of_samples_does_not_change_unseen(changes, told):
    with pytest.raises(ConfigError) as error:
        order(changes)
    assert told in str(error.value) and "--accept-changed-data" in str(error.value)
    (warning,) = order({**changes, "accept_changed_data": True})
    assert warning.startswith("WARNING") and told in warning


def test_what_decides_nothing_may_change():
    free = {"train_iters": 99, "micro_batch_size": 4, "global_batch_size": 64, "eval_iters": 3, "num_workers": 2}
    free |= {"data_path": ("30", "a", "70", "b"), "split": "1938,60,2"}  # the same shares
    assert order({**free, "tensor_model_parallel_size": 2, "no_mmap_bin_files": True, "data_cache_path": "c"}) == []


def test_data_that_moved_is_the_same_data_where_its_content_is_known():
    moved = {"data_path": ("0.3", "new/a", "0.7", "b")}
    assert order(moved, {**SAVED, **files(**{"new/a": "aa"})}) == []
    for other in ("xx", None):
        with pytest.raises(ConfigError, match="checkpoint a, this run new/a"):
            order(moved, {**SAVED, **files(**{"new/a": other})})
