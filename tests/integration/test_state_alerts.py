"""Faults of what state servers keep make the chart's alerts fire, as a real Prometheus sees them; their ends resolve
them.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import redis
from lockstep_api.v1 import inference_pb2, state_pb2, state_pb2_grpc
from lockstep_common.ports import free_port
from machine import wait_for
from redis_server import RedisServer
from scraper import PATIENCE_S, Prometheus

pytestmark = pytest.mark.slow

MEMORY, REDIS = "memory", "redis"
"""Two releases: each is a state server."""
RECORD_BYTES = 64 << 10
TTL_S = 600.0
OK, FULL = state_pb2.WRITE_OUTCOME_OK, state_pb2.WRITE_OUTCOME_FULL


class State:
    """A state server and calls to it."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target)
        grpc.channel_ready_future(self.channel).result(PATIENCE_S)
        self._journal = state_pb2_grpc.JournalStub(self.channel)

    def write(self, stream_id: str, *, opens: bool = True, seals: bool = False, size: int = RECORD_BYTES) -> int:
        """Open a stream, or end one; the outcome."""
        write = state_pb2.StreamWrite(tenant="t", stream_id=stream_id, epoch=1, ttl_s=TTL_S, owner="r")
        if opens:
            choice = state_pb2.StreamChoice(stream_id=stream_id, sampling=inference_pb2.Sampling(max_tokens=1, seed=7))
            prompt = inference_pb2.TokenIds(ids=[1])
            record = state_pb2.StreamRecord(
                schema=1, model="m", prompts=[prompt], choices=[choice], request=bytes(size)
            )
            write.record.CopyFrom(record)
        if seals:
            write.pieces.add(choice=0, position=0, ids=[1], finish=inference_pb2.FINISH_REASON_LENGTH)
            write.seal.CopyFrom(state_pb2.Seal(outcome=b"end"))
        (result,) = self._journal.Append(state_pb2.AppendRequest(writes=[write]), timeout=PATIENCE_S).results
        return int(result.outcome)

    def fill(self, prefix: str, size: int) -> list[str]:
        """Open streams until there is no room for a further one of this size."""
        opened: list[str] = []
        while (outcome := self.write(f"{prefix}-{len(opened)}", size=size)) == OK:
            opened.append(f"{prefix}-{len(opened)}")
        assert outcome == FULL
        return opened

    def read(self, stream_id: str) -> grpc.StatusCode:
        """Read a stream; the call's status."""
        try:
            self._journal.Read(state_pb2.ReadRequest(tenant="t", stream_id=stream_id), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def trim(self, stream_ids: list[str]) -> None:
        self._journal.Trim(state_pb2.TrimRequest(tenant="t", stream_ids=stream_ids), timeout=PATIENCE_S)


@contextmanager
def state_server(folder: Path, name: str, *flags: str) -> Iterator[tuple[State, str]]:
    """A running state server, and the address of its metrics."""
    target, port = f"unix:{folder}/{name}.sock", free_port()
    command = [sys.executable, "-m", "lockstep_state", f"--listen={target}", f"--management-port={port}", *flags]
    with subprocess.Popen([*command, "--log-level=error"], stdin=subprocess.DEVNULL) as process:
        try:
            yield State(target), f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state-alerts")


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[tuple[State, str]]:
    """One with little memory."""
    with state_server(folder, "small", f"--max-memory-bytes={1 << 20}") as running:
        yield running


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder / "redis")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def stored(folder: Path, store: RedisServer) -> Iterator[tuple[State, str]]:
    """One that keeps everything in Redis."""
    flags = (f"--store={store.address}", "--store-timeout-s=10", "--store-batch-timeout-s=20")
    with state_server(folder, "stored", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(folder: Path, small: tuple[State, str], stored: tuple[State, str]) -> Iterator[Prometheus]:
    targets = {small[1]: {"release": MEMORY, "pod": "s-0"}, stored[1]: {"release": REDIS, "pod": "s-0"}}
    with Prometheus(folder / "prometheus", targets) as running:
        running.until_scraped(targets)
        yield running


def test_a_memory_that_is_full(small: tuple[State, str], prometheus: Prometheus) -> None:
    """First of streams that run, which nothing may evict; then of streams that have ended."""
    state, _ = small
    opened = [*state.fill("large", RECORD_BYTES), *state.fill("small", 1)]
    prometheus.until_fires(
        MEMORY, "LockstepStateMemoryNearLimit", "LockstepStateRefuses", meanwhile=lambda: state.write("refused")
    )

    assert {state.write(name, opens=False, seals=True) for name in opened} <= {OK, FULL}
    new = iter(range(1 << 30))
    prometheus.until_fires(
        MEMORY, "LockstepStateEvictsStreams", meanwhile=lambda: state.write(f"new-{next(new)}", seals=True)
    )
    state.trim([*opened, *(f"new-{number}" for number in range(next(new)))])
    prometheus.until_resolved(
        MEMORY, "LockstepStateMemoryNearLimit", "LockstepStateRefuses", "LockstepStateEvictsStreams"
    )


def test_a_redis_that_others_write_into(stored: tuple[State, str], store: RedisServer, prometheus: Prometheus) -> None:
    state, _ = stored
    assert state.write("stream") == OK
    assert state.read("stream") == grpc.StatusCode.OK
    assert wait_for(lambda: prometheus.query(f'lockstep_state_damaged_values_total{{release="{REDIS}"}} == 0'), "0")
    with redis.Redis.from_url(store.address) as other:
        for key in other.scan_iter("lockstep:*"):
            if other.type(key) == b"hash":
                for name in other.hkeys(key):
                    other.hset(key, name, b"not of ours")
    assert state.read("stream") == grpc.StatusCode.NOT_FOUND
    prometheus.until_fires(REDIS, "LockstepStateDamagedValues")
    prometheus.until_resolved(REDIS, "LockstepStateDamagedValues")
