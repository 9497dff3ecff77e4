import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from harness import make_settings, served, submit, until
from lockstep_common.telemetry import REGISTRY, exposition_for
from lockstep_engine import HostUsage, RankStatus, RemoteUsage
from lockstep_worker import metrics
from lockstep_worker.metrics import StatusMeter
from lockstep_worker.vllm_names import VllmNames
from prometheus_client import CollectorRegistry


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"lockstep_worker_{name}", labels) or 0.0


async def test_what_happens_is_counted(model_dir, socket_path):
    names = (
        "tokens_total",
        "steps_total",
        "restarts_total",
        "submitted_total",
        "queue_seconds_count",
        "prefill_seconds_count",
    )
    before = {name: value(name) for name in names}
    lost_before = value("rejected_total", code="worker_lost")
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        name = model_dir.name
        await until(lambda: (value("ready", served_model=name), value("routers"), value("epoch")) == (1, 1, 1))
        assert (value("rank_up", rank="0"), value("rank_up", rank="1")) == (1, 1)
        for name in ("a", "b"):
            await router.send(submit=submit(name, max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 2)
        for _ in range(3):
            worker.engine.step()
        await until(lambda: value("running") == 2)
        assert (value("streams"), value("free_blocks"), value("total_blocks")) == (2, 62, 64)
        worker.engine.lose_ranks()
        assert (value("ready", served_model=name), value("epoch"), value("rank_up", rank="1")) == (0, 2, 0)
        worker.engine.restart()
        await router.ready()
    grown = {name: value(name) - before[name] for name in names}
    assert grown == {
        "tokens_total": 6,
        "steps_total": 3,
        "restarts_total": 1,
        "submitted_total": 2,
        "queue_seconds_count": 2,
        "prefill_seconds_count": 2,
    }
    assert value("rejected_total", code="worker_lost") - lost_before == 2


async def test_the_prefix_cache_in_host_memory_is_counted_over_all_epochs(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        status = worker.engine.status()
    names = ("host_cache_hits_total", *[("host_cache_copies_total", way) for way in ("in", "out", "dropped")])

    def counts():
        return [value(each) if isinstance(each, str) else value(each[0], way=each[1]) for each in names]

    before, meter = counts(), StatusMeter("reference")
    for epoch, usage in (
        (1, HostUsage(blocks=5, used_bytes=70, hits=1, copied_in=3, copied_out=8, dropped=2)),
        (1, HostUsage(blocks=6, used_bytes=80, hits=1, copied_in=4, copied_out=9, dropped=2)),
        (1, HostUsage()),
        (1, HostUsage(blocks=1, used_bytes=10, hits=2, copied_in=1, copied_out=4, dropped=0)),
        # The epoch begins before the counts do.
        (2, HostUsage(blocks=1, used_bytes=10, hits=2, copied_in=1, copied_out=4, dropped=0)),
        (2, HostUsage()),
        (2, HostUsage(blocks=2, used_bytes=20, hits=0, copied_in=0, copied_out=2, dropped=1)),
    ):
        meter.observe(replace(status, epoch=epoch, host=usage), ready=True, routers=0, streams=0)
    assert (value("host_cache_blocks"), value("host_cache_bytes")) == (2, 20 * len(status.ranks))
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [3, 5, 15, 3]


async def test_requests_that_wait_for_the_state_server_are_measured(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        status = worker.engine.status()
    meter = StatusMeter("reference")
    for fetching in (3, 0):
        meter.observe(replace(status, remote=RemoteUsage(fetching=fetching)), ready=True, routers=0, streams=0)
        assert value("remote_cache_waiting") == fetching


async def test_counts_that_begin_anew_some_time_after_their_epoch_are_counted_once(model_dir, socket_path):
    async with served(make_settings(model_dir, socket_path)) as worker:
        status = worker.engine.status()

    def counts():
        each_rank = ("rank_steps_total", "rank_forward_seconds_total", "rank_collective_seconds_total")
        return [value(name) for name in ("steps_total", "compressed_blocks_total")] + [
            value(name, rank="9") for name in each_rank
        ]

    meter = StatusMeter("reference")
    meter.observe(replace(status, epoch=1, steps=0, compressed_blocks=0, ranks=()), ready=True, routers=0, streams=0)
    before = counts()
    for epoch, steps in ((1, 70), (2, 70), (2, 0), (2, 5), (2, 40), (3, 40), (3, 40), (3, 2)):
        rank = RankStatus(9, 1000 + epoch, "ready", steps, forward_s=steps / 4, collective_s=steps / 8)
        now = replace(status, epoch=epoch, steps=steps, compressed_blocks=2 * steps, ranks=(rank,))
        meter.observe(now, ready=True, routers=0, streams=0)
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [112, 224, 112, 28, 14]


async def test_ranks_and_cache_are_measured(model_dir, socket_path):
    names = ("forward_seconds_total", "collective_seconds_total", "steps_total")
    before = {(name, rank): value(f"rank_{name}", rank=rank) for name in names for rank in "01"}
    counts = ("preemptions_total", "prompt_tokens_total", "prefix_hit_tokens_total")
    counted = {name: value(name) for name in counts}
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("a", max_tokens=100))
        await until(lambda: len(worker.engine.requests) == 1)
        for _ in range(4):
            worker.engine.step()
        await until(lambda: value("rank_steps_total", rank="1") == before["steps_total", "1"] + 4)
        assert value("rank_memory_bytes", rank="0", kind="device") == 4096
        assert value("kv_blocks", tier="cold", use="free") == 12
        assert value("kv_blocks", tier="cold", use="used") == 4
        hot = value("kv_blocks", tier="hot", use="free"), value("kv_blocks", tier="hot", use="used")
        assert sum(hot) == 64 - 16
        worker.engine.lose_ranks()
        worker.engine.restart()
        await router.ready()
        worker.engine.step()
        await until(lambda: value("rank_steps_total", rank="1") > before["steps_total", "1"] + 4)
    grown = {key: value(f"rank_{key[0]}", rank=key[1]) - each for key, each in before.items()}
    steps = grown["steps_total", "0"]
    assert grown["forward_seconds_total", "0"] == grown["forward_seconds_total", "1"] == 0.5 * steps
    assert grown["collective_seconds_total", "0"] == 2 * grown["collective_seconds_total", "1"] == 0.125 * steps
    assert {name: value(name) - each for name, each in counted.items()} == {
        "preemptions_total": 3,
        "prompt_tokens_total": 100,
        "prefix_hit_tokens_total": 48,
    }


async def test_a_finished_stream_has_a_time_of_decoding(model_dir, socket_path):
    before = value("decode_seconds_count"), value("prefill_seconds_count")
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("a", max_tokens=2))
        await until(lambda: len(worker.engine.requests) == 1)
        worker.engine.step()
        await until(lambda: value("prefill_seconds_count") == before[1] + 1)
        assert value("decode_seconds_count") == before[0]
        worker.engine.step()
        await until(lambda: value("decode_seconds_count") == before[0] + 1)
        assert value("prefill_seconds_count") == before[1] + 1


async def test_an_embedding_has_no_time_of_decoding(model_dir, socket_path):
    before = value("decode_seconds_count"), value("prefill_seconds_count")
    async with served(make_settings(model_dir, socket_path)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("e", embed=True, sampling=None))
        await until(lambda: len(worker.engine.requests) == 1)
        worker.engine.step()
        await until(lambda: value("prefill_seconds_count") == before[1] + 1)
    assert value("decode_seconds_count") == before[0]


@pytest.mark.parametrize("metric", ["ready", "loading_ratio"])
async def test_what_is_joined_with_routers_metrics_has_the_name_that_clients_use(model_dir, socket_path, metric):
    async with served(make_settings(model_dir, socket_path, name=f"org/{metric}")) as worker:
        router = await worker.greeted()
        await router.ready()
        await until(lambda: value(metric, served_model=f"org/{metric}") == 1)


@pytest.mark.parametrize(
    "code",
    [
        "invalid_request", "context_length_exceeded", "resource_exhausted", "overloaded", "unavailable", "draining",
        "worker_lost", "deadline_exceeded", "numerical_error", "internal",
    ],
)  # fmt: skip
def test_each_reason_of_a_refusal_is_counted_from_0(code):
    assert REGISTRY.get_sample_value("lockstep_worker_rejected_total", {"code": code}) is not None


@pytest.mark.parametrize(
    ("blocks", "usage"),
    [
        ((0, 0, 0, 0), 0.0),
        ((64, 48, 0, 0), 0.25),
        ((184, 36, 100, 2), 0.98),
    ],
)
def test_the_cache_is_as_full_as_the_blocks_of_which_there_are_too_few(blocks, usage):
    names = ("total_blocks", "free_blocks", "cold_blocks", "free_cold_blocks")
    status = SimpleNamespace(**dict(zip(names, blocks, strict=True)))
    assert metrics.kv_usage(status) == pytest.approx(usage)


def test_memory_of_a_rank_is_that_of_its_process():
    meter = metrics.RankMeter(7)
    meter.observe(RankStatus(7, os.getpid(), "ready", 0))
    assert value("rank_memory_bytes", rank="7", kind="resident") > 10_000_000
    meter.observe(RankStatus(7, 2**22 + 1, "dead", 0))
    assert value("rank_memory_bytes", rank="7", kind="resident") == 0


async def test_names_of_vllm_are_shown_if_the_setting_says_so(model_dir, socket_path):
    def found(name):
        return REGISTRY.get_sample_value(f"vllm:{name}", {"model_name": model_dir.name})

    async with served(make_settings(model_dir, socket_path)) as worker:
        await worker.greeted()
        assert "vllm:" not in exposition_for("")[0].decode()
    async with served(make_settings(model_dir, socket_path, vllm_metric_names=True)) as worker:
        router = await worker.greeted()
        await router.send(submit=submit("a", max_tokens=100))
        await until(lambda: found("num_requests_running") == 1)
        assert found("num_requests_waiting") == 0
        assert found("kv_cache_usage_perc") == found("gpu_cache_usage_perc") == 1 / 4, "of the cold blocks"
        cache = {"model_name": model_dir.name, "block_size": "16", "num_gpu_blocks": "64"}
        assert REGISTRY.get_sample_value("vllm:cache_config_info", cache) == 1


def test_vllms_facts_of_the_cache_are_those_of_the_present_ranks():
    """A worker whose ranks start again may have another number of blocks; before its first start it has none."""
    registry = CollectorRegistry()
    names = VllmNames(registry)
    names.model = "m"
    found = []
    for blocks in (0, 64, 32):
        names.observe(0, 0, 0.0, blocks)
        families = {family.name: family for family in registry.collect()}
        found.append([sample.labels for sample in families["vllm:cache_config_info"].samples])
    of_one = {"model_name": "m", "block_size": "16"}
    assert found == [[], [of_one | {"num_gpu_blocks": "64"}], [of_one | {"num_gpu_blocks": "32"}]]
