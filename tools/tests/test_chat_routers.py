"""`lockstep chat` with connections and routers that die in the middle of an answer, and Ctrl-C without a terminal."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
from fake_openai import FakeOpenAI, Received, Script, events, script

WORDS = ["Ein", " naïve", " café", " 漢字", " 🙂", " the", " the", " the", '\n"end"', "."]
TEXT = "".join(WORDS)
PAIRS = [first + second for first, second in zip(WORDS[::2], WORDS[1::2], strict=True)]
"""The same text in other pieces."""
WHOLE = b"".join(event.encode() for event in events(WORDS, chat=True, finish="stop"))


def cut(server: FakeOpenAI, at: int) -> Script:
    """The first bytes of the answer; then the connection ends."""
    server.cut = True
    return [WHOLE[:at]] if at else []


def rest(server: FakeOpenAI, request: Received) -> Script:
    """What follows the event that the client has seen last."""
    server.cut = False
    found = events(WORDS, chat=True, finish="stop")
    ids = [event.id for event in found]
    return script(found[ids.index(request.headers["last-event-id"]) + 1 :])


def second_turn(request: Received) -> bool:
    return len(request.body["messages"]) > 1


def history(request: Received) -> list[str]:
    return [message["content"] for message in request.body["messages"]]


CUTS = {
    "no event": 0,
    "in the first event": 20,
    "between events": WHOLE.index(b"\n\n") + 2,
    "in a character": WHOLE.index("🙂".encode()) + 2,
    "in the usage": WHOLE.index(b'"choices": []'),
    "before the end mark": WHOLE.index(b"data: [DONE]"),
}


@pytest.mark.parametrize("at", CUTS.values(), ids=CUTS)
def test_a_stream_that_is_cut_goes_on_at_the_same_router(server: FakeOpenAI, lockstep, at: int) -> None:
    def answer(number: int, request: Received) -> Script:
        if number == 1:
            return cut(server, at)
        server.cut = False
        return script(events(["more"] if second_turn(request) else WORDS, chat=True, finish="stop"))

    server.answer, server.resume = answer, partial(rest, server)
    result = lockstep("chat", "--url", server.url, stdin="one\ntwo\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{TEXT}\nmore\n", "")
    assert history(server.received[-1]) == ["one", TEXT, "two"]
    *first, _ = server.received
    # Nothing came of it: the router is asked with the same key, so that it joins the answer that it has.
    assert len({request.headers["idempotency-key"] for request in first}) == 1
    assert len(first) == (1 if b"\n\n" in WHOLE[:at] else 2)


@pytest.fixture
def routers() -> Iterator[tuple[FakeOpenAI, FakeOpenAI]]:
    with FakeOpenAI() as one, FakeOpenAI() as two:
        yield one, two


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_a_stream_of_a_dead_router_goes_on_at_another(
    routers: tuple[FakeOpenAI, FakeOpenAI], lockstep, shares: bool, as_list: bool
) -> None:
    """Routers that share a state server continue each other's streams; others begin them again."""
    asked: list[FakeOpenAI] = []

    def answer(server: FakeOpenAI, number: int, request: Received) -> Script:
        asked.append(server)
        if len(asked) == 1:
            server.close()
            return cut(server, len(WHOLE) // 2)
        return script(events(["more"] if second_turn(request) else PAIRS, chat=True, finish="stop"))

    for router in routers:
        router.answer = partial(answer, router)
        if shares:
            router.resume = partial(rest, router)
    urls = [router.url for router in routers]
    given = ["--url", ",".join(urls)] if as_list else ["--url", urls[0], "--url", urls[1]]
    result = lockstep("chat", *given, stdin="one\ntwo\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{TEXT}\nmore\n", "")
    dead, other = asked[0], next(router for router in routers if router is not asked[0])
    assert asked == [dead, *([other] if shares else [other, other])]
    assert [request.path for request in other.resumed] == ["/v1/streams/cmpl-1"]
    assert history(other.received[-1]) == ["one", TEXT, "two"]
    if not shares:
        assert other.received[0].body == dead.received[0].body, "the repeat has the same seed"


def test_a_server_that_is_not_there_is_left_out(server: FakeOpenAI, lockstep) -> None:
    result = lockstep("chat", "--url", f"http://127.0.0.1:1/v1, {server.url}/", stdin="hello\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello world\n", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("http://a,,http://b",), "an item is empty: 'http://a,,http://b'"),
        (("http://a", "http://b,ftp://c"), "--url ftp://c: not a URL"),
        (("http://user:word@a",), "must not contain a user or password"),
        (("http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"), "http://127.0.0.1:1/v1, http://127.0.0.1:2/v1"),
    ],
)
def test_wrong_addresses_are_named(lockstep, given: tuple[str, ...], words: str) -> None:
    result = lockstep("chat", *(part for url in given for part in ("--url", url)), stdin="hello\n")
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("is_answering", [True, False])
def test_ctrl_c_without_a_terminal_ends_the_command_and_its_stream(server: FakeOpenAI, is_answering: bool) -> None:
    words = ["word "] * (10_000 if is_answering else 3)
    server.answer = lambda number, request: script(events(words, chat=True), 0.05 if is_answering else 0.0)
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep_tools.cli", "chat", "--url", server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"hello\n")
            process.stdin.flush()
            read_until(process.stdout.fileno(), b"word word" if is_answering else b"word word word \n")
            assert process.stderr is not None
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()
    assert server.cancelled == (["/v1/streams/cmpl-1"] if is_answering else [])
    assert len(server.received) == 1


def read_until(descriptor: int, text: bytes, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    shown = b""
    while text not in shown:
        assert select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0], shown
        shown += os.read(descriptor, 4096)
