"""Answers as messages of `inference.proto`."""

from array import array

from lockstep_api.v1 import inference_pb2, worker_pb2

from lockstep_router.generation.generation import Usage
from lockstep_router.generation.sampling import MODEL_SETTINGS
from lockstep_router.output import CallArguments, CallName, Part, Reasoning
from lockstep_router.resumption import Event, Reading, event_id
from lockstep_router.text.tokenizer import Tokenizer

_FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "tool_calls": inference_pb2.FINISH_REASON_TOOL_CALLS,
}


def echo_events(reading: Reading) -> list[inference_pb2.GenerateEvent]:
    """The texts of the prompts, if they are part of the answer, of those choices of which the client has nothing."""
    record = reading.record
    if not record.style.echo:
        return []
    return [
        inference_pb2.GenerateEvent(
            request_id=record.request_id,
            choice=index,
            text=record.prefixes[index // record.choices_per_prompt],
            event_id=event_id(record.request_id, reading.open_choice(index)),
        )
        for index in reading.position.unopened
    ]


def token_event(reading: Reading, event: Event, begin: int) -> inference_pb2.GenerateEvent:
    """One event of an answer.

    Args:
        reading: of the answer.
        event: the event.
        begin: the tokens of the choice that the client has already.
    """
    delta, request_id = event.delta, reading.record.request_id
    is_finished = delta.finish_reason is not None
    message = inference_pb2.GenerateEvent(
        request_id=request_id,
        index=begin,
        ids=reading.ids(delta.index, begin, delta.tokens),
        text=delta.text,
        logprobs=[_logprobs(entry.logprobs, reading.tokenizer) for entry in delta.entries],
        finish=_FINISH_REASONS[delta.finish_reason],
        choice=delta.index,
        event_id=event_id(request_id, event.position),
        inexact=is_finished and delta.index in reading.inexact_choices,
    )
    for part in delta.parts:
        _add_part(message, part)
    if is_finished and all(event.position.finished):
        # A client that loses its router here has the usage already.
        message.final_usage.CopyFrom(_usage(reading.usage))
    return message


def usage_event(reading: Reading) -> inference_pb2.GenerateEvent:
    """The last event of an answer."""
    request_id = reading.record.request_id
    name = event_id(request_id, reading.give_usage())
    return inference_pb2.GenerateEvent(request_id=request_id, event_id=name, usage=_usage(reading.usage))


def vector_event(index: int, vector: "array[float]") -> inference_pb2.EmbedEvent:
    """One text's embedding."""
    return inference_pb2.EmbedEvent(index=index, embedding=vector)


def embedding_usage(prompt_tokens: int) -> inference_pb2.EmbedEvent:
    """The last event of embeddings."""
    return inference_pb2.EmbedEvent(usage=inference_pb2.Usage(prompt_tokens=prompt_tokens))


def model_message(card: worker_pb2.ModelCard) -> inference_pb2.Model:
    """A model that a worker has reported."""
    given = card.default_sampling
    defaults = {name: getattr(given, name) for name in MODEL_SETTINGS if given.HasField(name)}
    return inference_pb2.Model(
        id=card.name,
        created=card.created,
        max_model_len=card.context_length,
        default_sampling=inference_pb2.Sampling(**defaults),
    )


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _logprobs(given: inference_pb2.Logprobs, tokenizer: Tokenizer) -> inference_pb2.Logprobs:
    """Log probabilities with the texts of their tokens. The journal's own are not changed."""
    return inference_pb2.Logprobs(
        chosen=_token(given.chosen, tokenizer), top=[_token(each, tokenizer) for each in given.top]
    )


def _token(given: inference_pb2.TokenLogprob, tokenizer: Tokenizer) -> inference_pb2.TokenLogprob:
    token = tokenizer.token_bytes(given.id)
    return inference_pb2.TokenLogprob(id=given.id, logprob=given.logprob, token=token)


def _add_part(message: inference_pb2.GenerateEvent, part: Part) -> None:
    match part:
        case Reasoning():
            message.reasoning += part.text
        case CallName():
            message.tool_calls.add(index=part.index, id=part.id, name=part.name)
        case CallArguments():
            calls = message.tool_calls
            call = calls[-1] if calls and calls[-1].index == part.index else calls.add(index=part.index)
            call.arguments += part.text
