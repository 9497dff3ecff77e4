"""Addresses are checked where they are read, so that gRPC never gets one that it would interpret differently."""

import pytest
from lockstep_common.address import check_listen_address, check_target, join_host_port, split_host_port


@pytest.mark.parametrize(
    "address", ["unix:/run/w0.sock", "host:1", "a_b.c.:1", "é.b:1", "127.0.0.1:65535", "[::1]:50051"]
)
def test_good_addresses_are_kept(address):
    assert check_target(address) == address
    assert check_listen_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:relative",
        "unix://host/path",
        "unix:/" + "x" * 107,
        "nowhere",
        ":1",
        "host:",
        "host:x",
        "host:-1",
        "host:65536",
        "host:" + "9" * 5000,
        "host:\u0661",
        "::1:50051",
        "a..b:1",
        ".a:1",
        "x" * 64 + ".b:1",
    ],
)
def test_bad_addresses_are_refused(address):
    with pytest.raises(ValueError, match=r"must have|must be|has a socket path"):
        check_listen_address(address)


def test_a_free_port_can_be_listened_on_but_not_dialled():
    assert check_listen_address("host:0") == "host:0"
    with pytest.raises(ValueError, match="above 0"):
        check_target("host:0")


@pytest.mark.parametrize("host", ["host", "10.0.0.1", "fd00::1"])
def test_join_and_split_are_inverse(host):
    assert split_host_port(join_host_port(host, 80)) == (host, 80)
