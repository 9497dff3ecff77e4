"""Settings are read from flags, environment and file, and wrong ones end the process with a sentence."""

from pathlib import Path

import pytest
from lockstep_router.settings import RouterSettings


def test_readme_describes_every_setting():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for name, field in RouterSettings.model_fields.items():
        assert any(f"| `{name}` |" in line and str(field.description) in line for line in readme.splitlines()), name


def test_flags(monkeypatch):
    loaded = RouterSettings.load("router", ["--workers", "unix:/a,host:1", "--port", "9", "--max-n", "3"])
    assert loaded.workers == ("unix:/a", "host:1")
    assert (loaded.port, loaded.max_n) == (9, 3)
    assert RouterSettings.load("router", ["--workers", "a:1", "--workers", "b:2"]).workers == ("a:1", "b:2")


def test_environment_and_file(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_WORKERS", "unix:/a, unix:/b")
    assert RouterSettings.load("router", []).workers == ("unix:/a", "unix:/b")
    monkeypatch.delenv("LOCKSTEP_WORKERS")
    file = tmp_path / "router.yaml"
    file.write_text("workers: [unix:/c]\nport: 1234\n")
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(file))
    assert RouterSettings.load("router", []).port == 1234


@pytest.mark.parametrize("flag", ["--dashboard-url", "--state-server", "--workers", "--otlp-endpoint"])
def test_password_in_an_address_is_not_shown(flag, capsys):
    with pytest.raises(SystemExit):
        RouterSettings.load("router", ["--workers", "a:1", flag, "https://user:hidden@host:1"])
    error = capsys.readouterr().err
    assert flag[2:].replace("-", "_") in error
    assert "hidden" not in error


@pytest.mark.parametrize("content", ["workers: [a:1\nport: 3\n", "- a\n", "workers: [a:1]\nzork: 3\n"])
def test_wrong_file_ends_the_process(content, monkeypatch, tmp_path, capsys):
    file = tmp_path / "router.yaml"
    file.write_text(content)
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(file))
    with pytest.raises(SystemExit) as caught:
        RouterSettings.load("router", [])
    assert caught.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "workers"),
        (["--workers", ""], "workers"),
        (["--workers", "unix:"], "unix:"),
        (["--workers", "nowhere"], "nowhere"),
        (["--workers", "host:0"], "host:0"),
        (["--workers", "host:x"], "host:x"),
        (["--workers", "a:1,a:1"], "twice"),
        (["--workers", "a:1", "--port", "99999"], "port"),
        (["--workers", "a:1", "--log-level", "loud"], "log_level"),
        (["--workers", "a:1", "--inter-token-deadline-s", "0"], "inter_token_deadline_s"),
        (["--workers", "a:1", "--state-server", "nowhere"], "state_server"),
        (["--workers", "a:1", "--state-server", "host:0"], "state_server"),
        (["--workers", "a:1", "--state-identity", "state.test"], "state_identity"),
        (["--workers", "a:1", "--state-timeout-s", "0"], "state_timeout_s"),
        (["--workers", "a:1", "--drain-timeout-s", "inf"], "setting drain_timeout_s: Input should be a finite number"),
        (["--workers", "a:1", "--liveness-timeout-s", "inf"], "liveness_timeout_s"),
        (["--workers", "a:1", "--router-id", "r" * 129], "router_id"),
    ],
)
def test_wrong_settings_end_the_process(flags, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        RouterSettings.load("router", flags)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err
