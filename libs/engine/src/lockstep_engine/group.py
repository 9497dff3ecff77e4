"""The supervisor of a rank group: it starts the ranks, sends them plans, and detects a rank that dies or hangs.

An epoch is one life of the group. After any fault all ranks are killed and a new epoch starts; no rank is repaired.
Everything runs in the thread of one asyncio loop.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine import faults
from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    AllocateBlocks,
    Fork,
    Forked,
    KillAll,
    Killed,
    Loaded,
    Loading,
    ProfileEnded,
    RankDescriptors,
    RankLogEntry,
    RankMessage,
    RankSpec,
    Ready,
    SetLogLevel,
    StartFailed,
    StartProfile,
    StopProfile,
    decode_doorbell,
    decode_rank_message,
    decode_zygote_message,
    encode_control,
    encode_doorbell,
    send_fork,
)
from lockstep_engine.hang import find_hung
from lockstep_engine.mailbox import MAX_IN_FLIGHT, NOTHING_DONE, Mailbox, RankTimes
from lockstep_engine.model_config import refuse
from lockstep_engine.plan import Plan, Result, decode_result, encode_plan
from lockstep_engine.profile_collection import PROFILE_ALLOWANCE_S, ProfileCollection
from lockstep_engine.rank_log import write_entry
from lockstep_engine.rank_output import RankOutput, RankView

logger = logging.getLogger("lockstep.rank")

RUN_ZYGOTE = "from lockstep_engine.zygote import main; main()"
"""Code for `python -c` that runs a zygote."""

_STACK_DUMP_S = 0.3
"""Time for hung ranks to write their stacks before they are killed."""
_VIEW_S = 0.5
"""The same when somebody asks for them."""
_FORK_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 15.0
_MAX_STDERR_TAIL_CHARS = 4_000
"""Of a rank's stderr, in the line that says that it failed."""
_MAX_CHUNK_CHARS = 12_000
"""Of a rank's stderr in one line, which `telemetry.recent_lines` keeps whole, also with its quotes escaped."""
_FLOOD_PAUSE_S = 0.5
"""A rank that writes more than it may is not read for so long: its pipe drops what does not fit."""
_SLOW_STEP = "has not finished its step"


@dataclass
class RankProcess:
    """The supervisor's view of a rank."""

    rank: int
    pid: int = 0
    state: str = "starting"
    """starting, ready or dead"""
    blocks: PoolSizes | None = None
    loading: tuple[int, int] = (0, 0)
    """Bytes of weights read so far, and in total."""
    phases_s: dict[str, float] = field(default_factory=dict)
    ready: Ready | None = None
    """Its message when it became ready."""


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


@dataclass(frozen=True)
class GroupSettings:
    """What a supervisor needs to start ranks."""

    spec: RankSpec
    """The specification of rank 0; those of the others differ only in `rank`. Each start sets the epoch."""
    plan_bytes: int
    result_bytes: int
    collectives_bytes: int
    """Size of the shared segment for collectives; 0: the ranks use torch.distributed."""
    environment: dict[str, str]
    """Variables that the ranks have before any library is loaded."""
    host_bytes: int = 0
    """Size of each rank's tier in host memory if the driver reads and writes it too; 0: it does not."""
    zygote: str = RUN_ZYGOTE
    """Code for `python -c` that runs the zygote. Tests run scripted ranks with it."""

    @property
    def has_flight_records(self) -> bool:
        """Whether the ranks may use torch.distributed: they do on GPUs."""
        config = self.spec.config
        return config.tp > 1 and (config.device != "cpu" or not self.collectives_bytes)


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
        self._zygote: subprocess.Popen[bytes] | None = None
        self._zygote_socket: socket.socket | None = None
        """Set once the zygote is ready."""
        self._controls: list[socket.socket] = []
        self.flight_records: dict[int, str] = {}
        """Of each rank at the last hang, for when the ranks are gone. The dictionary is replaced."""
        self._outputs: list[RankOutput] = []
        """Of the ranks of this epoch. The list is replaced and never changed: other threads read it."""
        self._deadline: asyncio.TimerHandle | None = None
        self._in_flight: deque[tuple[int, float]] = deque()
        """Steps whose results have not come, each with its deadline in seconds."""
        self._forked = False
        """Whether there are ranks that have not been reaped."""
        self.exits: dict[int, str] = {}
        """How each rank of the last epoch ended: a signal's name or an exit code."""
        self._step_since = 0.0
        self._log_level = logging.getLevelName(logging.getLogger("lockstep").getEffectiveLevel()).lower()
        self._profile: ProfileCollection | None = None
        self._profiles = 0
        self._profiled_until = 0.0
        """Until then steps have the deadline of profiled ones."""
        self._allowed_step = -1
        """The last step that has that deadline."""
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
        return len(self._in_flight)

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
        return self._step_since if self._in_flight else 0.0

    def view(self) -> list[RankView]:
        """The ranks as they are now, each with its stack if it gives one within half a second. Any thread may call.
        A rank that is stopped runs for some 20 ms, in which it writes its stack.
        """
        outputs, ranks, mailbox = self._outputs, self.ranks, self._mailbox
        for output in outputs:
            output.ask_stack()
        until = time.monotonic() + _VIEW_S
        views = []
        for output, rank in zip(outputs, ranks, strict=False):
            steps, entered = (
                (0, 0) if mailbox is None else (int(mailbox.steps[rank.rank]), int(mailbox.collectives[rank.rank]))
            )
            place = output.place(until)
            record = output.flight_record(until)
            views.append(RankView(rank.rank, rank.pid, rank.state, *place[:2], steps, entered, place[2], record))
        return views

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
        self._allow_more()
        try:
            return await self._profile.run(steps, self._order, lambda: min(self.steps))
        finally:
            self._profile = None
            # Ranks that have been told to stop do so before a later step.
            self._profiled_until = time.monotonic() + PROFILE_ALLOWANCE_S

    def _allow_more(self) -> None:
        """Give the steps in flight the deadline that later ones get: a GPU still computes them when its rank reads the
        order, and their results wait until the profiler has started. A step gets it once, or profiles one after the
        other would hide a rank that hangs.
        """
        now, first = time.monotonic(), self._in_flight[0] if self._in_flight else None
        is_late = first is not None and now >= self._step_since + first[1]
        for index, (step, seconds) in enumerate(self._in_flight):
            if step > self._allowed_step and not is_late:
                self._in_flight[index] = (step, seconds + PROFILE_ALLOWANCE_S)
        if self._in_flight and self._in_flight[0] != first:
            self._disarm()
            left_s = self._step_since + self._in_flight[0][1] - now
            self._deadline = self._loop.call_later(left_s, self._on_deadline, _SLOW_STEP, self._step_since)
        self._allowed_step = max([self._allowed_step, *(step for step, _ in self._in_flight)])

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
        self._profiled_until, self._allowed_step = 0.0, -1
        self.host_memory = []
        if self._zygote is None or self._zygote.poll() is not None:
            await self._start_zygote()
        settings = self._settings
        size = Mailbox.segment_bytes(self._tp, settings.plan_bytes, settings.result_bytes)
        shared = {
            "mailbox": Mailbox.create(size, "mailbox"),
            "collectives": Mailbox.create(settings.collectives_bytes, "collectives"),
            "rendezvous": Mailbox.create(0, "rendezvous"),
        }
        try:
            self._mailbox = Mailbox(shared["mailbox"], self._tp, settings.plan_bytes, settings.result_bytes)
            has_records = self._settings.has_flight_records
            self._outputs = [RankOutput(rank, has_flight_record=has_records) for rank in range(self._tp)]
            for output in self._outputs:
                await self._fork(output, shared)
            # Not earlier: the end of a rank leads to the next `start`, and two starts at once would read each other's
            # answers from the zygote.
            for rank, control in enumerate(self._controls):
                self._loop.add_reader(control, self._on_readable, rank, control)
        finally:
            for descriptor in shared.values():
                os.close(descriptor)
        self._arm(settings.spec.config.start_timeout_s, "did not become ready")

    @property
    def step_deadline_s(self) -> float:
        """Deadline of the step that the ranks execute now; 0: none is in flight."""
        return self._in_flight[0][1] if self._in_flight else 0.0

    def execute(self, plan: Plan, deadline_s: float) -> None:
        """Send the ranks a plan. At most MAX_IN_FLIGHT steps are in flight. `on_result` is called for each in order, or
        `on_lost` if one takes longer than `deadline_s`, counted from the end of the step before it.

        Raises:
            MemoryError: the plan has not reached any rank.
        """
        assert self._mailbox is not None
        assert len(self._in_flight) < MAX_IN_FLIGHT
        self._mailbox.put_plan(plan.step, encode_plan(plan))
        doorbell = encode_doorbell(plan.step)
        if self._profile is not None or time.monotonic() < self._profiled_until:
            deadline_s += PROFILE_ALLOWANCE_S
            self._allowed_step = plan.step
        try:
            with contextlib.suppress(OSError):  # a rank has just died: `_receive` will read the end of its socket
                for control in self._controls:
                    control.send(doorbell)
            self._in_flight.append((plan.step, deadline_s))
            if len(self._in_flight) == 1:
                self._arm_step()
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
        if self._zygote is not None:
            await self._end_zygote(self._zygote)

    async def _start_zygote(self) -> None:
        if self._zygote is not None:
            await self._end_zygote(self._zygote)
        config = self._settings.spec.config
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._zygote = subprocess.Popen(  # noqa: ASYNC220 - returns when the process exists
                [sys.executable, "-c", self._settings.zygote, str(theirs.fileno()), config.label, str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **self._settings.environment},
                stdin=subprocess.DEVNULL,
            )
        ours.setblocking(False)
        await self._from_zygote(ours, config.start_timeout_s)
        self._zygote_socket = ours

    async def _end_zygote(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the zygote. The kernel then kills its ranks."""
        if self._zygote_socket is not None:
            self._zygote_socket.close()
            self._zygote_socket = None
        process.kill()
        await self._loop.run_in_executor(None, process.wait)
        self._zygote = None

    async def _from_zygote(self, sock: socket.socket, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            data = await self._loop.sock_recv(sock, MAX_CONTROL_BYTES)
        if not data:
            raise LockstepError(ErrorCode.INTERNAL, "the process that forks ranks has died; its error is on stderr")
        return data

    async def _fork(self, output: RankOutput, shared: dict[str, int]) -> None:
        """Start a rank. `shared`: the descriptors that all ranks get, by their names in `RankDescriptors`."""
        assert self._zygote_socket is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank = output.rank
        spec = msgspec.structs.replace(self._settings.spec, rank=rank, epoch=self.epoch, log_level=self._log_level)
        settings = self._settings
        has_record = settings.has_flight_records
        message = Fork(spec, settings.collectives_bytes > 0, settings.host_bytes > 0, has_record)
        host = Mailbox.create(self._settings.host_bytes, f"host-{rank}")
        try:
            if self._settings.host_bytes:
                self.host_memory.append(mmap.mmap(host, self._settings.host_bytes))
            own = {"control": theirs.fileno(), "stderr": output.stderr, "stacks": output.stacks}
            own |= {"flight": output.flight, "host": host}
            with theirs:
                send_fork(self._zygote_socket, message, RankDescriptors(**own, **shared))
        finally:
            os.close(host)
        answer = decode_zygote_message(await self._from_zygote(self._zygote_socket, _FORK_TIMEOUT_S))
        assert isinstance(answer, Forked)
        output.close_theirs()
        output.started(answer.pid)
        self._loop.add_reader(output.read_end, self._pass_on_stderr, output)
        self.ranks[rank].pid = answer.pid
        self._forked = True
        ours.setblocking(False)
        self._controls.append(ours)

    async def kill(self) -> None:
        """SIGKILL all ranks and wait until they have ended, so that their memory is free."""
        self._stop_listening()
        for process in self.ranks:
            process.state = "dead"
        try:
            await self._reap()
        finally:
            outputs, self._outputs = self._outputs, []
            for output in outputs:
                self._pass_on_stderr(output)
                self._loop.remove_reader(output.read_end)
                output.close()

    async def _reap(self) -> None:
        """Make the zygote kill and reap all ranks."""
        if not self._forked:
            return
        self._forked = False
        if self._zygote_socket is None or self._zygote is None or self._zygote.poll() is not None:
            return
        with contextlib.suppress(OSError, LockstepError, TimeoutError):
            await self._loop.sock_sendall(self._zygote_socket, encode_control(KillAll()))
            while True:
                answer = decode_zygote_message(await self._from_zygote(self._zygote_socket, _KILL_TIMEOUT_S))
                if isinstance(answer, Killed):
                    self.exits = {rank: _describe(status) for rank, status in answer.statuses.items()}
                    return
        await self._end_zygote(self._zygote)  # it did not answer

    def _stop_listening(self) -> None:
        """Close the control sockets. Ranks end when they notice it."""
        self._disarm()
        self._in_flight.clear()
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
        """Fail the group if what the loop calls raises an error. A message or a result may be lost then, and nobody
        else would notice: the requests would wait for ever.
        """
        try:
            yield
        except Exception as error:
            self._fail(faults.note(error, self.epoch))

    def _receive(self, rank: int, control: socket.socket) -> None:
        descriptors: list[int] = []
        try:
            data, descriptors, _, _ = socket.recv_fds(control, MAX_CONTROL_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            self._on_packet(rank, data, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _on_packet(self, rank: int, data: bytes, descriptors: list[int]) -> None:
        if not data:
            self._first_dead = rank
            self._lose(f"rank {rank} (pid {self.ranks[rank].pid}) died", rank)
        elif (step := decode_doorbell(data)) is not None:
            self._finish_step(step)
        else:
            self._on_message(rank, decode_rank_message(data), descriptors)

    def _arm_step(self) -> None:
        """Start the deadline of the oldest step in flight."""
        self._step_since = time.monotonic()
        self._arm(self._in_flight[0][1], _SLOW_STEP)

    def _finish_step(self, step: int) -> None:
        assert self._mailbox is not None
        self._disarm()
        first, _ = self._in_flight.popleft()
        assert step == first
        if self._in_flight:
            self._arm_step()
        self._listener.on_result(decode_result(self._mailbox.get_result(step)))

    def _on_message(self, rank: int, message: RankMessage, descriptors: list[int]) -> None:
        process = self.ranks[rank]
        if isinstance(message, Loading):
            process.loading = (message.done_bytes, message.total_bytes)
            self._listener.on_progress()
        elif isinstance(message, Loaded):
            process.blocks, process.phases_s = message.blocks, message.phases_s
            self._allocate()
        elif isinstance(message, Ready):
            process.state, process.ready = "ready", message
            if all(each.state == "ready" for each in self.ranks):
                self._disarm()
                self._listener.on_ready(self._blocks(), self._common_ready(message))
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

    def _common_ready(self, last: Ready) -> Ready:
        """The message for the group: it is deterministic only if each rank is and all have the same fingerprint, and it
        has the pace of the slowest.
        """
        all_ready = [each.ready for each in self.ranks if each.ready is not None]
        slowest = max(all_ready, key=lambda ready: ready.step_s + ready.token_s)
        common = msgspec.structs.replace(last, step_s=slowest.step_s, token_s=slowest.token_s)
        if len({(ready.deterministic, ready.fingerprint) for ready in all_ready}) == 1:
            return common
        return msgspec.structs.replace(common, deterministic=False, fingerprint="")

    def _blocks(self) -> PoolSizes:
        known = [each.blocks for each in self.ranks if each.blocks is not None]
        return PoolSizes(min(each.hot for each in known), min(each.cold for each in known), known[0].host)

    def _allocate(self) -> None:
        """Once all ranks have loaded, have each allocate as many blocks as the one with the least memory can hold."""
        if any(each.blocks is None for each in self.ranks):
            return
        blocks = self._blocks()
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
        """A rank hangs: the one that has come least far, since the others wait for it."""
        with self._failing_on_errors():
            self._name_hung(what, since)

    def _name_hung(self, what: str, since: float) -> None:
        """Ask all ranks for their stacks, and then lose the one that hangs."""
        assert self._mailbox is not None
        starting = [rank for rank in range(self._tp) if self.ranks[rank].state != "ready"]
        hung, why = find_hung([self._mailbox.progress(rank) for rank in range(self._tp)])
        if starting:
            hung, why = starting[0], ""
        for output in self._outputs:
            output.ask_stack()
        reason = f"rank {hung} (pid {self.ranks[hung].pid}) {what} for {time.monotonic() - since:.1f} s"
        reason += f"; {why}" if why else ""
        self._deadline = self._loop.call_later(_STACK_DUMP_S, self._lose_hung, reason, hung)

    def _lose_hung(self, reason: str, hung: int) -> None:
        """Log where each rank is, then lose the group."""
        with self._failing_on_errors():
            self._log_places()
            self._lose(reason, hung)

    def _log_places(self) -> None:
        records = {}
        for output in self._outputs:
            process, waits_in, stack = output.place(time.monotonic())
            records[output.rank] = output.flight_record(time.monotonic())
            fields: dict[str, str | int] = {"process_state": process, "waits_in": waits_in, "stack": stack}
            if self._mailbox is not None and (progress := self._mailbox.progress(output.rank)).launched:
                fields |= {"launched": progress.launched, "reached": progress.reached}
            logger.error("where the rank is", extra=self._named(output.rank) | fields)
        self.flight_records = records

    def _lose(self, reason: str, rank: int) -> None:
        """Lose the group because of a rank, the first one that failed."""
        self.ranks[rank].state = "dead"
        stderr = ""
        for output in self._outputs:
            self._pass_on_stderr(output)
            if output.rank == rank:
                stderr = output.last_words(_MAX_STDERR_TAIL_CHARS)
        # At this level whatever its stderr had: a log without warnings must have the stack of a crash too.
        logger.error(
            "rank failed", extra=self._named(rank) | {"reason": reason} | ({"stderr": stderr} if stderr else {})
        )
        self._fail(reason)

    def _named(self, rank: int) -> dict[str, str | int]:
        """Fields of a log line about a rank."""
        steps = 0 if self._mailbox is None else int(self._mailbox.steps[rank])
        return {"rank": rank, "step": steps, "epoch": self.epoch, "pid": self.ranks[rank].pid}

    def _pass_on_stderr(self, output: RankOutput) -> None:
        """Log what a rank has written to its stderr: warnings of libraries, the stack of a crash."""
        lines, has_more = output.read_lines()
        is_flood = output.dropped > 0
        if lines or not has_more:  # what is dropped is told with a line that is not
            dropped = output.take_dropped()
            fields: dict[str, str | int] = {"dropped_lines": dropped} if dropped else {}
            for chunk in _chunks(lines) or ([""] if dropped else []):
                logger.warning("rank wrote to stderr", extra=self._named(output.rank) | {"stderr": chunk} | fields)
                fields = {}
        if is_flood or not has_more:
            self._loop.remove_reader(output.read_end)
        if is_flood and has_more:
            self._loop.call_later(_FLOOD_PAUSE_S, self._read_again, output)

    def _read_again(self, output: RankOutput) -> None:
        if output in self._outputs:  # else it is closed
            self._loop.add_reader(output.read_end, self._pass_on_stderr, output)

    def _fail_again_on_errors(self, reason: str) -> None:
        with self._failing_on_errors():
            self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._stop_listening()
        if not self._is_lost:  # two starts at once would read each other's answers from the zygote
            self._listener.on_lost(reason)
            self._is_lost = True


def _chunks(lines: list[str]) -> list[str]:
    """The lines in as few texts as there have to be for their bound; each line is below it."""
    chunks: list[list[str]] = []
    left = 0
    for line in lines:
        if len(line) + 1 > left:
            chunks.append([])
            left = _MAX_CHUNK_CHARS
        chunks[-1].append(line)
        left -= len(line) + 1
    return ["\n".join(chunk) for chunk in chunks]


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.WEXITSTATUS(status)}"
