"""Ports for servers that are started later are free, and no other caller gets them meanwhile."""

import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
from lockstep_common import ports


def test_port_can_be_listened_on_and_is_given_to_nobody_else(monkeypatch):
    monkeypatch.setattr(ports, "first_given", lambda: 32_768)
    for _ in range(20):
        port = ports.free_port()
        assert port in ports._PORTS
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert len({ports.free_port() for _ in range(50)}) > 10


def test_port_on_which_somebody_listens_is_not_chosen(monkeypatch):
    free = ports.probe("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "candidates", lambda: iter([taken, taken, free]))
        assert ports.free_port() == free
        monkeypatch.setattr(ports, "candidates", lambda: iter([taken]))
        assert ports.free_port() != taken


def has_ipv6():
    """Whether this machine has the address `::1`: containers often do not."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="::1 is no address of this machine"))


@pytest.mark.parametrize("host", ["127.0.0.1", IPV6, "0.0.0.0", "localhost"])
def test_port_is_given_to_nobody_else_before_its_server_listens(host, monkeypatch):
    port = ports.free_port(host)
    monkeypatch.setattr(ports, "candidates", lambda: iter([port]))
    assert ports.free_port(host) != port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(("127.0.0.1" if host == "localhost" else host, port), family=family):
        assert ports.free_port(host) != port
    assert ports.free_port(host) != port, "not before the minute is over"
    assert ports.probe(host, port) == port, "a server can listen on it again"


def test_processes_that_choose_at_the_same_time_choose_different_ports():
    code = "import sys; from lockstep_common import ports; ports.candidates = lambda: iter(range(12_000, 12_400)); "
    code += "sys.stdin.readline(); print(*[ports.free_port() for _ in range(100)])"
    with ExitStack() as processes:
        started = [
            processes.enter_context(
                subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(3)
        ]
        for process in started:
            process.stdin.write("\n")
            process.stdin.flush()
        chosen = [port for process in started for port in process.stdout.read().split()]
    assert len(chosen) == len(set(chosen)) == 300


@pytest.mark.parametrize("first", [1024, 15_000, 0])
def test_machine_that_gives_away_all_ports_chooses_one(monkeypatch, first):
    monkeypatch.setattr(ports, "first_given", lambda: first)
    assert list(ports.candidates()) == []
    assert ports.free_port() > 0


def test_range_of_the_kernel_is_read_where_there_is_one(tmp_path, monkeypatch):
    path = tmp_path / "range"
    monkeypatch.setattr(ports, "RANGE_PATH", str(path))
    assert ports.first_given() == 0
    path.write_text("32768\t60999\n")
    assert ports.first_given() == 32_768


def test_address_of_another_machine_is_an_error():
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")
