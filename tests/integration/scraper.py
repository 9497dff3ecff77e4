"""A real Prometheus with the chart's rules, whose hours are seconds, so that a test can see an alert fire and resolve.

What is made smaller: windows and offsets to a thirtieth, between 10 s and a minute, and `for` to a sixtieth, between
one and two seconds. Thresholds stay, except those that a test names because they cannot be waited for.
"""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml
from lockstep_common.ports import free_port
from lockstep_tools.debug.local import below
from machine import wait_for

CHART = Path(__file__).parents[2] / "charts/lockstep"
NAMESPACE = "chat"
RATE_INTERVAL = "10s"
"""What Grafana puts in for $__rate_interval with this scrape interval."""
PATIENCE_S = 240.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"\[(\d+)([smhd])\]|(?<=offset )(\d+)([smhd])")
_SELECTOR = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\{[^}]*\}")
_COMPARED = re.compile(r" > 0$")
LONGEST = "30m"
"""A window over all that a test has done."""
_PAGE = "/api/v1"


def rules_text() -> str:
    """The rules as the chart has them."""
    return (CHART / "rules/lockstep.yaml").read_text()


def rules() -> list[dict[str, Any]]:
    """All rules of the chart."""
    return [rule for group in yaml.safe_load(rules_text())["groups"] for rule in group["rules"]]


def alert_names() -> set[str]:
    """The chart's alerts."""
    return {rule["alert"] for rule in rules() if "alert" in rule}


def panels() -> list[tuple[str, str, str]]:
    """Each query of each dashboard: the dashboard, the panel's title, and the query."""
    found = []
    for path in sorted((CHART / "dashboards").glob("*.json")):
        board = json.loads(path.read_text())
        for panel in (inner for each in board["panels"] for inner in (each, *each.get("panels", ()))):
            found += [(path.stem, panel["title"], target["expr"]) for target in panel.get("targets", ())]
    return found


def queries(release: str) -> dict[str, str]:
    """What must return data, by where it is: each query of each dashboard, the expression of each recording rule, and
    each series that an alert is made of, since an alert itself returns data only while it fires. What a panel compares
    is taken before it is compared.
    """
    found: dict[str, str] = {}
    for board, title, query in panels():
        found[f"{board}: {title}: {query}"] = _COMPARED.sub("", query)
    for rule in rules():
        if "record" in rule:
            found[f"record: {rule['record']}"] = rule["expr"]
        else:
            found |= {f"alert: {rule['alert']}: {each}": each for each in _SELECTOR.findall(rule["expr"])}
    return {
        where: filled(_WINDOW.sub(_longest, query), release, rate_interval=LONGEST) for where, query in found.items()
    }


def _longest(match: re.Match[str]) -> str:
    return f"[{LONGEST}]" if match[1] else match[0]


def filled(text: str, release: str, rate_interval: str = RATE_INTERVAL) -> str:
    """A query or rules, with what the chart or Grafana puts in."""
    values = {"$__rate_interval": rate_interval, "$namespace": NAMESPACE, "$release": release, '=~"$model"': '=~".*"'}
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def scaled(text: str, thresholds: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Rules with smaller windows. `thresholds` has the end of an alert's expression, and what it is replaced with."""
    document = yaml.safe_load(text)
    for rule in (rule for group in document["groups"] for rule in group["rules"]):
        expression = _WINDOW.sub(_smaller, rule["expr"].strip())
        if rule.get("alert") in (thresholds or {}):
            old, new = thresholds[rule["alert"]]
            assert expression.endswith(old), (rule["alert"], old)
            expression = expression.removesuffix(old) + new
        rule["expr"] = expression
        if "for" in rule:
            number, unit = re.fullmatch(r"(\d+)([smhd])", rule["for"]).groups()
            rule["for"] = f"{min(2, max(1, int(number) * _UNITS_S[unit] // 60))}s"
    return yaml.safe_dump(document)


def _smaller(match: re.Match[str]) -> str:
    number, unit = (match[1], match[2]) if match[1] else (match[3], match[4])
    seconds = f"{min(60, max(10, int(number) * _UNITS_S[unit] // 30))}s"
    return f"[{seconds}]" if match[1] else seconds


def service_targets(pid: int, release: str, model: str) -> dict[str, dict[str, str]]:
    """Targets for `Prometheus`: the services below a process."""
    with httpx.Client(timeout=PATIENCE_S, trust_env=False, verify=False) as client:
        found = below(client, pid)
    return {
        each.url.removeprefix("http://"): {"release": release, "pod": f"{each.name}-0"}
        | ({"model": model} if each.name.startswith("worker") else {})
        for each in found
    }


class Prometheus:
    """A running Prometheus; it scrapes each second.

    Args:
        directory: for its files.
        targets: for each `host:port` the labels that the chart's monitors add: release, pod, model.
        thresholds: as of `scaled`.
        features: what is switched on with `--enable-feature`.
    """

    def __init__(
        self,
        directory: Path,
        targets: Mapping[str, Mapping[str, str]],
        thresholds: Mapping[str, tuple[str, str]] | None = None,
        features: Sequence[str] = (),
    ) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("prometheus is not installed")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        releases = sorted({labels["release"] for labels in targets.values()})
        for release in releases:
            (directory / f"{release}.rules").write_text(filled(scaled(rules_text(), thresholds), release))
        static = [
            {"targets": [target], "labels": {"namespace": NAMESPACE, **labels}} for target, labels in targets.items()
        ]
        settings = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [f"{release}.rules" for release in releases],
            "scrape_configs": [{"job_name": "lockstep", "static_configs": static}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(settings))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}{_PAGE}"
        self._client = httpx.Client(timeout=30.0, trust_env=False, verify=False)  # no TLS: saves reading authorities
        with (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={directory}/prometheus.yml",
                    f"--storage.tsdb.path={directory}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                    f"--enable-feature={','.join(features)}",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)
        self._client.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of a query now; none while Prometheus does not answer."""
        try:
            answer = self._client.post(f"{self._url}/query", data={"query": expression})
        except httpx.TransportError:
            assert self._process.poll() is None, (self._directory / "log").read_text()
            return []
        if answer.status_code == 503:
            return []  # it starts
        body = answer.json()
        assert body["status"] == "success", (expression, body)
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    def has_data(self, expression: str) -> bool:
        """Whether a query returns a number now."""
        return any(sample["value"][1] != "NaN" for sample in self.query(expression))

    def until_scraped(self, targets: Collection[str]) -> None:
        """Wait until each of these targets has been scraped."""
        wait_for(lambda: len(self.query("up == 1")) == len(targets), "each target is scraped", PATIENCE_S)

    def firing(self, release: str) -> dict[str, list[dict[str, str]]]:
        """The labels of each alert that fires."""
        found: dict[str, list[dict[str, str]]] = {}
        for sample in self.query(f'ALERTS{{alertstate="firing",release="{release}"}}'):
            found.setdefault(sample["metric"]["alertname"], []).append(sample["metric"])
        return found

    def until_fires(self, release: str, *alerts: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until these alerts have fired, each at any moment."""
        missing = set(alerts)

        def seen() -> bool:
            meanwhile()
            missing.difference_update(self.firing(release))
            return not missing

        wait_for_alerts(seen, f"{sorted(alerts)} fire", lambda: f"{sorted(missing)} did not")

    def until_resolved(self, release: str, *alerts: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until none of these alerts fires."""

        def gone() -> bool:
            meanwhile()
            return not set(alerts) & set(self.firing(release))

        wait_for_alerts(gone, f"{sorted(alerts)} resolve", lambda: f"{sorted(self.firing(release))} fire")


def wait_for_alerts(holds: Callable[[], bool], what: str, describe: Callable[[], str]) -> None:
    """Wait with a long deadline. A failure has the state that `describe` gives."""
    try:
        wait_for(holds, what, PATIENCE_S, every_s=0.3)
    except AssertionError as error:
        raise AssertionError(f"{error}: {describe()}") from None
