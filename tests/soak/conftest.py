"""Long runs: `make soak`. What they count is printed and kept as JSON lines under runs/soak/.

pytest does not descend into this folder by itself; the same functions run with small numbers in the test suite.

    make soak                                            every file, with the numbers of docs/internals/reliability.md
    make soak ARGS="tests/soak/test_kills.py --soak-scale 0.05"
"""

import json
import math
import platform
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import pytest

from tests.helpers.launchers import Forked
from tests.helpers.ranks import ROOT, RankParent

FOLDER = ROOT / "runs" / "soak"
Scaled, Figure = Callable[..., int], Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-scale",
        type=float,
        default=1.0,
        help="multiplies every number of trials; 1.0 is what docs/internals/reliability.md reports",
    )


@pytest.fixture(scope="module")
def forked(rank_parent: RankParent) -> Forked:
    return Forked(rank_parent)


@pytest.fixture
def scaled(request: pytest.FixtureRequest) -> Scaled:
    """`scaled(trials, at_least=1)`: a number of trials times `--soak-scale`, rounded up."""
    scale = request.config.getoption("--soak-scale")

    def number(trials: int, at_least: int = 1) -> int:
        return max(at_least, math.ceil(trials * scale))

    return number


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Iterator[Figure]:
    """`figure(name, trials=..., failures=..., **more)`: print a result at once and append it to runs/soak/.

    Call it before asserting that there were no failures, so that what failed is kept too. With no failure in n trials
    the rate of failures is below 3/n (95 %), which is added as `bound`.
    """
    capture = request.config.pluginmanager.getplugin("capturemanager")
    path = FOLDER / f"{datetime.now(timezone.utc):%Y-%m-%d}.jsonl"

    def keep(name: str, *, trials: int, failures: int, **more: Any) -> None:
        result: dict[str, Any] = {"trials": trials, "failures": failures, **more}
        if failures == 0 and trials > 0:
            result["bound"] = 3 / trials
        about = {
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "test": request.node.nodeid,
            "scale": request.config.getoption("--soak-scale"),
            "python": platform.python_version(),
            "torch": version("torch"),
            "engine": version("megatron-core"),
        }
        FOLDER.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"figure": name, **result, **about}) + "\n")
        with capture.global_and_fixture_disabled():
            shown = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in result.items()}
            print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)

    yield keep
