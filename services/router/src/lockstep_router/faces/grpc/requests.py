"""Messages of `inference.proto` to requests: each becomes the fields of the REST API's body, so that both have one set
of rules, defaults and names in errors.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from lockstep_api.v1 import inference_pb2
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from pydantic_core import from_json

from lockstep_router.faces.grpc.wire import check_structure
from lockstep_router.faces.openai.json_structure import check_texts

M = TypeVar("M", bound=Message)
Body = dict[str, Any]

_IF_SET = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_PLAIN = ("frequency_penalty", "presence_penalty", "ignore_eos", "min_tokens")
_OPTIONS = ("n", "suffix", "echo", "best_of")
_MESSAGE_FIELDS = ("content", "name", "tool_call_id", "reasoning_content", "refusal")
_TOOL_CHOICES: Mapping[int, str] = {
    inference_pb2.TOOL_CHOICE_MODE_NONE: "none",
    inference_pb2.TOOL_CHOICE_MODE_AUTO: "auto",
    inference_pb2.TOOL_CHOICE_MODE_REQUIRED: "required",
}


def parse_message(kind: type[M], raw: bytes, max_values: int) -> M:
    """A typed message, within limits for its elements.

    Raises:
        LockstepError: INVALID_REQUEST.
    """
    descriptor = cast("Descriptor", kind.DESCRIPTOR)
    check_structure(raw, descriptor, max_values)
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise LockstepError(ErrorCode.INVALID_REQUEST, f"this is not a valid {descriptor.name}") from None


def is_chat(message: inference_pb2.GenerateRequest) -> bool:
    """Whether the prompt is a conversation."""
    return bool(message.WhichOneof("input") == "conversation")


def generation_body(message: inference_pb2.GenerateRequest, max_values: int) -> Body:
    """The body of /v1/chat/completions, if the prompt is a conversation, or else of /v1/completions.

    Args:
        message: the request.
        max_values: limit for the elements in all of its JSON together.

    Raises:
        LockstepError: INVALID_REQUEST, a text is no JSON object or has too many elements; a field is not for clients.
    """
    body: Body = {"model": message.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _sampling(message.sampling)
    body |= {name: getattr(message, name) for name in _OPTIONS if message.HasField(name)}
    if message.stop:
        body["stop"] = list(message.stop)
    if message.user:
        body["user"] = message.user
    check_texts(_json_texts(message), max_values, "the JSON of all schemas has")
    if message.HasField("response_format"):
        body["response_format"] = _response_format(message.response_format)
    if message.HasField("structured_outputs"):
        body["structured_outputs"] = _structured_outputs(message.structured_outputs)
    has_logprobs, logprobs = message.sampling.HasField("logprobs"), message.sampling.logprobs
    if is_chat(message):
        body |= _conversation(message.conversation)
        return body | ({"logprobs": True, "top_logprobs": logprobs} if has_logprobs else {})
    body |= _input(message, ("prompt", "prompt_ids", "prompts", "prompt_id_lists"), "prompt")
    return body | ({"logprobs": logprobs} if has_logprobs else {})


def embedding_body(message: inference_pb2.EmbedRequest) -> Body:
    """The body of /v1/embeddings."""
    body: Body = {"model": message.model} | _input(message, ("text", "text_ids", "texts", "text_id_lists"), "input")
    if message.HasField("dimensions"):
        body["dimensions"] = message.dimensions
    if message.user:
        body["user"] = message.user
    return body


def tokenize_body(message: inference_pb2.TokenizeRequest, max_values: int) -> Body:
    """The body of /tokenize.

    Raises:
        LockstepError: INVALID_REQUEST, a text is no JSON object or has too many elements.
    """
    body: Body = {"model": message.model}
    match message.WhichOneof("input"):
        case "prompt":
            body["prompt"] = message.prompt
        case "conversation":
            tools = message.conversation.tools
            check_texts((each.parameters for each in tools), max_values, "the JSON of all schemas has")
            body |= _conversation(message.conversation)
    if message.HasField("add_special_tokens"):
        body["add_special_tokens"] = message.add_special_tokens
    return body


def detokenize_body(message: inference_pb2.DetokenizeRequest) -> Body:
    """The body of /detokenize."""
    return {"model": message.model, "tokens": list(message.tokens)}


def _sampling(sampling: inference_pb2.Sampling) -> Body:
    if sampling.HasField("grammar"):
        raise invalid("sampling.grammar", "is not for clients; use structured_outputs or response_format")
    fields: Body = {name: getattr(sampling, name) for name in _IF_SET if sampling.HasField(name)}
    fields |= {name: getattr(sampling, name) for name in _PLAIN}
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    return fields


def _input(message: Any, forms: tuple[str, str, str, str], field: str) -> Body:
    """A field that is a text, token ids, texts or lists of token ids: the names of the four in the message."""
    form = message.WhichOneof("input")
    if form is None:
        return {}
    value = getattr(message, form)
    match forms.index(form):
        case 0:
            return {field: value}
        case 1:
            return {field: list(value.ids)}
        case 2:
            return {field: list(value.texts)}
        case _:
            return {field: [list(each.ids) for each in value.lists]}


def _conversation(conversation: inference_pb2.Conversation) -> Body:
    body: Body = {"messages": [_message(each) for each in conversation.messages]}
    if conversation.tools:
        body["tools"] = [_tool(each, f"tools[{index}].function") for index, each in enumerate(conversation.tools)]
    match conversation.tool_choice.WhichOneof("choice"):
        case "mode":
            mode = conversation.tool_choice.mode
            body["tool_choice"] = _TOOL_CHOICES.get(mode, str(mode))
        case "function":
            body["tool_choice"] = {"type": "function", "function": {"name": conversation.tool_choice.function}}
    for name in ("parallel_tool_calls", "reasoning_effort"):
        if conversation.HasField(name):
            body[name] = getattr(conversation, name)
    if conversation.chat_template_kwargs:
        given = conversation.chat_template_kwargs.items()
        body["chat_template_kwargs"] = {name: _template_value(value) for name, value in given}
    return body


def _message(message: inference_pb2.ChatMessage) -> Body:
    fields: Body = {"role": message.role}
    fields |= {name: getattr(message, name) for name in _MESSAGE_FIELDS if message.HasField(name)}
    if message.content_parts:
        if message.HasField("content"):
            raise invalid("messages", "has a message with content and content_parts")
        fields["content"] = [{"type": "text", "text": each} for each in message.content_parts]
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in message.tool_calls
        ]
    return fields


def _tool(tool: inference_pb2.Tool, field: str) -> Body:
    function: Body = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters"):
        function["parameters"] = _json_object(tool.parameters, f"{field}.parameters")
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _template_value(value: inference_pb2.TemplateValue) -> bool | int | float | str | None:
    kind = value.WhichOneof("value")
    given: bool | int | float | str | None = None if kind is None else getattr(value, kind)
    return given


def _response_format(given: inference_pb2.ResponseFormat) -> Body:
    form = given.WhichOneof("form")
    if form != "json_schema":
        return {} if form is None else {"type": form}
    schema = _json_object(given.json_schema.schema or "{}", "response_format.json_schema.schema")
    fields: Body = {"name": given.json_schema.name, "schema": schema}
    for name in ("description", "strict"):
        if given.json_schema.HasField(name):
            fields[name] = getattr(given.json_schema, name)
    return {"type": form, "json_schema": fields}


def _structured_outputs(given: inference_pb2.StructuredOutputs) -> Body:
    constraint = given.WhichOneof("constraint")
    if constraint is None:
        return {}
    return {constraint: list(given.choice.texts) if constraint == "choice" else getattr(given, constraint)}


def _json_texts(message: inference_pb2.GenerateRequest) -> list[str]:
    return [*(each.parameters for each in message.conversation.tools), message.response_format.json_schema.schema]


def _json_object(text: str, field: str) -> Body:
    try:
        value = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise invalid(field, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(field, "must be a JSON object")
    return value
