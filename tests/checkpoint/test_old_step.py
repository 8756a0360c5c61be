"""A step that an earlier version wrote is continued as that version did."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.config.schema import build
from tests.helpers.rows import rows
from tests.helpers.stepped_trainer import DISTRIBUTED, EP2, PP2, ZERO_3

STEP = Path(__file__).with_name("old_step.tar.xz")
"""Step 2 of a run on four ranks, EP 2, with the distributed optimizer in fp32, written by commit b0b24ac8."""
NEXT = {
    3: (3.3338576555252075, 0.7847775737),
    4: (3.2257606983184814, 1.0029295686),
    5: (3.1231070160865784, 0.7589594234),
}
"""What that run went on with: iteration -> loss and norm of the gradients."""
LAYOUTS: list[tuple[int, dict[str, Any]]] = [(4, {**EP2, **DISTRIBUTED}), (1, {}), (2, {**EP2, **ZERO_3}), (2, PP2)]


def continued(flags: dict[str, Any]) -> None:
    from megatron_moe.training.run import pretrain

    pretrain(build(flags))


@pytest.mark.parametrize(("ranks", "layout"), rows(LAYOUTS, test=LAYOUTS[:2]))
def test_a_step_of_an_earlier_version_goes_on_as_it_did(gloo, ranks, layout, tmp_path):
    with tarfile.open(STEP) as archive:
        archive.extractall(tmp_path / "steps", filter="data")
    saved = json.loads((tmp_path / "steps" / "iter_0000002" / "config.json").read_text())
    here = {"expert_model_parallel_size": 1, "use_distributed_optimizer": False, "train_iters": 5, **layout}
    here |= {
        "load": str(tmp_path / "steps"),
        "save": str(tmp_path / "new"),
        "metrics_file": str(tmp_path / "metrics.jsonl"),
    }
    gloo.run(ranks, continued, flags={**saved, **here})
    found = {step["iteration"]: step for step in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())}
    assert found.keys() == NEXT.keys()
    for iteration, numbers in NEXT.items():
        assert (found[iteration]["loss"], found[iteration]["grad_norm"]) == pytest.approx(numbers, rel=1e-5)
