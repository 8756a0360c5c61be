"""Each check of the preflight fails where it should: with a faked machine, faked versions, faked measurements."""

import dataclasses
import os
import resource
import socket
import stat
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megatron_moe.config.errors import ConfigError, MachineError
from megatron_moe.config.presets import PRESETS
from megatron_moe.config.schema import Run, build
from megatron_moe.engine import defects
from megatron_moe.platform import hardware
from megatron_moe.platform.hardware import fake_device
from megatron_moe_tools.preflight import checks, cli, node
from megatron_moe_tools.preflight.cli import DEFAULTS, FAIL, IMPOSSIBLE, PASS, WARN, Finding, Place, merged, table


def place(**changes: object) -> Place:
    here = Place(Run(), False, DEFAULTS, 0, 1, 0, 1, "node1", connected=False)
    return dataclasses.replace(here, **changes)  # type: ignore[arg-type]


def run_of(**settings: object) -> Run:
    return build({**PRESETS["deepseek-v3"], "vocab_size": 129280, **settings})


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Return a folder that is first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def says(finding: Finding, status: str, *words: str) -> bool:
    """Whether a finding has that status and all those words."""
    return finding.status == status and all(word in f"{finding.found} {finding.advice}" for word in words)


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def smi(folder: Path, *rows: str, status: int = 0) -> None:
    """Put an nvidia-smi on PATH that prints rows: index, throttle reasons, highest clock, temperature, errors, MiB."""
    lines = "\n".join(rows)
    program(folder / "nvidia-smi", f"#!/bin/sh\ncat <<'X'\n{lines}\nX\nexit {status}\n")


WELL = "0, 0x0000000000000001, 1980, 31, 0, 4"


def test_a_driver_that_torch_cannot_use_fails_with_its_reason(monkeypatch):
    assert node.driver(place()).status == IMPOSSIBLE
    refused = MachineError("/dev/nvidia0: torch cannot use the NVIDIA devices: the driver is too old (found 11040)")
    monkeypatch.setattr("megatron_moe.platform.hardware.check_devices", Mock(side_effect=refused))
    assert says(node.driver(place()), FAIL, "driver is too old")


def test_a_torch_without_the_grouped_product_fails(monkeypatch):
    assert node.torch_build(place()).status == PASS
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert says(node.torch_build(place()), FAIL, "grouped_mm", "cuDNN 9.10.2", "NCCL 2.27.3")


@pytest.mark.engine
def test_an_engine_that_was_not_tested_or_cannot_be_loaded_is_named(monkeypatch):
    assert node.engine(place()).status == PASS
    monkeypatch.setattr(defects, "engine_version", lambda: (0, 17, 0))
    assert node.engine(place()).status == WARN
    monkeypatch.setattr(node.importlib, "import_module", Mock(side_effect=OSError("undefined symbol")))
    assert says(node.engine(place()), FAIL, "undefined symbol")


@pytest.mark.engine
def test_a_library_that_cannot_be_loaded_is_named_with_what_it_said(monkeypatch):
    look = node.transformer_engine
    needs = build({"transformer_impl": "transformer_engine"})
    assert look(place()).status == PASS  # not installed, not needed
    assert look(place(run=needs)).status == FAIL
    version = "2.18.0" if sys.version_info >= (3, 12) else "2.11.0"  # what this Python's engine takes
    monkeypatch.setattr(node, "_version", lambda name: version)
    assert look(place()).status == IMPOSSIBLE  # no device
    monkeypatch.setattr("megatron_moe.platform.has_cuda", lambda: True, raising=False)
    monkeypatch.setattr(hardware, "why_not_loaded", lambda name: "OSError: undefined symbol: _ZN3c10")
    assert says(look(place()), WARN, "_ZN3c10", "--no-build-isolation")
    assert look(place(run=needs)).status == FAIL
    assert node.apex(place()).status == WARN
    monkeypatch.setattr(hardware, "why_not_loaded", lambda name: None)
    assert look(place()).status == PASS
    monkeypatch.setattr(node, "_version", lambda name: "1.13.0")
    required = [
        "torch>=2.11",
        'transformer-engine[pytorch]>=2.9,<2.12; python_version < "3" and extra == "gpu"',
        'transformer-engine[pytorch]>=2.14; python_version >= "3" and extra == "gpu"',
    ]
    monkeypatch.setattr(node.importlib.metadata, "requires", lambda name: required)
    old = look(place())
    assert says(old, WARN, "1.13.0") and ">=2.14" in old.found and ">=2.14" in old.advice


def test_a_node_without_a_compiler_or_its_headers_is_found(path, monkeypatch):
    assert node.compiler(place()).status == PASS
    program(path / "gcc", "#!/bin/sh\necho 'check.c:1: fatal error: Python.h: No such file' >&2\nexit 1\n")
    assert says(node.compiler(place()), WARN, "Python.h: No such file")
    monkeypatch.setattr("megatron_moe.platform.has_cuda", lambda: True, raising=False)
    assert node.compiler(place()).status == FAIL
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert "no-such-compiler" in node.compiler(place()).found
    monkeypatch.setattr(node, "_version", lambda name: None)
    assert node.triton(place()).status == FAIL


def test_the_attention_kernel_is_judged_by_what_the_widths_allow(monkeypatch):
    judged = node.judged_attention
    latent = run_of()
    assert node.attention_sizes(latent) == (128, 128, (192, 128))
    assert judged(latent, "cudnn", (9, 11, 0)).status == PASS
    assert says(judged(latent, "efficient", (9, 10, 2)), WARN, "9.11", "192/128")
    assert says(judged(run_of(context_parallel_size=2), "efficient", (9, 13, 0)), WARN, "--context-parallel-size")
    grouped = build(PRESETS["qwen3-30b-a3b"])
    assert node.attention_sizes(grouped) == (32, 4, (128, 128))
    assert judged(grouped, "flash", None).status == PASS
    assert judged(grouped, "math", None).status == FAIL
    assert "--bf16" in judged(run_of(bf16=False), "efficient", None).advice
    for number, version in ((91100, (9, 11, 0)), (91302, (9, 13, 2)), (8902, (8, 9, 2))):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert node.cudnn_version() == version


def test_the_grouped_product_says_where_it_falls_back(monkeypatch):
    run = run_of()
    assert node.grouped_product(place(run=run, has_model=True)).status == IMPOSSIBLE
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100-SXM4-80GB")
    with fake_device("cuda", {}):
        for capability, dtype, status in (((9, 0), "bf16", PASS), ((10, 3), "bf16", PASS), ((8, 0), "bf16", WARN)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, one=capability: one)
            assert node.grouped_product(place(run=run, has_model=True)).status == status, (capability, dtype)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        fp16 = place(run=run_of(bf16=False, fp16=True), has_model=True)
        assert says(node.grouped_product(fp16), WARN, "host")
        assert node.grouped_product(place()).status == IMPOSSIBLE  # no model


def test_a_switch_that_cannot_be_set_fails(monkeypatch):
    before = node.numerics.present()
    assert node.reductions(place()).status == PASS
    assert node.numerics.present() == before
    stuck = node.numerics.Switch("allow_bf16_reduced_precision_reduction", False, lambda: True, lambda value: None)
    monkeypatch.setattr(node.numerics, "ARITHMETIC", (stuck,))
    assert says(node.reductions(place()), FAIL, "allow_bf16_reduced_precision_reduction")


@pytest.mark.parametrize(
    ("look", "row", "status", "word"),
    [
        (node.gpu_clocks, "1, 0x0000000000000048, 1980, 40, 0, 4", FAIL, "GPU 1: hardware slowdown, hardware thermal"),
        (node.gpu_clocks, "1, 0x0000000000000000, 1410, 40, 0, 4", WARN, "1410"),
        (node.gpu_temperature, "1, 0x0, 1980, 89, 0, 4", FAIL, "GPU 1"),
        (node.gpu_temperature, "1, 0x0, 1980, 84, 0, 4", WARN, "84"),
        (node.gpu_memory_errors, "1, 0x0, 1980, 40, 3, 4", FAIL, "GPU 1: 3"),
        (node.gpu_in_use, "1, 0x0, 1980, 40, 0, 40960", WARN, "40960 MiB"),
    ],
)
def test_a_gpu_that_is_not_well_is_named(look, row, status, word, path):
    assert look(place()).status == IMPOSSIBLE  # no nvidia-smi
    smi(path, WELL)
    assert look(place()).status == PASS
    smi(path, WELL, row)
    finding = look(place())
    assert says(finding, status, word) and finding.advice


def test_an_nvidia_smi_that_fails_or_does_not_answer_fails(path, monkeypatch):
    smi(path, "Failed to initialize NVML: Driver/library version mismatch", status=18)
    assert says(node.gpu_clocks(place()), FAIL, "version mismatch", "18")
    program(path / "nvidia-smi", "#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(node, "_SMI_SECONDS", 0.2)
    assert node.gpu_clocks(place()).status == FAIL
    smi(path, "0, [N/A], [N/A], [N/A], [N/A], [N/A]")
    assert node.gpu_memory_errors(place()).status == WARN  # it does not count them
    assert node.gpu_temperature(place()).status == IMPOSSIBLE


def test_fewer_cores_than_ranks_fail_and_name_sruns_flag(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert node.cpu_cores(place()).status == PASS
    assert says(node.cpu_cores(place(local_world_size=8)), FAIL, "--cpus-per-task")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert node.cpu_cores(place(local_world_size=8)).status == WARN


def test_limits_of_a_container_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64 << 10, 64 << 10))
    assert node.memlock(place()).status == PASS  # a CPU
    monkeypatch.setattr("megatron_moe.platform.has_cuda", lambda: True, raising=False)
    assert node.memlock(place()).status == WARN
    assert says(node.memlock(place(world_size=16, local_world_size=8)), FAIL, "memlock=-1")
    monkeypatch.setattr(node, "free_bytes", lambda folder: 64 << 20)
    assert node.shared_memory(place()).status == WARN
    assert says(node.shared_memory(place(world_size=8, local_world_size=8)), FAIL, "--ipc=host")
    monkeypatch.setattr(node, "_SHARED_MEMORY", tmp_path / "none")
    assert node.shared_memory(place()).status == WARN


def test_a_disk_without_room_or_speed_is_found(tmp_path, monkeypatch):
    assert node.disk_space(place()).status == node.disk_speed(place()).status == IMPOSSIBLE
    here = place(run=run_of(save=str(tmp_path / "not" / "yet")), has_model=True)
    assert says(node.disk_space(here), FAIL, "18.8 TB")  # 671 B parameters, 14 bytes each, twice
    assert node.disk_space(dataclasses.replace(here, has_model=False)).status == PASS
    monkeypatch.setattr(node, "_WRITTEN", 1 << 20)
    assert node.disk_speed(dataclasses.replace(here, has_model=False)).found.endswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []  # nothing is left there, and no folder was made
    for least, status in ((1e9, WARN), (1e-9, PASS)):
        thresholds = dataclasses.replace(DEFAULTS, least_write=least)
        assert node.disk_speed(dataclasses.replace(here, thresholds=thresholds)).status == status

    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("megatron_moe.io.hashing.HashingFile.write", full)
    assert says(node.disk_speed(here), FAIL, "No space left")


def test_the_node_whose_packages_differ_is_named():
    usual = {"package torch": "2.12.0", "code of megatron_moe": "aaaa", "$NCCL_ALGO": "Ring"}
    other = {**usual, "code of megatron_moe": "bbbb"}
    del other["$NCCL_ALGO"]
    everything = [("node1", usual), ("node1", usual), ("node2", other), ("node2", other), ("node3", usual)]
    lines = checks.differing(everything)
    assert len(lines) == 2 and all("node2 (rank 2, 3)" in line for line in lines)
    assert "missing" in lines[0] and "bbbb" in lines[1]
    assert checks.differing([("node1", usual)] * 3) == []


def test_the_code_of_a_package_is_hashed_as_it_is_on_the_disk(tmp_path, monkeypatch):
    folder = tmp_path / "made_up_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = checks.code_hash("made_up_package")
    (folder / "__init__.py").write_text("A = 2\n")
    assert before != checks.code_hash("made_up_package")
    assert checks.code_hash("no_such_package") == "none"
    assert checks.fingerprint(place())["code of megatron_moe_tools"] != "none"


@pytest.fixture
def judged(monkeypatch):
    """`judged(look, values, ...)`: what a check finds where the ranks have gathered these values."""

    def finding(look, values, *arguments: object) -> Finding:
        monkeypatch.setattr(checks, "_of_all_ranks", lambda value: values)
        return look(*arguments or (place(),))

    for name in ("barrier", "broadcast_object_list"):
        monkeypatch.setattr(checks.dist, name, Mock())
    monkeypatch.setattr(checks, "_measured", Mock())
    return finding


def test_a_clock_that_is_wrong_and_a_slow_gpu_are_named(judged):
    moments = [("node1", 100.0), ("node2", 100.2), ("node3", 107.0)]
    assert says(judged(checks.clock_skew, moments), FAIL, "node3", "ahead")
    assert judged(checks.clock_skew, moments[:2]).status == PASS
    speeds = [("node1", 700.0), ("node1", 690.0), ("node2", 710.0), ("node2", 430.0)]
    assert says(judged(checks.gpu_speed, speeds), FAIL, "rank 3 on node2: 430")
    assert judged(checks.gpu_speed, speeds[:3]).status == PASS
    assert judged(checks.gpu_speed, [*speeds, ("node3", 0.0)]).status == IMPOSSIBLE


def test_the_slowest_group_decides_about_the_bandwidth(judged):
    def of_groups(values: list[object], expected: float | None, least: float) -> Finding:
        here = place(thresholds=dataclasses.replace(DEFAULTS, least_share=least))
        return judged(checks._judged_groups, values, here, groups, hosts, expected, checks.INSIDE)

    groups, hosts = [[0, 1], [2, 3]], ["node1", "node1", "node2", "node2"]
    fast, slow = {"all_reduce": 360.0, "all_to_all": 300.0}, {"all_reduce": 90.0, "all_to_all": 300.0}
    finding = of_groups([fast, fast, slow, slow], 450.0, 0.5)
    assert says(finding, FAIL, "ranks 2, 3 on node2") and "node1" not in finding.found
    assert finding.figures == {"all_reduce_gb_per_s": 90.0, "all_to_all_gb_per_s": 300.0}
    assert of_groups([fast, fast, slow, slow], 450.0, 0.2).status == PASS
    unknown = of_groups([fast, fast, None, None], None, 0.5)
    assert unknown.status == IMPOSSIBLE and unknown.figures["all_reduce_gb_per_s"] == 360.0


def test_the_longest_name_of_a_device_decides_what_is_expected():
    expected = checks.expected_bandwidth
    assert expected("NVIDIA H200", checks.INSIDE) == 450 and expected("NVIDIA H20", checks.INSIDE) == 450
    assert expected("NVIDIA GB300", checks.ACROSS) == 100 and expected("NVIDIA B200", checks.ACROSS) == 50
    assert expected("NVIDIA A100-SXM4-80GB", checks.ACROSS) == 25
    assert expected("NVIDIA A100-PCIE-40GB", checks.INSIDE) is None and expected(None, checks.INSIDE) is None
    names = list(checks.LINKS)
    assert not [name for at, name in enumerate(names) if any(one in name for one in names[:at])]


def test_a_check_that_raises_is_a_finding(monkeypatch):
    broken = Mock(side_effect=ZeroDivisionError("division by zero"))
    monkeypatch.setattr(checks, "CHECKS", (cli.Check("broken", cli.RANK, broken), checks.CHECKS[1]))
    found = checks.run_checks(Run())
    assert [one.check for one in found] == ["broken", "torch"]
    assert says(found[0], FAIL, "ZeroDivisionError")
    with pytest.raises(ConfigError, match="nothing.*broken, torch"):
        checks.run_checks(Run(), only=["nothing"])


def test_ranks_that_do_not_meet_are_a_finding(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checks, "_MEETING", timedelta(seconds=1))
    found = checks.run_checks(Run(), only=["torch", "clock_skew"])
    statuses = {one.check: one.status for one in found}
    assert statuses == {"ranks_meet": FAIL, "torch": PASS, "clock_skew": IMPOSSIBLE}
    assert "MASTER_ADDR" in found[0].advice and not torch.distributed.is_initialized()


def test_flags_without_a_model_leave_its_kernels_out(tmp_path):
    assert not checks._place(build({"save": str(tmp_path)}), DEFAULTS, connected=False).has_model
    assert checks._place(build({"hidden_size": 64}), DEFAULTS, connected=False).has_model


def test_equal_findings_of_ranks_are_one_and_the_others_name_theirs():
    def of(rank: int, status: str, found: str) -> Finding:
        return Finding(status, found, check="driver", ranks=(rank,), hosts=(f"node{rank // 2}",))

    together = merged([[of(0, PASS, "H100")], [of(1, PASS, "H100")], [of(2, PASS, "H100")], [of(3, FAIL, "none")]])
    assert [(one.status, one.ranks, one.hosts) for one in together] == [
        (PASS, (0, 1, 2), ("node0", "node1")),
        (FAIL, (3,), ("node1",)),
    ]
    lines = table(together, 4)
    assert "[rank 3 on node1]" in lines[1] and lines[-1].startswith("FAIL: 1 pass")
