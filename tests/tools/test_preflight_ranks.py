"""megatron-moe preflight on two ranks: they are compared, and the table and the JSON say who differs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_moe_tools.preflight import checks, cli
from tests.helpers.launchers import Forked
from tests.helpers.ranks import ROOT, RankParent

KEYS = {"schema", "status", "world_size", "hosts", "versions", "seconds", "findings"}
FINDING_KEYS = {"check": str, "status": str, "found": str, "advice": str, "figures": dict, "ranks": list, "hosts": list}


def preflight(argv: list[str]) -> int:
    """What a rank runs: the tool, whose bandwidths are measured once."""
    checks._MEASURED_SECONDS = 0.0
    return cli.main(argv)


def preflight_with_other_sources(argv: list[str]) -> int:
    """What a rank runs, where rank 1 has another copy of the package."""
    if os.environ["RANK"] == "1":
        code_hash = checks.code_hash
        checks.code_hash = lambda module: "0123" if module == "megatron_moe" else code_hash(module)
    return preflight(argv)


def launched(parent: RankParent, folder: Path, program: str, *flags: str) -> tuple[int | None, str, dict[str, Any]]:
    """Run a function of this file on two ranks; return the status, what they printed and their JSON."""
    log = folder.with_suffix(".log")
    ranks = Forked(parent, target=f"tests.tools.test_preflight_ranks:{program}")
    ranks.start(["--json", "report.json", *flags], 2, folder, log)
    return ranks.wait(600), log.read_text(), json.loads((folder / "report.json").read_text())


def of_check(report: dict[str, Any], name: str) -> dict[str, Any]:
    (finding,) = [finding for finding in report["findings"] if finding["check"] == name]
    return finding


def test_two_ranks_that_are_alike_pass_and_the_json_is_as_documented(rank_parent, tmp_path):
    names = "driver cpu_cores disk_space same_software clock_skew bandwidth_inside bandwidth_across".split()
    flags = ["--preset", "tiny", "--save", str(tmp_path / "checkpoints"), "--inside", "1e-6"]
    status, printed, report = launched(rank_parent, tmp_path, "preflight", *flags, "--only", *names)
    assert status == 0, printed
    assert set(report) == KEYS and report["schema"] == 1
    assert report["status"] in ("pass", "warn") and report["world_size"] == 2 and len(report["hosts"]) == 1
    assert [finding["check"] for finding in report["findings"]] == names
    for finding in report["findings"]:
        assert {name: type(value) for name, value in finding.items()} == FINDING_KEYS
        assert finding["status"] in ("pass", "warn", "not possible here")
        assert finding["ranks"] == ([0] if finding["check"] == "disk_space" else [0, 1])
    figures = of_check(report, "bandwidth_inside")["figures"]
    assert set(figures) == {"all_reduce_gb_per_s", "all_to_all_gb_per_s"} and min(figures.values()) > 0
    assert of_check(report, "bandwidth_across")["status"] == "not possible here"
    assert sum(line.startswith("pass ") for line in printed.splitlines()) >= 4
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


def test_a_rank_with_other_sources_and_a_link_that_is_slow_fail(rank_parent, tmp_path):
    flags = ["--inside", "1e6", "--only", "same_software", "bandwidth_inside"]
    status, printed, report = launched(rank_parent, tmp_path, "preflight_with_other_sources", *flags)
    assert status == 1 and report["status"] == "fail", printed
    software, bandwidth = of_check(report, "same_software"), of_check(report, "bandwidth_inside")
    assert software["status"] == bandwidth["status"] == "fail"
    assert "code of megatron_moe is 0123" in software["found"] and "(rank 1)" in software["found"]
    assert "megatron.core" not in software["found"]
    assert "ranks 0, 1" in bandwidth["found"] and bandwidth["advice"]


EACH_PRESET = """
import sys
from megatron_moe_tools.preflight.cli import main

folder, *checks = sys.argv[1:]
for preset in ("tiny", "tiny-gqa"):
    main(["--preset", preset, "--bf16", "--json", f"{folder}/{preset}.json", "--only", *checks])
"""


def test_the_checks_of_kernels_run_on_the_pretended_cuda_machine(tmp_path):
    (tmp_path / "program.py").write_text(EACH_PRESET)
    checks = "driver torch attention grouped_product reductions cpu_cores memlock".split()
    command = [sys.executable, "-m", "tests.helpers.cuda_on_cpu", tmp_path / "program.py", tmp_path, *checks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for preset in ("tiny", "tiny-gqa"):
        report = json.loads((tmp_path / f"{preset}.json").read_text())
        found = {name: of_check(report, name) for name in checks}
        assert found["driver"]["status"] == "pass" and "pretended" in found["driver"]["found"]
        assert found["grouped_product"]["status"] == "pass" and "one kernel" in found["grouped_product"]["found"]
        # The kernels are a CPU's: which one is chosen says nothing, but that it is asked as the model asks it.
        assert "kernel for bfloat16" in found["attention"]["found"], found["attention"]
