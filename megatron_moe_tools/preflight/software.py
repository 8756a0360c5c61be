"""Checks of what is installed: driver, torch, the engine, Transformer Engine and apex, compiler, triton."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

from megatron_moe import platform
from megatron_moe.config.errors import MachineError
from megatron_moe.platform import advisories, optional_libraries, probes
from megatron_moe.platform.defects import NEWEST, OLDEST
from megatron_moe_tools.preflight.findings import FAIL, IMPOSSIBLE, PASS, WARN, Finding, Place

_COMPILE_SECONDS = 30
_PROGRAM = "#include <Python.h>\nint main(void) { return PY_MAJOR_VERSION == 3 ? 0 : 1; }\n"


def driver(place: Place) -> Finding:
    """Check that torch can use the NVIDIA devices that this machine has, and that there is one for every rank."""
    try:
        device = platform.device()
    except MachineError as error:
        return Finding(FAIL, str(error), "make the devices usable: driver, container, or a torch for this CUDA")
    name = probes.device_name()
    if name is None:
        return Finding(
            IMPOSSIBLE, "no NVIDIA device, or all are hidden by CUDA_VISIBLE_DEVICES; a run trains on the CPU"
        )
    return Finding(PASS, f"{name}" if place.world_size > 1 else f"{name} as {device}")


def torch_build(place: Place) -> Finding:
    """Check that torch has the grouped product, and report what it was built with."""
    build = probes.torch_build()
    parts = [f"torch {build.torch}", f"CUDA {build.toolkit}" if build.toolkit else "built without CUDA"]
    parts += [f"cuDNN {'.'.join(map(str, build.cudnn))}"] if build.cudnn else []
    parts += [f"NCCL {build.nccl}"] if build.nccl else []
    found = ", ".join(parts)
    if not build.grouped_product:
        return Finding(FAIL, f"{found}: has no torch.nn.functional.grouped_mm", f"install {_requirement('torch')}")
    return Finding(PASS, found)


def engine(place: Place) -> Finding:
    """Check that megatron-core can be loaded, and is the release that was tested with this Python."""
    tested = OLDEST if sys.version_info < (3, 12) else NEWEST
    advice = f"pip install megatron-core=={advisories.dotted(tested)}"
    try:
        version = advisories.engine_version()
    except importlib.metadata.PackageNotFoundError:
        return Finding(FAIL, "megatron-core is not installed", advice)
    python = ".".join(map(str, sys.version_info[:3]))
    found = f"megatron-core {advisories.dotted(version)}, Python {python}"
    try:
        importlib.import_module("megatron_moe.parallel.groups")  # which imports it
    except Exception as error:  # whatever its own code or a library's raises
        return Finding(FAIL, f"{found}: it cannot be imported, {type(error).__name__}: {error}", advice)
    if version != tested:
        return Finding(WARN, f"{found}: not tested together", advice)
    return Finding(PASS, found)


def transformer_engine(place: Place) -> Finding:
    """Check that an installed Transformer Engine can be loaded, and is there where the run asks for it."""
    run = place.run
    needed = run.model.transformer_impl == "transformer_engine" or run.moe.moe_expert_backend == "te"
    return _library("transformer_engine", "transformer-engine", needed)


def apex(place: Place) -> Finding:
    """Check that an installed apex can be loaded."""
    return _library("apex", "apex", needed=False)


def _library(library: str, distribution: str, needed: bool) -> Finding:
    """Check one of the libraries that the engine imports where they are installed."""
    name, version = optional_libraries.NAMES[library], _version(distribution)
    required = _requirement(distribution)
    if version is None:
        if needed:
            return Finding(FAIL, f"{name} is not installed and the flags ask for it", _install_te(required))
        return Finding(PASS, f"{name} is not installed; the run does without")
    if not platform.has_cuda():
        return Finding(IMPOSSIBLE, f"{name} {version}: it loads with a CUDA device alone")
    why_not = optional_libraries.why_not_loaded(library)
    if why_not is not None:
        return Finding(
            FAIL if needed else WARN,
            f"{name} {version}: {why_not}",
            f"build it against torch {probes.torch_build().torch}: {_install_te(required)}"
            if library == "transformer_engine"
            else f"remove it (pip uninstall {distribution}), or build it against this torch",
        )
    if not Requirement(required).specifier.contains(version, prereleases=True):
        return Finding(WARN, f"{name} {version}: this engine takes {required}", _install_te(required))
    return Finding(PASS, f"{name} {version}")


def _install_te(required: str) -> str:
    return f"pip install --no-build-isolation '{required}', after torch"


def compiler(place: Place) -> Finding:
    """Check that there are a C compiler and Python.h, which triton and torch.compile need on every node at run time."""
    status = FAIL if platform.has_cuda() else WARN
    words = shlex.split(os.environ.get("CC", "")) or [shutil.which("gcc") or shutil.which("cc") or ""]
    include = sysconfig.get_paths()["include"]
    advice = (
        "install gcc and Python's headers (Debian: gcc, python3-dev), or set CC; triton and torch.compile need both"
    )
    if not words[0] or shutil.which(words[0]) is None:
        return Finding(status, f"no C compiler: {words[0] or 'neither gcc nor cc'} is not on PATH", advice)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "check.c"
        source.write_text(_PROGRAM)
        done = subprocess.run(
            [*words, f"-I{include}", "-c", str(source), "-o", str(source.with_suffix(".o"))],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
        )
    if done.returncode != 0:
        line = next((line for line in done.stderr.splitlines() if "error" in line), "it gives no reason")
        return Finding(status, f"{words[0]} does not compile a file with Python.h of {include}: {line}", advice)
    return Finding(PASS, f"{words[0]} compiles with Python.h of {include}")


def triton(place: Place) -> Finding:
    """Check that triton is installed, which torch.compile generates code for."""
    version = next(filter(None, map(_version, ("triton", "pytorch-triton"))), None)
    if version is not None:
        return Finding(PASS, f"triton {version}")
    if not platform.has_cuda():
        return Finding(IMPOSSIBLE, "triton is not installed, and not used without a CUDA device")
    return Finding(FAIL, "triton is not installed", "install the triton that this torch's metadata names")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirement(distribution: str) -> str:
    """Return what this package's own metadata requires of a distribution here, "torch>=2.11" or so; else its name."""
    try:
        lines = importlib.metadata.requires("megatron_moe") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for required in map(Requirement, lines):
        here = required.marker is None or required.marker.evaluate({"extra": "gpu"})
        if here and required.name == distribution:
            return str(required).partition(";")[0].strip()
    return distribution
