"""The backends under test: memory, a real Redis, a real cluster of three nodes."""

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from backends import OPTIONS, Kept, keep
from redis_server import RedisCluster, RedisServer
from state_serving import Client, served

logging.getLogger("lockstep").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.thaw()
    server.kill()


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory):
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.kill()


@pytest.fixture(params=["memory", "redis", "encrypted", "cluster"])
def kind(request):
    """How a backend keeps its values."""
    return request.param


@pytest.fixture
def address(kind, request):
    """Of the Redis for this kind; None: memory."""
    if kind == "memory":
        return None
    server = request.getfixturevalue("redis_cluster" if kind == "cluster" else "redis_server")
    return server.address


@pytest.fixture
async def kept(kind, address) -> "Kept":
    """A backend, empty as far as its keys go."""
    async with keep(kind, address, OPTIONS) as kept:
        yield kept


@pytest.fixture(params=["memory", "redis"])
def store_kind(request):
    """What a served state server keeps everything in."""
    return request.param


@pytest.fixture
def store(store_kind, request):
    """The setting `store` for this kind."""
    return "memory" if store_kind == "memory" else request.getfixturevalue("redis_server").address


@pytest.fixture
async def client(store, tmp_path) -> "Client":
    """A client of a state server in this process."""
    async with served(tmp_path, store=store) as client:
        yield client
