"""A stream that embeds: one answer with the vector, and refusals by name."""

import dataclasses
import struct

from harness import submit, until
from lockstep_api.v1 import inference_pb2, worker_pb2
from scripted_engine import CONTEXT_LENGTH


def embed(stream_id="e", **fields):
    return submit(stream_id, **({"embed": True, "sampling": None} | fields))


async def test_the_card_says_what_the_model_gives(worker):
    card = (await worker.router().greet()).model
    assert card.embedding == worker_pb2.Embedding(size=4, dimensions=[2])
    worker.engine.model = dataclasses.replace(worker.engine.model, embedding=None)
    assert not (await worker.router().greet()).model.HasField("embedding")


async def test_an_embedding_is_one_answer_beside_tokens(worker):
    router = await worker.greeted()
    await router.send(submit=embed())
    await router.send(submit=submit("s", max_tokens=1))
    await until(lambda: len(worker.engine.requests) == 2)
    worker.engine.step()
    vector, text = (await router.next("tokens")).tokens.streams
    assert (vector.stream_id, vector.attempt, vector.position, list(vector.ids)) == ("e", 1, 0, [])
    assert vector.finish == inference_pb2.FINISH_REASON_STOP
    assert struct.unpack("<4f", vector.embedding) == (3, 1, 2, 3)
    assert text.embedding == b""
    assert not worker.engine.requests


async def test_a_text_may_fill_the_context(worker):
    router = await worker.greeted()
    await router.send(submit=embed(prompt_ids=[1] * CONTEXT_LENGTH))
    await until(lambda: worker.engine.requests)
    (request,) = worker.engine.requests.values()
    assert request.embeds


async def test_what_cannot_be_is_refused(worker):
    router = await worker.greeted()
    await router.send(submit=embed(emitted_ids=[1]))
    assert (await router.next("rejected")).rejected.field == "emitted_ids"
    await router.send(submit=embed(prompt_ids=[1] * (CONTEXT_LENGTH + 1)))
    assert (await router.next("rejected")).rejected.code == "context_length_exceeded"
    worker.engine.model = dataclasses.replace(worker.engine.model, embedding=None)
    await router.send(submit=embed())
    rejected = (await router.next("rejected")).rejected
    assert (rejected.field, rejected.retryable) == ("embed", False)
    assert not worker.engine.requests
