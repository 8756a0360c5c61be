"""tools/preflight.py under torchrun: ranks are compared, and the table and the JSON say who differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import rank_environment
from tests.helpers.sources import PACKAGE, ROOT

KEYS = {"schema", "status", "world_size", "hosts", "versions", "seconds", "findings"}
FINDING_KEYS = {"check": str, "status": str, "found": str, "advice": str, "figures": dict, "ranks": list, "hosts": list}


def launched(folder: Path, program: list[str], *flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a program on two ranks under torchrun; return what it printed and its JSON."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *program]
    done = subprocess.run(
        [*command, "--json", "report.json", *flags],
        cwd=folder,
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done, json.loads((folder / "report.json").read_text())


def of_check(report: dict[str, Any], name: str) -> dict[str, Any]:
    (finding,) = [finding for finding in report["findings"] if finding["check"] == name]
    return finding


def test_two_ranks_that_are_alike_pass_and_the_json_is_as_documented(tmp_path: Path) -> None:
    checks = "driver cpu_cores disk_space same_software clock_skew bandwidth_inside bandwidth_across".split()
    program = [str(ROOT / "tools" / "preflight.py")]
    flags = ["--preset", "tiny", "--save", str(tmp_path / "checkpoints"), "--inside", "0.001"]
    done, report = launched(tmp_path, program, *flags, "--only", *checks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(report) == KEYS and report["schema"] == 1
    assert report["status"] in ("pass", "warn") and report["world_size"] == 2 and len(report["hosts"]) == 1
    assert [finding["check"] for finding in report["findings"]] == checks
    for finding in report["findings"]:
        assert {name: type(value) for name, value in finding.items()} == FINDING_KEYS
        assert finding["status"] in ("pass", "warn", "fail", "not possible here")
        assert finding["ranks"] == ([0] if finding["check"] == "disk_space" else [0, 1])
    figures = of_check(report, "bandwidth_inside")["figures"]
    assert set(figures) == {"all_reduce_gb_per_s", "all_to_all_gb_per_s"} and min(figures.values()) > 0
    assert of_check(report, "bandwidth_across")["status"] == "not possible here"
    assert sum(line.startswith("pass ") for line in done.stdout.splitlines()) >= 4
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1 + int(os.environ["RANK"])])
from megatron_moe.apps.preflight.cli import main
sys.exit(main(sys.argv[3:]))
"""


def test_a_rank_with_other_sources_and_a_link_that_is_slow_fail(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(PACKAGE, other / "megatron_moe", ignore=shutil.ignore_patterns("__pycache__"))
    with open(other / "megatron_moe" / "moe" / "router.py", "a") as file:
        file.write("\n# another line\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    program = [str(tmp_path / "program.py"), str(ROOT), str(other)]
    flags = ["--inside", "1e6", "--only", "same_software", "bandwidth_inside"]
    done, report = launched(tmp_path, program, *flags)
    assert done.returncode == 1 and report["status"] == "fail", done.stdout + done.stderr
    software, bandwidth = of_check(report, "same_software"), of_check(report, "bandwidth_inside")
    assert software["status"] == bandwidth["status"] == "fail"
    assert "code of megatron_moe" in software["found"] and "(rank 1)" in software["found"]
    assert "megatron.core" not in software["found"]
    assert "ranks 0, 1" in bandwidth["found"] and bandwidth["advice"]


@pytest.mark.parametrize("preset", ["tiny", "tiny-gqa"])
def test_the_checks_of_kernels_run_on_the_pretended_cuda_machine(preset: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--preset", preset, "--bf16", "--json", str(report)]
    only = ["--only", "driver", "torch", "attention", "grouped_product", "reductions", "cpu_cores", "memlock"]
    command = [sys.executable, "-m", "tests.helpers.cuda_on_cpu", str(ROOT / "tools" / "preflight.py")]
    done = subprocess.run(
        [*command, *words, *only], cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=600
    )
    found = {finding["check"]: finding for finding in json.loads(report.read_text())["findings"]}
    assert done.returncode in (0, 1), done.stderr
    assert found["driver"]["status"] == "pass" and "pretended" in found["driver"]["found"]
    assert found["grouped_product"]["status"] == "pass" and "one kernel" in found["grouped_product"]["found"]
    # The kernels are a CPU's: which one is chosen says nothing, but that it is asked as the model asks it.
    assert "kernel for bfloat16" in found["attention"]["found"], found["attention"]
