"""Turns a request into streams that are ready to run: finds the model, encodes prompts, opens journals.

It never chooses a worker: each stream does that for itself, again for each attempt.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid

from lockstep_router.generation.answer_grammar import answer_grammar
from lockstep_router.generation.parsing import Parsing, choose_parsing
from lockstep_router.generation.prompts import Prompt, PromptEncoder
from lockstep_router.generation.request import Conversation, GenerationRequest, PromptSource
from lockstep_router.generation.sampling import derive_seed, resolve_sampling, with_seed
from lockstep_router.generation.tools import ToolUse
from lockstep_router.streams.journal import Journal
from lockstep_router.text.tokenizer import Tokenizer
from lockstep_router.workers import Workers

BYTES_OF_AN_ID = 36
"""Memory of one token id in a list: the reference and the integer."""

_FORMS_OF_TEXT = frozenset({"response_format", "text.format"})
"""Fields whose grammar is about an answer's text: calls may take its place."""


@dataclass
class Prepared:
    """A request that fits its model. Not changed after construction; not frozen, for speed."""

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
    continues_prompts: bool = False
    """Whether the answers continue the prompts' texts; else they begin texts of their own."""
    begun: list[worker_pb2.StreamTokens] | None = None
    """What each choice has already, if another router began the request; None: it begins here."""

    prompt_tokens: int = field(init=False)
    """Tokens of all prompts together."""
    prompt_bytes: int = field(init=False)
    """Approximate memory of all prompts together."""

    def __post_init__(self) -> None:
        if len(self.prompts) == 1:
            (only,) = self.prompts
            self.prompt_tokens, self.prompt_bytes = len(only.ids), bytes_of(only)
        else:
            self.prompt_tokens = sum([len(prompt.ids) for prompt in self.prompts])
            self.prompt_bytes = sum([bytes_of(prompt) for prompt in self.prompts])


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
    arrived_at, timeout_s = workers.loop.time(), request.caller.timeout_s
    if timeout_s is None:
        return await _prepare(request, workers, encoder, arrived_at, max_wait_s, count, priority)
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
    waited_s = workers.loop.time() - arrived_at
    may_wait_s = min(max_wait_s, request.caller.timeout_s or math.inf) - waited_s
    workers.within_wait(workers.ready(card.name, card.digest), may_wait_s, priority)
    use = request.tools
    form = request.sampling.grammar if request.sampling.HasField("grammar") else None
    _check_grammar(form, use, workers, card)
    samplings: list[inference_pb2.Sampling] = []

    def check(source: PromptSource, prompt: Prompt) -> None:
        # Before the next prompt is encoded: ids take far more memory than their text.
        samplings.append(resolve_sampling(request, prompt, source.field, card))
        count(prompt)

    encoded = await encoder.encode_all(request.prompts, tokenizer, card, keep_text=request.echo, check=check)
    parsing = choose_parsing(request.prompts[0], encoded[0].ids, tokenizer, card, encoder.formats)
    if parsing is not None and (grammar := answer_grammar(form, use, parsing, tokenizer)) is not None:
        if grammar is form:
            parsing = None  # nothing else is in the answer
        else:
            samplings[0].grammar.CopyFrom(grammar)
    base, caller = workers.rng.randbytes(12).hex(), request.caller
    journals: list[Journal] = []
    for index, (prompt, sampling) in enumerate(zip(encoded, samplings, strict=True)):
        seed = workers.rng.getrandbits(63) if request.seed is None else request.seed % 2**64
        for choice in range(request.choices_per_prompt):
            if request.choices_per_prompt == 1:
                seeded = sampling
                seeded.seed = seed
            else:
                seeded = with_seed(sampling, derive_seed(seed, choice))
            journals.append(
                Journal(
                    f"{base}-{index}-{choice}",
                    card.name,
                    card.digest,
                    prompt.ids,
                    seeded,
                    caller.session,
                    caller.tenant,
                    caller.traceparent,
                    arrived_at,
                    caller.timeout_s,
                    priority,
                    caller.tracestate,
                    caller.trace,
                    request_id=caller.request_id,
                )
            )
    return Prepared(
        card,
        tokenizer,
        encoded,
        journals,
        request.choices_per_prompt,
        request.stops,
        parsing,
        request.kept_per_prompt,
        not isinstance(request.prompts[0], Conversation),
    )


def _check_grammar(
    form: inference_pb2.Grammar | None, use: ToolUse | None, workers: Workers, card: worker_pb2.ModelCard
) -> None:
    """Raise INVALID_REQUEST if the form of the text cannot be combined with tools, or if a grammar is needed and no
    worker of the model takes any. A worker that starts does not know it yet: while none is ready, the request waits.
    """
    if form is not None:
        field = form.field
        if use is not None and field not in _FORMS_OF_TEXT:
            raise invalid(field, "cannot be combined with tools")
    elif use is None or use.is_free:
        return
    else:
        field = "tool_choice" if use.is_required else "tools"
    is_ready = workers.ready(card.name, card.digest)
    if not card.grammar_engine and is_ready and not workers.ready(card.name, card.digest, grammars=True):
        raise invalid(field, f"is not supported by the workers of {card.name!r}")
