"""An attack that reaches nothing fails, so that a router that is not attacked is not taken for one that holds."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from lockstep_tools.hostile.attacks import LEAST_S, run

SECONDS = "0.5"
MANY_SECONDS = "4"
"""For thousands of connections on a busy machine."""
BACKLOG = 4096


@pytest.fixture
def door() -> Iterator[tuple[str, int]]:
    """A port whose connections are made and never answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
        yield listening.getsockname()


def attack(name: str, port: int, limit: str = "", seconds: str = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run an attack, after the shell has limited it."""
    command = f"{limit} exec {sys.executable} -m lockstep_tools.hostile.attacks {name} 127.0.0.1 {port} {seconds}"
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ
    return subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["vanishing", "unread"])
def test_an_attack_that_connects_is_one(door: tuple[str, int], name: str) -> None:
    result = attack(name, door[1])
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["vanishing", "unread"])
def test_an_attack_on_nobody_fails(name: str) -> None:
    result = attack(name, 1)
    assert (result.returncode, result.stderr) == (
        1,
        f"attack {name}: no connection to 127.0.0.1:1 could be made\n",
    )


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("small-bodies", "the router has read no body"),
        ("websocket-messages", "the router has read no message"),
        ("websocket-vanishing", "no token came"),
        ("grpc-messages", "the router has read no message"),
    ],
)
def test_an_attack_without_its_effect_fails(door: tuple[str, int], name: str, failure: str) -> None:
    result = attack(name, door[1])
    assert (result.returncode, result.stderr) == (1, f"attack {name}: {failure}\n")


def test_an_attack_may_open_what_the_hard_limit_allows(door: tuple[str, int]) -> None:
    result = attack("slow-headers", door[1], "ulimit -S -n 64;", MANY_SECONDS)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_attack_with_too_few_connections_fails(door: tuple[str, int]) -> None:
    result = attack("slow-headers", door[1], "ulimit -n 64;", MANY_SECONDS)
    assert (result.returncode, result.stderr) == (1, "attack slow-headers: [Errno 24] Too many open files\n")


@pytest.mark.parametrize(
    ("name", "failure"),
    [("whole-logprobs", "the large answer did not come"), ("large-chat", "no chat of each kind was answered")],
)
def test_an_attack_whose_large_answer_does_not_come_in_time_fails(
    door: tuple[str, int], monkeypatch: pytest.MonkeyPatch, name: str, failure: str
) -> None:
    monkeypatch.setitem(LEAST_S, name, 0.0)
    with pytest.raises(ConnectionError, match=failure):
        asyncio.run(run(name, door, float(SECONDS)))
