"""Every JSON schema is either refused when it is compiled, with the reason, or every complete answer conforms to it."""

import asyncio
import json
import re
from pathlib import Path

import numpy as np
import pytest
from json_schemas import draw, schema, seed_of
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import EngineConfig, Grammar, GrammarKind, Request, SamplingParams
from lockstep_engine.constraint import MaskThreads
from lockstep_engine.grammar import GrammarCompiler
from lockstep_engine.model_config import inspect_model
from tokenizers import Tokenizer

MODEL = Path(__file__).parents[3] / "models/reference"
INFO = inspect_model(EngineConfig(model=str(MODEL)))
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = INFO.eos_ids[0]
CLOSERS = [EOS, *(TOKENIZER.token_to_id(each) for each in ('"', "}", "]", ","))]
MOST_TOKENS = 250


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


def checker():
    """The draft's formats, but with any second 60 taken for a leap second: RFC 3339's syntax has it, and a grammar
    cannot know when there was one.
    """
    import jsonschema  # noqa: PLC0415 - takes a second, and each process of pytest-xdist imports this file

    made = jsonschema.FormatChecker(())
    made.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    for name in {"date-time", "time"} & made.checkers.keys():
        holds, raises = made.checkers[name]
        made.checkers[name] = (
            lambda value, holds=holds: not isinstance(value, str) or holds(re.sub(r"(:\d\d):60", r"\1:59", value)),
            raises,
        )
    return made


def check(compiler, seeds, answers_each):
    """How many schemas were refused, and how many answers were complete; all of these conform."""
    import jsonschema  # noqa: PLC0415 - see above

    refused = complete = 0
    for seed in seeds:
        rng = seed_of(f"schema {seed}")
        described = schema(rng)
        text = json.dumps(described)
        validate = jsonschema.Draft202012Validator(described, format_checker=checker()).validate
        for _ in range(answers_each):
            given, error = answer_or_error(compiler, text, rng)
            if error is not None:
                assert error.code is ErrorCode.INVALID_REQUEST
                assert error.field == "response_format"
                assert len(error.message) > len("response_format cannot be compiled: ")
                refused += 1
                break
            if given is not None:
                complete += 1
                try:
                    validate(json.loads(given))
                except (ValueError, jsonschema.ValidationError) as error:
                    pytest.fail(f"seed {seed}: {given!r} for {text}: {error}")
    print(f"{len(seeds)} schemas, {refused} refused, {complete} complete answers")
    return refused, complete


def test_complete_answers_conform_to_their_schemas(compiler):
    refused, complete = check(compiler, range(200), answers_each=1)
    assert refused < 40
    assert complete > 120


@pytest.mark.slow
def test_complete_answers_conform_to_more_schemas(compiler):
    refused, complete = check(compiler, range(1000, 1500), answers_each=4)
    assert refused < 100
    assert complete > 1200
