import asyncio
import dataclasses
import re

from lockstep_common.telemetry import REGISTRY
from lockstep_engine import EngineConfig, EngineState
from lockstep_worker.notices import Notice, NoticeQueue, RankHistory
from scripted_engine import Script


def status(state: EngineState, epoch: int, reason: str = ""):
    engine = Script()(EngineConfig("m"), on_outputs=lambda *_: None, on_change=lambda: None)
    return dataclasses.replace(engine.status(), state=state, epoch=epoch, reason=reason)


def notices_of(*statuses) -> list[Notice]:
    notices: list[Notice] = []
    history = RankHistory(status(EngineState.STARTING, 0), notices.append)
    for each in statuses:
        history.observe(each)
    return notices


def test_a_lost_rank_and_its_return():
    died = "rank 1 (pid 7) died: SIGKILL"
    notices = notices_of(
        status(EngineState.STARTING, 1),
        status(EngineState.READY, 1),
        status(EngineState.READY, 1),
        status(EngineState.RESTARTING, 1, "rank 1 (pid 7) died"),
        status(EngineState.RESTARTING, 1, died),
        status(EngineState.RESTARTING, 2, died),
        status(EngineState.RESTARTING, 2, died),
        status(EngineState.READY, 2),
    )
    assert [notice.reason for notice in notices] == ["RanksReady", "RankLost", "RanksReady"]
    assert [notice.is_warning for notice in notices] == [False, True, False]
    assert re.fullmatch(r"the ranks are ready after \d+\.\d s", notices[0].message)
    assert notices[1].message == f"{died}; the ranks are started again"
    assert re.fullmatch(r"the ranks are ready again after \d+\.\d s", notices[2].message)


def test_each_failed_start_is_a_notice():
    notices = notices_of(
        status(EngineState.STARTING, 1),
        status(EngineState.STARTING, 1, "rank 0 (pid 7) died"),
        status(EngineState.STARTING, 2, "rank 0 (pid 7) died"),
        status(EngineState.STARTING, 2, "rank 0 (pid 9) died"),
        status(EngineState.STARTING, 3, "rank 0 (pid 9) died"),
        status(EngineState.FAILED, 3, "the ranks do not stay up: rank 0 (pid 11) died"),
    )
    assert [notice.reason for notice in notices] == ["RankLost", "RankLost"]
    assert notices[0].key == notices[1].key
    assert notices[0] != notices[1]


def test_similar_notices_have_the_same_key():
    hung = Notice("RankLost", "rank 0 (pid 7) has not finished its step for 5.0 s; the ranks are started again")
    again = Notice("RankLost", "rank 0 (pid 93) has not finished its step for 5.1 s; the ranks are started again")
    other = Notice("RankLost", "rank 1 (pid 93) has not finished its step for 5.1 s; the ranks are started again")
    assert hung.key == again.key != other.key


async def test_a_full_queue_drops_the_oldest():
    before = REGISTRY.get_sample_value("lockstep_worker_events_total", {"outcome": "dropped"}) or 0
    queue = NoticeQueue(limit=2)
    for number in range(5):
        queue.put(Notice("R", str(number)))
    queue.close()
    assert [notice.message async for notice in queue.notices()] == ["3", "4"]
    assert REGISTRY.get_sample_value("lockstep_worker_events_total", {"outcome": "dropped"}) == before + 3


async def test_the_reader_of_a_queue_waits_for_more():
    queue = NoticeQueue()
    asyncio.get_running_loop().call_later(0.05, queue.put, Notice("R", "late"))
    async for notice in queue.notices():
        assert notice.message == "late"
        queue.close()
