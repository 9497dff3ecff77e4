"""LangChain's ChatOpenAI and OpenAIEmbeddings: invoke, stream, ainvoke, batch, tools, structured output, errors."""

import openai
import pytest
from forms import CALLS, MODEL, PROMPT, TEXT, TOOLS, WEATHER, Night, Weather
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

# LangChain shares one asynchronous connection pool between its models, so they need one event loop.
with_asyncio = pytest.mark.asyncio(loop_scope="session")
MESSAGES = [SystemMessage("You tell stories."), HumanMessage(PROMPT)]


def chat(url: str, **options) -> ChatOpenAI:
    given = {"temperature": 0, "max_tokens": 20, "seed": 1} | options
    return ChatOpenAI(model=MODEL, base_url=url, api_key="anybody", max_retries=0, timeout=60, **given)


def whole_of(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    return sum(rest, first)


def test_invoke_and_stream_are_the_same(real: str) -> None:
    answer = chat(real).invoke(MESSAGES)
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] == 20
    assert answer.response_metadata["finish_reason"] == "length"
    streamed = whole_of(list(chat(real, stream_usage=True).stream(MESSAGES)))
    assert streamed.content == answer.content
    assert streamed.usage_metadata["output_tokens"] == 20


@with_asyncio
async def test_ainvoke_astream_and_abatch_are_the_same(real: str) -> None:
    model = chat(real)
    answer = await model.ainvoke(MESSAGES)
    assert "".join([chunk.content async for chunk in model.astream(MESSAGES)]) == answer.content != ""
    assert [each.content for each in await model.abatch([MESSAGES, MESSAGES])] == [answer.content] * 2


@with_asyncio
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output(real: str, method: str) -> None:
    model = chat(real, max_tokens=500, temperature=0.8).with_structured_output(Night, method=method)
    assert isinstance(model.invoke(MESSAGES), Night)
    assert isinstance(await model.ainvoke(MESSAGES), Night)


def test_structured_output_as_a_stream(real: str) -> None:
    model = chat(real, max_tokens=500, temperature=0.8).with_structured_output(Night, method="json_schema")
    assert isinstance(list(model.stream(MESSAGES))[-1], Night)


def test_a_forced_call_of_a_real_model_and_the_turn_after_it(real: str) -> None:
    model = chat(real, max_tokens=300, temperature=0.8).bind_tools(
        [Weather], tool_choice="any", parallel_tool_calls=False
    )
    answer = model.invoke(MESSAGES)
    assert answer.tool_calls
    for call in answer.tool_calls:
        assert call["name"] == "Weather"
        Weather.model_validate(call["args"])
    results = [ToolMessage("It rains.", tool_call_id=call["id"]) for call in answer.tool_calls]
    last = chat(real, max_tokens=5).bind_tools([Weather]).invoke([*MESSAGES, answer, *results])
    assert last.usage_metadata["output_tokens"] == 5
    assert last.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


@with_asyncio
async def test_parallel_calls(scripted: str) -> None:
    model = chat(scripted, max_tokens=300).bind_tools(TOOLS)
    answers = [
        model.invoke(MESSAGES),
        await model.ainvoke(MESSAGES),
        whole_of(list(model.stream(MESSAGES))),
        whole_of([chunk async for chunk in model.astream(MESSAGES)]),
    ]
    for answer in answers:
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == CALLS
        assert answer.content == TEXT
        assert not answer.invalid_tool_calls
        assert answer.response_metadata["finish_reason"] == "tool_calls"


def test_responses_api(real: str, scripted: str) -> None:
    # As it is by default, but for fields that Lockstep refuses by name because it stores nothing.
    model = chat(real, use_responses_api=True, seed=None)
    answer = model.invoke(MESSAGES)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] == 20
    assert whole_of(list(model.stream(MESSAGES))).text == answer.text
    caller = chat(scripted, use_responses_api=True, seed=None, max_tokens=300).bind_tools(TOOLS)
    for called in (caller.invoke(MESSAGES), whole_of(list(caller.stream(MESSAGES)))):
        assert [(call["name"], call["args"]) for call in called.tool_calls] == CALLS


def test_embeddings(real: str) -> None:
    # Without a tokenizer of OpenAI's: those are fetched from the network.
    model = OpenAIEmbeddings(model=MODEL, base_url=real, api_key="anybody", check_embedding_ctx_length=False)
    one, other = model.embed_documents(["The sea.", "The moor."])
    assert len(one) == len(other) > 100
    assert model.embed_query("The sea.") == pytest.approx(one, abs=1e-6)


def test_errors_name_the_field(real: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        chat(real, temperature=3).invoke(MESSAGES)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        chat(real).bind_tools([WEATHER], tool_choice="fly").invoke(MESSAGES)
    assert unknown.value.param.startswith("tool_choice")
