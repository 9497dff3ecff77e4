"""An allocation fails, at any point of a step. Before a rank has seen the step, only one request ends; after that the
group is restarted. In both cases requests can be continued, no token changes, and no block is lost.
"""

import asyncio
import logging
import sys
from pathlib import Path

import lockstep_engine
import pytest
from continuing_clients import CLIENTS, TOKENS, Service, prompt
from fast_cases import further
from handmade import write_model
from lockstep_common.errors import ErrorCode
from lockstep_engine import AsyncEngine, EngineConfig, Request, SamplingParams
from scripted_ranks import EOS, VOCAB, expected_ids

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
MODEL = TESTS.parents[2] / "models/reference"
ENGINE = str(Path(lockstep_engine.__file__).parent)
POINTS = 60
"""Where an allocation fails, spread over all calls of a run."""


class Allocator:
    """Fails once: at the driver's call number `fail_at` into or out of the engine's code, counted from 1."""

    def __init__(self, fail_at=None, on_failure=None):
        self._fail_at = fail_at
        self._on_failure = on_failure
        self.at_failure = None
        """What `on_failure` returned."""
        self.calls = 0
        self.where = []
        """The engine's functions that were running when it failed, the innermost first."""

    def __enter__(self):
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _count(self, frame, event, _):
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(ENGINE):
            return
        self.calls += 1
        if self.calls == self._fail_at:
            while frame is not None:
                if frame.f_code.co_filename.startswith(ENGINE):
                    self.where.append(frame.f_code.co_name)
                frame = frame.f_back
            if self._on_failure is not None:
                self.at_failure = self._on_failure()
            raise MemoryError


@pytest.fixture(params=[False, True], ids=["one step in flight", "two"])
async def service(request, tmp_path):
    script = f"import sys, runpy; sys.path.insert(0, {str(TESTS)!r}); "
    script += f"runpy.run_path({str(TESTS / 'scripted_ranks_zygote.py')!r}, run_name='__main__')"
    model = write_model(tmp_path, vocab_size=VOCAB, eos_token_id=EOS, max_position_embeddings=256)
    config = EngineConfig(
        model=str(model),
        tp=2,
        max_seqs=3,
        max_batch_tokens=40,
        kv_hot_window=16,
        decode_deadline_s=30,
        overlap=request.param,
    )
    service = Service(config, script)
    await service.engine.start()
    yield service
    await service.engine.close()


def is_before_the_ranks(where):
    return "schedule" in where or "put_plan" in where or ("submit" in where and "execute" not in where)


@pytest.mark.parametrize("service", [further(False), True], ids=["one step in flight", "two"], indirect=True)
async def test_the_driver_continues_wherever_an_allocation_fails(service, caplog):
    caplog.set_level(logging.DEBUG, logger="lockstep.engine")  # the pools are checked whenever no request is left
    expected = [expected_ids(prompt(number), TOKENS, seed=number) for number in range(CLIENTS)]
    with Allocator() as allocator:
        assert await service.run() == expected
    assert service.errors == []
    fates = set()
    for point in range(1, allocator.calls, allocator.calls // POINTS):
        epoch = service.engine.status().epoch
        with Allocator(fail_at=point, on_failure=lambda: service.engine.status().steps) as allocator:
            ids = await service.run()
        await service.settle()
        where = allocator.where
        assert ids == expected, where
        status = service.engine.status()
        assert status.running == status.queued == 0, where
        assert status.free_blocks == status.total_blocks, where
        assert "inconsistent" not in caplog.text, where
        if is_before_the_ranks(where):
            assert (status.epoch, service.reasons) == (epoch, []), where
            was_idle = status.steps - allocator.at_failure <= 1  # that step's own, and nothing to compute after it
            assert len(service.errors) == 1 or (was_idle and not service.errors), where
        fates.add(status.epoch - epoch)
    assert fates == {0, 1}


def test_torchs_own_error_on_the_cpu_is_recognized():
    import torch  # noqa: PLC0415 - slow
    from lockstep_engine.device_failures import is_out_of_memory  # noqa: PLC0415

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.fixture
def start():
    """An engine with real ranks that run out of memory at a point."""
    outputs = asyncio.Queue()

    async def start(point):
        script = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from failing_ranks import main; main({point!r})"
        engine = AsyncEngine(
            EngineConfig(model=str(MODEL), tp=2, threads=1, kv_memory_bytes=2**24),
            on_outputs=lambda _step, new: [outputs.put_nowait(each) for each in new],
            on_change=lambda: reasons.append(engine.status().reason),
            zygote=script,
        )
        await engine.start()
        return engine

    reasons = []
    start.outputs, start.reasons = outputs, reasons
    return start


async def collect(outputs, *names):
    """Ids and last output of each request."""
    ids, last = {name: [] for name in names}, {}
    async with asyncio.timeout(120):
        while len(last) < len(names):
            output = await outputs.get()
            ids[output.request_id] += output.ids
            if output.finish or output.error:
                last[output.request_id] = output
    return ids, last


async def test_a_request_that_a_rank_has_no_memory_for_ends_alone(start):
    engine = await start("sampler")
    params = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
    penalised = SamplingParams(max_tokens=20, seed=5, ignore_eos=True, repetition_penalty=1.5)
    try:
        engine.submit(Request("alone", (5, 6, 7), params))
        alone, _ = await collect(start.outputs, "alone")
        engine.submit(Request("other", (5, 6, 7), params))
        engine.submit(Request("penalised", (8, 9), penalised))
        ids, last = await collect(start.outputs, "other", "penalised")
        assert ids == {"other": alone["alone"], "penalised": []}
        assert last["penalised"].error.code is ErrorCode.OVERLOADED
        status = engine.status()
        assert (status.epoch, status.running, status.free_blocks) == (1, 0, status.total_blocks)
    finally:
        await engine.close()


@pytest.mark.slow
async def test_a_rank_out_of_memory_between_collectives_says_so_and_the_group_restarts(start):
    engine = await start("forward")
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    try:
        engine.submit(Request("first", (5, 6, 7), params))
        ids, last = await collect(start.outputs, "first")
        assert last["first"].error.code is ErrorCode.WORKER_LOST
        assert any(
            "rank 1 has no memory for a step: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in each
            for each in start.reasons
        )
        async with asyncio.timeout(120):
            while engine.status().state != "ready":
                await asyncio.sleep(0.05)
        assert engine.status().epoch == 2
        engine.submit(Request("again", (5, 6, 7), params, emitted_ids=tuple(ids["first"])))
        again, _ = await collect(start.outputs, "again")
        assert len(ids["first"] + again["again"]) == 20
    finally:
        await engine.close()


@pytest.mark.slow
async def test_a_rank_out_of_memory_at_its_start_ends_all_and_the_group_is_started_again(start):
    """The other rank waits for it in a collective, and has no deadline of its own before that of the start."""
    async with asyncio.timeout(120):
        engine = await start("start")
    try:
        assert engine.status().epoch == 2
        assert any("rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate" in each for each in start.reasons)
    finally:
        await engine.close()
