"""The store of journals whose streams other routers can continue: in memory, and mirrored in the state server.

This router's own reads never wait for the state server. While that is away its streams are served without a copy.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from lockstep_api.v1 import inference_pb2, state_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.grpc_tls import Dial
from lockstep_common.protocol import NO_TOKENS
from lockstep_common.state_channel import StateAwayError, StateRefusedError

from lockstep_router import metrics
from lockstep_router.journals.memory import MemoryJournalStore
from lockstep_router.journals.mirror import Mirror, trim_request
from lockstep_router.journals.mirror_entry import Entry
from lockstep_router.journals.records import ChoiceLog, Claim, Outcome, Piece, RequestRecord, StoredStream
from lockstep_router.journals.shared_keys import SharedKeys
from lockstep_router.journals.state_client import StateClient
from lockstep_router.journals.store import StoreAwayError
from lockstep_router.journals.stored_form import (
    TAKEN_TO_END,
    Found,
    Key,
    from_response,
    pieces_of,
    tenant_of,
    to_ending,
    was_removed,
)

_MAX_TTL_S = 86_400.0
"""The longest time to live that the state server takes, unless its settings say otherwise."""
OPENING_S = 1.0
"""A stream whose key has just been found may not be in the state server yet: its router mirrors it a little later, or
has died before that, unless it has marked the request as being prepared.
"""
PREPARING_S = 10.0
"""A request that is being prepared elsewhere, or has no room in the state server, is waited for no longer than this."""
_FINISHES = frozenset(inference_pb2.FinishReason.values())
_ASK_AGAIN_S = 0.1
_LOOK_EVERY_S = 0.05
_LOOK_PREPARING_EVERY_S = 0.25


class MirroredJournalStore:
    """A store in memory whose streams are mirrored in the state server.

    Args:
        front: keeps this router's streams.
        target: the state server's address.
        dial: opens a channel to it.
        owner: this router's name.
        window_s: a stream can be continued for so long after its router has died.
        timeout_s: a request waits for the state server no longer than this, unless it resumes a stream.
        max_lag_s: tokens are mirrored within this time.
    """

    def __init__(
        self,
        front: MemoryJournalStore,
        target: str,
        dial: Dial,
        *,
        owner: str,
        window_s: float,
        timeout_s: float,
        max_lag_s: float,
    ) -> None:
        self._front = front
        self._owner = owner
        # Time to live of what runs: it is renewed when a third of it is over, and the window is left then.
        self._ttl_s = min(1.5 * window_s, _MAX_TTL_S)
        self.settle_s = max_lag_s + timeout_s
        self._claiming: dict[str, asyncio.Event] = {}
        """Keys that the state server is being asked for."""
        self._origins: dict[str, tuple[int, Key | None]] = {}
        """The epoch of each stream of this router in the state server, and the key in its record there."""
        self._unanswered: set[str] = set()
        """Streams of this router that it has asked to take back without an answer: they may have a higher epoch."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By the stream, held while it is taken: to go on with it and to end it must not overlap."""
        self._on_taken: Callable[[str, float, bool], None] = lambda *_: None
        self._reporting: set[asyncio.Task[None]] = set()
        """Each finds out why a stream is no longer this router's."""
        self.client = StateClient(target, dial, timeout_s)
        self.mirror = Mirror(self.client, owner, lag_s=max_lag_s, ttl_s=self._ttl_s, on_stale=self._note_stale)
        self.client.on_return = self.mirror.note_return
        self._keys = SharedKeys(self.client, self.mirror, self._ttl_s)
        self.mirror.on_return = self._keys.renew_soon

    def start(self) -> None:
        """Connect, and begin to mirror."""
        self.client.start()
        self.mirror.start()

    async def close(self) -> None:
        """Write what is missing, if that takes no time, and disconnect."""
        await self.mirror.close()
        for task in self._reporting:
            task.cancel()
        await asyncio.gather(*self._reporting, return_exceptions=True)
        await self.client.close()

    @property
    def kept(self) -> int:
        """Streams that have ended and are still kept by this router."""
        return self._front.kept

    @property
    def size_bytes(self) -> int:
        """Approximate memory of this process for all streams."""
        return self._front.size_bytes

    # This router's streams.

    async def open(self, record: RequestRecord) -> None:
        """Begin the journal of a stream.

        Raises:
            LockstepError: OVERLOADED, there is no room for it.
        """
        await self._front.open(record)
        self._keys.note_open(record.request_id)
        epoch, key = self._origins[record.request_id] = 1, self._keys.of(record.request_id)
        self.mirror.add(record.request_id, Entry(self._held(record.request_id), epoch, key))

    def append(self, request_id: str, piece: Piece) -> None:
        """Append tokens.

        Raises:
            ValueError: the piece does not continue its choice.
        """
        self._front.append(request_id, piece)
        self.mirror.note_change(request_id)

    async def seal(self, request_id: str, outcome: Outcome, keep_s: float) -> None:
        """Note how a stream ended."""
        await self._front.seal(request_id, outcome, keep_s)
        self._mirror_end(request_id, outcome, keep_s)
        self._keys.expire_in(request_id, min(keep_s, _MAX_TTL_S))

    def _mirror_end(self, request_id: str, outcome: Outcome, keep_s: float) -> None:
        if outcome.may_go_on:
            self.mirror.leave(request_id, is_kept=True)  # without an end: any router may continue it
        else:
            self.mirror.seal(request_id, to_ending(outcome), min(keep_s, _MAX_TTL_S))

    async def read(self, request_id: str) -> StoredStream | None:
        """A stream of this router; None if there is none."""
        return await self._front.read(request_id)

    async def remove(self, request_id: str) -> None:
        """Forget a stream, and the idempotency key that names it.

        Raises:
            LockstepError: as for `look_up`, of a stream that has failed, which may go on elsewhere, or that was asked
                for without an answer. It is forgotten here.
        """
        await self.release(request_id)
        self._origins.pop(request_id, None)
        stream = self._front.held(request_id)
        is_mirrored = self.mirror.remove(request_id)
        await self._front.remove(request_id)
        if stream is None:
            return
        has_failed = stream.outcome is not None and stream.outcome.may_go_on
        if has_failed or request_id in self._unanswered:
            # It ends where it runs now. Forgetting it in the state server would let that router write it again.
            await self.discard(request_id, stream.record.owner)
        elif not is_mirrored:
            await self._trim(stream.record.owner, request_id)

    async def settle(self, request_id: str) -> None:
        """Wait until the state server knows that a stream was removed here: the next batch says it. One that another
        router had taken before that is ended there.

        Raises:
            LockstepError: as for `look_up`, of a stream that another router has.
        """
        await self.mirror.settle(request_id, self.settle_s)
        owner = self.mirror.pop_lost(request_id)
        if owner is not None and await self.discard(request_id, owner):
            await self.mirror.settle(request_id, self.settle_s)

    async def leave(self, request_id: str) -> None:
        """Forget a running stream here, so that another router may continue it; it keeps its idempotency key."""
        self._forget_key(request_id)
        self.mirror.leave(request_id)
        await self._front.remove(request_id)

    def shrink(self, wanted_bytes: int) -> None:
        """Forget streams that have ended, until so many bytes are free in this process."""
        self._front.shrink(wanted_bytes)

    def expire(self) -> None:
        """Forget the streams whose time is over, and renew the times of the others in the state server."""
        self._front.expire()
        self.mirror.tend(lambda request_id: self._front.held(request_id) is not None)
        self._keys.tend(lambda request_id: self._front.held(request_id) is not None)
        for request_id in [each for each in self._origins if self._front.held(each) is None]:
            del self._origins[request_id]
        self._unanswered.intersection_update(self._origins)

    # Streams of other routers.

    def on_taken(self, callback: Callable[[str, float, bool], None]) -> None:
        """Have this called with each stream that another router has taken over. It is not kept here then."""
        self._on_taken = callback

    @property
    def is_away(self) -> bool:
        """Whether the state server is not asked, because it does not answer."""
        return self.client.mirror.is_open

    async def look_up(self, request_id: str, owner: str) -> StoredStream | None:
        """A stream of an owner that this router does not have; None: there is none, or the state server is away.

        Raises:
            StoreAwayError: UNAVAILABLE, the state server has just failed to answer.
            LockstepError: UNAVAILABLE, the stream was found by its key and is still being prepared, or has no room in
                the state server, or this router does not know how its text is to be read, or how it ended; OVERLOADED,
                too many ask at a time.
        """
        if self.mirror.is_removed(request_id):
            return None
        found = await self._read_there(request_id, owner)
        found_at = self._keys.found_at(request_id)
        if found_at is not None:
            loop = asyncio.get_running_loop()
            while found is None and not self.is_away:
                age_s = loop.time() - found_at
                if age_s >= OPENING_S and not await self._keys.is_preparing(request_id):
                    break
                if age_s >= PREPARING_S:
                    sentence = (
                        "the request with this key is being prepared, or runs where only its own router can give it"
                    )
                    raise LockstepError(ErrorCode.UNAVAILABLE, sentence, retry_after_s=1)
                await asyncio.sleep(_LOOK_EVERY_S if age_s < OPENING_S else _LOOK_PREPARING_EVERY_S)
                found = await self._read_there(request_id, owner)
        if found is None:
            return None
        parsing = found.stream.record.parsing
        is_known = all(log.finish in _FINISHES for log in found.stream.logs)
        if not is_known or (parsing is not None and not parsing.is_known):
            sentence = "the stream was begun by a router of another version; such a router can go on with it"
            raise LockstepError(ErrorCode.UNAVAILABLE, sentence, retry_after_s=1)
        return found.stream

    async def take(self, known: StoredStream) -> StoredStream | None:
        """Take over a stream that was looked up, or that has failed here, so that only this router writes to it from
        now on, and keep it here.

        Raises:
            LockstepError: as for `look_up`; OVERLOADED, there is no room for it, and it was not taken.
        """
        async with self._turn(known.record.request_id):
            return await self._take_in_turn(known)

    def _turn(self, request_id: str) -> asyncio.Lock:
        return self._turns.setdefault(request_id, asyncio.Lock())

    async def _take_in_turn(self, known: StoredStream) -> StoredStream | None:
        request_id = known.record.request_id
        if self.mirror.is_removed(request_id):  # since it was looked up
            return None
        if self._front.held(request_id) is not None:
            return await self._take_back(request_id, known.record.owner)
        await self._front.open(known.record)
        found: Found | None = None
        try:
            found = await self._take(request_id, known.record.owner)
        finally:
            if found is None:
                self._front.forget(request_id)
        if found is None:
            return None
        return await self._adopt(request_id, found)

    async def _take_back(self, request_id: str, owner: str) -> StoredStream | None:
        """Take a stream that has failed here. What is here may be more than what was mirrored; or less, if another
        router has continued it.
        """
        entry = self.mirror.entries.get(request_id)
        self.mirror.drop(request_id)
        response: state_pb2.ReadResponse | None = None
        try:
            response = await self._ask_to_take(request_id, owner)
        except BaseException as error:
            self._unanswered.add(request_id)
            # This router's streams are served without the state server, too; but not while it may have a newer copy.
            if not isinstance(error, LockstepError) or not self.is_away:
                if entry is not None:
                    entry.changed_at = None
                    self.mirror.add(request_id, entry)
                raise
        if response is not None and was_removed(response):
            self._front.forget(request_id)
            return None
        found = _found(request_id, owner, response)
        if found is None:
            stream = self._front.reopen(request_id)
            if stream is not None:
                epoch, key = self._origins[request_id]
                self.mirror.add(request_id, Entry(self._held(request_id), epoch, key))
            return stream
        if self._has_all(found):
            stream = self._front.reopen(request_id)
            self._adopt_key(request_id, found)
            self._mirror_on(request_id, found)
            return stream
        self._front.forget(request_id)
        await self._front.open(found.stream.record)
        return await self._adopt(request_id, found)

    def _has_all(self, found: Found) -> bool:
        """Whether a stream has not ended there, and what is here is all of it or more."""
        own = self._front.held(found.stream.record.request_id)
        if own is None or found.stream.outcome is not None:
            return False
        return all(map(ChoiceLog.begins, found.stream.logs, own.logs))

    async def _adopt(self, request_id: str, found: Found) -> StoredStream:
        """Keep a stream that was taken, and has been opened here."""
        stream = found.stream
        for piece in pieces_of(stream.logs):
            self._front.append(request_id, piece)
        if stream.outcome is not None:
            self._note_epoch(request_id, found)
            await self._front.seal(request_id, stream.outcome, self._ttl_s)
        else:
            self._adopt_key(request_id, found)
            self._mirror_on(request_id, found)
        if found.key is not None:  # repeats join it here while the state server is away, too
            await self._front.claim(found.key.scope, Claim(request_id, bytes.fromhex(found.key.fingerprint)))
        return stream

    def _adopt_key(self, request_id: str, found: Found) -> None:
        if found.key is not None:
            self._keys.adopt(request_id, found.key)

    def _note_epoch(self, request_id: str, found: Found) -> None:
        self._origins[request_id] = found.epoch, found.key
        self._unanswered.discard(request_id)

    def _mirror_on(self, request_id: str, found: Found) -> None:
        """Write on after what was found."""
        self._note_epoch(request_id, found)
        self.mirror.add(request_id, _entry_of(self._held(request_id), found))

    async def discard(self, request_id: str, owner: str) -> bool:
        """Forget a stream of an owner that this router does not have, and end it where it runs; whether there was one.

        Raises:
            LockstepError: as for `look_up`.
        """
        async with self._turn(request_id):
            return await self._discard_in_turn(request_id, owner)

    async def _discard_in_turn(self, request_id: str, owner: str) -> bool:
        found = await self._take(request_id, owner, taker=TAKEN_TO_END)
        if found is None:
            return False
        if found.key is not None:
            self._keys.adopt(request_id, found.key)
            await self._keys.release(request_id)
        if found.stream.outcome is None:
            self.mirror.add(request_id, Entry(found.stream, found.epoch, None, True))
            self.mirror.remove(request_id)
        else:
            await self._trim(owner, request_id)
        return True

    async def _trim(self, owner: str, request_id: str) -> None:
        """Have the state server forget a stream that has ended."""
        with suppress(StateAwayError, StateRefusedError):  # its time to live ends it
            await self.client.trim(trim_request(owner, request_id, self._ttl_s))

    async def _take(self, request_id: str, owner: str, taker: str = "") -> Found | None:
        return _found(request_id, owner, await self._ask_to_take(request_id, owner, taker))

    async def _ask_to_take(self, request_id: str, owner: str, taker: str = "") -> state_pb2.ReadResponse | None:
        request = state_pb2.TakeRequest(
            tenant=tenant_of(owner), stream_id=request_id, owner=taker or self._owner, ttl_s=self._ttl_s
        )
        return await self._ask(self.client.take, request)

    async def _read_there(self, request_id: str, owner: str) -> Found | None:
        request = state_pb2.ReadRequest(tenant=tenant_of(owner), stream_id=request_id)
        return _found(request_id, owner, await self._ask(self.client.read, request))

    async def _ask(
        self, ask: Callable[[Any], Awaitable[state_pb2.ReadResponse | None]], request: object
    ) -> state_pb2.ReadResponse | None:
        if self.is_away:
            return None
        try:
            return await ask(request)
        except StateRefusedError:
            return None  # an id that no router has made up
        except StateAwayError:
            sentence = "this router does not have the stream, and cannot ask for it now"
            raise StoreAwayError(ErrorCode.UNAVAILABLE, sentence, retry_after_s=1) from None

    # Idempotency keys.

    async def claim(self, scope: str, claim: Claim) -> Claim | None:
        """Give an idempotency key to a stream, unless another one has it, on this router or on another one."""
        while (asked := self._claiming.get(scope)) is not None:
            await asked.wait()
        known = await self._front.claim(scope, claim)
        if known is not None:
            return known
        asked = self._claiming[scope] = asyncio.Event()
        first: Claim | None = claim
        try:
            first = await self._keys.claim(scope, claim)
        finally:
            del self._claiming[scope]
            asked.set()
            if first is not None:
                await self._front.release(claim.request_id)
        return first

    async def find(self, scope: str) -> Claim | None:
        """The claim of the stream that has an idempotency key; None if none has it."""
        return await self._front.find(scope) or await self._keys.find(scope)

    async def release(self, request_id: str) -> None:
        """Make the idempotency key of a stream free for another one, unless another router has the stream, or may have
        it: then the key is that one's.
        """
        await self._front.release(request_id)
        has_key = self._keys.of(request_id) or self._origins.get(request_id, (0, None))[1]
        if has_key and not await self._is_own(request_id):
            self._keys.forget(request_id)
            return
        _, key = self._origins.get(request_id, (0, None))
        await self._keys.release(request_id, key)

    async def _is_own(self, request_id: str) -> bool:
        """Whether no other router has taken a stream that is mirrored. One that has gained nothing since then has not
        told this router: a write of nothing does. False also if the answer is late. While the state server is away it
        does not matter: no key is freed there.
        """
        entry = self.mirror.entries.get(request_id)
        if entry is None or not entry.is_open:
            return True
        owner = tenant_of(entry.stream.record.owner)
        write = state_pb2.StreamWrite(tenant=owner, stream_id=request_id, epoch=entry.epoch, ttl_s=self._ttl_s)
        try:
            async with asyncio.timeout(self.client.timeout_s):
                response = await self.client.append(state_pb2.AppendRequest(writes=[write]))
        except TimeoutError:
            return False
        except (StateAwayError, StateRefusedError):
            return True
        return response.results[0].outcome != state_pb2.WRITE_OUTCOME_STALE

    def _forget_key(self, request_id: str) -> None:
        """The stream is another router's, with its key: what ends here does not free it."""
        self._keys.forget(request_id)
        self._origins.pop(request_id, None)

    # What the state server reports.

    def _note_stale(self, request_id: str, owned_at: float) -> None:
        """Another router has taken the stream over: what is here is not what clients are given there."""
        stream = self._front.held(request_id)
        if stream is not None and request_id in self._unanswered:
            reporting = self._find_taker(request_id, owned_at, stream.record.owner)
        else:
            reporting = self._lose(request_id, owned_at, stream)
        task = asyncio.create_task(reporting)
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _find_taker(self, request_id: str, owned_at: float, owner: str) -> None:
        """Go on with a stream if it was this router itself that took it, and only the answer was lost."""
        found, is_own = None, False
        with suppress(StateAwayError, StateRefusedError, LockstepError):
            response = await self._read_in_time(request_id, owner)
            found = _found(request_id, owner, response)
            is_own = response is not None and response.owner == self._owner
        stream = self._front.held(request_id)
        if stream is None or request_id in self.mirror.entries:
            return  # it was forgotten, or taken back once more
        if found is None or not is_own or not self._has_all(found):
            await self._lose(request_id, owned_at, stream)
            return
        self._mirror_on(request_id, found)
        if stream.outcome is not None:
            self._mirror_end(request_id, stream.outcome, self._ttl_s)

    async def _read_in_time(self, request_id: str, owner: str) -> state_pb2.ReadResponse | None:
        """A stream there. It is asked for more than once: that an answer was lost says that the server is slow."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.settle_s
        while True:
            try:
                return await self.client.read(state_pb2.ReadRequest(tenant=tenant_of(owner), stream_id=request_id))
            except StateAwayError:
                if loop.time() >= until:
                    raise
            await asyncio.sleep(_ASK_AGAIN_S)

    def _lose(self, request_id: str, owned_at: float, stream: StoredStream | None) -> Coroutine[Any, Any, None]:
        metrics.STREAMS_TAKEN.inc()
        self._forget_key(request_id)
        self._front.forget(request_id)
        return self._report_taken(request_id, owned_at, stream)

    async def _report_taken(self, request_id: str, owned_at: float, stream: StoredStream | None) -> None:
        """Report that a stream was taken, or, if its client has deleted it there, that it was removed."""
        is_removed = False
        if stream is not None:
            end = [NO_TOKENS] * len(stream.logs)
            owner = tenant_of(stream.record.owner)
            request = state_pb2.ReadRequest(tenant=owner, stream_id=request_id, positions=end)
            with suppress(StateAwayError, StateRefusedError, LockstepError):  # its readers get `moved`
                response = await self.client.read(request)
                is_removed = response is None or response.owner == TAKEN_TO_END or was_removed(response)
        if self._front.held(request_id) is None:  # it may have come back meanwhile: then its run is another one
            self._on_taken(request_id, owned_at, is_removed)

    def _held(self, request_id: str) -> StoredStream:
        stream = self._front.held(request_id)
        assert stream is not None
        return stream


def _found(request_id: str, owner: str, response: state_pb2.ReadResponse | None) -> Found | None:
    """An owner's stream as the state server has given it."""
    found = None if response is None else from_response(request_id, response)
    return found if found is not None and found.stream.record.owner == owner else None


def _entry_of(stream: StoredStream, found: Found) -> Entry:
    """A stream of which so much is acknowledged as was read just now."""
    logs = found.stream.logs
    return Entry(
        stream,
        found.epoch,
        found.key,
        is_open=True,
        written=[len(log.ids) for log in logs],
        has_finish=[bool(log.finish) for log in logs],
        is_marked=[log.is_inexact for log in logs],
    )
