"""The table of injected alerts is complete, and rules are made smaller as the tests with Prometheus assume."""

import ast
from pathlib import Path

import yaml
from alert_table import INJECTED
from scraper import alert_names, rules_text, scaled


def test_each_alert_is_in_the_table_and_names_a_test() -> None:
    assert INJECTED.keys() == alert_names()
    here = Path(__file__).parent
    found = {
        each.name: {node.value for node in ast.walk(each) if isinstance(node, ast.Constant)}
        for name in (
            "test_alerts.py",
            "test_balance_alerts.py",
            "test_gpu_stack.py",
            "test_state_alerts.py",
            "test_slow_rank.py",
            "test_worker_alerts.py",
        )
        for each in ast.walk(ast.parse((here / name).read_text()))
        if isinstance(each, ast.FunctionDef)
    }
    for alert, test in INJECTED.items():
        assert alert in found[test], (alert, test)


def test_only_windows_and_waits_get_smaller() -> None:
    groups = yaml.safe_load(scaled(rules_text()))["groups"]
    made = {rule.get("alert", rule.get("record")): rule for group in groups for rule in group["rules"]}
    assert made["LockstepErrors"]["for"] == "2s"
    assert made["LockstepErrors"]["expr"].count("[10s]") == 2
    assert made["LockstepErrors"]["expr"].endswith("> 0.001")
    assert made["lockstep:request_errors:ratio_rate3d"]["expr"].count("[60s]") == 3
    assert "offset 30s" in made["LockstepGpuXid"]["expr"]
    assert "7 * 86400" in made["LockstepCertificateExpires"]["expr"]
    changed = scaled(rules_text(), {"LockstepFailovers": ("> 50", "> 2")})
    assert "> 50" not in changed
