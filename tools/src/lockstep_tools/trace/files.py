"""Spans in a file: lines of OTLP in JSON, as a collector writes them, or JSON downloaded from a Jaeger."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep_common.tracing import names

from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.trace.otlp import of_otlp
from lockstep_tools.trace.sources import MALFORMED, is_trace_id
from lockstep_tools.trace.spans import Span, of_jaeger

_MAX_FILE_BYTES = 1 << 30
_MAX_TEXT_BYTES = 64 << 20
"""Of a line, which is a whole export, or of an indented download from a Jaeger."""
_MAX_SPANS = 4096


def from_file(path: Path, wanted: str) -> list[Span]:
    """The spans of a trace, or of all traces of the id of a request or a stream.

    The file is read twice: such an id is in some spans of its trace only.

    Raises:
        CommandError: the file cannot be read, or is of neither form.
    """
    traces = {wanted} if is_trace_id(wanted) else set()
    for span in _spans(path):
        if names.is_called(span.attributes, wanted):
            traces.add(span.trace_id)
    found: dict[tuple[str, str], Span] = {}
    for span in _spans(path) if traces else ():
        if span.trace_id in traces and len(found) < _MAX_SPANS:
            found.setdefault((span.trace_id, span.span_id), span)
    return list(found.values())


def _spans(path: Path) -> Iterator[Span]:
    try:
        for number, text in _texts(path):
            yield from _parsed(path, number, text)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """The JSON texts of a file, with the numbers of their lines: each line, or the whole file if it is indented."""
    if not path.is_file():
        raise _unusable(path, "is not a file" if path.exists() else "there is no such file")
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise _unusable(path, f"is larger than {_MAX_FILE_BYTES >> 30} GiB")
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_TEXT_BYTES + 1):
            number += 1
            if number == 1 and line.strip() in (b"{", b"[") and size <= _MAX_TEXT_BYTES:
                yield 1, line + file.read()
                return
            if len(line) > _MAX_TEXT_BYTES:
                raise _unusable(path, f"line {number} is longer than {_MAX_TEXT_BYTES >> 20} MiB")
            if line.strip():
                yield number, line


def _parsed(path: Path, number: int, text: bytes) -> Sequence[Span]:
    try:
        body: Any = json.loads(text)
    except (ValueError, RecursionError):
        if number > 1 and not text.endswith(b"\n"):
            return ()  # the collector is writing it
        raise _unusable(path, f"line {number} is no JSON") from None
    try:
        if "resourceSpans" in body:
            return of_otlp(body)
        if "data" in body:
            return of_jaeger(body)
    except MALFORMED as error:
        reason = f" ({error.args[0]!r} is missing)" if isinstance(error, KeyError) and error.args else ""
        raise _unusable(path, f"line {number} has a span that is not as OTLP or Jaeger write it{reason}") from None
    if isinstance(body, dict) and ("resourceMetrics" in body or "resourceLogs" in body):
        return ()  # a file may have all signals
    raise _unusable(path, f"line {number} has neither `resourceSpans` (OTLP) nor `data` (Jaeger)")


def _unusable(path: Path, reason: str) -> CommandError:
    return CommandError(f"--file {os.fspath(path)}: {reason}", UNUSABLE)
