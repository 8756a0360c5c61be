"""The Dockerfiles copy what is there, run as no root, and never replace the image's own libraries."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.helpers.sources import ROOT

DOCKERFILES = sorted(ROOT.glob("Dockerfile*"))
SCRIPT = ROOT / "docker" / "image_libraries.py"
NEEDED = (
    "megatron_moe tools examples benchmarks docs tests docker constraints Makefile LICENSE setup.py pretrain_moe.py"
)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return (instruction, the rest) of each line, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(words[0], words[1]) for line in joined.splitlines() if len(words := line.split(None, 1)) == 2]


def sources(path: Path) -> list[str]:
    return [name for word, rest in instructions(path) if word == "COPY" for name in shlex.split(rest)[:-1]]


def ignored(name: str, patterns: list[str]) -> bool:
    """Return whether .dockerignore leaves out a path: a pattern fits it or a folder above it."""
    bodies = (re.escape(one).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*") for one in patterns)
    return any(re.fullmatch(f"{body}(/.*)?", name) for body in bodies)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_not_ignored(path: Path) -> None:
    assert set(NEEDED.split()) <= set(sources(path))
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    for source in sources(path):
        assert (ROOT / source).exists(), source
        below = [source, *(str(one.relative_to(ROOT)) for one in (ROOT / source).rglob("*") if one.is_file())]
        assert [name for name in below if ignored(name, patterns) and "__pycache__" not in name] == []
    # A container does not run as root.
    user = [rest.strip() for word, rest in instructions(path) if word == "USER"][-1]
    made = " ".join(rest for word, rest in instructions(path) if word == "RUN")
    assert user not in ("root", "0") and f"useradd --create-home --shell /bin/bash {user}" in made


# ---- the proof that pip replaced nothing


def install(folder: Path, name: str, version: str) -> None:
    """Put a stub of a library and its metadata into a folder of the path."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('not to be imported: no GPU')\n")
    for old in folder.glob(f"{name}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    (folder / f"{name}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)


def proof(site: Path, verb: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the stub image's packages first on the path."""
    file = site.parent / "before.json"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-S", str(SCRIPT), verb, str(file)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_a_library_that_pip_replaced_or_moved_ends_the_build(tmp_path: Path) -> None:
    image = tmp_path / "site"
    for name, version in (("torch", "2.12.0a0+nv26.05"), ("transformer_engine", "2.16.0"), ("apex", "0.1")):
        install(image, name, version)
    (tmp_path / "none").mkdir()  # an image without torch is refused
    assert [proof(tmp_path / "none", "record").returncode, proof(image, "other").returncode] == [1, 2]
    assert proof(image, "record").returncode == 0
    done = proof(image, "compare")
    assert done.returncode == 0, done.stderr
    assert "torch, transformer_engine, apex" in done.stdout
    install(image, "torch", "2.13.0")
    (image / "apex" / "__init__.py").unlink()
    (image / "apex").rename(image / "other")
    done = proof(image, "compare")
    assert done.returncode == 1 and "apex changed" in done.stderr
    assert "torch changed" in done.stderr and "2.12.0a0+nv26.05" in done.stderr and "2.13.0" in done.stderr


# ---- Transformer Engine's source distribution is built against the torch that is there while it is built


def test_the_documented_commands_install_the_tested_version_against_the_torch_that_is_there() -> None:
    page = (ROOT / "docs" / "guides" / "gpu.md").read_text()
    commands = re.findall(r"^pip install (.*)'transformer-engine\[pytorch\]==([^']*)'.*$", page, re.MULTILINE)
    ranges = re.findall(r"transformer-engine\[pytorch\]([^;]+); python_version", (ROOT / "pyproject.toml").read_text())
    tested = [(ROOT / f"constraints/transformer-engine-{name}.txt").read_text() for name in ("py311", "py312")]
    versions = [re.findall(r"^transformer-engine==(.+)$", text, re.MULTILINE)[0] for text in tested]
    assert [version for _, version in commands] == versions[::-1]
    assert all("--no-build-isolation" in options.split() for options, _ in commands)
    assert [version in SpecifierSet(one) for version, one in zip(versions, ranges, strict=True)] == [True, True]
