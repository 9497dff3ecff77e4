"""Turns a request into streams that are ready to run: finds the model, encodes prompts, opens journals.

It never chooses a worker: each stream does that for itself, again for each attempt.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_router.generation.parsing import Parsing, choose_parsing
from lockstep_router.generation.prompts import Prompt, PromptEncoder
from lockstep_router.generation.request import GenerationRequest, PromptSource
from lockstep_router.generation.sampling import derive_seed, resolve_sampling, with_seed
from lockstep_router.generation.tool_grammar import forced_calls
from lockstep_router.streams.journal import Journal
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.workers import Workers

BYTES_OF_AN_ID = 36
"""Memory of one token id in a list: the reference and the integer."""


@dataclass(frozen=True)
class Prepared:
    """A request that fits its model."""

    card: worker_pb2.ModelCard
    tokenizer: Tokenizer
    prompts: list[Prompt]
    journals: list[Journal]
    """One journal for each choice of each prompt, in the order of the answer's choices."""
    choices_per_prompt: int
    stops: tuple[str, ...]
    parsing: Parsing | None = None
    """None: the answers' text is content alone."""
    kept_per_prompt: int | None = None
    """As in the request."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def prompt_bytes(self) -> int:
        """Approximate memory of all prompts together."""
        return sum(map(bytes_of, self.prompts))


def bytes_of(prompt: Prompt) -> int:
    """Approximate memory of a prompt: its ids, and its text if that is kept."""
    return BYTES_OF_AN_ID * len(prompt.ids) + len(prompt.text)


async def prepare(
    request: GenerationRequest,
    workers: Workers,
    encoder: PromptEncoder,
    max_wait_s: float,
    count: Callable[[Prompt], None],
    priority: int = 0,
) -> Prepared:
    """Do everything that comes before the choice of a worker. `count` is called with each prompt that is encoded;
    `priority` is the class of the request's streams.

    Raises:
        LockstepError: the request does not fit the model, there is no such model, it would wait longer than
            `max_wait_s` (OVERLOADED), or its timeout has passed.
    """
    arrived_at, timeout_s = asyncio.get_running_loop().time(), request.caller.timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await _prepare(request, workers, encoder, arrived_at, max_wait_s, count, priority)
    except TimeoutError:
        raise LockstepError(
            ErrorCode.DEADLINE_EXCEEDED,
            f"the request's timeout of {timeout_s:g} s has passed before its prompts were ready "
            f"({workers.describe_links()})",
        ) from None


async def _prepare(
    request: GenerationRequest,
    workers: Workers,
    encoder: PromptEncoder,
    arrived_at: float,
    max_wait_s: float,
    count: Callable[[Prompt], None],
    priority: int,
) -> Prepared:
    card, tokenizer = await workers.find_version(request.model, request.caller.session)
    # A request that would wait too long is refused before its text costs anything.
    waited_s = asyncio.get_running_loop().time() - arrived_at
    may_wait_s = min(max_wait_s, request.caller.timeout_s or math.inf) - waited_s
    workers.within_wait(workers.ready(card.name, card.digest), may_wait_s, priority)
    use = request.tools
    if request.sampling.HasField("grammar"):
        _check_grammar(request.sampling.grammar.field, workers, card)
        if use is not None:
            raise invalid(request.sampling.grammar.field, "cannot be combined with tools")
    elif use is not None and use.is_required:
        _check_grammar("tool_choice", workers, card)
    samplings: list[inference_pb2.Sampling] = []

    def check(source: PromptSource, prompt: Prompt) -> None:
        # Before the next prompt is encoded: ids take far more memory than their text.
        samplings.append(resolve_sampling(request, prompt, source.field, card))
        count(prompt)

    encoded = await encoder.encode_all(request.prompts, tokenizer, card, keep_text=request.echo, check=check)
    parsing = choose_parsing(request.prompts[0], encoded[0].ids, tokenizer, card, encoder.formats)
    if request.sampling.HasField("grammar"):
        parsing = None  # the answer is what the grammar describes, from its first character on
    elif parsing is not None and use is not None and use.is_required:
        samplings[0].grammar.CopyFrom(forced_calls(use, parsing, tokenizer))
    base = workers.rng.randbytes(12).hex()
    journals: list[Journal] = []
    for index, (prompt, sampling) in enumerate(zip(encoded, samplings, strict=True)):
        seed = workers.rng.getrandbits(63) if request.seed is None else request.seed % 2**64
        for choice in range(request.choices_per_prompt):
            seeded = with_seed(sampling, derive_seed(seed, choice))
            stream_id = f"{base}-{index}-{choice}"
            journals.append(_open_journal(request, stream_id, card, prompt, seeded, arrived_at, priority))
    return Prepared(
        card,
        tokenizer,
        encoded,
        journals,
        request.choices_per_prompt,
        request.stops,
        parsing,
        request.kept_per_prompt,
    )


def _check_grammar(field: str, workers: Workers, card: worker_pb2.ModelCard) -> None:
    """Raise INVALID_REQUEST if no worker of the model takes grammars; `field` is what needs one."""
    if not card.grammar_engine and not workers.ready(card.name, card.digest, grammars=True):
        raise invalid(field, f"is not supported by the workers of {card.name!r}")


def _open_journal(
    request: GenerationRequest,
    stream_id: str,
    card: worker_pb2.ModelCard,
    prompt: Prompt,
    sampling: inference_pb2.Sampling,
    arrived_at: float,
    priority: int,
) -> Journal:
    return Journal(
        stream_id=stream_id,
        model=card.name,
        digest=card.digest,
        prompt_ids=prompt.ids,
        sampling=sampling,
        session=request.caller.session,
        tenant=request.caller.tenant,
        traceparent=request.caller.traceparent,
        arrived_at=arrived_at,
        timeout_s=request.caller.timeout_s,
        priority=priority,
    )
