"""instructor: an answer is a pydantic object, by tools, by JSON and as a stream of partial objects."""

from collections.abc import Iterable

import instructor
import openai
import pytest
from forms import MESSAGES, MODEL, Night
from instructor import Mode
from pydantic import BaseModel

ASK = {"model": MODEL, "messages": MESSAGES, "max_tokens": 500, "seed": 1, "max_retries": 0}


class weather(BaseModel):
    """Gives the weather of a city."""

    city: str
    days: int


class add(BaseModel):
    """Adds numbers."""

    numbers: list[int]


def client(url: str, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=url, api_key="anybody", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])
def test_an_answer_is_an_object(real: str, mode: Mode) -> None:
    night, answer = client(real, mode).chat.completions.create_with_completion(**ASK, response_model=Night)
    assert isinstance(night, Night)
    assert answer.usage.completion_tokens > 5


async def test_an_answer_is_an_object_with_asyncio(real: str) -> None:
    asynchronous = openai.AsyncOpenAI(base_url=real, api_key="anybody", max_retries=0)
    async with asynchronous:
        night = await instructor.from_openai(asynchronous).chat.completions.create(**ASK, response_model=Night)
    assert isinstance(night, Night)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_a_stream_of_partial_objects(real: str, mode: Mode) -> None:
    partial = list(client(real, mode).chat.completions.create_partial(**ASK, response_model=Night))
    assert len(partial) > 3
    Night.model_validate(partial[-1].model_dump())


def test_parallel_calls(scripted: str) -> None:
    calls = client(scripted, Mode.PARALLEL_TOOLS).chat.completions.create(**ASK, response_model=Iterable[weather | add])
    assert list(calls) == [weather(city="Paris", days=2), add(numbers=[1, 2])]


def test_a_responses_tool(real: str) -> None:
    ask = {"input": MESSAGES, "model": MODEL, "max_output_tokens": 500, "temperature": 0, "max_retries": 0}
    night = client(real, Mode.RESPONSES_TOOLS).responses.create(**ask, response_model=Night)
    assert isinstance(night, Night)
