"""--timing-log-level tells where a step's time goes, on every layout, and costs nothing when it is off."""

import contextlib
import io
from typing import Any

import pytest

from tests.helpers.stepped_trainer import PP2
from tests.helpers.trained_steps import SMALL, trained

PARTS = ("forward-backward", "all-grads-sync", "optimizer")
PASSES = ("forward-compute", "backward-compute")


def printed(flags: dict[str, Any]) -> str:
    """What rank 0 of a whole run prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trained({**SMALL, "train_iters": 4, "eval_interval": 1, "eval_iters": 1, "log_interval": 2, **flags})
    return out.getvalue()


@pytest.mark.parametrize(
    ("level", "layout", "told", "untold"),
    [(0, {}, (), PARTS + PASSES), (1, {}, PARTS, PASSES), (2, PP2, PARTS + PASSES, ())],
    ids=["0", "1", "2, PP2"],
)
def test_each_level_tells_its_parts(gloo: Any, level: int, layout: dict[str, Any], told: Any, untold: Any) -> None:
    text = gloo.run(2, printed, flags={**layout, "timing_log_level": level})[0]
    assert all(text.count(name) == 2 for name in told), text
    assert not any(name in text for name in untold), text
