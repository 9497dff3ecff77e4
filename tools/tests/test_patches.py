"""Tests patch no private name (CONTRIBUTING.md, "Tests"): what they replace or shorten is public, so that it is seen in
the source that somebody relies on it. One exception is not seen here: `launch_count.py` in the engine's tests counts
the launches of all kernels, whatever their names.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "tests", *ROOT.glob("libs/*/tests"), *ROOT.glob("services/*/tests"), ROOT / "tools/tests")


def is_private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.startswith("__")


def targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to, or deletes."""
    match node:
        case ast.Assign(targets=found) | ast.Delete(targets=found):
            return found
        case ast.AugAssign(target=found) | ast.AnnAssign(target=found):
            return [found]
    return []


def patched(source: str) -> Iterator[str]:
    """The private names of others that a module replaces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from listed(node)
        if is_patch(node):
            yield from filter(is_private, texts(node.args[:2]))
        for outer in targets(node):
            for each in ast.walk(outer):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store | ast.Del):
                    is_own = isinstance(each.value, ast.Name) and each.value.id in {"self", "cls"}
                    if is_private(each.attr) and not is_own:
                        yield each.attr


def is_patch(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"setattr", "delattr", "object"}


def texts(nodes: Iterable[ast.AST]) -> list[str]:
    return [each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def listed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The private names in a function that patches names which it has in a variable."""
    nodes = list(ast.walk(function))
    if not any(is_patch(node) and not texts(node.args[:2]) for node in nodes):
        return []
    return [text for text in texts(nodes) if text.isidentifier() and is_private(text)]


def test_no_private_name_is_patched() -> None:
    files = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    assert len(files) > 300
    found = [f"{path.relative_to(ROOT)} {name}" for path in files for name in patched(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'monkeypatch.setattr(module, "_LIMIT", 1)',
        'monkeypatch.setattr("package.module._LIMIT", 1)',
        'patch.object(thing, "_method")',
        "thing._limit = 1",
        "first, thing.part._limit = 1, 2",
        "del thing._limit",
        "thing._count += 1",
        'def test():\n    for name in ("limit", "_limit"):\n        patch.setattr(thing, name, 1)',
    ],
)
def test_each_kind_of_patch_is_found(source: str) -> None:
    assert len(list(patched(source))) == 1


@pytest.mark.parametrize("source", ["self._own = 1", 'setattr(thing, "limit", 1)', "thing.limit = thing._limit"])
def test_what_is_no_patch_is_not_found(source: str) -> None:
    assert list(patched(source)) == []
