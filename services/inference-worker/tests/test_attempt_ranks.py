"""What the ranks did in the phases of an attempt: the sums, when the counters are read, and that routers are told."""

import itertools

import pytest
from harness import make_settings, served, submit
from lockstep_api.v1 import worker_pb2
from lockstep_engine import Phase, RankTimes
from lockstep_worker.attempt_ranks import AttemptRanks
from lockstep_worker.router_connection import MAX_ENDED


class Counters:
    """Counters of two ranks: each reading finds one more step, of which rank 1 waits for rank 0. Each phase takes a
    second by `clock`.
    """

    def __init__(self):
        self.readings = 0

    def clock(self):
        return float(self.readings)

    def __call__(self):
        self.readings += 1
        steps = self.readings
        return (
            RankTimes(steps, 0.5 * steps, 0.375 * steps, 0.125 * steps, 0.0625 * steps),
            RankTimes(steps, 0.5 * steps, 0.375 * steps, 0.25 * steps, 0.0625 * steps),
        )


def steps_of(message):
    return [each.steps for each in message.prefill], [each.steps for each in message.decode]


def test_each_phase_has_what_every_rank_did_in_it():
    counters = Counters()
    ranks = AttemptRanks(counters, counters.clock)
    ranks.wait()  # in the queue
    ranks.run()
    ranks.run()  # another part of the prompt
    assert ranks.awaits_token
    ranks.note_token()
    assert not ranks.awaits_token
    ranks.wait()
    message = ranks.message("s", 3)
    assert (message.stream_id, message.attempt, counters.readings) == ("s", 3, 3)
    first = worker_pb2.RankWork(steps=1, compute_s=0.375, collective_s=0.125, idle_s=0.0625)
    second = worker_pb2.RankWork(steps=1, compute_s=0.25, collective_s=0.25, idle_s=0.0625)
    assert list(message.prefill) == list(message.decode) == [first, second]


def test_a_preempted_attempt_has_the_sum_of_its_turns():
    ranks = AttemptRanks(Counters())
    for _ in range(3):
        ranks.run()
        ranks.note_token()
        ranks.wait()
        assert ranks.awaits_token
    assert steps_of(ranks.message("s", 1)) == ([3, 3], [3, 3])


def test_a_wait_that_began_before_the_phase_counts_only_as_far_as_the_phase_has_room():
    """The first step after an idle time has waited for all of it, also before the request came."""
    readings = iter(
        [
            (RankTimes(10, 4.0, 3.0, 1.0, 2.0),),
            (RankTimes(11, 4.0625, 3.0, 1.0, 32.5),),  # the request came after 30 s
            (RankTimes(12, 4.125, 3.0, 1.0, 32.53125),),
            (RankTimes(12, 4.125, 3.0, 1.0, 32.53125),),
            (RankTimes(14, 4.625, 3.0, 1.0, 33.0),),  # busy before the phase too
            (RankTimes(14, 4.625, 3.0, 1.0, 33.0),),
        ]
    )
    clock = iter([0.0, 0.09375, 0.21875, 9.0, 9.25, 9.25])
    ranks = AttemptRanks(lambda: next(readings), lambda: next(clock))
    ranks.run()
    ranks.note_token()
    ranks.wait()
    ranks.run()
    ranks.note_token()
    ranks.wait()
    message = ranks.message("s", 1)
    assert [(each.steps, each.compute_s, each.idle_s) for each in message.prefill] == [(3, 0.5625, 0.03125)]
    assert [(each.steps, each.compute_s, each.idle_s) for each in message.decode] == [(1, 0.0625, 0.03125)]


def test_a_first_token_before_the_news_that_it_runs_begins_the_decode():
    ranks = AttemptRanks(Counters())
    ranks.note_token()
    ranks.run()
    ranks.wait()
    assert steps_of(ranks.message("s", 1)) == ([], [1, 1])


def test_an_attempt_that_never_ran_has_nothing():
    ranks = AttemptRanks(Counters())
    ranks.wait()
    assert steps_of(ranks.message("s", 1)) == ([], [])


def test_counters_of_another_epoch_count_as_unknown():
    readings = itertools.chain([Counters()()], itertools.repeat((RankTimes(0, 0, 0, 0, 0),) * 2))
    ranks = AttemptRanks(lambda: next(readings))
    ranks.run()
    ranks.wait()
    assert steps_of(ranks.message("s", 1)) == ([], [])


async def phases(router, count):
    """Wait for so many news of streams that run or wait."""
    while count > 0:
        count -= len((await router.next("phases")).phases.streams)


async def ended(router, count):
    """What the router is told of so many attempts, by their stream and number."""
    told = {}
    while len(told) < count:
        frame = await router.next("ended_attempts")
        told |= {(each.stream_id, each.attempt): each for each in frame.ended_attempts.attempts}
    return told


async def test_routers_are_told_of_attempts_however_they_end(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        router, other = await worker.greeted("r0"), await worker.greeted("r1")
        engine = worker.engine
        for name in ("finished", "cancelled", "lost", "late"):
            await router.send(submit=submit(name, max_tokens=2 if name == "finished" else 100))
        await phases(router, 4)
        engine.step()
        engine.step()
        await router.send(cancel=worker_pb2.Cancel(stream_id="cancelled", attempt=1))
        await router.send(submit=submit("late", 2, max_tokens=100))
        await phases(router, 1)
        told = await ended(router, 3)
        assert {key: steps_of(each) for key, each in told.items()} == dict.fromkeys(
            [("finished", 1), ("cancelled", 1), ("late", 1)], ([1, 1], [1, 1])
        )
        work = told["finished", 1].decode
        assert [(each.compute_s, each.collective_s) for each in work] == [
            pytest.approx((0.009, 0.001)),
            pytest.approx((0.004, 0.006)),
        ]
        engine.step()
        engine.lose_ranks()
        told = await ended(router, 2)
        assert steps_of(told["lost", 1]) == ([1, 1], [2, 2])
        assert steps_of(told["late", 2]) == ([1, 1], [0, 0])
        assert "ended_attempts" not in other.kinds()


async def test_a_preempted_stream_is_told_with_both_turns(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("a", max_tokens=3))
        await phases(router, 1)
        (name,) = worker.engine.requests
        worker.engine.step()
        worker.engine.change_phase(name, Phase.WAITING)
        await phases(router, 1)
        worker.engine.give([])  # a step of other streams
        worker.engine.change_phase(name, Phase.RUNNING)
        await phases(router, 1)
        worker.engine.step()
        worker.engine.step()
        told = await ended(router, 1)
        assert steps_of(told["a", 1]) == ([2, 2], [1, 1])


async def test_what_one_frame_tells_is_bounded_and_the_last_one_comes_at_the_end(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path, status_interval_s=10)) as worker:
        router = await worker.greeted()
        count = MAX_ENDED + 20
        for number in range(count):
            await router.send(submit=submit(str(number), max_tokens=1))
            await phases(router, 1)
        worker.engine.step()
        worker.stop.set()
        told = (await router.next("ended_attempts")).ended_attempts.attempts
        assert [each.stream_id for each in told] == [str(number) for number in range(20, count)]
