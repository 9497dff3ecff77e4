"""What tenants have used of their limits. It refuses what would exceed one, before that costs anything.

Requests and tokens count in a sliding minute of the library `limits`: the counter of the clock's minute, and of the one
before it in proportion. A prompt's tokens count when they are known, before the request gets a worker. An answer's
tokens count when it ends, however it ends: what clients set as `max_tokens` is rarely what they use. So answers in
progress may take a tenant beyond its tokens, and it is refused until the sliding minute has room again.
"""

import asyncio
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Protocol

from limits.aio.storage import MemoryStorage
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_router import metrics
from lockstep_router.tenants.tenant import Tenant

for _limit in ("requests_per_minute", "tokens_per_minute", "concurrent_streams"):
    metrics.LIMITED.labels(_limit)  # from 0

_MINUTE_S = 60
_NO_LIMIT = sys.maxsize
_READINGS_PER_STREAM = 4
"""Readings of resumable streams that a tenant may have for each of its `concurrent_streams`."""


class Storage(Protocol):
    """Counters of sliding windows: a storage of `limits.aio`."""

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Add an amount, unless the window's count would exceed the limit then."""

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """The counts of the previous and the current window, each with the seconds until it expires."""


@dataclass(frozen=True)
class MinuteUsage:
    """What one sliding minute holds."""

    previous: int
    current: int
    left_s: float
    """Seconds until the clock's minute ends."""

    @property
    def count(self) -> int:
        """What counts against the limit now."""
        return math.floor(self.previous * self.left_s / _MINUTE_S) + self.current

    def wait_s(self, limit: int, amount: int) -> float:
        """Seconds after which there is room for `amount`, which is at most `limit`, if nothing else is counted
        meanwhile.
        """
        if self.count + amount <= limit:
            return 0.0
        # The count is rounded down: there is room as soon as it is below this.
        below = limit - amount + 1
        if self.current < below:
            return self.left_s - _MINUTE_S * (below - self.current) / self.previous
        return self.left_s + _MINUTE_S * (1 - below / self.current)

    @property
    def empty_s(self) -> float:
        """Seconds until nothing counts any more, if nothing else is counted meanwhile."""
        if self.current:
            return self.left_s + _MINUTE_S
        return self.left_s if self.previous else 0.0


@dataclass(frozen=True)
class Standing:
    """How far a tenant is from one of its limits of a minute."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until all of the limit is there again, if nothing else is counted meanwhile."""


class TenantLimits:
    """The counters of all tenants."""

    def __init__(self, storage: Storage | None = None) -> None:
        self._storage = storage or MemoryStorage()
        self._streams: dict[str, int] = {}
        self._charging: set[asyncio.Task[bool]] = set()
        self._last: dict[tuple[str, str], tuple[float, Standing]] = {}

    def account(self, tenant: Tenant) -> "Account":
        """The account of a request that has just arrived."""
        return Account(tenant, self)

    def streams_of(self, tenant: Tenant) -> int:
        """The streams that a tenant has in progress."""
        return self._streams.get(tenant.name, 0)

    def count_streams(self, tenant: Tenant, streams: int) -> None:
        """Change that number."""
        now = self._streams.get(tenant.name, 0) + streams
        if now:
            self._streams[tenant.name] = now
        else:
            self._streams.pop(tenant.name, None)

    def note_standing(self, tenant: Tenant, what: str, standing: Standing) -> None:
        """Keep what a request has found of one of its tenant's limits."""
        self._last[tenant.name, what] = (time.monotonic(), standing)

    def used(self, tenant: Tenant, what: str) -> int:
        """What the tenant's last request found used of a limit of a minute; 0 if nothing of that counts any more.

        It asks no storage: that would take as long as the storage likes.
        """
        at, standing = self._last.get((tenant.name, what), (0.0, None))
        if standing is None or time.monotonic() - at >= standing.reset_s:
            return 0
        return standing.limit - standing.remaining

    async def acquire(self, tenant: Tenant, what: str, limit: int, amount: int) -> bool:
        """Count an amount, unless it would exceed the limit of the sliding minute."""
        return await self._storage.acquire_sliding_window_entry(_key(tenant, what), limit, _MINUTE_S, amount)

    def charge(self, tenant: Tenant, what: str, amount: int) -> None:
        """Count an amount in any case, without waiting for it."""
        # In a context of its own: its time is not that of a request.
        task = asyncio.create_task(self.acquire(tenant, what, _NO_LIMIT, amount), context=Context())
        self._charging.add(task)
        task.add_done_callback(self._charging.discard)

    async def usage(self, tenant: Tenant, what: str) -> MinuteUsage:
        """What counts in the sliding minute."""
        previous, _, current, current_s = await self._storage.get_sliding_window(_key(tenant, what), _MINUTE_S)
        # A window is kept for another minute after its own.
        return MinuteUsage(previous, current, max(0.0, current_s - _MINUTE_S))


class Account:
    """What one request takes of its tenant's limits."""

    def __init__(self, tenant: Tenant, limits: TenantLimits) -> None:
        self.tenant = tenant
        self.standings: dict[str, Standing] = {}
        """By what is limited: `requests`, `tokens`."""
        self._limits = limits

    @property
    def streams_left(self) -> int:
        """How many more streams the tenant may have in progress."""
        limit = self.tenant.concurrent_streams
        return _NO_LIMIT if limit is None else max(0, limit - self._limits.streams_of(self.tenant))

    async def admit(self) -> None:
        """Count the request before its body is read.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED, one of the tenant's limits is used up.
        """
        if self.tenant.concurrent_streams is not None:
            self._check_streams(1)
        tokens = self.tenant.tokens_per_minute
        if tokens is not None:
            usage = await self._note("tokens", tokens)
            if usage.count >= tokens:
                raise _exceeded("tokens_per_minute", tokens, usage.wait_s(tokens, 1))
        await self.admit_reading()

    async def admit_reading(self) -> None:
        """Count a request that may be answered without new tokens: the answer that it is about may run already.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED, there are too many requests.
        """
        if self.tenant.requests_per_minute is not None:
            await self._acquire("requests", self.tenant.requests_per_minute, 1)

    def expect(self, streams: int) -> None:
        """Refuse a request that holds one stream and will need so many in all, before its prompts are encoded.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED, the tenant has too many now; RESOURCE_EXHAUSTED, it may never have them.
        """
        limit = self.tenant.concurrent_streams
        if limit is None:
            return
        if streams > limit:
            sentence = f"the request has {streams} answers, and the limit concurrent_streams is {limit}"
            raise LockstepError(ErrorCode.RESOURCE_EXHAUSTED, sentence, field="concurrent_streams")
        self._check_streams(streams - 1)

    async def charge_prompts(self, tokens: int) -> None:
        """Count the tokens of the request's prompts before it gets a worker.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED, they do not fit now; RESOURCE_EXHAUSTED, they never do.
        """
        limit = self.tenant.tokens_per_minute
        if limit is None:
            return
        if tokens > limit:
            sentence = f"the prompts have {tokens} tokens, and the limit tokens_per_minute is {limit}"
            raise LockstepError(ErrorCode.RESOURCE_EXHAUSTED, sentence, field="tokens_per_minute")
        await self._acquire("tokens", limit, tokens)

    def charge_answers(self, tokens: int) -> None:
        """Count the tokens of answers that have ended."""
        if self.tenant.tokens_per_minute is not None and tokens:
            self._limits.charge(self.tenant, "tokens", tokens)

    @contextmanager
    def holding(self, streams: int) -> Iterator[None]:
        """Count streams as in progress.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED, the tenant would have too many.
        """
        self.hold(streams)
        try:
            yield
        finally:
            self.give_back(streams)

    def hold(self, streams: int) -> None:
        """Count streams as in progress, until `give_back`.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED, the tenant would have too many.
        """
        if streams:
            if self.tenant.concurrent_streams is not None:
                self._check_streams(streams)
            self._limits.count_streams(self.tenant, streams)

    def give_back(self, streams: int) -> None:
        """Count streams as ended."""
        if streams:
            self._limits.count_streams(self.tenant, -streams)

    def check_readings(self, readings: int) -> None:
        """Refuse one more reading of a resumable stream, if the tenant has as many as it may have.

        Raises:
            LockstepError: RATE_LIMIT_EXCEEDED.
        """
        limit = self.tenant.concurrent_streams
        if limit is not None and readings >= _READINGS_PER_STREAM * limit:
            sentence = f"{readings} clients read the tenant's streams, as many as concurrent_streams of {limit} allows"
            raise _exceeded("concurrent_streams", limit, 0.0, sentence)

    def _check_streams(self, streams: int) -> None:
        limit = self.tenant.concurrent_streams
        if streams and limit is not None and self._limits.streams_of(self.tenant) + streams > limit:
            raise _exceeded("concurrent_streams", limit, 0.0)  # any stream may end at once

    async def _acquire(self, what: str, limit: int, amount: int) -> None:
        is_counted = await self._limits.acquire(self.tenant, what, limit, amount)
        usage = await self._note(what, limit)
        if not is_counted:
            raise _exceeded(f"{what}_per_minute", limit, usage.wait_s(limit, amount))

    async def _note(self, what: str, limit: int) -> MinuteUsage:
        usage = await self._limits.usage(self.tenant, what)
        self.standings[what] = standing = Standing(limit, max(0, limit - usage.count), usage.empty_s)
        self._limits.note_standing(self.tenant, what, standing)
        return usage


def _key(tenant: Tenant, what: str) -> str:
    # Without the limit itself, so that what was used still counts when the limit changes.
    return f"{tenant.name}/{what}"


def _exceeded(limit: str, value: int, retry_after_s: float, sentence: str = "") -> LockstepError:
    metrics.LIMITED.labels(limit).inc()
    return LockstepError(
        ErrorCode.RATE_LIMIT_EXCEEDED,
        sentence or f"the limit {limit} of {value} is reached",
        field=limit,
        retry_after_s=math.floor(retry_after_s) + 1,
    )
