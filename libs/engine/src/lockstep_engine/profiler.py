"""A rank's profile of some steps: torch's trace, and marks of steps and collectives on the clock that all processes of
the host share.

Only what is slow but short runs between steps: starting the profiler, and stopping it, which takes about 10 us for each
event; their number is bounded. The trace is written and compressed in a thread, without Python's lock.
"""

import contextlib
import json
import logging
import os
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler

from lockstep_engine.control import MAX_PROFILE_BYTES, ProfileEnded, StartProfile, StopProfile, encode_control
from lockstep_engine.distributed import Collectives
from lockstep_engine.plan import Plan

logger = logging.getLogger("lockstep.engine")

STEP_MARK = "lockstep step"
"""Names the steps in torch's trace, with their numbers."""

MAX_EVENTS = 60_000
"""About 45 MB of trace, 0.6 s for stopping the profiler, and 200 MB of memory until it is written."""
MAX_RECORD_S = 10.0
_CHUNK_BYTES = 1 << 20
_LEVEL = 3
"""Of compression: level 6 is three times slower for a tenth fewer bytes."""


class RankProfiler:
    """Profiles steps of this rank when the driver orders it.

    The first step after the order is not part of the profile. It warms torch's profiler up and counts the events of a
    step. All ranks read the order between the same two steps, so their profiles begin at the same one.

    Args:
        rank: number of the rank.
        device: its device.
        group: its collectives.
        control: its socket to the driver.
    """

    def __init__(self, rank: int, device: torch.device, group: Collectives, control: socket.socket) -> None:
        self._rank = rank
        self._device = device
        self._group = group
        self._control = control
        self._order: StartProfile | None = None
        self._torch: profiler.profile | None = None
        self._is_trial = False
        self._left = 0
        self._ends_at = 0.0
        self._steps: list[tuple[int, int, int, int, int]] = []
        self._is_writing = False
        """Until just before the answer: whoever has that may start the next profile."""

    def start(self, order: StartProfile) -> None:
        """Profile the steps that follow."""
        if self._order is not None:
            with self._harmless():
                self._abandon()
        if self._is_writing:
            self._answer(order.number, "the profile before this one is still being written; try again")
            return
        self._order, self._is_trial = order, True
        if self._device.type == "cuda":
            # As torch.profiler does for CUDA graphs: they do not work once CUPTI has been torn down and set up again.
            os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
        with self._harmless():
            self._record()

    def stop(self, order: StopProfile) -> None:
        """End the profile with this number, if it runs: the driver waits no longer for more steps."""
        if self._order is None or self._order.number != order.number:
            return
        with self._harmless():
            if self._steps and not self._is_trial:
                self._finish("time")
            else:
                self._abandon()
                self._answer(order.number, "no step ran")

    def step(self, plan: Plan) -> contextlib.AbstractContextManager[None]:
        """Around the launch of a step."""
        return contextlib.nullcontext() if self._order is None else self._recorded(plan)

    @contextlib.contextmanager
    def _recorded(self, plan: Plan) -> Iterator[None]:
        began_ns = time.perf_counter_ns()
        with profiler.record_function(f"{STEP_MARK} {plan.step}"):
            yield
        lengths: np.ndarray[Any, Any] = plan.lengths
        self._steps.append((plan.step, len(lengths), int(lengths.sum()), began_ns, time.perf_counter_ns()))
        with self._harmless():
            self._after_step()

    def _after_step(self) -> None:
        if self._is_trial:
            self._begin()
            return
        self._left -= 1
        if self._left == 0:
            self._finish("steps")
        elif time.monotonic() > self._ends_at:
            self._finish("time")

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """What fails here ends the profile, and not the rank with all its streams."""
        order = self._order
        assert order is not None
        try:
            yield
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            logger.warning("the profile has failed", exc_info=error)
            self._order, self._torch, self._steps, self._group.marks = None, None, [], None
            self._answer(order.number, f"it cannot be recorded: {type(error).__name__}")

    def _begin(self) -> None:
        """The trial is over: record as many steps as wanted, or as there is room for."""
        assert self._order is not None
        assert self._torch is not None
        self._torch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        results = self._torch.kineto_results
        events = 0 if results is None else len(results.events())
        self._left = min(self._order.steps, max(1, MAX_EVENTS // max(1, events)))
        self._is_trial = False
        self._ends_at = time.monotonic() + MAX_RECORD_S
        self._record()

    def _record(self) -> None:
        self._steps = []
        self._group.marks = []
        # Neither shapes nor stacks: with shapes come values of scalar arguments. Without Kineto a GPU's work is timed
        # by events of torch's, and the trace has none of its kernels.
        on_gpu = self._device.type == "cuda"
        self._torch = profiler.profile(use_device="cuda" if on_gpu else None, use_kineto=on_gpu)
        self._torch.__enter__()  # type: ignore[no-untyped-call]

    def _stop_recording(self) -> list[tuple[str, int, int]]:
        assert self._torch is not None
        marks, self._group.marks = self._group.marks or [], None
        self._torch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return marks

    def _abandon(self) -> None:
        self._stop_recording()
        self._order, self._torch, self._steps = None, None, []

    def _finish(self, reason: str) -> None:
        """Stop, and let a thread write the profile."""
        order, recorded = self._order, self._torch
        assert order is not None
        assert recorded is not None
        marks = self._stop_recording()
        head = {
            "rank": self._rank,
            "pid": os.getpid(),
            "device": str(self._device),
            "asked_steps": order.steps,
            "ended_by": "events" if reason == "steps" and len(self._steps) < order.steps else reason,
            "steps": self._steps,
            "collectives": marks,
        }
        self._order, self._torch, self._steps = None, None, []
        results = recorded.kineto_results
        self._is_writing = True
        try:
            threading.Thread(
                target=self._write, args=(order.number, head, results), name="profile", daemon=True
            ).start()
        except RuntimeError:  # there are too many threads
            self._is_writing = False
            raise

    def _write(self, number: int, head: dict[str, Any], results: Any) -> None:
        try:
            profile = _compressed(head, results)
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            logger.warning("the profile cannot be written", exc_info=error)
            profile, failure = None, f"its trace cannot be written: {type(error).__name__}"
        else:
            failure = ""
        finally:
            self._is_writing = False
        try:
            self._answer(number, failure, profile)
        finally:
            if profile is not None:
                os.close(profile)

    def _answer(self, number: int, error: str, profile: int | None = None) -> None:
        message = encode_control(ProfileEnded(number, error))
        with contextlib.suppress(OSError):  # the driver is gone, or stuck: it does not wait for this forever
            if profile is None:
                self._control.send(message)
            else:
                socket.send_fds(self._control, [message], [profile])


def _compressed(head: dict[str, Any], results: Any) -> int:
    """A file in memory with a gzip of one line with `head`, then torch's trace.

    Raises:
        OSError, ValueError: it cannot be written, or is too large.
    """
    trace = os.memfd_create("lockstep-trace")
    try:
        _save(results, trace)
        return _gzip(json.dumps(head, separators=(",", ":")).encode() + b"\n", trace)
    finally:
        os.close(trace)


def _save(results: Any, trace: int) -> None:
    """Write torch's trace into a file in memory: a container's root may be read-only, and its /tmp small. Kineto wants
    a path. It writes to the path with ".tmp" after it, and renames that.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-profile-") as folder:
        path = Path(folder, "trace.json")
        for each in (path, path.with_name("trace.json.tmp")):
            each.symlink_to(f"/proc/self/fd/{trace}")
        results.save(str(path))
    if not os.fstat(trace).st_size:
        raise ValueError("torch has written no trace")


def _gzip(head: bytes, trace: int) -> int:
    packer = zlib.compressobj(_LEVEL, wbits=31)
    profile = os.memfd_create("lockstep-profile", os.MFD_CLOEXEC)
    try:
        size = os.write(profile, packer.compress(head))
        offset = 0
        while chunk := os.pread(trace, _CHUNK_BYTES, offset):
            offset += len(chunk)
            size += os.write(profile, packer.compress(chunk))
            if size > MAX_PROFILE_BYTES:
                raise ValueError(f"more than {MAX_PROFILE_BYTES >> 20} MiB")
        os.write(profile, packer.flush())
    except BaseException:
        os.close(profile)
        raise
    return profile
