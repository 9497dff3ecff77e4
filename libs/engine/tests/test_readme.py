"""The README's table of files is complete and names no file that is gone."""

import re
from pathlib import Path

import lockstep_engine

SOURCES = Path(lockstep_engine.__file__).parent
README = Path(__file__).parents[1] / "README.md"


def test_every_module_is_in_the_table():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+(?:\.py|/))`", row.split("|")[1])}
    packages = {f"{file.parent.name}/" for file in SOURCES.glob("*/__init__.py")}
    assert named == {file.name for file in SOURCES.glob("*.py")} - {"__init__.py"} | packages
