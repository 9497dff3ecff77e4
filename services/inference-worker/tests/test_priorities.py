"""Streams have classes, and the status has an estimate of the wait for each."""

import dataclasses

from harness import make_settings, served, submit, until
from lockstep_api.v1 import worker_pb2
from lockstep_worker import translate


async def test_the_class_of_a_stream_reaches_the_engine(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        for priority in (-1, 0, 1):
            await router.send(submit=submit(f"s{priority}", priority=priority))
        await until(lambda: len(worker.engine.requests) == 3)
        assert [request.priority for request in worker.engine.requests.values()] == [-1, 0, 1]
        status = dataclasses.replace(worker.engine.status(), queue_wait_s=2.0, queue_waits_s={-1: 3.0, 0: 2.0, 1: 1.0})
        message = translate.status_message(status, worker_pb2.WORKER_STATE_READY, "", 1)
        assert message.queue_wait_s == 2.0
        assert dict(message.queue_waits_s) == {-1: 3.0, 0: 2.0, 1: 1.0}
