"""The README's examples run, and its table of source files is complete."""

import re
from pathlib import Path

import lockstep_client
import pytest
from fake_router import FakeRouter, serving

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SOURCES = Path(lockstep_client.__file__).parent


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, capsys):
    router = FakeRouter()
    with serving(router, cuts=[700]) as server:
        example = EXAMPLES[number].replace("http://router-a:8000/v1", server.url).replace('…"', 'key"')
        example = example.replace("http://router-b:8000/v1", "http://127.0.0.1:9/v1")
        exec(compile(example, f"README example {number}", "exec"), {"__name__": "example"})
    assert len(capsys.readouterr().out) > 40
    assert len(router.generations) == 1


def test_every_module_is_in_the_table():
    section = README.partition("\n## Source\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row.split("|")[1])]
    modules = [file.name for file in SOURCES.glob("*.py") if not file.name.startswith("__")]
    assert sorted(named) == sorted(modules)
