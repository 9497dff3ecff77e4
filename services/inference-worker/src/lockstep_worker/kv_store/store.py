"""The engine's RemoteStore on the state server: looks up, asks the gate, fetches; stores behind.

Nothing here raises into the engine and nothing waits longer than its deadline: whatever goes wrong is a miss.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass

from lockstep_api.v1 import state_pb2
from lockstep_common.grpc_tls import Dial
from lockstep_common.state_channel import StateAwayError, StateRefusedError
from lockstep_common.tracing import names
from lockstep_common.tracing.spans import CURRENT, Span
from lockstep_engine.remote_store import BlockForm, FetchResult, HeadRange, StoredBlock

from lockstep_worker import metrics
from lockstep_worker.kv_store.client import KvClient
from lockstep_worker.kv_store.gate import Choice, choose
from lockstep_worker.kv_store.link import Link, Transfer
from lockstep_worker.kv_store.parts import DamagedError, PartReader, to_key
from lockstep_worker.kv_store.probes import NoRoomError, Probe
from lockstep_worker.kv_store.write_behind import WriteBehind

logger = logging.getLogger("lockstep.worker")

_MAX_PARTS = 4096
"""Of one fetch; the state server's `max_batch`."""
_MAX_FETCHES = 8
"""At a time; the state server has `max_transfers` for all its callers."""
_PROBE_AFTER_S = 30.0
"""Without a transfer that has measured the link."""
_CHECK_EVERY_S = 5.0
_SAMPLE_BYTES = 2 << 20
"""Of a fetch that measures the link in place of a probe: enough for that, and soon computed if it comes to nothing."""
_SILENT_FETCHES = 3
"""In a row that have got nothing by their deadline; then there is one each `_SILENT_S`. Look-ups may well be answered
meanwhile, on a way that loses large packets, so that neither the breaker opens nor the link is measured.
"""
_SILENT_S = 30.0
_WARN_EVERY_S = 60.0
_NOBODY = "-"
"""The state server's tenant of requests that have none."""

_Into = Callable[[int, int], memoryview]


@dataclass(frozen=True)
class StoreOptions:
    """What the settings say."""

    target: str
    """The state server's address."""
    timeout_s: float
    """Longest time of a call without content."""
    fetch_timeout_s: float
    """Longest time of a fetch."""
    queue_bytes: int
    """Of blocks that wait to be stored."""
    ttl_s: float
    """For how long stored blocks are kept."""
    name: str
    """The worker's."""
    tenant_share: float = 1.0
    """Part of the queue that a tenant's blocks may take at the cost of others."""
    identity: str = ""
    """Name that the state server's certificate has to be for; empty without TLS."""


class KvStore:
    """The third tier of the prefix cache. It is a `lockstep_engine.remote_store.RemoteStore`."""

    def __init__(self, options: StoreOptions, dial: Dial) -> None:
        self.client = KvClient(options.target, dial, options.timeout_s, options.identity)
        self.link = Link()
        self._options = options
        self._queue = WriteBehind(self.client, options.queue_bytes, options.ttl_s, options.tenant_share)
        self._probe = Probe(self.client, self.link, options.name)
        self._probing: asyncio.Task[None] | None = None
        self._probe_now = asyncio.Event()
        self._no_room_at = -math.inf
        """When the server last had no room for the probe."""
        self._wants_sample = False
        """The next fetch measures the link in place of the probe, whatever the gate would say."""
        self._fetches = 0
        self._silent = 0
        """Fetches in a row that have got nothing by their deadline."""
        self._silent_until = 0.0
        self._warn_after = 0.0
        self._returned_at = -math.inf
        """When the server last answered again after it was away. It may have started again, with nothing."""

    async def __aenter__(self) -> "KvStore":
        """Connect and begin to measure, without waiting for either."""
        self.client.start()
        self.client.on_return = self._on_return
        self._queue.start()
        self._probing = asyncio.create_task(self._probe_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect; what waits to be stored is lost."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self._queue.close()
        await self.client.close()

    @property
    def on_lost(self) -> Callable[[Sequence[bytes]], None]:
        """See `RemoteStore.on_lost`."""
        return self._queue.on_lost

    @on_lost.setter
    def on_lost(self, on_lost: Callable[[Sequence[bytes]], None]) -> None:
        self._queue.on_lost = on_lost

    @property
    def fetch_timeout_s(self) -> float:
        """See `RemoteStore.fetch_timeout_s`."""
        return self._options.fetch_timeout_s

    @property
    def is_away(self) -> bool:
        """See `RemoteStore.is_away`."""
        return self.client.is_away

    def is_kept(self, offered_at: float) -> bool:
        """See `RemoteStore.is_kept`."""
        return offered_at > max(self._returned_at, self.link.clock() - self._options.ttl_s / 2)

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything offered is stored, no longer than this."""
        await self._queue.flush(timeout_s)

    def offer(self, tenant: str, blocks: Sequence[StoredBlock]) -> int:
        """See `RemoteStore.offer`."""
        try:
            return self._queue.offer(tenant or _NOBODY, blocks)
        except Exception:
            logger.exception("blocks cannot be queued")
            return 0

    async def fetch(
        self,
        tenant: str,
        hashes: Sequence[bytes],
        heads: Sequence[HeadRange],
        form: BlockForm,
        recompute_s: Callable[[int], float],
        into: _Into,
        further_bytes: int,
    ) -> FetchResult:
        """See `RemoteStore.fetch`."""
        result = FetchResult(0, "cancelled")
        began_at, measured_at = self.link.clock(), self.link.measured_at
        is_sample = self._take_sample()
        with _span() as span:
            try:
                self._fetches += 1
                hashes = hashes[: _MAX_PARTS // max(len(heads), 1)]
                wanted = _Wanted(tenant or _NOBODY, hashes, heads, form, further_bytes, is_sample)
                result = await self._fetch(wanted, recompute_s, into)
            except Exception:
                logger.exception("a fetch of blocks has failed")
                result = FetchResult(0, "unavailable")
            finally:
                self._fetches -= 1
                if is_sample and self.link.measured_at == measured_at:
                    # After one of these the next probe asks for another.
                    self._wants_sample = result.outcome not in ("deadline", "damaged")
                if span is not None:
                    span.attributes |= {names.OUTCOME: result.outcome, names.KV_BLOCKS: result.blocks}
                metrics.REMOTE_FETCHES.labels(result.outcome).inc()
                metrics.REMOTE_FETCHED_BLOCKS.inc(result.blocks)
        if result.outcome not in ("gate", "unmeasured"):
            metrics.REMOTE_FETCH_SECONDS.observe(self.link.clock() - began_at)
        return result

    async def _fetch(self, wanted: "_Wanted", recompute_s: Callable[[int], float], into: _Into) -> FetchResult:
        began_at = self.link.clock()
        try:
            choice = self._choose(await self._look_up(wanted, recompute_s), wanted, recompute_s, calls=1)
        except (StateAwayError, StateRefusedError) as error:
            return FetchResult(0, _outcome(error))
        except _MissError as miss:
            return FetchResult(0, miss.outcome)
        # Later than that the blocks would have been computed.
        deadline_s = min(self._options.fetch_timeout_s, choice.recompute_s) - (self.link.clock() - began_at)
        return await self._get(wanted, choice, deadline_s, into) if deadline_s > 0 else FetchResult(0, "deadline")

    async def _look_up(self, wanted: "_Wanted", recompute_s: Callable[[int], float]) -> int:
        """How many leading blocks are there, asked only if some would pass the gate were all there.

        Raises:
            StateAwayError, StateRefusedError: it is not known.
            _MissError: none is, or asking is of no use.
        """
        if not wanted.hashes or not wanted.heads:
            raise _MissError("absent")
        if self.client.is_away or self._waits_in_silence:
            raise _MissError("unavailable")
        if self._fetches > _MAX_FETCHES:
            raise _MissError("gate")
        self._choose(len(wanted.hashes), wanted, recompute_s, calls=2)
        began_at = self.link.clock()
        present = (await self.client.look_up(wanted.look_up())).present
        self.link.note_call(self.link.clock() - began_at)
        if not 0 < present <= len(wanted.hashes):
            raise _MissError("damaged" if present else "absent")
        return present

    def _choose(self, blocks: int, wanted: "_Wanted", recompute_s: Callable[[int], float], calls: int) -> Choice:
        """The gate's choice among these leading blocks, which are there after so many more calls.

        Raises:
            _MissError: computing them is faster, or nothing is known of the link.
        """
        if wanted.is_sample:
            count = max(1, min(blocks, _SAMPLE_BYTES // wanted.block_bytes))
            return Choice(count, 0.0, recompute_s(count))
        link = self.link.estimate()
        if link is None:
            raise _MissError("unmeasured")
        choice = choose(blocks, wanted.block_bytes, link.of_fetch(calls, wanted.further_bytes), recompute_s)
        span = CURRENT.get()
        if span is not None:  # of the last choice, which knows best what is there
            span.attributes |= {names.KV_FETCH_S: choice.fetch_s, names.KV_RECOMPUTE_S: choice.recompute_s}
        if not choice.blocks:
            raise _MissError("gate")
        return choice

    async def _get(self, wanted: "_Wanted", choice: Choice, deadline_s: float, into: _Into) -> FetchResult:
        """Fetch blocks. What has come before a failure counts."""
        if self._waits_in_silence:  # another fetch has begun to find out meanwhile
            return FetchResult(0, "unavailable")
        if self._silent >= _SILENT_FETCHES:
            self._silent_until = self.link.clock() + _SILENT_S
        keys = [to_key(each, heads) for each in wanted.hashes[: choice.blocks] for heads in wanted.heads]
        parts = len(wanted.heads)
        reader = PartReader(keys, wanted.form, lambda index: into(*divmod(index, parts)))
        request = state_pb2.GetBlocksRequest(tenant=wanted.tenant, keys=keys)
        size, link = choice.blocks * wanted.block_bytes, self.link.estimate()
        estimated_s = 0.0 if link is None else link.fetch_s(size)
        outcome, began_at = "", self.link.clock()
        try:
            with self.link.transfer(size) as transfer, _counted(transfer):
                async with aclosing(self.client.get(request, deadline_s)) as messages:
                    async for message in messages:
                        if not reader.take(message):
                            break
                        self.link.received(transfer, len(message.data))
                        metrics.REMOTE_BYTES.labels("in").inc(len(message.data))
                        self._silent = 0
                    else:
                        reader.end()
        except (StateAwayError, StateRefusedError) as error:
            outcome = _outcome(error)
            if outcome == "deadline" and not transfer.bytes:
                self._note_silence()
        except DamagedError as error:
            outcome = "damaged"
            self._warn(str(error))
        blocks = reader.complete // parts
        if not outcome:
            outcome = "fetched" if blocks else "absent"
        if blocks == choice.blocks and not wanted.is_sample:
            self._measure(estimated_s, choice.recompute_s, self.link.clock() - began_at)
        return FetchResult(blocks, outcome)

    def _take_sample(self) -> bool:
        """Whether this fetch measures the link. No other one does until it ends."""
        is_stale = self.link.clock() - self.link.measured_at >= _PROBE_AFTER_S
        is_sample, self._wants_sample = self._wants_sample and is_stale, False
        return is_sample

    def _note_no_room(self) -> None:
        if self._no_room_at == -math.inf:
            logger.warning("the state server has no room for the probe: fetches of KV blocks measure the way to it")
        self._no_room_at = self.link.clock()
        self._wants_sample = True

    def _on_return(self) -> None:
        self._returned_at = self.link.clock()
        self._probe_now.set()

    @property
    def _waits_in_silence(self) -> bool:
        return self._silent >= _SILENT_FETCHES and self.link.clock() < self._silent_until

    def _note_silence(self) -> None:
        self._silent += 1
        if self._silent >= _SILENT_FETCHES:
            self._silent_until = self.link.clock() + _SILENT_S
        if self._silent == _SILENT_FETCHES:
            logger.warning("the state server sends no KV blocks, though it is asked: prefixes are computed")

    def _warn(self, field: str) -> None:
        """Say that a block is damaged, from time to time."""
        now = self.link.clock()
        if now >= self._warn_after:
            self._warn_after = now + _WARN_EVERY_S
            logger.warning("a KV block of the state server is damaged", extra={"field": field})

    def _measure(self, estimated_s: float, recompute_s: float, took_s: float) -> None:
        """What the gate has estimated of a complete fetch, and what it took."""
        metrics.REMOTE_GATE_FETCH.inc(estimated_s)
        metrics.REMOTE_GATE_RECOMPUTE.inc(recompute_s)
        metrics.REMOTE_GATE_TOOK.inc(took_s)
        metrics.REMOTE_GATE_ERRORS.inc(took_s > recompute_s)

    async def _probe_forever(self) -> None:
        while True:
            self._probe_now.clear()
            tried_at = max(self.link.measured_at, self._no_room_at)
            if not self.client.is_away and self.link.clock() - tried_at >= _PROBE_AFTER_S:
                try:
                    await self._probe.measure()
                except NoRoomError:
                    self._note_no_room()
                except (StateAwayError, StateRefusedError, DamagedError) as error:
                    logger.debug("the way to the state server was not measured: %s", error)
                except Exception:
                    logger.exception("the way to the state server was not measured")
            with suppress(TimeoutError):  # `wait_for` loses a cancellation that comes together with the event
                async with asyncio.timeout(_CHECK_EVERY_S):
                    await self._probe_now.wait()


class _MissError(Exception):
    """Nothing is fetched."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True)
class _Wanted:
    """What a fetch asks for."""

    tenant: str
    hashes: Sequence[bytes]
    heads: Sequence[HeadRange]
    form: BlockForm
    further_bytes: int
    is_sample: bool
    """It measures the link: the gate is not asked."""

    @property
    def block_bytes(self) -> int:
        """Of one block, over all heads."""
        return self.form.length * len(self.heads)

    def look_up(self) -> state_pb2.LookUpBlocksRequest:
        ranges = [state_pb2.HeadRange(first=each.first, count=each.count) for each in self.heads]
        return state_pb2.LookUpBlocksRequest(tenant=self.tenant, hashes=self.hashes, heads=ranges)


def _outcome(error: StateAwayError | StateRefusedError) -> str:
    return "deadline" if isinstance(error, StateAwayError) and error.is_late else "unavailable"


@contextmanager
def _span() -> Iterator[Span | None]:
    """A span of the request that the fetch is for, if that has a trace."""
    parent = CURRENT.get()
    if parent is None:
        yield None
        return
    span = parent.trace.begin("kv fetch", parent)
    span.attributes[names.KV_BYTES] = 0
    token = CURRENT.set(span)
    try:
        yield span
    finally:
        CURRENT.reset(token)
        parent.trace.end(span)


@contextmanager
def _counted(transfer: Transfer) -> Iterator[None]:
    """Notes in the fetch's span, if it has one, the bytes that have come, however the transfer ends."""
    try:
        yield
    finally:
        if (span := CURRENT.get()) is not None:
            span.attributes[names.KV_BYTES] = transfer.bytes
