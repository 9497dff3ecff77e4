"""How long a grammar may wait and be compiled, and which part of all grammars' memory is one tenant's."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import Grammar, GrammarKind
from lockstep_engine import grammar as grammars
from lockstep_engine.compilations import Compilations
from lockstep_engine.constraint import MaskThreads
from lockstep_engine.grammar import GrammarCompiler, most_at_once
from test_grammar import INFO, WAIT_S, Grammars, request


@pytest.fixture
async def compiler():
    compiler = GrammarCompiler(INFO, MaskThreads(lambda: None))
    await compiler.load()
    yield compiler
    compiler.close()


@pytest.fixture
def busy(compiler):
    """Both threads are busy until this is set."""
    blocked = threading.Event()
    for _ in range(2):
        compiler._threads.put(lambda: blocked.wait(WAIT_S))
    yield blocked
    blocked.set()


@pytest.fixture
def compiled(monkeypatch):
    """The regular expressions that are compiled."""
    made = []
    monkeypatch.setattr(grammars, "LLMatcher", Grammars(made.append))
    return made


async def test_more_grammars_than_may_wait_are_refused_at_once(compiler, busy, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_WAITING", 3)
    waiting = [asyncio.create_task(compiler.compile(request("regex", text))) for text in "abc"]
    await asyncio.sleep(0)
    with pytest.raises(LockstepError) as caught:
        await compiler.compile(request("regex", "d"))
    assert caught.value.code is ErrorCode.OVERLOADED
    waiting[0].cancel()
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(compiler.compile(request("regex", "d"))))
    busy.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(each.mask is not None for each in results[1:])


async def test_requests_that_wait_for_the_same_grammar_count_once(compiler, compiled):
    requests = [replace(request("regex", "ab+"), id=str(number)) for number in range(100)]
    found, errors, done = {}, [], asyncio.Event()

    def enqueue(request, _arrived_at, constraint):
        found[request.id] = constraint
        if len(found) == 100:
            done.set()

    compilations = Compilations(compiler, lambda *_: None, enqueue, lambda _, error: errors.append(error) or done.set())
    for each in requests:
        compilations.begin(each, each.sampling.grammar, 0.0)
    async with asyncio.timeout(WAIT_S):
        await done.wait()
    assert errors == []
    assert len({id(each) for each in found.values()}) == 100
    assert compiled == ["ab+"]


async def test_one_that_is_cancelled_takes_the_grammar_from_nobody(compiler, compiled, busy):
    waiting = [asyncio.create_task(compiler.compile(request("regex", "ab+"))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    busy.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(each.mask is not None for each in results[1:])
    assert compiled == ["ab+"]


async def test_one_that_is_cancelled_while_its_grammar_is_compiled_takes_it_from_nobody(compiler, monkeypatch):
    began, blocked, made = threading.Event(), threading.Event(), []

    def compile_slowly(text):
        made.append(text)
        began.set()
        blocked.wait(WAIT_S)

    monkeypatch.setattr(grammars, "LLMatcher", Grammars(compile_slowly))
    waiting = [asyncio.create_task(compiler.compile(request("regex", "ab+"))) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.to_thread(began.wait, WAIT_S)
    waiting[0].cancel()
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(compiler.compile(request("regex", "ab+"))))
    await asyncio.sleep(0)
    blocked.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(each.mask is not None for each in results[1:])
    assert made == ["ab+"]


async def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(compiler, compiled, busy):
    waiting = [asyncio.create_task(compiler.compile(request("regex", text))) for text in ("a+", "b+")]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    busy.set()
    assert (await waiting[1]).mask is not None
    assert compiled == ["b+"]
    assert isinstance((await asyncio.gather(waiting[0], return_exceptions=True))[0], asyncio.CancelledError)


async def test_why_a_grammar_cannot_be_compiled_is_told_to_all_that_wait_for_it(compiler, compiled, busy):
    fields = ["response_format"] * 3 + ["structured_outputs.regex"]
    waiting = [asyncio.create_task(compiler.compile(request("regex", "(a", field=field))) for field in fields]
    await asyncio.sleep(0)
    busy.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [(each.code, each.field) for each in results] == [(ErrorCode.INVALID_REQUEST, field) for field in fields]
    assert compiled == ["(a"] * 2, "once for each field that an error names"


def test_a_script_asks_for_no_more_at_once_than_the_engine_takes(monkeypatch):
    small, large = (Grammar(GrammarKind.REGEX, "a" * length) for length in (1, 64 << 10))
    assert most_at_once([]) == most_at_once([Grammar(GrammarKind.JSON_OBJECT)]) == 8192
    assert most_at_once([small] * 100) > 1000
    assert most_at_once([small, large]) == 7
    assert most_at_once([Grammar(GrammarKind.REGEX, f"a{number}") for number in range(100)]) == 32
    monkeypatch.setattr(grammars, "MAX_LIVE_BYTES", 0)
    assert most_at_once([small]) == 1


@pytest.mark.usefixtures("busy")
async def test_the_wait_for_a_compiler_ends(compiler, monkeypatch):
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 0.01)
    with pytest.raises(LockstepError) as waited:
        await compiler.compile(request("json_object"))
    assert waited.value.code is ErrorCode.OVERLOADED


async def test_a_grammar_that_takes_too_long_is_refused(compiler, monkeypatch):
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 3.0)
    began, blocked = threading.Event(), threading.Event()

    def compile_slowly(_grammar):
        began.set()
        blocked.wait(WAIT_S)
        raise ValueError("never seen")

    monkeypatch.setattr(grammars, "LLMatcher", Grammars(compile_slowly))
    with pytest.raises(LockstepError) as refused:
        await compiler.compile(request("json_object"))
    assert began.is_set()
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert "longer than" in refused.value.message
    blocked.set()


async def test_a_grammar_that_had_to_wait_for_most_of_its_time_may_be_tried_again(compiler, monkeypatch):
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 3.0)
    others, blocked = threading.Event(), threading.Event()

    def compile_slowly(_grammar):
        blocked.wait(WAIT_S)
        raise ValueError("never seen")

    monkeypatch.setattr(grammars, "LLMatcher", Grammars(compile_slowly))
    for _ in range(2):
        compiler._threads.put(lambda: others.wait(WAIT_S))
    asyncio.get_running_loop().call_later(2.2, others.set)
    with pytest.raises(LockstepError) as refused:
        await compiler.compile(request("json_object"))
    assert refused.value.code is ErrorCode.OVERLOADED
    blocked.set()


class TestTenants:
    """The memory of four grammars."""

    SIZE = grammars._estimated_bytes(Grammar(GrammarKind.JSON_OBJECT))

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        monkeypatch.setattr(grammars, "MAX_LIVE_BYTES", 4 * self.SIZE)

    @staticmethod
    async def compile(compiler, tenant):
        return await compiler.compile(replace(request("json_object"), tenant=tenant))

    async def refused(self, compiler, tenant):
        with pytest.raises(LockstepError) as caught:
            await self.compile(compiler, tenant)
        return caught.value.code is ErrorCode.OVERLOADED

    @staticmethod
    async def until_used(compiler, size):
        """Wait until grammars take so many bytes: the thread and the task that made one may hold it for a moment."""
        end = time.monotonic() + WAIT_S
        while compiler._live_bytes != size:
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def test_a_single_one_may_use_all(self, compiler):
        used = [await self.compile(compiler, "") for _ in range(4)]
        assert await self.refused(compiler, "")
        used.clear()
        await self.until_used(compiler, 0)

    async def test_of_several_each_has_half(self, compiler):
        used = [await self.compile(compiler, "modest")]
        used += [await self.compile(compiler, "greedy") for _ in range(2)]
        assert await self.refused(compiler, "greedy")
        used.append(await self.compile(compiler, "third"))
        assert await self.refused(compiler, "modest")  # all is in use
        used.clear()
        await self.until_used(compiler, 0)
        assert not compiler._tenant_bytes

    async def test_one_that_had_all_gives_back_what_is_above_its_half(self, compiler):
        used = [await self.compile(compiler, "greedy") for _ in range(4)]
        assert await self.refused(compiler, "modest")
        used.pop()
        await self.until_used(compiler, 3 * self.SIZE)
        assert await self.refused(compiler, "greedy")
        used.append(await self.compile(compiler, "modest"))
        assert await self.refused(compiler, "greedy")
