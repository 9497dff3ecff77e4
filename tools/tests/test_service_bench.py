"""`make bench` times complete streams of the service only; any other stream ends it with an error."""

import asyncio

import pytest
import run as service_bench
from fake_openai import FakeOpenAI, Refusal, events, script
from lockstep_tools.load.endpoint import Endpoint


def time_one(server: FakeOpenAI) -> tuple[float, float]:
    async def ask() -> tuple[float, float]:
        async with Endpoint(server.url).client() as client:
            return await service_bench.stream_times(client, "m", [1, 2, 3])

    return asyncio.run(ask())


def test_a_stream_is_timed_to_its_first_text_and_from_there_to_its_end(server: FakeOpenAI) -> None:
    texts = ["a"] * service_bench.NEW_TOKENS
    server.answer = lambda *_: script(events(texts), pause_s=0.002)
    first_s, rest_s = time_one(server)
    assert first_s > 0
    assert rest_s > 0
    assert first_s + rest_s > 0.002 * (service_bench.NEW_TOKENS - 1)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda *_: Refusal(503, {"error": {"message": "no worker", "code": "no_worker"}}), "failed: no worker"),
        (lambda *_: script(events(["a", "b"])), f"2 tokens, not {service_bench.NEW_TOKENS}"),
    ],
    ids=["refused", "short"],
)
def test_what_is_no_full_stream_measures_nothing(server: FakeOpenAI, answer: object, problem: str) -> None:
    server.answer = answer
    with pytest.raises(SystemExit, match=problem):
        time_one(server)
