"""Classes of tenants: their streams carry them to every worker, and are refused by the queue before them only."""

import asyncio

import pytest
from key_files import KEY, OTHER_KEY, SECOND_KEY, bearer, tenant, write
from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import LockstepError
from lockstep_router.tenants import KeyFile
from router_cluster import eventually
from scripted_worker import Script, model_card

CLASSES = {KEY: ("high", 1), SECOND_KEY: ("low", -1), OTHER_KEY: (None, 0)}


@pytest.fixture
def keys(tmp_path):
    tenants = [
        tenant(f"t{number}", key, **({"priority": name} if name else {}))
        for number, (key, (name, _)) in enumerate(CLASSES.items())
    ]
    return write(tmp_path / "keys.yaml", *tenants)


@pytest.fixture
async def classed(make_cluster, keys):
    return await make_cluster(2, keys_file=keys, max_queue_wait_s=10.0)


async def test_streams_carry_the_class_of_their_tenant(classed):
    for worker in classed.workers:
        worker.card = model_card(embedding=worker_pb2.Embedding(size=4))
        worker.broadcast(worker.hello())
    await eventually(lambda: all(link.card.HasField("embedding") for link in classed.router.workers.ready()))
    for key in CLASSES:
        assert (await classed.complete(headers=bearer(key))).status_code == 200
        body = {"model": "reference", "input": "a"}
        assert (await classed.client.post("/v1/embeddings", json=body, headers=bearer(key))).status_code == 200
    submits = [submit for worker in classed.workers for submit in worker.submits]
    assert sorted((submit.priority, submit.embed) for submit in submits) == [
        (priority, embed) for priority in (-1, 0, 1) for embed in (False, True)
    ]


async def test_a_stream_that_moves_keeps_its_class(classed):
    own, (other,) = classed.worker_of("user:u")
    own.script = Script(die_after=4)
    assert (await classed.complete(headers=bearer(SECOND_KEY))).status_code == 200
    assert [submit.priority for submit in (*own.submits, *other.submits)] == [-1, -1]
    assert other.submits[0].emitted_ids


async def test_waiting_streams_run_by_class(make_cluster, keys):
    cluster = await make_cluster(1, keys_file=keys)
    (worker,) = cluster.workers
    worker.limit(1)
    worker.script = Script(hang_after=1, says_phase=True)
    blocker = asyncio.create_task(cluster.complete("blocker", headers=bearer(OTHER_KEY)))
    await eventually(lambda: worker.hung_streams == 1)
    worker.script = Script(says_phase=True)
    started = []
    worker.on_start = lambda submit, _waiting: started.append(submit.priority)
    waiting = []
    for key in (SECOND_KEY, OTHER_KEY, KEY):
        waiting.append(asyncio.create_task(cluster.complete(headers=bearer(key))))
        await eventually(lambda: len(worker.seats.waiting) == len(waiting))
    blocker.cancel()
    assert {response.status_code for response in await asyncio.gather(*waiting)} == {200}
    assert started == [1, 0, -1]
    await asyncio.gather(blocker, return_exceptions=True)


async def test_requests_are_refused_by_the_wait_of_their_class(classed):
    for worker in classed.workers:
        worker.queue_waits_s = {-1: 40.0, 0: 20.0, 1: 5.0}
        worker.queue_wait_s = 20.0
    links = classed.router.workers.ready
    await eventually(lambda: all(link.queue_wait_of(-1) == 40.0 for link in links()))
    assert (await classed.complete(headers=bearer(KEY))).status_code == 200
    for key, wait_s in ((OTHER_KEY, 20), (SECOND_KEY, 40)):
        response = await classed.complete(headers=bearer(key))
        assert response.status_code == 503
        assert f"takes {wait_s} s now" in response.json()["error"]["message"]


async def test_a_worker_that_knows_no_classes_has_one_wait_for_all(classed):
    for worker in classed.workers:
        worker.queue_wait_s = 20.0
    await eventually(lambda: all(link.queue_wait_of(1) == 20.0 for link in classed.router.workers.ready()))
    assert (await classed.complete(headers=bearer(KEY))).status_code == 503


@pytest.mark.parametrize("value", ["urgent", 1, None, "HIGH"])
def test_other_classes_are_refused(tmp_path, value):
    path = write(tmp_path / "keys.yaml", tenant("a", KEY, priority=value))
    with pytest.raises(LockstepError, match=r"is wrong in tenants\[0\]\.priority"):
        KeyFile(path)
