"""Texts are worked on without blocking the event loop, and never wait without limit."""

import asyncio
import threading

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.generation.request import TextPrompt
from lockstep_router.memory import MemoryTrimmer
from lockstep_router.text.threads import INLINE_CHARS, TextThreads
from router_cluster import eventually


@pytest.fixture
def threads():
    made = TextThreads(1, MemoryTrimmer())
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("chars", "together", "prefix"),
    [
        (INLINE_CHARS, 0, "MainThread"),
        (INLINE_CHARS, INLINE_CHARS + 1, "text"),
        (INLINE_CHARS + 1, 0, "text"),
        (100_000, 0, "long-text"),
        (1_000_000, 0, "longest-text"),
    ],
)
async def test_each_length_has_its_threads(threads, chars, together, prefix):
    name = await threads.run(lambda: threading.current_thread().name, chars, chars_together=together)
    assert name.partition("_")[0] == prefix


async def test_text_that_would_wait_too_long_is_refused_and_shorter_ones_are_not(threads):
    release = threading.Event()
    try:
        running = asyncio.create_task(threads.run(release.wait, 100_000_000))
        await asyncio.sleep(0)
        with pytest.raises(LockstepError) as caught:
            await threads.run(lambda: None, 1_000_000)
        assert caught.value.code is ErrorCode.OVERLOADED
        assert caught.value.retry_after_s >= 1
        assert await threads.run(lambda: 3, 5_000) == 3
    finally:
        release.set()
    await running
    assert await threads.run(lambda: 4, 1_000_000) == 4


async def test_texts_of_clients_that_have_left_do_not_count(threads):
    release = threading.Event()
    try:
        running = asyncio.create_task(threads.run(release.wait, 1_000_000))
        waiting = asyncio.create_task(threads.run(lambda: pytest.fail("never begun"), 100_000_000))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        following = asyncio.create_task(threads.run(lambda: 5, 1_000_000))
    finally:
        release.set()
    assert await following == 5
    await running


async def test_many_medium_prompts_of_one_request_leave_the_loop_free(cluster, monkeypatch):
    """Each is short enough for the event loop, all of them are not."""
    prompts = [f"{index} " + "hello <|world " * 70 for index in range(64)]
    expected = [cluster.tokenizer.encode(prompt) for prompt in prompts]
    assert all(len(prompt) <= INLINE_CHARS for prompt in prompts)
    card = next(iter(cluster.router.workers.models.values()))
    card.context_length = 1 << 20
    encode, threads_used = cluster.tokenizer.encode, []

    def recorded(*args, **options):
        threads_used.append(threading.get_ident())
        return encode(*args, **options)

    monkeypatch.setattr(cluster.tokenizer, "encode", recorded)
    encoded = await cluster.router.encoder.encode_all(
        [TextPrompt(prompt) for prompt in prompts], cluster.tokenizer, card
    )
    assert [prompt.ids for prompt in encoded] == expected
    assert len(threads_used) == len(prompts)
    assert threading.get_ident() not in threads_used


async def test_tokenizing_ends_with_its_client_and_counts_as_a_request(make_cluster):
    cluster = await make_cluster(1, max_streams=1)
    release = threading.Event()
    pool = cluster.router._threads._longest
    blocking = asyncio.create_task(pool.run(release.wait, 1))
    try:
        text = "hello " * 60_000
        body = {"model": "reference", "prompt": text}
        cluster.workers[0].card.context_length = 1 << 20
        for card in cluster.router.workers.models.values():
            card.context_length = 1 << 20
        asking = asyncio.create_task(cluster.client.post("/tokenize", json=body))
        await eventually(lambda: cluster.router.requests == 1)
        refused = await cluster.client.post("/detokenize", json={"model": "reference", "tokens": [1]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: cluster.router.requests == 0)
    finally:
        release.set()
    await blocking
    assert (await cluster.client.post("/tokenize", json={"model": "reference", "prompt": "hi"})).status_code == 200


async def test_memory_is_returned_when_the_work_has_ended_after_its_caller_had_left():
    class Trimmer(MemoryTrimmer):
        calls = 0

        def trim_soon(self):
            self.calls += 1

    trimmer, begun, release = Trimmer(), threading.Event(), threading.Event()
    threads = TextThreads(1, trimmer)

    def work():
        begun.set()
        release.wait()

    try:
        caller = asyncio.create_task(threads.run(work, 1_000_000))
        await eventually(begun.is_set)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert trimmer.calls == 0
        release.set()
        await eventually(lambda: trimmer.calls == 1)
    finally:
        release.set()
        threads.stop()
