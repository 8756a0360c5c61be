"""The sources of the repository as syntax trees, for tests that read them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_moe"
TOOLS = ROOT / "megatron_moe_tools"
PACKAGES = ("megatron_moe", "megatron_moe_tools")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's tree: walking takes longer than parsing, and many rules look at each."""
    return list(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    """A file as the tables write it: relative to the package, or to the repository where it is outside."""
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


@cache
def imported(path: Path) -> list[tuple[str, int]]:
    """Absolute name and line of everything a file imports, also in functions, for typing only, or by import_module."""
    found: list[tuple[str, int]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found.append((argument.value, node.lineno))
    return found
