"""The README's table of source files is complete and names no file that is gone."""

import re
from pathlib import Path

import lockstep_state

SOURCES = Path(lockstep_state.__file__).parent
README = Path(__file__).parents[1] / "README.md"


def test_every_module_is_in_the_table():
    section = README.read_text().partition("\n## Source\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[1])]
    modules = [file for file in SOURCES.rglob("*.py") if not file.name.startswith("__")]
    assert sorted(named) == sorted(str(file.relative_to(SOURCES)) for file in modules)
