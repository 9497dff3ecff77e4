"""A state server in this process, and calls to it over a real socket."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from backends import PATIENCE_S
from lockstep_api.v1 import state_pb2_grpc
from lockstep_common.grpc_decoding import decoding
from lockstep_state.backend import Backend
from lockstep_state.server import run
from lockstep_state.services.calls import Running
from lockstep_state.services.encoded import encoding
from lockstep_state.services.journal import Journal
from lockstep_state.settings import StateSettings

PATIENT = {"store_timeout_s": 10.0, "store_batch_timeout_s": 20.0, "call_timeout_s": PATIENCE_S}
"""Tests that are not about time do not count on the machine's."""

_numbers = itertools.count()


@dataclass
class Client:
    """The stubs of one channel, and a tenant that no other test has."""

    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.journal = state_pb2_grpc.JournalStub(self.channel)
        self.sessions = state_pb2_grpc.SessionsStub(self.channel)
        self.leases = state_pb2_grpc.LeasesStub(self.channel)
        self.kv = state_pb2_grpc.KvStub(self.channel)
        self.tenant = f"tenant-{os.getpid()}-{next(_numbers)}"


def make_settings(directory: Path, **settings: Any) -> StateSettings:
    return StateSettings(**{"listen": f"unix:{directory}/state", "management_port": 0, **PATIENT, **settings})


@contextlib.asynccontextmanager
async def serving(settings: StateSettings) -> AsyncIterator[None]:
    """Serve until the end of the block, then drain."""
    stop = asyncio.Event()
    task = asyncio.create_task(run(settings, stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE_S)


@contextlib.asynccontextmanager
async def served(directory: Path, **settings: Any) -> AsyncIterator[Client]:
    """A client of a server with these settings."""
    used = make_settings(directory, **settings)
    async with serving(used), dial(used.listen) as channel:
        await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
        yield Client(channel)


@contextlib.asynccontextmanager
async def served_by(directory: Path, backend: Backend) -> AsyncIterator[Client]:
    """A client of journals that are kept by this backend."""
    settings = make_settings(directory)
    server = grpc.aio.server(interceptors=[decoding("/lockstep.v1."), encoding("/lockstep.v1.")])
    state_pb2_grpc.add_JournalServicer_to_server(Journal(backend, settings, Running(8)), server)
    server.add_insecure_port(settings.listen)
    await server.start()
    try:
        async with dial(settings.listen) as channel:
            yield Client(channel)
    finally:
        await server.stop(None)


def dial(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def refused(call: Any, status: grpc.StatusCode, field: str | None = None) -> grpc.aio.AioRpcError:
    """The error of a call, which has to have this status and name this field."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    metadata = dict(caught.value.trailing_metadata())
    assert (caught.value.code(), metadata.get("lockstep-field")) == (status, field), caught.value.details()
    return caught.value
