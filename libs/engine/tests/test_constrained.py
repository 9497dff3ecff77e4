"""Streams with a grammar on real rank processes: they conform, they resume exactly, and they cost others nothing."""

import asyncio
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from fast_cases import further
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import (
    AsyncEngine,
    Engine,
    EngineConfig,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    SamplingParams,
)

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[3] / "models/reference"
TEXT = "It was a dark night, and the wind"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["night", "wind"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "response_format")
GREEDY = SamplingParams(max_tokens=160, temperature=0, grammar=JSON)
SEEDED = SamplingParams(
    max_tokens=160, temperature=0.9, top_p=0.95, top_k=200, seed=7, repetition_penalty=1.1, logprobs=3, grammar=JSON
)
FREE = SamplingParams(max_tokens=40, temperature=0.9, seed=5, ignore_eos=True)
PARAMS = {"greedy": GREEDY, "seeded": SEEDED}
WAIT_S = 120


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, tp=2, threads=1, max_batch_tokens=96, collectives="torch") as engine:  # gloo
        yield engine


@pytest.fixture(scope="module")
def unbroken(engine):
    return {name: outputs_of(engine, params) for name, params in PARAMS.items()}


def outputs_of(engine, params, emitted=()):
    """(ids, log probabilities, finish reason) of one stream."""
    request = Request(f"r{random.random()}", tuple(engine.encode(TEXT)), params, emitted_ids=tuple(emitted))
    outputs = engine.run([request])[0]
    ids = [id_ for output in outputs for id_ in output.ids]
    return ids, [entry for output in outputs for entry in output.logprobs], outputs[-1].finish


@pytest.mark.parametrize("name", PARAMS)
def test_an_answer_conforms_and_ends_where_it_is_complete(engine, unbroken, name):
    ids, _, finish = unbroken[name]
    assert finish is FinishReason.STOP
    assert ids[-1] in engine.core.model.eos_ids
    given = json.loads(engine.decode(ids))
    assert set(given) == {"name", "age", "tags"}
    assert 0 <= given["age"] <= 150


def test_log_probabilities_are_finite_and_in_order(unbroken):
    ids, logprobs, _ = unbroken["seeded"]
    assert len(logprobs) == len(ids)
    for id_, entry in zip(ids, logprobs, strict=True):
        assert entry.chosen.id == id_
        assert entry.chosen.logprob <= 0
        values = [each.logprob for each in entry.top]
        assert values == sorted(values, reverse=True)
        assert 1 <= len(values) <= 3
        assert all(value > float("-inf") for value in values)


@pytest.mark.parametrize("name", PARAMS)
def test_a_stream_resumed_at_any_position_equals_the_unbroken_one(engine, unbroken, name):
    ids, logprobs, finish = unbroken[name]
    for count in sorted({1, len(ids) // 3, len(ids) // 2, len(ids) - 1}):
        assert outputs_of(engine, PARAMS[name], ids[:count]) == (ids[count:], logprobs[count:], finish)
    assert outputs_of(engine, PARAMS[name], ids) == ([], [], finish)


def test_one_rank_and_other_streams_change_nothing(unbroken):
    with Engine(MODEL, threads=1, max_batch_tokens=64) as alone:
        free = alone.generate_ids([TEXT], FREE)[0]
        together = alone.outputs([TEXT] * 5, [FREE, GREEDY, SEEDED, FREE, replace(FREE, grammar=JSON, max_tokens=9)])
    ids = [[id_ for output in each for id_ in output.ids] for each in together]
    assert ids[0] == ids[3] == free
    assert ids[1] == unbroken["greedy"][0]
    assert ids[2] == unbroken["seeded"][0]
    assert together[4][-1].finish is FinishReason.LENGTH


def test_preempted_streams_give_the_same_tokens(unbroken):
    with Engine(MODEL, threads=1, kv_memory_bytes=24 * 16 * 5 * 2 * 256 * 4, kv_compression="none") as small:
        params = [replace(each, logprobs=None) for each in (GREEDY, SEEDED)] * 4
        ids = small.generate_ids([TEXT] * 8, params)
        assert ids == [unbroken["greedy"][0], unbroken["seeded"][0]] * 4
        status = small.core.status()
        assert status.free_blocks == status.total_blocks == 24


def test_with_overlap_streams_are_the_same(unbroken):
    with Engine(MODEL, threads=1, overlap=True) as ahead:
        ids = ahead.generate_ids([TEXT] * 3, [GREEDY, FREE, SEEDED])
        assert [ids[0], ids[2]] == [unbroken["greedy"][0], unbroken["seeded"][0]]
        assert ids[1] == ahead.generate_ids([TEXT], FREE)[0]


def test_an_error_of_a_grammar_is_an_error_of_its_request(engine):
    with pytest.raises(LockstepError) as caught:
        engine.generate([TEXT], replace(GREEDY, grammar=Grammar(GrammarKind.REGEX, "(a", "structured_outputs.regex")))
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_REQUEST, "structured_outputs.regex")
    with pytest.raises(LockstepError, match="emitted_ids has a token at position 1 that") as caught:
        outputs_of(engine, GREEDY, engine.encode("{", special=False) * 2)
    assert engine.core.status().queued == engine.core.status().running == 0


def test_more_prompts_with_grammars_than_compilers_take_at_once(engine):
    params = replace(GREEDY, max_tokens=1)
    assert engine.generate([TEXT] * 70, params) == engine.generate([TEXT], params) * 70
    answers = [f"x{number}" for number in range(70)]
    many = [replace(GREEDY, max_tokens=8, grammar=Grammar(GrammarKind.REGEX, answer)) for answer in answers]
    assert engine.generate([TEXT] * 70, many) == answers


class Running:
    """An `AsyncEngine` whose outputs are kept by request."""

    def __init__(self, **settings):
        self.ids, self.ends = {}, {}
        self._changed = asyncio.Event()
        config = EngineConfig(model=str(MODEL), threads=1, **settings)
        self.engine = AsyncEngine(config, on_outputs=self._take, on_change=lambda: None)

    def _take(self, _step, outputs):
        for output in outputs:
            self.ids.setdefault(output.request_id, []).extend(output.ids)
            if output.finish or output.error:
                assert output.request_id not in self.ends
                self.ends[output.request_id] = output.finish or output.error
        self._changed.set()

    async def until(self, holds):
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def run(self, name, params, emitted=()):
        self.engine.submit(Request(name, (5, 6, 7), params, emitted_ids=tuple(emitted)))
        await self.until(lambda: name in self.ends)
        return self.ids.get(name, [])


async def test_compiling_delays_no_other_stream_and_can_be_cancelled(monkeypatch):
    running = Running()
    engine = running.engine
    await engine.start()
    try:
        threads = engine._compiler._threads
        held = asyncio.Event()
        loop = asyncio.get_running_loop()
        gate = [asyncio.run_coroutine_threadsafe(held.wait(), loop) for _ in range(2)]
        for each in gate:  # both compiler threads are busy
            threads.put(each.result)
        for name in ("a", "b"):
            engine.submit(Request(name, (5, 6, 7), GREEDY))
        with pytest.raises(LockstepError, match=r"^id a is in use$"):
            engine.submit(Request("a", (5, 6, 7), GREEDY))
        assert engine.status().queued == 2
        assert len(await running.run("free", FREE)) == 40
        engine.cancel("b")
        held.set()
        await running.until(lambda: "a" in running.ends)
        assert running.ends["a"] is FinishReason.STOP
        assert "b" not in running.ids
        assert engine.status().queued == 0
    finally:
        await engine.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, further(signal.SIGSTOP)])
async def test_a_rank_that_ends_while_streams_have_grammars(end):
    """They continue from the tokens that they have emitted, and equal unbroken ones."""
    running = Running(tp=2, decode_deadline_s=3.0)
    engine = running.engine
    params = replace(SEEDED, logprobs=None, ignore_eos=True, max_tokens=120, grammar=Grammar(GrammarKind.JSON_OBJECT))
    await engine.start()
    try:
        unbroken = await running.run("unbroken", params)
        assert len(unbroken) > 60
        engine.submit(Request("broken", (5, 6, 7), params))
        await running.until(lambda: len(running.ids.get("broken", ())) >= 20)
        os.kill(engine.status().ranks[1].pid, end)
        await running.until(lambda: "broken" in running.ends)
        assert running.ends["broken"].meaning.retryable
        emitted = running.ids["broken"]
        async with asyncio.timeout(WAIT_S):
            while engine.status().state != "ready":
                await asyncio.sleep(0.05)
        assert emitted + await running.run("goes on", params, emitted) == unbroken
    finally:
        await engine.close()
