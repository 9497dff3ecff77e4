"""Routers that do not read what the worker sends them."""

import asyncio
import logging

import grpc
from harness import submit, until
from lockstep_engine import Logprobs, Output, TokenLogprob
from lockstep_worker import service

LARGE = Logprobs(TokenLogprob(1, -1.0), tuple(TokenLogprob(number, -1.0) for number in range(2_000)))
"""A few hundred of them are more than a connection holds for a router that does not read."""


async def test_end_of_a_call_that_its_router_does_not_read_is_one_sentence_in_the_log(worker, monkeypatch, caplog):
    # No time at all: on a busy machine the frames may overflow before the connection is full.
    monkeypatch.setattr(service, "ABORT_TIMEOUT_S", 0.0)
    caplog.set_level(logging.WARNING, "lockstep.worker")  # the tests of routers want errors alone
    router = await worker.greeted()
    await router.send(submit=submit())
    await until(lambda: worker.engine.requests)
    (request,) = worker.engine.requests
    for position in range(10_000):
        worker.engine.give([Output(request, position, (1,), logprobs=(LARGE,))])
        await asyncio.sleep(0)
        if not worker.engine.requests:
            break  # the worker has given the router up
    reason = "the router reads too slowly: the frames waiting for it overflowed"
    await until(lambda: caplog.records)
    assert await router.end() == (grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
    assert [(record.levelname, record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("WARNING", f"a router did not read the end of its call within 0 s: {reason}", None)
    ]
