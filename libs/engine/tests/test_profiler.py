"""Profiles of steps: what a rank records, that its tokens do not change, and that nothing waits without a bound."""

import asyncio
import gzip
import json
import os
import socket
import threading

import pytest
from checkpoints import make
from in_process_rank import InProcessRank
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_engine import SamplingParams, profile_collection, profiler
from lockstep_engine.control import (
    MAX_CONTROL_BYTES,
    ProfileEnded,
    StartProfile,
    StopProfile,
    decode_doorbell,
    decode_rank_message,
    encode_control,
)
from lockstep_engine.distributed import SharedMemory
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.profile_collection import ProfileCollection, check_steps
from lockstep_engine.sizes import segment_bytes

SETTINGS = {"device": "cpu", "max_seqs": 2, "max_batch_tokens": 64, "kv_memory_bytes": 2**22, "threads": 1}
PROMPT = [5, 6, 7, 11]


class ProfiledRank(InProcessRank):
    """Keeps the profiles that the rank sends."""

    def __init__(self, *arguments, **settings):
        self.ended = []
        super().__init__(*arguments, **settings)

    def order(self, order):
        self._control.send(encode_control(order))

    def _receive(self):
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, MAX_CONTROL_BYTES, 1)
            if decode_doorbell(message) is not None:
                return message
            found = decode_rank_message(message)
            if not isinstance(found, ProfileEnded):
                return message
            data = b""
            for descriptor in descriptors:
                data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                os.close(descriptor)
            self.ended.append((found, data))

    def tokens(self, count):
        return self.run((PROMPT, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)))

    def profile(self):
        """The next profile: its marks and torch's trace."""
        while not self.ended:
            self.tokens(2)
        ended, data = self.ended.pop(0)
        assert not ended.error
        head, _, trace = gzip.decompress(data).partition(b"\n")
        return ended.number, json.loads(head), json.loads(trace)["traceEvents"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path, _ = make("llama-grouped-untied", tmp_path_factory.mktemp("model"))
    with ProfiledRank(path, **SETTINGS) as rank:
        yield rank


def test_a_rank_records_the_steps_after_the_first_and_its_tokens_do_not_change(served):
    plain = served.tokens(12)
    served.order(StartProfile(1, 3))
    before = int(served.mailbox.steps[0])
    assert served.tokens(12) == plain
    number, head, events = served.profile()
    assert (number, head["rank"], head["device"], head["ended_by"]) == (1, 0, "cpu", "steps")
    assert [step[0] for step in head["steps"]] == [before + each for each in (2, 3, 4)]
    ends = [step[4] for step in head["steps"]]
    assert all(step[3] < step[4] for step in head["steps"])
    assert ends == sorted(ends)
    marks = [each["name"] for each in events if each.get("cat") == "user_annotation"]
    assert marks == [f"lockstep step {step[0]}" for step in head["steps"]]
    assert any(each["name"].startswith("aten::") for each in events)


def test_a_profile_has_no_values(served):
    served.order(StartProfile(2, 2))
    _, _, events = served.profile()
    arguments = {key for each in events if each.get("cat") == "cpu_op" for key in each["args"]}
    assert not [key for key in arguments if "input" in key.lower() or "concrete" in key.lower()]


def test_its_events_are_bounded(served, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_EVENTS", 1)
    served.order(StartProfile(3, 50))
    _, head, _ = served.profile()
    assert (head["ended_by"], len(head["steps"])) == ("events", 1)


def test_its_time_is_bounded(served, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_RECORD_S", 0.0)
    served.order(StartProfile(4, 50))
    _, head, _ = served.profile()
    assert (head["ended_by"], len(head["steps"])) == ("time", 1)


def test_a_profile_without_steps_ends_and_the_next_one_works(served):
    served.order(StartProfile(5, 2))
    served.order(StopProfile(4))  # of another one
    served.order(StopProfile(5))
    served.tokens(4)
    assert served.ended.pop(0) == (ProfileEnded(5, "no step ran"), b"")
    served.order(StartProfile(6, 2))
    served.order(StartProfile(7, 2))  # the driver waits for this one
    assert served.profile()[0] == 7


def test_a_trace_that_cannot_be_written_is_told(served, monkeypatch):
    monkeypatch.setattr(profiler, "MAX_PROFILE_BYTES", 1)
    served.order(StartProfile(8, 1))
    while not served.ended:
        served.tokens(2)
    ended, data = served.ended.pop(0)
    assert (ended.error, data) == ("its trace cannot be written: ValueError", b"")


def test_a_profiler_that_fails_ends_the_profile_and_not_the_rank(served, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("the profiler is in use")

    plain = served.tokens(4)
    for place, name in ((profiler.profiler, "profile"), (profiler.threading, "Thread")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            served.order(StartProfile(9, 1))
            while not served.ended:
                assert served.tokens(4) == plain
        ended, data = served.ended.pop(0)
        assert (ended, data) == (ProfileEnded(9, "it cannot be recorded: RuntimeError"), b"")
        assert served.rank._group.marks is None
    served.order(StartProfile(10, 1))
    assert served.profile()[0] == 10


def test_collectives_are_marked_only_while_that_is_wanted():
    import torch  # noqa: PLC0415

    size = 1 << 10
    fd = Mailbox.create(segment_bytes(2, size), "test")
    groups = [SharedMemory(fd, rank, 2, size, lambda: None) for rank in range(2)]

    def both():
        threads = [threading.Thread(target=each.all_reduce, args=(torch.ones(4),)) for each in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    both()
    assert groups[0].marks is None
    groups[0].marks = []
    both()
    ((name, began, ended),) = groups[0].marks
    assert (name, began < ended, groups[1].marks) == ("all_reduce", True, None)


class Ranks:
    """What a collection orders. `answers`: what each rank does with an order."""

    def __init__(self, collection, answers=None, deaf=()):
        self.orders = []
        self._collection, self._answers, self._deaf = collection, answers, deaf

    def send(self, order):
        self.orders.append(order)
        if self._answers is not None:
            asyncio.get_running_loop().call_soon(self._answers, self._collection, order)
        return list(self._deaf)


def give(collection, number, rank, data):
    fd = os.memfd_create("test")
    try:
        os.write(fd, data)
        collection.take(rank, ProfileEnded(number, ""), [fd])
    finally:
        os.close(fd)


async def test_profiles_come_in_the_order_of_ranks_and_old_ones_are_not_taken():
    def answer(collection, order):
        give(collection, order.number - 1, 0, b"old")
        for rank in (1, 0):
            give(collection, order.number, rank, f"rank {rank}".encode())

    collection = ProfileCollection(7, 2)
    ranks = Ranks(collection, answer)
    assert await collection.run(20, ranks.send, lambda: 0) == [b"rank 0", b"rank 1"]
    assert ranks.orders == [StartProfile(7, 20)]


async def refusal(collection, ranks, finished=lambda: 0):
    with pytest.raises(LockstepError) as caught:
        await collection.run(20, ranks.send, finished)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    return caught.value.message


async def test_an_idle_engine_is_told_to_get_requests(monkeypatch):
    monkeypatch.setattr(profile_collection, "FIRST_STEP_S", 0.0)
    monkeypatch.setattr(profile_collection, "POLL_S", 0.01)
    collection = ProfileCollection(1, 2)
    ranks = Ranks(collection)
    assert "send requests meanwhile" in await refusal(collection, ranks)
    assert ranks.orders == [StartProfile(1, 20), StopProfile(1)], "the ranks do not record for ever"


async def test_a_rank_that_gives_nothing_is_named(monkeypatch):
    for name in ("RECORD_S", "PROFILE_S", "POLL_S"):
        monkeypatch.setattr(profile_collection, name, 0.01)
    collection = ProfileCollection(1, 2)
    give(collection, 1, 0, b"rank 0")
    ranks = Ranks(collection)
    assert "rank 1 has given no profile" in await refusal(collection, ranks)
    assert ranks.orders[1] == StopProfile(1), "ranks give what they have"


async def test_ranks_that_fail_or_are_lost_end_it():
    collection = ProfileCollection(1, 2)
    collection.fail("the ranks were lost")
    assert "lost" in await refusal(collection, Ranks(collection))
    collection = ProfileCollection(1, 2)
    collection.take(1, ProfileEnded(1, "its trace cannot be written"), [])
    assert "rank 1: its trace cannot be written" in await refusal(collection, Ranks(collection))
    collection = ProfileCollection(1, 2)
    assert "rank 1 takes no orders" in await refusal(collection, Ranks(collection, deaf=[1]))


async def test_a_profile_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(profile_collection, "MAX_PROFILE_BYTES", 3)
    collection = ProfileCollection(1, 1)
    give(collection, 1, 0, b"1234")
    assert "ask for fewer steps" in await refusal(collection, Ranks(collection))


@pytest.mark.parametrize("steps", [0, -1, 201])
def test_the_number_of_steps_is_bounded(steps):
    with pytest.raises(LockstepError, match="steps must be from 1 to 200"):
        check_steps(steps)
