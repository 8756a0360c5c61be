"""What pyproject.toml cannot say of the build: the commit that a package was built from goes into it."""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent


def stamp(package: Path) -> None:
    """Write the commit into a package that is built from a git checkout (`io/source_version.py` reads it)."""
    if (HERE / ".git").exists():
        command = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        (package / "commit.txt").write_text(found)


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            stamp(Path(self.build_lib) / "megatron_moe")


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        stamp(Path(base_dir) / "megatron_moe")


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit})
