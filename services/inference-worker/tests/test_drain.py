import asyncio

import grpc
import pytest
from harness import make_settings, open_channel, served, submit, until
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import Output
from lockstep_worker import server
from scripted_engine import Script
from scripted_kv import ScriptedKv, parts_of, serving

DRAINING = worker_pb2.WORKER_STATE_DRAINING


async def test_an_idle_worker_stops_at_once(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, drain_timeout_s=60)) as worker:
        router = await worker.greeted()
        worker.stop.set()
        await router.status(DRAINING)
        code, details = await router.end()
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the worker ends")
        assert await worker.exit_code() == 0
        assert worker.engine.closed


async def test_running_streams_end_by_themselves_and_new_ones_are_refused(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, drain_timeout_s=60)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("running", max_tokens=3))
        await until(lambda: worker.engine.requests)
        worker.engine.step()
        worker.stop.set()
        await router.status(DRAINING)
        await router.send(submit=submit("new"))
        rejected = (await router.next("rejected")).rejected
        assert (rejected.stream_id, rejected.code, rejected.retryable) == ("new", "draining", True)
        late = await open_and_greet(worker)
        assert (await late.next("status")).status.state == DRAINING
        worker.engine.step()
        await router.next("tokens")
        assert not worker.task.done()
        worker.engine.step()
        last = (await router.next("tokens")).tokens.streams[0]
        assert (last.position, last.finish) == (2, inference_pb2.FINISH_REASON_LENGTH)
        assert await worker.exit_code() == 0
        assert (await router.end())[0] == grpc.StatusCode.UNAVAILABLE
        assert worker.engine.cancelled == []


async def open_and_greet(worker):
    router = worker.router()
    await router.greet("late")
    return router


async def test_streams_that_take_too_long_are_handed_over(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, drain_timeout_s=5)) as worker:
        router = await worker.greeted()
        for name in ("a", "b"):
            await router.send(submit=submit(name, 2, max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 2)
        worker.stop.set()
        await router.status(DRAINING)
        worker.engine.step()
        await router.next("tokens")
        for name in ("a", "b"):
            rejected = (await router.next("rejected")).rejected
            assert (rejected.stream_id, rejected.attempt, rejected.code) == (name, 2, "draining")
            assert rejected.retryable
        assert await worker.exit_code() == 0
        assert not worker.engine.requests
        assert worker.engine.stored_prefixes_of == ["1:a:2", "1:b:2"], "they are stored before they go elsewhere"
        assert "tokens" not in router.kinds()[router.kinds().index("rejected") :]


async def test_ranks_that_are_lost_while_it_drains_are_told(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, drain_timeout_s=30)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("a", 1, max_tokens=100))
        await until(lambda: worker.engine.requests)
        worker.stop.set()
        await router.status(DRAINING)
        worker.engine.lose_ranks()
        status = await router.status(worker_pb2.WORKER_STATE_RESTARTING)
        assert status.HasField("lost")
        assert (await router.next("rejected")).rejected.code == "worker_lost"


async def test_routers_hear_of_a_worker_that_stores_its_last_blocks(model_dir, socket_path):
    """A worker that is silent for long counts as dead."""
    target = f"unix:{socket_path}-kv"
    changes = {"state_server": target, "host_cache_bytes": 1 << 20, "state_timeout_s": 10.0, "drain_timeout_s": 60}
    async with (
        serving(ScriptedKv(), target) as kv,
        served(make_settings(model_dir, socket_path, **changes)) as worker,
    ):
        router = await worker.greeted()
        store = worker.engine.remote_store
        await until(lambda: store.link.estimate() is not None)
        kv.answers.clear()
        assert store.offer("t", parts_of("ab"))
        worker.stop.set()
        for _ in range(20):
            await router.status(DRAINING)
        assert not worker.task.done()
        kv.answers.set()
        assert (await router.end())[0] == grpc.StatusCode.UNAVAILABLE
        assert await worker.exit_code() == 0


async def test_a_router_that_does_not_read_does_not_hold_up_the_end(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, drain_timeout_s=0.1)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit(max_tokens=100))
        await until(lambda: worker.engine.requests)
        for position in range(50):
            worker.engine.give([Output("1:s:1", position, (5,) * 300_000)])
        worker.stop.set()
        assert await worker.exit_code() == 0


async def test_a_worker_that_still_starts_can_be_stopped(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path), Script(ready_at_once=False)) as worker:
        router = worker.router()
        await router.greet()
        worker.stop.set()
        assert await worker.exit_code() == 0
        assert worker.engine.closed


async def test_an_engine_that_does_not_close_does_not_change_the_exit_code(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        await worker.greeted()
        worker.engine.close_error = RuntimeError("zygote")
        worker.stop.set()
        assert await worker.exit_code() == 0


@pytest.mark.parametrize("fails", [False, True])
async def test_the_engine_gets_what_is_left_of_the_time_for_the_end(model_dir, socket_path, monkeypatch, fails):
    """The steps before it take some, and the pod is killed when all of it is over."""
    monkeypatch.setattr(server, "CLOSE_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(server, "SHUTDOWN_S", 5.0)
    drain_timeout_s = 3600 if fails else 0.1
    async with served(make_settings(model_dir, socket_path, drain_timeout_s=drain_timeout_s)) as worker:
        await worker.greeted()
        worker.engine.never_closes = True
        if fails:
            worker.engine.lose_ranks()
            worker.engine.fail("gave up")
        else:
            worker.stop.set()
        assert await worker.exit_code() == fails
        assert worker.engine.closed


async def test_a_failed_engine_is_told_and_ends_the_process_with_1(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        worker.engine.lose_ranks()
        worker.engine.fail("gave up after 5 restarts")
        status = await router.status(worker_pb2.WORKER_STATE_FAILED)
        assert status.reason == "gave up after 5 restarts"
        assert (await router.end())[0] == grpc.StatusCode.UNAVAILABLE
        assert await worker.exit_code() == 1
        assert worker.engine.closed


async def test_a_start_that_can_never_succeed_ends_the_process_with_its_error(model_dir, socket_path):
    refusal = LockstepError(ErrorCode.INVALID_REQUEST, "model tiny: no tensor-parallel plan", field="model")
    async with served(make_settings(model_dir, socket_path), Script(start_error=refusal)) as worker:
        (result,) = await asyncio.gather(worker.task, return_exceptions=True)
        assert result is refusal
        assert worker.engine.closed


async def test_a_start_that_may_succeed_later_ends_the_process_with_1(model_dir, socket_path):
    error = LockstepError(ErrorCode.UNAVAILABLE, "ranks did not load within 600 s")
    async with served(make_settings(model_dir, socket_path), Script(start_error=error)) as worker:
        assert await worker.exit_code() == 1


async def test_a_second_worker_takes_over_the_address(model_dir, socket_path):
    settings = make_settings(model_dir, socket_path)
    for _ in range(2):
        async with served(settings) as worker:
            await worker.greeted()
            worker.stop.set()
            assert await worker.exit_code() == 0


async def test_a_live_address_is_refused(model_dir, socket_path):
    settings = make_settings(model_dir, socket_path)
    async with served(settings) as worker:
        await worker.greeted()
        async with served(settings) as second:
            (result,) = await asyncio.gather(second.task, return_exceptions=True)
        assert isinstance(result, LockstepError)
        assert "another process listens" in result.message
        async with open_channel(worker.address):
            await worker.greeted("r1")
