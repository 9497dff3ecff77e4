"""Computes the embeddings of one request's texts: each text is a stream without tokens, a few of them at a time.

A stream whose worker dies is sent to another one, from its beginning. Equal texts have equal embeddings on all workers
with equal numerics, whatever else these compute.
"""

import asyncio
import math
import secrets
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_router.generation.preparation import bytes_of
from lockstep_router.generation.prompts import Prompt, PromptEncoder
from lockstep_router.generation.request import Caller, PromptSource
from lockstep_router.settings import RouterSettings
from lockstep_router.streams import Journal, Stream
from lockstep_router.workers import Workers

MAX_VALUES = 1 << 20
"""Most numbers of one answer: as JSON, they take up to 25 bytes each."""


@dataclass(frozen=True)
class EmbeddingRequest:
    """One or more texts whose embeddings are wanted."""

    model: str
    caller: Caller
    texts: tuple[PromptSource, ...]
    dimensions: int | None = None
    """None: all that the model gives."""


@dataclass(frozen=True)
class PreparedEmbedding:
    """A request for embeddings that fits its model."""

    card: worker_pb2.ModelCard
    prompts: list[Prompt]
    journals: list[Journal]
    dimensions: int | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all texts together."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def prompt_bytes(self) -> int:
        """Approximate memory of all texts together."""
        return sum(map(bytes_of, self.prompts))


async def prepare_embedding(
    request: EmbeddingRequest,
    workers: Workers,
    encoder: PromptEncoder,
    max_wait_s: float,
    count: Callable[[Prompt], None],
    priority: int = 0,
) -> PreparedEmbedding:
    """Do everything that comes before the choice of a worker. `count` is called with each text that is encoded;
    `priority` is the class of the request's streams.

    Raises:
        LockstepError: the model gives no embeddings, or none of this size; a text is longer than its context; there is
            no such model; the request would wait longer than `max_wait_s`, or its timeout has passed.
    """
    arrived_at, timeout_s = asyncio.get_running_loop().time(), request.caller.timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            card, tokenizer = await workers.find_version(request.model, request.caller.session)
            dimensions = _check_size(request, card)
            waited_s = asyncio.get_running_loop().time() - arrived_at
            may_wait_s = min(max_wait_s, timeout_s or math.inf) - waited_s
            workers.within_wait(workers.ready(card.name, card.digest), may_wait_s, priority)

            def check(source: PromptSource, prompt: Prompt) -> None:
                _check_length(source, prompt, card)
                count(prompt)

            prompts = await encoder.encode_all(request.texts, tokenizer, card, check=check)
    except TimeoutError:
        sentence = f"the request's timeout of {timeout_s:g} s has passed before its texts were ready"
        raise LockstepError(ErrorCode.DEADLINE_EXCEEDED, sentence) from None
    base = secrets.token_hex(12)
    journals = [
        Journal(
            stream_id=f"{base}-{index}",
            model=card.name,
            digest=card.digest,
            prompt_ids=prompt.ids,
            sampling=inference_pb2.Sampling(),
            session=request.caller.session,
            tenant=request.caller.tenant,
            traceparent=request.caller.traceparent,
            tracestate=request.caller.tracestate,
            trace=request.caller.trace,
            request_id=request.caller.request_id,
            arrived_at=arrived_at,
            timeout_s=timeout_s,
            priority=priority,
            embeds=True,
        )
        for index, prompt in enumerate(prompts)
    ]
    return PreparedEmbedding(card, prompts, journals, dimensions)


class Embedding:
    """Runs the streams of a prepared request.

    Args:
        prepared: the request.
        workers: those that may compute it.
        settings: the router's.
        streams: most streams at a time.
    """

    def __init__(
        self, prepared: PreparedEmbedding, workers: Workers, settings: RouterSettings, *, streams: int
    ) -> None:
        self.failovers = 0
        """Number of times that a text moved to another worker."""
        self.tokens = 0
        """Tokens of the texts that are done."""
        self._prepared = prepared
        self._workers = workers
        self._settings = settings
        self._streams = streams
        self._failed: asyncio.Future[None] | None = None
        """Gets the error that ends it, while it runs."""

    def fail(self, error: LockstepError) -> None:
        """End it with an error."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    @property
    def journal_bytes(self) -> int:
        """Approximate memory of its texts; the vectors have a limit of their own."""
        return self._prepared.prompt_bytes

    async def run(self, take: Callable[[int, "array[float]"], None]) -> None:
        """Compute all embeddings, in any order. `take` is called with the index of each text and its vector.

        Raises:
            LockstepError: one of them cannot be computed.
        """
        waiting = iter(enumerate(self._prepared.journals))
        tasks = [asyncio.create_task(self._run_some(waiting, take)) for _ in range(self._streams)]
        self._failed = failed = asyncio.get_running_loop().create_future()
        all_done = asyncio.gather(*tasks)
        try:
            await asyncio.wait((all_done, failed), return_when=asyncio.FIRST_COMPLETED)
            (failed if failed.done() else all_done).result()
        finally:
            failed.cancel()
            all_done.cancel()
            for task in tasks:
                task.cancel()
            # The first two as well: an exception that is not retrieved is logged.
            await asyncio.gather(all_done, failed, *tasks, return_exceptions=True)

    async def _run_some(
        self, waiting: Iterator[tuple[int, Journal]], take: Callable[[int, "array[float]"], None]
    ) -> None:
        for index, journal in waiting:
            stream = Stream(journal, self._workers, self._settings, _nothing)
            await stream.run()
            self.failovers += stream.failovers
            self.tokens += len(journal.prompt_ids)
            # The answer of the attempt that finished is the last one.
            take(index, self._vector(stream.take()[-1].embedding))

    def _vector(self, content: bytes) -> "array[float]":
        size = self._prepared.card.embedding.size
        vector = array("f", content) if len(content) == 4 * size else array("f")
        if len(vector) != size or not all(map(math.isfinite, vector)):
            raise LockstepError(ErrorCode.INTERNAL, "a worker sent an embedding that is none")
        dimensions = self._prepared.dimensions
        return vector if dimensions is None else shortened(vector, dimensions)


def shortened(vector: "array[float]", dimensions: int) -> "array[float]":
    """The first numbers of a vector, brought to length 1."""
    first = vector[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in first))
    return array("f", (value / (length or 1.0) for value in first))


def _nothing() -> None:
    """Streams of embeddings have one update, which is taken at their end."""


def _check_size(request: EmbeddingRequest, card: worker_pb2.ModelCard) -> int | None:
    """The wanted size; None: that of the model's vectors."""
    if not card.HasField("embedding"):
        raise invalid("model", f"{card.name!r} gives no embeddings (see the workers' setting embeddings)")
    offered, wanted = card.embedding, request.dimensions
    size = offered.size if wanted is None else wanted
    if size != offered.size and not (size in offered.dimensions or (offered.any_dimension and size < offered.size)):
        sizes = ", ".join(map(str, sorted({*offered.dimensions, offered.size})))
        limit = f"at most {offered.size}" if offered.any_dimension else f"one of {sizes}"
        raise invalid("dimensions", f"is {size}; for {card.name!r} it may be {limit}")
    if size * len(request.texts) > MAX_VALUES:
        raise invalid(
            "input", f"has {len(request.texts)} texts; at {size} numbers each, {MAX_VALUES // size} are allowed"
        )
    return None if size == offered.size else size


def _check_length(source: PromptSource, prompt: Prompt, card: worker_pb2.ModelCard) -> None:
    if len(prompt.ids) > card.context_length:
        raise LockstepError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the text has {len(prompt.ids)} tokens, but this model's maximum context length is"
            f" {card.context_length} tokens",
            field=source.field,
        )
