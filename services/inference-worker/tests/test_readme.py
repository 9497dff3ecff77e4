"""The README's table of files is complete and names no file that is gone."""

import re
from pathlib import Path

import lockstep_worker

SOURCES = Path(lockstep_worker.__file__).parent
README = Path(__file__).parents[1] / "README.md"


def test_every_module_is_in_the_table():
    section = README.read_text().partition("\n## Files\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row.split("|")[1])]
    assert sorted(named) == sorted(file.name for file in SOURCES.glob("*.py") if not file.name.startswith("__"))
