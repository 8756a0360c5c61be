"""--timing-log-level tells where a step's time goes, on every layout, and costs nothing when it is off."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import build

FLAGS = {
    **PRESETS["tiny"],
    "mock_data": True,
    "tokenizer_type": "ByteTokenizer",
    "train_iters": 4,
    "eval_interval": 1,
    "eval_iters": 1,
    "log_interval": 2,
}
PARTS = ("forward-backward", "all-grads-sync", "optimizer")
PASSES = ("forward-compute", "backward-compute")


def printed(flags: dict[str, Any]) -> str:
    """What rank 0 of a whole run prints."""
    from megatron_moe.training.run import pretrain

    with contextlib.redirect_stdout(io.StringIO()) as out:
        pretrain(build({**FLAGS, **flags}))
    return out.getvalue()


@pytest.mark.parametrize("layout", [{}, {"pipeline_model_parallel_size": 2}], ids=["DP2", "PP2"])
def test_each_level_tells_its_parts(gloo: Any, layout: dict[str, Any]) -> None:
    for level, told, untold in ((0, (), PARTS + PASSES), (1, PARTS, PASSES), (2, PARTS + PASSES, ())):
        text = gloo.run(2, printed, flags={**layout, "timing_log_level": level})[0]
        assert all(text.count(name) == 2 for name in told), text
        assert not any(name in text for name in untold), text
