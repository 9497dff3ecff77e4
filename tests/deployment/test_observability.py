"""k8s/observability without a cluster: its rules are of every release."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
STACK = ROOT / "k8s/observability"
RULES = STACK / "rules/lockstep.yaml"
TESTS = ROOT / "charts/lockstep/tests"
ONE, OTHER = ("serving", "chat"), ("lockstep", "search")
"""Namespace and release."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def check_rules(directory: Path, tests: list[dict[str, Any]]) -> None:
    file = directory / "tests.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


def series(of: tuple[str, str], metric: str, values: str, **labels: str) -> dict[str, str]:
    given = {"namespace": of[0], "release": of[1], **labels}
    selector = ",".join(f'{name}="{value}"' for name, value in given.items())
    return {"series": f"{metric}{{{selector}}}", "values": values}


def firing(alert: str, at: str, *of: tuple[str, str]) -> dict[str, Any]:
    """Exactly these releases have the alert."""
    samples = [{"labels": f'{{namespace="{namespace}",release="{release}"}}', "value": 1} for namespace, release in of]
    query = f'count by (namespace, release) (ALERTS{{alertstate="firing",alertname="{alert}"}})'
    return {"expr": query, "eval_time": at, "exp_samples": samples}


def test_no_rule_is_of_one_release() -> None:
    text = RULES.read_text()
    assert not re.search(r'(?<!\$labels\.)\b(namespace|release)\s*(=|=~|:)\s*["$\w]', text)
    assert not re.search(r"\$(namespace|release|runbooks)\b|absent\(", text)


@needs_promtool
def test_each_of_two_releases_has_its_own_alerts(tmp_path: Path) -> None:
    given = [
        series(ONE, "lockstep_router_streams", "3x60", pod="r-0"),
        series(ONE, "lockstep_worker_ready", "0x60", model="m", pod="w-0"),
        series(OTHER, "lockstep_router_streams", "3x60", pod="r-0"),
        series(OTHER, "lockstep_worker_ready", "1x60", model="m", pod="w-0"),
        series(OTHER, "lockstep_router_requests_total", "0+600x60", endpoint="/v1/completions", code="200"),
        series(OTHER, "lockstep_router_requests_total", "0+6x60", endpoint="/v1/completions", code="503"),
        series(ONE, "lockstep_router_requests_total", "0+600x60", endpoint="/v1/completions", code="200"),
    ]
    expected = [
        firing("LockstepModelDown", "30m", ONE),
        firing("LockstepErrors", "30m", OTHER),
        firing("LockstepNoRouter", "30m"),
    ]
    check_rules(tmp_path, [{"name": "two", "interval": "1m", "input_series": given, "promql_expr_test": expected}])


@needs_promtool
def test_a_release_without_a_router_is_named_beside_one_that_has_its_own(tmp_path: Path) -> None:
    """While its workers are there, and for an hour if they are gone too; a release that never was has no alert."""
    given = [
        series(ONE, "lockstep_router_streams", "3x10 _x190", pod="r-0"),
        series(ONE, "lockstep_worker_ready", "1x10 _x190", model="m", pod="w-0"),
        series(OTHER, "lockstep_router_streams", "3x200", pod="r-0"),
        series(("late", "late"), "lockstep_worker_ready", "_x120 1x80", model="m", pod="w-0"),
    ]
    expected = [
        firing("LockstepNoRouter", "9m"),
        firing("LockstepNoRouter", "30m", ONE),
        firing("LockstepNoRouter", "100m"),
        firing("LockstepNoRouter", "140m", ("late", "late")),
    ]
    check_rules(tmp_path, [{"name": "gone", "interval": "1m", "input_series": given, "promql_expr_test": expected}])


@needs_promtool
def test_each_alert_of_the_chart_fires_and_resolves_here_too(tmp_path: Path) -> None:
    check_rules(tmp_path, yaml.safe_load((TESTS / "alerts.yaml").read_text())["tests"])
