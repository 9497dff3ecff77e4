"""Random faults under load: every answer is the undisturbed one."""

import asyncio
import os
import random
import time

from lockstep_api.v1 import worker_pb2
from lockstep_router.settings import RouterSettings
from router_cluster import EVENT_IDS, events_of
from scripted_worker import Script

CLIENTS = 8
REQUESTS_EACH = 6
TOKENS = 24


async def restart_ranks(worker):
    worker.announce(state=worker_pb2.WORKER_STATE_RESTARTING)
    await asyncio.sleep(0.02)
    worker.announce(epoch=worker.epoch + 1, state=worker_pb2.WORKER_STATE_READY)


async def break_connections(worker):
    worker.break_connections()


async def restart_process(worker):
    await worker.kill()
    await asyncio.sleep(0.02)
    await worker.restart()


async def drain(worker):
    worker.announce(state=worker_pb2.WORKER_STATE_DRAINING)
    await asyncio.sleep(0.05)
    worker.announce(state=worker_pb2.WORKER_STATE_READY)


async def fall_silent(worker):
    worker.silent = True
    await asyncio.sleep(1.2)
    worker.silent = False


async def hang(worker):
    worker.script = Script(hang_after=3, noise=True)
    await asyncio.sleep(0.1)
    worker.script = Script(delay_s=0.002, noise=True)


FAULTS = [restart_ranks, break_connections, restart_process, drain, fall_silent, hang]


async def disturb(workers, rng):
    while True:
        await asyncio.sleep(rng.uniform(0.01, 0.05))
        await rng.choice(FAULTS)(rng.choice(workers))


async def converse(cluster, client, rng):
    for number in range(REQUESTS_EACH):
        prompt, seed, stream = f"client {client} asks {number}", rng.randrange(1000), rng.random() < 0.5
        options = {"seed": seed, "max_tokens": TOKENS, "user": prompt, "stream": stream}
        response = await cluster.complete(prompt, headers=EVENT_IDS, **options)
        assert response.status_code == 200, response.text
        if stream:
            *events, (_, done) = events_of(response)
            assert done == "[DONE]"
            text = "".join(data["choices"][0]["text"] for _, data in events)
            positions = [int(event_id.rpartition(":")[2]) for event_id, _ in events]
            assert positions == sorted(set(positions))
        else:
            text = response.json()["choices"][0]["text"]
            assert response.json()["usage"]["completion_tokens"] == TOKENS
        assert text == cluster.undisturbed(prompt, seed, TOKENS)


async def test_every_answer_is_the_undisturbed_one(make_cluster):
    seed = int(os.environ.get("LOCKSTEP_TEST_SEED", time.time_ns() % 2**32))
    print(f"LOCKSTEP_TEST_SEED={seed}")
    rng = random.Random(seed)
    cluster = await make_cluster(3, heartbeat_timeout_s=0.9, inter_token_deadline_s=0.6, first_token_deadline_s=1.2)
    assert cluster.router.settings.max_attempts == RouterSettings.model_fields["max_attempts"].default
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.002, noise=True)
        worker.steps_advance = False
    disturbing = asyncio.create_task(disturb(cluster.workers, rng))
    await asyncio.gather(*(converse(cluster, client, random.Random(f"{seed} {client}")) for client in range(CLIENTS)))
    assert not disturbing.done()
    disturbing.cancel()
    assert cluster.router.streams == cluster.router.requests == 0
    assert not any(link.has_streams for link in cluster.router.workers.links)
