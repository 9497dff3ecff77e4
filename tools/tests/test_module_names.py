"""A module that tests import from a folder of tests has a name of its own in the repository: all these folders are on
one path when several suites run in one process, and of two modules with a name one hides the other.
"""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "tests", *ROOT.glob("libs/*/tests"), *ROOT.glob("services/*/tests"), ROOT / "tools/tests")
_BY_PACKAGE = {"__init__", "__main__", "conftest"}


def imported(path: Path) -> set[str]:
    """The first parts of the names of modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_no_two_modules_that_tests_import_have_one_name() -> None:
    files = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    assert len(files) > 300
    places = defaultdict(list)
    for path in files:
        places[path.stem].append(str(path.relative_to(ROOT)))
    wanted = set().union(*map(imported, files)) - _BY_PACKAGE
    assert {name: where for name, where in places.items() if len(where) > 1 and name in wanted} == {}
