"""A scripted NVML, in the place of the module `pynvml`."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


NOT_SUPPORTED, TIMEOUT, LOST = 3, 10, 15


class Nvml:
    """Two GPUs; the second one has a MIG instance, no ECC and no links. A handle is the GPU's name."""

    NVMLError = NVMLError
    NVML_ERROR_TIMEOUT = TIMEOUT
    NVML_TEMPERATURE_GPU = NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
    NVML_NVLINK_ERROR_DL_CRC_FLIT, NVML_NVLINK_ERROR_DL_CRC_DATA = 2, 3
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksEventReasonSwPowerCap = 0x04
    nvmlClocksEventReasonHwSlowdown = 0x08
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        self.ecc = {"GPU-a": [5, 0]}
        self.reasons = 0x40
        self.lost: set[str] = set()
        self.links_up = [True, True, True, False]
        self.link_errors = 0
        self.events: list[tuple[str, int]] = []
        self.ends_waits: set[str] = set()
        """Lost GPUs that make each wait for events fail that waits for theirs, too."""
        self.is_open = False

    def nvmlInit(self):
        self.is_open = True

    def nvmlShutdown(self):
        self.is_open = False

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return ("GPU-a", "GPU-b")[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "MIG-b1":
            raise NVMLError(6)
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return "GPU-b"

    def nvmlDeviceGetUUID(self, handle):
        if handle in self.lost:
            raise NVMLError(LOST)
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle in self.lost:
            raise NVMLError(LOST)
        return SimpleNamespace(used=1 << 30, total=(10 if handle.startswith("MIG") else 80) << 30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle.startswith("MIG"):
            raise NVMLError(NOT_SUPPORTED)
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 350_500

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.reasons

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        if handle not in self.ecc:
            raise NVMLError(NOT_SUPPORTED)
        return self.ecc[handle][kind]

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if handle != "GPU-a" or link >= 4:
            raise NVMLError(NOT_SUPPORTED)
        return self.links_up[link]

    def nvmlDeviceGetNvLinkErrorCounter(self, handle, link, counter):
        return self.link_errors

    def nvmlEventSetCreate(self):
        return set()

    def nvmlEventSetFree(self, events):
        events.clear()

    def nvmlDeviceRegisterEvents(self, handle, types, events):
        if handle in self.lost:
            raise NVMLError(LOST)
        events.add(handle)

    def nvmlEventSetWait_v2(self, events, wait_ms):
        if self.ends_waits & events:
            raise NVMLError(LOST)
        if not self.events:
            raise NVMLError(TIMEOUT)
        device, xid = self.events.pop()
        return SimpleNamespace(device=device, eventData=xid)


class Readings:
    """What a `FileNvml` of another process answers, by a file: attributes of `Nvml`. Its events are all of its life."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told = {}
        self.tell(reasons=0, lost=[], ecc={"GPU-a": [0, 0]}, events=[])

    def tell(self, **changes: object) -> None:
        self._told |= changes
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self._told))
        os.replace(new, self.path)


class FileNvml(Nvml):
    """Answers with what a file says. It waits for events as long as the caller asks, as NVML does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._events_taken = 0

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._look()  # this is what is asked first of each GPU
        return super().nvmlDeviceGetMemoryInfo(handle)

    def nvmlEventSetWait_v2(self, events, wait_ms):
        time.sleep(wait_ms / 1000)
        self._look()
        self.events = self.events[self._events_taken :][:1]
        event = super().nvmlEventSetWait_v2(events, wait_ms)
        self._events_taken += 1
        return event

    def _look(self) -> None:
        vars(self).update(json.loads(self._path.read_text()))
