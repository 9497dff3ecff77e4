"""Variables of the environment: services that share one do not take each other's settings for slips."""

import logging
import os
import re
from pathlib import Path

import pytest
from lockstep_common.settings import ServiceSettings, unknown_variables
from lockstep_tools.repository.chart_schema import SERVICES

ROOT = Path(__file__).resolve().parents[2]
NAMES = {service: {f"LOCKSTEP_{name.upper()}" for name in kind.model_fields} for service, kind in SERVICES.items()}
ALL = set[str]().union(*NAMES.values())
NEEDED = {"router": ["--workers", "a:1"], "worker": ["--model", "/model"], "state": []}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep.settings")
    for name in [name for name in os.environ if name.upper().startswith("LOCKSTEP_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("service", SERVICES)
def test_settings_of_other_services_are_no_slips(
    service: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = ALL - NAMES[service] - {"LOCKSTEP_POD_UID"}  # pods of all services have it
    for name in others:
        monkeypatch.setenv(name, "of another service")
    kind: type[ServiceSettings] = SERVICES[service]
    kind.load(service, NEEDED[service])
    (record,) = [record for record in caplog.records if record.name == "lockstep.settings"]
    assert record.levelno == logging.WARNING
    assert all(name in record.getMessage() for name in others)


def test_variables_that_the_project_reads_or_sets_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = ("Makefile", "libs/*/src", "services/*/src", "tools/src", "charts/*/templates", "k8s")
    for folder in folders:
        for path in (each for place in ROOT.glob(folder) for each in [place, *place.rglob("*")]):
            if path.suffix in (".py", ".sh", ".yaml", ".tpl", "") and path.is_file():
                for name in re.findall(r"\bLOCKSTEP_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(errors="replace")):
                    monkeypatch.setenv(name, "1")
    assert unknown_variables(ALL) == []
