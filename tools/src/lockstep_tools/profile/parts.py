"""The ranks' profiles as a worker gives them: a tar archive with a gzip of each, bounded and checked."""

import gzip
import io
import json
import re
import tarfile
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from typing import Any

from lockstep_tools.failure import CommandError

MAX_ARCHIVE_BYTES = 256 << 20
_MAX_PART_BYTES = 512 << 20
"""Of one rank, unpacked."""
_STEP_MARK = "lockstep step "
"""Before the number of each step in torch's trace."""
_COLLECTIVE = re.compile(r"nccl|one_shot_all_reduce|symm_mem", re.IGNORECASE)
"""Kernels that are collectives."""


@dataclass(frozen=True)
class Step:
    """A step of a rank. Times are in ns, on the clock that the processes of a host share."""

    number: int
    sequences: int
    tokens: int
    began: int
    ended: int


@dataclass(frozen=True)
class Collective:
    """A collective of a rank: from its arrival until the parts of all are added up. The k-th is the same on each."""

    name: str
    began: int
    ended: int


@dataclass(frozen=True)
class RankProfile:
    """What a rank has recorded."""

    rank: int
    pid: int
    device: str
    ended_by: str
    """steps, time, or events: so many as there was room for."""
    steps: list[Step]
    collectives: list[Collective]
    events: list[dict[str, Any]] = field(default_factory=list)
    """Torch's, with `ts` in us on the clock of the steps."""


def read_parts(archive: bytes) -> list[RankProfile]:
    """The profiles in a worker's answer, in the order of ranks.

    Raises:
        CommandError: it is not such an archive.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            files = [tar.extractfile(member) for member in tar.getmembers()]
            found = [_read(file.read()) for file in files if file is not None]
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CommandError(f"the worker's answer is not a profile of this version: {type(error).__name__}") from None
    if not found:
        raise CommandError("the worker's answer has no rank")
    return sorted(found, key=lambda each: each.rank)


def _read(packed: bytes) -> RankProfile:
    with gzip.open(io.BytesIO(packed)) as file:
        data = file.read(_MAX_PART_BYTES + 1)
    if len(data) > _MAX_PART_BYTES:
        raise ValueError("too large")
    line, _, trace = data.partition(b"\n")
    head, events = json.loads(line), json.loads(trace)["traceEvents"]
    steps = [Step(*each) for each in head["steps"]]
    collectives = [Collective(*each) for each in head["collectives"]]
    events = _on_common_clock(events, steps)
    if str(head["device"]).startswith("cuda"):
        steps, collectives = _of_device(events, steps)
    return RankProfile(
        int(head["rank"]), int(head["pid"]), str(head["device"]), str(head["ended_by"]), steps, collectives, events
    )


def _on_common_clock(events: list[dict[str, Any]], steps: list[Step]) -> list[dict[str, Any]]:
    """Torch's events with `ts` in us on the clock of the steps, which torch's trace has too."""
    began_us = {each.number: each.began / 1000 for each in steps}
    offsets = [
        began_us[number] - each["ts"]
        for each in events
        if each.get("cat") == "user_annotation" and (number := _step_number(each)) in began_us
    ]
    if steps and not offsets:
        raise ValueError("torch's trace has none of the steps")
    offset = median(offsets) if offsets else 0.0
    return [
        each | {"ts": float(each["ts"]) + offset}
        for each in events
        if each.get("ph") == "X" or (each.get("ph") == "M" and each.get("name") == "thread_name")
    ]


def _of_device(events: list[dict[str, Any]], steps: list[Step]) -> tuple[list[Step], list[Collective]]:
    """Steps and collectives as the GPU has run them: the host only launches them."""
    spans = {_step_number(each): _span(each) for each in events if each.get("cat") == "gpu_user_annotation"}
    found = [
        Step(each.number, each.sequences, each.tokens, *spans[each.number]) for each in steps if each.number in spans
    ]
    kernels = [each for each in events if each.get("cat") == "kernel" and _COLLECTIVE.search(str(each["name"]))]
    ordered = sorted((Collective(str(each["name"])[:80], *_span(each)) for each in kernels), key=attrgetter("began"))
    return found, ordered


def _span(event: dict[str, Any]) -> tuple[int, int]:
    began = float(event["ts"])
    return round(began * 1000), round((began + float(event["dur"])) * 1000)


def _step_number(event: dict[str, Any]) -> int:
    """The step that an event of torch's trace is; -1: none."""
    number = str(event["name"]).removeprefix(_STEP_MARK)
    return int(number) if number.isdigit() else -1
