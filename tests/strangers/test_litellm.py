"""LiteLLM as a client of an OpenAI endpoint: completion, acompletion, streams, tools, forms, embeddings, errors."""

import json

import litellm
import pytest
from forms import CALLS, MESSAGES, MODEL, REASONING, TEXT, TOOLS, WEATHER, Night

litellm.telemetry = False
litellm.suppress_debug_info = True

ASK = {"model": f"openai/{MODEL}", "api_key": "anybody", "max_retries": 0, "messages": MESSAGES, "max_tokens": 20}
GREEDY = ASK | {"temperature": 0}
LONG = ASK | {"max_tokens": 500, "seed": 1}


def calls_of(message) -> list[tuple[str, dict]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def test_completion_and_its_stream_are_the_same(real: str) -> None:
    whole = litellm.completion(**GREEDY, api_base=real)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 20)
    assert whole.choices[0].message.content
    chunks = list(litellm.completion(**GREEDY, api_base=real, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content


async def test_acompletion_and_its_stream_are_the_same(real: str) -> None:
    whole = await litellm.acompletion(**GREEDY, api_base=real)
    stream = await litellm.acompletion(**GREEDY, api_base=real, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content != ""


def test_text_completion(real: str) -> None:
    ask = {"model": f"text-completion-openai/{MODEL}", "api_key": "anybody", "api_base": real, "temperature": 0}
    whole = litellm.text_completion(**ask, prompt="It was", max_tokens=12)
    chunks = litellm.text_completion(**ask, prompt="It was", max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text != ""


def test_a_form(real: str) -> None:
    answer = litellm.completion(**LONG, api_base=real, response_format=Night)
    Night.model_validate_json(answer.choices[0].message.content)


def test_a_forced_call_of_a_real_model(real: str) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = litellm.completion(
        **LONG, api_base=real, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    ).choices[0]
    ((name, arguments),) = calls_of(answer.message)
    assert name == "weather"
    assert arguments["city"] in ("Paris", "Rome")
    # The next turn of the conversation.
    (call,) = answer.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "It rains."}
    turn = LONG | {"messages": [*MESSAGES, answer.message.model_dump(), result], "max_tokens": 5}
    assert litellm.completion(**turn, api_base=real, tools=[WEATHER]).usage.completion_tokens == 5


def test_parallel_calls_and_reasoning(scripted: str) -> None:
    choice = litellm.completion(**LONG, api_base=scripted, tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", TEXT)
    assert choice.message.reasoning_content == REASONING
    assert calls_of(choice.message) == CALLS


async def test_streamed_parallel_calls_and_reasoning(scripted: str) -> None:
    stream = await litellm.acompletion(**LONG, api_base=scripted, tools=TOOLS, stream=True)
    chunks = [chunk async for chunk in stream]
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 4
    message = litellm.stream_chunk_builder(chunks, messages=MESSAGES).choices[0].message
    assert calls_of(message) == CALLS
    assert message.content == TEXT
    assert message.reasoning_content == REASONING


def test_responses(real: str) -> None:
    ask = {"model": f"openai/{MODEL}", "api_key": "anybody", "api_base": real, "input": "Hello", "temperature": 0}
    whole = litellm.responses(**ask, max_output_tokens=20)
    assert whole.usage.output_tokens == 20
    events = list(litellm.responses(**ask, max_output_tokens=20, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output[-1].content[0].text != ""


def test_embeddings(real: str) -> None:
    one, other = litellm.embedding(
        model=f"openai/{MODEL}", api_key="anybody", api_base=real, input=["The sea.", "The moor."]
    ).data
    assert len(one["embedding"]) == len(other["embedding"]) > 100


def test_errors_have_their_classes(real: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**(ASK | {"temperature": 3}), api_base=real)
    with pytest.raises(litellm.NotFoundError, match="gpt-5"):
        litellm.completion(**(ASK | {"model": "openai/gpt-5"}), api_base=real)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**(ASK | {"messages": [{"role": "user", "content": "night " * 3000}]}), api_base=real)
