"""Requests before any rank is ready: bad input is refused with its field, good input as unavailable. Then how many may
wait for a grammar.
"""

import asyncio
from pathlib import Path

import pytest
from handmade import write_model
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import AsyncEngine, EngineConfig, Grammar, GrammarKind, Request, SamplingParams

TESTS = Path(__file__).parent
REFERENCE = TESTS.parents[2] / "models/reference"
VOCAB, CONTEXT = 100, 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Never started."""
    path = write_model(tmp_path_factory.mktemp("model"))
    return AsyncEngine(EngineConfig(model=str(path)), on_outputs=lambda *_: None, on_change=lambda: None)


def refusal(engine, prompt=(1, 2), emitted=(), **sampling):
    with pytest.raises(LockstepError) as caught:
        engine.submit(Request("r", tuple(prompt), SamplingParams(**sampling), tuple(emitted)))
    return caught.value


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"prompt": ()}, "prompt_ids"),
        ({"prompt": (1, VOCAB)}, "prompt_ids"),
        ({"prompt": (-1, 1)}, "prompt_ids"),
        ({"prompt": (1, 2**31)}, "prompt_ids"),
        ({"prompt": (1, 2**63)}, "prompt_ids"),
        ({"emitted": (VOCAB,)}, "emitted_ids"),
        ({"emitted": (0, -5)}, "emitted_ids"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (VOCAB,), "min_tokens": 2}, "stop_token_ids"),
    ],
)
def test_bad_input_names_its_field(engine, request_, field):
    error = refusal(engine, **request_)
    assert error.code is ErrorCode.INVALID_REQUEST
    assert error.field == field


@pytest.mark.parametrize(("length", "max_tokens"), [(CONTEXT, 1), (1, CONTEXT), (120, 9), (5, 10**9)])
def test_more_than_the_context_is_refused_with_numbers(engine, length, max_tokens):
    error = refusal(engine, prompt=[1] * length, max_tokens=max_tokens)
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    for number in (length, max_tokens, length + max_tokens, CONTEXT):
        assert str(number) in error.message


def test_a_good_request_is_unavailable_until_the_ranks_are_ready(engine):
    error = refusal(engine, prompt=[VOCAB - 1] * 120, emitted=[0], max_tokens=8)
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.retry_after_s > 0
    assert error.meaning.retryable
    assert engine.status().queued == 0


@pytest.fixture
async def ready():
    """An engine with a tokenizer, whose ranks never end a step: two requests run and three wait."""
    script = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import scripted_ranks_zygote; "
    script += "scripted_ranks_zygote.main(holds=True)"
    config = EngineConfig(model=str(REFERENCE), max_seqs=2, max_queue=3, prefill_deadline_s=600.0)
    engine = AsyncEngine(config, on_outputs=lambda *_: None, on_change=lambda: None, zygote=script)
    async with asyncio.timeout(120):
        await engine.start()
    yield engine
    await engine.close()


async def test_requests_that_wait_for_a_grammar_are_no_more_than_can_run_and_wait(ready):
    grammar = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(ab)+", "response_format"))
    for number in range(5):  # in one turn of the loop: none is compiled before the last is here
        ready.submit(Request(f"r{number}", (1, 2), grammar))
    assert refusal(ready, grammar=grammar.grammar).code is ErrorCode.OVERLOADED
    assert ready.status().queued == 5
    ready.submit(Request("free", (1, 2), SamplingParams()))  # what compiles keeps no other out
    assert ready.status().running == 1
    for number in range(5):
        ready.cancel(f"r{number}")
    ready.submit(Request("r", (1, 2), grammar))
    assert ready.status().queued == 1
