"""The supervisor of a rank group: it starts the ranks, sends them plans, and detects a rank that dies or hangs.

An epoch is one life of the group. After any fault all ranks are killed and a new epoch starts; no rank is repaired.
Everything runs in the thread of one asyncio loop.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import socket
import time
from collections.abc import Iterator
from typing import Protocol

import msgspec
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.hang import find_hung

from lockstep_engine import faults
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    AllocateBlocks,
    Fork,
    Loaded,
    Loading,
    ProfileEnded,
    RankDescriptors,
    RankLogEntry,
    RankMessage,
    Ready,
    SetLogLevel,
    StartFailed,
    StartProfile,
    StopProfile,
    decode_doorbell,
    decode_rank_message,
    encode_control,
    encode_doorbell,
)
from lockstep_engine.group_output import GroupOutput
from lockstep_engine.group_settings import GroupSettings
from lockstep_engine.mailbox import MAX_IN_FLIGHT, NOTHING_DONE, Mailbox, RankTimes
from lockstep_engine.model_config import refuse
from lockstep_engine.plan import Plan, Result, decode_result, encode_plan
from lockstep_engine.profile_collection import ProfileCollection
from lockstep_engine.rank_log import write_entry
from lockstep_engine.rank_output import RankView
from lockstep_engine.rank_process import RankProcess, common_blocks, common_ready
from lockstep_engine.step_deadlines import StepDeadlines
from lockstep_engine.zygote_process import ZygoteProcess

STACK_DUMP_S = 0.3
"""Time for hung ranks to write their stacks before they are killed."""
_END_TIMEOUT_S = 15.0
"""Time for killed ranks to end: a device's memory is given back until then."""


class Listener(Protocol):
    """Receives the events of a group. All calls come from the loop's thread."""

    def on_ready(self, blocks: PoolSizes, ready: Ready) -> None:
        """All ranks wait for plans; each holds `blocks` blocks."""
        ...

    def on_result(self, result: Result) -> None:
        """The oldest step in flight is done."""
        ...

    def on_lost(self, reason: str) -> None:
        """The group has failed: no further result will come. `start` begins the next epoch. If this raises an error,
        it is called again.
        """
        ...

    def on_refused(self, error: LockstepError) -> None:
        """The ranks cannot start, and another start would fail in the same way."""
        ...

    def on_progress(self) -> None:
        """A rank has read more of its weights."""
        ...


class RankGroup:
    """One zygote and, in each epoch, `tp` ranks."""

    def __init__(self, settings: GroupSettings, listener: Listener) -> None:
        self._settings = settings
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tp = settings.spec.config.tp
        self.epoch = 0
        self.ranks = [RankProcess(rank) for rank in range(self._tp)]
        self._mailbox: Mailbox | None = None
        self.host_memory: list[mmap.mmap] = []
        """What the driver sees of each rank's tier in host memory, in this epoch; each epoch has memory of its own."""
        self.phases_s: dict[str, float] = {}
        """Seconds that this epoch's start took before its ranks ran."""
        self._zygote = ZygoteProcess(settings)
        self._controls: list[socket.socket] = []
        self.flight_records: dict[int, str] = {}
        """Of each rank at the last hang, for when the ranks are gone. The dictionary is replaced."""
        self._output: GroupOutput | None = None
        """Of the ranks of this epoch. It is replaced: other threads read it."""
        self._deadlines = StepDeadlines(self._on_deadline)
        self.exits: dict[int, str] = {}
        """How each rank of the last epoch ended: a signal's name or an exit code."""
        self._log_level = logging.getLevelName(logging.getLogger("lockstep").getEffectiveLevel()).lower()
        self._profile: ProfileCollection | None = None
        self._profiles = 0
        self._is_lost = False
        """The listener knows that this epoch's ranks are lost."""
        self._first_dead: int | None = None
        """The rank that ended by itself; the others were killed because of it."""

    @property
    def first_exit(self) -> str:
        """How the rank ended that died first in the last epoch; empty if none did, or if it is not reaped yet."""
        return "" if self._first_dead is None else self.exits.get(self._first_dead, "")

    @property
    def threads(self) -> int:
        """CPU threads of each rank."""
        return self._settings.spec.threads

    @property
    def is_live(self) -> bool:
        """Whether there are ranks that take plans."""
        return bool(self._controls)

    @property
    def in_flight(self) -> int:
        """Steps whose results have not come."""
        return self._deadlines.in_flight

    @property
    def steps(self) -> list[int]:
        """Steps finished by each rank in this epoch."""
        return [0] * self._tp if self._mailbox is None else [int(count) for count in self._mailbox.steps]

    @property
    def times(self) -> tuple[RankTimes, ...]:
        """What each rank has done in this epoch."""
        return (NOTHING_DONE,) * self._tp if self._mailbox is None else self._mailbox.times()

    @property
    def device_bytes(self) -> list[int]:
        """Memory of its GPU that each rank has reserved; 0: it has none."""
        return [0] * self._tp if self._mailbox is None else self._mailbox.device_bytes.tolist()

    @property
    def step_since(self) -> float:
        """When the step began that the ranks execute now, on the monotonic clock; 0: none is in flight."""
        return self._deadlines.step_since

    @property
    def step_deadline_s(self) -> float:
        """Deadline of the step that the ranks execute now; 0: none is in flight."""
        return self._deadlines.step_deadline_s

    def view(self) -> list[RankView]:
        """See `GroupOutput.view`. Any thread may call."""
        output = self._output
        return [] if output is None else output.view()

    def set_log_level(self, level: str) -> None:
        """Order all ranks, and those that are started later, to log from this level on."""
        self._log_level = level
        self._order(SetLogLevel(level))

    async def profile(self, steps: int) -> list[bytes]:
        """The ranks' profiles of the next steps, in the order of ranks.

        Raises:
            LockstepError: there is none; it says why.
        """
        if self._profile is not None:
            raise LockstepError(ErrorCode.UNAVAILABLE, "the ranks are being profiled already; try again in a minute")
        self._profiles += 1
        self._profile = ProfileCollection(self._profiles, self._tp)
        self._deadlines.begin_profile()
        try:
            return await self._profile.run(steps, self._order, lambda: min(self.steps))
        finally:
            self._profile = None
            self._deadlines.end_profile()

    def _order(self, order: SetLogLevel | StartProfile | StopProfile) -> list[int]:
        """Send all ranks an order; returns those that do not take it."""
        deaf = []
        message = encode_control(order)
        for rank, control in enumerate(self._controls):
            try:
                control.send(message)
            except OSError:  # a full socket, or a rank that has just died: the others obey
                deaf.append(rank)
        return deaf

    async def start(self) -> None:
        """Begin a new epoch: start a zygote if there is none, and fork the ranks. `on_ready` is called later."""
        await self.kill()
        self.epoch += 1
        self._first_dead, self.exits = None, {}
        self._is_lost = False
        self.ranks = [RankProcess(rank) for rank in range(self._tp)]
        self._mailbox = None  # it counts what the ranks before have done
        self._deadlines.begin_epoch()
        self.host_memory = []
        began = time.monotonic()
        await self._zygote.ensure()
        imported = time.monotonic()
        settings = self._settings
        size = Mailbox.segment_bytes(self._tp, settings.plan_bytes, settings.result_bytes)
        sizes = {"mailbox": size, "collectives": settings.collectives_bytes, "rendezvous": 0}
        shared: dict[str, int] = {}
        try:
            for name, segment_bytes in sizes.items():
                shared[name] = Mailbox.create(segment_bytes, name)
            self._mailbox = mailbox = Mailbox(shared["mailbox"], self._tp, settings.plan_bytes, settings.result_bytes)
            has_records = settings.has_flight_records
            self._output = output = GroupOutput(self.epoch, self.ranks, mailbox, has_flight_records=has_records)
            for rank in range(self._tp):
                await self._fork(rank, output, shared)
            forked = time.monotonic()
            self.phases_s = {"import": round(imported - began, 3), "fork": round(forked - imported, 3)}
            # Not earlier: the end of a rank leads to the next `start`, and two starts at once would read each other's
            # answers from the zygote.
            for rank, control in enumerate(self._controls):
                self._loop.add_reader(control, self._on_readable, rank, control)
        finally:
            for descriptor in shared.values():
                os.close(descriptor)
        self._deadlines.arm(settings.spec.config.start_timeout_s, "did not become ready")

    def execute(self, plan: Plan, deadline_s: float) -> None:
        """Send the ranks a plan. At most MAX_IN_FLIGHT steps are in flight. `on_result` is called for each in order, or
        `on_lost` if one takes longer than `deadline_s`, counted from the end of the step before it.

        Raises:
            MemoryError: the plan has not reached any rank.
        """
        assert self._mailbox is not None
        assert self._deadlines.in_flight < MAX_IN_FLIGHT
        self._mailbox.put_plan(plan.step, encode_plan(plan))
        doorbell = encode_doorbell(plan.step)
        try:
            with contextlib.suppress(OSError):  # a rank has just died: `_receive` will read the end of its socket
                for control in self._controls:
                    control.send(doorbell)
            self._deadlines.add(plan.step, deadline_s)
        except MemoryError as error:
            self.fail_for(error)

    def fail_for(self, error: Exception) -> None:
        """Fail the group because of an error of the driver itself, whose state may be inconsistent. `on_lost` is called
        from the loop and not at once: the caller of this may be inside `submit`, whose caller does not know of its
        request yet.
        """
        self._stop_listening()
        self._loop.call_soon(self._fail_again_on_errors, faults.note(error, self.epoch))

    async def stop(self) -> None:
        """Kill all processes and wait until they are gone."""
        await self.kill()
        await self._zygote.end()

    async def _fork(self, rank: int, output: GroupOutput, shared: dict[str, int]) -> None:
        """Start a rank. `shared`: the descriptors that all ranks get, by their names in `RankDescriptors`."""
        settings, ends = self._settings, output.outputs[rank]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        spec = msgspec.structs.replace(settings.spec, rank=rank, epoch=self.epoch, log_level=self._log_level)
        message = Fork(spec, settings.collectives_bytes > 0, settings.host_bytes > 0, settings.has_flight_records)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            with theirs, contextlib.ExitStack() as given:
                host = Mailbox.create(settings.host_bytes, f"host-{rank}")
                given.callback(os.close, host)
                if settings.host_bytes:
                    self.host_memory.append(mmap.mmap(host, settings.host_bytes))
                own = {"control": theirs.fileno(), "stderr": ends.stderr, "stacks": ends.stacks}
                own |= {"flight": ends.flight, "host": host}
                pid = await self._zygote.fork(message, RankDescriptors(**own, **shared))
            on_failure.pop_all()
        output.started(rank, pid)
        self.ranks[rank].pid = pid
        ours.setblocking(False)
        self._controls.append(ours)

    async def kill(self) -> None:
        """SIGKILL all ranks and wait until they have ended, so that their memory is free. If this is cancelled, the
        next call waits for them.
        """
        self._stop_listening()
        for process in self.ranks:
            process.state = "dead"
        is_cancelled = False
        try:
            exits = await self._zygote.reap()
            if exits is not None:
                self.exits = exits
            elif self._output is not None:  # the zygote has died, and its ranks may be about to
                await self._output.end_ranks(_END_TIMEOUT_S)
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            output = self._output
            if output is not None and not is_cancelled:
                self._output = None
                output.close()

    def _stop_listening(self) -> None:
        """Close the control sockets. Ranks end when they notice it."""
        self._deadlines.clear()
        if self._profile is not None:
            self._profile.fail("the ranks were lost; `lockstep debug` shows why")
        for control in self._controls:
            self._loop.remove_reader(control)
            control.close()
        self._controls = []

    def _on_readable(self, rank: int, control: socket.socket) -> None:
        with self._failing_on_errors():
            self._receive(rank, control)

    @contextlib.contextmanager
    def _failing_on_errors(self) -> Iterator[None]:
        """Fail the group if what the loop calls raises an error. A message or a result may be lost then, and
        without this the requests would wait for ever.
        """
        try:
            yield
        except Exception as error:
            self._fail(faults.note(error, self.epoch))

    def _receive(self, rank: int, control: socket.socket) -> None:
        was_reset = False
        while True:
            descriptors: list[int] = []
            try:
                data, descriptors, _, _ = socket.recv_fds(control, MAX_CONTROL_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                # A rank that ends with unread messages. Its own last messages come after this error, which the loop
                # reports once: it may not call again.
                if not was_reset:
                    was_reset = True
                    continue
                data = b""
            except BlockingIOError:
                if not was_reset:
                    return
                data = b""
            except OSError:
                data = b""
            try:
                self._on_packet(rank, data, descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            if not was_reset or control not in self._controls:
                return

    def _on_packet(self, rank: int, data: bytes, descriptors: list[int]) -> None:
        if not data:
            self._first_dead = rank
            self._lose(f"rank {rank} (pid {self.ranks[rank].pid}) died", rank)
        elif (step := decode_doorbell(data)) is not None:
            self._finish_step(step)
        else:
            self._on_message(rank, decode_rank_message(data), descriptors)

    def _finish_step(self, step: int) -> None:
        assert self._mailbox is not None
        self._deadlines.finish(step)
        self._listener.on_result(decode_result(self._mailbox.get_result(step)))

    def _on_message(self, rank: int, message: RankMessage, descriptors: list[int]) -> None:
        process = self.ranks[rank]
        if isinstance(message, Loading):
            process.loading = (message.done_bytes, message.total_bytes)
            self._listener.on_progress()
        elif isinstance(message, Loaded):
            process.loaded_at_s = time.monotonic()
            process.blocks, process.phases_s = message.blocks, message.phases_s
            self._allocate()
        elif isinstance(message, Ready):
            process.state, process.ready = "ready", message
            process.phases_s |= message.phases_s
            if all(each.state == "ready" for each in self.ranks):
                self._deadlines.disarm()
                self._listener.on_ready(common_blocks(self.ranks), common_ready(self.ranks, message))
        elif isinstance(message, RankLogEntry):
            write_entry(message, rank, self.epoch, process.pid)
        elif isinstance(message, ProfileEnded):
            if self._profile is not None:
                self._profile.take(rank, message, descriptors)
        elif isinstance(message, StartFailed):
            if message.permanent:
                self._stop_listening()
                self._listener.on_refused(refuse(message.message))
            else:
                self._lose(message.message, rank)

    def _allocate(self) -> None:
        """Once all ranks have loaded, have each allocate as many blocks as the one with the least memory can hold."""
        if any(each.blocks is None for each in self.ranks):
            return
        blocks = common_blocks(self.ranks)
        needed = -(-self._settings.spec.model.context_length // BLOCK_SIZE)
        if blocks.hot < 1:
            self._stop_listening()
            self._listener.on_refused(
                LockstepError(
                    ErrorCode.INVALID_REQUEST,
                    f"no memory for the KV cache: not one block of {BLOCK_SIZE} tokens fits "
                    f"({needed} hold one full context)",
                    field="kv_memory_bytes",
                )
            )
            return
        for process, control in zip(self.ranks, self._controls, strict=True):
            process.allocated_at_s = time.monotonic()
            with contextlib.suppress(ConnectionError):  # it has just died, as in `execute`
                control.send(encode_control(AllocateBlocks(blocks)))

    def _on_deadline(self, what: str, since: float) -> None:
        """A rank hangs: the one that has come least far, since the others wait for it."""
        with self._failing_on_errors():
            self._name_hung(what, since)

    def _name_hung(self, what: str, since: float) -> None:
        """Ask all ranks for their stacks, and then lose the one that hangs."""
        assert self._mailbox is not None
        starting = [rank for rank in range(self._tp) if self.ranks[rank].state != "ready"]
        loading = [rank for rank in starting if self.ranks[rank].blocks is None]
        candidates = loading or starting or range(self._tp)
        index, why = find_hung([self._mailbox.progress(rank) for rank in candidates])
        hung = candidates[index]
        assert self._output is not None
        self._output.ask_stacks()
        reason = f"rank {hung} (pid {self.ranks[hung].pid}) {what} for {time.monotonic() - since:.1f} s"
        reason += f"; {why}" if why else ""
        self._deadlines.call_later(STACK_DUMP_S, self._lose_hung, reason, hung)

    def _lose_hung(self, reason: str, hung: int) -> None:
        """Log where each rank is, then lose the group."""
        with self._failing_on_errors():
            assert self._output is not None
            self.flight_records = self._output.log_places()
            self._lose(reason, hung)

    def _lose(self, reason: str, rank: int) -> None:
        """Lose the group because of a rank, the first one that failed."""
        self.ranks[rank].state = "dead"
        if self._output is not None:
            self._output.log_failure(rank, reason)
        self._fail(reason)

    def _fail_again_on_errors(self, reason: str) -> None:
        with self._failing_on_errors():
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._stop_listening()
        if not self._is_lost:  # two starts at once would read each other's answers from the zygote
            self._listener.on_lost(reason)
            self._is_lost = True
