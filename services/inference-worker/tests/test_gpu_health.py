"""The health of GPUs, from a scripted NVML."""

import logging
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from lockstep_common.telemetry import REGISTRY
from lockstep_worker import gpu_health
from nvml import Nvml, NVMLError
from prometheus_client.metrics import MetricWrapperBase


def value(name, rank, **labels):
    return REGISTRY.get_sample_value(f"lockstep_worker_gpu_{name}", {"rank": str(rank)} | labels)


@pytest.fixture
def nvml(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="lockstep")
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for metric in vars(gpu_health.metrics).values():
        if isinstance(metric, MetricWrapperBase):
            metric.clear()
    return made


class Rounds:
    """An end of the watch after so many looks at it; calls a function before each."""

    def __init__(self, *steps):
        self._steps = list(steps)

    def is_set(self):
        if not self._steps:
            return True
        self._steps.pop(0)()
        return False

    def wait(self, _):
        pass


def nothing():
    pass


def test_a_gpu_tells_how_it_is(nvml):
    gpu_health._watch(1, 0.0, Rounds(nothing))
    assert value("health_available", 0) == 1
    assert (value("utilization_ratio", 0), value("power_watts", 0), value("temperature_celsius", 0)) == (
        0.75,
        350.5,
        61,
    )
    assert (value("memory_bytes", 0, kind="used"), value("memory_bytes", 0, kind="total")) == (1 << 30, 80 << 30)
    throttled = [value("throttled", 0, reason=reason) for reason in ("thermal", "power", "hardware")]
    assert throttled == [1, 0, 0]
    assert (value("nvlinks", 0, state="up"), value("nvlinks", 0, state="down")) == (3, 1)
    assert not nvml.is_open


def test_errors_before_the_worker_are_not_its(nvml):
    def damage():
        nvml.ecc["GPU-a"] = [7, 1]

    gpu_health._watch(1, 0.0, Rounds(nothing, damage))
    assert (value("ecc_errors_total", 0, kind="corrected"), value("ecc_errors_total", 0, kind="uncorrected")) == (2, 1)


def test_an_instance_has_its_own_memory_and_its_gpus_power(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b1,GPU-a")
    gpu_health._watch(2, 0.0, Rounds(nothing))
    assert value("memory_bytes", 0, kind="total") == 10 << 30
    assert value("utilization_ratio", 0) is None
    assert value("ecc_errors_total", 0, kind="corrected") is None
    assert (value("power_watts", 0), value("health_available", 0)) == (350.5, 1)
    assert value("ecc_errors_total", 1, kind="corrected") == 0


def test_an_xid_is_counted_for_the_rank_of_its_gpu(nvml, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    nvml.events = [("GPU-a", 79)]
    gpu_health._watch(2, 60.0, Rounds(nothing, nothing))
    assert (value("xid_errors_total", 1, xid="79"), value("xid_errors_total", 0, xid="79")) == (1, None)
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert (line.rank, line.xid) == (1, 79)


def test_the_xid_of_a_gpu_that_is_lost_is_counted_and_the_others_are_still_watched(nvml, caplog):
    def lose():
        nvml.lost.add("GPU-b")
        nvml.events.append(("GPU-b", 79))

    gpu_health._watch(2, 60.0, Rounds(nothing, lose, nothing))
    assert (value("xid_errors_total", 0, xid="79"), value("xid_errors_total", 1, xid="79")) == (None, 1)
    assert value("health_available", 0) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_a_lost_gpu_does_not_end_the_watching_of_the_others(nvml, monkeypatch, caplog):
    """It ends one wait, and is not waited for again; the next errors of the others count."""
    monkeypatch.setattr(gpu_health, "RESUBSCRIBE_S", 0.0)
    tried = []

    def lose():
        nvml.lost.add("GPU-b")
        nvml.ends_waits.add("GPU-b")

    def fail_next():
        nvml.events.append(("GPU-a", 79))

    def note(handle, types, events, register=nvml.nvmlDeviceRegisterEvents):
        tried.append(handle)
        register(handle, types, events)

    monkeypatch.setattr(nvml, "nvmlDeviceRegisterEvents", note)
    gpu_health._watch(2, 60.0, Rounds(nothing, lose, fail_next, nothing, nothing))
    assert tried == ["GPU-a", "GPU-b", "GPU-a"]
    assert (value("xid_errors_total", 0, xid="79"), value("xid_errors_total", 1, xid="79")) == (1, None)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "XID errors of GPUs are not known",
        "XID errors of GPUs are known again",
    ]


def test_a_gpu_that_answers_again_is_watched_again(nvml, monkeypatch):
    monkeypatch.setattr(gpu_health, "RESUBSCRIBE_S", 0.0)

    def lose():
        nvml.lost.add("GPU-b")
        nvml.ends_waits.add("GPU-b")

    def come_back():
        nvml.lost.clear()
        nvml.ends_waits.clear()
        nvml.events.append(("GPU-b", 48))

    gpu_health._watch(2, 60.0, Rounds(nothing, lose, nothing, come_back, nothing))
    assert value("xid_errors_total", 1, xid="48") == 1


def test_waits_that_always_fail_are_tried_at_growing_intervals_and_said_once(nvml, monkeypatch, caplog):
    now = [1000.0]
    made = []
    monkeypatch.setattr(gpu_health, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def create(create=nvml.nvmlEventSetCreate):
        made.append(now[0])
        return create()

    def later():
        now[0] += 1.0

    monkeypatch.setattr(nvml, "nvmlEventSetCreate", create)
    nvml.ends_waits.add("GPU-a")  # it answers, and its waits fail
    gpu_health._watch(1, 1e9, Rounds(*[later] * 5000))
    gaps = [round(after - before) for before, after in pairwise(made)]
    assert gaps[1:5] == [20, 40, 80, 160]
    assert set(gaps[7:]) == {600}
    assert len([record for record in caplog.records if record.message == "XID errors of GPUs are not known"]) == 1


def test_a_link_that_goes_down_is_no_error_of_the_others(nvml):
    def fail():
        nvml.link_errors = 101

    def go_down():
        nvml.links_up[0] = False

    def come_back():
        nvml.links_up[0] = True

    nvml.link_errors = 100
    gpu_health._watch(1, 0.0, Rounds(nothing))
    assert value("nvlink_errors_total", 0) == 0
    gpu_health._watch(1, 0.0, Rounds(nothing, fail, go_down, come_back))
    assert value("nvlink_errors_total", 0) == 3 * 4  # each kind of the three links


def test_a_gpu_that_is_lost_is_said_once(nvml, caplog):
    gpu_health._watch(2, 0.0, Rounds(nothing, lambda: nvml.lost.add("GPU-b"), nothing, nothing))
    assert (value("health_available", 0), value("health_available", 1)) == (1, 0)
    assert [(record.message, record.rank) for record in caplog.records] == [("a GPU does not answer", 1)]


@pytest.mark.parametrize("problem", ["no library", "no driver", "too few"])
def test_what_cannot_be_known_is_one_line(nvml, monkeypatch, caplog, problem):
    if problem == "no library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif problem == "no driver":
        monkeypatch.setattr(nvml, "nvmlDeviceGetCount", None)
        nvml.nvmlInit = lambda: (_ for _ in ()).throw(NVMLError(9))
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,no such")
    ranks = 2 if problem == "too few" else 1
    with gpu_health.watching(ranks, 60.0):
        pass
    assert value("health_available", ranks - 1) == 0
    assert len(caplog.records) == 1


def test_the_thread_ends_with_the_worker(nvml):
    with gpu_health.watching(1, 60.0):
        pass
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("GPU-1234, MIG-5", ["GPU-1234", "MIG-5"]),
        ("1,-1,0", ["1"]),
        ("1,7,0", ["1"]),
        ("0,0", ["0"]),
    ],
)
def test_devices_are_those_that_cuda_shows(given, expected):
    assert gpu_health.visible_devices(given, 3) == expected


def test_the_beginning_of_a_uuid_names_a_gpu(nvml, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-")
    gpu_health._watch(2, 0.0, Rounds(nothing))
    assert (value("health_available", 0), value("health_available", 1)) == (1, 0)
    assert "2 GPUs have a UUID" in caplog.records[0].problem
