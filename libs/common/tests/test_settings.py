"""What ends the process because of its settings says which, and shows no password."""

import logging
import os
import subprocess
import sys

import pytest
from lockstep_common.settings import PodSettings, ServiceSettings
from pydantic import field_validator


class Settings(PodSettings):
    keys_file: str | None = None
    drain_timeout_s: float = 1.0
    targets: tuple[str, ...] = ()

    @field_validator("targets", mode="before")
    @classmethod
    def _check_targets(cls, value):
        if any("@" in target for target in value):
            raise ValueError(f"{value[0]!r} must be host:port")
        return value


@pytest.fixture(autouse=True)
def environment(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lockstep.settings")
    for name in [name for name in os.environ if name.upper().startswith("LOCKSTEP_")]:
        monkeypatch.delenv(name)


def refusal(capsys, *flags):
    """What is printed before the process ends."""
    with pytest.raises(SystemExit) as caught:
        Settings.load("service", list(flags))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LOCKSTEP_KEYS_FLIE", "LOCKSTEP_KEYS_FILE"),
        ("LOCKSTEP_KEY_FILE", "LOCKSTEP_KEYS_FILE"),
        ("LOCKSTEP_KEYS_FILES", "LOCKSTEP_KEYS_FILE"),
        ("LOCKSTEP_KEYZ_FILE", "LOCKSTEP_KEYS_FILE"),
        ("lockstep_keys_flie", "LOCKSTEP_KEYS_FILE"),
        ("LOCKSTEP_DRAIN_TIMOUT_S", "LOCKSTEP_DRAIN_TIMEOUT_S"),
    ],
)
def test_a_misspelled_variable_ends_the_process(name, meant, monkeypatch, capsys):
    monkeypatch.setenv(name, "hidden")
    assert refusal(capsys) == f"{name}: there is no such setting; is {meant} meant?\n"


def test_all_misspelled_variables_are_named(monkeypatch, capsys):
    monkeypatch.setenv("LOCKSTEP_KEYS_FLIE", "a")
    monkeypatch.setenv("LOCKSTEP_POD_NAMES", "a")
    assert len(refusal(capsys).splitlines()) == 2


def test_other_unknown_variables_are_warned_of_once(monkeypatch, caplog):
    for name in ("LOCKSTEP_MAX_SEQS", "LOCKSTEP_PRIVATE"):
        monkeypatch.setenv(name, "hidden")
    Settings.load("service", [])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "variables that are no settings of this service: LOCKSTEP_MAX_SEQS, LOCKSTEP_PRIVATE"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCKSTEP_KEYS_FILE", "/keys"),
        ("lockstep_keys_file", "/keys"),
        ("LOCKSTEP_TERMINATION_LOG", "/dev/null"),
        ("LOCKSTEP_DIE_WITH_PARENT", "1"),
        ("LOCKSTEP_CPU_KERNELS", "off"),
        ("LOCKSTEP_ROUTER_SERVICE_HOST", "10.0.0.1"),
        ("LOCKSTEP_ROUTER_SERVICE_PORT", "8000"),
        ("LOCKSTEP_ROUTER_SERVICE_PORT_HTTP", "8000"),
        ("LOCKSTEP_ROUTER_PORT", "tcp://10.0.0.1:8000"),
        ("LOCKSTEP_ROUTER_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("LOCKSTEP_ROUTER_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("LOCKSTEP_ROUTER_PORT_8000_UDP_PROTO", "udp"),
        ("LOCKSTEPPING", "1"),
    ],
)
def test_variables_that_are_known_are_not_mentioned(name, value, monkeypatch, caplog):
    monkeypatch.setenv(name, value)
    Settings.load("service", [])
    assert not caplog.records


@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("error", 0)])
def test_the_warning_is_a_line_of_the_log_that_is_set_up_later(level, lines):
    code = (
        "from lockstep_common import telemetry; from lockstep_common.settings import PodSettings\n"
        "settings = PodSettings.load('service', [])\n"
        "telemetry.setup('service', level=settings.log_level)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    variables = {"LOCKSTEP_LOG_LEVEL": level, "LOCKSTEP_NOWHERE": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    )
    assert process.stderr.count("\n") == process.stderr.count('"service":"service"') == lines
    assert process.stderr.count("LOCKSTEP_NOWHERE") == lines


@pytest.mark.parametrize(
    "address",
    [
        "http://user:hidden@host:4317",
        "user:hidden@host:4317",
        "http://user:hid/hidden@host:4317",
        "http://user:hid@hidden@host:4317",
        "http://user:hid hidden@host:4317",
        "http://user:hid'hidden@host:4317",
    ],
)
def test_a_password_in_a_wrong_address_is_not_shown(address, tmp_path, monkeypatch, capsys):
    log = tmp_path / "log"
    monkeypatch.setenv("LOCKSTEP_TERMINATION_LOG", str(log))
    printed = refusal(capsys, "--otlp-endpoint", address)
    for text in (printed, log.read_text()):
        assert "hid" not in text
        assert "otlp_endpoint" in text
        assert "host:4317')" in text


def test_a_setting_that_the_file_has_twice_is_named(tmp_path, monkeypatch, capsys):
    file = tmp_path / "settings.yaml"
    file.write_text("drain_timeout_s: 5\nkeys_file: keys\ndrain_timeout_s: 50\n")
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(file))
    printed = refusal(capsys)
    assert "the key drain_timeout_s is there twice" in printed
    assert "line 3" in printed


def test_a_password_in_an_error_of_a_validator_is_not_shown(capsys):
    printed = refusal(capsys, "--targets", "user:hidden@host")
    assert "hidden" not in printed
    assert printed.count("(not shown)@host") == 2


def test_what_was_given_is_shown(capsys):
    assert "(given: 'soon')" in refusal(capsys, "--drain-timeout-s", "soon")


def test_a_class_without_fields_has_no_variable_to_mean(monkeypatch, caplog):
    monkeypatch.setenv("LOCKSTEP_X", "1")
    ServiceSettings.load("service", [])
    assert len(caplog.records) == 1
