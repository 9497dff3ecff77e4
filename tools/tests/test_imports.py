"""Imports point down: tools, services, libs (docs/architecture.md). No modules import each other in a circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (*ROOT.glob("libs/*/src"), *ROOT.glob("services/*/src"), ROOT / "tools/src")
LIBS = {"lockstep_api", "lockstep_client", "lockstep_common", "lockstep_engine"}
SERVICES = {"lockstep_router", "lockstep_state", "lockstep_worker"}
ALLOWED = {
    "lockstep_api": set(),
    "lockstep_client": {"lockstep_api"},
    "lockstep_common": set(),
    "lockstep_engine": {"lockstep_common"},
    "lockstep_router": {"lockstep_api", "lockstep_common"},
    "lockstep_state": {"lockstep_api", "lockstep_common"},
    "lockstep_worker": {"lockstep_api", "lockstep_common", "lockstep_engine"},
    "lockstep_tools": LIBS | SERVICES,
}
"""What of ours each package imports. The router and the state server need no engine, so their images have no torch."""


def module_name(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path, source): path for source in SOURCES for path in source.rglob("*.py")}


def imported(source: str, modules: set[str]) -> Iterator[str]:
    """The ones of `modules` that a module's source imports, wherever: in functions and for types alone, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports are absolute"
            names = {f"{node.module}.{each.name}" for each in node.names}
            yield from names & modules
            if not names <= modules and node.module in modules:
                yield str(node.module)


def package(module: str) -> str:
    return module.partition(".")[0]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: set(imported(path.read_text(), {*MODULES})) for name, path in MODULES.items()}


def test_each_package_imports_only_what_is_below_it(graph: dict[str, set[str]]) -> None:
    assert len(graph) > 500
    assert {package(name) for name in graph} == {*ALLOWED}
    wrong = [
        f"{name} imports {each}"
        for name, below in graph.items()
        for each in sorted(below)
        if package(each) not in ALLOWED[package(name)] | {package(name)}
    ]
    assert wrong == []


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Modules of which each is imported by the one after it and the first is the last; None if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert circle(graph) is None


@pytest.mark.parametrize(
    "source", ["import a.b", "from a import b", "from a.b import C", "def f() -> None:\n    from a.b import C"]
)
def test_each_form_of_import_is_found_and_closes_a_circle(source: str) -> None:
    found = set(imported(source, {"a.b", "c"}))
    assert found == {"a.b"}
    assert circle({"a.b": {"c"}, "c": found}) is not None
