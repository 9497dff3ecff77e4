"""The ranks' profiles as a worker gives them: a tar archive with a gzip of each, bounded and checked."""

import gzip
import io
import json
import math
import re
import tarfile
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median
from typing import Any

from lockstep_tools.escaping import harmless
from lockstep_tools.failure import CommandError

MAX_ARCHIVE_BYTES = 256 << 20
MAX_PART_BYTES = 128 << 20
"""Of one rank, unpacked: ranks stop at about 45 MB."""
MAX_UNPACKED_BYTES = 1 << 30
"""Of all ranks."""
_MAX_NS = 1 << 63
_MAX_NAME_CHARS = 200
_MAX_DEVICE_CHARS = 16
_MALFORMED = (
    *(tarfile.TarError, zlib.error, OSError, EOFError, RecursionError, OverflowError),
    *(ValueError, KeyError, TypeError, IndexError, AttributeError),
)
_STEP_MARK = "lockstep step "
"""Before the number of each step in torch's trace."""
_COLLECTIVE = re.compile(r"nccl|one_shot_all_reduce|symm_mem", re.IGNORECASE)
"""Kernels that are collectives."""
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
"""Categories of what the host does to launch work of the device."""
_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


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
    found: dict[int, RankProfile] = {}
    left = MAX_UNPACKED_BYTES
    try:
        # Not compressed, and no sparse files: what a member has to be read cannot be more than the archive has.
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is None or member.issparse():
                    raise ValueError("a member is no plain file")
                data = _unpacked(file.read(), min(left, MAX_PART_BYTES))
                left -= len(data)
                profile = _read(data)
                if profile.rank in found:
                    raise ValueError("two parts are of one rank")
                found[profile.rank] = profile
    except _MALFORMED as error:
        raise CommandError(f"the worker's answer is not a profile of this version: {type(error).__name__}") from None
    if not found:
        raise CommandError("the worker's answer has no rank")
    return [found[rank] for rank in sorted(found)]


def _unpacked(packed: bytes, most: int) -> bytes:
    with gzip.open(io.BytesIO(packed)) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError("too large")
    return data


def _read(data: bytes) -> RankProfile:
    line, _, trace = data.partition(b"\n")
    head, events = json.loads(line), json.loads(trace)["traceEvents"]
    steps = [Step(*map(_natural, each)) for each in head["steps"]]
    collectives = [
        Collective(_name(name), _natural(began), _natural(ended)) for name, began, ended in head["collectives"]
    ]
    events = _on_common_clock(events, steps)
    if str(head["device"]).startswith("cuda"):
        steps, collectives = _of_device(events, steps)
    return RankProfile(
        _natural(head["rank"]),
        _natural(head["pid"]),
        _name(head["device"])[:_MAX_DEVICE_CHARS],
        _name(head["ended_by"]),
        steps,
        collectives,
        events,
    )


def _natural(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < _MAX_NS:
        raise ValueError("no number of a profile")
    return value


def _finite(value: Any) -> float:
    if not math.isfinite(found := float(value)):
        raise ValueError("no number of a profile")
    return found


def _name(value: object) -> str:
    return harmless(str(value)[:_MAX_NAME_CHARS])


def _on_common_clock(events: list[dict[str, Any]], steps: list[Step]) -> list[dict[str, Any]]:
    """Torch's events with `ts` in us on the clock of the steps, which torch's trace has too."""
    began_us = {each.number: each.began / 1000 for each in steps}
    offsets = [
        began_us[number] - _finite(each["ts"])
        for each in events
        if each.get("cat") == "user_annotation" and (number := _step_number(each)) in began_us
    ]
    if steps and not offsets:
        raise ValueError("torch's trace has none of the steps")
    offset = median(offsets) if offsets else 0.0
    return [
        each
        | {"ts": _finite(each["ts"]) + offset, "name": _name(each["name"])}
        | ({"dur": _finite(each["dur"])} if each["ph"] == "X" else {})
        for each in events
        if each.get("ph") == "X" or (each.get("ph") == "M" and each.get("name") == "thread_name")
    ]


def _of_device(events: list[dict[str, Any]], steps: list[Step]) -> tuple[list[Step], list[Collective]]:
    """Steps and collectives as the GPU has run them: the host only launches them, and a step may run after its launch
    has returned. Work has the `correlation` of its launch, all kernels of a graph that of the graph's. Torch marks
    steps on the device too (`gpu_user_annotation`), but not in every version.
    """
    begins = [each.began for each in steps]
    launched: dict[object, Step] = {}
    for each in events:
        if each.get("cat") in _LAUNCHES:
            at, _ = _span(each)
            index = bisect_right(begins, at) - 1
            if index >= 0 and at <= steps[index].ended:
                launched[_correlation(each)] = steps[index]
    spans: dict[Step, tuple[int, int]] = {}
    for each in events:
        if each.get("cat") in _DEVICE_WORK and (step := launched.get(_correlation(each))) is not None:
            began, ended = _span(each)
            first, last = spans.get(step, (began, ended))
            spans[step] = min(first, began), max(last, ended)
    found = [Step(each.number, each.sequences, each.tokens, *spans[each]) for each in steps if each in spans]
    kernels = [each for each in events if each.get("cat") == "kernel" and _COLLECTIVE.search(str(each["name"]))]
    ordered = sorted((Collective(str(each["name"])[:80], *_span(each)) for each in kernels), key=attrgetter("began"))
    return found, ordered


def _correlation(event: dict[str, Any]) -> object:
    """What a launch and its work have in common; an object of its own: nothing."""
    found = (event.get("args") or {}).get("correlation")
    return object() if found is None else found


def _span(event: dict[str, Any]) -> tuple[int, int]:
    began = float(event["ts"])
    return round(began * 1000), round((began + float(event["dur"])) * 1000)


def _step_number(event: dict[str, Any]) -> int:
    """The step that an event of torch's trace is; -1: none."""
    number = str(event["name"]).removeprefix(_STEP_MARK)
    return int(number) if number.isdigit() else -1
