"""Two real workers and a state server: a conversation that comes to another worker, or whose worker was drained, need
not compute its prefix, and its trace says what was fetched. With `stateless` routing conversations go to other workers
all the time.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import wait_for
from otlp_receiver import Received
from spans import Collector, check_edges, headers, named, spans_of
from system import MODEL, REFERENCE, Json, System

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("private_tmp")]

_TRIES = 8
_CALLS = ("Kv.LookUp", "Kv.Get")


@contextmanager
def running(receiver: Collector, policy: str) -> Iterator[Stack]:
    """Two workers behind a router with a policy."""
    settings = StackSettings(
        str(REFERENCE), workers=2, device="cpu", threads=1, host_cache="64Mi", remote_cache=True, log_level="error"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{receiver.address}")
        patch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        patch.setenv("LOCKSTEP_POLICY", policy)
        with Stack(settings) as stack:
            stack.wait_ready(120)
            yield stack


@pytest.fixture(scope="module")
def stack(private_tmp: object, receiver: Collector) -> Iterator[Stack]:
    with running(receiver, "sticky") as stack:
        yield stack


@pytest.fixture
def system(stack: Stack) -> System:
    return System(stack.url, stack.management_url)


@pytest.fixture(scope="module")
def stateless(private_tmp: object, receiver: Collector) -> Iterator[System]:
    with running(receiver, "stateless") as stack:
        yield System(stack.url, stack.management_url)


def ask(system: System, session: str, prompt: str, trace: dict[str, str] | None = None) -> tuple[str, int]:
    """The text of an answer, and how many tokens of its prompt were cached."""
    response = httpx.post(
        f"{system.api}/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True},
        headers={"X-Session-ID": session} | (trace or {}),
        timeout=120,
        trust_env=False,
    )
    answer: Json = response.json()
    assert response.status_code == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def one_session_each(system: System) -> list[str]:
    """Names of sessions, of which each comes to another worker."""
    sessions: dict[str, str] = {}
    for number in range(64):
        sessions.setdefault(ask_and_find(system, f"session {number}", "hello")[0], f"session {number}")
        if len(sessions) == 2:
            break
    return list(sessions.values())


def ask_and_find(
    system: System, session: str, prompt: str, trace: dict[str, str] | None = None
) -> tuple[str, str, int]:
    """The worker of a request that is alone, the text of its answer, and how many tokens of its prompt were cached."""
    before = {name: worker["steps"] for name, worker in system.until_at_rest().items()}
    text, cached = ask(system, session, prompt, trace)

    def worker() -> str | None:
        return next((name for name, each in system.workers().items() if each["steps"] > before[name]), None)

    found = wait_for(worker, "a worker reports its steps")
    assert found is not None
    system.until_idle()
    return found, text, cached


def test_the_next_turn_on_another_worker_takes_its_prefix_from_the_state_server(
    system: System, receiver: Collector
) -> None:
    one, other = one_session_each(system)
    for attempt in range(_TRIES):
        first = story(f"Story {attempt}.")
        place, answer, _ = ask_and_find(system, one, first)
        time.sleep(
            0.1 * 2**attempt
        )  # blocks are stored behind the answer; a worker that asks too early computes what is missing
        second = f"{first}{answer} And then, in the morning,"
        elsewhere, text, cached = ask_and_find(system, other, second, headers(attempt + 1))
        assert text == ask(system, one, second)[0]
        # On a busy machine a session may leave a worker that is suspected for a moment.
        if elsewhere != place and cached > 0.8 * len(system.tokenize(first)):
            check_fetch(receiver, attempt + 1, cached)
            return
    raise AssertionError("the other worker has computed every prefix, or most of it")


def test_the_successor_of_a_worker_that_was_drained_finds_its_prefixes(stack: Stack, system: System) -> None:
    """The answer's blocks are still being stored when the signal comes."""
    for attempt in range(_TRIES):
        system.until_ready()
        session = f"drained {attempt}"
        worker, _, _ = ask_and_find(system, session, "hello")
        pid = stack.worker_pids[worker]
        assert pid is not None
        first = story(f"Chapter {attempt}.")
        answer, _ = ask(system, session, first)
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda worker=worker, pid=pid: stack.worker_pids[worker] != pid, "the worker has drained and ended")
        system.until_ready()
        _, cached = ask(system, session, f"{first}{answer} And then, in the morning,")
        if cached > 0.8 * len(system.tokenize(first)):
            return
    raise AssertionError("each successor has computed the prefix, or most of it")


def story(name: str) -> str:
    """So long that fetching it takes less time than computing it, on a fast machine that does other work, too."""
    return f"{name} " + "The rain fell on the house by the sea, and nobody came to the door that night. " * 72


def test_a_conversation_moves_with_stateless_routing_and_takes_its_prefix_along(
    stateless: System, receiver: Collector
) -> None:
    """All turns have one session, which decides nothing; each worker gives the same answer to a turn."""
    for attempt in range(_TRIES):
        number = 100 + attempt
        first = story(f"Night {number}.")
        place, answer, cached = ask_and_find(stateless, "one session", first)
        assert cached == 0
        time.sleep(0.1 * 2**attempt)  # as above
        second = f"{first}{answer} And then, in the morning,"
        turns = [ask_and_find(stateless, "one session", second, headers(number))]
        while len({turn[0] for turn in turns}) < 2:
            assert len(turns) < 32, "all turns come to one worker"
            turns.append(ask_and_find(stateless, "one session", second))
        assert len({text for _, text, _ in turns}) == 1
        other, _, cached = turns[0]
        if other != place and cached > 0.8 * len(stateless.tokenize(first)):
            check_fetch(receiver, number, cached)
            return
    raise AssertionError("no conversation has moved with its prefix")


def check_fetch(receiver: Collector, number: int, cached: int) -> None:
    """The trace of the request has its fetches below its wait, with what came, and its sender."""
    wait_for(lambda: named(spans_of(receiver, number), "request"), "the request's span has come")
    # A span of a worker that ended before this one has come, too.
    wait_for(lambda: named(spans_of(receiver, number), "decode"), "the worker's spans have come")
    calls = {span.span_id for span in spans_of(receiver, number) if span.name in _CALLS and by(span, "worker")}
    # A request may fetch twice: compressed blocks, then those that are not.
    wait_for(lambda: calls <= answered(receiver, number), "the state server's span of each call has come")
    spans = spans_of(receiver, number)
    check_edges(spans)
    (attempt,), (queue,), (prefill,) = (named(spans, name) for name in ("attempt", "queue", "prefill"))
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == cached
    fetches = [span for span in named(spans, "kv fetch") if span.attributes["lockstep.outcome"] == "fetched"]
    assert fetches
    for fetch in fetches:
        assert fetch.parent_id == queue.span_id
        assert fetch.attributes["lockstep.kv.blocks"] > 0
        assert fetch.attributes["lockstep.kv.bytes"] > 0
        assert fetch.resource["service.instance.id"] == attempt.attributes["lockstep.worker"]
        below = [span for span in spans if span.parent_id == fetch.span_id]
        assert sorted(span.name for span in below) == sorted(_CALLS)
        assert {span.span_id for span in below} <= calls


def answered(receiver: Collector, number: int) -> set[str]:
    """Ids of calls of which the state server has a span."""
    return {span.parent_id for span in spans_of(receiver, number) if span.name in _CALLS and by(span, "state")}


def by(span: Received, service: str) -> bool:
    return span.resource["service.name"] == f"lockstep-{service}"
