"""The ranks are ready before the tokenizer is read that grammars need: the engine is ready with both.

The tokenizer is a FIFO here, which is read when the test has written it.
"""

import asyncio
import logging
import os
from pathlib import Path

import psutil
import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import (
    AsyncEngine,
    EngineConfig,
    EngineState,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
    grammar,
)

TESTS = Path(__file__).parent
REFERENCE = TESTS.parents[2] / "models/reference"
TOKENIZER = (REFERENCE / "tokenizer.json").read_text(encoding="utf-8")
RANKS = f"import sys, time; sys.path.insert(0, {str(TESTS)!r}); import scripted_ranks_zygote as ranks; "
HANG_LATER = "first = ranks.run_rank\n"
HANG_LATER += "ranks.run_rank = lambda spec, *given: time.sleep(3600) if spec.epoch > 1 else first(spec, *given)\n"
WITH_GRAMMAR = Request("r", (1, 2), SamplingParams(grammar=Grammar(GrammarKind.REGEX, "(ab)+", "response_format")))
WAIT_S = 120
"""Longer than anything takes on a slow machine under load."""


@pytest.fixture
async def starting(tmp_path):
    """Makes an engine that starts, with the path of its tokenizer."""
    made = []

    async def make(script=""):
        for file in REFERENCE.iterdir():
            if file.name != "tokenizer.json":
                (tmp_path / file.name).symlink_to(file)
        tokenizer = tmp_path / "tokenizer.json"
        tokenizer.write_text(TOKENIZER, encoding="utf-8")
        engine = AsyncEngine(
            EngineConfig(model=str(tmp_path), max_seqs=1),
            on_outputs=lambda *_: None,
            on_change=lambda: None,
            zygote=f"{RANKS}\n{script}ranks.main()",
        )
        tokenizer.unlink()
        os.mkfifo(tokenizer)
        made.extend((engine, asyncio.create_task(engine.start()), tokenizer))
        await until(lambda: engine.status().ranks and all(each.state == "ready" for each in engine.status().ranks))
        return made

    yield make
    engine, start, tokenizer = made
    await engine.close()
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    os.close(os.open(tokenizer, os.O_RDWR | os.O_NONBLOCK))  # the thread that reads it ends


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def refusal(engine, request):
    with pytest.raises(LockstepError) as caught:
        engine.submit(request)
    return caught.value


async def test_a_request_with_a_grammar_is_not_refused_for_good_because_it_came_early(starting):
    engine, start, tokenizer = await starting()
    error = refusal(engine, WITH_GRAMMAR)
    assert (error.code, error.meaning.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert engine.status().state is EngineState.STARTING  # else routers read in its card that it takes no grammars
    await asyncio.to_thread(tokenizer.write_text, TOKENIZER, encoding="utf-8")
    async with asyncio.timeout(WAIT_S):
        await start
    assert engine.status().state is EngineState.READY
    assert engine.status().grammar_engine
    engine.submit(WITH_GRAMMAR)
    assert engine.status().queued == 1


async def test_ranks_that_were_lost_meanwhile_are_not_taken_for_ready(starting):
    engine, _, tokenizer = await starting(HANG_LATER)
    psutil.Process(engine.status().ranks[0].pid).kill()
    await until(lambda: engine.status().epoch == 2)
    await asyncio.to_thread(tokenizer.write_text, TOKENIZER, encoding="utf-8")
    await until(lambda: engine.status().grammar_engine)
    assert engine.status().state is EngineState.RESTARTING


async def test_a_tokenizer_that_cannot_be_read_in_time_keeps_no_other_request_out(starting, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "lockstep.engine")
    monkeypatch.setattr(grammar, "LOAD_TIMEOUT_S", 0.1)
    engine, start, _ = await starting()
    async with asyncio.timeout(WAIT_S):
        await start
    assert refusal(engine, WITH_GRAMMAR).code is ErrorCode.INVALID_REQUEST
    engine.submit(Request("r", (1, 2), SamplingParams()))
    assert "its tokenizer was not read within 0.1 s" in caplog.text
