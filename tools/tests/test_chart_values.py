import stat
from pathlib import Path

import pytest
from lockstep_tools.repository.chart_values import Case, cases, described, flat, inert, undescribed, untested

VALUES = """\
# A note, not a description.
shared:
  # -- How many
  count: 2
  # -- A map that is one value,
  # described in two lines
  limits:
    memory: 1Gi
  probe: {period: 1, threshold: 2}  # all of it undescribed
# -- A list
items: []
bare: 1
"""


def test_a_value_is_what_has_a_description():
    assert described(VALUES) == {("shared", "count"), ("shared", "limits"), ("items",)}


def test_what_has_none_is_named_unless_a_map_around_it_has_one():
    assert undescribed(VALUES) == {("shared", "probe", "period"), ("shared", "probe", "threshold"), ("bare",)}


def test_flat_keeps_empty_maps_and_lists_whole():
    values = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}]}
    assert dict(flat(values)) == {("a", "b"): 1, ("a", "c"): {}, ("d",): [{"e": 2}]}


SUITE = """\
suite: s
tests:
  - it: sets
    set: {shared.count: 3, 'shared.limits': {memory: 2Gi}, 'labels.e\\.com/a': b}
    capabilities: {apiVersions: [keda.sh/v1alpha1]}
  - it: sets nothing
"""


def test_a_value_is_tested_when_it_or_a_part_of_it_is_set(tmp_path: Path):
    suite = tmp_path / "s_test.yaml"
    suite.write_text(SUITE)
    tests = cases([suite])
    assert tests[0].api_versions == ("keda.sh/v1alpha1",)
    assert set(tests[0].settings) == {
        ("shared", "count"),
        ("shared", "limits", "memory"),
        ("labels", "e\\.com/a"),
    }
    assert tests[1].settings == {}
    assert untested(described(VALUES), tests) == {("items",)}


@pytest.fixture
def helm(tmp_path: Path) -> str:
    """Renders the lines that say `count`, whatever the chart."""
    program = tmp_path / "helm"
    program.write_text("#!/bin/sh\ngrep count || echo none\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_a_value_that_changes_nothing_is_found(helm: str):
    tests = [Case("t", {("shared", "count"): 3, ("shared", "other"): 4}, ("x/v1",)), Case("u", {}, ())]
    assert inert({("shared", "count"), ("shared", "other")}, tests, helm) == {("shared", "other")}
