"""The console's files and state: what is served where, to whom, and that it stays small and without secrets."""

import asyncio
import json
import os
import re
from importlib import resources
from types import SimpleNamespace

import httpx
import key_files
import pytest
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.management import Reports, managed
from lockstep_router.console import files
from lockstep_router.console.joined import joined
from lockstep_router.console.state import ConsoleState
from lockstep_router.discovery import WorkerAddress
from lockstep_router.history import MAX_ATTEMPTS, MAX_MOVES, MAX_RANKS, MAX_STREAMS, MAX_WORKS, History
from lockstep_router.settings import RouterSettings
from lockstep_router.status import status_body
from lockstep_router.streams.journal import Journal
from lockstep_router.streams.timeline import timeline_of
from lockstep_router.streams.trace import StreamTrace
from lockstep_router.workers.losses import Loss, Lost
from pydantic import ValidationError
from router_cluster import eventually
from scripted_worker import Script

HERE = {"host": "127.0.0.1"}
ROUTER_FIELDS = {
    "id", "version", "uptime_s", "state", "unready", "requests", "streams", "max_streams", "failovers", "sessions",
    "exact_failover", "resumable",
}  # fmt: skip
STREAM_FIELDS = {
    "key", "stream", "run", "model", "arrived_at", "ended_at", "outcome", "prompt_tokens", "max_tokens", "tokens",
    "attempts", "attempts_left_out",
}  # fmt: skip
MOVE_FIELDS = {"key", "stream", "run", "at", "from", "to", "reason", "gap_s", "tokens", "ended"}


async def state_of(cluster, **headers):
    answer = await cluster.client.get("/console/state", headers=HERE | headers)
    assert answer.status_code == 200
    return answer.json()


async def test_files_are_served_with_their_types_and_a_strict_policy(make_cluster):
    cluster = await make_cluster(console="public")
    for path, page in files.of("public").items():
        answer = await cluster.client.get(path, headers=HERE)
        assert answer.content == page.body
        if page.status == 308:
            assert answer.headers["location"] == "console/"
            continue
        assert answer.headers["content-type"] == page.content_type
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        again = await cluster.client.get(path, headers=HERE | {"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await cluster.client.head(path, headers=HERE)
        assert (head.status_code, head.content) == (200, b"")


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere():
    page = (resources.files("lockstep_router.console") / "static" / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|https?://", page)
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="main.js">']
    for path, answer in files.of("public").items():
        if path.endswith(".js"):
            assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", answer.body), path


@pytest.mark.parametrize(
    "path",
    [
        "/console/../settings.py",
        "/console/..%2f..%2fsettings.py",
        "/console/%2e%2e/state.py",
        "/console//etc/passwd",
        "/console/static/index.html",
        "/console/index.html",
        "/console/main.js%00",
        "/console/main.js/",
    ],
)
async def test_there_is_no_way_out_of_the_folder(make_cluster, path):
    cluster = await make_cluster(console="public")
    async with cluster.over_http() as client:
        request = client.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert (await client.send(request)).status_code == 404


async def test_other_methods_are_refused(make_cluster):
    cluster = await make_cluster(console="public")
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/console/", "/console/state"):
            assert (await cluster.client.request(method, path, headers=HERE)).status_code == 405


@pytest.mark.parametrize("console", ["off", "management"])
async def test_it_is_on_the_public_port_only_if_that_is_set(make_cluster, console):
    cluster = await make_cluster(console=console)
    for path in ("/console", "/console/", "/console/state", "/console/main.js"):
        assert (await cluster.client.get(path, headers=HERE)).status_code == 404


async def test_on_the_management_port_it_shows_and_does_not_chat(make_cluster):
    cluster = await make_cluster()
    reports = Reports(
        unready=lambda: None,
        files=files.of("management"),
        views={files.STATE: ConsoleState(cluster.router).on_management},
    )
    async with managed("127.0.0.1", 0, reports, liveness_timeout_s=60) as port, httpx.AsyncClient() as client:
        root = f"http://127.0.0.1:{port}"
        page = await client.get(f"{root}/console/")
        assert page.headers["content-security-policy"] == files.POLICY
        assert page.content == files.of("management")["/console/"].body
        known = await client.get(f"{root}/console/", headers={"if-none-match": page.headers["etag"]})
        assert (known.status_code, known.content) == (304, b"")
        assert (await client.get(f"{root}/console")).status_code == 308
        assert (await client.get(f"{root}/console/state.py")).status_code == 404
        assert (await client.post(f"{root}/console/state")).status_code == 405
        for path in ("/console", "/console/", "/console/state", "/console/state?x"):
            # A site can let its own name point to this machine, and its page would then be of the same origin.
            for host in ("elsewhere.example", "127.0.0.1.elsewhere.example:8001", ""):
                assert (await client.get(root + path, headers={"host": host})).status_code == 403
        state = (await client.get(f"{root}/console/state")).json()
        assert (state["format"], state["port"], state["chat"]) == (1, "management", False)


async def test_a_name_in_the_request_does_not_change_its_path(make_cluster, tmp_path):
    keys = key_files.write(tmp_path / "keys.yaml", key_files.tenant("search", key_files.KEY))
    cluster = await make_cluster(console="public", keys_file=keys)
    async with cluster.over_http() as client:
        for host in ("x/console/state?", "x/console/state#"):
            answer = await client.get("/console/main.js", headers={"host": host})
            assert answer.content == files.of("public")["/console/main.js"].body


async def test_off_means_nothing_is_kept(make_cluster):
    cluster = await make_cluster(console="off")
    assert (await cluster.complete()).status_code == 200
    assert not cluster.router.workers.history.streams
    assert files.of("off") == {}


async def test_a_stream_that_moves_is_in_the_state_without_its_text(make_cluster):
    cluster = await make_cluster(console="public")
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(die_after=4)
    answer = await cluster.complete(prompt="a secret prompt")
    assert answer.status_code == 200
    state = await state_of(cluster)
    assert set(state["router"]) == ROUTER_FIELDS
    assert (state["router"]["failovers"], state["router"]["sessions"]) == (1, 0)
    (move,) = state["moves"]
    assert set(move) == MOVE_FIELDS
    assert (move["from"], move["to"], move["tokens"]) == (first.worker_id, second.worker_id, 4)
    assert move["gap_s"] > 0
    (stream,) = state["streams"]
    assert set(stream) == STREAM_FIELDS
    assert (stream["outcome"], stream["tokens"]) == ("finished", 12)
    assert [(each["worker"], each["tokens"]) for each in stream["attempts"]] == [
        (first.worker_id, 4),
        (second.worker_id, 8),
    ]
    times = [stream["arrived_at"]]
    for attempt in stream["attempts"]:
        times += [attempt["chosen_at"], attempt["first_token_at"], attempt["ended_at"]]
    assert times == sorted(times)
    assert len(stream["stream"]) == 8
    text = json.dumps(state)
    assert "secret" not in text
    assert answer.json()["choices"][0]["text"] not in text


async def test_a_move_of_a_stream_that_ends_before_its_next_token_says_so(make_cluster):
    cluster = await make_cluster(console="public")
    first, (second,) = cluster.worker_of("user:u")
    first.script, second.script = Script(die_after=4), Script(delay_s=3600)
    history = cluster.router.workers.history
    client = asyncio.create_task(cluster.complete())
    await eventually(lambda: history.moves and history.moves[0].to_worker)
    client.cancel()
    await eventually(lambda: history.streams[0].outcome)
    (move,) = (await state_of(cluster))["moves"]
    assert (move["to"], move["gap_s"], move["ended"]) == (second.worker_id, None, "cancelled")


@pytest.mark.parametrize(
    ("paces", "slow"),
    [
        (((0.010, 0.004), (0.013, 0.001)), 1),
        (((0.013, 0.001), (0.010, 0.004)), 0),
        (((0.010, 0.003), (0.012, 0.001)), None),  # not by a quarter
        (((0.013, 0.004), (0.010, 0.001)), None),  # the others do not wait for it
        (((0.0, 0.0), (0.013, 0.001)), None),  # not measured
        (((0.0, 0.0), (0.0, 0.0)), None),
        (((0.013, 0.001),), None),  # it is alone
    ],
)
async def test_a_slow_rank_is_named_to_operators_and_tenants(make_cluster, paces, slow):
    cluster = await make_cluster(1, console="public")
    cluster.workers[0].paces = paces

    def known():
        (worker,) = status_body(cluster.router)["workers"]
        return [(rank["compute_s"], rank["collective_s"]) for rank in worker["ranks"]] == list(paces)

    await eventually(known)
    (reported,) = status_body(cluster.router)["workers"]
    (shown,) = (await state_of(cluster))["workers"]
    assert reported["slow_rank"] == shown["slow_rank"] == slow
    assert [(rank["compute_s"], rank["collective_s"]) for rank in shown["ranks"]] == list(paces)


WORKS = {
    "prefill": [
        {"steps": 2, "compute_s": 0.5, "collective_s": 0.125, "idle_s": 0.0625},
        {"steps": 2, "compute_s": 0.25, "collective_s": 0.375, "idle_s": 0.0625},
    ],
    "decode": [{"steps": 9, "compute_s": 1.0}] * 2,
}


async def test_each_attempt_has_what_the_ranks_of_its_worker_did(make_cluster):
    cluster = await make_cluster(console="public")
    first, (second,) = cluster.worker_of("user:u")
    first.script = Script(reject_after=4, rejection=worker_pb2.Rejected(code="worker_lost", retryable=True))
    first.works, second.works = WORKS, {"decode": WORKS["decode"]}
    assert (await cluster.complete()).status_code == 200
    (stream,) = cluster.router.workers.history.streams
    await eventually(lambda: all(attempt.decode for attempt in stream.attempts))
    (shown,) = (await state_of(cluster))["streams"]
    moved, finished = (attempt["ranks"] for attempt in shown["attempts"])
    assert moved["prefill"] == [
        {"steps": 2, "compute_s": 0.5, "transfer_s": 0.125, "peer_wait_s": 0.0, "idle_s": 0.0625},
        {"steps": 2, "compute_s": 0.25, "transfer_s": 0.125, "peer_wait_s": 0.25, "idle_s": 0.0625},
    ]
    assert [each["steps"] for each in moved["decode"]] == [9, 9]
    assert (finished["prefill"], finished["decode"]) == ([], moved["decode"])


async def test_a_worker_tells_of_its_own_attempts_only():
    history = History(is_kept=True)
    journal = Journal("s", "m", "d", [1], inference_pb2.Sampling(max_tokens=9), "session")
    timeline = timeline_of(journal, history, StreamTrace(), 0.0, asyncio.get_running_loop().time)
    timeline.begin()
    timeline.choose(SimpleNamespace(worker_id="w0", epoch=1), None, None)
    works = [worker_pb2.RankWork(steps=1)] * (MAX_RANKS + 1)
    (attempt,) = history.streams[0].attempts
    for worker, stream_id, number in (("w1", "s", 1), ("w0", "other", 1), ("w0", "s", 2)):
        reported = worker_pb2.EndedAttempt(stream_id=stream_id, attempt=number, prefill=works, decode=works)
        history.note_ranks(worker, [reported])
        assert (attempt.prefill, attempt.decode) == ((), ())
    history.note_ranks("w0", [worker_pb2.EndedAttempt(stream_id="s", attempt=1, prefill=works)])
    assert (len(attempt.prefill), attempt.decode) == (MAX_RANKS, ())


async def test_of_ranks_only_so_much_is_kept_of_the_newest_attempts():
    history = History(is_kept=True)
    works = [worker_pb2.RankWork(steps=1)] * MAX_RANKS
    for number in range(40):
        journal = Journal(f"s{number}", "m", "d", [1], inference_pb2.Sampling(max_tokens=9), "session")
        timeline = timeline_of(journal, history, StreamTrace(), 0.0, asyncio.get_running_loop().time)
        timeline.begin()
        timeline.choose(SimpleNamespace(worker_id="w0", epoch=1), None, None)
        reported = worker_pb2.EndedAttempt(stream_id=journal.stream_id, attempt=1, prefill=works, decode=works)
        history.note_ranks("w0", [reported, reported])
        nothing = worker_pb2.EndedAttempt(stream_id=journal.stream_id, attempt=2)
        timeline.choose(SimpleNamespace(worker_id="w0", epoch=1), None, None)
        history.note_ranks("w0", [nothing] * 100)
        assert len(history._with_works) <= MAX_WORKS
    kept = [stream.attempts[0].works for stream in history.streams]
    assert sum(kept) == MAX_WORKS
    assert kept == sorted(kept), "the newest ones"


async def test_workers_that_have_not_been_reached_differ_without_their_addresses(make_cluster):
    cluster = await make_cluster(1, console="public")
    cluster.router.workers.report.update(
        frozenset({*cluster.router.workers.report.workers, WorkerAddress("127.0.0.1:1"), WorkerAddress("127.0.0.1:2")})
    )
    workers = (await state_of(cluster))["workers"]
    assert len({worker["id"] for worker in workers}) == len(workers) == 3
    assert "127.0.0.1" not in json.dumps(workers)


async def test_a_cancelled_and_a_refused_stream_have_their_outcomes(make_cluster):
    cluster = await make_cluster(1, console="public")
    cluster.workers[0].script = Script(delay_s=0.05)
    async with cluster.over_http() as client:
        body = {"model": "reference", "prompt": "hello", "max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            state = await state_of(cluster)
            assert (state["streams"][0]["outcome"], state["router"]["sessions"]) == ("", 1)
        await eventually(lambda: not cluster.router.streams)
    assert cluster.router.workers.history.streams[0].outcome == "cancelled"
    assert cluster.router.workers.history.sessions == 0


async def test_the_history_is_bounded(make_cluster):
    cluster = await make_cluster(1, console="public")
    history = cluster.router.workers.history
    for _ in range(MAX_STREAMS // 10 + 1):
        assert (await cluster.complete(prompt=["a"] * 10, max_tokens=1)).status_code == 200
    assert len(history.streams) == MAX_STREAMS
    for number in range(MAX_MOVES + 5):
        history.move(history.streams[0], "w", "link_lost", float(number))
    assert len(history.moves) == MAX_MOVES
    state = await state_of(cluster)
    assert len(json.dumps(state)) < 200_000
    assert state["moves"][0]["key"] == str(MAX_MOVES + 5)


async def test_attempts_of_one_stream_are_bounded():
    history = History(is_kept=True)
    journal = Journal("s", "m", "d", [1], inference_pb2.Sampling(max_tokens=9), "session")
    timeline = timeline_of(journal, history, StreamTrace(), 0.0, asyncio.get_running_loop().time)
    timeline.begin()
    for number in range(MAX_ATTEMPTS + 5):
        timeline.choose(SimpleNamespace(worker_id=f"w{number}", epoch=1), None, None)
        timeline.leave(Lost(Loss.LINK_LOST))
    timeline.end(None)
    (stream,) = history.streams
    assert [each.worker for each in stream.attempts] == [
        *(f"w{number}" for number in range(MAX_ATTEMPTS - 1)),
        f"w{MAX_ATTEMPTS + 4}",
    ]
    assert stream.attempts_left_out == 5
    assert [move.to_worker for move in history.moves] == [f"w{number}" for number in range(1, MAX_ATTEMPTS + 5)] + [""]
    assert history.moves[-1].ended == "finished"


async def test_a_tenant_sees_itself_and_needs_its_key(make_cluster, tmp_path):
    keys = key_files.write(
        tmp_path / "keys.yaml",
        key_files.tenant("search", key_files.KEY, requests_per_minute=10, tokens_per_minute=1000),
        key_files.tenant("chat", key_files.OTHER_KEY, priority="high"),
    )
    cluster = await make_cluster(console="public", keys_file=keys, dashboard_url="https://grafana.example/d")
    assert (await cluster.client.get("/console/")).status_code == 200
    assert (await cluster.client.get("/console/main.js")).status_code == 200
    for headers in ({}, key_files.bearer("lsk-wrong")):
        assert (await cluster.client.get("/console/state", headers=headers)).status_code == 401
        assert (await cluster.client.get("/console/nothing", headers=headers)).status_code == 401
    for key in (key_files.KEY, key_files.OTHER_KEY, key_files.OTHER_KEY):
        assert (await cluster.complete(headers=key_files.bearer(key))).status_code == 200
    for link in cluster.router.workers.links:
        link.health.breaker.eject("its probe failed", cluster.router.workers.clock.now())
    own = await state_of(cluster, **key_files.bearer(key_files.KEY))
    (row,) = own["tenants"]["rows"]
    assert (row["name"], row["requests"]) == ("search", {"used": 1, "limit": 10})
    assert 0 < row["tokens"]["used"] < 1000
    assert len(own["streams"]) == 1
    assert own["links"] == []
    assert {"target", "pid", "incarnation"}.isdisjoint(own["workers"][0])
    assert own["workers"][0]["health"]["ejected_because"] == own["workers"][0]["reason"] == ""
    assert "pid" not in own["workers"][0]["ranks"][0]
    everything = ConsoleState(cluster.router).on_management()
    assert everything["workers"][0]["health"]["ejected_because"] == "its probe failed"
    assert [each["name"] for each in everything["tenants"]["rows"]] == ["chat", "search"]
    assert len(everything["streams"]) == 3
    assert everything["links"] == [{"name": "Dashboards", "url": "https://grafana.example/d"}]
    for text in (json.dumps(own), json.dumps(everything)):
        assert key_files.KEY not in text
        assert key_files.digest(key_files.KEY) not in text
        assert '"owner"' not in text


async def test_a_tenant_that_is_not_among_the_busiest_sees_itself(make_cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep_router.console.state.MAX_TENANTS", 1)
    keys = key_files.write(
        tmp_path / "keys.yaml",
        key_files.tenant("chat", key_files.OTHER_KEY),
        key_files.tenant("search", key_files.KEY, requests_per_minute=10),
    )
    cluster = await make_cluster(console="public", keys_file=keys)
    own = await state_of(cluster, **key_files.bearer(key_files.KEY))
    assert [row["name"] for row in own["tenants"]["rows"]] == ["search"]


async def test_a_name_that_points_here_is_refused_without_keys(make_cluster):
    cluster = await make_cluster(console="public")
    for path in ("/console/", "/console/state"):
        assert (await cluster.client.get(path, headers={"host": "elsewhere.example"})).status_code == 404


async def test_many_viewers_cause_one_state(make_cluster):
    cluster = await make_cluster(console="public")
    now = [0.0]
    console = ConsoleState(cluster.router, lambda: now[0])
    before = console.on_management()
    assert (await cluster.complete()).status_code == 200
    assert console.on_management() == before
    now[0] += 1
    assert len(console.on_management()["streams"]) == 1


async def test_processes_are_shown_together(make_cluster):
    cluster = await make_cluster(console="public")
    assert (await cluster.complete()).status_code == 200
    body = ConsoleState(cluster.router).on_management()
    together = joined({0: body, 1: json.loads(json.dumps(body))}, "r", 3)
    assert (together["router"]["id"], together["processes"]) == ("r", 3)
    assert together["router"]["max_streams"] == 2 * body["router"]["max_streams"]
    assert [each["key"] for each in together["streams"]] == ["0.1", "1.1"]
    assert together["others"] is None
    without_first = joined({1: body}, "r", 3, has_others=True)
    assert without_first["others"] == {"problem": "the process that asks them does not answer", "rows": []}


def test_settings_that_would_open_it_to_everyone_are_refused(tmp_path):
    keys = key_files.write(tmp_path / "keys.yaml", key_files.tenant("search", key_files.KEY))
    given = {"workers": ["a:1"], "host": "0.0.0.0", "console": "public"}
    with pytest.raises(ValidationError, match="needs keys_file"):
        RouterSettings(**given)
    assert RouterSettings(**given, keys_file=os.fspath(keys)).console == "public"
    for address in (
        "javascript:alert(1)",
        "data:text/html,x",
        "//example.com",
        "https://user:pass@example.com",
        "https://",
    ):
        with pytest.raises(ValidationError, match="dashboard_url"):
            RouterSettings(workers=["a:1"], dashboard_url=address)
