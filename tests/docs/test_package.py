"""The wheel and the source distribution are complete, and the installed package needs no clone.

The wheel is built from the source distribution, and installed into an environment of its own in which the packages that
it depends on are those of this Python: nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import megatron_moe
from megatron_moe.console import COMMANDS
from tests.helpers import tiny_models
from tests.helpers.sources import PACKAGE, ROOT, imported, sources

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
GENERATED = {"PKG-INFO", "setup.cfg"}


def quiet(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that does not see the clone."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Built:
    """A copy of the repository's files, the two distributions made of it, and what is in them."""

    repository: set[str]
    wheel: Path
    in_wheel: set[str]
    in_sdist: set[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("build")
    unwanted = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    shutil.copytree(ROOT, folder / "repository", ignore=shutil.ignore_patterns(".git", *unwanted))
    repository = files_in(folder / "repository")
    done = quiet([sys.executable, "-c", BUILD, "build_sdist", str(folder)], folder / "repository")
    assert done.returncode == 0, done.stderr
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    done = quiet([sys.executable, "-c", BUILD, "build_wheel", str(folder)], unpacked)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return Built(repository, wheel, set(zipfile.ZipFile(wheel).namelist()), in_sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    bin_folder = folder / "bin"
    command = [bin_folder / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--no-index", "--no-deps"]
    done = quiet([*command, "--disable-pip-version-check", built.wheel], folder)
    assert done.returncode == 0, done.stderr
    # Folders that another environment's path names are searched, but its .pth files, such as a clone's, are not read.
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(packages) + "\n")
    return bin_folder


# ---- what is in them


def test_the_source_distribution_has_every_file_of_the_repository(built: Built) -> None:
    made = {name for name in built.in_sdist if "megatron_moe.egg-info" in name} | GENERATED
    assert built.repository - built.in_sdist == set()
    assert built.in_sdist - built.repository - made == set()


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    of_package = {name for name in built.repository if name.startswith("megatron_moe/")}
    assert {name for name in built.in_wheel if ".dist-info/" not in name} == of_package
    assert "megatron_moe/py.typed" in of_package and f"{PACKAGE.name}/kernels/cpu.c" in of_package


def test_the_metadata_names_the_license_the_pythons_and_the_command(built: Built) -> None:
    info = f"megatron_moe-{megatron_moe.__version__}.dist-info"
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = archive.read(f"{info}/METADATA").decode()
        assert archive.read(f"{info}/entry_points.txt").decode().split("\n")[1].startswith("megatron-moe = ")
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    for line in ("License: Apache-2.0", "Requires-Python: >=3.10", "Provides-Extra: hf", "Provides-Extra: data"):
        assert f"\n{line}\n" in metadata or f"\n{line.replace('License:', 'License-Expression:')}\n" in metadata


# ---- the command


def test_every_program_of_tools_is_a_command() -> None:
    mains = {main for main, _ in COMMANDS.values()}
    of_tools = {
        f"{name.rpartition('.')[0]}:{name.rpartition('.')[2]}"
        for path in sources("tools")
        for name, _ in imported(path)
        if name.startswith("megatron_moe.apps.")
    }
    assert mains - of_tools == {"megatron_moe.train:main", "megatron_moe.slurm:main"} and of_tools <= mains


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_printed_without_torch(command: str | None) -> None:
    words = ["--help"] if command is None else [command, "--help"]
    code = (
        "import sys\nfrom megatron_moe.console import main\ntry:\n    status = main(sys.argv[1:])\n"
        "except SystemExit as ended:\n    status = ended.code or 0\n"
        "print(status, [name for name in ('torch', 'megatron.core') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("\n0 []\n"), done.stdout + done.stderr
    assert done.stdout.startswith(f"usage: megatron-moe {command or 'COMMAND'} "), done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_reported_by_the_name_that_was_typed(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    from megatron_moe.console import main

    mistake = ["--script", "nowhere"] if command == "flags" else ["--json"]
    assert main([command, *mistake]) == 2
    assert capfd.readouterr().err.startswith(f"megatron-moe {command}: error: ")


def test_what_is_no_command_ends_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    from megatron_moe.console import main

    for word, meant in (("trian", "train"), ("verify-resme", "verify-resume"), ("--versoin", "--version")):
        assert main([word]) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1 and word in err and f"did you mean {meant}?" in err
    assert main(["bake", "--help"]) == 2
    assert "--help" in capfd.readouterr().err
    assert main([]) == 2
    out, err = capfd.readouterr()
    assert out == "" and all(name in err for name in COMMANDS)


# ---- the installed package


def test_the_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    where = quiet([installed / "python", "-c", "import megatron_moe; print(megatron_moe.__file__)"], tmp_path)
    assert where.stdout.startswith(str(installed.parent)), where.stderr
    version = f"megatron-moe {megatron_moe.__version__}\n"
    for command in ([installed / "megatron-moe"], [installed / "python", "-m", "megatron_moe"]):
        assert quiet([*command, "--version"], tmp_path).stdout == version


def test_it_reads_its_tables(installed: Path, tmp_path: Path) -> None:
    answered = quiet([installed / "megatron-moe", "flags", "--moe-grouped-gemm"], tmp_path)
    assert answered.returncode == 0 and "--moe-grouped-gemm" in answered.stdout, answered.stderr
    words = "train --preset tiny --mock-data --vocab-size 1000 --list-advisories"
    listed = quiet([installed / "megatron-moe", *words.split()], tmp_path)
    assert listed.returncode == 0 and "megatron-core" in listed.stdout, listed.stderr


def test_it_trains_imports_exports_and_generates(installed: Path, tmp_path: Path) -> None:
    tiny_models.make("mixtral", 1, tmp_path / "hf")
    for words in (
        "train --preset tiny --mock-data --vocab-size 1000 --train-iters 2 --save run",
        "convert --from hf --to native --load hf --save native",
        "convert --from native --to hf --load native --save back",
    ):
        done = quiet([installed / "megatron-moe", *words.split()], tmp_path)
        assert done.returncode == 0, done.stderr
    (step,) = (tmp_path / "run").glob("iter_*")
    assert step.name == "iter_0000002"
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "mixtral"
    words = "generate --load native --prompt ab --max-new-tokens 3 --no-stop-at-eod --tokenizer-type ByteTokenizer"
    done = quiet([installed / "megatron-moe", *words.split()], tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("ab"), done.stderr
