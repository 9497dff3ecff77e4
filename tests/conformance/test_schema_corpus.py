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

_AT_ONCE = 24
_MOST_REFUSED = 0.2
"""Of the schemas."""
_QUESTION: Any = {"role": "user", "content": "Answer with a short JSON document."}


@dataclass(frozen=True)
class Try:
    """How a schema is asked for."""

    seed: int
    biases: Mapping[str, float]
    """Added to the logits of tokens that end something: the model has read novels, and most of its texts would not end
    in time.
    """
    max_tokens: int


_MILD = {'"': 6, "}": 6, "]": 6}
_FIRM = {'"': 30, "@": 25, "=": 25, ":": 25, "}": 20, "]": 20, "/": 8}
"""The end of a string first, then what ends a part of one (of an address or a variable); then brackets, which strings
may have, too. A path or a schedule may be of slashes alone.
"""
_TRIES = (Try(11, _MILD, 500), Try(12, _FIRM, 500), Try(13, _FIRM, 1900), Try(14, _FIRM, 1900))
"""A schema whose answer is cut is asked for again. The model's context has 2,048 tokens."""


@dataclass
class Outcomes:
    """What came of each schema, by its family."""

    conforming: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    cut: list[str] = field(default_factory=list)
    """Schemas of which no try has given a complete answer."""
    tries: Counter[int] = field(default_factory=Counter)
    """How many answers were complete at which try."""
    keywords: Counter[str] = field(default_factory=Counter)
    """What the refusals name."""
    wrong: list[str] = field(default_factory=list)

    def line(self, family: str) -> str:
        return f"{family}: {self.conforming[family]} conforming, {self.refused[family]} refused"


@pytest.fixture
async def clients(system: System) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=system.api, api_key="anybody", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture
def token_ids(system: System) -> Mapping[str, int]:
    """Of the tokens with a bias."""
    ids = {text: system.tokenize(text) for text in _MILD | _FIRM}
    assert all(len(each) == 1 for each in ids.values())
    return {text: each[0] for text, each in ids.items()}


async def ask(client: openai.AsyncOpenAI, case: Case, token_ids: Mapping[str, int], outcomes: Outcomes) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": case.schema}}
    for number, each in enumerate(_TRIES, 1):
        sampling: dict[str, Any] = {"temperature": 1, "seed": each.seed, "max_tokens": each.max_tokens}
        sampling["logit_bias"] = {str(token_ids[text]): bias for text, bias in each.biases.items()}
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
            continue
        if problem := problem_of(case.schema, choice.message.content or ""):
            outcomes.wrong.append(f"{case.name}, {choice.finish_reason}: {problem}")
        else:
            outcomes.conforming[case.family] += 1
            outcomes.tries[number] += 1
        return
    outcomes.cut.append(case.name)


@pytest.mark.parametrize("count", [42, pytest.param(500, marks=pytest.mark.slow)])
async def test_complete_answers_conform_and_refusals_name_the_keyword(
    clients: openai.AsyncOpenAI, token_ids: Mapping[str, int], count: int, summarize: Callable[[str], None]
) -> None:
    outcomes, room = Outcomes(), asyncio.Semaphore(_AT_ONCE)
    chosen = cases()[:count]
    assert len(chosen) == count

    async def one(case: Case) -> None:
        async with room:
            await ask(clients, case, token_ids, outcomes)

    await asyncio.gather(*map(one, chosen))
    conforming, refused = outcomes.conforming.total(), outcomes.refused.total()
    summarize(f"{count} schemas (seed {SEED}): {conforming} conforming, {refused} refused")
    summarize(f"answers that were complete at each try: {[outcomes.tries[each + 1] for each in range(len(_TRIES))]}")
    summarize(f"keywords that refusals named: {dict(outcomes.keywords)}")
    for family in FAMILIES:
        summarize(outcomes.line(family))
    assert outcomes.wrong == []
    assert outcomes.cut == []
    assert conforming + refused == count
    assert refused <= _MOST_REFUSED * count
