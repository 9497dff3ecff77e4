"""Which rank hangs, by the marks that devices write. The devices here are queues that work only when they are told to,
and meet in collectives: a stand-in for GPUs, whose hosts launch and go on.
"""

import logging
import os
from collections import deque

import numpy as np
import pytest
import torch
from lockstep_common.hang import Hang, Progress, find_hung
from lockstep_engine.device_marks import MARKS_PER_STEP, DeviceMarks, Marks, MarkStream, TorchMarkStream, marks_of
from lockstep_engine.mailbox import Mailbox

CPU = torch.device("cpu")
SIZES = (3, 100, 50)
LAYERS = 4
DEVICE = "its device stands still"
HOST = "its device has done all that was launched: its host stands still"

SAME = "the devices of all ranks stand at the same place: a collective between them does not end"


class LaggingStream(MarkStream):
    """A device that does nothing until `Ranks.run`. What is launched while it records is not queued."""

    def __init__(self, word):
        self._stream = TorchMarkStream(word, CPU)
        self.queue = deque()
        self.recording = None
        self.met = 0
        """Collectives that it has come to."""
        self.waits = False

    def add(self, work, *arguments):
        (self.queue if self.recording is None else self.recording).append((work, *arguments))

    def advance(self):
        self.add("advance")

    def write(self, place):
        self.add("write", place)

    def do(self, work, *arguments):
        getattr(self._stream, work)(*arguments)


class SimulatedRank:
    """A host that launches steps: a prompt's as they come, of decoding as recordings."""

    def __init__(self, mailbox, rank):
        place = slice(rank, rank + 1)
        self.stream = LaggingStream(mailbox.reached[place])
        self.marks = DeviceMarks(self.stream, mailbox.launched[place])
        self._mailbox, self._rank = mailbox, rank
        self.stream.recording = []
        with self.marks.recorded():
            self._layers(LAYERS)
        self._recorded, self.stream.recording = self.stream.recording, None

    def _layers(self, count):
        for _ in range(count):
            self.stream.add("compute")
            self._mailbox.collectives[self._rank] += 1
            self.marks.enter()
            self.stream.add("meet")

    def launch(self, *, recorded, layers=LAYERS):
        self.marks.begin_step()
        self._layers(1)  # the ids
        if recorded:
            self.stream.queue.extend(self._recorded)
            self._mailbox.collectives[self._rank] += 1
            self.marks.replayed()
        else:
            self._layers(layers)
        if layers == LAYERS:
            self.marks.end_step()


class Ranks:
    def __init__(self):
        fd = Mailbox.create(Mailbox.segment_bytes(*SIZES), "test")
        self.driver = Mailbox(fd, *SIZES)
        self.ranks = [SimulatedRank(Mailbox(fd, *SIZES), rank) for rank in range(SIZES[0])]
        os.close(fd)

    def launch(self, **step):
        for rank in self.ranks:
            rank.launch(**step)

    def run(self, stops=None):
        """Let the devices work until each waits or has nothing to do. `stops`: rank -> so much work is done there."""
        left = dict(stops or {})
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(self.ranks):
                moved |= self._advance(number, rank.stream, left)

    def _advance(self, number, stream, left):
        moved = False
        while stream.queue and left.get(number, 1) > 0:
            work, *arguments = stream.queue[0]
            if work == "meet":
                if not stream.waits:
                    stream.waits, stream.met = True, stream.met + 1
                if any(other.stream.met < stream.met for other in self.ranks):
                    return moved
                stream.waits = False
            elif work != "compute":
                stream.do(work, *arguments)
            stream.queue.popleft()
            moved = True
            if number in left:
                left[number] -= 1
        return moved

    def hung(self):
        return find_hung([self.driver.progress(rank) for rank in range(SIZES[0])])


@pytest.fixture
def ranks():
    return Ranks()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("hung", range(3))
def test_the_rank_whose_device_stands_still_is_named_though_all_hosts_have_launched_on(recorded, hung, ranks):
    for _ in range(3):
        ranks.launch(recorded=recorded)
        ranks.run()
    assert not any(rank.stream.queue for rank in ranks.ranks)
    ranks.launch(recorded=recorded)
    ranks.launch(recorded=recorded)
    ranks.run({hung: 9})
    assert ranks.hung() == Hang(hung, DEVICE)
    assert len(set(ranks.driver.collectives.tolist())) == len(set(ranks.driver.launched.tolist())) == 1
    reached = ranks.driver.reached.tolist()
    assert {each - reached[hung] for each in reached} == {0, 1}, "the others wait in the next collective"


@pytest.mark.parametrize("work", range(2, 38))
def test_wherever_a_device_stands_no_other_is_accused(work, ranks):
    """From the begin of a step on, up to the last collective of the one after it. Within a collective nobody can know
    whose part is missing.
    """
    ranks.launch(recorded=True)
    ranks.launch(recorded=False)
    in_all = len(ranks.ranks[1].stream.queue)
    ranks.run({1: work})
    assert work < in_all
    if ranks.ranks[1].stream.queue[0] == ("meet",):
        assert ranks.hung().what == SAME
    else:
        assert ranks.hung() == Hang(1, DEVICE)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_host_that_stands_still_before_a_step_is_told_from_a_device(recorded, ranks):
    ranks.launch(recorded=recorded)
    for rank in (0, 2):
        ranks.ranks[rank].launch(recorded=recorded)
    ranks.run()
    assert ranks.hung() == Hang(1, HOST)


def test_a_host_that_stands_still_within_a_step_is_told_from_a_device(ranks):
    ranks.ranks[0].launch(recorded=False)
    ranks.ranks[1].launch(recorded=False)
    ranks.ranks[2].launch(recorded=False, layers=2)
    ranks.run()
    assert ranks.hung() == Hang(2, HOST)


def test_a_rank_0_that_does_not_answer_though_all_is_done_is_named(ranks):
    ranks.launch(recorded=True)
    ranks.run()
    assert ranks.hung() == Hang(0, HOST)


def test_no_rank_is_accused_alone_where_all_devices_wait_in_one_collective(ranks):
    ranks.launch(recorded=True)
    ranks.run({0: 5, 1: 5, 2: 5})
    assert ranks.hung().what == SAME


def test_a_replay_writes_other_numbers_each_time(ranks):
    seen = []
    ranks.run()
    for _ in range(3):
        ranks.launch(recorded=True)
        ranks.run({0: 8, 1: 8, 2: 8})
        seen.append(int(ranks.driver.reached[0]))
        ranks.run()
    assert np.diff(seen).tolist() == [MARKS_PER_STEP, MARKS_PER_STEP]
    assert ranks.driver.reached.tolist() == ranks.driver.launched.tolist()


def test_a_step_with_more_collectives_than_places_does_not_reach_into_the_next(ranks):
    marks = ranks.ranks[0].marks
    marks.begin_step()
    first = int(ranks.driver.launched[0])
    for _ in range(MARKS_PER_STEP + 5):
        marks.enter()
    assert ranks.driver.launched[0] == first + MARKS_PER_STEP - 2
    marks.end_step()
    assert ranks.driver.launched[0] == first + MARKS_PER_STEP - 1


def test_hosts_decide_where_not_every_rank_has_marks():
    assert find_hung([Progress(7, 9, 1), Progress(6), Progress(7, 9, 9)]) == Hang(1, "")
    assert find_hung([Progress(3), Progress(3)]) == Hang(0, "")


def test_a_cpu_has_no_marks(ranks):
    mailbox = ranks.driver
    mailbox.reached[:] = mailbox.launched[:] = 0
    marks = marks_of(CPU, mailbox, 1)
    assert type(marks) is Marks
    marks.begin_step()
    marks.enter()
    with marks.recorded():
        pass
    marks.replayed()
    marks.end_step()
    assert not mailbox.reached.any()
    assert not mailbox.launched.any()


def test_memory_that_cannot_be_registered_is_told_and_leaves_no_marks(ranks, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="lockstep.engine")
    asked = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(*arguments):
            asked.append(arguments)
            return 801

    words = ranks.driver.reached[1:2]
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))  # the launch that takes the runtime's error
    assert type(marks_of(torch.device("cuda", 0), ranks.driver, 1)) is Marks
    assert "CUDA error 801" in caplog.text
    ((first, size, _),) = asked
    assert first % 4096 == size % 4096 == 0
    assert first <= words.ctypes.data < words.ctypes.data + 8 <= first + size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_writes_its_marks_eager_and_recorded():
    device = torch.device("cuda", 0)
    fd = Mailbox.create(Mailbox.segment_bytes(*SIZES), "test")
    rank, driver = Mailbox(fd, *SIZES), Mailbox(fd, *SIZES)
    os.close(fd)
    marks = marks_of(device, rank, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph), marks.recorded():
            for _ in range(5):
                marks.enter()
        for _ in range(3):
            marks.begin_step()
            marks.enter()
            torch.cuda.synchronize()
            assert driver.reached[1] == driver.launched[1] > 0
            torch.cuda._sleep(10**9)
            graph.replay()
            marks.replayed()
            assert driver.reached[1] < driver.launched[1]
            torch.cuda.synchronize()
            assert driver.reached[1] == driver.launched[1]
            marks.end_step()
    assert driver.reached[[0, 2]].tolist() == [0, 0]
