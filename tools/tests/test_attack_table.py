"""The table of attacks in tests/README.md: each class has a test, and each test that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HEADING = "## Attacks that hurt other servers"
_FOLDERS = (
    "tests",
    "tools/tests",
    "libs/engine/tests",
    "services/router/tests",
    "services/inference-worker/tests",
    "services/kv-state-server/tests",
)
_CLASSES = 10


def rows() -> list[tuple[str, str]]:
    """The classes of attacks, and what tests them."""
    section = (ROOT / "tests/README.md").read_text().partition(_HEADING)[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [(name, tests) for name, tests in cells if name not in ("class", "---")]


def sources(name: str) -> list[str]:
    """The contents of the test files with this name, which may have its folder below `tests`."""
    found = [ROOT / folder / name for folder in _FOLDERS if (ROOT / folder / name).is_file()]
    return [path.read_text() for path in found]


def test_every_class_names_tests_that_exist() -> None:
    found = rows()
    assert len(found) == _CLASSES
    for name, tests in found:
        source: list[str] = []
        named = re.findall(r"`([^`]+)`", tests)
        assert any("test_" in each for each in named), name
        for each in named:
            file, _, function = each.rpartition("::") if "::" in each else (each, "", "")
            function = function or (each.removeprefix("…") if each.startswith("…") else "")
            if file.endswith(".py"):
                source = sources(file)
                assert source, f"{name}: there is no {file}"
            if function:
                wanted = re.compile(rf"def {re.escape(function.removeprefix('…'))}\b")
                assert any(wanted.search(text) for text in source), f"{name}: there is no {each}"
