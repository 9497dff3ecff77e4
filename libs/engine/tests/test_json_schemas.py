"""Every JSON schema is either refused when it is compiled, with the reason, or every complete answer conforms to it."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from json_schemas import draw, schema, seed_of
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import EngineConfig, Grammar, GrammarKind, Request, SamplingParams
from lockstep_engine.constraint import MaskThreads
from lockstep_engine.grammar import GrammarCompiler
from lockstep_engine.model_config import inspect_model
from schema_corpus import FAMILIES, SEED, cases
from schema_corpus.checking import problem_of, refused_keywords
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[3] / "models/reference"
INFO = inspect_model(EngineConfig(model=str(MODEL)))
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = INFO.eos_ids[0]
CLOSERS = [EOS, *(TOKENIZER.token_to_id(each) for each in ('"', "}", "]", ","))]
MOST_TOKENS = 600


@pytest.fixture(scope="module")
def compiler():
    made = GrammarCompiler(INFO, MaskThreads(lambda: None))
    asyncio.run(made.load())
    yield made
    made.close()


def answer(compiler, text, rng):
    """A complete answer for a schema from a model that draws from the masks; None: it did not end in time."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, text, "response_format")
    request = Request("r", (2,), SamplingParams(grammar=grammar))
    constraint = asyncio.run(compiler.compile(request))
    ids = []
    while len(ids) < MOST_TOKENS:
        allowed = np.unpackbits(constraint.mask.view(np.uint8), count=INFO.vocab_size, bitorder="little")
        token = draw(rng, allowed, CLOSERS)
        if token == EOS:
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ids.append(token)
        constraint.consume(token)
        assert constraint.error is None, constraint.error
    return None


def answer_or_error(compiler, text, rng):
    try:
        return answer(compiler, text, rng), None
    except LockstepError as error:
        return None, error


def outcome(compiler, name, described, rng):
    """`conforming`, `cut`, or the refusal; an answer that does not conform fails the test."""
    given, error = answer_or_error(compiler, json.dumps(described), rng)
    if error is not None:
        assert error.code is ErrorCode.INVALID_REQUEST
        assert error.field == "response_format"
        assert len(error.message) > len("response_format cannot be compiled: ")
        return error
    if given is None:
        return "cut"
    problem = problem_of(described, given)
    assert not problem, f"{name}: {problem}"
    return "conforming"


def check(compiler, seeds, answers_each):
    """What came of random schemas: of each answer, and once of each schema that was refused."""
    counts = Counter()
    for seed in seeds:
        rng = seed_of(f"schema {seed}")
        described = schema(rng)
        for _ in range(answers_each):
            found = outcome(compiler, f"seed {seed}", described, rng)
            if isinstance(found, LockstepError):
                counts["refused"] += 1
                break
            counts[found] += 1
    print(f"{len(seeds)} random schemas: {dict(counts)}")
    return counts


def test_complete_answers_conform_to_their_schemas(compiler):
    counts = check(compiler, range(200), answers_each=1)
    assert counts["refused"] < 40
    assert counts["conforming"] > 120


@pytest.mark.slow
def test_complete_answers_conform_to_more_schemas(compiler):
    counts = check(compiler, range(1000, 1500), answers_each=4)
    assert counts["refused"] < 100
    assert counts["conforming"] > 1200


def test_complete_answers_conform_to_schemas_of_the_kinds_in_use(compiler):
    """Those that clients send in `tests/conformance/test_schema_corpus.py`, here with any text that is allowed."""
    counts = {family: Counter() for family in FAMILIES}
    for case in cases():
        found = outcome(compiler, case.name, case.schema, seed_of(case.name))
        if isinstance(found, LockstepError):
            assert refused_keywords(case.schema, found.message), (case.name, found.message)
            found = "refused"
        counts[case.family][found] += 1
    print(f"schemas of seed {SEED}: {counts}")
    total = sum(counts.values(), Counter())
    assert total.total() == 500
    assert total["refused"] < 90
    assert total["conforming"] > 300
