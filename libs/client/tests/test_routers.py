"""The routers that a client knows: which it avoids, and when it looks their names up."""

import random
import socket
import threading

import pytest
from fake_router import Clock
from lockstep_client.network import BlockingNetwork, Connections, run_blocking
from lockstep_client.routers import Name, Routers, root_of

A, B = "http://10.0.0.1", "http://10.0.0.2"
NAME = Name("routers.example", 8000)


def test_failed_routers_are_avoided():
    clock = Clock()
    routers = Routers([A, B], avoid_s=5.0, clock=clock, random=random.Random(1))
    bad = next(each for each in routers.known() if each.root == A)
    for avoid_s in (5.0, 10.0, 20.0):
        routers.failed(bad)
        clock.pause(avoid_s - 0.1)
        assert {routers.pick(()).root for _ in range(50)} == {B}
        clock.pause(0.2)
        assert {routers.pick(()).root for _ in range(50)} == {A, B}
    routers.failed(bad)
    routers.worked(bad)
    assert {routers.pick(()).root for _ in range(50)} == {A, B}


def test_one_request_refreshes_known_addresses_and_the_others_use_them():
    clock = Clock()
    routers = Routers([f"http://{NAME.host}:{NAME.port}"], avoid_s=5.0, clock=clock, random=random.Random(1))
    assert routers.take_stale_names() == routers.take_stale_names() == [NAME], "no request can go on without addresses"
    routers.learn(NAME, ["10.0.0.1"])
    assert routers.take_stale_names() == []
    clock.pause(11.0)
    assert routers.take_stale_names() == [NAME]
    assert routers.take_stale_names() == []
    routers.learn(NAME, [])
    assert [each.root for each in routers.known()], "those from before stay"


def test_a_name_server_that_is_silent_is_waited_for_as_long_as_for_a_connection(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and [])
    network = BlockingNetwork(Connections(0.05, 1.0, is_proxied=False, has_grpc=False, has_tls=False), verify=True)
    try:
        assert run_blocking(network.look_up(NAME)) == []
        assert not answered.is_set(), "it did not wait for the answer"
    finally:
        answered.set()
        run_blocking(network.close())


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("HTTPS://Routers.Example:443/v1/", "https://routers.example"),
        ("http://10.0.0.1:80", "http://10.0.0.1"),
        ("http://10.0.0.1:443/Lockstep/v1", "http://10.0.0.1:443/Lockstep"),
        ("grpc://Routers.Example:80", "grpc://routers.example:80"),
    ],
)
def test_addresses_that_mean_the_same_are_one(url, root):
    assert root_of(url) == root
    assert Routers([url, root], avoid_s=5.0, clock=Clock(), random=random.Random(1)).roots == (root,)


@pytest.mark.parametrize("url", ["http://10.0.0.1/\x00", "http://a..b/v1", f"grpc://{'a' * 64}.example:9000"])
def test_address_that_cannot_be_one_is_refused(url):
    with pytest.raises(ValueError, match="base_urls"):
        root_of(url)
