"""Chat and plain completions, streamed and not streamed, through the official client."""

import httpx
import openai
import pytest
from lockstep_tools.load.sse import Decoder
from system import MODEL, System

PROMPT = "It was a dark night, and"
MESSAGES = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": PROMPT}]
GREEDY = {"model": MODEL, "temperature": 0}
SEEDED = {"model": MODEL, "temperature": 0.9, "seed": 11}


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "lockstep")
    assert model.created > 0
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_chat_answers_with_a_message(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=20, **GREEDY)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert choice.logprobs is None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20


def test_completion_answers_with_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=PROMPT, max_tokens=20, **GREEDY)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streamed_chat_is_the_whole_answer_in_pieces(client: openai.OpenAI, sampling: dict) -> None:
    request = {"messages": MESSAGES, "max_tokens": 50} | sampling
    complete = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    *spoken, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert spoken[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in spoken) == complete.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in spoken if chunk.choices[0].finish_reason] == ["length"]
    assert all(chunk.usage is None for chunk in spoken)
    assert last.choices == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")  # how many were cached may differ
    assert [getattr(last.usage, count) for count in counts] == [getattr(complete.usage, count) for count in counts]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_streamed_completion_is_the_whole_answer_in_pieces(client: openai.OpenAI, sampling: dict) -> None:
    request = {"prompt": PROMPT, "max_tokens": 50} | sampling
    complete = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == complete.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("prompt", ["naïve café, said the", "雪が降る夜に 🌨️", '\n\n"Who\u2028is there?"', " "])
def test_pieces_join_to_the_whole_also_when_tokens_split_characters(client: openai.OpenAI, prompt: str) -> None:
    """At this temperature the model generates incomplete characters."""
    for sampling in (GREEDY, *({"model": MODEL, "temperature": 2.0, "seed": seed} for seed in range(3))):
        complete = client.completions.create(prompt=prompt, max_tokens=40, logprobs=0, **sampling).choices[0]
        chunks = list(client.completions.create(prompt=prompt, max_tokens=40, logprobs=0, stream=True, **sampling))
        assert "".join(chunk.choices[0].text for chunk in chunks) == complete.text
        tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens]
        assert tokens == complete.logprobs.tokens


def test_prompts_come_as_texts_and_ids(client: openai.OpenAI, system: System) -> None:
    texts = [PROMPT, "Call me"]
    ids = [system.tokenize(text) for text in texts]
    together = client.completions.create(prompt=texts, max_tokens=8, **GREEDY)
    by_ids = client.completions.create(prompt=ids, max_tokens=8, **GREEDY)
    alone = [client.completions.create(prompt=text, max_tokens=8, **GREEDY).choices[0].text for text in texts]
    assert [choice.text for choice in together.choices] == [choice.text for choice in by_ids.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1]
    assert together.usage.prompt_tokens == sum(map(len, ids))


def test_echo_repeats_the_prompt(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPT, max_tokens=8, **GREEDY).choices[0].text
    assert client.completions.create(prompt=PROMPT, max_tokens=8, echo=True, **GREEDY).choices[0].text == PROMPT + plain


def test_both_names_of_the_token_limit_count(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(messages=MESSAGES, **GREEDY, **{name: 7})
        assert answer.usage.completion_tokens == 7
    assert client.completions.create(prompt=PROMPT, **GREEDY).usage.completion_tokens == 16  # OpenAI's default


def test_events_have_data_an_end_and_the_ids_that_were_asked_for(http: httpx.Client) -> None:
    body = {**GREEDY, "prompt": PROMPT, "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"X-Request-ID": "mine", "X-Lockstep-Event-IDs": "true"}
    response = http.post("/completions", json=body, headers=headers)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    for block in blocks[:-2]:
        first, second = block.split("\n")
        assert first.startswith("id: mine:")
        assert second.startswith("data: {")
    positions = [int(block.split("\n")[0].rpartition(":")[2]) for block in blocks[:-3]]
    assert positions == sorted(positions)
    assert positions[-1] == 12
    # As a standard parser does: an id stays in force until the next one.
    assert [event.data for event in Decoder().feed(response.content)][-1] == "[DONE]"


def test_raw_responses_and_headers_are_there(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, max_tokens=3, extra_headers={"X-Request-ID": "abc"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "abc"
    assert raw.parse().usage.completion_tokens == 3
    with client.chat.completions.with_streaming_response.create(
        messages=MESSAGES, max_tokens=3, stream=True, **GREEDY
    ) as response:
        assert list(response.iter_lines())[-2] == "data: [DONE]"
