"""Logs and metrics of a service; `setup(service)` is all that a service calls.

Logs are JSON on stderr, one object in each line, or plain text on a terminal. Prompts, outputs and keys are never in
logs or metrics: of an exception a line has the type and the places in the code (see `tracebacks`). The newest lines of
JSON are kept in memory for `lockstep debug`.

Lines of JSON below the level of warnings are written up to 0.1 s late, many at a time, while an event loop runs.
"""

import asyncio
import functools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from types import TracebackType
from typing import Any, TextIO

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from pydantic_core import to_json

from lockstep_common import openmetrics, protobuf_metrics
from lockstep_common.early_lines import kept_lines
from lockstep_common.log_level import LOG_LEVEL
from lockstep_common.tracebacks import traceback_text

REGISTRY = CollectorRegistry()
"""The registry of all metrics of the process; names begin with `lockstep_`."""

OPENMETRICS = "application/openmetrics-text"
_PROTOBUF = "application/vnd.google.protobuf"
_WRITTEN = {
    OPENMETRICS: {"version": "1.0.0"},
    _PROTOBUF: {"proto": "io.prometheus.client.metricfamily", "encoding": "delimited"},
}
"""The parameters of these types, in lower case, as they are written here."""

_FLUSH_AFTER_S = 0.1
_MAX_WAITING_LINES = 512
_RECENT_LINES = 1000
_MAX_RECENT_CHARS = 32 << 10
"""A longer line is kept without its end."""

_PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({})))


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object; `extra=` becomes fields."""

    def __init__(self, service: str, pod: str | None = None) -> None:
        super().__init__()
        self._named = {"service": service} if pod is None else {"service": service, "pod": pod}
        self._heads: dict[tuple[str, str], str] = {}
        """How the lines of `line` begin after their time; there are few different ones."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, Any] = {
            "time": f"{_second(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._named,
            "message": _message(record),
        }
        entry.update(extra_fields(record))
        if record.exc_info and record.exc_info[1] is not None:
            entry["exception"] = traceback_text(record.exc_info[1])
        return to_json(entry, fallback=str).decode()

    def line(self, level: str, message: str, fields: Mapping[str, Any]) -> str:
        """The line that `format` gives for a record of now without an exception; `message` is one of a few."""
        now = time.time()
        second = int(now)
        head = self._heads.get((level, message))
        if head is None:
            named = {"level": level, **self._named, "message": message}
            head = self._heads[level, message] = to_json(named).decode()[1:-1]
        text = to_json(fields, fallback=str).decode()
        separator = "," if len(text) > len("{}") else ""
        return f'{{"time":"{_second(second)}.{int((now - second) * 1000):03d}Z",{head}{separator}{text[1:]}'


class BatchHandler(logging.StreamHandler[TextIO]):
    """Writes lines of JSON, many at a time: a system call for each would cost as much as all else about it."""

    def __init__(self, stream: TextIO, formatter: JsonFormatter) -> None:
        super().__init__(stream)
        self.formatter: JsonFormatter = formatter
        self.recent: deque[str] = deque(maxlen=_RECENT_LINES)
        """The newest lines, the oldest first."""
        self._waiting: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """Will flush; None: nothing waits."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record. `handle` has locked."""
        try:
            self._take(self.formatter.format(record), is_urgent=record.levelno >= logging.WARNING)
        except Exception:
            self.handleError(record)

    def write(self, level: str, message: str, fields: Mapping[str, Any]) -> None:
        """Take a line that is no warning, without making a record of it."""
        line = self.formatter.line(level, message, fields)
        with self.lock or nullcontext():
            self._take(line, is_urgent=False)

    def flush(self) -> None:
        """Write what waits. `logging` does it when the process ends."""
        with self.lock or nullcontext():
            lines, self._waiting, self._loop = self._waiting, [], None
            if lines:
                self.stream.write("\n".join(lines) + "\n")
                self.stream.flush()

    def _take(self, line: str, *, is_urgent: bool) -> None:
        self._waiting.append(line)
        self.recent.append(line if len(line) <= _MAX_RECENT_CHARS else line[:_MAX_RECENT_CHARS])
        if is_urgent or len(self._waiting) >= _MAX_WAITING_LINES:
            self.flush()
        elif self._loop is None or self._loop.is_closed():
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                self.flush()  # in a thread, or before the loop runs
            else:
                self._loop.call_later(_FLUSH_AFTER_S, self.flush)


def log_line(logger: logging.Logger, level: int, message: str, fields: Mapping[str, Any]) -> None:
    """Log what is logged for each request: as `logger.log` with `extra`, in less time without other handlers."""
    if not logger.isEnabledFor(level):
        return
    handlers = logging.root.handlers
    if level < logging.WARNING and len(handlers) == 1 and isinstance(handlers[0], BatchHandler) and not logger.handlers:
        handlers[0].write("info" if level == logging.INFO else logging.getLevelName(level).lower(), message, fields)
    else:
        logger.log(level, message, extra=dict(fields))


class TerminalFormatter(logging.Formatter):
    """Formats records for people: time, service, message, fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of text, followed by the traceback if there is one."""
        fields = "".join(f" {key}={value}" for key, value in extra_fields(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():7} {self._service}: {_message(record)}{fields}"
        error = record.exc_info[1] if record.exc_info else None
        return line if error is None else f"{line}\n{traceback_text(error)}"


@functools.lru_cache(maxsize=4)
def _second(since_1970_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since_1970_s))


def _message(record: logging.LogRecord) -> str:
    """What a record says. asyncio quotes arguments and results of the code that has failed; these are left out."""
    message = record.getMessage()
    if record.name == "asyncio":
        return message.partition("\n")[0].partition("(")[0]
    return message


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`."""
    return {key: value for key, value in vars(record).items() if key not in _PLAIN_FIELDS and key != "message"}


def setup(service: str, *, level: str = "info", pod: str | None = None) -> logging.Logger:
    """Send the process's logs to stderr in the service's name and register the process metrics. An exception that ends
    the process or a thread is a line too.

    Args:
        service: e.g. `router` or `worker w0`.
        level: the lowest level shown: debug, info, warning or error; `LOG_LEVEL` changes it later.
        pod: the name of the pod, which each line then has.

    Returns:
        The logger that the service's code uses.
    """
    _omit_unused_facts()
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TerminalFormatter(service))
    else:
        handler = BatchHandler(sys.stderr, JsonFormatter(service, pod))
    root = logging.getLogger()
    early, root.handlers[:] = kept_lines(), [handler]
    root.setLevel(logging.WARNING)
    logger = logging.getLogger("lockstep")
    LOG_LEVEL.configure(level)
    for record in early:
        if logging.getLogger(record.name).isEnabledFor(record.levelno):
            handler.handle(record)
    sys.excepthook, threading.excepthook = _log_end, _log_end_of_thread
    if not getattr(REGISTRY, "_lockstep_ready", False):
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=REGISTRY)
        REGISTRY._lockstep_ready = True  # type: ignore[attr-defined]
    return logger


def _omit_unused_facts() -> None:
    """Keep `logging` from looking up what no line shows, as its documentation advises: most of a record's time."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # neither the place in the code


def recent_lines() -> list[str]:
    """The newest lines of the log, the oldest first; none if it goes to a terminal."""
    handlers = [handler for handler in logging.root.handlers if isinstance(handler, BatchHandler)]
    # `list` copies at once; other threads append to the deque while it is iterated.
    return [line for handler in handlers for line in list(handler.recent)]


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        logging.getLogger("lockstep").critical("the process ends: it has a defect", exc_info=error)


def _log_end_of_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is not None and not isinstance(given.exc_value, SystemExit):
        name = None if given.thread is None else given.thread.name
        logging.getLogger("lockstep").error("a thread has ended", exc_info=given.exc_value, extra={"thread_name": name})


def exposition_for(accept: str, registry: Collector = REGISTRY, *, has_native: bool = True) -> tuple[bytes, str]:
    """The metrics and their content type: for those who prefer it protobuf, which has native histograms, or
    OpenMetrics, which has exemplars, else Prometheus' text format.

    Args:
        accept: the request's header `Accept`.
        registry: the metrics.
        has_native: whether protobuf is among them.
    """
    if has_native and prefers_protobuf(accept):
        return protobuf_metrics.protobuf_metrics(registry), protobuf_metrics.CONTENT_TYPE
    if _prefers_openmetrics(accept):
        return openmetrics.openmetrics_text(registry), openmetrics.CONTENT_TYPE
    return generate_latest(registry), CONTENT_TYPE_LATEST


def prefers_protobuf(accept: str) -> bool:
    """Whether a header `Accept` puts Prometheus' protobuf format before what else is written here."""
    weights = _weights(accept)
    weight = weights.get(_PROTOBUF, 0.0)
    return weight > 0 and weight >= max(weights.get(OPENMETRICS, 0.0), weights.get("text/plain", 0.0))


def _prefers_openmetrics(accept: str) -> bool:
    """Whether a header `Accept` puts OpenMetrics, in the version that is written here, before other text."""
    weights = _weights(accept)
    return weights.get(OPENMETRICS, 0.0) > 0 and weights[OPENMETRICS] >= weights.get("text/plain", 0.0)


def _weights(accept: str) -> dict[str, float]:
    """How much a header `Accept` wants each type, in the versions that are written here."""
    weights: dict[str, float] = {}
    for each in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in each.split(";"))
        given = dict(part.split("=", 1) for part in parameters if "=" in part)
        if any(given.get(name, meant) != meant for name, meant in _WRITTEN.get(kind, {}).items()):
            continue
        try:
            weights[kind] = max(weights.get(kind, 0.0), float(given.get("q", "1")))
        except ValueError:
            continue
    return weights
