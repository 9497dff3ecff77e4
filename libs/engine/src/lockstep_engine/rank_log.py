"""A rank's log, which the driver writes: records go over the control socket, and never delay the rank.

What the socket does not take waits in a bounded buffer; what that does not take is counted as dropped.
"""

import contextlib
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lockstep_common.telemetry import extra_fields
from lockstep_common.tracebacks import traceback_text

from lockstep_engine.allowance import Allowance
from lockstep_engine.control import RankLogEntry, encode_control

logger = logging.getLogger("lockstep.rank")

_MAX_WAITING = 256
_MAX_MESSAGE_CHARS = 1_000
_MAX_EXCEPTION_CHARS = 8_000
_MAX_FIELDS, _MAX_FIELD_CHARS, _MAX_NAME_CHARS = 16, 300, 64
"""Together less than MAX_CONTROL_BYTES, whatever the characters are."""
_INT_BITS = 64
_BURST, _PER_S = 200, 50.0
_END_S = 0.5
"""Time for the last records to be sent when the rank ends."""


class RankLogHandler(logging.Handler):
    """Sends the records of the rank's process to the driver.

    Args:
        control: the rank's socket to the driver.
        step: how many steps the rank has finished.
    """

    def __init__(self, control: socket.socket, step: Callable[[], int]) -> None:
        super().__init__()
        self._control = control
        self._step = step
        self._allowance = Allowance(_BURST, _PER_S)
        self._waiting: deque[bytes] = deque()
        """Packets: what cannot be encoded never waits, so it keeps nothing behind it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, or let it wait. `handle` has locked."""
        try:
            if len(self._waiting) >= _MAX_WAITING:
                self._allowance.dropped += 1
            elif self._allowance.take():
                dropped, self._allowance.dropped = self._allowance.dropped, 0
                try:
                    self._waiting.append(encode_control(self._entry(record, dropped)))
                except Exception:
                    self._allowance.dropped += dropped + 1
                    raise
            self._send()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Send what waits, for a moment at most, at the end of the rank."""
        ends_at = time.monotonic() + _END_S
        with contextlib.suppress(Exception):  # the reason of the rank's end is sent after this, whatever happens here
            while self._waiting and (left_s := ends_at - time.monotonic()) > 0:
                select.select([], [self._control], [], left_s)
                self._send()
        super().close()

    def _entry(self, record: logging.LogRecord, dropped: int) -> RankLogEntry:
        error = record.exc_info[1] if record.exc_info else None
        return RankLogEntry(
            level=record.levelno,
            logger=_text(record.name, _MAX_NAME_CHARS),
            message=_text(record.getMessage(), _MAX_MESSAGE_CHARS),
            step=self._step(),
            exception=""
            if error is None
            else _text(traceback_text(error)[-_MAX_EXCEPTION_CHARS:], _MAX_EXCEPTION_CHARS),
            fields={
                _text(key, _MAX_NAME_CHARS): _plain(value)
                for key, value in list(extra_fields(record).items())[:_MAX_FIELDS]
            },
            dropped=dropped,
        )

    def _send(self) -> None:
        while self._waiting:
            try:
                self._control.send(self._waiting[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # the driver is gone
                self._waiting.clear()
                return
            self._waiting.popleft()


def send_logs(control: socket.socket, level: str, step: Callable[[], int]) -> RankLogHandler:
    """Send all records of this process to the driver. The caller closes the handler when the rank ends."""
    handler = RankLogHandler(control, step)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("lockstep").setLevel(level.upper())
    return handler


def write_entry(entry: RankLogEntry, rank: int, epoch: int, pid: int) -> None:
    """Driver: write a rank's record into the service's log."""
    fields: dict[str, Any] = {f"{key}_" if key in _TAKEN else key: value for key, value in entry.fields.items()}
    fields |= {"rank": rank, "step": entry.step, "epoch": epoch, "pid": pid}
    if entry.logger != "lockstep.engine":
        fields["logger"] = entry.logger
    if entry.exception:
        fields["exception"] = entry.exception
    if entry.dropped:
        fields["dropped_before"] = entry.dropped
    logger.log(entry.level, "%s", entry.message, extra=fields)


_TAKEN = frozenset(vars(logging.makeLogRecord({}))) | {"asctime", "message"}
"""Names that `logging` refuses as `extra`."""


def _plain(value: object) -> str | int | float | bool | None:
    """The value in a type that can be sent to the driver: numpy's numbers are subclasses of Python's, and an int has
    no bound.
    """
    if value is None or type(value) is bool or type(value) is float:
        return value
    if type(value) is int:
        return value if value.bit_length() < _INT_BITS else f"an integer of {value.bit_length()} bits"
    return _text(str(value), _MAX_FIELD_CHARS)


def _text(text: str, most_chars: int) -> str:
    """The text as UTF-8 can have it, of no other type than `str`."""
    return text[:most_chars].encode(errors="replace").decode()
