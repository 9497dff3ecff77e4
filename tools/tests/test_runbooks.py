"""Alerts, runbooks and dashboards fit together, and they use metrics and commands that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from known_series import series
from lockstep_tools.cli import COMMANDS
from lockstep_tools.repository.metric_docs import DOCUMENT

ROOT = DOCUMENT.parents[1]
CHART = ROOT / "charts/lockstep"
RUNBOOKS = ROOT / "docs/runbooks"
RULES: list[dict[str, Any]] = [
    rule
    for path in sorted((CHART / "rules").glob("*.yaml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
BOOKS = {path.stem: path.read_text() for path in RUNBOOKS.glob("*.md") if path.stem != "README"}
METRIC = re.compile(r"\b(?:lockstep_(?:router|worker|state|tls)_\w+|lockstep:\w+:\w+)")
PROGRAMS = {"curl", "grep", "kubectl", "lockstep"}
NAMED_PODS = {"router": "$ROUTER", "state": "$STATE", "worker": "lockstep-worker-reference-0"}
KUBECTL = {"auth", "describe", "exec", "get", "logs", "port-forward", "top"}
"""What a runbook looks with: these change nothing."""


def expressions(dashboard: dict[str, Any]) -> list[str]:
    panels = [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", ()))]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    variables = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return [*queries, *variables]


def unknown(text: str) -> set[str]:
    known = series() | RECORDED
    # Prose names a histogram as a whole.
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known}
    return {name for name in METRIC.findall(text) if name not in known | families}


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    assert set(ALERTS) == set(BOOKS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"$runbooks/{name}.md"
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["labels"]["severity"] in {"critical", "warning"}


def test_the_list_of_runbooks_is_complete() -> None:
    assert re.findall(r"^- \[(\w+)\]\(\1\.md\)$", (RUNBOOKS / "README.md").read_text(), re.MULTILINE) == sorted(ALERTS)


def test_rules_use_metrics_that_exist() -> None:
    for rule in RULES:
        found = METRIC.findall(rule["expr"])
        assert found, rule
        assert set(found) <= series() | RECORDED, rule


def test_what_rules_say_names_metrics_that_exist() -> None:
    for name, rule in ALERTS.items():
        assert not unknown(str(rule["annotations"])), name


@pytest.mark.parametrize("path", sorted((CHART / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_dashboards_use_metrics_that_exist(path: Path) -> None:
    found = [(text, METRIC.findall(text)) for text in expressions(json.loads(path.read_text()))]
    assert found
    for text, names in found:
        assert names, text
        assert set(names) <= series() | RECORDED, text


@pytest.mark.parametrize("name", sorted(BOOKS))
def test_a_runbook_says_what_it_means_what_to_look_at_and_what_to_do(name: str) -> None:
    text = BOOKS[name]
    assert text.startswith(f"# {name}\n\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Look", "Do"]
    assert re.search(r"^- ", text.partition("## Do")[2], re.MULTILINE)
    assert not unknown(re.sub(r"grep .*", "", text))
    for target in re.findall(r"\]\((\w+\.md)\)", text):
        assert (RUNBOOKS / target).exists(), target


@pytest.mark.parametrize("name", sorted(BOOKS))
def test_the_commands_of_a_runbook_exist_and_change_nothing(name: str) -> None:
    (block,) = re.findall(r"^```\n(.*?)^```$", BOOKS[name], re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        for command in re.split(r" \| ", line.removesuffix(" &")) if "-E '" not in line else [line.split(" | ")[0]]:
            program, *arguments = command.split()
            assert program in PROGRAMS, line
            if program == "lockstep":
                assert arguments[0] in COMMANDS, line
            if program == "kubectl":
                assert arguments[0] in KUBECTL, line


@pytest.mark.parametrize("name", sorted(BOOKS))
def test_a_runbook_looks_at_the_pod_that_its_alert_names(name: str) -> None:
    """Another pod of the same Deployment may be well."""
    (block,) = re.findall(r"^```\n(.*?)^```$", BOOKS[name], re.MULTILINE | re.DOTALL)
    if "$labels.pod" not in str(ALERTS[name]["annotations"]):
        assert "$" not in block
        return
    for component in re.findall(r"\blockstep_(router|state|worker)_", ALERTS[name]["expr"]):
        assert NAMED_PODS[component] in block
        if component != "worker":
            assert not re.search(rf"(deploy|service)/lockstep-{component}\b", block)


@pytest.mark.parametrize("name", sorted(BOOKS))
def test_what_a_runbook_looks_for_in_metrics_is_there(name: str) -> None:
    """Each alternative of its patterns matches a line of an exposition."""
    labels = ('code="503"', 'code="504"', 'code="RESOURCE_EXHAUSTED"', 'outcome="FULL"')
    lines = [f"{each}{{{label}}} 1" for each in series() for label in labels]
    exposition = "\n".join(lines)
    for pattern in re.findall(r"metrics \| grep (?:-E )?'(.*)'$", BOOKS[name], re.MULTILINE):
        for part in re.split(r"\|(?![^(]*\))", pattern):
            assert re.search(part, exposition, re.MULTILINE), part


def test_every_alert_is_tested_to_fire_and_to_resolve() -> None:
    tests = yaml.safe_load((CHART / "tests/alerts.yaml").read_text())["tests"]
    assert {test["name"] for test in tests} == set(ALERTS)
    for test in tests:
        fires, resolves = test["promql_expr_test"]
        assert f'alertname="{test["name"]}"' in fires["expr"]
        assert f'alertname="{test["name"]}"' in resolves["expr"]
        assert (bool(fires["exp_samples"]), bool(resolves["exp_samples"])) == (True, False)


def test_the_burn_rates_are_those_of_three_nines() -> None:
    budget = [rule["expr"] for name, rule in ALERTS.items() if "ErrorBudget" in name]
    found = {re.sub(r"\s", "", each) for text in budget for each in re.findall(r"(?:> )([\d. *]*0\.001)", text)}
    assert found == {"14.4*0.001", "6*0.001", "3*0.001", "0.001"}


def test_the_check_of_the_chart_runs_both_files_of_rule_tests() -> None:
    check = (CHART / "tests/check").read_text()
    assert "promtool test rules tests/rules.yaml tests/alerts.yaml" in check
