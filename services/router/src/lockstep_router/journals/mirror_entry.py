"""What is known of a stream that is mirrored: what the state server has of it, and what it lacks."""

import asyncio
from dataclasses import dataclass, field

from lockstep_router.journals.records import StoredStream
from lockstep_router.journals.stored_form import Key


@dataclass
class Entry:
    """A stream that is mirrored. `written`, `has_finish` and `is_marked` are what the state server has acknowledged."""

    stream: StoredStream
    epoch: int
    key: Key | None = None
    is_open: bool = False
    written: list[int] = field(default_factory=list)
    has_finish: list[bool] = field(default_factory=list)
    is_marked: list[bool] = field(default_factory=list)
    """As continued inexactly. The mark may come after all tokens."""
    seal: bytes | None = None
    seal_ttl_s: float = 0.0
    is_left: bool = False
    """This router forgets it as soon as everything is written."""
    was_kept: bool = False
    """It was left when it had failed: the memory kept it for a while after that."""
    is_frozen: bool = False
    """It has become too large: only its time to live is renewed."""
    changed_at: float | None = None
    """When the oldest change that is not being written was made, in the event loop's time."""
    written_at: float = 0.0
    not_before: float = 0.0
    """No write before this time; 0: the last write was done, or has not been put off."""
    was_sent: bool = False
    """The state server may have it, whether it has acknowledged that or not."""
    is_dropped: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.written = self.written or [0] * len(self.stream.record.choices)
        self.has_finish = self.has_finish or [False] * len(self.stream.record.choices)
        self.is_marked = self.is_marked or [False] * len(self.stream.record.choices)

    @property
    def is_behind(self) -> bool:
        """Whether the state server lacks something."""
        if not self.is_open or self.seal is not None:
            return True
        return not self.is_frozen and any(
            self.written[index] < len(log.ids) or self.lacks_end(index) for index, log in enumerate(self.stream.logs)
        )

    def lacks_end(self, index: int) -> bool:
        """Whether the state server lacks something of a choice besides tokens."""
        log = self.stream.logs[index]
        return bool(log.finish and not self.has_finish[index]) or (log.is_inexact and not self.is_marked[index])

    def forget_acknowledged(self) -> None:
        """The state server does not have the stream: everything is written again."""
        self.is_open = False
        self.written = [0] * len(self.written)
        self.has_finish = [False] * len(self.has_finish)
        self.is_marked = [False] * len(self.is_marked)
