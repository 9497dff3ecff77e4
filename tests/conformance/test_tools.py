"""Tools through the official client's helpers on a real model: its calls have arguments of the caller's types."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from pydantic import BaseModel, ConfigDict, Field
from system import MODEL, REFERENCE

pytestmark = pytest.mark.slow


class Weather(BaseModel):
    """Gives the weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


class Add(BaseModel):
    """Adds numbers."""

    model_config = ConfigDict(extra="forbid")

    numbers: Annotated[list[Annotated[int, Field(ge=0, le=99)]], Field(min_length=1, max_length=4)]


class Report(BaseModel):
    """What an answer is if it is no call."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo"]
    rain: bool


KINDS = {"Weather": Weather, "Add": Add}
TOOLS = [openai.pydantic_function_tool(kind) for kind in KINDS.values()]
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Will it rain in Rome?"}],
    "max_tokens": 700,
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,  # so small a model would go on calling
}
ASK: dict[str, Any] = {
    "model": MODEL,
    "input": "Will it rain in Rome?",
    "max_output_tokens": 700,
    "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
    "tool_choice": "required",
    "parallel_tool_calls": False,  # so small a model would go on calling
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A system whose model gets tools in plain text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_MODEL_TOOL_FORMATS", f"{MODEL}=json")
        with Stack(StackSettings(str(REFERENCE), workers=1, threads=1, device="cpu")) as running:
            running.wait_ready(60)
            yield f"{running.url}/v1"


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="anybody", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def other(address: str):
    async with openai.AsyncOpenAI(base_url=address, api_key="anybody", max_retries=0, timeout=60) as client:
        yield client


def check_message(message: Any) -> None:
    assert message.tool_calls
    for call in message.tool_calls:
        kind = KINDS[call.function.name]
        assert isinstance(call.function.parsed_arguments, kind)
        assert kind.model_validate_json(call.function.arguments) == call.function.parsed_arguments


def check_response(response: Any) -> None:
    calls = [item for item in response.output if item.type == "function_call"]
    assert calls
    for call in calls:
        KINDS[call.name].model_validate_json(call.arguments)
        assert call.parsed_arguments is not None


@pytest.mark.parametrize("seed", range(3))
def test_arguments_are_parsed(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.parse(**CHAT, seed=seed)
    assert answer.choices[0].finish_reason == "tool_calls"
    check_message(answer.choices[0].message)


def test_streamed_calls_are_put_together(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(**CHAT, seed=1).choices[0].message
    with client.chat.completions.stream(**CHAT, seed=1) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    check_message(message)
    assert kinds.count("tool_calls.function.arguments.done") == len(message.tool_calls)
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert [call.function.arguments for call in message.tool_calls] == [
        call.function.arguments for call in whole.tool_calls
    ]


async def test_streamed_calls_are_put_together_with_asyncio(other: openai.AsyncOpenAI) -> None:
    async with other.chat.completions.stream(**CHAT, seed=2) as stream:
        async for _ in stream:
            pass
        check_message((await stream.get_final_completion()).choices[0].message)


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "Add"}}
    answer = client.chat.completions.parse(**(CHAT | {"tool_choice": named}), seed=1)
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"Add"}
    check_message(answer.choices[0].message)


async def test_responses_have_parsed_calls(client: openai.OpenAI, other: openai.AsyncOpenAI) -> None:
    seed = {"extra_body": {"seed": 3}}
    whole = client.responses.parse(**ASK, **seed)
    check_response(whole)
    with client.responses.stream(**ASK, **seed) as stream:
        events = list(stream)
        final = stream.get_final_response()
    check_response(final)
    arguments = [item.arguments for item in whole.output if item.type == "function_call"]
    assert [item.arguments for item in final.output if item.type == "function_call"] == arguments
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == arguments
    check_response(await other.responses.parse(**ASK, **seed))


def test_an_answer_has_calls_that_conform_or_the_form(client: openai.OpenAI) -> None:
    free = CHAT | {"tool_choice": "auto", "response_format": Report}
    found = set()
    for seed in range(16):
        message = client.chat.completions.parse(**free, seed=seed).choices[0].message
        found.add(bool(message.tool_calls))
        if message.tool_calls:
            check_message(message)
        else:
            assert isinstance(message.parsed, Report)
    assert found == {True, False}, "seeds are needed with which it is both"
