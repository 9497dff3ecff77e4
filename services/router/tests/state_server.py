"""The real state server in the test's process, on a Unix socket, in memory; it can be away, slow, or forgetful."""

import asyncio
from collections import Counter

import grpc
from lockstep_api.v1 import state_pb2_grpc
from lockstep_api.v1.state_pb2 import WRITE_OUTCOME_FULL, WRITE_OUTCOME_UNAVAILABLE
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_state.errors import full
from lockstep_state.memory import MemoryBackend
from lockstep_state.results import plain
from lockstep_state.server import health_of
from lockstep_state.services.calls import Running
from lockstep_state.services.encoded import encoding
from lockstep_state.services.journal import Journal
from lockstep_state.settings import StateSettings


class Clock:
    """A clock that tests move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowBackend:
    """A backend whose calls take a time, or fail as if its store were away."""

    def __init__(self, backend):
        self.backend = backend
        self.delay_s = 0.0
        self.read_delay_s = 0.0
        self.is_away = False
        self.is_full = False
        """It has no room for a lease or a key."""
        self.refused = set()
        """Keys of streams for which it has no room."""
        self.refusals = Counter()
        self.lost_answers = 0
        """So many batches are written without an answer."""
        self.most_writes = None
        """A larger batch is not answered in any time."""
        self.held = {}
        """By the names of calls: those that come wait for this event."""
        self.calls = []

    @property
    def unready(self):
        return "the store is away" if self.is_away else None

    async def append(self, writes):
        self.calls.append("append")
        await asyncio.sleep(self.delay_s)
        if self.most_writes is not None and len(writes) > self.most_writes:
            await asyncio.Event().wait()
        if self.is_away:
            return [plain(WRITE_OUTCOME_UNAVAILABLE) for _ in writes]
        refused = self.refused.copy()
        self.refusals.update(write.key for write in writes if write.key in refused)
        accepted = iter(await self.backend.append([write for write in writes if write.key not in refused]))
        results = [plain(WRITE_OUTCOME_FULL) if write.key in refused else next(accepted) for write in writes]
        if self.lost_answers:
            self.lost_answers -= 1
            raise LockstepError(ErrorCode.UNAVAILABLE, "the answer is lost")
        return results

    def __getattr__(self, name):
        method = getattr(self.backend, name)

        async def call(*arguments):
            self.calls.append(name)
            if name in self.held:
                await self.held[name].wait()
            await asyncio.sleep(self.delay_s + self.read_delay_s * (name == "read"))
            if self.is_away:
                raise LockstepError(ErrorCode.UNAVAILABLE, "the store does not answer")
            if self.is_full:
                raise full()
            return await method(*arguments)

        return call


class StateServer:
    """One state server."""

    def __init__(self, path, clock=None, credentials=None, **settings):
        self.credentials = credentials
        self.target = f"unix:{path}"
        self.clock = clock or Clock()
        self.settings = StateSettings(**settings)
        self.backend = self._make()
        self._server = None
        self._expiring = None

    def _make(self):
        return SlowBackend(MemoryBackend(self.settings.max_memory_bytes, self.settings.limits, self.clock))

    async def start(self):
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),), interceptors=[encoding("/lockstep.v1.")])
        journal = Journal(self.backend, self.settings, Running(self.settings.max_calls))
        state_pb2_grpc.add_JournalServicer_to_server(journal, self._server)
        self._server.add_generic_rpc_handlers((health_of(self.backend).handler(),))
        if self.credentials is None:
            self._server.add_insecure_port(self.target)
        else:
            self._server.add_secure_port(self.target, self.credentials)
        await self._server.start()
        self._expiring = asyncio.create_task(self.backend.backend.run())
        return self

    async def kill(self):
        server, self._server = self._server, None
        if server is not None:
            self._expiring.cancel()
            await server.stop(0)

    async def restart(self):
        """Begin again, without a memory."""
        await self.kill()
        self.backend = self._make()
        return await self.start()
