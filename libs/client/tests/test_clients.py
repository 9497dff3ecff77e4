"""The clients over real connections that break, are silent, or are refused."""

import asyncio
import json
import socket
import ssl
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from fake_router import FakeRouter, error, serving, text_of
from lockstep_client import (
    AsyncLockstepClient,
    AuthenticationError,
    ConnectionFailedError,
    Finish,
    InternalError,
    LockstepClient,
    LockstepError,
    Policy,
    RateLimitError,
    StreamLost,
    TextPiece,
    Usage,
)

POLICY = Policy(backoff_s=0.01, timeout_s=30.0)
QUESTION = [{"role": "user", "content": "hi"}]
OPTIONS = {"model": "reference", "max_tokens": 8, "seed": 3}


def expected(prompt=QUESTION, seed=3):
    return text_of(json.dumps(prompt), seed, 8)


def text(events):
    return "".join(event.text for event in events if isinstance(event, TextPiece))


class Sync:
    """Calls the blocking client from a test of both."""

    def __init__(self, urls, **options):
        self.client = LockstepClient(urls, **{"policy": POLICY, **options})

    async def call(self, name, *args, **fields):
        return await asyncio.to_thread(lambda: getattr(self.client, name)(*args, **fields))

    async def stream(self, name, *args, **fields):
        return await asyncio.to_thread(lambda: list(getattr(self.client, name)(*args, stream=True, **fields)))

    async def close(self):
        await asyncio.to_thread(self.client.close)

    async def close_stream(self, stream):
        await asyncio.to_thread(stream.close)

    async def first(self, count, name, *args, **fields):
        def leave():
            with getattr(self.client, name)(*args, stream=True, **fields) as stream:
                events = iter(stream)
                return [next(events) for _ in range(count)]

        return await asyncio.to_thread(leave)

    async def closed(self, received, name, *args, **fields):
        """Read a stream, which another thread closes once something came."""
        stream = await asyncio.to_thread(lambda: getattr(self.client, name)(*args, stream=True, **fields))
        reading = asyncio.create_task(asyncio.to_thread(lambda: received.extend(stream)))
        await until(lambda: received)
        await asyncio.to_thread(stream.close)
        await reading


class Async:
    """The same of the client for asyncio."""

    def __init__(self, urls, **options):
        self.client = AsyncLockstepClient(urls, **{"policy": POLICY, **options})

    async def call(self, name, *args, **fields):
        return await getattr(self.client, name)(*args, **fields)

    async def stream(self, name, *args, **fields):
        return [event async for event in await getattr(self.client, name)(*args, stream=True, **fields)]

    async def close(self):
        await self.client.aclose()

    async def close_stream(self, stream):
        await stream.aclose()

    async def first(self, count, name, *args, **fields):
        async with await getattr(self.client, name)(*args, stream=True, **fields) as stream:
            events = aiter(stream)
            return [await anext(events) for _ in range(count)]

    async def closed(self, received, name, *args, **fields):
        """Read a stream, which another task closes once something came."""
        stream = await getattr(self.client, name)(*args, stream=True, **fields)

        async def read():
            async for event in stream:
                received.append(event)

        reading = asyncio.create_task(read())
        await until(lambda: received)
        await stream.aclose()
        await reading


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(params=[Sync, Async])
def make(request):
    return request.param


@pytest.fixture
def router():
    return FakeRouter()


async def test_chat_whole_and_streamed(make, router):
    with serving(router) as server:
        caller = make(server.url)
        answer = await caller.call("chat", QUESTION, **OPTIONS)
        assert (answer.text, answer.choices[0].finish_reason) == (expected(), "length")
        assert answer.usage.total_tokens == 13
        events = await caller.stream("chat", QUESTION, **OPTIONS, logprobs=True, n=2, session="s")
    for choice in (0, 1):
        pieces = [event for event in events if isinstance(event, TextPiece) and event.choice == choice]
        assert text(pieces) == expected(seed=3 + choice)
        assert "".join(entry.token for piece in pieces for entry in piece.logprobs) == text(pieces)
    assert [event for event in events if isinstance(event, Finish)] == [
        Finish(choice, "length", event_id=event.event_id)
        for choice, event in enumerate(each for each in events if isinstance(each, Finish))
    ]
    assert isinstance(events[-1], Usage)
    assert router.seen[-1][2]["x-session-id"] == "s"


async def test_complete_models_and_tokens(make, router):
    with serving(router) as server:
        caller = make(server.url)
        assert (await caller.call("complete", "hi", **OPTIONS, logprobs=1)).text == expected("hi")
        events = await caller.stream("complete", "hi", **OPTIONS, logprobs=1, extra={"future": 1})
        assert text(events) == expected("hi")
        assert router.generations[-1]["future"] == 1
        (model,) = await caller.call("models")
        assert (model.id, model.max_model_len) == ("reference", 2048)
        assert (await caller.call("tokenize", "hi", model="reference")).tokens == (1, 2, 3)
        assert await caller.call("detokenize", [1, 2], model="reference") == "abc"


@pytest.mark.parametrize("cut", [0, 1, 17, 300, 301, 777, 1200])
async def test_reset_connection_is_resumed(make, router, cut):
    with serving(router, cuts=[cut, 5, 60]) as server:
        assert text(await make(server.url).stream("chat", QUESTION, **OPTIONS)) == expected()
    assert len(router.generations) == 1


async def test_silent_connection_is_resumed(make, router):
    policy = replace(POLICY, silence_timeout_s=4.0)  # an answer on a busy machine is no silence
    with serving(router, hangs=[500]) as server:
        assert text(await make(server.url, policy=policy).stream("chat", QUESTION, **OPTIONS)) == expected()
    assert [method for method, *_ in router.seen] == ["POST", "GET"]


async def test_connection_that_vanishes_is_noticed_by_the_missing_comment(make, router):
    router.max_silence = "0.5"
    # It would be noticed too late without the time that the router sends.
    policy = replace(POLICY, timeout_s=20.0, silence_timeout_s=600.0, keepalive_slack_s=3.5)
    with serving(router, hangs=[500]) as server:
        assert text(await make(server.url, policy=policy).stream("chat", QUESTION, **OPTIONS)) == expected()
    assert [method for method, *_ in router.seen] == ["POST", "GET"]


async def test_killed_router_is_replaced_by_another(make):
    first, second = FakeRouter("first"), FakeRouter("second", 3)
    with serving(first) as one, serving(second) as two:

        def dying(server, respond, *request):
            """The first router that is asked dies with its stream."""
            if not first.seen and not second.seen:
                server.cuts.append(700)
                server.refuse()
            return respond(*request)

        for server in (one, two):
            server.router.respond = partial(dying, server, server.router.respond)
        events = await make([one.url, two.url]).stream("chat", QUESTION, **OPTIONS)
    assert text(events) == expected()
    assert len(first.generations) == len(second.generations) == 1


async def test_refused_connections_and_restart_on_the_same_port(make):
    router = FakeRouter()
    with serving(router) as server:
        port = server.port
    caller = make(f"http://127.0.0.1:{port}/v1", policy=replace(POLICY, backoff_s=0.2, retries=30))
    with serving(router, port=port, cuts=[600]) as server:
        task = asyncio.create_task(caller.stream("chat", QUESTION, **OPTIONS))
        await asyncio.sleep(0)
        assert text(await task) == expected()
        server.cuts.append(600)
        forget = threading.Event()
        respond = router.respond

        def restarted(method, *request):
            if method == "GET" and not forget.is_set():
                forget.set()
                router.forget()
            return respond(method, *request)

        router.respond = restarted
        assert text(await caller.stream("chat", QUESTION, **OPTIONS)) == expected()
        assert forget.is_set()


async def test_lost_stream_names_what_came(make, router):
    router.resumes = False
    policy = replace(POLICY, on_lost="error")
    with serving(router, cuts=[900]) as server:
        with pytest.raises(StreamLost) as lost:
            await make(server.url, policy=policy).stream("chat", QUESTION, **OPTIONS)
        assert expected().startswith(lost.value.received.texts[0])
        assert lost.value.received.texts[0]
        events = await make(server.url, policy=policy).stream("chat", QUESTION, **OPTIONS, on_lost="restart")
        assert text(events) == expected()


async def test_leaving_cancels_on_the_router(make, router):
    with serving(router) as server:
        caller = make(server.url)
        events = await caller.first(2, "chat", QUESTION, **OPTIONS)
        assert expected().startswith(text(events))
        assert [method for method, *_ in router.seen] == ["POST", "DELETE"]
        await caller.stream("chat", QUESTION, **OPTIONS)
        assert [method for method, *_ in router.seen] == ["POST", "DELETE", "POST"]
    assert len(router.kept) == 1


async def test_closed_stream_is_an_error_for_who_reads_it(make, router):
    received = []
    with serving(router, hangs=[900]) as server, pytest.raises(ConnectionFailedError, match="was closed") as closed:
        async with asyncio.timeout(20):
            await make(server.url).closed(received, "chat", QUESTION, **OPTIONS)
    assert text(received)
    assert closed.value.received.texts[0] == text(received)
    assert [method for method, *_ in router.seen] == ["POST", "DELETE"]


async def test_stream_that_was_closed_between_two_events_is_an_error_for_who_reads_on(router):
    with serving(router) as server:
        stream = await Async(server.url).client.chat(QUESTION, **OPTIONS, stream=True)
        events = aiter(stream)
        await anext(events)
        await asyncio.create_task(stream.aclose())
        with pytest.raises(ConnectionFailedError, match="was closed"):
            _ = [event async for event in events]
    assert [method for method, *_ in router.seen] == ["POST", "DELETE"]


@pytest.mark.parametrize("refusal", [error(422, "invalid_request", "another body"), error(409, "stream_moved", "gone")])
async def test_refused_stream_cancels_nothing(make, router, refusal):
    """What runs under its key is another request's."""
    router.refusals = [refusal] * 2
    with serving(router) as server:
        with pytest.raises(LockstepError):
            await make(server.url).stream("chat", QUESTION, **OPTIONS)
        with pytest.raises(LockstepError):
            await make(server.url).call("chat", QUESTION, **OPTIONS)
    assert [method for method, *_ in router.seen] == ["POST", "POST"]


async def test_more_answers_than_are_wanted_have_no_key(make, router):
    with serving(router) as server:
        caller = make(server.url)
        await caller.call("complete", "question", model="reference", max_tokens=5, best_of=3)
        await caller.call("complete", "question", model="reference", max_tokens=5, n=2, best_of=2)
    assert ["idempotency-key" in headers for *_, headers in router.seen] == [False, True]


async def test_cancelled_task_cancels_on_the_router(router):
    with serving(router, hangs=[600]) as server:
        caller = Async(server.url)
        gained = asyncio.Event()

        async def read():
            async with await caller.client.chat(QUESTION, **OPTIONS, stream=True) as stream:
                async for _ in stream:
                    gained.set()

        task = asyncio.create_task(read())
        await gained.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [method for method, *_ in router.seen] == ["POST", "DELETE"]


async def test_errors_are_typed(make, router):
    router.refusals = [error(401, "invalid_api_key", "no such key"), (429, {"retry-after": "3600"}, b"{}")]
    with serving(router) as server:
        caller = make(server.url, api_key="sk-1")
        with pytest.raises(AuthenticationError, match="no such key"):
            await caller.call("chat", QUESTION, **OPTIONS)
        with pytest.raises(RateLimitError) as limited:
            await caller.stream("chat", QUESTION, **OPTIONS)
        assert limited.value.retry_after_s == 3600
        router.error_after = (4, {"message": "bad", "code": "internal"})
        with pytest.raises(InternalError, match="bad") as failed:
            await caller.stream("chat", QUESTION, **OPTIONS)
        assert failed.value.received.texts[0]
    assert router.seen[0][2]["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("session", ["José", "a\nb", " a", "a ", "a\x7f"])
async def test_session_that_no_header_can_have_is_refused_at_once(make, router, session):
    with serving(router) as server:
        caller = make(server.url)
        with pytest.raises(ValueError, match="session must be"):
            await caller.call("chat", QUESTION, **OPTIONS, session=session)
        assert not router.seen
        assert (await caller.call("chat", QUESTION, **OPTIONS, session="José".encode().hex())).text == expected()


@pytest.mark.parametrize("key", ["sk-1 ", "sk-1\n", "sk-\u00e9"])
def test_key_that_no_header_can_have_is_refused(make, key):
    with pytest.raises(ValueError, match="api_key must be") as refused:
        make("http://127.0.0.1:9", api_key=key)
    assert "sk-" not in str(refused.value)


async def test_closed_client_sends_nothing(make, router):
    with serving(router) as server:
        caller = make(server.url)
        stream = await caller.call("chat", QUESTION, **OPTIONS, stream=True)
        await caller.close()
        await caller.close_stream(stream)
        with pytest.raises(ConnectionFailedError, match="is closed"):
            await caller.call("chat", QUESTION, **OPTIONS)
        with pytest.raises(ConnectionFailedError, match="is closed"):
            await caller.stream("chat", QUESTION, **OPTIONS)
        with pytest.raises(ConnectionFailedError, match="is closed"):
            await caller.call("models")
    assert [method for method, *_ in router.seen] == ["POST"]


async def test_names_with_several_addresses(make, router, monkeypatch):
    """Two addresses of one name: no router listens at the first."""
    with serving(router, host="127.0.0.2") as server:
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, server.port)) for host in ("127.0.0.3", "127.0.0.2")
        ]
        look_up = socket.getaddrinfo

        def addresses(host, *args, **options):
            return found if host == "routers.example" else look_up(host, *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", addresses)
        caller = make(f"http://routers.example:{server.port}/v1")
        for _ in range(4):
            assert text(await caller.stream("chat", QUESTION, **OPTIONS)) == expected()
    assert {headers["host"] for *_, headers in router.seen} == {f"routers.example:{server.port}"}


async def test_proxy_of_the_environment(make, router, monkeypatch):
    respond = router.respond
    router.respond = lambda method, url, *rest: respond(method, url.removeprefix("http://routers.example:81"), *rest)
    with serving(router) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        assert text(await make("http://routers.example:81/v1").stream("chat", QUESTION, **OPTIONS)) == expected()
        assert len(router.seen) == 1
        assert text(await make(server.url).stream("chat", QUESTION, **OPTIONS)) == expected()


@pytest.mark.parametrize("kind", [LockstepClient, AsyncLockstepClient])
def test_certificates_are_loaded_only_where_there_may_be_tls(kind, monkeypatch):
    def load(*_, **__):
        raise AssertionError("certificates are loaded, which takes longer than all else")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", load)
    kind(["http://127.0.0.1:1/v1", "http://router.test/v1"])
    with pytest.raises(AssertionError, match="certificates"):
        kind(["http://127.0.0.1:1/v1", "https://router.test/v1"])
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "https://proxy.test")
    with pytest.raises(AssertionError, match="certificates"):
        kind(["http://router.test/v1"])


async def test_deadline_ends_a_silent_answer(make, router):
    with serving(router, hangs=[0]) as server:
        began_s = time.monotonic()
        with pytest.raises(Exception, match=r"not complete after 0\.3 s|connection"):
            await make(server.url).stream("chat", QUESTION, **OPTIONS, timeout_s=0.3)
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(("timeout_s", "is_told"), [(80_000.0, True), (90_000.0, False), (1e9, False)])
async def test_time_that_routers_refuse_is_not_told(make, router, timeout_s, is_told):
    """They take a day at most."""
    with serving(router) as server:
        await make(server.url).call("chat", QUESTION, **OPTIONS, timeout_s=timeout_s)
    assert ("x-request-timeout" in router.seen[0][2]) is is_told
