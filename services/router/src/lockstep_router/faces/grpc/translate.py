"""Messages of `inference.proto` to requests and back.

A request becomes the fields of the REST API's body, so that both have one set of rules, defaults and names in errors.
"""

from typing import Any, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router.faces.grpc.wire import check_structure
from lockstep_router.faces.rest.completions import chat_request, chat_style, completion_request, completion_style
from lockstep_router.faces.rest.fields import validate
from lockstep_router.faces.rest.identity import Origin
from lockstep_router.faces.rest.schemas import ChatCompletionRequest, CompletionRequest
from lockstep_router.generation.generation import Usage
from lockstep_router.generation.request import GenerationRequest
from lockstep_router.generation.style import Style
from lockstep_router.resumption import Event, Reading
from lockstep_router.settings import RouterSettings

_IF_SET = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_PLAIN = ("frequency_penalty", "presence_penalty", "ignore_eos", "min_tokens")
_FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "tool_calls": inference_pb2.FINISH_REASON_STOP,  # of a request over REST that is resumed here
}


def parse_generate(message: bytes, max_values: int) -> inference_pb2.GenerateRequest:
    """The typed message.

    Raises:
        LockstepError: INVALID_REQUEST.
    """
    check_structure(message, cast("Descriptor", inference_pb2.GenerateRequest.DESCRIPTOR), max_values)
    try:
        return inference_pb2.GenerateRequest.FromString(message)
    except DecodeError:
        raise LockstepError(ErrorCode.INVALID_REQUEST, "this is not a valid GenerateRequest") from None


def generation_request(
    message: inference_pb2.GenerateRequest, origin: Origin, settings: RouterSettings
) -> tuple[GenerationRequest, Style]:
    """The request that a message makes, and the form of its answer if it is resumed over REST.

    Raises:
        LockstepError: INVALID_REQUEST, naming the field as the REST API does.
    """
    body = _common_fields(message)
    sampling = message.sampling
    if is_chat(message):
        body["messages"] = [_chat_message(each) for each in message.conversation.messages]
        if sampling.HasField("logprobs"):
            body |= {"logprobs": True, "top_logprobs": sampling.logprobs}
        chat = validate(ChatCompletionRequest, body)
        return chat_request(chat, origin, settings), chat_style(chat)
    match message.WhichOneof("input"):
        case "prompt":
            body["prompt"] = message.prompt
        case "prompt_ids":
            body["prompt"] = list(message.prompt_ids.ids)
    if sampling.HasField("logprobs"):
        body["logprobs"] = sampling.logprobs
    completion = validate(CompletionRequest, body)
    return completion_request(completion, origin, settings), completion_style(completion)


def is_chat(message: inference_pb2.GenerateRequest) -> bool:
    """Whether the prompt is a conversation."""
    return bool(message.WhichOneof("input") == "conversation")


def _common_fields(message: inference_pb2.GenerateRequest) -> dict[str, Any]:
    sampling = message.sampling
    body: dict[str, Any] = {"model": message.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= {name: getattr(sampling, name) for name in _IF_SET if sampling.HasField(name)}
    body |= {name: getattr(sampling, name) for name in _PLAIN}
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if message.stop:
        body["stop"] = list(message.stop)
    if message.HasField("n"):
        body["n"] = message.n
    if message.user:
        body["user"] = message.user
    return body


def _chat_message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    fields = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id"):
        if message.HasField(name):
            fields[name] = getattr(message, name)
    return fields


def token_event(reading: Reading, event: Event, event_id: str, begin: int) -> inference_pb2.GenerateEvent:
    """One event of an answer.

    Args:
        reading: of the answer.
        event: the event.
        event_id: names it.
        begin: the tokens of the choice that the client has already.
    """
    delta = event.delta
    is_finished = delta.finish_reason is not None
    return inference_pb2.GenerateEvent(
        request_id=reading.record.request_id,
        index=begin,
        ids=reading.ids(delta.index, begin, delta.tokens),
        text=delta.text,
        logprobs=[entry.logprobs for entry in delta.entries],
        finish=_FINISH_REASONS[delta.finish_reason],
        choice=delta.index,
        event_id=event_id,
        inexact=is_finished and delta.index in reading.inexact_choices,
    )


def usage_event(request_id: str, usage: Usage, event_id: str) -> inference_pb2.GenerateEvent:
    """The last event of an answer."""
    return inference_pb2.GenerateEvent(
        request_id=request_id,
        event_id=event_id,
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
    )
