"""A stream that makes its workers die is found and quarantined, and the streams that ran with it are spared."""

import asyncio
import math
import random
from dataclasses import dataclass, replace

import httpx
import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_router.faces.rest.app import create_app
from lockstep_router.router import Router
from lockstep_router.settings import RouterSettings
from lockstep_router.workers.evidence import Evidence
from lockstep_router.workers.suspects import Suspects
from router_cluster import eventually
from scripted_worker import Script

TOKENS = 12
LIVES = [("w0", 1, 1), ("w1", 1, 1)]
LATER = 60.1
"""Time, in seconds, at which a death at 0 is no longer recent."""


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def error_of(response):
    return response.json()["error"]


def poisoned(cluster, prompt, after=3):
    ids = cluster.tokenizer.encode(prompt)
    return Script(
        poison=lambda submit: list(submit.prompt_ids) == ids, poison_after=after, delay_s=0.005, says_phase=True
    )


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_stream_that_kills_after_some_tokens_each_time_is_quarantined(cluster, after):
    for worker in cluster.workers:
        worker.script = poisoned(cluster, "poison", after)
    response = await cluster.complete("poison", max_tokens=100)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["code"] == "request_quarantined"
    assert "3 workers in a row died" in error["message"]
    assert sum(worker.deaths for worker in cluster.workers) == 3


async def test_quarantined_request_is_refused_when_it_comes_again_with_any_seed(cluster):
    for worker in cluster.workers:
        worker.script = poisoned(cluster, "poison")
    await cluster.complete("poison", max_tokens=100)
    await eventually(lambda: len(cluster.router.workers.ready()) == 2)
    sent = sum(len(worker.submits) for worker in cluster.workers)
    again = await cluster.complete("poison", max_tokens=100, seed=99)
    assert (again.status_code, again.json()["error"]["code"]) == (422, "request_quarantined")
    assert sum(len(worker.submits) for worker in cluster.workers) == sent
    assert text_of(await cluster.complete("hello")) == cluster.undisturbed("hello", 7, TOKENS)
    assert (await cluster.client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_streams_beside_the_poison_are_spared(make_cluster, workers):
    cluster = await make_cluster(workers, max_attempts=1)
    for worker in cluster.workers:
        worker.script = poisoned(cluster, "poison")
    innocent = [f"innocent {number}" for number in range(12)]
    running = [
        asyncio.create_task(cluster.complete(prompt, user=prompt, max_tokens=100))
        for prompt in [*innocent[:6], "poison", *innocent[6:]]
    ]
    responses = await asyncio.gather(*running)
    guilty = responses.pop(6)
    assert guilty.json()["error"]["code"] == "request_quarantined"
    for prompt, response in zip(innocent, responses, strict=True):
        assert text_of(response) == cluster.undisturbed(prompt, 7, 100)
    deaths = sum(worker.deaths for worker in cluster.workers)
    assert deaths <= 2 + 2 + 3, "two until it is tried, a quarter and a quarter of that, three alone"


async def test_stream_on_trial_keeps_away_from_a_worker_that_is_ejected_for_its_faults(make_cluster):
    """Its death there would show nothing about the stream."""
    cluster = await make_cluster(3)
    for worker in cluster.workers:
        worker.script = poisoned(cluster, "poison")
    broken = cluster.router.workers.links[0]
    broken.health.breaker.eject("test", cluster.router.workers.clock.now())
    response = await cluster.complete("poison", max_tokens=100)
    assert error_of(response)["code"] == "request_quarantined"
    assert [worker.deaths for worker in cluster.workers if worker.target == broken.target] == [0]
    assert sum(worker.deaths for worker in cluster.workers) == 3


async def test_poison_in_the_queue_of_a_dead_worker_is_not_suspected(make_cluster):
    cluster = await make_cluster(1, quarantine_after=1)
    (worker,) = cluster.workers
    worker.limit(1)
    worker.script = Script(delay_s=0.05, says_phase=True)
    running = asyncio.create_task(cluster.complete("running"))
    await eventually(lambda: worker.seats.running == 1)
    waiting = asyncio.create_task(cluster.complete("waiting"))
    await eventually(lambda: len(worker.submits) == 2)
    await eventually(lambda: cluster.router.workers.links[0].status.queued == 1)
    worker.restart_ranks()
    assert (await running).status_code == 422, "it alone ran there, and one death is enough here"
    assert text_of(await waiting) == cluster.undisturbed("waiting", 7, TOKENS)


# The rules, without workers.


def simulate(streams, poison, workers):
    """Deaths until the poison is found: streams run wherever they may, and each worker that runs the poison dies."""
    rng = random.Random(1)
    suspects = Suspects(3, lambda: None)
    deaths = 0
    while not suspects.is_guilty(poison):
        placed = {life: [] for life in LIVES[:workers]}
        order = list(streams)
        rng.shuffle(order)
        for stream in order:
            lives = [life for life in placed if suspects.may_enter(stream, life)]
            if lives:
                life = rng.choice(lives)
                suspects.enter(stream, life)
                placed[life].append(stream)
        for life, running in placed.items():
            if poison in running:
                suspects.note_death(life, running, 0.0)
                deaths += 1
            else:
                for stream in running:
                    suspects.note_progress(stream, 32 << 8)
            for stream in running:
                suspects.leave(stream)
    return deaths, suspects


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64, 256])
@pytest.mark.parametrize("workers", [1, 2])
def test_poison_is_found_in_few_deaths_and_nobody_else_is_guilty(count, workers):
    streams = [f"s{number}" for number in range(count)]
    deaths, suspects = simulate(streams, "s0", workers)
    assert [stream for stream in streams if suspects.is_guilty(stream)] == ["s0"]
    assert deaths <= 3 + (0 if count == 1 else 2 + math.ceil(math.log(count, 4)))


def test_two_deaths_apart_clear_nobody_and_tokens_do():
    suspects = Suspects(3, lambda: None)
    suspects.note_death(LIVES[0], ["a"], 0.0)
    suspects.note_progress("a", 31)
    suspects.note_death(LIVES[0], ["a"], 0.0)
    assert suspects.deaths_alone("a") == 2
    suspects.note_progress("a", 63)
    assert suspects.deaths_alone("a") == 2, "after the second death it takes twice as many"
    suspects.note_progress("a", 64)
    assert suspects.deaths_alone("a") == 0


def test_poison_that_kills_at_a_steady_pace_does_not_clear_itself():
    suspects = Suspects(3, lambda: None)
    deaths = 0
    while not suspects.is_guilty("a"):
        suspects.note_death(LIVES[0], ["a"], 0.0)
        suspects.note_progress("a", 100)
        deaths += 1
        assert deaths <= 6


def test_fresh_poison_beside_a_stream_on_trial_does_not_make_that_one_guilty():
    suspects = Suspects(3, lambda: None)
    suspects.note_death(LIVES[0], ["innocent", "x"], 0.0)
    suspects.note_death(LIVES[0], ["innocent", "y"], 0.0)
    assert suspects.is_tried("innocent")
    suspects.enter("innocent", LIVES[0])
    suspects.note_death(LIVES[0], ["innocent", "poison"], LATER)
    suspects.leave("innocent")
    suspects.enter("innocent", LIVES[0])
    suspects.note_death(LIVES[0], ["innocent", "poison"], LATER)
    suspects.leave("innocent")
    assert suspects.is_tried("poison")
    suspects.enter("poison", LIVES[0])
    assert not suspects.may_enter("innocent", LIVES[0])
    for _ in range(3):
        suspects.note_death(LIVES[0], ["poison"], LATER)
    assert suspects.is_guilty("poison")
    assert not suspects.is_guilty("innocent")


def test_ended_streams_leave_nothing_behind():
    suspects = Suspects(3, lambda: None)
    for number in range(100):
        suspects.note_death(LIVES[0], [f"s{number}"], 0.0)
        suspects.note_death(LIVES[0], [f"s{number}"], 0.0)
        suspects.enter(f"s{number}", LIVES[0])
        suspects.forget(f"s{number}")
    assert suspects.counts == {"suspected": 0, "tried": 0, "quarantined": 0}
    for number in range(3000):
        suspects.quarantine(f"s{number}", str(number).encode(), 0.0)
    assert suspects.counts["quarantined"] == 1024
    assert not suspects.has_quarantined(lambda: b"2999", 1e9), "a quarantine ends"
    assert suspects.counts["quarantined"] == 0


async def test_broken_connections_are_no_deaths(make_cluster):
    """The worker lives on with the same ranks, so its stream is no suspect, however often that happens."""
    cluster = await make_cluster(2)
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.01, says_phase=True)
    running = asyncio.create_task(cluster.complete(max_tokens=200))
    for number in range(6):
        await eventually(lambda: len(cluster.router.workers.ready()) == 2)
        await eventually(lambda: sum(worker.seats.running for worker in cluster.workers) == 1)
        for worker in cluster.workers:
            if worker.seats.running:
                worker.break_connections()
        await eventually(lambda number=number: cluster.router.failovers == number + 1)
    assert text_of(await running) == cluster.undisturbed("hello world", 7, 200)
    assert cluster.router.failovers == 6


def test_life_that_goes_on_takes_its_charge_back():
    suspects = Suspects(3, lambda: None)
    suspects.note_death(LIVES[0], ["a"], 0.0)
    suspects.note_death(LIVES[1], ["a"], 0.0)
    suspects.note_alive(LIVES[1])
    suspects.note_alive(LIVES[1])
    assert suspects.deaths_alone("a") == 1
    suspects.note_death(LIVES[1], ["a"], 0.0)
    assert suspects.deaths_alone("a") == 2


def test_stream_is_not_guilty_as_long_as_workers_die_without_it_too():
    suspects = Suspects(3, lambda: None)
    for _ in range(3):
        suspects.note_death(LIVES[0], ["a"], 0.0)
        suspects.note_death(LIVES[1], [], 0.0)
    assert not suspects.is_guilty("a")
    for _ in range(3):
        suspects.note_death(LIVES[0], ["a"], 0.0)
    assert suspects.is_guilty("a"), "six, since there were three without it"


@pytest.mark.parametrize("at", [60.0, LATER])
def test_deaths_shortly_before_a_stream_was_in_any_prove_that_workers_die_of_something_else(at):
    suspects = Suspects(3, lambda: None)
    suspects.note_death(LIVES[0], ["other"], 0.0)
    suspects.note_death(LIVES[1], [], 0.0)
    suspects.note_alive(LIVES[1])
    for epoch in range(3):
        suspects.note_death(("w2", 1, epoch), ["a"], at)
    assert suspects.is_guilty("a") is (at == LATER)
    suspects.note_death(("w2", 1, 3), ["a"], at)
    assert suspects.is_guilty("a"), "four, since one was without it"


def test_deaths_that_a_quarantined_stream_explains_prove_nothing_for_the_next_one():
    suspects = Suspects(3, lambda: None)
    for stream in ("a", "b"):
        for epoch in range(3):
            suspects.note_death((stream, 1, epoch), [stream], 0.0)
        assert suspects.is_guilty(stream)
        suspects.quarantine(stream, stream.encode(), 0.0)
        suspects.forget(stream)


def test_two_poisons_at_once_are_both_found():
    suspects = Suspects(3, lambda: None)
    deaths = 0
    while not (suspects.is_guilty("a") and suspects.is_guilty("b")):
        for life, stream in zip(LIVES, ("a", "b"), strict=True):
            if not suspects.is_guilty(stream):
                suspects.note_death(life, [stream], 0.0)
                deaths += 1
    assert deaths <= 2 * 3 * 3


def test_deaths_beside_streams_of_other_routers_prove_less():
    """Each router sees its own streams alone, so an innocent one may be the only one that it knows in each death."""
    suspects = Suspects(3, lambda: None)
    for _ in range(8):
        suspects.note_death(LIVES[0], ["a"], 0.0, has_others=True)
    assert suspects.is_tried_beside_others("a")
    assert not suspects.is_guilty("a")
    suspects.note_death(LIVES[0], ["a"], 0.0, has_others=True)
    assert suspects.is_guilty("a"), "nine in a row, and it never got enough tokens"


def test_worker_that_may_have_been_dead_before_proves_less():
    suspects = Suspects(3, lambda: None)
    suspects.note_death(LIVES[0], ["a"], 0.0)
    suspects.note_death(LIVES[1], ["a"], 0.0, is_certain=False)
    suspects.note_death(("w2", 1, 1), ["a"], 0.0, is_certain=False)
    assert not suspects.is_guilty("a")
    suspects.note_alive(("w2", 1, 1))
    assert suspects.deaths_alone("a") == 2
    suspects.note_death(LIVES[0], ["a"], 0.0)
    assert not suspects.is_guilty("a")
    suspects.note_death(LIVES[0], ["a"], 0.0)
    assert suspects.is_guilty("a"), "three that are certain"


async def test_only_stream_of_workers_that_all_die_at_once_is_innocent(make_cluster):
    cluster = await make_cluster(4)
    for worker in cluster.workers:
        worker.script = Script(delay_s=0.01, says_phase=True)
    running = asyncio.create_task(cluster.complete(max_tokens=100))
    await eventually(lambda: any(len(worker.submits) for worker in cluster.workers))
    await eventually(
        lambda: cluster.router.workers.links and any(link.has_streams for link in cluster.router.workers.links)
    )
    await asyncio.sleep(0.1)
    await asyncio.gather(*(worker.kill() for worker in cluster.workers))
    await asyncio.sleep(0.1)
    for worker in cluster.workers:
        await worker.restart()
    assert text_of(await running) == cluster.undisturbed("hello world", 7, 100)


async def test_copies_of_a_quarantined_request_are_refused_too(make_cluster, caplog):
    """They run already when it is found. They end with their next attempt, and no worker dies for each of them."""
    cluster = await make_cluster(2)
    for worker in cluster.workers:
        worker.script = poisoned(cluster, "poison")
    responses = await asyncio.gather(*(cluster.complete("poison", max_tokens=100, user=f"u{n}") for n in range(6)))
    assert {response.status_code for response in responses} == {422}
    found = [record for record in caplog.records if record.message.startswith("stream quarantined")]
    assert len(found) <= 2, "one for each worker"


async def test_streams_of_other_routers_on_a_worker_that_cannot_tell_what_it_ran_are_noticed(make_cluster):
    cluster = await make_cluster(1)
    (worker,) = cluster.workers
    worker.script = replace(poisoned(cluster, "poison"), says_phase=False)
    worker.seats.running = 5
    deaths = []
    note = cluster.router.workers.suspects.note_death
    cluster.router.workers.suspects.note_death = lambda *a, **k: (deaths.append(k["has_others"]), note(*a, **k))
    await eventually(lambda: cluster.router.workers.links[0].status.running == 5)
    response = await cluster.complete("poison", max_tokens=100)
    assert response.status_code == 422
    assert "9 workers in a row died" in error_of(response)["message"]
    assert deaths == [True] * 9


# What a worker reports of its death.

NONE, SUSPECTED, ON_TRIAL = worker_pb2.Suspicion.values()


@dataclass
class Sent:
    stream_id: str
    is_running: bool = True


def evidence(**suspicions):
    made = Evidence()
    for stream_id, suspicion in suspicions.items():
        made.note_sent(stream_id, suspicion)
    return made


def lost(streams, suspected=0, on_trial=0, received=9):
    batch = worker_pb2.LostBatch(streams=streams, suspected=suspected, on_trial=on_trial)
    return worker_pb2.Status(received=received, lost=batch)


@pytest.mark.parametrize(
    ("suspicion", "status", "suspects", "has_others"),
    [
        (NONE, lost(1), ("a",), False),
        (NONE, lost(2), ("a",), True),
        (SUSPECTED, lost(2, 2), ("a",), True),
        (NONE, lost(2, 1, 1), (), True),
        (ON_TRIAL, lost(1, 1, 1), ("a",), False),
        (ON_TRIAL, lost(5, 1, 1), ("a",), False),
        (ON_TRIAL, lost(5, 2, 1), ("a",), True),
        (ON_TRIAL, lost(5, 2, 2), ("a",), True),
    ],
)
def test_worker_tells_whose_streams_its_ranks_ran(suspicion, status, suspects, has_others):
    death = evidence(a=suspicion).of_death([Sent("a")], status, running_of_others=False)
    assert death.stream_ids == suspects
    assert death.has_others is has_others
    assert death.is_explained is not bool(suspects)
    assert death.is_certain


def test_stream_that_the_ranks_did_not_run_is_no_suspect():
    death = evidence(a=NONE).of_death([Sent("a", is_running=False)], lost(1), running_of_others=True)
    assert death.stream_ids == ()


def test_stream_that_the_worker_has_not_got_is_no_certain_suspect():
    made = evidence(a=NONE, b=NONE)
    waiting = [Sent("a", is_running=False), Sent("b", is_running=False)]
    of_first = made.of_death(waiting, worker_pb2.Status(received=1), running_of_others=False)
    assert (of_first.stream_ids, of_first.is_certain) == (("a",), True)
    of_none = made.of_death(waiting, worker_pb2.Status(), running_of_others=False)
    assert (of_none.stream_ids, of_none.is_certain) == (("a", "b"), False)
    made.begin()
    made.note_sent("b", NONE)
    again = made.of_death([Sent("b", is_running=False)], worker_pb2.Status(received=1), running_of_others=False)
    assert (again.stream_ids, again.is_certain) == (("b",), True), "each connection counts from 1"


@pytest.mark.parametrize(("companions", "is_guilty"), [("new", True), ("cleared", True), ("suspected", False)])
def test_companion_that_was_in_a_death_before_takes_certainty_from_the_stream_on_trial(companions, is_guilty):
    suspects = Suspects(3, lambda: None)
    for number in range(3):
        if companions != "new":
            suspects.note_death(LIVES[0], [f"companion {number}"], 0.0)
        if companions == "cleared":
            suspects.note_progress(f"companion {number}", 32)
    for number in range(2):
        suspects.note_death(LIVES[0], ["tried", f"other {number}"], LATER)
    for number in range(3):
        suspects.note_death(LIVES[0], ["tried", f"companion {number}"], LATER)
    assert suspects.deaths_alone("tried") == 3
    assert suspects.is_guilty("tried") is is_guilty


async def test_poison_of_one_router_does_not_quarantine_a_stream_of_another(make_cluster):
    """Both routers see each death of the worker that they share; only one of them has the cause."""
    first = await make_cluster(1)
    (worker,) = first.workers
    worker.script = poisoned(first, "poison")
    async with (
        Router(RouterSettings(workers=[worker.target], backoff_initial_s=0.02)) as other,
        httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(other)), base_url="http://other") as client,
    ):
        await eventually(lambda: len(other.workers.ready()) == 1)
        bystander = asyncio.create_task(first.complete("innocent", max_tokens=240))
        await eventually(lambda: worker.seats.running == 1)
        body = {"model": "reference", "prompt": "poison", "max_tokens": 100}
        guilty = await client.post("/v1/completions", json=body, timeout=60)
        assert error_of(guilty)["code"] == "request_quarantined"
        assert text_of(await bystander) == first.undisturbed("innocent", 7, 240)
    suspicions = {submit.suspicion for submit in worker.submits}
    assert suspicions == {NONE, SUSPECTED, ON_TRIAL}
