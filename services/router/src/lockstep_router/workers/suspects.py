"""Finds the stream that makes its workers die, and isolates it from other streams.

All streams that ran on a worker when it died are suspects, but a first death has no consequence. Streams that were in
two deaths in a row are tried: a quarter of them at a time on each worker, then a quarter of those that died again,
until each is tried alone. A stream that was the only first suspect of `quarantine_after` deaths in a row is
quarantined: its client gets an error, and the same request is refused for a while. It takes more deaths if workers also
die without it, or did so shortly before. Tokens on one worker without a death clear a stream.

It knows streams by their ids and workers by their lives, and holds no tokens and no text.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lockstep_api.v1 import worker_pb2

Life = tuple[str, int, int]
"""(target, incarnation, epoch) of a worker."""

_TRIED_AFTER = 2
"""Deaths in a row after which a stream is tried."""

_TRIAL_SHARE = 4
"""A trial has at most one in this many of the streams that were in the last death."""

_CLEARING_TOKENS = 32
"""Tokens on one worker that clear a stream after its first death; the number doubles with each further death, so that a
stream which kills regularly does not clear itself."""

_MAX_DOUBLINGS = 8

_MAX_EXTRA = 2
"""Deaths of workers without the suspect raise the deaths that quarantine takes, by at most this many times
`quarantine_after`."""

_RECENT_S = 60.0
"""Deaths that are so recent when a stream is in its first one show that workers die of something else, too."""

_UNCERTAIN_WEIGHT = 3
"""Uncertain deaths that count as one: other streams are suspect too, or the worker may have been dead before it got the
stream, or may have died of its own faults."""

_MAX_CHARGES = 64
_QUARANTINE_S = 600.0
_MAX_QUARANTINED = 1024


@dataclass
class _Record:
    """The evidence against one stream."""

    deaths: int = 0
    """Deaths in a row that it may have caused since it was last cleared."""
    alone: int = 0
    """Latest deaths in a row in which it was the only first suspect."""
    uncertain: int = 0
    """The number of deaths in `alone` that may have had another cause."""
    has_others: bool = False
    """Whether streams of other routers were in the last death."""
    alone_since: int = 0
    """Number of the first death counted in `alone`; all deaths of workers are numbered from 1."""
    deaths_ever: int = 0
    deaths_before: int = 0
    """Recent deaths before its first one that no stream was quarantined for."""
    is_quarantined: bool = False
    was_cleared: bool = False
    """Whether it was cleared at any time."""
    group: int = 0
    """Number of streams that were equally suspect in the last death."""

    @property
    def is_tried(self) -> bool:
        return self.deaths >= _TRIED_AFTER

    @property
    def is_suspected(self) -> bool:
        """Whether it may have caused its last death, as far as its own conduct shows."""
        return self.is_tried or (self.deaths > 0 and not self.was_cleared)

    @property
    def trial_size(self) -> int:
        return max(1, self.group // _TRIAL_SHARE)

    @property
    def clearing_tokens(self) -> int:
        return _CLEARING_TOKENS << min(self.deaths_ever - 1, _MAX_DOUBLINGS)


@dataclass(frozen=True)
class _Charge:
    """One death."""

    at: float
    records: tuple[tuple[_Record, _Record], ...]
    """Of the streams that were in it, and copies of them from before it."""

    @property
    def is_explained(self) -> bool:
        return any(record.is_quarantined for record, _ in self.records)


class Suspects:
    """The streams of one router that were on workers when these died.

    Args:
        quarantine_after: deaths in a row, with the stream as only first suspect, after which it is quarantined.
        on_change: called when a stream that waits for a trial may begin.
    """

    def __init__(self, quarantine_after: int, on_change: Callable[[], None]) -> None:
        self._quarantine_after = quarantine_after
        self._on_change = on_change
        self._records: dict[str, _Record] = {}
        self._deaths = 0
        self._trials: dict[str, Life] = {}
        """Streams on trial, and the worker's life that each runs on."""
        self._charges: OrderedDict[Life, _Charge] = OrderedDict()
        """Of the latest deaths."""
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()
        """Digests of requests, and the time until which each is refused."""

    def note_death(
        self, life: Life, running: Iterable[str], now: float, *, is_certain: bool = True, has_others: bool = False
    ) -> None:
        """Note that a worker was lost while it ran these streams.

        Streams on trial are the first suspects: if there is just one, the others cannot clear it.

        Args:
            life: of the worker.
            running: ids of this router's streams that are suspect.
            now: time of a clock that stands still while the router is stopped, in seconds.
            is_certain: False if the worker may have been dead before it got them, or may have died of its own faults.
            has_others: whether suspects of other routers, or streams like these, were there too.
        """
        before = sum(now - charge.at <= _RECENT_S and not charge.is_explained for charge in self._charges.values())
        records = [self._records.setdefault(stream_id, _Record(deaths_before=before)) for stream_id in running]
        tried = [record for record in records if record.is_tried]
        first_suspects = tried or records
        # Streams that are new to deaths, or were cleared before, do not clear the one on trial. Others may be the
        # cause.
        is_certain = is_certain and not (tried and any(each.is_suspected and not each.is_tried for each in records))
        self._deaths += 1
        self._charges[life] = _Charge(now, tuple((record, replace(record)) for record in records))
        if len(self._charges) > _MAX_CHARGES:
            self._charges.popitem(last=False)
        for record in records:
            is_first = any(record is each for each in first_suspects)
            record.group = len(first_suspects) if is_first else len(records)
            record.alone = record.alone + 1 if is_first and len(first_suspects) == 1 else 0
            record.uncertain = record.uncertain + (has_others or not is_certain) if record.alone else 0
            record.has_others = has_others
            if record.alone == 1:
                record.alone_since = self._deaths
            record.deaths += 1
            record.deaths_ever += 1

    def note_alive(self, life: Life) -> None:
        """Take a death back: the worker is still in the same life. Its connection broke, or it was silent."""
        charge = self._charges.pop(life, None)
        if charge is None:
            return
        self._deaths -= 1
        for record, before in charge.records:
            record.deaths = max(0, record.deaths - 1)
            record.deaths_ever -= 1
            if record.alone > before.alone:
                record.alone -= 1
                record.uncertain -= record.uncertain > before.uncertain

    def note_progress(self, stream_id: str, tokens: int) -> None:
        """Note how many tokens a stream has received on its current worker; enough of them clear it."""
        record = self._records.get(stream_id)
        if record is not None and record.deaths and tokens >= record.clearing_tokens:
            record.deaths = record.alone = record.uncertain = 0
            record.was_cleared = True
            self.leave(stream_id)

    def is_clear(self, stream_id: str) -> bool:
        """Whether `note_progress` has nothing to do for a stream."""
        record = self._records.get(stream_id)
        return record is None or not record.deaths

    @property
    def is_empty(self) -> bool:
        """Whether no stream is a suspect."""
        return not self._records

    def deaths_alone(self, stream_id: str) -> int:
        """Deaths in a row in which this stream was the only first suspect."""
        record = self._records.get(stream_id)
        return 0 if record is None else record.alone

    def is_guilty(self, stream_id: str) -> bool:
        """Whether the stream must be quarantined. It takes more deaths if workers also die without it."""
        record = self._records.get(stream_id)
        if record is None or not record.alone:
            return False
        elsewhere = record.deaths_before + self._deaths - record.alone_since + 1 - record.alone
        proof = record.alone - record.uncertain + record.uncertain // _UNCERTAIN_WEIGHT
        return proof >= self._quarantine_after + min(max(0, elsewhere), _MAX_EXTRA * self._quarantine_after)

    def suspicion(self, stream_id: str) -> worker_pb2.Suspicion:
        """What is sent about the stream to workers, and through them to other routers."""
        record = self._records.get(stream_id)
        if record is None or not record.is_suspected:
            return worker_pb2.SUSPICION_NONE
        return worker_pb2.SUSPICION_ON_TRIAL if record.is_tried else worker_pb2.SUSPICION_SUSPECTED

    def is_tried(self, stream_id: str) -> bool:
        """Whether the stream may run in trials only."""
        record = self._records.get(stream_id)
        return record is not None and record.is_tried

    def is_tried_beside_others(self, stream_id: str) -> bool:
        """Whether the stream may run in trials only, and was in the last death with streams of other routers."""
        record = self._records.get(stream_id)
        return record is not None and record.is_tried and record.has_others

    def has_trial(self, life: Life) -> bool:
        """Whether a stream is on trial on that worker: others should run elsewhere if they can."""
        return life in self._trials.values()

    def may_enter(self, stream_id: str, life: Life) -> bool:
        """Whether the stream may run on that worker now: always, unless it is tried and the trial there is full."""
        record = self._records.get(stream_id)
        if record is None or not record.is_tried:
            return True
        there = [self._records[each] for each, where in self._trials.items() if where == life and each != stream_id]
        return len(there) < min([record.trial_size, *(other.trial_size for other in there)])

    def enter(self, stream_id: str, life: Life) -> None:
        """Note that the stream begins to run on that worker."""
        if self.is_tried(stream_id):
            self._trials[stream_id] = life

    def leave(self, stream_id: str) -> None:
        """Note that the stream has left its worker, or is no longer on trial."""
        if self._trials.pop(stream_id, None) is not None:
            self._on_change()

    def forget(self, stream_id: str) -> None:
        """Drop the record of a stream that has ended."""
        if self._records:
            self.leave(stream_id)
            self._records.pop(stream_id, None)

    def quarantine(self, stream_id: str, digest: bytes, now: float) -> None:
        """Refuse the stream's request for a while. The deaths that it was in have their explanation."""
        if stream_id in self._records:
            self._records[stream_id].is_quarantined = True
        self._quarantined[digest] = now + _QUARANTINE_S
        self._quarantined.move_to_end(digest)
        if len(self._quarantined) > _MAX_QUARANTINED:
            self._quarantined.popitem(last=False)

    def has_quarantined(self, make_digest: Callable[[], bytes], now: float) -> bool:
        """Whether a request is in quarantine. The digest is computed only if any request is."""
        while self._quarantined and next(iter(self._quarantined.values())) <= now:
            self._quarantined.popitem(last=False)
        return bool(self._quarantined) and make_digest() in self._quarantined

    @property
    def counts(self) -> Counter[str]:
        """Numbers of suspected streams, streams on trial and quarantined requests, for the status."""
        return Counter(
            suspected=sum(record.deaths > 0 for record in self._records.values()),
            tried=len(self._trials),
            quarantined=len(self._quarantined),
        )
