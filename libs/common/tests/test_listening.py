import os
import shutil
import socket
import tempfile

import pytest
from lockstep_common.errors import LockstepError
from lockstep_common.listening import claim


@pytest.fixture
def socket_path():
    """A path short enough for a unix socket."""
    directory = tempfile.mkdtemp(prefix="lockstep-")
    yield f"{directory}/s"
    shutil.rmtree(directory)


def test_a_stale_socket_is_removed(socket_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(socket_path)
    claim(f"unix:{socket_path}")
    assert not os.path.exists(socket_path)


def test_a_live_socket_is_left_alone(socket_path):
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(socket_path)
        live.listen()
        with pytest.raises(LockstepError, match="another process listens"):
            claim(f"unix:{socket_path}")
        assert os.path.exists(socket_path)


def test_a_file_is_left_alone(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(LockstepError, match="not a socket"):
        claim(f"unix:{path}")
    assert path.read_text() == "precious"


def test_a_missing_directory_is_named():
    with pytest.raises(LockstepError, match="cannot listen on unix:/nowhere/at/all/s: No such file"):
        claim("unix:/nowhere/at/all/s")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_refused_and_a_free_one_is_not(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LockstepError, match="in use"):
            claim(f"{host}:{port}")
    claim(f"{host}:{port}")


def test_an_unknown_host_is_refused():
    with pytest.raises(LockstepError, match=r"cannot listen on no\.such\.host\.invalid:1"):
        claim("no.such.host.invalid:1")
