"""The wheel and the source distribution are complete, and the installed package needs no clone.

The wheel is built from the source distribution, and installed into an environment in which the packages that it depends
on are those of this Python: nothing is downloaded.
"""

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
from megatron_moe_tools.console import COMMANDS, main
from tests.helpers.sources import PACKAGE, ROOT

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
STAMP = "megatron_moe/commit.txt"
GENERATED = {"PKG-INFO", "setup.cfg"}


def quiet(command: list[str | Path], folder: Path) -> str:
    """Run a command that does not see the clone, and return what it prints."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"OMP_NUM_THREADS": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INPUT": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Built:
    """A copy of the repository's files, the two distributions made of it, and what is in them."""

    repository: set[str]
    wheel: Path
    packages: list[Path]
    in_wheel: set[str]
    in_sdist: set[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("build")
    unwanted = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    clone = folder / "repository"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", *unwanted))
    repository = {path.relative_to(clone).as_posix() for path in clone.rglob("*") if path.is_file()}
    quiet(["git", "init", "--quiet"], clone)
    quiet(["git", "-c", "user.name=a", "-c", "user.email=a", "commit", "--quiet", "--allow-empty", "-m", "a"], clone)
    quiet([sys.executable, "-c", BUILD, "build_sdist", str(folder)], clone)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    quiet([sys.executable, "-c", BUILD, "build_wheel", str(folder)], unpacked)
    (wheel,) = folder.glob("*.whl")
    packages = [wheel, *folder.glob("*.tar.gz")]
    return Built(repository, wheel, packages, set(zipfile.ZipFile(wheel).namelist()), in_sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python", "install"]
    quiet([*pip, "--quiet", "--no-compile", "--no-index", "--no-deps", built.wheel], folder)
    # Folders that another environment's path names are searched, but its .pth files, such as a clone's, are not read.
    packages = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(packages) + "\n")
    return folder / "bin"


# ---- what is in them


def test_the_distributions_have_every_file_and_no_other_and_name_the_license_and_the_pythons(built: Built) -> None:
    made = {name for name in built.in_sdist if "megatron_moe.egg-info" in name} | GENERATED | {STAMP}
    assert "FAILED" not in quiet(
        [sys.executable, "-m", "twine", "check", "--strict", *built.packages], built.wheel.parent
    )
    assert built.repository - built.in_sdist == set()
    assert built.in_sdist - built.repository - made == set()
    of_package = {name for name in built.repository if name.startswith(("megatron_moe/", "megatron_moe_tools/"))}
    assert {name for name in built.in_wheel if ".dist-info/" not in name} == of_package | {STAMP}
    assert "megatron_moe/py.typed" in of_package and f"{PACKAGE.name}/kernels/cpu.c" in of_package
    with zipfile.ZipFile(built.wheel) as archive:
        assert len(archive.read(STAMP).strip()) == 40
        metadata = archive.read(f"megatron_moe-{megatron_moe.__version__}.dist-info/METADATA").decode()
    assert any(name.endswith("LICENSE") for name in built.in_wheel)
    for line in ("License: Apache-2.0", "Requires-Python: >=3.10", "Provides-Extra: hf", "Provides-Extra: data"):
        assert f"\n{line}\n" in metadata or f"\n{line.replace('License:', 'License-Expression:')}\n" in metadata


# ---- the command


def test_help_is_printed_without_torch() -> None:
    code = (
        "import sys\nfrom megatron_moe_tools.console import main\n"
        "for command in sys.argv[1:]:\n    print(f'{command}:')\n"
        "    try:\n        assert not main([*command.split(), '--help'])\n"
        "    except SystemExit as ended:\n        assert not ended.code\n"
        "    assert not {'torch', 'megatron.core'} & set(sys.modules), command\n"
    )
    command = [sys.executable, "-c", code, "", *COMMANDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in ("", *COMMANDS):
        assert f"{name}:\nusage: megatron-moe {name or 'COMMAND'} " in done.stdout, name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_reported_by_the_name_that_was_typed(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    mistake = ["--script", "nowhere"] if command == "flags" else ["--json"]
    assert main([command, *mistake]) == 2
    assert capfd.readouterr().err.startswith(f"megatron-moe {command}: error: ")


def test_what_is_no_command_ends_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_the_programs_of_the_installed_package_run(installed: Path, tmp_path: Path) -> None:
    version = quiet([installed / "python", "-m", "megatron_moe", "--version"], tmp_path)
    assert version == f"megatron-moe {megatron_moe.__version__}\n"
    assert "--moe-grouped-gemm" in quiet([installed / "megatron-moe", "flags", "--moe-grouped-gemm"], tmp_path)


@pytest.mark.test_all(instead="tests/docs/test_package.py::test_the_programs_of_the_installed_package_run")
def test_it_trains_exports_and_generates(installed: Path, tmp_path: Path) -> None:
    code = (
        "import sys, megatron_moe\nfrom megatron_moe_tools.console import main\nprint(megatron_moe.__file__)\n"
        "for words in sys.argv[1:]:\n    assert not main(words.split())\n"
    )
    commands = (
        "train --preset tiny --mock-data --vocab-size 1000 --seq-length 16 --train-iters 2 --eval-iters 0 --save run",
        "convert --from native --to hf --load run --save hf",
        "generate --load run --prompt ab --max-new-tokens 3 --no-stop-at-eod --tokenizer-type ByteTokenizer",
    )
    printed = quiet([installed / "python", "-c", code, *commands], tmp_path)
    assert printed.startswith(str(installed.parent)) and "\nab" in printed
    assert [step.name for step in (tmp_path / "run").glob("iter_*")] == ["iter_0000002"]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "deepseek_v3"
