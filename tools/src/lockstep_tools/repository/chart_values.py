"""Check the chart's values: each has a description and a test, and each does something.

A value is what has a description (`# -- …`) in `values.yaml`. It has a test when a test of helm-unittest sets it, and
it does something when the chart renders differently without that setting.
`python -m lockstep_tools.repository.chart_values` checks the first two; `--render helm` the third as well, by running
that program twice or more for each value.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep_tools.repository.chart_schema import CHART

Key = tuple[str, ...]
"""The keys that lead to a value: `router.replicas` is `("router", "replicas")`."""

_DESCRIBED = re.compile(r"\s*# -- \S")
_HELM_TIMEOUT_S = 60
_HELMS_AT_ONCE = 4


@dataclass(frozen=True)
class Case:
    """A test of helm-unittest: the values that it sets, and its cluster and release."""

    title: str
    settings: dict[Key, Any]
    api_versions: tuple[str, ...]

    def sets(self, key: Key) -> list[Key]:
        """Those of its settings that set this value, a part of it or a map around it."""
        return [each for each in self.settings if each[: len(key)] == key or key[: len(each)] == each]


def described(text: str) -> set[Key]:
    """The values of a `values.yaml` that have a description."""
    lines = text.splitlines()
    found: set[Key] = set()
    for key, line in _lines(yaml.compose(text)):
        above = line - 1
        while above >= 0 and lines[above].lstrip().startswith("#") and not _DESCRIBED.match(lines[above]):
            above -= 1
        if above >= 0 and _DESCRIBED.match(lines[above]):
            found.add(key)
    return found


def undescribed(text: str) -> set[Key]:
    """The values without a description: neither the value nor a map around it has one."""
    known = described(text)
    leaves = {key for key, value in flat(yaml.safe_load(text)) if not isinstance(value, dict) or not value}
    return {leaf for leaf in leaves if not any(leaf[: len(key)] == key for key in known)}


def _lines(node: Any, prefix: Key = ()) -> Iterator[tuple[Key, int]]:
    """Each key that has a line of its own, with that line, from 0."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        for name, value in node.value:
            key = (*prefix, name.value)
            yield key, name.start_mark.line
            yield from _lines(value, key)


def flat(values: dict[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """The values in nested maps, each with its key; an empty map is a value too."""
    for name, value in values.items():
        key = (*prefix, str(name))
        if isinstance(value, dict) and value:
            yield from flat(value, key)
        else:
            yield key, value


def cases(suites: Iterable[Path]) -> list[Case]:
    """The tests of helm-unittest in these files."""
    found = []
    for path in suites:
        for test in yaml.safe_load(path.read_text())["tests"]:
            given = {tuple(re.split(r"(?<!\\)\.", name)): value for name, value in test.get("set", {}).items()}
            settings: dict[Key, Any] = {}
            for key, value in given.items():
                settings |= dict(flat(value, key)) if isinstance(value, dict) and value else {key: value}
            versions = tuple(test.get("capabilities", {}).get("apiVersions", ()))
            found.append(Case(f"{path.name}: {test['it']}", settings, versions))
    return found


def untested(values: set[Key], tests: list[Case]) -> set[Key]:
    """The values that no test sets."""
    return {key for key in values if not any(test.sets(key) for test in tests)}


def inert(values: set[Key], tests: list[Case], helm: str) -> set[Key]:
    """The values that change nothing in any test that sets them."""
    rendered: dict[int, str] = {}

    def dead(key: Key) -> bool:
        return not any(
            rendered[id(test)] != _render(helm, test, set(mine)) for test in tests if (mine := test.sets(key))
        )

    ordered = sorted(values)
    used = [test for test in tests if any(test.sets(key) for key in ordered)]
    with ThreadPoolExecutor(_HELMS_AT_ONCE) as pool:
        rendered.update(zip(map(id, used), pool.map(lambda test: _render(helm, test, set()), used), strict=True))
        return {key for key, is_dead in zip(ordered, pool.map(dead, ordered), strict=True) if is_dead}


def _render(helm: str, test: Case, without: set[Key]) -> str:
    """What the chart renders, or the error, with a test's settings except these."""
    values: dict[str, Any] = {}
    for key, value in test.settings.items():
        if key not in without:
            _put(values, key, value)
    versions = [word for version in test.api_versions for word in ("--api-versions", version)]
    done = subprocess.run(
        [helm, "template", "lockstep", str(CHART), "--values", "-", *versions],
        input=yaml.safe_dump(values),
        capture_output=True,
        text=True,
        timeout=_HELM_TIMEOUT_S,
        check=False,
    )
    return done.stdout + done.stderr


def _put(values: dict[str, Any], key: Key, value: Any) -> None:
    for name in key[:-1]:
        values = values.setdefault(name, {})
    values[key[-1]] = value


def _complaint(what: str, keys: set[Key]) -> list[str]:
    return [f"values.yaml: {'.'.join(key)} {what}" for key in sorted(keys)]


def main() -> None:
    """Check the values; returns 1 and prints a line for each wrong one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", metavar="HELM", help="check with this program that each value does something")
    helm = parser.parse_args().render
    text = (CHART / "values.yaml").read_text()
    values = described(text)
    tests = cases(sorted((CHART / "tests").glob("*_test.yaml")))
    wrong = _complaint("has no description", undescribed(text)) + _complaint("has no test", untested(values, tests))
    if helm and not wrong:
        wrong = _complaint("changes nothing that is rendered", inert(values, tests, helm))
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(values)} values, each described and tested" + (", each of effect" if helm else ""))


if __name__ == "__main__":
    main()
