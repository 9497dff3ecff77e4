"""Idempotency keys that hold on all routers. While the state server is away, a key holds on this router alone."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from weakref import WeakValueDictionary

from lockstep_api.v1 import state_pb2
from lockstep_common.state_channel import StateAwayError, StateRefusedError

from lockstep_router import metrics
from lockstep_router.journals.mirror import Mirror
from lockstep_router.journals.records import Claim
from lockstep_router.journals.state_client import StateClient
from lockstep_router.journals.stored_form import PREPARING, Key, tenant_of_scope

for _outcome in ("granted", "known", "away"):
    metrics.STATE_CLAIMS.labels(_outcome)  # from 0
_MAX_FOREIGN = 1024
_RENEWALS_AT_ONCE = 1024
"""Fewer than the chores that the mirror has room for. The next ones follow a second later."""
_REPEATS_AT_ONCE = 64
"""Of claims and renewals that have failed: a state server that is full has to do for the streams that it has."""
MARK_AFTER_S = 0.15
"""A request whose stream comes to the state server later than this is marked: those that find it by its key have to
wait for its stream.
"""
_MARK_EVERY_S = 1.0
_MARK_TTL_S = 3.0


@dataclass(eq=False)
class _Marking:
    """The marks of one request, until its stream is in the state server."""

    mark: state_pb2.ClaimRequest
    timer: asyncio.TimerHandle | None = None
    """Ends when it is time for the next mark."""
    is_prepared: bool = False
    """Its stream is mirrored, as far as there is room for it."""


@dataclass(eq=False)
class _Renewing:
    """The renewals of one stream's key that wait or are on their way."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one is on its way."""
    is_released: bool = False
    """The key is free now: to renew it would give it to the stream again."""


class SharedKeys:
    """The idempotency keys of this router's streams in the state server.

    Args:
        client: the state server.
        mirror: makes the calls that no request waits for.
        ttl_s: for how long a key is kept there without being renewed.
    """

    def __init__(self, client: StateClient, mirror: Mirror, ttl_s: float) -> None:
        self._client = client
        self._mirror = mirror
        self.ttl_s = ttl_s
        self._keys: dict[str, Key] = {}
        """By the stream, those of this router."""
        self._renewed_at: dict[str, float] = {}
        self._renewing: WeakValueDictionary[str, _Renewing] = WeakValueDictionary()
        """By the stream; each ends with its last chore."""
        self._due: set[str] = set()
        """Streams whose keys must be renewed before their time."""
        self._failed: dict[str, None] = {}
        """Streams whose keys the state server may not have, as it had no room for them or did not answer; those that
        have waited longest first.
        """
        self._preparing: dict[str, _Marking] = {}
        """Requests that have a key, and no stream in the state server yet."""
        self._foreign: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """The scopes of streams of other routers that were found by their keys lately, and when."""

    def of(self, request_id: str) -> Key | None:
        """The key of a stream of this router."""
        return self._keys.get(request_id)

    def found_at(self, request_id: str) -> float | None:
        """When a stream of another router was found by its key, in the event loop's time; None: it was not, lately."""
        found = self._foreign.get(request_id)
        return None if found is None else found[1]

    def adopt(self, request_id: str, key: Key, *, is_fresh: bool = False) -> None:
        """A stream has become this router's, with its key.

        Args:
            request_id: the stream.
            key: its key.
            is_fresh: it need not be renewed soon. Else little of its time may be left in the state server.
        """
        self._keys[request_id] = key
        self._renewed_at[request_id] = asyncio.get_running_loop().time()
        self._failed.pop(request_id, None)
        if not is_fresh:
            self._due.add(request_id)
        self._foreign.pop(request_id, None)
        renewing = self._renewing.get(request_id)
        if renewing is not None and renewing.is_released:
            del self._renewing[request_id]

    def note_open(self, request_id: str) -> None:
        """A request is prepared: its stream is about to be mirrored."""
        marking = self._preparing.get(request_id)
        if marking is not None:
            marking.is_prepared = True

    async def is_preparing(self, request_id: str) -> bool:
        """Whether a request of another router that was found by its key is still being prepared there, or runs there
        without having room in the state server. While that does not answer it may be so.
        """
        found = self._foreign.get(request_id)
        if found is None:
            return False
        try:
            for tenant in (tenant_of_scope(found[0]), PREPARING):
                mark = state_pb2.LookUpClaimRequest(tenant=tenant, key=_mark_of(request_id))
                if (await self._client.look_up_claim(mark)).request_id:
                    return True
        except (StateAwayError, StateRefusedError):
            return True
        return False

    def forget(self, request_id: str) -> None:
        """A stream is this router's no longer. Its key stays in the state server."""
        self._end_marks(request_id)
        self._forget_key(request_id)

    def _forget_key(self, request_id: str) -> None:
        self._keys.pop(request_id, None)
        self._renewed_at.pop(request_id, None)
        self._due.discard(request_id)
        self._failed.pop(request_id, None)
        self._foreign.pop(request_id, None)

    async def claim(self, scope: str, claim: Claim) -> Claim | None:
        """Give a key to a stream, unless a stream of another router has it: then its claim."""
        key = Key(scope, claim.fingerprint.hex())
        try:
            response = await self._client.claim(self._request(claim.request_id, key, self.ttl_s))
        except (StateAwayError, StateRefusedError) as away:
            metrics.STATE_CLAIMS.labels("away").inc()
            # It is claimed again with the next renewal, unless another request has it then. One call that was late says
            # that the server is slow, not that it is away: nothing would tell when it is back.
            is_late = isinstance(away, StateAwayError) and away.is_late
            self.adopt(claim.request_id, key, is_fresh=not is_late)
            if isinstance(away, StateAwayError) and away.is_full:  # nothing would tell when it has room
                self._failed[claim.request_id] = None
            self._begin_marks(claim.request_id, key)
            return None
        if response.granted:
            metrics.STATE_CLAIMS.labels("granted").inc()
            self.adopt(claim.request_id, key, is_fresh=True)
            self._begin_marks(claim.request_id, key)
            return None
        metrics.STATE_CLAIMS.labels("known").inc()
        return self._note_foreign(scope, response)

    async def find(self, scope: str) -> Claim | None:
        """The claim of the stream that has a key; None if none has it, or the state server is away."""
        request = state_pb2.LookUpClaimRequest(tenant=tenant_of_scope(scope), key=scope)
        try:
            response = await self._client.look_up_claim(request)
        except (StateAwayError, StateRefusedError):
            return None
        return self._note_foreign(scope, response) if response.request_id else None

    async def release(self, request_id: str, ended: Key | None = None) -> None:
        """Free the key of a stream, of this router or of one whose stream was found by it.

        Args:
            request_id: the stream.
            ended: the key of a stream that has ended, which is not renewed any more.
        """
        key, foreign = self._keys.get(request_id, ended), self._foreign.pop(request_id, None)
        self.forget(request_id)
        scope = key.scope if key is not None else foreign[0] if foreign is not None else None
        if scope is None:
            return
        renewing = self._renewing.get(request_id)
        if renewing is not None:
            renewing.is_released = True
            with suppress(TimeoutError):  # then the renewal releases it once more
                async with asyncio.timeout(self._client.timeout_s), renewing.turn:
                    pass
        await self._release(request_id, scope)

    async def _release(self, request_id: str, scope: str) -> None:
        release = state_pb2.ReleaseClaimRequest(tenant=tenant_of_scope(scope), key=scope, request_id=request_id)
        with suppress(StateAwayError, StateRefusedError):  # its time to live ends it
            await self._client.release(release)

    def tend(self, is_kept: Callable[[str], bool]) -> None:
        """Renew the times to live of keys. Called about every second."""
        now, left = asyncio.get_running_loop().time(), _RENEWALS_AT_ONCE
        for request_id, renewed_at in list(self._renewed_at.items()):
            if not is_kept(request_id) and request_id not in self._preparing:
                self._failed.pop(request_id, None)
                if now - renewed_at > self.ttl_s:
                    self.forget(request_id)
            elif left and (request_id in self._due or now - renewed_at > self.ttl_s / 3):
                self._renew(request_id, self.ttl_s)
                left -= 1
        for request_id in list(islice(self._failed, _REPEATS_AT_ONCE)):
            self._renew(request_id, self.ttl_s)

    def renew_soon(self) -> None:
        """The state server may have forgotten all keys: `tend` sends it those of this router."""
        self._due = set(self._keys)

    def expire_in(self, request_id: str, keep_s: float) -> None:
        """A stream has ended: its key is kept as long as the stream is."""
        if request_id in self._keys:
            self._renew(request_id, keep_s)
            self._forget_key(request_id)  # one without room in the state server stays marked while the mirror has it

    def _renew(self, request_id: str, ttl_s: float) -> None:
        self._renewed_at[request_id] = asyncio.get_running_loop().time()
        self._due.discard(request_id)
        self._failed.pop(request_id, None)
        request = self._request(request_id, self._keys[request_id], ttl_s)
        renewing = self._renewing.setdefault(request_id, _Renewing())
        self._mirror.add_chore(partial(self._renew_there, renewing, request))

    async def _renew_there(self, renewing: _Renewing, request: state_pb2.ClaimRequest) -> None:
        async with renewing.turn:
            if renewing.is_released:
                return
            try:
                await self._client.renew(request)
            except StateAwayError:
                if request.request_id in self._keys:
                    self._failed[request.request_id] = None
                raise
            finally:
                if renewing.is_released:  # it was freed in the meantime, perhaps before this came to the state server
                    await self._release(request.request_id, request.key)

    def _begin_marks(self, request_id: str, key: Key) -> None:
        mark = self._request(request_id, key, _MARK_TTL_S)
        mark.key = _mark_of(request_id)
        self._preparing[request_id] = _Marking(mark)
        self._mark_in(MARK_AFTER_S, request_id)

    def _mark_in(self, seconds: float, request_id: str) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, self._mark, request_id)
        self._preparing[request_id].timer = timer

    def _mark(self, request_id: str) -> None:
        """Announce that there is no stream yet, and repeat that until there is. A stream may have no room in the state
        server: who found none would free the key, and begin a second one.
        """
        marking, entry = self._preparing[request_id], self._mirror.entries.get(request_id)
        if marking.is_prepared and (entry is None or entry.is_open):
            self._end_marks(request_id)
        else:
            self._mirror.add_chore(partial(self._mark_there, marking.mark))
            self._mark_in(_MARK_EVERY_S, request_id)

    async def _mark_there(self, mark: state_pb2.ClaimRequest) -> None:
        try:
            await self._client.renew(mark)
        except StateAwayError as away:
            if not away.is_full:
                raise
            # Perhaps only its tenant has no room. Its own tenant comes first: older routers look nowhere else.
            own = state_pb2.ClaimRequest()
            own.CopyFrom(mark)
            own.tenant = PREPARING
            await self._client.renew(own)

    def _end_marks(self, request_id: str) -> None:
        marking = self._preparing.pop(request_id, None)
        if marking is not None and marking.timer is not None:
            marking.timer.cancel()

    def _request(self, request_id: str, key: Key, ttl_s: float) -> state_pb2.ClaimRequest:
        return state_pb2.ClaimRequest(
            tenant=tenant_of_scope(key.scope),
            key=key.scope,
            request_id=request_id,
            fingerprint=bytes.fromhex(key.fingerprint),
            ttl_s=ttl_s,
        )

    def _note_foreign(self, scope: str, response: state_pb2.ClaimResponse) -> Claim:
        self._foreign[response.request_id] = scope, asyncio.get_running_loop().time()
        self._foreign.move_to_end(response.request_id)
        if len(self._foreign) > _MAX_FOREIGN:
            self._foreign.popitem(last=False)
        return Claim(response.request_id, response.fingerprint)


def _mark_of(request_id: str) -> str:
    """The key, in the state server, that says that a request is being prepared."""
    return f"preparing/{request_id}"
