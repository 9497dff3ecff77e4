"""Streams as read by clients that know no server-sent events, only messages of data.

vLLM's `vllm bench serve` reads streams so (`StreamedResponseHandler`): it strips each network read, splits what it has
at blank lines, drops messages that are comments, and takes `data: ` off the others. A rest that is whole without its
blank line is a message too. Any further line in a message is an error to it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from lockstep_tools.load.sse import Decoder
from system import MODEL

CHAT = {"messages": [{"role": "user", "content": "It was a dark night, and"}]}
TEXT = {"prompt": "It was a dark night, and"}
REQUESTS = {
    "chat": ("/chat/completions", CHAT, {}),
    "text": ("/completions", TEXT, {}),
    "log probabilities": ("/completions", TEXT | {"logprobs": 1}, {}),
    "several choices": ("/completions", TEXT | {"n": 3}, {}),
    "not resumable": ("/chat/completions", CHAT, {"X-Lockstep-Resumable": "false"}),
}


def parsed(message: str) -> Any:
    """The data of a message; `[DONE]` is a text."""
    data = message.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def messages(reads: Iterable[bytes]) -> Iterator[Any]:
    """The data of a stream's messages, as such a client has them."""
    waiting = ""
    for read in reads:
        waiting += read.strip().decode()
        *complete, waiting = waiting.split("\n\n")
        yield from (parsed(each) for each in complete if not each.startswith(":"))
        if waiting.startswith("data: "):
            with suppress(json.JSONDecodeError):
                yield parsed(waiting)
                waiting = ""
    assert waiting == "", "the stream ends with a whole message"


@pytest.mark.parametrize("name", REQUESTS)
def test_every_message_is_data(http: httpx.Client, name: str) -> None:
    path, body, headers = REQUESTS[name]
    options = {"model": MODEL, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    streamed = options | {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=body | streamed, headers=headers) as response:
        assert response.status_code == 200
        *chunks, end = messages(response.iter_raw())
    assert end == "[DONE]"
    choices = body.get("n", 1)
    assert chunks[-1]["usage"]["completion_tokens"] == 30 * choices
    texts = [""] * choices
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"] if path == "/completions" else choice["delta"].get("content", "")
    whole = http.post(path, json=body | options).json()["choices"]
    assert texts == [each["text"] if path == "/completions" else each["message"]["content"] for each in whole]
    assert all(texts)


@pytest.mark.parametrize("header", ["X-Lockstep-Event-IDs", "X-Lockstep-Resumable"])
def test_clients_that_ask_for_ids_get_them(http: httpx.Client, header: str) -> None:
    body = TEXT | {"model": MODEL, "temperature": 0, "max_tokens": 12, "stream": True}
    response = http.post("/completions", json=body, headers={header: "true", "X-Request-ID": "mine"})
    name = response.headers.get("X-Lockstep-Stream-ID", "mine")
    *events, end = Decoder().feed(response.content)
    assert end.data == "[DONE]"
    assert all(event.id is not None and event.id.startswith(f"{name}:") for event in events)
    assert len({event.id for event in events}) == len(events)


def test_the_listed_model_has_a_root(http: httpx.Client) -> None:
    """`vllm bench serve` asks which model is behind the served name."""
    (model,) = http.get("/models").json()["data"]
    assert model["root"] == model["id"] == MODEL
