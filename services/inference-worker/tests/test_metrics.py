from dataclasses import replace

from harness import make_settings, served, submit, until
from lockstep_common.telemetry import REGISTRY
from lockstep_engine import HostUsage
from lockstep_worker.metrics import StatusMeter


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"lockstep_worker_{name}", labels) or 0.0


async def test_what_happens_is_counted(model_dir, socket_path):
    names = ("tokens_total", "steps_total", "restarts_total", "submitted_total")
    before = {name: value(name) for name in names}
    lost_before = value("rejected_total", code="worker_lost")
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        await until(lambda: (value("ready"), value("routers"), value("epoch")) == (1, 1, 1))
        assert (value("rank_up", rank="0"), value("rank_up", rank="1")) == (1, 1)
        for name in ("a", "b"):
            await router.send(submit=submit(name, max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 2)
        for _ in range(3):
            worker.engine.step()
        await until(lambda: value("running") == 2)
        assert (value("streams"), value("free_blocks"), value("total_blocks")) == (2, 62, 64)
        worker.engine.lose_ranks()
        assert (value("ready"), value("epoch"), value("rank_up", rank="1")) == (0, 2, 0)
        worker.engine.restart()
        await router.ready()
    grown = {name: value(name) - before[name] for name in names}
    assert grown == {"tokens_total": 6, "steps_total": 3, "restarts_total": 1, "submitted_total": 2}
    assert value("rejected_total", code="worker_lost") - lost_before == 2


async def test_the_prefix_cache_in_host_memory_is_counted_over_all_epochs(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        status = worker.engine.status()
    names = ("host_cache_hits_total", *[("host_cache_copies_total", way) for way in ("in", "out", "dropped")])

    def counts():
        return [value(each) if isinstance(each, str) else value(each[0], way=each[1]) for each in names]

    before, meter = counts(), StatusMeter()
    for epoch, usage in (
        (1, HostUsage(blocks=5, used_bytes=70, capacity_bytes=100, hits=1, copied_in=3, copied_out=8, dropped=2)),
        (1, HostUsage(blocks=6, used_bytes=80, capacity_bytes=100, hits=1, copied_in=4, copied_out=9, dropped=2)),
        (1, HostUsage()),
        (2, HostUsage(blocks=2, used_bytes=20, capacity_bytes=100, hits=0, copied_in=0, copied_out=2, dropped=1)),
    ):
        meter.observe(replace(status, epoch=epoch, host=usage), ready=True, routers=0, streams=0)
    assert (value("host_cache_blocks"), value("host_cache_bytes")) == (2, 20 * len(status.ranks))
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 4, 11, 3]
