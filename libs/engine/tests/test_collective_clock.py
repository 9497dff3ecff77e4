"""What devices spend in collectives by their own clocks. The devices here are queues with a clock each; they meet, so
that those that come first wait.
"""

import os
from collections import deque

import numpy as np
import pytest
import torch
from lockstep_engine.collective_clock import ClockStream, CollectiveClock
from lockstep_engine.device_marks import DeviceMarks, MarkStream, marks_of
from lockstep_engine.mailbox import Mailbox

TRANSFER_NS = 3_000
WRAP = 2**64


class Device(ClockStream, MarkStream):
    """Does what is queued when `run` lets it, on a clock of its own."""

    def __init__(self, compute_ns):
        self.queue, self.recording = deque(), None
        self.now_ns = 1_795_000_000 * 10**9
        self.readings = 0
        self._compute_ns = compute_ns
        self._sum = self._told = 0

    def queued(self, work, *arguments):
        (self.queue if self.recording is None else self.recording).append((work, *arguments))

    def advance(self):
        pass

    def write(self, place):
        pass

    def add_time(self, weight):
        self.queued("read", weight)

    def publish(self):
        self.queued("tell")

    def published_ns(self):
        return self._told

    def do(self, work, *arguments):
        if work == "compute":
            self.now_ns += self._compute_ns
        elif work == "read":
            self.readings += 1
            self._sum = (self._sum + arguments[0] * self.now_ns + WRAP // 2) % WRAP - WRAP // 2
        else:
            self._told = self._sum


class Rank:
    def __init__(self, compute_ns):
        self.device = Device(compute_ns)
        self.marks = DeviceMarks(self.device, np.zeros(1, np.int64))
        self.marks.clock = CollectiveClock(self.device)
        self.device.queue.clear()

    def layers(self, count):
        for _ in range(count):
            self.device.queued("compute")
            self.marks.enter()
            self.device.queued("meet")
            self.marks.leave()

    def record(self, count):
        self.device.recording = []
        with self.marks.recorded():
            self.layers(count)
        recorded, self.device.recording = self.device.recording, None
        return recorded

    def step(self, *, layers=0, recorded=()):
        self.marks.begin_step()
        self.layers(1 + layers)  # the ids, as in each step
        self.device.queue.extend(recorded)
        self.marks.replayed()
        self.marks.end_step()


def run(ranks):
    """Let the devices do all that is queued; returns the ns that each spent in collectives."""
    spent = [0] * len(ranks)
    while ranks[0].device.queue:
        for rank in ranks:
            while rank.device.queue and rank.device.queue[0][0] != "meet":
                rank.device.do(*rank.device.queue.popleft())
        if ranks[0].device.queue:
            end_ns = max(rank.device.now_ns for rank in ranks) + TRANSFER_NS
            for index, rank in enumerate(ranks):
                spent[index] += end_ns - rank.device.now_ns
                rank.device.now_ns = end_ns
                rank.device.queue.popleft()
    return spent


@pytest.mark.parametrize("is_recorded", [True, False])
@pytest.mark.parametrize("collectives", [2, 9, 66, 162])
def test_the_slowest_rank_waits_least_and_all_times_are_as_on_their_clocks(collectives, is_recorded):
    ranks = [Rank(compute_ns) for compute_ns in (40_000, 52_000, 40_000)]
    recordings = [rank.record(collectives) if is_recorded else () for rank in ranks]
    for _ in range(3):
        for rank, recording in zip(ranks, recordings, strict=True):
            rank.step(layers=0 if is_recorded else collectives, recorded=recording)
        spent = run(ranks)
        told = [rank.marks.spent_us(0) for rank in ranks]
        assert told[1] == min(told)
        # Of many alike some are timed; what they do not stand for is less than one group of them.
        for us, ns in zip(told, spent, strict=True):
            assert us == pytest.approx(ns / 1000, abs=8 * ns / collectives / 1000 + 1)
    few = sum(recording[0] == "read" for recording in recordings[0]) if is_recorded else 0
    assert few <= 2 * (8 + collectives // 8)


def test_a_step_of_32_layers_has_30_readings_in_its_recorded_part():
    assert sum(work[0] == "read" for work in Rank(1).record(2 * 32 + 2)) == 30


def test_what_comes_before_the_first_question_is_left_out_and_each_step_counts_once():
    ranks = [Rank(1_000), Rank(1_000)]
    for rank in ranks:
        rank.step(layers=3)
    run(ranks)
    assert ranks[0].marks.spent_us(0) == 4 * TRANSFER_NS // 1000
    assert ranks[0].marks.spent_us(0) == 0
    for rank in ranks:  # two steps end before the host asks
        rank.step(layers=1)
        rank.step(layers=1)
    run(ranks)
    assert ranks[0].marks.spent_us(0) == 4 * TRANSFER_NS // 1000


def test_without_a_clock_the_hosts_time_counts():
    marks = DeviceMarks(Device(1), np.zeros(1, np.int64))
    marks.enter()
    marks.leave()
    assert marks.spent_us(17) == 17


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reads_its_clock_eager_and_recorded():
    from lockstep_engine.kernels.triton_clock import TritonClockStream  # noqa: PLC0415 - it builds on Triton

    device, sizes = torch.device("cuda", 0), (1, 100, 50)
    fd = Mailbox.create(Mailbox.segment_bytes(*sizes), "test")
    marks = marks_of(device, Mailbox(fd, *sizes), 0)
    os.close(fd)
    marks.clock = CollectiveClock(TritonClockStream(device))

    def collectives(count):
        for _ in range(count):
            marks.enter()
            torch.cuda._sleep(10**6)
            marks.leave()

    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.inference_mode():
        with torch.cuda.graph(graph), marks.recorded():
            collectives(24)
        for _ in range(3):
            marks.begin_step()
            torch.cuda.synchronize()
            marks.spent_us(0)
            begin.record()
            collectives(2)
            graph.replay()
            marks.replayed()
            end.record()
            marks.end_step()
            torch.cuda.synchronize()
            assert marks.spent_us(0) == pytest.approx(begin.elapsed_time(end) * 1000, rel=0.2)
