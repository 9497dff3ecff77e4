"""Logs and metrics of a service; `setup(service)` is all that a service calls.

Logs are JSON on stderr, one object in each line, or plain text on a terminal. Prompts, outputs and keys are never in
logs or metrics.
"""

import functools
import logging
import sys
import time
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic_core import to_json

REGISTRY = CollectorRegistry()
"""The registry of all metrics of the process; names begin with `lockstep_`."""

METRICS_CONTENT_TYPE = CONTENT_TYPE_LATEST

_PLAIN_FIELDS = frozenset(vars(logging.makeLogRecord({})))


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object; `extra=` becomes fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        entry: dict[str, Any] = {
            "time": f"{_second(int(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "message": record.getMessage(),
        }
        entry.update(_extra(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return to_json(entry, fallback=str).decode()


class TerminalFormatter(logging.Formatter):
    """Formats records for people: time, service, message, fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of text, followed by the traceback if there is one."""
        fields = "".join(f" {key}={value}" for key, value in _extra(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():7} {self._service}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


@functools.lru_cache(maxsize=4)
def _second(since_1970_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since_1970_s))


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _PLAIN_FIELDS and key != "message"}


def setup(service: str, *, level: str = "info") -> logging.Logger:
    """Send the process's logs to stderr in the service's name and register the process metrics.

    Args:
        service: e.g. `router` or `worker w0`.
        level: the lowest level shown: debug, info, warning or error.

    Returns:
        The logger that the service's code uses.
    """
    _omit_unused_facts()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter(service) if sys.stderr.isatty() else JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logger = logging.getLogger("lockstep")
    logger.setLevel(level.upper())
    if not getattr(REGISTRY, "_lockstep_ready", False):
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=REGISTRY)
        REGISTRY._lockstep_ready = True  # type: ignore[attr-defined]
    return logger


def _omit_unused_facts() -> None:
    """Tell `logging` not to find out what no line shows, as its documentation advises: most of a record's time."""
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # neither the place in the code


def exposition() -> bytes:
    """The registry in Prometheus' text format."""
    return generate_latest(REGISTRY)
