"""The documents that say which kinds of tests there are leave none out."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}


@pytest.mark.parametrize(
    ("document", "form"), [("docs/architecture.md", "`tests/{}`"), ("tests/README.md", "| `{}` |")]
)
def test_each_folder_of_tests_is_in_the_table(document: str, form: str) -> None:
    assert len(FOLDERS) >= 10
    text = (ROOT / document).read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert sorted(folder for folder in FOLDERS if not any(form.format(folder) in row for row in rows)) == []
