"""Settings are read from flags, environment and file, and wrong ones end the process with a sentence."""

from pathlib import Path

import pytest
from lockstep_state.settings import StateSettings


def test_readme_describes_every_setting():
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for name, field in StateSettings.model_fields.items():
        assert any(f"| `{name}` |" in line and str(field.description) in line for line in readme.splitlines()), name


def test_flags_environment_and_file(monkeypatch, tmp_path):
    store = "rediss+sentinel://a:1,b/3?master=main"
    loaded = StateSettings.load("state", ["--store", store, "--ttl-s", "5", "--worker-identity", "workers.test"])
    assert (loaded.store, loaded.ttl_s, loaded.worker_identity) == (store, 5.0, "workers.test")
    monkeypatch.setenv("LOCKSTEP_STORE", "redis+cluster://a:1,b:2")
    assert StateSettings.load("state", []).store == "redis+cluster://a:1,b:2"
    file = tmp_path / "state.yaml"
    file.write_text("max_tenant_streams: 5\n")
    monkeypatch.setenv("LOCKSTEP_CONFIG", str(file))
    assert StateSettings.load("state", []).max_tenant_streams == 5


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--store", "postgres://a"], "store"),
        (["--store", "redis://a:1,b:2/0"], "several hosts"),
        (["--store", "redis+cluster://a:1/2"], "database"),
        (["--store", "redis+sentinel://a:1"], "master"),
        (["--store", "redis://a:1/none"], "store"),
        (["--store", "redis://a:99999"], "store"),
        (["--store-timeout-s", "0"], "store_timeout_s"),
        (["--max-memory-bytes", "1"], "max_memory_bytes"),
        (["--listen", "nowhere"], "nowhere"),
        (["--worker-identity", "not a name"], "worker_identity"),
        (["--tls-cert", "/a"], "tls_key"),
    ],
)
def test_wrong_settings_end_the_process(flags, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        StateSettings.load("state", flags)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_password_in_an_address_is_refused_and_not_shown(capsys):
    with pytest.raises(SystemExit):
        StateSettings.load("state", ["--store", "redis://user:hidden-password@a:1/0"])
    error = capsys.readouterr().err
    assert "password" in error
    assert "hidden" not in error
