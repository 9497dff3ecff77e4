import asyncio
import threading
import time
from collections.abc import Iterator
from math import ceil
from random import Random

import pytest
from fake_openai import Event, FakeOpenAI, Received, Refusal, events, script
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import Prompts, Traffic, drive, record
from lockstep_tools.load.history import History, StreamRequest, violations
from lockstep_tools.load.report import Percentiles, Tally, summarize

TEXTS = ["one", " two", " three", " four"]


def request() -> StreamRequest:
    return StreamRequest("/completions", {"prompt": "zero", "stream_options": {"include_usage": True}})


async def test_a_stream_becomes_a_history(server: FakeOpenAI) -> None:
    server.answer = lambda number, request: script(events(TEXTS, logprobs=True), 0.01)
    async with Endpoint(server.url).client() as client:
        began_s = time.perf_counter()
        history = await record(client, request())
        lasted_s = time.perf_counter() - began_s
    assert violations(history, reference="one two three four", require_ids=True) == []
    assert history.text() == "one two three four"
    assert history.tokens == 4
    assert [piece.tokens for piece in history.pieces] == [1, 1, 1, 1, None, None]
    assert len(history.gaps_s) == 3
    assert 0 < sum(history.gaps_s) < lasted_s
    assert server.received[0].body["stream"] is True


@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_a_stream_that_breaks_is_begun_again_and_measured_as_one(server: FakeOpenAI, kept: int) -> None:
    sent = events(TEXTS)
    server.answer = lambda number, request: script(sent[:kept] if number == 1 else sent, 0.01)
    async with Endpoint(server.url, resumes=True).client() as client:
        history = await record(client, request())
    assert violations(history, reference="one two three four", require_ids=True) == []
    assert len(history.spoken) == history.tokens == 4
    assert len(server.received) == 2


async def test_a_repeat_that_differs_is_a_failure(server: FakeOpenAI) -> None:
    server.answer = lambda number, request: script(
        events(TEXTS)[:2] if number == 1 else events(["other", " two", " three", " four"])
    )
    async with Endpoint(server.url, resumes=True).client() as client:
        history = await record(client, request())
    assert "stream_diverged" in (history.error or "")
    assert history.text() == "one two"


def lost(sent: list[Event]) -> list[Event]:
    return sent[:1] + sent[2:]


def doubled(sent: list[Event]) -> list[Event]:
    return [*sent[:2], *sent[1:]]


def reordered(sent: list[Event]) -> list[Event]:
    return [sent[1], sent[0], *sent[2:]]


def unfinished(sent: list[Event]) -> list[Event]:
    return sent[:-1]


def miscounted(sent: list[Event]) -> list[Event]:
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    return [*sent[:-2], Event({"choices": [], "usage": usage}), sent[-1]]


@pytest.mark.parametrize("damage", [lost, doubled, reordered, unfinished, miscounted])
@pytest.mark.parametrize("chat", [False, True])
async def test_damage_on_the_wire_is_found(server: FakeOpenAI, damage, chat: bool) -> None:
    server.answer = lambda number, request: script(damage(events(TEXTS, chat=chat, logprobs=True)))
    async with Endpoint(server.url).client() as client:
        history = await record(client, StreamRequest("/chat/completions" if chat else "/completions", {}))
    assert history.error is None
    assert violations(history, reference="".join(TEXTS))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (Refusal(404, {"error": {"message": "no such model", "code": "model_not_found"}}), "no such model"),
        (Refusal(500, "?"), "the server answered with status 500"),
        (script([Event({"error": {"message": "the worker is lost"}})]), "the worker is lost"),
        (script([Event("not json")]), "not JSON"),
        (script([Event("[1]")]), "no object"),
    ],
)
async def test_a_failure_is_in_the_history(server: FakeOpenAI, answer, sentence: str) -> None:
    server.answer = lambda number, request: answer
    async with Endpoint(server.url).client() as client:
        history = await record(client, request())
    assert sentence in (history.error or "")
    assert history.ended_s is not None


async def test_a_broken_connection_is_a_failure(server: FakeOpenAI) -> None:
    server.cut = True
    async with Endpoint(server.url).client() as client:
        history = await record(client, request())
    assert "broke" in (history.error or "")
    assert history.text() == "Hello world"


async def test_clients_send_all_requests_and_no_more_than_allowed_at_a_time(server: FakeOpenAI) -> None:
    active = most = 0

    def answer(number: int, request: Received) -> Iterator[bytes | float]:
        nonlocal active, most
        active += 1
        most = max(most, active)
        yield from script(events(TEXTS), 0.005)
        active -= 1

    server.answer = answer
    make = Prompts("fake", prompt_tokens=4, max_tokens=4)
    histories = await drive(Endpoint(server.url), [make(number) for number in range(10)], clients=3)
    assert [history.number for history in histories] == list(range(10))
    assert {history.client for history in histories} == {0, 1, 2}
    assert 2 <= most <= 3
    report = summarize(histories, require_ids=True)
    assert report.clean
    assert (report.streams, report.tokens, report.prompt_tokens) == (10, 40, 50)


async def test_a_mark_finds_the_silence_that_it_caused(server: FakeOpenAI) -> None:
    """Bounds are what the server and the test have measured, so that they hold on a machine of any speed."""
    is_noted, sent_s = threading.Event(), list[float]()

    def answer(number: int, received: Received) -> Iterator[bytes | float]:
        sent = events([str(n) for n in range(12)])
        is_first = received.body["prompt"] == "0"
        yield from script(sent[:5], 0.01)
        if is_first:
            sent_s.append(time.monotonic())
        yield from script(sent[5:6])
        if is_first:
            assert is_noted.wait(30)
            yield 0.3
            sent_s.append(time.monotonic())
        yield from script(sent[6:], 0.01)

    def make(number: int) -> StreamRequest:
        return StreamRequest("/completions", {"prompt": str(number), "stream_options": {"include_usage": True}})

    server.answer = answer
    async with Traffic(Endpoint(server.url), make, clients=2) as traffic, asyncio.timeout(30):
        await traffic.streaming()
        first = traffic.histories[0]
        while len(first.spoken) < 6:
            await asyncio.sleep(0.001)
        moment = traffic.note_moment("a pause")
        is_noted.set()
        while len(first.spoken) < 7:
            await asyncio.sleep(0.001)
    ended_s = time.monotonic()
    assert traffic.moments == [moment]
    before_s, after_s = sent_s
    assert 0.3 <= after_s - moment.at_s <= traffic.gap_s(moment) <= ended_s - before_s
    assert traffic.running == []
    assert all(violations(history, require_ids=True) == [] for history in traffic.histories)
    later = traffic.note_moment("after all")
    assert traffic.gap_s(later) == 0.0


async def test_a_run_that_keeps_no_histories_numbers_and_reports_all_streams(server: FakeOpenAI) -> None:
    server.answer = lambda number, request: script(events(TEXTS), 0.001)
    most, tally, ended = 0, Tally(), []

    def on_end(history: History) -> None:
        nonlocal most
        most = max(most, len(traffic.histories))
        tally.add(history, require_ids=True)
        ended.append(history)

    traffic = Traffic(Endpoint(server.url), lambda number: request(), clients=2, requests=9, on_end=on_end, keeps=False)
    async with traffic:
        await traffic.finish()
    assert sorted(history.number for history in ended) == list(range(9))
    assert (most, traffic.histories) == (2, [])
    assert tally.report() == summarize(ended, require_ids=True)
    assert tally.report().streams == 9


async def test_failing_requests_are_counted_and_do_not_end_the_load(server: FakeOpenAI) -> None:
    refusal = Refusal(503, {"error": {"message": "draining"}})
    server.answer = lambda number, request: refusal if number == 2 else script(events(TEXTS))
    histories = await drive(Endpoint(server.url), [request()] * 4, clients=1)
    report = summarize(histories)
    assert (report.failed, report.errors, report.violations) == (1, {"draining": 1}, [])
    assert not report.clean


async def test_an_exception_ends_the_load_at_once(server: FakeOpenAI) -> None:
    server.answer = lambda number, request: script(events(TEXTS), 60.0)
    traffic = Traffic(Endpoint(server.url), lambda number: request(), clients=2)

    async def interrupted() -> None:
        async with asyncio.timeout(30), traffic:
            await traffic.streaming()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await interrupted()
    assert all(history.cancelled for history in traffic.histories)


async def test_waiting_for_streams_has_an_end(server: FakeOpenAI) -> None:
    server.answer = lambda number, request: [0.3]
    async with Traffic(Endpoint(server.url), lambda number: request(), clients=1, requests=1) as traffic:
        with pytest.raises(TimeoutError):
            await traffic.streaming(timeout_s=0.1)
    assert traffic.histories[0].text() == ""


def test_requests_are_a_function_of_seed_and_number() -> None:
    make, again, other = Prompts("m", seed=1), Prompts("m", seed=1), Prompts("m", seed=2)
    assert make(5) == again(5)
    assert make(5) != make(6)
    assert make(5).body["prompt"] != other(5).body["prompt"]
    assert make(5).body["seed"] != other(5).body["seed"]


def test_a_spread_is_by_nearest_rank() -> None:
    assert Percentiles.of([number / 1000 for number in range(100, 0, -1)]) == Percentiles(50.0, 99.0, 100.0)
    assert Percentiles.of([0.25]) == Percentiles(250.0, 250.0, 250.0)
    assert Percentiles.of([]) is None


def test_a_sample_keeps_counts_and_has_the_percentiles_of_its_values() -> None:
    random = Random(0)
    for size in (1, 2, 99, 100, 101, 5000):
        values = [random.expovariate(1e3) for _ in range(size)]
        ordered = sorted(values)
        ranks = [ordered[max(0, ceil(share * size) - 1)] for share in (0.5, 0.99, 1.0)]
        assert Percentiles.of(values) == Percentiles(*(round(value * 1e3, 2) for value in ranks))
