"""A pytest plugin for runs on a planted copy: which package was tested, and with what each test failed, as JSON.

`PLANTED_REPORT` names the file. Loaded by `-p tests.soak.failure_report`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_failures: list[dict[str, Any]] = []


def pytest_exception_interact(node: Any, call: Any, report: Any) -> None:
    """Called for whatever is raised: while a test is found, set up, run or cleared away."""
    kinds = [kind.__name__ for kind in type(call.excinfo.value).__mro__]
    when = getattr(report, "when", "collect")
    text = str(call.excinfo.value)
    _failures.append({"test": node.nodeid, "when": when, "kinds": kinds, "text": text[-4000:]})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report."""
    import megatron_moe

    told = {"package": megatron_moe.__file__, "ran": session.testscollected, "failures": _failures}
    Path(os.environ["PLANTED_REPORT"]).write_text(json.dumps(told))
