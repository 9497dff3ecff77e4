"""Schemas of the kinds that are in use, as `response_format` of the official client: a complete answer conforms, and
a refusal names the keyword that is not supported.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from schema_corpus import FAMILIES, SEED, Case, cases
from schema_corpus.checking import problem_of, refused_keywords
from system import MODEL, System

_MAX_TOKENS = 500
_AT_ONCE = 24
_SEED = 11
_MOST_REFUSED = 0.2
_MOST_CUT = 0.15
"""Shares of the schemas, and of those that are compiled."""
_QUESTION: Any = {"role": "user", "content": "Answer with a short JSON document."}
_ENDS = ('"', "}", "]")
_END_BIAS = 6.0
"""Added to the logits of these tokens: the model has read novels, and most of its texts would not end in time."""


@dataclass
class Outcomes:
    """What came of each schema, by its family."""

    conforming: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    keywords: Counter[str] = field(default_factory=Counter)
    """What the refusals name."""
    wrong: list[str] = field(default_factory=list)

    def line(self, family: str) -> str:
        counts = f"{self.conforming[family]} conforming, {self.cut[family]} cut, {self.refused[family]} refused"
        return f"{family}: {counts}"


@pytest.fixture
async def clients(system: System) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=system.api, api_key="anybody", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture
def biases(system: System) -> Mapping[str, float]:
    return {str(token): _END_BIAS for end in _ENDS for token in system.tokenize(end)}


async def ask(client: openai.AsyncOpenAI, case: Case, biases: Mapping[str, float], outcomes: Outcomes) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": case.schema}}
    sampling: dict[str, Any] = {"temperature": 1, "seed": _SEED, "max_tokens": _MAX_TOKENS, "logit_bias": biases}
    try:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[_QUESTION], response_format=form, **sampling
        )
    except openai.BadRequestError as error:
        outcomes.refused[case.family] += 1
        named = refused_keywords(case.schema, error.message)
        outcomes.keywords.update(named)
        if error.param != "response_format" or not named:
            outcomes.wrong.append(f"{case.name} is refused, but no known keyword is named: {error.message}")
        return
    (choice,) = answer.choices
    if choice.finish_reason == "length":
        outcomes.cut[case.family] += 1
    elif problem := problem_of(case.schema, choice.message.content or ""):
        outcomes.wrong.append(f"{case.name}, {choice.finish_reason}: {problem}")
    else:
        outcomes.conforming[case.family] += 1


@pytest.mark.parametrize("count", [42, pytest.param(500, marks=pytest.mark.slow)])
async def test_complete_answers_conform_and_refusals_name_the_keyword(
    clients: openai.AsyncOpenAI, biases: Mapping[str, float], count: int, summarize: Callable[[str], None]
) -> None:
    outcomes, room = Outcomes(), asyncio.Semaphore(_AT_ONCE)
    chosen = cases()[:count]
    assert len(chosen) == count

    async def one(case: Case) -> None:
        async with room:
            await ask(clients, case, biases, outcomes)

    await asyncio.gather(*map(one, chosen))
    conforming, cut, refused = (each.total() for each in (outcomes.conforming, outcomes.cut, outcomes.refused))
    summarize(f"{count} schemas (seed {SEED}): {conforming} conforming, {cut} cut by max_tokens, {refused} refused")
    summarize(f"keywords that refusals named: {dict(outcomes.keywords)}")
    for family in FAMILIES:
        summarize(outcomes.line(family))
    assert outcomes.wrong == []
    assert conforming + cut + refused == count
    assert refused <= _MOST_REFUSED * count
    assert cut <= _MOST_CUT * (count - refused)
