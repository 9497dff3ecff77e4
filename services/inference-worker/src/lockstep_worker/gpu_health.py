"""Watches the health of the ranks' GPUs through NVML, in a thread of the driver's process.

NVML reports what a rank cannot: errors of its GPU's memory and links, heat, and what the driver has reported. It needs
no CUDA context. Nothing here can fail the worker: what cannot be read has no metric, and the log says so once.
"""

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from lockstep_worker import gpu_metrics as metrics
from lockstep_worker.growth import Growth

logger = logging.getLogger("lockstep.worker")

INTERVAL_S = 10.0
"""Between two readings. One takes some milliseconds a GPU."""
RESUBSCRIBE_S = 10.0
"""From a failed wait for XID errors to the next subscription. It doubles until a wait succeeds."""
_MAX_RESUBSCRIBE_S = 600.0
_EVENT_WAIT_MS = 500
_END_S = 2.0
_MAX_LINKS = 36
_MILLI = 1000

_THROTTLING = {
    "thermal": ("SwThermalSlowdown", "HwThermalSlowdown"),
    "power": ("SwPowerCap", "HwPowerBrakeSlowdown"),
    "hardware": ("HwSlowdown",),
}
"""The reasons of a lower clock, by the ends of NVML's names."""
_LINK_ERRORS = ("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA")


class _UnusableError(Exception):
    """A GPU cannot be watched; says why."""


@contextlib.contextmanager
def watching(ranks: int, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Watch the GPUs of this many ranks. A thread that hangs in the driver is left behind."""
    end = Event()
    thread = Thread(target=_watch, args=(ranks, interval_s, end), name="gpu health", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(_END_S)


def _watch(ranks: int, interval_s: float, end: Event) -> None:
    for rank in range(ranks):
        metrics.AVAILABLE.labels(str(rank)).set(0)
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # no library, no driver, another version of it, no permission
        logger.warning("the health of GPUs is not known", extra={"problem": _said(error)})
        return
    try:
        _Watch(nvml, ranks, os.environ).run(interval_s, end)
    except Exception:
        logger.exception("the health of GPUs is not known any more")
        for rank in range(ranks):
            metrics.AVAILABLE.labels(str(rank)).set(0)
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def visible_devices(given: str | None, count: int) -> list[str]:
    """What names the GPU of each CUDA device, an index or a UUID, as `CUDA_VISIBLE_DEVICES` says; CUDA ignores what
    follows an entry that it does not know.

    Args:
        given: the variable; None: it is not set.
        count: all GPUs of the machine.
    """
    if given is None:
        return [str(index) for index in range(count)]
    found: list[str] = []
    for entry in (part.strip() for part in given.split(",")):
        is_known = entry.startswith(("GPU-", "MIG-")) or (entry.isdecimal() and int(entry) < count)
        if not is_known or entry in found:
            break
        found.append(entry)
    return found


@dataclass
class _Gpu:
    """The GPU of a rank."""

    rank: str
    handle: Any
    """The GPU, or the MIG instance."""
    device: Any
    """The GPU: an instance has no heat, power and errors of its own."""
    uuid: str
    """Of the GPU."""
    growths: dict[str, Growth] = field(default_factory=dict)
    is_well: bool = False

    def grow(self, name: str, counter: Any, count: float) -> None:
        """Let a counter grow as a count of the driver does. What was counted before the worker is not its."""
        growth = self.growths.get(name)
        if growth is None:
            growth = self.growths[name] = Growth(counter.inc)
            growth.begin(count)
        growth.observe(count)


class _Watch:
    def __init__(self, nvml: Any, ranks: int, environment: Mapping[str, str]) -> None:
        self._nvml = nvml
        count = nvml.nvmlDeviceGetCount()
        names = visible_devices(environment.get("CUDA_VISIBLE_DEVICES"), count)
        self._gpus: list[_Gpu] = []
        for rank in range(ranks):
            try:
                if rank >= len(names):
                    raise _UnusableError("CUDA_VISIBLE_DEVICES names no GPU for it")
                self._gpus.append(self._find(str(rank), names[rank], count))
            except (nvml.NVMLError, _UnusableError) as error:
                logger.warning("the health of a GPU is not known", extra={"rank": rank, "problem": _said(error)})
        self._events: Any = None
        """The set of subscriptions to critical errors; None: there is none."""
        self._unwatched: list[_Gpu] = []
        """GPUs with events whose subscription was lost."""
        self._watched = self._subscribe(list({gpu.uuid: gpu for gpu in self._gpus}.values()))
        self._pause_s = RESUBSCRIBE_S
        self._subscribe_at = 0.0
        self._has_failed = False

    def run(self, interval_s: float, end: Event) -> None:
        """Read all until the end."""
        while not end.is_set():
            for gpu in self._gpus:
                self._read(gpu)
            next_at = time.monotonic() + interval_s
            while (left_s := next_at - time.monotonic()) > 0 and not end.is_set():
                self._resubscribe()
                if self._watched:
                    self._take_event(min(_EVENT_WAIT_MS, round(left_s * _MILLI) + 1))
                else:
                    end.wait(min(left_s, _EVENT_WAIT_MS / _MILLI) if self._unwatched else left_s)

    def _find(self, rank: str, name: str, count: int) -> _Gpu:
        nvml = self._nvml
        if name.isdecimal():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
        elif name.startswith("MIG-"):
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        else:
            # CUDA takes the beginning of a UUID, too.
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            alike = [each for each in handles if str(nvml.nvmlDeviceGetUUID(each)).startswith(name)]
            if len(alike) != 1:
                raise _UnusableError(f"{len(alike)} GPUs have a UUID that begins with {name}")
            (handle,) = alike
        device = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if name.startswith("MIG-") else handle
        return _Gpu(rank, handle, device, str(nvml.nvmlDeviceGetUUID(device)))

    def _subscribe(self, gpus: Sequence[_Gpu]) -> list[_Gpu]:
        """Subscribe to critical errors of GPUs; returns those that have such events."""
        nvml = self._nvml
        subscribed = []
        for gpu in gpus:
            try:
                self._events = nvml.nvmlEventSetCreate() if self._events is None else self._events
                nvml.nvmlDeviceRegisterEvents(gpu.device, nvml.nvmlEventTypeXidCriticalError, self._events)
                subscribed.append(gpu)
            except nvml.NVMLError as error:
                if gpu not in self._unwatched:  # the loss has been logged
                    problem = {"rank": int(gpu.rank), "problem": _said(error)}
                    logger.warning("XID errors of a GPU are not known", extra=problem)
        return subscribed

    def _resubscribe(self) -> None:
        """When it is time, subscribe again to the GPUs whose subscription was lost and that answer now."""
        if not self._unwatched or time.monotonic() < self._subscribe_at:
            return
        again = self._subscribe([gpu for gpu in self._unwatched if self._uuid(gpu.device)])
        self._watched += again
        self._unwatched = [gpu for gpu in self._unwatched if gpu not in again]
        if self._unwatched:
            self._plan_resubscription()

    def _plan_resubscription(self) -> None:
        self._subscribe_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_RESUBSCRIBE_S)

    def _lose_events(self, error: Exception) -> None:
        """A wait has failed, for all GPUs of the set: one that is lost may be the cause. Begin with a new set later."""
        nvml = self._nvml
        if not self._has_failed:
            logger.warning("XID errors of GPUs are not known", extra={"problem": _said(error)})
        self._has_failed = True
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlEventSetFree(self._events)
        self._events = None
        self._unwatched += self._watched
        self._watched = []
        self._plan_resubscription()

    def _note_success(self) -> None:
        """A wait has ended as it should."""
        if self._has_failed:
            logger.warning("XID errors of GPUs are known again", extra={"gpus": len(self._watched)})
        self._has_failed = False
        if not self._unwatched:
            self._pause_s = RESUBSCRIBE_S

    def _take_event(self, wait_ms: int) -> None:
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, wait_ms)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                self._lose_events(error)
            else:
                self._note_success()
            return
        self._note_success()
        uuid, xid = self._uuid(event.device), int(event.eventData)
        for gpu in self._gpus:
            # A GPU that has fallen off the bus, which is an event too, does not even report its name any more.
            if gpu.uuid == uuid or (not uuid and not self._uuid(gpu.device)):
                metrics.XID_ERRORS.labels(gpu.rank, str(xid)).inc()
                logger.error("the driver has reported an error of a GPU", extra={"rank": int(gpu.rank), "xid": xid})

    def _uuid(self, handle: Any) -> str:
        """A GPU's name; empty if it does not answer."""
        try:
            return str(self._nvml.nvmlDeviceGetUUID(handle))
        except self._nvml.NVMLError:
            return ""

    def _read(self, gpu: _Gpu) -> None:
        """Set all metrics of a GPU. What this kind of GPU does not report has none."""
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle)
        except nvml.NVMLError as error:
            if gpu.is_well:
                logger.warning("a GPU does not answer", extra={"rank": int(gpu.rank), "problem": _said(error)})
            gpu.is_well = False
            metrics.AVAILABLE.labels(gpu.rank).set(0)
            return
        metrics.MEMORY.labels(gpu.rank, "used").set(memory.used)
        metrics.MEMORY.labels(gpu.rank, "total").set(memory.total)
        readings: Sequence[Callable[[_Gpu], None]] = (
            self._read_utilization,
            self._read_power,
            self._read_temperature,
            self._read_throttling,
            self._read_ecc,
            self._read_links,
        )
        for reading in readings:
            with contextlib.suppress(nvml.NVMLError):
                reading(gpu)
        gpu.is_well = True
        metrics.AVAILABLE.labels(gpu.rank).set(1)

    def _read_utilization(self, gpu: _Gpu) -> None:
        # Asked first: a metric without a value is not shown.
        percent = self._nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu
        metrics.UTILIZATION.labels(gpu.rank).set(percent / 100)

    def _read_power(self, gpu: _Gpu) -> None:
        milliwatts = self._nvml.nvmlDeviceGetPowerUsage(gpu.device)
        metrics.POWER.labels(gpu.rank).set(milliwatts / _MILLI)

    def _read_temperature(self, gpu: _Gpu) -> None:
        nvml = self._nvml
        celsius = nvml.nvmlDeviceGetTemperature(gpu.device, nvml.NVML_TEMPERATURE_GPU)
        metrics.TEMPERATURE.labels(gpu.rank).set(celsius)

    def _read_throttling(self, gpu: _Gpu) -> None:
        nvml = self._nvml
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu.device)
        for name, ends in _THROTTLING.items():
            mask = sum(getattr(nvml, f"nvmlClocksEventReason{end}") for end in ends)
            metrics.THROTTLED.labels(gpu.rank, name).set(bool(reasons & mask))

    def _read_ecc(self, gpu: _Gpu) -> None:
        nvml = self._nvml
        for kind in ("corrected", "uncorrected"):
            number = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}")
            count = nvml.nvmlDeviceGetTotalEccErrors(gpu.device, number, nvml.NVML_VOLATILE_ECC)
            gpu.grow(kind, metrics.ECC_ERRORS.labels(gpu.rank, kind), count)

    def _read_links(self, gpu: _Gpu) -> None:
        nvml = self._nvml
        states: list[bool] = []
        for link in range(_MAX_LINKS):
            try:
                is_up = bool(nvml.nvmlDeviceGetNvLinkState(gpu.device, link))
            except nvml.NVMLError:
                continue  # the GPU has no such link
            states.append(is_up)
            for kind in _LINK_ERRORS if is_up else ():
                with contextlib.suppress(nvml.NVMLError):
                    number = getattr(nvml, f"NVML_NVLINK_ERROR_DL_{kind}")
                    count = nvml.nvmlDeviceGetNvLinkErrorCounter(gpu.device, link, number)
                    # Each count by itself: their sum falls when a link goes down, and that is no new beginning.
                    gpu.grow(f"link {link} {kind}", metrics.NVLINK_ERRORS.labels(gpu.rank), count)
        metrics.NVLINKS.labels(gpu.rank, "up").set(sum(states))
        metrics.NVLINKS.labels(gpu.rank, "down").set(len(states) - sum(states))
        if states:
            metrics.NVLINK_ERRORS.labels(gpu.rank)  # a metric without errors is shown too


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
