"""The Dockerfiles copy what is there, run as no root, and never replace the image's own libraries."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import textwrap
import zipfile
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
    """Return what COPY takes from the folder of the build."""
    return [name for word, rest in instructions(path) if word == "COPY" for name in shlex.split(rest)[:-1]]


def ignored(name: str, patterns: list[str]) -> bool:
    """Return whether .dockerignore leaves out a path: a pattern fits it or a folder above it."""
    for pattern in patterns:
        body = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{body}(/.*)?", name):
            return True
    return False


def dockerignore() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_there_is_one_for_gpus_and_one_for_cpus() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile", "Dockerfile.cpu"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_not_ignored(path: Path) -> None:
    assert set(NEEDED.split()) <= set(sources(path))
    patterns = dockerignore()
    for source in sources(path):
        assert (ROOT / source).exists(), source
        below = [source, *(str(one.relative_to(ROOT)) for one in (ROOT / source).rglob("*") if one.is_file())]
        lost = [name for name in below if ignored(name, patterns) and "__pycache__" not in name]
        assert lost == []


def test_history_environments_runs_caches_and_checkpoints_stay_outside() -> None:
    patterns = dockerignore()
    outside = (
        ".git/HEAD .venv/bin/python .venv-3.12/bin/python runs/demo/x megatron_moe/__pycache__/a.pyc .mypy_cache/x "
        "tests/.pytest_cache/x deep/in/checkpoints/y run/iter_0000010/z a.safetensors megatron_moe.egg-info/PKG"
    )
    assert [name for name in outside.split() if not ignored(name, patterns)] == []
    assert not ignored("megatron_moe/checkpoint/save.py", patterns)
    assert not ignored("megatron_moe/data/corpus.py", patterns)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_container_does_not_run_as_root(path: Path) -> None:
    users = [rest.strip() for word, rest in instructions(path) if word == "USER"]
    assert users and users[-1] not in ("root", "0")
    made = " ".join(rest for word, rest in instructions(path) if word == "RUN")
    assert f"useradd --create-home --shell /bin/bash {users[-1]}" in made


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_the_programs_and_no_tools_of_developers(path: Path) -> None:
    made = " ".join(rest for word, rest in instructions(path) if word == "RUN")
    (extras,) = re.findall(r"EXTRAS=(\S+)|--editable '\.\[(.+?)\]'", made)
    assert set("".join(extras).split(",")) == {"hf", "data"}
    assert "EXTRAS ?= dev\n" in (ROOT / "Makefile").read_text()


def test_the_gpu_build_compares_the_images_libraries_before_and_after_pip() -> None:
    (step,) = [rest for word, rest in instructions(ROOT / "Dockerfile") if word == "RUN" and "pip install" in rest]
    commands = [command.strip().split()[:3] for command in step.split("&&")]
    assert commands[0] == ["python", "docker/image_libraries.py", "record"]
    assert commands[1][:2] == ["pip", "install"] and "--constraint" not in step
    assert commands[2] == ["python", "docker/image_libraries.py", "compare"]


@pytest.mark.parametrize("page", ["Dockerfile", "docs/gpu.md"])
def test_the_line_that_starts_a_container_gives_it_what_nccl_needs(page: str) -> None:
    text = (ROOT / page).read_text()
    for words in ("--gpus all", "--ipc=host", "--ulimit memlock=-1", "--ulimit stack=67108864", "enroot import"):
        assert words in text, words


# ---- the proof that pip replaced nothing


def install(folder: Path, module: str, name: str, version: str) -> None:
    """Put a stub of a library and its metadata into a folder of the path."""
    (folder / module).mkdir(parents=True, exist_ok=True)
    (folder / module / "__init__.py").write_text("raise RuntimeError('not to be imported: no GPU')\n")
    for old in folder.glob(f"{name}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    (folder / f"{name}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return the site-packages of a stub image."""
    site = tmp_path / "site"
    install(site, "torch", "torch", "2.12.0a0+nv26.05")
    install(site, "transformer_engine", "transformer_engine", "2.16.0")
    install(site, "apex", "apex", "0.1")
    return site


def proof(site: Path, verb: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the stub image's packages first on the path."""
    file = site.parent / "before.json"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-S", str(SCRIPT), verb, str(file)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def test_an_image_that_pip_left_alone_passes(image: Path) -> None:
    assert proof(image, "record").returncode == 0
    done = proof(image, "compare")
    assert done.returncode == 0, done.stderr
    assert "torch, transformer_engine, apex" in done.stdout


def test_an_image_in_which_pip_replaced_a_library_ends_the_build(image: Path) -> None:
    proof(image, "record")
    install(image, "torch", "torch", "2.13.0")
    done = proof(image, "compare")
    assert done.returncode == 1
    assert "torch changed" in done.stderr and "2.12.0a0+nv26.05" in done.stderr and "2.13.0" in done.stderr


def test_a_library_that_is_found_elsewhere_or_gone_ends_the_build(image: Path) -> None:
    proof(image, "record")
    (image / "apex" / "__init__.py").unlink()
    (image / "apex").rename(image / "other")
    done = proof(image, "compare")
    assert done.returncode == 1 and "apex changed" in done.stderr


def test_an_image_without_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    assert proof(tmp_path / "site", "record").returncode == 1
    assert proof(tmp_path / "site", "other").returncode == 2


# ---- Transformer Engine's source distribution is built against the torch that is there while it is built

BACKEND = """
import io, os, tarfile, zipfile
import torch  # as Transformer Engine's build does

NAME, VERSION = "transformer_engine", "2.18.0"

def get_requires_for_build_wheel(config_settings=None):
    return []

def _metadata():
    return f"Metadata-Version: 2.1\\nName: {NAME}\\nVersion: {VERSION}\\nProvides-Extra: pytorch\\n"

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name, info = f"{NAME}-{VERSION}-py3-none-any.whl", f"{NAME}-{VERSION}.dist-info"
    code = f"import torch\\nassert torch.__version__ == {torch.__version__!r}, 'undefined symbol'\\n"
    wheel = "Wheel-Version: 1.0\\nGenerator: stub\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files = {f"{NAME}/__init__.py": code, f"{info}/METADATA": _metadata(), f"{info}/WHEEL": wheel}
    record = "".join(f"{path},,\\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(path, text)
    return name
"""


def make_index(folder: Path) -> None:
    """Fill a folder with a newer stub of torch, and a stub source distribution that needs torch to be built."""
    folder.mkdir()
    info = "torch-99.0.dist-info"
    files = {
        "torch/__init__.py": "__version__ = '99.0'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / "torch-99.0-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": "".join(f"{path},,\n" for path in files)}.items():
            archive.writestr(path, text)
    source = folder.parent / "transformer_engine-2.18.0"
    source.mkdir()
    (source / "backend.py").write_text(BACKEND)
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.18.0\n")
    (source / "pyproject.toml").write_text(
        textwrap.dedent("""
            [build-system]
            requires = ["torch"]
            build-backend = "backend"
            backend-path = ["."]
            """)
    )
    with tarfile.open(folder / "transformer_engine-2.18.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)


def documented_commands() -> list[list[str]]:
    """Return the options of the commands in docs/gpu.md that install Transformer Engine, for each Python."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    lines = re.findall(r"^pip install (.*'transformer-engine\[pytorch\]==[^']*').*$", page, re.MULTILINE)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize(("isolated", "works"), [(True, False), (False, True)], ids=["isolated", "documented"])
def test_transformer_engine_works_if_it_was_built_against_the_torch_that_is_there(
    tmp_path: Path, isolated: bool, works: bool
) -> None:
    make_index(tmp_path / "index")
    installed, target = tmp_path / "installed", tmp_path / "target"
    (installed / "torch").mkdir(parents=True)
    (installed / "torch" / "__init__.py").write_text("__version__ = '2.12.0'\n")
    words = [word for word in documented_commands()[0] if not (isolated and word == "--no-build-isolation")]
    assert ("--no-build-isolation" in words) is not isolated
    environment = {**os.environ, "PYTHONPATH": str(installed), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1"}
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", str(tmp_path / "index")]
    more = ["--quiet", "--disable-pip-version-check", "--target", str(target)]
    done = subprocess.run([*pip, *more, *words], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    paths = {**environment, "PYTHONPATH": f"{installed}{os.pathsep}{target}"}
    used = subprocess.run(
        [sys.executable, "-c", "import transformer_engine"], env=paths, capture_output=True, text=True, timeout=600
    )
    assert (used.returncode == 0) is works, used.stderr
    assert works or "undefined symbol" in used.stderr


def test_the_documented_commands_the_extra_and_the_tests_are_about_the_same_versions() -> None:
    ranges = re.findall(r"transformer-engine\[pytorch\]([^;]+); python_version", (ROOT / "setup.py").read_text())
    tested = [(ROOT / f"constraints/transformer-engine-{name}.txt").read_text() for name in ("py311", "py312")]
    versions = [re.findall(r"^transformer-engine==(.+)$", text, re.MULTILINE)[0] for text in tested]
    assert [words[-1].partition("==")[2] for words in documented_commands()] == versions[::-1]
    assert [version in SpecifierSet(one) for version, one in zip(versions, ranges, strict=True)] == [True, True]
