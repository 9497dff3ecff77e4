"""The check that no lower epoch is seen after a higher one: what a router takes of a frame from an old life of ranks.

Workers send such frames, late or as mischief. A router that has read one of a higher epoch, of the same worker process,
must take none of their tokens.
"""

from collections.abc import Callable
from weakref import WeakValueDictionary

from lockstep_api.v1 import worker_pb2
from lockstep_router.streams.journal import Journal

from simulated.kernel import ProcessLoop
from simulated.network import Connection


class Epochs:
    """The newest epoch of each worker process that each router has read, and the journals of its streams.

    Args:
        report: called with the id of a stream that has taken tokens of a lower epoch, and the details.
    """

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self.stale_frames = 0
        """Frames of a lower epoch that routers have read."""
        self._report = report
        self._newest: dict[tuple[ProcessLoop, str, int], int] = {}
        self._journals: dict[ProcessLoop, WeakValueDictionary[str, Journal]] = {}
        self._lengths: dict[Connection, tuple[dict[str, int], str]] = {}
        """Of the journals of a router before it takes a frame of a lower epoch, and the details of that frame."""

    def add(self, loop: ProcessLoop, journal: Journal) -> None:
        """Watch a stream of a router."""
        self._journals.setdefault(loop, WeakValueDictionary())[journal.stream_id] = journal

    def on_read(self, connection: Connection, frame: worker_pb2.WorkerFrame) -> None:
        """A router gets a frame."""
        life = connection.loop, connection.target, connection.host.incarnation
        newest = self._newest.get(life, 0)
        if frame.epoch >= newest:
            self._newest[life] = frame.epoch
            return
        self.stale_frames += 1
        journals = self._journals.get(connection.loop, {})
        lengths = {stream_id: len(journal.emitted_ids) for stream_id, journal in journals.items()}
        detail = f"took tokens of epoch {frame.epoch} of {connection.target} after epoch {newest}"
        self._lengths[connection] = lengths, detail

    def on_next(self, connection: Connection) -> None:
        """The router has done what it does with the last frame."""
        lengths, detail = self._lengths.pop(connection, ({}, ""))
        journals = self._journals.get(connection.loop, {})
        for stream_id, length in lengths.items():
            journal = journals.get(stream_id)
            if journal is not None and len(journal.emitted_ids) > length:
                self._report(stream_id, detail)
