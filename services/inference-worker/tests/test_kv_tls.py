"""The worker and a real state server with mutual TLS: blocks go both ways between the right names, and a wrong name on
either side is refused, is in the log, and costs the worker nothing but its remote cache.
"""

import asyncio
import contextlib
import logging

import pytest
from authority import ROUTER, WORKER, Authority, Mounted
from harness import PATIENCE_S, make_settings, served, submit, until
from lockstep_common.telemetry import REGISTRY
from lockstep_state.server import run as run_state_server
from lockstep_state.settings import StateSettings
from scripted_kv import Memory, fetch, parts_of
from test_worker_tls import dial, greeted

STATE = "state.test"


@pytest.fixture
def authority():
    return Authority()


@contextlib.asynccontextmanager
async def state_server(tmp_path, authority, *, name=STATE, workers=WORKER):
    """A state server in this process that shows a certificate for `name`, and serves workers of an identity."""
    mounted = Mounted(tmp_path / "state-tls", authority, name)
    target, stop = f"unix:{tmp_path}/state", asyncio.Event()
    patience = {"store_timeout_s": 10.0, "store_batch_timeout_s": 20.0, "call_timeout_s": PATIENCE_S}
    settings = StateSettings(
        listen=target, management_port=0, worker_identity=workers, **mounted.settings(ROUTER), **patience
    )
    task = asyncio.create_task(run_state_server(settings, stop))
    await until(lambda: (tmp_path / "state").exists() or task.done())
    try:
        yield target
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await task


@contextlib.asynccontextmanager
async def worker_with(target, tmp_path, authority, model_dir, mounted=None):
    """A worker with a remote cache at a target."""
    mounted = mounted or Mounted(tmp_path / "worker-tls", authority, WORKER)
    changes = {
        "state_server": target,
        "state_identity": STATE,
        "state_timeout_s": 10.0,
        "host_cache_bytes": 1 << 20,
        **mounted.settings(ROUTER),
    }
    async with served(make_settings(model_dir, f"{tmp_path}/w0", **changes)) as worker:
        yield worker


async def serves_on(worker, authority):
    """A request has its token."""
    async with greeted(dial(worker.address, authority, authority.issue(ROUTER))) as router:
        await router.send(submit=submit("s", max_tokens=1))
        await until(lambda: worker.engine.requests)
        worker.engine.step()
        assert (await router.next("tokens")).tokens.streams[0].stream_id == "s"


async def test_blocks_are_stored_and_fetched_between_the_right_names(tmp_path, authority, model_dir):
    async with (
        state_server(tmp_path, authority) as target,
        worker_with(target, tmp_path, authority, model_dir) as worker,
    ):
        await until(lambda: worker.engine is not None)
        store = worker.engine.remote_store
        await until(lambda: store.link.estimate() is not None)  # a block of its own has gone there and back
        assert store.offer("t", parts_of("ab")) == len(parts_of("ab"))
        await store.flush(PATIENCE_S)
        memory = Memory()
        assert (await fetch(store, "ab", memory)).blocks == 2
        assert memory.has("ab", 2)
        await serves_on(worker, authority)


async def test_a_worker_of_another_identity_is_refused_and_its_log_says_why(tmp_path, authority, model_dir, caplog):
    refused = REGISTRY.get_sample_value("lockstep_state_refused_peers_total") or 0.0
    caplog.set_level(logging.WARNING, "lockstep.worker")
    async with (
        state_server(tmp_path, authority, workers="others.test") as target,
        worker_with(target, tmp_path, authority, model_dir) as worker,
    ):
        sentence = "the certificate is not for a router or a worker of this state server"
        await until(lambda: sentence in caplog.text)
        store = worker.engine.remote_store
        assert (await fetch(store, "a", Memory())).blocks == 0
        await serves_on(worker, authority)
    assert (REGISTRY.get_sample_value("lockstep_state_refused_peers_total") or 0.0) > refused


async def test_a_certificate_that_is_corrected_is_used_without_a_restart(tmp_path, authority, model_dir):
    mounted = Mounted(tmp_path / "worker-tls", authority, "others.test")
    async with (
        state_server(tmp_path, authority) as target,
        worker_with(target, tmp_path, authority, model_dir, mounted) as worker,
    ):
        await until(lambda: worker.engine is not None)
        store = worker.engine.remote_store
        for name in "abc":
            store.offer("t", parts_of(name))
            await store.flush(PATIENCE_S)
        await until(lambda: store.client.is_away)
        mounted.write(authority, WORKER)
        await until(lambda: store.link.estimate() is not None)
        assert store.offer("t", parts_of("d")) == len(parts_of("d"))
        await store.flush(PATIENCE_S)
        assert (await fetch(store, "d", Memory())).blocks == 1


@pytest.mark.parametrize("impostor", ["another name", "another authority"])
async def test_a_state_server_of_another_name_hears_nothing_and_the_log_says_why(
    tmp_path, authority, model_dir, caplog, impostor
):
    caplog.set_level(logging.WARNING, "lockstep.worker")
    name, issuer = ("impostor.test", authority) if impostor == "another name" else (STATE, Authority())
    refused = REGISTRY.get_sample_value("lockstep_state_refused_peers_total") or 0.0
    async with (
        state_server(tmp_path, issuer, name=name) as target,
        worker_with(target, tmp_path, authority, model_dir) as worker,
    ):
        await until(lambda: worker.engine is not None)
        store = worker.engine.remote_store
        store.link.note_call(0.001)  # so that the gate asks, though nothing was ever measured
        await until(lambda: store.client.is_away)
        (record,) = [each for each in caplog.records if "the state server does not answer" in each.getMessage()]
        assert record.reason == "UNAVAILABLE"
        assert record.identity == STATE
        assert "verif" in record.details.lower()
        assert (await fetch(store, "a", Memory())).outcome == "unavailable"
        await serves_on(worker, authority)
    assert (REGISTRY.get_sample_value("lockstep_state_refused_peers_total") or 0.0) == refused
