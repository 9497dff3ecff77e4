"""Writes the journals of running streams to the state server, so that another router can continue them.

One batch is written at a time: whatever all streams have gained since the last one. While batches are full, and are
answered, others are on their way beside it, with other streams, so that this process, the state server and Redis work
at the same time. Nothing is queued but the names of streams: the tokens are taken from the journals in memory when the
batch is made. Token by token it costs one look-up.
"""

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from lockstep_api.v1 import state_pb2
from lockstep_api.v1.state_pb2 import WriteOutcome
from lockstep_common.state_channel import StateAwayError, StateRefusedError

from lockstep_router import metrics
from lockstep_router.journals.mirror_entry import Entry
from lockstep_router.journals.mirror_write import Sent, write_of
from lockstep_router.journals.state_client import StateClient
from lockstep_router.journals.stored_form import REMOVED, tenant_of

logger = logging.getLogger("lockstep.router")

MIRROR_CALLS = 3
"""Batches that are on their way at a time, at most: one is made here, the state server has one, and Redis another."""
_BATCH_WRITES = 128
_MORE_WRITES = 4
"""A full batch that is answered lets the next one have so many writes more. After one that is not they are halved: it
may have been too much for the time, as when a slow server returns to which everything is written again.
"""
_BATCH_BYTES = 256 << 10
"""A larger batch would keep the event loop from the streams for too long. A single write may be larger."""
_WRITE_BYTES = 8 << 20
"""Of one write: the state server takes messages of twice as much."""
_FULL_PAUSE_S = 1.0
"""A stream for which there was no room, or whose outcome is not known, is tried again after this time."""
_MAX_CHORES = 4096
_CHORES_AT_ONCE = 16
_REMOVED_TTL_S = 1.0
_MAX_LOST = 1024
_FINAL_FLUSH_S = 0.5

_NAMES = {number: name.removeprefix("WRITE_OUTCOME_").lower() for name, number in WriteOutcome.items()}
"""Outcomes as metrics name them."""
_OTHER = "other"
"""Outcomes that a state server of another version has."""
for _outcome in (*_NAMES.values(), _OTHER, "dropped", "unavailable", "refused", "too_large"):
    metrics.JOURNAL_WRITES.labels(_outcome)  # from 0
_ENDINGS = frozenset({state_pb2.WRITE_OUTCOME_CONFLICT, state_pb2.WRITE_OUTCOME_INVALID})
"""Outcomes after which more writes to the stream are useless."""


class Mirror:
    """The streams of this router in the state server.

    Args:
        client: the state server.
        owner: this router's name.
        lag_s: the time for which tokens may be missing there.
        ttl_s: for how long a running stream is kept there without a write.
        on_stale: called with the id of a stream that has a higher epoch, and so is no longer this router's, and with
            the time of the event loop at which the state server last acknowledged that it was.
    """

    def __init__(
        self, client: StateClient, owner: str, *, lag_s: float, ttl_s: float, on_stale: Callable[[str, float], None]
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self._client = client
        self._owner = owner
        self._gather_s = lag_s / 2
        self.ttl_s = ttl_s
        self._on_stale = on_stale
        self._changed: dict[str, None] = {}
        """Streams with something to write, those that have waited longest first."""
        self._put_off: dict[str, None] = {}
        """Streams with something to write, but not yet: in the order of their times, as all wait equally long."""
        self._putting_off: asyncio.TimerHandle | None = None
        """Ends with the first one's time."""
        self._wake = asyncio.Event()
        self._chores: deque[Callable[[], Awaitable[None]]] = deque(maxlen=_MAX_CHORES)
        """Other calls for the state server. Beyond the bound the oldest are dropped: it has times to live."""
        self._chores_in_flight = 0
        self._batch_writes = _BATCH_WRITES
        self._is_full = False
        """Whether the last batch had no room for all. What did not fit has waited already."""
        self._is_sound = True
        """Whether the batch that was answered last was written completely."""
        self._unsound_at = 0.0
        """When one was not, in the event loop's time."""
        self.on_return: Callable[[], None] = lambda: None
        """Called when the state server may have forgotten everything; streams are written again then."""
        self._lost: OrderedDict[str, str] = OrderedDict()
        """The newest streams that were removed here when another router had them already, and their owners."""
        self._writing: list[asyncio.Task[None]] = []
        self._more = asyncio.Event()
        """There may be enough for another batch beside those that are on their way."""
        self._flight: dict[str, Sent] = {}
        """Writes on their way: no more than one of a stream, since the next one begins where that ends."""

    def start(self) -> None:
        """Begin to write."""
        beside = [self._write_beside() for _ in range(MIRROR_CALLS - 1)]
        self._writing = [asyncio.create_task(each) for each in (self._write_forever(), *beside)]

    async def close(self) -> None:
        """Write what is missing, if that takes no time, and stop."""
        if not self._writing:
            return
        for task in self._writing:
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)
        self._give_back(list(self._flight.values()))
        try:
            async with asyncio.timeout(_FINAL_FLUSH_S):
                while not self._client.mirror.is_open and (await self._write_batch() or self._chores):
                    await self._do_chores()
        except TimeoutError:
            pass
        if self._putting_off is not None:
            self._putting_off.cancel()

    # What happens to streams.

    def add(self, request_id: str, entry: Entry) -> None:
        """Mirror a stream."""
        entry.written_at = asyncio.get_running_loop().time()
        self.entries[request_id] = entry
        self.note_change(request_id)

    def note_change(self, request_id: str) -> None:
        """A stream has gained something."""
        entry = self.entries.get(request_id)
        if entry is not None and entry.changed_at is None:
            entry.changed_at = asyncio.get_running_loop().time()
            self._changed[request_id] = None
            self._wake.set()

    def seal(self, request_id: str, outcome: bytes, ttl_s: float) -> None:
        """A stream has ended."""
        entry = self.entries.get(request_id)
        if entry is not None:
            entry.seal, entry.seal_ttl_s = outcome, ttl_s
            self.note_change(request_id)

    def remove(self, request_id: str) -> bool:
        """Forget a stream, here and there; False if it is not mirrored (any more)."""
        entry = self.entries.get(request_id)
        if entry is None:
            return False
        # While the state server is away nothing more is kept for it: the stream's time to live ends it there.
        if (entry.is_open or entry.was_sent) and not self._client.mirror.is_open:
            # A router that had the stream before this one has to find that it has ended.
            self.seal(request_id, REMOVED, self.ttl_s if entry.epoch > 1 else _REMOVED_TTL_S)
        else:
            self.drop(request_id)
        return True

    def is_removed(self, request_id: str) -> bool:
        """Whether a stream was removed here, and the state server may not know it yet."""
        entry = self.entries.get(request_id)
        return entry is not None and entry.seal == REMOVED

    async def settle(self, request_id: str, timeout_s: float) -> None:
        """Wait until the state server knows that a stream was removed, no longer than this."""
        if self.is_removed(request_id):
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.entries[request_id].is_dropped.wait()

    def pop_lost(self, request_id: str) -> str | None:
        """The owner of a stream, once, if another router had it already when it was removed here: it goes on there."""
        return self._lost.pop(request_id, None)

    def leave(self, request_id: str, *, is_kept: bool = False) -> None:
        """Write what is missing of a stream, and then mirror it no longer: others may have it.

        Args:
            request_id: the stream.
            is_kept: it has failed, and the memory keeps it for as long as it may go on.
        """
        entry = self.entries.get(request_id)
        if entry is not None:
            entry.is_left, entry.was_kept = True, is_kept
            self.note_change(request_id)

    def drop(self, request_id: str) -> None:
        """Write no more to a stream."""
        entry = self.entries.pop(request_id, None)
        self._changed.pop(request_id, None)
        self._put_off.pop(request_id, None)
        if entry is not None:
            entry.is_dropped.set()

    def add_chore(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have something done without waiting for it."""
        self._chores.append(work)
        self._wake.set()

    def note_return(self) -> None:
        """The state server was away, and may have forgotten everything: every stream is written again."""
        for request_id in self.entries:
            self.note_change(request_id)
        self.on_return()

    def tend(self, is_kept: Callable[[str], bool]) -> None:
        """Renew times to live, and drop streams that have ended and left the memory. Called about every second."""
        now = asyncio.get_running_loop().time()
        for request_id, entry in list(self.entries.items()):
            is_gone = not is_kept(request_id) and (
                entry.seal not in (None, REMOVED) or self._client.mirror.is_open or self._is_given_up(entry, now)
            )
            if is_gone or (entry.seal == REMOVED and now - entry.written_at > self.ttl_s):
                self.drop(request_id)
                metrics.JOURNAL_WRITES.labels("dropped").inc()
            elif now - entry.written_at > self.ttl_s / 3 and entry.not_before <= now:
                self.note_change(request_id)
        metrics.JOURNAL_LAG_SECONDS.set(self.lag_s)

    def _is_given_up(self, entry: Entry, now: float) -> bool:
        """Whether to stop writing a stream that was left and is not in the memory any more. If the state server never
        has room for it, the tries would not end. One that has failed, and was refused there, gets no more time: no
        router could continue it in the meantime.
        """
        is_late = now - entry.written_at > self.ttl_s or (entry.was_kept and entry.not_before > 0)
        return entry.is_left and entry.seal is None and is_late

    @property
    def lag_s(self) -> float:
        """Age of the oldest change that the state server does not have."""
        since = [entry.changed_at for entry in self.entries.values() if entry.changed_at is not None]
        since += [sent.since for sent in self._flight.values() if sent.since is not None]
        return max(0.0, asyncio.get_running_loop().time() - min(since)) if since else 0.0

    # Writing.

    async def _write_forever(self) -> None:
        began_at = -self._gather_s
        while True:
            await self._wake.wait()
            await self._client.is_reachable.wait()
            await asyncio.sleep(self._wait_s(began_at))
            self._wake.clear()
            began_at = asyncio.get_running_loop().time()
            try:
                await self._write_batch()
                await self._do_chores()
            except Exception:
                logger.exception("the mirror of the journals has a defect")
            if self._changed or self._chores:
                self._wake.set()

    async def _write_beside(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            try:
                if self._has_more:  # still
                    await self._write_batch()
            except Exception:
                logger.exception("the mirror of the journals has a defect")
            if self._changed:  # what has to be written again, which the other task does not know
                self._wake.set()

    def _wait_s(self, began_at: float) -> float:
        """Time until the next batch. Changes are gathered for a while, unless they have waited already because the last
        one took long. Batches begin no sooner one after the other than that, so that repeats are not too many; a batch
        that was full, and is not to be repeated, has the next one at once.
        """
        if self._is_full and self._is_sound:
            return 0.0
        now = asyncio.get_running_loop().time()
        oldest = next((self.entries[each].changed_at for each in self._changed), None)
        return max(began_at, now if oldest is None else oldest) + self._gather_s - now

    async def _write_batch(self) -> bool:
        """Write what is missing, as much as fits in one batch; False if there was nothing to write."""
        made_at = asyncio.get_running_loop().time()
        batch, is_full = self._batch()
        self._is_full = is_full
        if not batch:
            return False
        writes, sent = [write for write, _ in batch], [each for _, each in batch]
        self._flight |= {each.request_id: each for each in sent}
        if self._has_more:
            self._more.set()
        try:
            response = await self._client.append(state_pb2.AppendRequest(writes=writes))
        except StateAwayError as away:
            metrics.JOURNAL_WRITES.labels("unavailable").inc(len(batch))
            self._note_unsound()
            self._halve(len(sent))
            self._give_back(sent)
            if not away.is_late:
                # It may have restarted, and forgotten streams that have nothing new.
                self.note_return()
            return True
        except StateRefusedError as refused:
            self._note_refusal(sent, str(refused))
            return True
        except Exception:
            self._note_unsound()
            self._give_back(sent)
            raise
        self._land(sent)
        self._note_answer(sent, response, made_at, is_full=is_full)
        return True

    def _note_answer(
        self, sent: Sequence[Sent], response: state_pb2.AppendResponse, made_at: float, *, is_full: bool
    ) -> None:
        is_sound = all(each.outcome == state_pb2.WRITE_OUTCOME_OK for each in response.results)
        if made_at >= self._unsound_at:  # else it says nothing of the time since then
            self._is_sound = is_sound
            if is_full:
                self._batch_writes = min(_BATCH_WRITES, self._batch_writes + _MORE_WRITES)
        if not is_sound:
            self._note_unsound()
        for outcome, count in Counter(each.outcome for each in response.results).items():
            metrics.JOURNAL_WRITES.labels(_NAMES.get(outcome, _OTHER)).inc(count)
        for each, result in zip(sent, response.results, strict=True):
            self._note_result(each, result)

    @property
    def _has_more(self) -> bool:
        """Whether there is enough for another batch beside those on their way, and the state server takes them all."""
        return self._is_full and self._is_sound and self._batch_writes == _BATCH_WRITES

    def _note_unsound(self) -> None:
        self._is_sound, self._unsound_at = False, asyncio.get_running_loop().time()

    def _halve(self, writes: int) -> None:
        self._batch_writes = max(1, min(self._batch_writes, writes) // 2)

    def _land(self, sent: Sequence[Sent]) -> None:
        for each in sent:
            del self._flight[each.request_id]

    def _give_back(self, sent: Sequence[Sent]) -> None:
        self._land(sent)
        for each in sent:
            self._restore(each)

    def _note_refusal(self, sent: Sequence[Sent], reason: str) -> None:
        """The whole call was refused: a smaller batch may be taken, a single write is given up."""
        metrics.JOURNAL_WRITES.labels("refused").inc(len(sent))
        self._note_unsound()
        if len(sent) > 1:
            self._halve(len(sent))
            self._give_back(sent)
            return
        self._land(sent)
        for each in sent:  # one
            logger.error("the state server refuses a stream", extra={"request_id": each.request_id, "reason": reason})
            self.drop(each.request_id)

    def _batch(self) -> tuple[list[tuple[state_pb2.StreamWrite, Sent]], bool]:
        """The next batch, and whether it has all that may be in one."""
        made, size = [], 0
        for request_id in [each for each in self._changed if each not in self._flight]:
            entry = self.entries[request_id]
            try:
                write, sent = write_of(request_id, entry, self._owner, self.ttl_s)
            except Exception:
                # A defect in one stream must not stop the others.
                logger.exception("a stream cannot be mirrored", extra={"request_id": request_id})
                self.drop(request_id)
                continue
            del self._changed[request_id]
            entry.changed_at = None
            write_bytes = write.ByteSize()
            if write_bytes > _WRITE_BYTES:
                metrics.JOURNAL_WRITES.labels("too_large").inc()
                self.drop(request_id)
                continue
            entry.was_sent = True
            made.append((write, sent))
            size += write_bytes
            if len(made) >= self._batch_writes or size >= _BATCH_BYTES:
                return made, True
        return made, False

    # Outcomes.

    def _restore(self, sent: Sent) -> None:
        """A write was not done, as far as is known: it is made again."""
        if self.entries.get(sent.request_id) is sent.entry:
            entry = sent.entry
            entry.changed_at = entry.changed_at if sent.since is None else sent.since
            if entry.changed_at is None:
                entry.changed_at = asyncio.get_running_loop().time()
            if entry.not_before > asyncio.get_running_loop().time():
                self._changed.pop(sent.request_id, None)  # it has gained something meanwhile
                self._put_off.pop(sent.request_id, None)
                self._put_off[sent.request_id] = None
                self._time_put_off()
            else:
                self._changed[sent.request_id] = None

    def _time_put_off(self) -> None:
        """See to it that streams that were put off are written when their times have come."""
        first = next(iter(self._put_off), None)
        if self._putting_off is None and first is not None:
            loop = asyncio.get_running_loop()
            self._putting_off = loop.call_at(self.entries[first].not_before, self._end_put_off)

    def _end_put_off(self) -> None:
        self._putting_off = None
        now = asyncio.get_running_loop().time()
        for request_id in list(self._put_off):
            if self.entries[request_id].not_before > now:
                break
            del self._put_off[request_id]
            self._changed[request_id] = None
            self._wake.set()
        self._time_put_off()

    def _note_result(self, sent: Sent, result: state_pb2.WriteResult) -> None:
        entry, outcome = sent.entry, result.outcome
        if self.entries.get(sent.request_id) is not entry:
            return
        now = asyncio.get_running_loop().time()
        match outcome:
            case state_pb2.WRITE_OUTCOME_OK:
                self._note_written(sent, now)
            case state_pb2.WRITE_OUTCOME_STALE:
                if entry.seal == REMOVED:
                    self._note_lost(sent)
                self.drop(sent.request_id)
                self._on_stale(sent.request_id, entry.written_at)
            case state_pb2.WRITE_OUTCOME_TOO_LARGE:
                self._freeze(sent)
            case state_pb2.WRITE_OUTCOME_SEALED:
                self._note_sealed(sent)
            case state_pb2.WRITE_OUTCOME_UNKNOWN if entry.seal == REMOVED:
                self.drop(sent.request_id)
            case state_pb2.WRITE_OUTCOME_FULL if entry.seal == REMOVED:
                self._note_sealed(sent)  # to forget the stream takes no room
            case _ if outcome in _ENDINGS:
                self.drop(sent.request_id)
                logger.error(
                    "a stream is not mirrored any more",
                    extra={"request_id": sent.request_id, "outcome": WriteOutcome.Name(outcome), "field": result.field},
                )
            case _:
                self._prepare_repeat(entry, result, now)
                self._restore(sent)

    def _prepare_repeat(self, entry: Entry, result: state_pb2.WriteResult, now: float) -> None:
        match result.outcome:
            case state_pb2.WRITE_OUTCOME_UNKNOWN:
                entry.forget_acknowledged()
                self.on_return()
            case state_pb2.WRITE_OUTCOME_GAP if result.choice < len(entry.written):
                entry.is_open = True
                entry.written[result.choice] = result.length
                entry.has_finish[result.choice] = entry.is_marked[result.choice] = False
            case state_pb2.WRITE_OUTCOME_FULL:
                entry.not_before = now + _FULL_PAUSE_S
            case outcome if outcome not in _NAMES:
                entry.not_before = now + _FULL_PAUSE_S

    def _note_written(self, sent: Sent, now: float) -> None:
        entry = sent.entry
        entry.is_open, entry.written_at, entry.not_before = True, now, 0.0
        for choice, end, has_finish, is_marked in sent.ends:
            entry.written[choice] = end
            entry.has_finish[choice] = has_finish
            entry.is_marked[choice] = is_marked
        if sent.since is not None:
            metrics.JOURNAL_WRITE_SECONDS.observe(now - sent.since)
        if sent.seal is not None and sent.seal == entry.seal:
            self.drop(sent.request_id)
        elif entry.is_behind:
            self.note_change(sent.request_id)
        elif entry.is_left:
            self.drop(sent.request_id)

    def _note_lost(self, sent: Sent) -> None:
        self._lost[sent.request_id] = sent.entry.stream.record.owner
        if len(self._lost) > _MAX_LOST:
            self._lost.popitem(last=False)

    def _freeze(self, sent: Sent) -> None:
        """The stream is too large. What is there can still be continued, so its time to live is renewed."""
        entry = sent.entry
        if entry.is_open and entry.seal is None and not entry.is_left:
            entry.is_frozen = True
            entry.written_at = asyncio.get_running_loop().time()
        else:
            self._note_sealed(sent)

    def _note_sealed(self, sent: Sent) -> None:
        """Nothing can be added to the stream; one that had to be removed is removed now."""
        if sent.entry.seal == REMOVED:
            self.add_chore(lambda: self._trim(sent))
        else:
            self.drop(sent.request_id)

    async def _trim(self, sent: Sent) -> None:
        """Have the state server forget a stream whose end cannot be written. Until then it is not settled."""
        try:
            await self._client.trim(trim_request(sent.entry.stream.record.owner, sent.request_id, self.ttl_s))
        finally:
            sent.entry.is_dropped.set()
            if self.entries.get(sent.request_id) is sent.entry:
                self.drop(sent.request_id)

    async def _do_chores(self) -> None:
        works = [self._chores.popleft() for _ in range(min(len(self._chores), _CHORES_AT_ONCE))]
        self._chores_in_flight = len(works)
        try:
            await asyncio.gather(*(_done(work) for work in works))
        finally:
            self._chores_in_flight = 0

    @property
    def is_idle(self) -> bool:
        """Whether the state server has got everything that happened until now."""
        return not (self._changed or self._put_off or self._flight or self._chores or self._chores_in_flight)


async def _done(work: Callable[[], Awaitable[None]]) -> None:
    with suppress(StateAwayError, StateRefusedError):  # the state server forgets by its times to live
        await work()


def trim_request(owner: str, request_id: str, ttl_s: float) -> state_pb2.TrimRequest:
    """What has the state server forget a stream. Routers that had it before are fenced for as long as they would be if
    it were there.
    """
    return state_pb2.TrimRequest(tenant=tenant_of(owner), stream_ids=[request_id], ttl_s=ttl_s)
