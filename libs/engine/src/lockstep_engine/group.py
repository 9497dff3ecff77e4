"""The rank group and its supervisor: starts the ranks, gives them plans, sees one die or hang, kills the rest.

An epoch is one life of the group. After any fault there is no attempt to go on: all ranks are killed, and a new
epoch starts.
Everything happens in the thread of one asyncio loop.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine import zygote
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.mailbox import MAX_IN_FLIGHT, Mailbox
from lockstep_engine.plan import (
    AllocateBlocks,
    ControlMessage,
    Loaded,
    Loading,
    Plan,
    PoolSizes,
    RankSpec,
    Ready,
    Result,
    StartFailed,
    decode_control,
    decode_result,
    encode_control,
    encode_plan,
)

_DOORBELL_BYTES = 8
_MAX_CONTROL_BYTES = 64 * 1024
_RUN_ZYGOTE = "from lockstep_engine.zygote import main; main()"
_STACKS_S = 0.3
"""How long the ranks get to write their stacks before they are killed."""
_NO_MEMORY = "the process that drives the ranks had no memory for a step"


@dataclass
class RankProcess:
    """A rank as its supervisor sees it."""

    rank: int
    pid: int = 0
    state: str = "starting"
    """starting, ready or dead"""
    blocks: PoolSizes | None = None
    loading: tuple[int, int] = (0, 0)
    """Bytes of weights read, and in all."""
    phases_s: dict[str, float] = field(default_factory=dict)


class Listener(Protocol):
    """Who is told what happens to the group."""

    def on_ready(self, blocks: PoolSizes, ready: Ready) -> None:
        """All ranks wait for plans; each holds `blocks` blocks."""
        ...

    def on_result(self, result: Result) -> None:
        """The first of the steps in flight is done."""
        ...

    def on_lost(self, reason: str) -> None:
        """The group is dead or about to be killed: no further result will come. `start` begins the next epoch."""
        ...

    def on_refused(self, error: LockstepError) -> None:
        """The ranks cannot start, and trying again cannot help."""
        ...

    def on_progress(self) -> None:
        """A rank has read more of its weights."""
        ...


@dataclass(frozen=True)
class GroupSettings:
    """What the supervisor needs beside each rank's spec."""

    spec: RankSpec
    """Of rank 0; the others differ in `rank` alone."""
    plan_bytes: int
    result_bytes: int
    collectives_bytes: int
    """Of the shared segment for collectives; 0: the ranks meet through torch.distributed."""
    environment: dict[str, str]
    """Set for the ranks before any library is loaded."""


class RankGroup:
    """One zygote and, in each epoch, `tp` ranks."""

    def __init__(self, settings: GroupSettings, listener: Listener) -> None:
        self._settings = settings
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tp = settings.spec.tp
        self.epoch = 0
        self.ranks = [RankProcess(rank) for rank in range(self._tp)]
        self._mailbox: Mailbox | None = None
        self._zygote: subprocess.Popen[bytes] | None = None
        self._zygote_socket: socket.socket | None = None
        """Set once the zygote has said that it is ready."""
        self._controls: list[socket.socket] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._in_flight: deque[tuple[int, float]] = deque()
        """Steps whose results have not come, and how many seconds each may take."""
        self._forked = False
        """There are ranks that have not been reaped."""
        self.last_deaths: dict[int, str] = {}
        """How each rank of the last epoch ended."""
        self._died: int | None = None
        """The rank that ended by itself and took the others along."""

    @property
    def death(self) -> str:
        """How the rank that died first in the last epoch ended; empty if none did, or it is not buried yet."""
        return "" if self._died is None else self.last_deaths.get(self._died, "")

    @property
    def is_live(self) -> bool:
        """Whether anybody listens for plans."""
        return bool(self._controls)

    @property
    def in_flight(self) -> int:
        """Steps whose results have not come."""
        return len(self._in_flight)

    @property
    def steps(self) -> list[int]:
        """Steps finished by each rank in this epoch."""
        return [0] * self._tp if self._mailbox is None else [int(count) for count in self._mailbox.steps]

    async def start(self) -> None:
        """Begin a new epoch: fork the ranks (and the zygote, if there is none). `on_ready` tells when they can work."""
        await self.kill()
        self.epoch += 1
        self._died, self.last_deaths = None, {}
        self.ranks = [RankProcess(rank) for rank in range(self._tp)]
        if self._zygote is None or self._zygote.poll() is not None:
            await self._start_zygote()
        settings = self._settings
        size = Mailbox.segment_bytes(self._tp, settings.plan_bytes, settings.result_bytes)
        descriptors = [
            Mailbox.create(size, "mailbox"),
            Mailbox.create(settings.collectives_bytes, "collectives"),
            Mailbox.create(0, "rendezvous"),
        ]
        try:
            self._mailbox = Mailbox(descriptors[0], self._tp, settings.plan_bytes, settings.result_bytes)
            for rank in range(self._tp):
                await self._fork(rank, descriptors)
            # Only now: a rank that has died meanwhile begins the next epoch, and two starts would read each other's
            # answers.
            for rank, control in enumerate(self._controls):
                self._loop.add_reader(control, self._on_readable, rank, control)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._arm(settings.spec.start_timeout_s, "did not become ready")

    def execute(self, plan: Plan, deadline_s: float) -> None:
        """Give the ranks a plan. MAX_IN_FLIGHT steps are in flight at most; `on_result` ends each in its turn, or
        `on_lost` if one takes longer than `deadline_s` when all before it are done.

        Raises:
            MemoryError: no rank has seen the plan.
        """
        assert self._mailbox is not None
        assert len(self._in_flight) < MAX_IN_FLIGHT
        self._mailbox.put_plan(plan.step, encode_plan(plan))
        bell = plan.step.to_bytes(_DOORBELL_BYTES, "little")
        try:
            with contextlib.suppress(OSError):  # a rank has just died; its socket's end is on its way to `_receive`
                for control in self._controls:
                    control.send(bell)
            self._in_flight.append((plan.step, deadline_s))
            if len(self._in_flight) == 1:
                self._await_step()
        except MemoryError:
            self.give_up()

    def give_up(self) -> None:
        """There is no memory here to go on with these ranks. `on_lost` comes later, since whoever began this may not
        know its request yet.
        """
        self._abandon()
        self._loop.call_soon(self._listener.on_lost, _NO_MEMORY)

    async def stop(self) -> None:
        """Kill all processes and wait until they are gone."""
        await self.kill()
        if self._zygote is not None:
            await self._end_zygote(self._zygote)

    async def _start_zygote(self) -> None:
        if self._zygote is not None:
            await self._end_zygote(self._zygote)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._zygote = subprocess.Popen(  # noqa: ASYNC220 - returns when the process exists
                [sys.executable, "-c", _RUN_ZYGOTE, str(theirs.fileno()), self._settings.spec.label, str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **self._settings.environment},
                stdin=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        await self._from_zygote(ours, self._settings.spec.start_timeout_s)
        self._zygote_socket = ours

    async def _end_zygote(self, process: subprocess.Popen[bytes]) -> None:
        """Its death takes along what ranks there are."""
        if self._zygote_socket is not None:
            self._zygote_socket.close()
            self._zygote_socket = None
        process.kill()
        await self._loop.run_in_executor(None, process.wait)
        self._zygote = None

    async def _from_zygote(self, sock: socket.socket, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            data = await self._loop.sock_recv(sock, zygote.MAX_MESSAGE_BYTES)
        if not data:
            raise LockstepError(ErrorCode.INTERNAL, "the process that starts ranks has died; its error is on stderr")
        return data

    async def _fork(self, rank: int, descriptors: list[int]) -> None:
        assert self._zygote_socket is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = _replace_rank(self._settings.spec, rank, self.epoch)
        message = zygote.Fork(spec, shared_collectives=self._settings.collectives_bytes > 0)
        with theirs:
            socket.send_fds(self._zygote_socket, [zygote.encode(message)], [theirs.fileno(), *descriptors])
        answer = zygote.decode(await self._from_zygote(self._zygote_socket, 10.0))
        assert isinstance(answer, zygote.Forked)
        self.ranks[rank].pid = answer.pid
        self._forked = True
        ours.setblocking(False)
        self._controls.append(ours)

    async def kill(self) -> None:
        """SIGKILL what is left of the ranks and wait for them, so that their memory is free."""
        self._abandon()
        for process in self.ranks:
            process.state = "dead"
        if not self._forked:
            return
        self._forked = False
        if self._zygote_socket is None or self._zygote is None or self._zygote.poll() is not None:
            return
        with contextlib.suppress(OSError, LockstepError, TimeoutError):
            await self._loop.sock_sendall(self._zygote_socket, zygote.encode(zygote.KillAll()))
            while True:
                answer = zygote.decode(await self._from_zygote(self._zygote_socket, 15.0))
                if isinstance(answer, zygote.Killed):
                    self.last_deaths = {rank: _describe(status) for rank, status in answer.statuses.items()}
                    return
        await self._end_zygote(self._zygote)  # it does not answer

    def _abandon(self) -> None:
        """Listen to the ranks no more."""
        self._disarm()
        self._in_flight.clear()
        for control in self._controls:
            self._loop.remove_reader(control)
            control.close()
        self._controls = []

    def _on_readable(self, rank: int, control: socket.socket) -> None:
        try:
            self._receive(rank, control)
        except MemoryError:  # what a rank has said is half heard: nobody could tell what is missing
            self._fail(_NO_MEMORY)

    def _receive(self, rank: int, control: socket.socket) -> None:
        try:
            data = control.recv(_MAX_CONTROL_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._died = rank
            self._lose(f"rank {rank} (pid {self.ranks[rank].pid}) died", rank)
        elif len(data) == _DOORBELL_BYTES:
            self._finish_step(int.from_bytes(data, "little"))
        else:
            self._on_control(rank, decode_control(data))

    def _await_step(self) -> None:
        """The time of the first step in flight begins."""
        self._arm(self._in_flight[0][1], "has not finished its step")

    def _finish_step(self, step: int) -> None:
        assert self._mailbox is not None
        self._disarm()
        first, _ = self._in_flight.popleft()
        assert step == first
        if self._in_flight:
            self._await_step()
        self._listener.on_result(decode_result(self._mailbox.get_result(step)))

    def _on_control(self, rank: int, message: ControlMessage) -> None:
        process = self.ranks[rank]
        if isinstance(message, Loading):
            process.loading = (message.done_bytes, message.total_bytes)
            self._listener.on_progress()
        elif isinstance(message, Loaded):
            process.blocks, process.phases_s = message.blocks, message.phases_s
            self._allocate()
        elif isinstance(message, Ready):
            process.state = "ready"
            if all(each.state == "ready" for each in self.ranks):
                self._disarm()
                self._listener.on_ready(self._blocks(), message)
        elif isinstance(message, StartFailed):
            if message.permanent:
                self._abandon()
                self._listener.on_refused(LockstepError(ErrorCode.INVALID_REQUEST, message.message, field="model"))
            else:
                self._lose(message.message, rank)

    def _blocks(self) -> PoolSizes:
        known = [each.blocks for each in self.ranks if each.blocks is not None]
        return PoolSizes(min(each.hot for each in known), min(each.cold for each in known))

    def _allocate(self) -> None:
        """When all ranks have loaded: each allocates as many blocks as the poorest of them can hold."""
        if any(each.blocks is None for each in self.ranks):
            return
        blocks = self._blocks()
        needed = -(-self._settings.spec.context_length // BLOCK_SIZE)
        if blocks.hot < 1:
            self._abandon()
            self._listener.on_refused(
                LockstepError(
                    ErrorCode.INVALID_REQUEST,
                    f"no memory for the KV cache: not one block of {BLOCK_SIZE} tokens fits "
                    f"({needed} hold one whole context)",
                    field="kv_memory_bytes",
                )
            )
            return
        for control in self._controls:
            control.send(encode_control(AllocateBlocks(blocks)))

    def _arm(self, seconds: float, what: str) -> None:
        self._disarm()
        self._deadline = self._loop.call_later(seconds, self._on_deadline, what, time.monotonic())

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self, what: str, since: float) -> None:
        """A rank hangs. The one that has entered the fewest collectives is the one that the others wait for."""
        assert self._mailbox is not None
        progress = [(int(self._mailbox.collectives[rank]), rank) for rank in range(self._tp)]
        waiting = [rank for rank in range(self._tp) if self.ranks[rank].state != "ready"]
        guilty = waiting[0] if waiting else min(progress)[1]
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        reason = f"rank {guilty} (pid {self.ranks[guilty].pid}) {what} for {time.monotonic() - since:.1f} s"
        self._deadline = self._loop.call_later(_STACKS_S, self._lose, reason, guilty)

    def _lose(self, reason: str, rank: int) -> None:
        self.ranks[rank].state = "dead"
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._abandon()
        self._listener.on_lost(reason)


def _replace_rank(spec: RankSpec, rank: int, epoch: int) -> RankSpec:
    values = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return RankSpec(**{**values, "rank": rank, "epoch": epoch})


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.WEXITSTATUS(status)}"
