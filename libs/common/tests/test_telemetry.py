"""Lines of JSON are written in batches, and none is lost or late when it matters."""

import asyncio
import io
import json
import logging
import subprocess
import sys

import pytest
from lockstep_common import telemetry
from lockstep_common.telemetry import BatchHandler, JsonFormatter, log_line

FIELDS = {"status": 200, "duration_ms": 1.5, "endpoint": "/v1/completions", "resumed": False, "name_of": "naïve"}


@pytest.fixture
def logged(monkeypatch):
    """Makes a stream, and a logger whose lines go there and, once this is called, nowhere else."""

    def make():
        stream = io.StringIO()
        monkeypatch.setattr(logging.root, "handlers", [BatchHandler(stream, JsonFormatter("router"))])
        logger = logging.Logger("lockstep.test")
        logger.parent = logging.root
        logger.setLevel(logging.INFO)
        return stream, logger

    return make


@pytest.fixture
def records(monkeypatch):
    """The lines for which a record is made."""
    made, formatted = [], JsonFormatter.format

    def noting(self, record):
        made.append(record.message if hasattr(record, "message") else record.msg)
        return formatted(self, record)

    monkeypatch.setattr(JsonFormatter, "format", noting)
    return made


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_that_of_a_record(logged, records, monkeypatch):
    stream, logger = logged()
    monkeypatch.setattr(telemetry.time, "time", lambda: 1_800_000_000.25)
    log_line(logger, logging.INFO, "request", FIELDS)
    logger.info("request", extra=FIELDS)
    quick, usual = stream.getvalue().splitlines()
    assert quick == usual
    assert records == ["request"]
    assert lines(stream)[0]["time"] == "2027-01-15T08:00:00.250Z"


async def test_lines_of_an_event_loop_wait_for_others(logged):
    stream, logger = logged()
    for index in range(3):
        log_line(logger, logging.INFO, "request", {"index": index})
    logger.info("another")
    assert not stream.getvalue()
    async with asyncio.timeout(30):
        while not stream.getvalue():
            await asyncio.sleep(0.01)
    assert [line.get("index") for line in lines(stream)] == [0, 1, 2, None]


async def test_a_warning_is_written_at_once_and_in_order(logged):
    stream, logger = logged()
    log_line(logger, logging.INFO, "request", FIELDS)
    logger.warning("trouble")
    assert [line["message"] for line in lines(stream)] == ["request", "trouble"]


async def test_few_lines_wait(logged):
    stream, logger = logged()
    for _ in range(2000):
        log_line(logger, logging.INFO, "request", FIELDS)
    assert 2000 - len(lines(stream)) < 512


def test_lines_outside_of_an_event_loop_are_written_at_once(logged):
    stream, logger = logged()
    log_line(logger, logging.INFO, "request", FIELDS)
    assert len(lines(stream)) == 1


def test_levels_count_and_other_listeners_hear(logged, records):
    stream, logger = logged()
    log_line(logger, logging.DEBUG, "quiet", {})
    assert not stream.getvalue()
    logging.root.handlers.append(logging.NullHandler())
    log_line(logger, logging.INFO, "request", FIELDS)
    assert records == ["request"]
    assert len(lines(stream)) == 1


def test_recent_lines_are_read_while_others_are_written(monkeypatch):
    handler = BatchHandler(io.StringIO(), JsonFormatter("s"))
    handler.recent.extend("abc")
    monkeypatch.setattr(logging.root, "handlers", [handler])

    def write_between_two_instructions(frame, event, _):
        if frame.f_code.co_filename == telemetry.__file__:  # a comprehension may have a frame of its own
            frame.f_trace_opcodes = True
        if event == "opcode":
            handler.recent.append("d")
        return write_between_two_instructions

    before = sys.gettrace()
    sys.settrace(write_between_two_instructions)
    try:
        lines = telemetry.recent_lines()
    finally:
        sys.settrace(before)
    assert lines[:3] == ["a", "b", "c"]
    assert "d" in handler.recent


def test_what_waits_is_written_when_the_process_ends():
    script = """
import asyncio, logging
from lockstep_common import telemetry
logger = telemetry.setup("router")
async def main():
    telemetry.log_line(logger, logging.INFO, "request", {"index": 1})
    logger.info("last")
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert [json.loads(line)["message"] for line in ended.stderr.splitlines()] == ["request", "last"]
