"""`make check`: format, lint, types and the unit tests that a change touches, in a minute and a half.

A change is the difference from the common ancestor with `main`, committed or not. A test file is touched when it is
part of the change or imports a changed module, directly or through others. The nearest files run first. Files that have
not begun when the time is over are left to `make test`; the last line has their number.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]

_BUDGET_S = 80.0
_MIN_FOR_TESTS_S = 25.0
_SOURCES = ("libs", "services", "tools", "tests", "conftest.py")
_UNIT_TESTS = re.compile(r"(libs|services)/[^/]+/tests/|tools/tests/|tests/deployment/")
_MODULES = re.compile(r".*/src/(lockstep_.*)\.py")
_NAME = re.compile(r"lockstep_[a-z]+(\.[a-z_]+)*\.?")
_BY_FOLDER = {
    "charts/": ("tools/tests/test_chart_schema.py", "tools/tests/test_chart_values.py", "tests/deployment"),
    "k8s/": ("tests/deployment",),
    "k8s/chaos/": ("tools/tests/test_chaos.py", "tools/tests/test_chaos_clean.py"),
    "libs/engine/src/lockstep_engine/kernels/": ("libs/engine/tests/test_kernels.py",),
    "requirements": ("tools/tests/test_images.py",),
    "skaffold.yaml": ("tests/deployment",),
    "tools/images/": ("tools/tests/test_images_install.py",),
}
"""Tests of files that Python does not import, by the beginning of the path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks one after the other; stops at the first that fails.

    Returns:
        0 when all hold, else the exit code of the first that does not.
    """
    parser = argparse.ArgumentParser(prog="python -m lockstep_tools.repository.check", description=__doc__)
    parser.add_argument("--base", default="main", help="compare with the common ancestor with it (default: main)")
    parser.add_argument("--list", action="store_true", help="only list the tests that the change touches")
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    try:
        changed = changed_files(ROOT, options.base)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        print(f"check: git cannot tell what has changed: {said}", file=sys.stderr)
        return 1
    tests = touched_tests(ROOT, changed, importers_of(ROOT))
    if options.list:
        print("\n".join(tests))
        return 0
    python = [path for path in changed if path.endswith(".py") and path.startswith(_SOURCES) and (ROOT / path).exists()]
    for name, command in _steps(python):
        started_s = time.monotonic()
        if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"check: {name} failed", file=sys.stderr)
            return code
        print(f"check: {name} holds ({time.monotonic() - started_s:.0f} s)", flush=True)
    return _run_tests(tests, max(_MIN_FOR_TESTS_S, _BUDGET_S - (time.monotonic() - began_s)))


def changed_files(root: Path, base: str) -> list[str]:
    """Paths that differ from the common ancestor of HEAD and `base`, new ones too; of HEAD where there is no `base`.

    Raises:
        subprocess.CalledProcessError: git fails, as in a directory that is no repository or belongs to another user.
        OSError: there is no git.
    """

    def git(*arguments: str, check: bool = True) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=check).stdout

    ancestor = git("merge-base", "HEAD", base, check=False).strip() or "HEAD"
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", ancestor).splitlines(), *new.splitlines()})


def touched_tests(root: Path, changed: Sequence[str], importers: Mapping[str, Set[str]]) -> list[str]:
    """The files of unit tests that a change touches, the nearest first."""
    distance = dict.fromkeys(changed, 0)
    queue = deque(changed)
    while queue:
        path = queue.popleft()
        for importer in importers.get(path, ()):
            if importer not in distance:
                distance[importer] = distance[path] + 1
                queue.append(importer)
    for path in changed:
        for beginning, tests in _BY_FOLDER.items():
            if path.startswith(beginning):
                distance |= {test: min(1, distance.get(test, 1)) for each in tests for test in _test_files(root, each)}
    found = [path for path in distance if _is_unit_test(path) and (root / path).exists()]
    return sorted(found, key=lambda path: (distance[path], path))


def _steps(python: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    programs = Path(sys.executable).parent
    if python:
        yield "format", [str(programs / "ruff"), "format", "--check", "--quiet", *python]
        yield "lint", [str(programs / "ruff"), "check", "--quiet", *python]
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("*/*/src") if path.parent.name != "api")
    yield "types", [str(programs / "mypy"), *sources, "tools/src", "--no-error-summary"]
    yield "stubs", [sys.executable, "-m", "lockstep_tools.repository.gen_protos", "--check"]


def _run_tests(tests: Sequence[str], budget_s: float) -> int:
    if not tests:
        print("check: no unit test is touched")
        return 0
    workers = min(2, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    command += ["-m", "not slow and not exhaustive", "--maxfail=5", f"--budget-s={budget_s:.0f}"]
    command += ["-r", "fE", "-v", "-q", *tests]
    done = subprocess.run(
        command, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    print(done.stdout, end="")
    return done.returncode


def importers_of(root: Path) -> dict[str, set[str]]:
    """For each Python file of the repository, those that import it."""
    files = [path for folder in ("libs", "services", "tools", "tests") for path in (root / folder).rglob("*.py")]
    relative = {str(path.relative_to(root)): path for path in files if "build" not in path.parts}
    modules = {_module(path): path for path in relative}
    found: dict[str, set[str]] = {}
    for path, file in relative.items():
        for name in _imports(file):
            for imported in _resolve(name, path, modules, relative):
                found.setdefault(imported, set()).add(path)
        if (fixtures := str(Path(path).with_name("conftest.py"))) in relative:
            found.setdefault(fixtures, set()).add(path)
    return found


def _module(path: str) -> str:
    """The dotted name of a package's module; for a test or a script its path."""
    match = _MODULES.fullmatch(path)
    return match[1].replace("/", ".").removesuffix(".__init__") if match else path


def _imports(file: Path) -> set[str]:
    """Dotted names that a file imports, in functions too; `from a import b` gives both `a` and `a.b`.

    A string that is a module's name counts: it is imported by that name, or run by another process.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
            names.add(node.value)
    return names


def _resolve(name: str, importer: str, modules: Mapping[str, str], files: Mapping[str, Path]) -> list[str]:
    """The files of an imported name: a module, all modules of `package.`, or a helper beside tests or scripts."""
    if name in modules:
        return [modules[each] for each in (name, f"{name}.__main__") if each in modules]
    if name.endswith("."):
        return [path for module, path in modules.items() if module.startswith(name)]
    folders = (str(Path(importer).parent), "tests", "tests/doubles", "tools/bench", "tools/tests")
    helpers = (f"{folder}/{name.replace('.', '/')}.py" for folder in folders)
    return [path for path in helpers if path in files][:1]


def _test_files(root: Path, path: str) -> list[str]:
    if path.endswith(".py"):
        return [path]
    return sorted(str(file.relative_to(root)) for file in (root / path).glob("test_*.py"))


def _is_unit_test(path: str) -> bool:
    return bool(_UNIT_TESTS.match(path)) and Path(path).name.startswith("test_")


if __name__ == "__main__":
    sys.exit(main())
