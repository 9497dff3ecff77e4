"""The key that `lockstep keys` prints is the one that its file accepts, and the file does not hold it."""

import pytest
from lockstep_common.errors import LockstepError
from lockstep_router.tenants import KeyFile
from lockstep_tools.cli import main


def make(capsys, *arguments):
    assert main(["keys", *arguments]) == 0
    file, message = capsys.readouterr()
    return message.split()[-1], file


@pytest.mark.parametrize("options", [[], ["--days", "30"]])
def test_file_accepts_the_key_and_no_other(tmp_path, capsys, options):
    path = tmp_path / "keys.yaml"
    key, text = make(capsys, "2027.search", *options)
    other, _ = make(capsys, "2027.search", *options)
    path.write_text(text)
    assert KeyFile(str(path)).authenticate(key.encode()).tenant.name == "2027.search"
    assert key not in text
    assert len(key) >= 40
    with pytest.raises(LockstepError):
        KeyFile(str(path)).authenticate(other.encode())


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "é", "a" * 65])
def test_odd_names_are_refused(capsys, name):
    with pytest.raises(SystemExit) as caught:
        main(["keys", "--", name])
    assert caught.value.code == 2
    assert not capsys.readouterr().out
