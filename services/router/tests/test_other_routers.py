"""The other routers in the console: what each answers, and answers that are late, too large or none of a router."""

import asyncio
import contextlib
import json

import httpx
import pytest
from authority import ROUTER, WORKER, Authority, Mounted
from lockstep_common.management import Reports, managed
from lockstep_router.console import files, others, router_facts
from lockstep_router.console.others import OtherRouters
from lockstep_router.console.router_facts import MAX_ANSWER_BYTES
from lockstep_router.console.state import ConsoleState
from lockstep_router.settings import RouterSettings
from lockstep_router.tls import RouterTls
from pydantic import ValidationError
from router_cluster import eventually
from router_process import listening, start

FACTS = {
    "id": "router-b",
    "version": "0.1.0",
    "state": "serving",
    "unready": "",
    "uptime_s": 12.5,
    "requests": 3,
    "streams": 4,
    "max_streams": 4096,
    "failovers": 2,
    "sessions": 1,
}


def settings_of(*routers, **more):
    return RouterSettings(workers=["a:1"], router_id="router-a", console_routers=routers, **more)


@contextlib.asynccontextmanager
async def router(view, tls=None):
    """The management port of a router that answers this; yields its address."""
    reports = Reports(unready=lambda: None, views={files.ROUTER: view})
    async with managed("127.0.0.1", 0, reports, liveness_timeout_s=60, tls=tls) as port:
        yield f"127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def raw(answer):
    """A port that answers each request with these bytes; None: with nothing, and it keeps the connection."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()  # until the other side closes
        writer.write(answer or b"")
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def http(body, status="200 OK"):
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Looking:
    """A console that looks again a second later."""

    def __init__(self, settings, certificates=None):
        self.now = 0.0
        self.others = OtherRouters(settings, certificates, lambda: self.now)

    async def until(self, holds):
        """The rows by address, once this holds for them."""

        def rows():
            return {row["address"]: row for row in self.others.body()["rows"]}

        def found():
            self.now += 1
            return bool(rows()) and holds(rows())

        await eventually(found)
        return rows()


@pytest.fixture
async def look():
    async with contextlib.AsyncExitStack() as stack:

        def make(*routers, certificates=None, **more):
            looking = Looking(settings_of(*routers, **more), certificates)
            stack.push_async_callback(looking.others.close)
            return looking

        yield make


async def test_a_router_is_shown_as_it_tells_and_then_as_away(look):
    facts = dict(FACTS)
    async with router(lambda: facts | {"keys": "secret"}) as address:
        looking = look(address)
        assert looking.others.body() == {"problem": "", "rows": []}  # it is asked meanwhile
        rows = await looking.until(lambda rows: rows[address]["facts"])
        assert (rows[address]["facts"], rows[address]["problem"]) == (FACTS, "")
        facts["state"] = "draining"
        await looking.until(lambda rows: rows[address]["facts"]["state"] == "draining")
    rows = await looking.until(lambda rows: rows[address]["problem"])
    before = rows[address]["heard_s"]
    assert rows[address]["facts"]["state"] == "draining"
    rows = await looking.until(lambda rows: rows[address]["heard_s"] > before)


async def test_what_a_router_tells_fits_and_is_no_more_than_its_state(make_cluster, look):
    cluster = await make_cluster(console="public", router_id="router-b")
    assert (await cluster.complete(prompt="a secret prompt", user="u")).status_code == 200
    console = ConsoleState(cluster.router)
    assert set(console.of_router()) == {*FACTS, "exact_failover", "resumable"}
    async with router(console.of_router) as address:
        rows = await look(address).until(lambda rows: rows[address]["facts"])
        assert rows[address]["facts"]["id"] == "router-b"
    # It is for operators: the public port has no path for it.
    assert (await cluster.client.get(files.ROUTER, headers={"host": "127.0.0.1"})).status_code == 404
    assert ConsoleState(cluster.router, others=look().others).on_management()["others"] == {"problem": "", "rows": []}
    assert ConsoleState(cluster.router, others=look().others).on_public("")["others"] is None


async def test_a_router_does_not_show_itself(look):
    async with router(lambda: FACTS | {"id": "router-a"}) as own, router(lambda: FACTS) as other:
        looking = look(own, other)
        await looking.until(lambda rows: len(rows) == 1 and rows[other]["facts"])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff\r\n\r\n",
        http(b"not JSON"),
        http(b"[]"),
        http(json.dumps(FACTS).encode(), "403 Forbidden"),
        http(json.dumps(FACTS | {"streams": -1}).encode()),
        http(json.dumps(FACTS | {"id": "x" * 129}).encode()),
        http(json.dumps(FACTS | {"state": "<b>"}).encode()),
        http(b'{"uptime_s": NaN}'),
        http(b" " * (4 * MAX_ANSWER_BYTES)),
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    ],
)
async def test_another_answer_is_none_of_a_router(look, answer):
    async with raw(answer) as address:
        rows = await look(address).until(lambda rows: rows[address]["problem"])
        assert (rows[address]["problem"], rows[address]["facts"]) == ("its answer is none of a router", None)


async def test_silent_and_refusing_routers_are_away_and_delay_nobody(look, monkeypatch):
    monkeypatch.setattr(router_facts, "DEADLINE_S", 0.2)
    async with contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(raw(None)) for _ in range(20)]
        alive = await stack.enter_async_context(router(lambda: FACTS))
        async with raw(b"") as refusing:
            pass
        rows = await look(*silent, alive, refusing).until(
            lambda rows: rows[alive]["facts"] and all(rows[each]["problem"] for each in (*silent, refusing))
        )
        assert {rows[each]["problem"] for each in silent} == {"no answer in time"}
        assert "refused" in rows[refusing]["problem"].lower()


async def test_a_name_that_does_not_resolve_is_a_problem_and_the_rest_is_shown(look):
    async with router(lambda: FACTS) as address:
        looking = look("nobody.invalid:8001", address)
        await looking.until(lambda rows: rows[address]["facts"])
        assert looking.others.body()["problem"].startswith("nobody.invalid:8001: ")


async def test_only_so_many_are_asked(look, monkeypatch):
    monkeypatch.setattr(others, "MAX_OTHERS", 2)
    rows = await look("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3").until(lambda rows: len(rows) > 1)
    assert len(rows) == 2


async def test_nobody_is_asked_while_nobody_looks(look):
    asked = []
    async with router(lambda: asked.append(1) or FACTS) as address:
        looking = look(address)
        await looking.until(lambda rows: rows[address]["facts"])
        counts = []
        for _ in range(4):  # at one time, by its clock
            looking.others.body()
            await looking.others._asking
            counts.append(len(asked))
        assert counts[1] == counts[2] == counts[3]
        looking.now += 1
        assert len(asked) == counts[3]
        looking.others.body()
        await looking.others._asking
        assert len(asked) == counts[3] + 1


@pytest.mark.parametrize("name", ["localhost", "router-b.test"])
async def test_with_tls_both_show_a_certificate_and_the_name_must_be_right(look, tmp_path, name):
    authority = Authority()
    own, other = (
        RouterTls.load(RouterSettings(workers=["a:1"], management_tls=True, **mounted.settings(WORKER)))
        for mounted in (
            Mounted(tmp_path / "own", authority, ROUTER),
            Mounted(tmp_path / "other", authority, name),
        )
    )
    async with router(lambda: FACTS, tls=other.management_context) as address:
        looking = look(address.replace("127.0.0.1", "localhost"), certificates=own.management_certificates)
        if name == "localhost":
            rows = await looking.until(lambda rows: rows[address]["facts"])
            assert rows[address]["problem"] == ""
        else:
            rows = await looking.until(lambda rows: rows[address]["problem"])
            assert rows[address]["problem"].startswith("TLS: ")
            assert rows[address]["facts"] is None


async def test_a_process_shows_another_one_with_its_processes_together(tmp_path):
    target = f"unix:{tmp_path}/nobody.sock"
    running = []
    try:
        running.append(await start("--workers", target, "--port", "0", "--processes", "2", "--router-id", "router-b"))
        other = f"127.0.0.1:{(await listening(running[0]))['management_port']}"
        flags = ("--port", "0", "--router-id", "router-a", "--console-routers", f"{other},127.0.0.1:1")
        running.append(await start("--workers", target, *flags))
        address = f"http://127.0.0.1:{(await listening(running[1]))['management_port']}{files.STATE}"
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client, asyncio.timeout(60):
            rows = {}
            while not (rows.get(other) or {}).get("facts"):
                body = (await client.get(address)).json()["others"]
                rows = {row["address"]: row for row in body["rows"]}
                await asyncio.sleep(0.05)
        assert set(rows) == {other, "127.0.0.1:1"}
        facts = rows[other]["facts"]
        assert (facts["id"], facts["unready"], facts["max_streams"]) == ("router-b", "no worker is ready", 2 * 4096)
    finally:
        for process in running:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("target", ["unix:/x", "router", "a:1,a:1"])
def test_other_forms_of_an_address_are_refused(target):
    with pytest.raises(ValidationError, match="console_routers"):
        RouterSettings(workers=["a:1"], console_routers=target)
