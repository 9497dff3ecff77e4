"""Tools through the official client, unmodified: its own types, accumulation and parsing."""

import asyncio

import openai
import pytest
from pydantic import BaseModel
from tool_models import model_of, says


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


class Add(BaseModel):
    """Adds numbers."""

    numbers: list[int]


ARGUMENTS = ['{"city": "Paris", "days": 2}', '{"numbers": [1, 2]}']
TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Add)]
ASK = {"model": "reference", "messages": [{"role": "user", "content": "Is it raining?"}], "max_tokens": 500}
ANSWERS = {
    "hermes": "I look.\n<tool_call>\n{%s}\n</tool_call>\n<tool_call>{%s}</tool_call>",
    "llama3": "I look.<|python_tag|>{%s}; {%s}",
    "mistral": "I look.[TOOL_CALLS][{%s}, {%s}]",
}
PARSED = [Weather(city="Paris", days=2), Add(numbers=[1, 2])]


@pytest.fixture(params=sorted(ANSWERS))
async def address(request, make_cluster):
    cluster = await make_cluster(1, model=model_of(request.param))
    key = "parameters" if request.param == "llama3" else "arguments"
    calls = [f'"name": "{name}", "{key}": {given}' for name, given in zip(("Weather", "Add"), ARGUMENTS, strict=True)]
    says(cluster, ANSWERS[request.param] % tuple(calls))
    async with cluster.over_http() as http:
        yield str(http.base_url).rstrip("/") + "/v1"


async def blocking(address, work):
    """The result of work with the synchronous client, in a thread."""

    def run():
        with openai.OpenAI(base_url=address, api_key="k", max_retries=0) as client:
            return work(client)

    return await asyncio.to_thread(run)


def check(message):
    assert message.content == "I look."
    assert [call.function.name for call in message.tool_calls] == ["Weather", "Add"]
    assert [call.function.arguments for call in message.tool_calls] == ARGUMENTS
    assert len({call.id for call in message.tool_calls}) == 2


async def test_calls(address):
    answer = await blocking(address, lambda client: client.chat.completions.create(**ASK, tools=TOOLS))
    assert answer.choices[0].finish_reason == "tool_calls"
    check(answer.choices[0].message)


async def test_arguments_are_parsed(address):
    async with openai.AsyncOpenAI(base_url=address, api_key="k", max_retries=0) as client:
        answer = await client.chat.completions.parse(**ASK, tools=TOOLS)
    check(answer.choices[0].message)
    assert [call.function.parsed_arguments for call in answer.choices[0].message.tool_calls] == PARSED


async def test_streamed_calls_are_put_together(address):
    def run(client):
        with client.chat.completions.stream(**ASK, tools=TOOLS) as stream:
            return list(stream), stream.get_final_completion()

    events, answer = await blocking(address, run)
    kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") > 4
    check(answer.choices[0].message)
    assert [call.function.parsed_arguments for call in answer.choices[0].message.tool_calls] == PARSED


async def test_parsed_messages_are_taken_back(address):
    def run(client):
        parsed = client.chat.completions.parse(**ASK, tools=TOOLS).choices[0].message
        with client.chat.completions.stream(**ASK, tools=TOOLS) as stream:
            streamed = stream.get_final_completion().choices[0].message
        for message in (parsed, streamed):
            results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
            conversation = [*ASK["messages"], message, *results]
            yield client.chat.completions.parse(**ASK | {"messages": conversation}, tools=TOOLS)

    for answer in await blocking(address, lambda client: list(run(client))):
        check(answer.choices[0].message)


async def test_responses_parse_and_stream(address):
    tools = [openai.pydantic_function_tool(model, name=model.__name__) for model in (Weather, Add)]
    tools = [{"type": "function", **tool["function"]} for tool in tools]
    ask = {"model": "reference", "input": "Is it raining?", "max_output_tokens": 500, "tools": tools}
    whole = await blocking(address, lambda client: client.responses.create(**ask))
    assert whole.output_text == "I look."
    assert [item.arguments for item in whole.output if item.type == "function_call"] == ARGUMENTS

    def run(client):
        with client.responses.stream(**ask) as stream:
            events = list(stream)
            return events, stream.get_final_response()

    events, response = await blocking(address, run)
    assert response.output_text == "I look."
    assert [item.arguments for item in response.output if item.type == "function_call"] == ARGUMENTS
    assert [event.type for event in events].count("response.function_call_arguments.done") == 2
