"""The queue between the services' work and the exporter: bounded, and emptied by a thread of its own.

Spans are encoded. Putting one never waits. Nothing here needs OpenTelemetry's SDK.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from lockstep_common.tracing import metrics

logger = logging.getLogger("lockstep.tracing")

MAX_SPANS = 8192
"""Spans that wait for the exporter."""
BATCH_SPANS = 1024
"""About 0.5 MB. However few it has, an export takes as long as to encode some hundred."""
_PAUSE_S = 0.5
"""After an export that has failed."""


class SpanQueue:
    """Spans that wait for the exporter.

    Args:
        export: exports a batch in the queue's thread; whether it succeeded. It may take as long as it wants.
        interrupt: called when the queue closes and its time is over: `export` has to return soon.
        fill: called before an export and when the queue closes: puts what there is.
        every_s: longest time that a span waits for others.
        max_spans: most spans that wait.
    """

    def __init__(
        self,
        export: Callable[[Sequence[bytes]], bool],
        interrupt: Callable[[], None] = lambda: None,
        fill: Callable[[], None] = lambda: None,
        every_s: float = 5.0,
        max_spans: int = MAX_SPANS,
    ) -> None:
        self._export = export
        self._interrupt = interrupt
        self._fill = fill
        self._every_s = every_s
        self._max_spans = max_spans
        self._waiting: deque[bytes] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._is_away = False
        self._exported, self._failed, self._full = (
            metrics.SPANS.labels(outcome) for outcome in ("exported", "failed", "full")
        )
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, spans: list[bytes]) -> None:
        """Add spans; those for which there is no room are counted and lost."""
        waiting = self._waiting
        room = self._max_spans - len(waiting)
        if len(spans) > room:
            self._full.inc(len(spans) - max(room, 0))
            spans = spans[: max(room, 0)]
        waiting.extend(spans)
        if len(waiting) >= BATCH_SPANS and not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Export what waits, no longer than this; the rest is counted as lost."""
        self._fill()
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._interrupt()
        self._failed.inc(len(self._waiting))
        self._waiting.clear()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._every_s)
            self._wake.clear()
            self._fill()
            self._empty()
        self._empty()  # what `close` has added since

    def _empty(self) -> None:
        waiting = self._waiting
        while waiting:
            batch: list[bytes] = []
            try:
                while len(batch) < BATCH_SPANS:
                    batch.append(waiting.popleft())
            except IndexError:  # these are all; `close` may have cleared it
                pass
            if not batch:
                return
            try:
                is_done = self._export(batch)
            except Exception as error:
                is_done = False
                logger.debug("export of traces raised", extra={"error": type(error).__name__})
            (self._exported if is_done else self._failed).inc(len(batch))
            self._note(is_done=is_done)
            if not is_done and not self._is_closing:
                time.sleep(_PAUSE_S)  # an exporter that fails at once is not called without a pause

    def _note(self, *, is_done: bool) -> None:
        if is_done == self._is_away:
            self._is_away = not is_done
            if is_done:
                logger.info("traces are exported again")
            else:
                logger.warning("traces cannot be exported: they are dropped and counted")
