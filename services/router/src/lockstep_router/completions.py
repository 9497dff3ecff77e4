"""Chat and plain completions: from a typed request to an answer written to its client."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics, prompts, sessions
from lockstep_router.access import Record
from lockstep_router.generation import Generation, derive_seed, with_seed
from lockstep_router.journal import Journal
from lockstep_router.openai_format import ChatFormat, Collected, CompletionFormat, Format, Head
from lockstep_router.prompts import Prompt
from lockstep_router.replies import Client, event, json_reply
from lockstep_router.router import Router
from lockstep_router.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from lockstep_router.tokenizer import Tokenizer

Part = tuple[Prompt, inference_pb2.Sampling]
"""A prompt and how its tokens are chosen."""

_DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for plain completions."""


@dataclass(frozen=True)
class Caller:
    """Who asks and how the answer is accounted."""

    headers: Mapping[str, str]
    record: Record


@dataclass(frozen=True)
class Job:
    """A request, ready to run."""

    journals: list[Journal]
    choices_per_prompt: int
    tokenizer: Tokenizer
    stops: tuple[str, ...]
    form: Format


async def answer_chat(router: Router, caller: Caller, request: ChatCompletionRequest, client: Client) -> None:
    """Serve /v1/chat/completions."""
    with router.request():
        _check_choices(request, router.settings.max_n)
        if request.top_logprobs is not None and not request.logprobs:
            raise _invalid("top_logprobs", "needs logprobs to be true")
        session = sessions.session(caller.headers, request.user)
        card, tokenizer = await router.workers.model(request.model, session)
        prompt = await prompts.encode_messages(request.messages, tokenizer, card)
        sampling = prompts.build_sampling(
            request,
            card,
            max_tokens=_fit_chat(request, prompt, card),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        form = ChatFormat(
            Head(f"chatcmpl-{caller.record.request_id}", card.name),
            tokenizer,
            logprobs=bool(request.logprobs),
            include_usage=_wants_usage(request),
        )
        journals = _journals(request, caller, session, card, [(prompt, sampling)])
        job = Job(journals, request.n or 1, tokenizer, request.stops, form)
        await _run(router, job, request, caller, client)


async def answer_completion(router: Router, caller: Caller, request: CompletionRequest, client: Client) -> None:
    """Serve /v1/completions."""
    with router.request():
        _check_choices(request, router.settings.max_n)
        _check_completion(request, router.settings.max_prompts)
        session = sessions.session(caller.headers, request.user)
        card, tokenizer = await router.workers.model(request.model, session)
        encoded = await _encode_prompts(request, tokenizer, card)
        samplings = [
            prompts.build_sampling(
                request, card, max_tokens=_fit_completion(request, prompt, card), logprobs=request.logprobs
            )
            for prompt in encoded
        ]
        choices = request.n or 1
        form = CompletionFormat(
            Head(f"cmpl-{caller.record.request_id}", card.name),
            tokenizer,
            logprobs=request.logprobs is not None,
            include_usage=_wants_usage(request),
            prefixes=_prefixes(encoded, choices, tokenizer) if request.echo else (),
        )
        journals = _journals(request, caller, session, card, list(zip(encoded, samplings, strict=True)))
        job = Job(journals, choices, tokenizer, request.stops, form)
        await _run(router, job, request, caller, client)


async def _run(router: Router, job: Job, request: SamplingFields, caller: Caller, client: Client) -> None:
    """Generate, and write while or after doing so."""
    generation = Generation(
        job.journals,
        choices_per_prompt=job.choices_per_prompt,
        tokenizer=job.tokenizer,
        stops=job.stops,
        workers=router.workers,
        settings=router.settings,
    )
    caller.record.prompt_tokens = generation.usage.prompt_tokens
    metrics.PROMPT_TOKENS.inc(caller.record.prompt_tokens)
    try:
        with router.running(len(job.journals)):
            async with generation:
                if request.stream:
                    events = _events(generation, job, caller.record.request_id, include_usage=_wants_usage(request))
                    await client.reply_events(events)
                    return
                collected = await _collect(generation, len(job.journals))
    finally:
        caller.record.completion_tokens = generation.usage.completion_tokens
        caller.record.failovers = generation.failovers
    await client.reply(json_reply(job.form.whole(collected, generation.usage)))


async def _collect(generation: Generation, choices: int) -> list[Collected]:
    collected = [Collected() for _ in range(choices)]
    async for deltas in generation.deltas():
        for delta in deltas:
            collected[delta.index].add(delta)
    return collected


async def _events(generation: Generation, job: Job, request_id: str, *, include_usage: bool) -> AsyncIterator[bytes]:
    """The answer as server-sent events. An event's id is the request's and how many tokens its choice has so far."""
    opening = b"".join(event(f"{request_id}:0", body) for _, body in job.form.opening(range(len(job.journals))))
    async for deltas in generation.deltas():
        # One write for all that has arrived: a client that keeps up gets each token by itself.
        data = b"".join(event(f"{request_id}:{delta.tokens}", job.form.chunk(delta)) for delta in deltas)
        yield opening + data
        opening = b""
    if include_usage:
        usage = generation.usage
        yield event(f"{request_id}:{usage.completion_tokens}", job.form.usage_chunk(usage))


def _journals(
    request: SamplingFields, caller: Caller, session: str, card: worker_pb2.ModelCard, parts: Sequence[Part]
) -> list[Journal]:
    """A journal for each choice of each prompt, in the order of the answer's choices."""
    base = secrets.token_hex(12)
    journals: list[Journal] = []
    for index, (prompt, sampling) in enumerate(parts):
        # A seed that the client gives means the same for each prompt, as if it had been sent alone.
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**64
        journals.extend(
            Journal(
                stream_id=f"{base}-{index}-{choice}",
                model=card.name,
                digest=card.digest,
                prompt_ids=prompt.ids,
                sampling=with_seed(sampling, derive_seed(seed, choice)),
                session=session,
                tenant=sessions.tenant(caller.headers),
                traceparent=sessions.traceparent(caller.headers),
            )
            for choice in range(request.n or 1)
        )
    return journals


async def _encode_prompts(request: CompletionRequest, tokenizer: Tokenizer, card: worker_pb2.ModelCard) -> list[Prompt]:
    encoded = []
    many = len(request.prompts) > 1
    for index, prompt in enumerate(request.prompts):
        field = f"prompt[{index}]" if many else "prompt"
        if isinstance(prompt, str):
            encoded.append(await prompts.encode_text(prompt, tokenizer, card, field=field))
        else:
            prompts.check_ids(prompt, card, field)
            encoded.append(Prompt(list(prompt)))
    return encoded


def _prefixes(encoded: Sequence[Prompt], choices: int, tokenizer: Tokenizer) -> list[str]:
    """The text to echo before each choice."""
    texts = [prompt.text or tokenizer.decode(prompt.ids) for prompt in encoded]
    return [text for text in texts for _ in range(choices)]


def _fit_chat(request: ChatCompletionRequest, prompt: Prompt, card: worker_pb2.ModelCard) -> int:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise _invalid("max_tokens", "contradicts max_completion_tokens")
    return prompts.fit_max_tokens(
        prompt,
        card,
        wanted=old if new is None else new,
        default=None,
        prompt_field="messages",
        wanted_field="max_tokens" if new is None else "max_completion_tokens",
    )


def _fit_completion(request: CompletionRequest, prompt: Prompt, card: worker_pb2.ModelCard) -> int:
    return prompts.fit_max_tokens(
        prompt,
        card,
        wanted=request.max_tokens,
        default=_DEFAULT_COMPLETION_TOKENS,
        prompt_field="prompt",
        wanted_field="max_tokens",
    )


def _wants_usage(request: SamplingFields) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


def _check_choices(request: SamplingFields, max_n: int) -> None:
    if request.n is not None and request.n > max_n:
        raise _invalid("n", f"may be at most {max_n}")
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "needs stream to be true")


def _check_completion(request: CompletionRequest, max_prompts: int) -> None:
    if len(request.prompts) > max_prompts:
        raise _invalid("prompt", f"may have at most {max_prompts} prompts")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _invalid("best_of", "is supported only when equal to n")
    if request.echo and request.logprobs is not None:
        raise _invalid("echo", "is not supported together with logprobs")


def _invalid(field: str, sentence: str) -> LockstepError:
    return LockstepError(ErrorCode.INVALID_REQUEST, f"{field} {sentence}", field=field)
