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
BACKLOG = 4096


@pytest.fixture
def door() -> Iterator[tuple[str, int]]:
    """A port whose connections are made and never answered."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
        yield listening.getsockname()


def attack(name: str, port: int, limit: str = "") -> subprocess.CompletedProcess[str]:
    """Run an attack, after the shell has limited it."""
    command = f"{limit} exec {sys.executable} -m lockstep_tools.hostile.attacks {name} 127.0.0.1 {port} {SECONDS}"
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


def test_an_attack_may_open_what_the_hard_limit_allows(door: tuple[str, int]) -> None:
    result = attack("slow-headers", door[1], "ulimit -S -n 64;")
    assert (result.returncode, result.stderr) == (0, "")


def test_an_attack_with_too_few_connections_fails(door: tuple[str, int]) -> None:
    result = attack("slow-headers", door[1], "ulimit -n 64;")
    assert (result.returncode, result.stderr) == (1, "attack slow-headers: [Errno 24] Too many open files\n")


def test_an_attack_whose_large_answer_does_not_come_in_time_fails(
    door: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LEAST_S, "whole-logprobs", 0.0)
    with pytest.raises(ConnectionError, match="the large answer did not come"):
        asyncio.run(run("whole-logprobs", door, float(SECONDS)))
