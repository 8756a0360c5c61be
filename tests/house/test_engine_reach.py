"""What `--engine-only` leaves out cannot reach the engine: through no import, fixture or process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.engine_reach import ROOT, EngineReach, of_this_repository, pinned

pytestmark = pytest.mark.one_engine

FILES = {
    "pkg/__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.model import Model\n"
    "def __getattr__(name):\n    ...\n",
    "pkg/model.py": "import torch\ndef build():\n    from megatron.core.models import gpt\n",
    "pkg/loop.py": "from pkg import model\n",
    "pkg/text.py": "import json\n",
    "tests/conftest.py": "import pytest\n@pytest.fixture(scope='session')\ndef ranks(): ...\n"
    "@pytest.fixture(autouse=True)\ndef clean(): ...\n",
    "tests/shared/conftest.py": "from pkg import loop\n",
    "tests/helper.py": "import pkg.loop\n",
}


def chain(folder: Path, text: str, **others: str) -> list[str]:
    """The chain of a test with this text, in a small repository of which other files may be replaced."""
    for name, content in {**FILES, "tests/test_it.py": text, **others}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return EngineReach(folder, {"megatron-core"}).chain(folder / "tests" / "test_it.py")


def test_an_import_of_an_import_is_followed_into_functions(tmp_path: Path) -> None:
    text = "from tests import helper\n"
    found = chain(tmp_path, text)
    assert found[:-1] == ["tests/test_it.py", "tests/helper.py", "pkg/loop.py", "pkg/model.py"]
    assert "megatron.core.models" in found[-1]
    # without one link of the chain the file is free
    assert chain(tmp_path, text, **{"pkg/loop.py": "import json\n"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "from pkg import Model\n",
        "import pkg\npkg.Model\n",
        "from pkg import SomethingElse\n",
        "def test_a():\n    from pkg.model import build\n",
        "import importlib\nimportlib.import_module('pkg.model')\n",
        "import importlib\nimportlib.import_module(input())\n",
        "import importlib.util\nimportlib.util.spec_from_file_location('a', 'b.py')\n",
        "import subprocess\n",
        "import os\nos.fork()\n",
        "from importlib import metadata\n",
        "def test_a(ranks): ...\n",
        "import pytest\n@pytest.mark.usefixtures('ranks')\ndef test_a(): ...\n",
        "from . import helper\n",
    ],
)
def test_in_doubt_a_file_reaches_the_engine(tmp_path: Path, text: str) -> None:
    assert chain(tmp_path, text) != []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nfrom pkg import text\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg import model\n",
        "import pkg\npkg.__version__\n",
        "def test_a(tmp_path): ...\n",
    ],
)
def test_what_cannot_reach_it_is_told_apart(tmp_path: Path, text: str) -> None:
    assert chain(tmp_path, text) == []


def test_the_conftest_of_a_folder_counts_for_the_tests_below_it(tmp_path: Path) -> None:
    chain(tmp_path, "")
    (tmp_path / "tests" / "shared" / "test_b.py").write_text("import json\n")
    assert EngineReach(tmp_path, {"megatron-core"}).chain(tmp_path / "tests" / "shared" / "test_b.py") != []


def test_a_version_with_a_marker_is_the_same_version(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("# torch==9\nA_b==1.0; python_version >= '3.11'\nc==2\n")
    assert pinned(tmp_path / "one.txt") == {"a-b": "1.0", "c": "2"}


def test_files_that_are_left_out_import_without_the_engine() -> None:
    """The graph against Python itself: an import of the engine raises, and nothing notices."""
    reach = of_this_repository()
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    free = [path for path in tests if not reach.chain(path)]
    assert free and len(free) < len(tests)
    program = (
        "import sys, megatron_moe\n"
        "sys.modules['megatron.core'] = None\n"
        "from importlib import import_module\n"
        "for name in sys.argv[1:]: import_module(name)\n"
        "assert 'megatron_moe.platform.half_products' not in sys.modules\n"
    )
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in free]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_case_that_one_engine_is_enough_for_is_left_out_and_the_others_stay() -> None:
    named = "tests/model/test_fully_sharded_ranks.py::test_all_tokens_on_one_ranks_experts_train_as_with_whole_weights"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--engine-only", named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert f"{named}[fp16]" in done.stdout and f"{named}[fp32]" not in done.stdout, done.stdout
    assert "and 1 that are marked one_engine" in done.stdout
