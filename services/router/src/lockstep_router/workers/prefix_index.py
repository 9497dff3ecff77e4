"""The blocks of prompts that one worker has in its prefix cache, as far as this router knows.

A worker that reports its blocks is believed, and what this router has sent it since counts too, until the first token
shows that the worker has computed it. The blocks of other workers are guessed: those of the prompts that this router
has sent last. A wrong guess costs computing a prompt again, nothing else. It has no clock and sends nothing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_api.v1 import worker_pb2
from lockstep_common.prefix_keys import BLOCK_TOKENS, compressed_key

from lockstep_router import metrics

for _reason in ("start", "gap", "full"):
    metrics.PREFIX_SNAPSHOTS.labels(_reason)  # from 0
_ASK_INTERVAL_S = 5.0
"""Between two requests for a snapshot."""

_SNAPSHOT_SHARE = 0.75
"""Part of its room that a worker may fill with a snapshot. The rest is for what it reports afterwards."""


@dataclass(frozen=True)
class _Sent:
    """A prompt that was sent to the worker."""

    keys: Sequence[int]
    known: int
    """Blocks of it that the worker was thought to have."""


class PrefixIndex:
    """One worker's blocks, besides those of prompts that wait for their first token there.

    They are at most `max_blocks`, and at most twice as many while a smaller snapshot is on its way.
    """

    def __init__(self) -> None:
        self.max_blocks = 0
        self._reports = self._predicted_tokens = self._cached_tokens = self._wrong_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget all blocks: a connection, or a life of the worker's ranks, begins or ends."""
        self.is_reported = False
        """Whether the worker reports its blocks."""
        self._held: set[int] = set()
        self._hot_window: worker_pb2.HotWindow | None = None
        self._next_number: int | None = None
        """Of the next report; None: only a snapshot will do."""
        self._guessed: OrderedDict[int, None] = OrderedDict()
        """The least recently used first."""
        self._sent: dict[str, _Sent] = {}
        """By the stream's id."""
        self._computing: dict[int, int] = {}
        """How many of the prompts that were sent have a block, until it must have been reported."""
        self._settling: list[Sequence[int]] = []
        """Keys of prompts that have given a token since the last status."""
        self._settled: list[Sequence[int]] = []
        """Keys of those that did before it: their blocks have been reported."""
        self._wants = "start"
        """Why a snapshot is needed; empty: it is not."""
        self._ask_from = 0.0

    def __len__(self) -> int:
        """Blocks that the worker is thought to have."""
        return len(self._held) + len(self._guessed)

    def known(self, keys: Sequence[int]) -> int:
        """How many of the blocks with these keys, from the first one on without a gap, the worker has and can use."""
        if self.is_reported and self._hot_window is not None:
            return self._usable(keys, self._hot_window)
        held = self._held if self.is_reported else self._guessed
        computing = self._computing
        for count, key in enumerate(keys):
            if key not in held and key not in computing:
                return count
        return len(keys)

    def _usable(self, keys: Sequence[int], hot_window: worker_pb2.HotWindow) -> int:
        """The same for a worker that compresses blocks: as its engine decides it."""
        held, computing, first, last = self._held, self._computing, hot_window.first, hot_window.last
        usable = hot_run = 0
        cold_end = first
        for index, key in enumerate(keys):
            is_coming = key in computing
            is_hot = is_coming or key in held
            is_cold = is_coming or compressed_key(key) in held
            if not is_hot and (index < first or not is_cold):
                break
            hot_run = hot_run + 1 if is_hot else 0
            cold_end += is_cold and cold_end == index
            begin = max(first, index + 1 - last)
            if cold_end >= begin and hot_run >= index + 1 - begin:
                usable = index + 1
        return usable

    # Reports.

    def resize(self, max_blocks: int) -> None:
        """Set the room for this worker's blocks."""
        self.max_blocks = max_blocks
        while len(self._guessed) > max_blocks:
            self._guessed.popitem(last=False)
        if len(self._held) > 2 * max_blocks:
            self._lose("full")
        elif len(self._held) > max_blocks:
            self._wants = self._wants or "full"

    def asks(self, now: float) -> worker_pb2.PrefixWatch | None:
        """The request for a snapshot, if the router should send one now.

        Args:
            now: seconds, of a clock that never goes back.
        """
        if not self._wants or now < self._ask_from:
            return None
        metrics.PREFIX_SNAPSHOTS.labels(self._wants).inc()
        self._wants, self._ask_from = "", now + _ASK_INTERVAL_S
        return worker_pb2.PrefixWatch(max_blocks=max(1, int(_SNAPSHOT_SHARE * self.max_blocks)))

    def note_unasked(self) -> None:
        """Note that the request for a snapshot was not sent: it is made again."""
        self._wants = self._wants or "start"

    def take(self, report: worker_pb2.PrefixReport) -> None:
        """Take a report. After a gap nothing is known until a snapshot comes."""
        if report.snapshot:
            self._held.clear()
            self._guessed.clear()
            self.is_reported, self._wants = True, ""
            self._hot_window = report.hot_window if report.HasField("hot_window") else None
        elif self._next_number is None:
            self._wants = self._wants or "gap"
            return
        elif report.number != self._next_number:
            self._lose("gap")
            return
        self._next_number = report.number + 1
        self._reports += 1
        metrics.PREFIX_REPORTS.inc()
        self._held.difference_update(report.removed)
        room = max(0, self.max_blocks - len(self._held))
        added = [key for key in dict.fromkeys(report.added) if key not in self._held]
        if len(added) > room:
            # Reports name new blocks only, so they do not say which old ones are used least: a snapshot does.
            self._wants = "full"
        self._held.update(added[:room])

    def _lose(self, reason: str) -> None:
        self._held = set()
        self._next_number = None
        self._wants = reason

    # What this router has sent.

    def note_sent(self, stream_id: str, keys: Sequence[int]) -> None:
        """Note that a prompt with these keys is on its way to the worker."""
        self.note_over(stream_id)
        self._sent[stream_id] = _Sent(keys, self.known(keys))
        for key in keys:
            self._computing[key] = self._computing.get(key, 0) + 1
        if not self.is_reported:
            # The first block is the last one used: a prefix is dropped from its end, which leaves no gap.
            for key in reversed(keys):
                self._guessed[key] = None
                self._guessed.move_to_end(key)
            while len(self._guessed) > self.max_blocks:
                self._guessed.popitem(last=False)

    def note_first_token(self, stream_id: str, cached_tokens: int) -> None:
        """Note that a stream has its first token, and how much of its prompt the worker says it had."""
        sent = self._sent.pop(stream_id, None)
        if sent is None:
            return
        self._settling.append(sent.keys)
        predicted, cached = sent.known * BLOCK_TOKENS, min(cached_tokens, len(sent.keys) * BLOCK_TOKENS)
        self._predicted_tokens += predicted
        self._cached_tokens += cached
        self._wrong_tokens += abs(predicted - cached)
        metrics.PREFIX_PREDICTED_TOKENS.inc(predicted)
        metrics.PREFIX_CACHED_TOKENS.inc(cached)
        metrics.PREFIX_WRONG_TOKENS.inc(abs(predicted - cached))

    def note_over(self, stream_id: str) -> None:
        """Note that a stream has left the worker, perhaps before its first token."""
        sent = self._sent.pop(stream_id, None)
        if sent is not None:
            self._release(sent.keys)

    def note_status(self) -> None:
        """Note a heartbeat of the worker. It sends reports at heartbeats, too."""
        if self._settled or self._settling:
            for keys in self._settled:
                self._release(keys)
            self._settled, self._settling = self._settling, []

    def _release(self, keys: Sequence[int]) -> None:
        for key in keys:
            count = self._computing.get(key, 0) - 1
            if count > 0:
                self._computing[key] = count
            else:
                self._computing.pop(key, None)

    def describe(self) -> dict[str, Any]:
        """Its size and how right it was, for the status. The tokens are those of prompts sent with `prefix_aware`."""
        return {
            "reported": self.is_reported,
            "blocks": len(self),
            "max_blocks": self.max_blocks,
            "reports": self._reports,
            "predicted_tokens": self._predicted_tokens,
            "cached_tokens": self._cached_tokens,
            "wrong_tokens": self._wrong_tokens,
        }
