"""The termination message is written to the file that Kubernetes reads, and a failure to write it is ignored."""

import pytest
from lockstep_common.settings import fail
from lockstep_common.termination import leave_message


def test_message_replaces_what_was_there(tmp_path):
    log = tmp_path / "termination-log"
    log.write_text("something longer than that")
    leave_message("no GPU", str(log))
    assert log.read_text() == "no GPU"


def test_environment_names_the_file_before_settings_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOCKSTEP_TERMINATION_LOG", str(tmp_path / "log"))
    with pytest.raises(SystemExit) as caught:
        fail("no such setting")
    assert caught.value.code == 2
    assert (tmp_path / "log").read_text() == "no such setting"
    assert capsys.readouterr().err == "no such setting\n"


def test_message_is_cut_to_what_kubernetes_keeps(tmp_path):
    leave_message("ä" * 5000, str(tmp_path / "log"))
    assert (tmp_path / "log").stat().st_size == 4096


def test_file_that_cannot_be_written_changes_nothing(tmp_path):
    leave_message("no GPU", str(tmp_path / "no" / "such" / "directory"))
    leave_message("no GPU", str(tmp_path))
