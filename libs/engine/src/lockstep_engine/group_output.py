"""What the ranks of one epoch say that is no result: where they are, and what they have written to their stderr.

It passes their stderr on to the log, a bounded number of lines, and asks them for their stacks.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence

from lockstep_engine.mailbox import Mailbox
from lockstep_engine.rank_output import RankOutput, RankView
from lockstep_engine.rank_process import RankProcess

logger = logging.getLogger("lockstep.rank")

VIEW_S = 0.5
"""Time for ranks to write their stacks when somebody asks for them."""
_MAX_STDERR_TAIL_CHARS = 4_000
"""Of a rank's stderr, in the line that says that it failed."""
_MAX_CHUNK_CHARS = 12_000
"""Of a rank's stderr in one line, which `telemetry.recent_lines` keeps whole, also with its quotes escaped."""
_END_SLICE_S = 0.1
"""How often a thread that waits for the end of ranks looks whether it is still to."""
_FLOOD_PAUSE_S = 0.5
"""A rank that writes more than it may is not read for so long: its pipe drops what does not fit."""


class GroupOutput:
    """The outputs of a group's ranks in one epoch.

    Args:
        epoch: for the lines of the log.
        ranks: whose outputs they are.
        mailbox: counts what the ranks have done.
        has_flight_records: whether they write any.

    Attributes:
        outputs: one for each rank, in order. The list is not changed: other threads read it.
    """

    def __init__(self, epoch: int, ranks: Sequence[RankProcess], mailbox: Mailbox, *, has_flight_records: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoch = epoch
        self._ranks = ranks
        self._mailbox = mailbox
        self._is_open = True
        self.outputs: list[RankOutput] = []
        with contextlib.ExitStack() as on_failure:  # the process may have no more files
            for each in ranks:
                self.outputs.append(RankOutput(each.rank, has_flight_record=has_flight_records))
                on_failure.callback(self.outputs[-1].close)
            on_failure.pop_all()

    def started(self, rank: int, pid: int) -> None:
        """A rank runs, and has its ends: read what it writes from now on."""
        output = self.outputs[rank]
        output.close_theirs()
        output.started(pid)
        self._loop.add_reader(output.read_end, self._pass_on_stderr, output)

    def view(self) -> list[RankView]:
        """The ranks as they are now, each with its stack if it gives one within half a second. Any thread may call.
        A rank that is stopped runs for some 20 ms, in which it writes its stack.
        """
        for output in self.outputs:
            output.ask_stack()
        until = time.monotonic() + VIEW_S
        views = []
        for output, rank in zip(self.outputs, self._ranks, strict=True):
            steps, progress = int(self._mailbox.steps[rank.rank]), self._mailbox.progress(rank.rank)
            process, waits_in, stack = output.place(until)
            views.append(
                RankView(
                    rank=rank.rank,
                    pid=rank.pid,
                    state=rank.state,
                    process_state=process,
                    waits_in=waits_in,
                    steps=steps,
                    collectives=progress.collectives,
                    stack=stack,
                    flight_record=output.flight_record(until),
                    launched=progress.launched,
                    reached=progress.reached,
                )
            )
        return views

    def ask_stacks(self) -> None:
        """Make all ranks write their stacks and flight records, before they are killed."""
        for output in self.outputs:
            output.ask_stack()
            output.ask_flight_record()

    def log_places(self) -> dict[int, str]:
        """Log the state and stack of each rank, which it has written since `ask_stacks`; returns the flight records."""
        records = {}
        for output in self.outputs:
            process, waits_in, stack = output.place(time.monotonic())
            records[output.rank] = output.flight_record(time.monotonic())
            fields: dict[str, str | int] = {"process_state": process, "waits_in": waits_in, "stack": stack}
            if (progress := self._mailbox.progress(output.rank)).launched:
                fields |= {"launched": progress.launched, "reached": progress.reached}
            logger.error("where the rank is", extra=self._named(output.rank) | fields)
        return records

    def log_failure(self, rank: int, reason: str) -> None:
        """Log that a rank has failed, the first one, and what all have written."""
        for output in self.outputs:
            self._pass_on_stderr(output)
        stderr = self.outputs[rank].last_words(_MAX_STDERR_TAIL_CHARS)
        # At this level whatever its stderr had: a log without warnings must have the stack of a crash too.
        logger.error(
            "rank failed", extra=self._named(rank) | {"reason": reason} | ({"stderr": stderr} if stderr else {})
        )

    async def end_ranks(self, timeout_s: float) -> None:
        """Kill all ranks and wait until they have ended, in a thread, so that the loop goes on. A cancel ends the wait.
        The caller does not call `close` meanwhile.
        """
        is_over = threading.Event()
        ending = self._loop.run_in_executor(None, self._end_ranks, time.monotonic() + timeout_s, is_over)
        try:
            await asyncio.shield(ending)
        finally:
            is_over.set()
            await asyncio.wait((ending,))  # it uses what is closed next

    def _end_ranks(self, until: float, is_over: threading.Event) -> None:
        for output in self.outputs:
            output.end(time.monotonic())  # all are killed before one is waited for
        for output in self.outputs:
            while time.monotonic() < until and not is_over.is_set():
                if output.end(min(until, time.monotonic() + _END_SLICE_S)):
                    break

    def close(self) -> None:
        """The ranks have ended: pass on the last lines and close everything."""
        self._is_open = False
        for output in self.outputs:
            self._pass_on_stderr(output)
            self._loop.remove_reader(output.read_end)
            output.close()

    def _named(self, rank: int) -> dict[str, str | int]:
        """Fields of a log line about a rank."""
        return {
            "rank": rank,
            "step": int(self._mailbox.steps[rank]),
            "epoch": self._epoch,
            "pid": self._ranks[rank].pid,
        }

    def _pass_on_stderr(self, output: RankOutput) -> None:
        """Log what a rank has written to its stderr: warnings of libraries, the stack of a crash."""
        lines, has_more = output.read_lines()
        is_flood = output.dropped > 0
        if lines or not has_more:  # the count of dropped lines is logged with the next line that is kept
            dropped = output.take_dropped()
            fields: dict[str, str | int] = {"dropped_lines": dropped} if dropped else {}
            for chunk in joined(lines) or ([""] if dropped else []):
                logger.warning("rank wrote to stderr", extra=self._named(output.rank) | {"stderr": chunk} | fields)
                fields = {}
        if is_flood or not has_more:
            self._loop.remove_reader(output.read_end)
        if is_flood and has_more:
            self._loop.call_later(_FLOOD_PAUSE_S, self._read_again, output)

    def _read_again(self, output: RankOutput) -> None:
        if self._is_open:
            self._loop.add_reader(output.read_end, self._pass_on_stderr, output)


def joined(lines: list[str]) -> list[str]:
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
