"""Ports for servers that are started later are free, and nobody is given them meanwhile."""

import socket

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
    free = ports.free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(ports, "candidates", lambda: iter([taken, taken, free]))
        assert ports.free_port() == free
        monkeypatch.setattr(ports, "candidates", lambda: iter([taken]))
        assert ports.free_port() != taken


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
