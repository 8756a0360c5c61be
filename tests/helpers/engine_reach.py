"""Tell which test files can reach the engine, from their imports alone.

The suite runs on two releases of megatron-core, one with each Python. A file of tests that cannot reach what differs
between the two environments has one result in both; `--engine-only` leaves it out. Followed are imports at any depth of
a file, those in functions too, through the package, tools and tests. In doubt a file reaches the engine: where it
starts a process, loads a file by its path, or takes a fixture of tests/conftest.py that does.

Not followed are other distributions: those count that have another version in one constraints file than in the other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ("constraints/constraints-py311.txt", "constraints/constraints-py312.txt")

# What another process runs, and what asks for installed versions, cannot be followed.
OPAQUE = {"subprocess", "importlib.metadata"}
OPAQUE_IN_TESTS = {"multiprocessing", "runpy"}
OPAQUE_CALLS = {"os.fork", "os.system", "os.popen", "os.posix_spawn", "os.execv", "os.execve", "exec", "eval"}
# One suite computes half precision in another way than the other.
OWN_DIFFERENCES = {"megatron_moe/platform/half_products.py": "half-precision products"}
# Its functions run while the engine is imported: what they import comes with the engine.
RUNS_WITH_ENGINE = {"megatron_moe/platform/cpu_adaptor.py"}


@dataclass
class Facts:
    """What one file needs: files of this repository, and the reason why it reaches the engine by itself."""

    files: set[Path] = field(default_factory=set)
    reason: str | None = None


class EngineReach:
    """The imports of a repository's files.

    Args:
        root: the repository.
        distributions: canonical names of the distributions that count as the engine.
    """

    def __init__(self, root: Path, distributions: set[str]) -> None:
        self.root, self._distributions = root, distributions
        self._facts: dict[Path, Facts] = {}
        self._modules: dict[str, list[Path]] = {}

    @cached_property
    def _differing(self) -> set[str]:
        """Names of the top-level modules that differ. A distribution that is not installed is taken by its own name."""
        owners = {name: {canonical(one) for one in owned} for name, owned in packages_distributions().items()}
        named = {one.replace("-", "_") for one in self._distributions}
        return named | {name for name, owned in owners.items() if owned & self._distributions}

    @cached_property
    def _fixtures(self) -> set[str]:
        """Names of the fixtures of tests/conftest.py that a test has to ask for."""
        path = self.root / "tests" / "conftest.py"
        names = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []:
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
            if any("pytest.fixture" in mark and "autouse" not in mark for mark in marks):
                names.add(node.name)
        return names

    def chain(self, test: Path) -> list[str]:
        """Return how a file reaches the engine, file by file and the reason at the end; empty where it does not."""
        start = test.resolve()
        before: dict[Path, Path | None] = {start: None}
        waiting = [start, *self._conftests(start)]
        before.update(dict.fromkeys(waiting[1:], start))
        while waiting:
            path = waiting.pop(0)
            facts = self._facts_of(path)
            if facts.reason is not None:
                names, at = [facts.reason], path
                while at is not None:
                    names.append(str(at.relative_to(self.root)))
                    at = before[at]
                return names[::-1]
            for found in sorted(facts.files - before.keys()):
                before[found] = path
                waiting.append(found)
        return []

    def _conftests(self, test: Path) -> Iterator[Path]:
        """The conftest.py of each folder above a test. That of tests/ itself is known by its fixtures."""
        for folder in test.parents:
            if folder in (self.root, self.root / "tests"):
                return
            if (folder / "conftest.py").exists():
                yield folder / "conftest.py"

    def _facts_of(self, path: Path) -> Facts:
        if path not in self._facts:
            reader = _Reader(self, path)
            reader.visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))
            own = OWN_DIFFERENCES.get(str(path.relative_to(self.root)))
            self._facts[path] = Facts(reader.files - {path}, own or reader.reason)
        return self._facts[path]

    def module(self, name: str) -> list[Path]:
        """The files of this repository that `import name` runs: each package's __init__.py and the module's own."""
        if name not in self._modules:
            self._modules[name] = self._module(name)
        return self._modules[name]

    def _module(self, name: str) -> list[Path]:
        found, at = [], self.root
        for part in name.split("."):
            at = at / part
            if (at / "__init__.py").exists():
                found.append(at / "__init__.py")
        if at.with_suffix(".py").exists():
            found.append(at.with_suffix(".py"))
        return found

    def is_module(self, name: str) -> bool:
        at = self.root / Path(*name.split("."))
        return at.is_dir() or at.with_suffix(".py").exists()


_LAST_WORDS = ("import_module", "spec_from_file_location", "__import__", *(one.split(".")[-1] for one in OPAQUE_CALLS))


class _Reader(ast.NodeVisitor):
    """Collects one file's facts."""

    def __init__(self, reach: EngineReach, path: Path) -> None:
        self._reach, self._path = reach, path
        self._is_test = path.is_relative_to(reach.root / "tests")
        self._opaque = OPAQUE | (OPAQUE_IN_TESTS if self._is_test else set())
        self._packages: dict[str, str] = {}  # local name -> the package of this repository that it is bound to
        self.files: set[Path] = set()
        self.reason: str | None = None

    def _because(self, reason: str, node: ast.AST) -> None:
        self.reason = self.reason or f"{reason} (line {getattr(node, 'lineno', 0)})"

    def _needs(self, name: str, node: ast.AST) -> None:
        self.files.update(self._reach.module(name))
        if name.split(".")[0] in self._reach._differing:
            self._because(name, node)
        if any(name == one or name.startswith(one + ".") for one in self._opaque):
            self._because(f"{name} cannot be followed", node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)
            return
        for child in node.orelse:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if str(self._path.relative_to(self._reach.root)) not in RUNS_WITH_ENGINE:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._needs(alias.name, node)
            bound = alias.name if alias.asname else alias.name.split(".")[0]
            self._packages[alias.asname or bound] = bound

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            self._because("a relative import", node)
            return
        self._needs(node.module, node)
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            self._needs(name, node)
            if self._reach.is_module(name):
                self._packages[alias.asname or alias.name] = name
            else:
                self._taken(node.module, alias.name, node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        package = self._packages.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if package is not None:
            self._taken(package, node.attr, node)
        self.generic_visit(node)

    def _taken(self, package: str, name: str, node: ast.AST) -> None:
        """A name is taken out of a package, whose __getattr__ may import it then."""
        path = self._reach.root / Path(*package.split(".")) / "__init__.py"
        if path == self._path or not path.exists() or self._reach.is_module(f"{package}.{name}"):
            return
        bound, promised = names_of(path)
        if name in promised:
            self._needs(promised[name], node)
        elif name not in bound and not name.startswith("__"):
            self._because(f"{package}.{name} cannot be followed", node)

    def visit_Call(self, node: ast.Call) -> None:
        last = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if last.endswith(_LAST_WORDS):  # few calls: to write out every one would take a third of the time
            self._see_call(node, ast.unparse(node.func))
        self.generic_visit(node)

    def _see_call(self, node: ast.Call, called: str) -> None:
        if called.endswith("import_module"):
            constant = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(constant, str):
                self._needs(constant, node)
            elif self._is_test:
                self._because("a computed import", node)
        elif called.endswith(("spec_from_file_location", "__import__")) or (self._is_test and called in OPAQUE_CALLS):
            self._because(f"{called}() cannot be followed", node)

    def visit_arg(self, node: ast.arg) -> None:
        if self._is_test and node.arg in self._reach._fixtures:
            self._because(f"the fixture {node.arg}", node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Fixtures are also asked for by name."""
        if self._is_test and isinstance(node.value, str) and node.value in self._reach._fixtures:
            self._because(f"the fixture {node.value}", node)


@cache
def names_of(package: Path) -> tuple[set[str], dict[str, str]]:
    """Return the names that an __init__.py binds, and those that it imports for type checkers only, with their module:
    its __getattr__ imports these when they are asked for."""
    bound: set[str] = set()
    promised: dict[str, str] = {}
    for node in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            imports = [one for one in node.body if isinstance(one, ast.ImportFrom) and one.module]
            promised |= {alias.asname or alias.name: one.module for one in imports for alias in one.names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    return bound, promised


def canonical(name: str) -> str:
    """Return a distribution's name as package indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(path: Path) -> dict[str, str]:
    """Return the versions of a constraints file by distribution."""
    lines = (line.partition(";")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def of_this_repository() -> EngineReach:
    """Return the imports of this repository; the engine is what the two constraints files pin differently."""
    one, other = (pinned(ROOT / name) for name in CONSTRAINTS)
    return EngineReach(ROOT, {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)})
