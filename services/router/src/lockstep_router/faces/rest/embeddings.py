"""The answer of POST /v1/embeddings."""

import base64
import sys
from array import array

from pydantic_core import to_json

from lockstep_router.faces.record import Record
from lockstep_router.faces.rest.replies import Client
from lockstep_router.generation.embedding import EmbeddingRequest
from lockstep_router.router import Router


async def answer_embeddings(
    router: Router, request: EmbeddingRequest, *, as_base64: bool, record: Record, client: Client
) -> None:
    """Compute the embeddings and write the answer.

    Raises:
        LockstepError: nothing has been written yet.
    """
    with router.admitted(record.account):
        prepared = await router.prepare_embedding(request, record.account)
        del request
        record.release_body()
        record.prompt_tokens = prepared.prompt_tokens
        entries = [b""] * len(prepared.journals)

        def take(index: int, vector: "array[float]") -> None:
            # One at a time, as they arrive: all together would keep the event loop busy.
            entries[index] = (b"," if index else b"") + _entry(index, vector, as_base64=as_base64)

        async with router.embedding(prepared, record.account) as embedding:
            try:
                await embedding.run(take)
            finally:
                record.failovers = embedding.failovers
        usage = {"prompt_tokens": prepared.prompt_tokens, "total_tokens": prepared.prompt_tokens}
        tail = to_json({"model": prepared.card.name, "usage": usage})[1:]
        body = [b'{"object":"list","data":[', *entries, b"]," + tail]
        with router.holding(body):
            await client.reply_json(body)


def _entry(index: int, vector: "array[float]", *, as_base64: bool) -> bytes:
    if not as_base64:
        return to_json({"object": "embedding", "index": index, "embedding": vector.tolist()})
    if sys.byteorder == "big":
        vector.byteswap()
    content = base64.b64encode(vector.tobytes()).decode()
    return to_json({"object": "embedding", "index": index, "embedding": content})
