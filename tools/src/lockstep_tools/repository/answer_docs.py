"""The parts of `docs/api.md` about answers: their fields, the events of streams, and the messages of WebSockets."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep_tools.repository.answer_samples import samples, socket_samples
from lockstep_tools.repository.field_tables import Data, Meaning, Of, Shape, heading, table

_HEAD: dict[str, Meaning] = {
    "id": "The answer's id, made of the request's.",
    "object": "The kind of the object.",
    "created": "Seconds since 1970.",
    "model": "The model's name.",
}
_MARKS: dict[str, Meaning] = {
    "lockstep": "What OpenAI's API does not have.",
    "lockstep.inexact": "`true`: the answer was continued on a worker with other, or unknown, numerics; see the "
    "setting `exact_failover`.",
}
_CALL = "The function that is called."
_FINISH = "`stop`: an end-of-text or stop token, or a stop string; `length`: the limit of tokens"
_LOGPROBS = "Those of the tokens, if the request asks for them."

ANSWERS: dict[tuple[str, str], str] = {
    ("POST", "/v1/chat/completions"): "[Chat completion](#chat-completion); with `stream`, an event for each "
    "[chat completion chunk](#chat-completion-chunk), then `[DONE]`.",
    ("POST", "/v1/completions"): "[Text completion](#text-completion); with `stream`, an event for each "
    "[text completion chunk](#text-completion-chunk), then `[DONE]`.",
    ("POST", "/v1/responses"): "[Response](#response); with `stream`, [response events](#response-events).",
    ("GET", "/v1/streams/{stream_id}"): "As that of the original request.",
    ("DELETE", "/v1/streams/{stream_id}"): "[Deleted stream](#deleted-stream).",
    ("DELETE", "/v1/streams"): "[Deleted stream](#deleted-stream).",
    ("POST", "/v1/embeddings"): "[Embeddings](#embeddings).",
    ("GET", "/v1/models"): "[Model list](#model-list).",
    ("GET", "/v1/models/{model}"): "[Model](#model).",
    ("POST", "/tokenize"): "[Token ids](#token-ids).",
    ("POST", "/detokenize"): "[Text of token ids](#text-of-token-ids).",
    ("GET", "/healthz"): "[Health](#health).",
    ("GET", "/readyz"): "[Health](#health); 503 if requests are not served now.",
    ("GET", "/v1/stream"): "101, then [messages](#websocket).",
    ("GET", "/openapi.json"): "The OpenAPI document.",
    ("GET", "/console"): "308 to `/console/`.",
    ("GET", "/console/{name}"): "The page and its files; `/console/state` is [JSON](#console-state).",
}
"""The answer of each endpoint."""

_SHAPES = (
    Shape(
        "Chat completion",
        "The answer of `/v1/chat/completions` without `stream`.",
        _HEAD
        | {
            "choices": "The answers; there are `n`.",
            "choices[].index": "Number of the answer, from 0.",
            "choices[].message": "The model's turn of the conversation.",
            "choices[].message.role": "Always `assistant`.",
            "choices[].message.content": "The text; null if there are calls and no text.",
            "choices[].message.refusal": "Always null.",
            "choices[].message.reasoning_content": "What the model writes for itself, if it marks that.",
            "choices[].message.tool_calls": "The calls of functions, if there are any.",
            "choices[].message.tool_calls[].id": "The call's id.",
            "choices[].message.tool_calls[].type": "Functions are the only kind.",
            "choices[].message.tool_calls[].function": _CALL,
            "choices[].message.tool_calls[].function.name": "Its name.",
            "choices[].message.tool_calls[].function.arguments": "JSON text, if the model wrote valid JSON.",
            "choices[].finish_reason": f"{_FINISH}; `tool_calls`: as `stop`, of an answer with calls.",
            "choices[].logprobs": Of("Log probabilities of a message", _LOGPROBS),
            "usage": Of("Usage", "The tokens of all answers together."),
        }
        | _MARKS,
    ),
    Shape(
        "Chat completion chunk",
        "An event of a streamed chat. The first chunk of each answer has its role. With `stream_options.include_usage` "
        "the last one has the usage and no choices.",
        _HEAD
        | {
            "choices": "One, or none with the usage.",
            "choices[].index": "Number of the answer, from 0.",
            "choices[].delta": "What is new.",
            "choices[].delta.role": "Always `assistant`.",
            "choices[].delta.content": "More of the text.",
            "choices[].delta.reasoning_content": "More of what the model writes for itself.",
            "choices[].delta.tool_calls": "More of calls.",
            "choices[].delta.tool_calls[].index": "Number of the call in the answer, from 0.",
            "choices[].delta.tool_calls[].id": "The call's id, in its first piece.",
            "choices[].delta.tool_calls[].type": "Functions are the only kind; in a call's first piece.",
            "choices[].delta.tool_calls[].function": _CALL,
            "choices[].delta.tool_calls[].function.name": "Its name, in the call's first piece.",
            "choices[].delta.tool_calls[].function.arguments": "More of its arguments.",
            "choices[].finish_reason": f"Null until the answer's last chunk. {_FINISH}; `tool_calls`: as `stop`, of an "
            "answer with calls.",
            "choices[].logprobs": Of("Log probabilities of a message", _LOGPROBS),
            "usage": Of("Usage", "With `include_usage`: null in all chunks but the last one."),
        }
        | _MARKS
        | {
            "lockstep.usage": Of(
                "Usage",
                "Of a stream that can be resumed, with `include_usage`: the usage, already in the chunk with the last "
                "finish.",
            )
        },
    ),
    Shape(
        "Log probabilities of a message",
        "One entry for each token, in their order.",
        {
            "content": "The tokens.",
            "content[].token": "Its text.",
            "content[].logprob": "The natural logarithm of its probability, at least -9999.",
            "content[].bytes": "The bytes of its text, which may be a part of a character.",
            "content[].top_logprobs": "The most likely tokens, as many as `top_logprobs` says; the most likely first.",
            "content[].top_logprobs[].token": "Its text.",
            "content[].top_logprobs[].logprob": "The natural logarithm of its probability.",
            "content[].top_logprobs[].bytes": "The bytes of its text.",
            "refusal": "Always null.",
        },
    ),
    Shape(
        "Text completion",
        "The answer of `/v1/completions` without `stream`.",
        _HEAD
        | {
            "choices": "The answers: `n` to each prompt, those of the first prompt first.",
            "choices[].index": "Number of the answer, from 0.",
            "choices[].text": "The text, after the prompt if the request has `echo`.",
            "choices[].finish_reason": f"{_FINISH}.",
            "choices[].logprobs": Of("Log probabilities of a text", _LOGPROBS),
            "usage": Of("Usage", "The tokens of all prompts and answers together."),
        }
        | _MARKS,
    ),
    Shape(
        "Text completion chunk",
        "An event of a streamed completion. With `stream_options.include_usage` the last one has the usage and no "
        "choices.",
        _HEAD
        | {
            "choices": "One, or none with the usage.",
            "choices[].index": "Number of the answer, from 0.",
            "choices[].text": "More of the text.",
            "choices[].finish_reason": f"Null until the answer's last chunk. {_FINISH}.",
            "choices[].logprobs": Of("Log probabilities of a text", _LOGPROBS),
            "usage": Of("Usage", "With `include_usage`: null in all chunks but the last one."),
        }
        | _MARKS
        | {
            "lockstep.usage": Of(
                "Usage",
                "Of a stream that can be resumed, with `include_usage`: the usage, already in the chunk with the last "
                "finish.",
            )
        },
    ),
    Shape(
        "Log probabilities of a text",
        "Lists with one entry for each token, in their order.",
        {
            "tokens": "The tokens' texts; parts of characters as `bytes:\\xf0`.",
            "token_logprobs": "The natural logarithms of their probabilities, at least -9999.",
            "top_logprobs": Data(
                "The most likely tokens, as many as `logprobs` says, and the answer's own if it is none of them: "
                "logarithms of probabilities by the tokens' texts."
            ),
            "text_offset": "Where each token's text begins in `text`, in characters.",
        },
    ),
    Shape(
        "Usage",
        "The tokens of a chat or a completion. The end-of-text token counts, and so does the token that completed a "
        "stop string.",
        {
            "prompt_tokens": "Tokens of the prompts.",
            "completion_tokens": "Tokens that were generated, also those of answers that `best_of` has dropped.",
            "total_tokens": "Both.",
            "prompt_tokens_details": "Details of the prompts' tokens.",
            "prompt_tokens_details.cached_tokens": "Those whose KV was found in the worker's prefix cache.",
            "completion_tokens_details": "Details of the generated tokens.",
            "completion_tokens_details.reasoning_tokens": "Those that are reasoning.",
        },
    ),
    Shape(
        "Response",
        "The answer of `/v1/responses` without `stream`, and what events have in `response`. It repeats options of the "
        "request; those that were not set are null or have OpenAI's default.",
        _MARKS
        | {
            "id": "The response's id, made of the request's.",
            "object": "The kind of the object.",
            "created_at": "Seconds since 1970.",
            "status": "`in_progress`, `completed`, `incomplete` or `failed`.",
            "background": "Always false.",
            "error": "Of a failed response: why.",
            "error.code": "`rate_limit_exceeded` or `server_error`; `lockstep.code` says more.",
            "error.message": "What is wrong, for people.",
            "incomplete_details": "Of an incomplete response: why.",
            "incomplete_details.reason": "Always `max_output_tokens`.",
            "model": "The model's name.",
            "output": Of("Response item", "The items that are complete."),
            "previous_response_id": "Always null: nothing is kept between requests.",
            "store": "Always false.",
            "truncation": "Always `disabled`.",
            "usage": Of("Response usage", "Null until the response ends."),
            "instructions": "As in the request.",
            "max_output_tokens": "As in the request.",
            "metadata": Data("As in the request."),
            "parallel_tool_calls": "As in the request.",
            "reasoning": "Options of reasoning.",
            "reasoning.effort": "As in the request.",
            "reasoning.summary": "Always null: there are no summaries.",
            "temperature": "As in the request.",
            "text": Data("The form of the text, as in the request."),
            "tool_choice": Data("As in the request."),
            "tools": Data("As in the request."),
            "top_p": "As in the request.",
            "user": "As in the request.",
            "lockstep.code": "Of a failed response: the [error](#errors)'s code.",
        },
    ),
    Shape(
        "Response item",
        "A part of a response.",
        {
            "id": "The item's id.",
            "type": "Its kind.",
            "status": "`in_progress`, `completed` or `incomplete`.",
            "role": "Of a message: always `assistant`.",
            "content": "Of a message and of reasoning: the text, as one part.",
            "content[].type": "The part's kind.",
            "content[].text": "The text.",
            "content[].annotations": "Always empty.",
            "content[].logprobs": "Always empty.",
            "summary": "Of reasoning: always empty.",
            "call_id": "Of a call: its id, for the item with its result.",
            "name": "Of a call: the function's name.",
            "arguments": "Of a call: JSON text, if the model wrote valid JSON.",
        },
    ),
    Shape(
        "Response usage",
        "The tokens of a response.",
        {
            "input_tokens": "Tokens of the prompt.",
            "input_tokens_details": "Details of the prompt's tokens.",
            "input_tokens_details.cached_tokens": "Those whose KV was found in the worker's prefix cache.",
            "input_tokens_details.cache_write_tokens": "Always 0.",
            "output_tokens": "Tokens that were generated.",
            "output_tokens_details": "Details of the generated tokens.",
            "output_tokens_details.reasoning_tokens": "Those that are reasoning.",
            "total_tokens": "Both.",
        },
    ),
    Shape(
        "Embeddings",
        "The answer of `/v1/embeddings`.",
        {
            "object": "The kind of the object.",
            "data": "The vectors, in the order of the texts.",
            "data[].object": "The kind of the object.",
            "data[].index": "Number of the text, from 0.",
            "data[].embedding": "A vector of length 1; with `encoding_format` `base64`, its 32-bit floats "
            "(little-endian) as base64.",
            "model": "The model's name.",
            "usage": "The tokens.",
            "usage.prompt_tokens": "Tokens of all texts.",
            "usage.total_tokens": "The same.",
        },
    ),
    Shape(
        "Model list",
        "The answer of `/v1/models`.",
        {"object": "The kind of the object.", "data": Of("Model", "Every model that a worker has reported.")},
    ),
    Shape(
        "Model",
        "A model that a worker has reported.",
        {
            "id": "Its name.",
            "object": "The kind of the object.",
            "created": "Seconds since 1970.",
            "owned_by": "Always `lockstep`.",
            "root": "Its name, for clients of vLLM.",
            "max_model_len": "Tokens of its context, for prompt and answer together.",
            "default_sampling": "Its own settings, for what requests leave out; what is missing has OpenAI's default.",
            "default_sampling.temperature": "As in requests.",
            "default_sampling.top_p": "As in requests.",
            "default_sampling.top_k": "As in requests.",
            "default_sampling.min_p": "As in requests.",
            "default_sampling.repetition_penalty": "As in requests.",
        },
    ),
    Shape(
        "Token ids",
        "The answer of `/tokenize`.",
        {
            "tokens": "The token ids.",
            "count": "How many there are.",
            "max_model_len": "Tokens of the model's context.",
        },
    ),
    Shape("Text of token ids", "The answer of `/detokenize`.", {"prompt": "The text."}),
    Shape(
        "Deleted stream",
        "The answer to a `DELETE`.",
        {"id": "The stream's id.", "object": "The kind of the object.", "deleted": "Always true."},
    ),
    Shape(
        "Error",
        "The answer to a request that has failed, and the last event of a stream that fails after its first one. "
        "[Errors](#errors) has the codes.",
        {
            "error": "OpenAI's error object.",
            "error.message": "What is wrong, for people.",
            "error.type": "OpenAI's kind of the error.",
            "error.param": "The field, header or limit that the error is about; null if there is none.",
            "error.code": "The error's code.",
        },
    ),
    Shape(
        "Health",
        "The answer of `/healthz` and `/readyz`.",
        {"status": "`alive`, `ready`, or why requests are not served."},
    ),
)

_EVENTS = {
    "response.created": "The response has begun.",
    "response.in_progress": "The same.",
    "response.output_item.added": "An item begins.",
    "response.content_part.added": "A part of an item begins.",
    "response.reasoning_text.delta": "More of the text of reasoning.",
    "response.reasoning_text.done": "The text of reasoning is complete.",
    "response.output_text.delta": "More of a message's text.",
    "response.output_text.done": "A message's text is complete.",
    "response.function_call_arguments.delta": "More of a call's arguments.",
    "response.function_call_arguments.done": "A call's arguments are complete.",
    "response.content_part.done": "A part is complete.",
    "response.output_item.done": "An item is complete.",
    "response.completed": "The response is complete. This is the last event.",
    "response.incomplete": "The response was cut off by `max_output_tokens`. This is the last event.",
    "response.failed": "The response cannot go on. This is the last event.",
}
_EVENT_FIELDS = Shape(
    "Response events",
    "The events of a streamed response. Each has its `type` in `event:` and in its data, and `sequence_number`: its "
    "number in the response, from 0. There is no `[DONE]`.",
    {
        "type": "The event's type.",
        "sequence_number": "The event's number.",
        "response": Of("Response", "The response so far."),
        "output_index": "Number of the item in the response, from 0.",
        "item": Of("Response item", "The item."),
        "item_id": "The item's id.",
        "content_index": "Number of the part in the item: 0, since items have one.",
        "part": "The part.",
        "part.type": "Its kind.",
        "part.text": "Its text.",
        "part.annotations": "Always empty.",
        "part.logprobs": "Always empty.",
        "delta": "What is new.",
        "text": "All of the text.",
        "logprobs": "Always empty.",
        "name": "The function's name.",
        "arguments": "All of the arguments.",
    },
)
_COMMON = ("type", "sequence_number")

_SOCKET = {
    "started": "The request is accepted.",
    "event": "A part of the answer, as in a server-sent event.",
    "done": "The answer is complete.",
    "error": "The request has failed, or the message was wrong.",
    "cancelled": "The request with an idempotency key has ended and is forgotten.",
    "pong": "The answer to `ping`.",
    "draining": "The router shuts down: no new requests, and the socket closes after the answers.",
}
_SOCKET_FIELDS = Shape(
    "Messages of the router",
    "Each has its `type`.",
    {
        "type": "The message's type.",
        "id": "The request's name, as its client has chosen it; null if the message that was wrong has none.",
        "stream": "The request's id, for `resume` and for `/v1/streams/{stream_id}`.",
        "event_id": "The event's id, for `last_event_id`.",
        "data": Data(
            "A [chat completion chunk](#chat-completion-chunk), a [text completion chunk](#text-completion-chunk) or a "
            "[response event](#response-events)."
        ),
        "usage": Data("The tokens of the request, as [usage](#usage), of responses too."),
        "error": "OpenAI's error object, and more.",
        "error.message": "What is wrong, for people.",
        "error.type": "OpenAI's kind of the error.",
        "error.param": "The field that the error is about; null if there is none.",
        "error.code": "The error's [code](#errors).",
        "error.status": "The error's HTTP status.",
        "error.retry_after_s": "Seconds after which another try makes sense, if that is known.",
        "idempotency_key": "The key that the client has named.",
    },
)


def answers() -> str:
    """A section for each object of an answer.

    Raises:
        ValueError: the code and what is said of it here do not fit together.
    """
    found = samples()
    lines: list[str] = []
    shapes = {shape.name: shape for shape in _SHAPES}
    events = found.pop(_EVENT_FIELDS.name)
    if unknown := found.keys() - shapes.keys():
        raise ValueError(f"answers that are not described: {', '.join(sorted(unknown))}")
    for name, shape in shapes.items():
        # Shapes that others refer to come after those: their objects are found by then.
        lines += heading(shape)
        lines += table(shape, found.get(name, ()), found)
        if name == "Response":
            lines += _typed(_EVENT_FIELDS, "event", _EVENTS, events, found)
    return "\n".join(lines)


def socket_messages() -> str:
    """The messages that a router sends on a WebSocket.

    Raises:
        ValueError: the code and what is said of it here do not fit together.
    """
    return "\n".join(_typed(_SOCKET_FIELDS, "message", _SOCKET, socket_samples(), {}))


def _typed(
    shape: Shape, kind: str, abouts: dict[str, str], samples: Sequence[Any], found: dict[str, list[Any]]
) -> Iterator[str]:
    """A section of objects that differ by their type: what each type is and which fields it has, then the fields."""
    if unknown := abouts.keys() ^ {each["type"] for each in samples}:
        raise ValueError(f"{shape.name}: types that are not described, or that there are not: {', '.join(unknown)}")
    yield from heading(shape)
    yield from (f"| {kind} | fields | meaning |", "| --- | --- | --- |")
    for name, about in abouts.items():
        names = _names(each for each in samples if each["type"] == name)
        yield f"| `{name}` | {', '.join(names)} | {about} |"
    yield ""
    yield from table(shape, samples, found, has_types=True)


def _names(samples: Iterable[Any]) -> list[str]:
    """The fields that are not common to all types."""
    names = dict.fromkeys(name for each in samples for name in each)
    return [f"`{name}`" for name in names if name not in _COMMON]
