"""Wheels for a GPU machine without a network: what it lacks beside torch, and the Python that has a CUDA torch.

    python -m tests.gpu.wheels collect [FOLDER]       `make gpu-wheels`, where there is a network
    python -m tests.gpu.wheels start [FLAGS...]       `make gpu`, on the GPU machine: finds a Python, starts the stages

Loads neither torch nor the package: it runs before they can be there. torch, and what torch brings, is never installed.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "wheels" / "gpu"
MOST_BYTES = 40 * 10**6
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NEEDED = "megatron-core numpy pyyaml psutil packaging rich markdown-it-py mdurl pygments".split()
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_HAS_CUDA = "import torch, sys; sys.exit(not torch.cuda.is_available())"


def pinned(python: str) -> dict[str, str]:
    """Return the version of each needed distribution; numpy's is the machine's own affair where it has one."""
    file = f"constraints-{'py311' if python in ('3.10', '3.11') else 'py312'}.txt"
    text = (ROOT / "constraints" / file).read_text(encoding="utf-8")
    lines = re.findall(r"^([A-Za-z0-9_.-]+)==([^;\s]+)(?:;\s*(.*))?$", text, re.MULTILINE)
    older = tuple(map(int, python.split("."))) < (3, 11)
    found = {}
    for name, version, condition in lines:
        if name.lower() in NEEDED and not (condition and (">= '3.11'" in condition) == older):
            found[name.lower()] = version
    return found


def collect(folder: Path = WHEELS, pythons: tuple[str, ...] = ("3.12",)) -> int:
    """Download the wheels for these Pythons on x86-64 Linux; returns an exit status.

    Everything for one Python is below MOST_BYTES; torch is not among them.
    """
    for python in pythons:
        target = folder / python
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--python-version", python, "--implementation", "cp", "--dest", str(target)]
        command += [argument for name in PLATFORMS for argument in ("--platform", name)]
        versions = pinned(python)
        command += [f"{name}=={versions[name]}" if name in versions else name for name in NEEDED]
        if subprocess.run(command).returncode != 0:
            return 1
        size = sum(wheel.stat().st_size for wheel in target.iterdir())
        print(f"{size / 1e6:6.1f} MB for Python {python}: {', '.join(sorted(os.listdir(target)))}")
        if size > MOST_BYTES:
            print(f"these are more than {MOST_BYTES / 1e6:g} MB", file=sys.stderr)
            return 1
    return 0


def missing() -> list[str]:
    there = {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower() for one in metadata.distributions()}
    return [name for name in NEEDED if name not in there]


def place(site: Path, wheels: Path = WHEELS) -> list[str]:
    """Install what this Python lacks into `site`, from the wheels of its version or not at all; return their names."""
    lacking, python = missing(), f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not lacking:
        return []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    command += ["--find-links", str(wheels / python), *lacking]
    shutil.rmtree(site, ignore_errors=True)
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            f"make gpu: {sys.executable} lacks {', '.join(lacking)}, and {wheels / python} cannot give them: run "
            f"`make gpu-wheels PYTHONS={python}` where there is a network, and bring the folder wheels/ along"
        )
    return lacking


def with_cuda(wanted: str | None) -> str:
    """Return a Python whose torch sees a CUDA device: this one, or the first on PATH; end where there is none."""
    names = [wanted] if wanted else [sys.executable, "python3", *(f"python{v}" for v in reversed(PYTHONS)), "python"]
    tried = list(dict.fromkeys(path for name in names if (path := shutil.which(name))))
    for path in tried:
        if subprocess.run([path, "-W", "ignore", "-c", _HAS_CUDA], capture_output=True).returncode == 0:
            return path
    raise SystemExit(
        f"make gpu: no torch that sees a CUDA device in {', '.join(tried) or wanted}; name its Python with "
        "PYTHON=, or run the stages on the CPU with DRY=1"
    )


def start(flags: list[str]) -> None:
    """Become `python -m tests.gpu` in a Python with a CUDA torch."""
    python = with_cuda(os.environ.get("GPU_PYTHON") or None)
    if os.path.realpath(python) != os.path.realpath(sys.executable) or sys.prefix != _prefix(python):
        os.execv(python, [python, "-m", "tests.gpu.wheels", "start", *flags])
    site = ROOT / "runs" / "gpu" / "site"
    taken = place(site)
    print(f"make gpu: {python}, Python {sys.version.split()[0]}; from wheels/gpu: {', '.join(taken) or 'nothing'}")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), str(site) if taken else ""]))
    environment = {**os.environ, "PYTHONPATH": path, "MEGATRON_MOE_GPU_WHEELS": " ".join(taken)}
    sys.stdout.flush()
    os.execve(python, [python, "-W", "ignore", "-m", "tests.gpu", *flags], environment)


def _prefix(python: str) -> str:
    ran = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
    return ran.stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        sys.exit(collect(pythons=tuple(sys.argv[2:]) or ("3.12",)))
    if sys.argv[1:2] == ["start"]:
        start(sys.argv[2:])
    sys.exit("usage: python -m tests.gpu.wheels collect [3.12 ...] | start [flags of python -m tests.gpu]")
