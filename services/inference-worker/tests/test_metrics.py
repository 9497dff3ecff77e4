from harness import make_settings, served, submit, until
from lockstep_common.telemetry import REGISTRY


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
