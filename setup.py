"""Packaging of megatron_moe. The exact versions that are tested stand in `constraints/`."""

import re
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
# What megatron-moe prepare reads .zst and tables with.
DATA = ["zstandard>=0.22", "pyarrow>=15"]
MLFLOW = ["mlflow-skinny>=2.16"]


def version() -> str:
    """The package's version, read and not imported: importing the package would need its dependencies."""
    found = re.search(r'^__version__ = "(.+)"$', (HERE / "megatron_moe" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


def readme() -> str:
    path = HERE / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


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


setup(
    cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit},
    name="megatron_moe",
    version=version(),
    description="Mixture-of-experts pre-training on megatron-core",
    long_description=readme(),
    long_description_content_type="text/markdown",
    keywords=["mixture-of-experts", "pre-training", "megatron", "distributed training", "large language models"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_moe", "megatron_moe.*", "megatron_moe_tools", "megatron_moe_tools.*"]),
    package_data={
        "megatron_moe": ["commit.txt", "py.typed"],
        "megatron_moe_tools.audit": ["report.html"],
        "megatron_moe_tools.compat": ["*.tsv", "*.yaml"],
        "megatron_moe_tools.launch": ["slurm.sh"],
        "megatron_moe.config": ["presets.yaml"],
        "megatron_moe.engine": ["engine_defects.yaml"],
        "megatron_moe.kernels": ["cpu.c"],
        "megatron_moe_tools.report": ["assets/*"],
    },
    entry_points={"console_scripts": ["megatron-moe = megatron_moe_tools.console:main"]},
    install_requires=[
        # The public torch.nn.functional.grouped_mm; NVIDIA's image of the Dockerfile brings a 2.12 pre-release.
        "torch>=2.11,<3",
        # The newest engine for each Python. Both are adapted, and tested, version by version: no ranges.
        "megatron-core==0.16.1; python_version < '3.12'",
        "megatron-core==0.19.2; python_version >= '3.12'",
        "numpy>=1.26",
        "packaging>=23",
        "pyyaml>=6",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "safetensors>=0.4",
        "tensorboard>=2.15",
        "matplotlib>=3.8",
        "rich>=13",
        # The engine's checkpoint writer imports it without declaring it, and waits for ever where it is missing.
        "psutil>=5.9",
    ],
    extras_require={
        # Its source distribution has to be built against the torch that is installed: first torch, then
        # pip install --no-build-isolation (docs/gpu.md, Installing). NVIDIA's image of the Dockerfile has it already.
        "gpu": [
            "transformer-engine[pytorch]>=2.9,<2.12; python_version < '3.12'",  # what megatron-core 0.16.1 asks for
            "transformer-engine[pytorch]>=2.14; python_version >= '3.12'",
        ],
        "hf": ["transformers>=4.56"],
        "trackers": ["wandb>=0.19", *MLFLOW],
        "data": DATA,
        # Without wandb, which megatron-core imports at every start where it is there: 0.4 s of each process. The
        # Makefile installs it beside the environment (constraints/trackers.txt).
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "mypy>=1.13",
            "transformers>=4.56",
            *DATA,
            *MLFLOW,
            "sqlalchemy>=2",
            "alembic>=1.13",  # MLflow in a database
            "tiktoken>=0.9",  # megatron-core's TikTokenizer, which ours is compared with
            # What torch's builds for CUDA bring: its interpreter and its compiler work without a GPU.
            "triton>=3.6; platform_system == 'Linux'",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
