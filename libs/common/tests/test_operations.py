"""What operators ask of the management port, which clients are operators, and that no event loop is needed."""

import asyncio
import http.client
import json
import logging
import socket
import threading
import time

import pytest
from lockstep_common import operations
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.log_level import LOG_LEVEL, LogLevel
from lockstep_common.management import Reports, managed
from lockstep_common.settings import without_secrets


def request(port, method, path, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def ask(port, path, method="GET", **headers):
    return await asyncio.to_thread(request, port, method, path, headers)


@pytest.fixture
async def port():
    LOG_LEVEL.configure("info")
    reports = Reports(unready=lambda: None, stacks={"ranks": lambda: [1]}, settings={"listen": "unix:w"})
    async with managed("127.0.0.1", 0, reports, liveness_timeout_s=30) as port:
        yield port
    LOG_LEVEL.configure("info")


async def waits_for_something():
    await asyncio.sleep(3600)


async def test_stacks_name_threads_tasks_and_what_the_service_adds(port):
    tasks = [asyncio.create_task(waits_for_something()) for _ in range(3)]
    await asyncio.sleep(0)
    status, text = await ask(port, "/debug/stacks")
    for task in tasks:
        task.cancel()
    body = json.loads(text)
    assert (status, body["ranks"]) == (200, [1])
    main = next(each["stack"] for each in body["threads"] if each["thread"] == "MainThread")
    assert any("run_until_complete" in place for place in main)
    waiting = next(each for each in body["tasks"] if "waits_for_something" in each["awaits"][0])
    assert waiting["tasks"] == 3


def test_stacks_come_while_the_loop_is_blocked():
    """That is when they are wanted."""
    found = []

    async def main():
        async with managed("127.0.0.1", 0, Reports(unready=lambda: None), liveness_timeout_s=30) as port:
            asking = threading.Thread(target=lambda: found.append(request(port, "GET", "/debug/stacks")))
            asking.start()
            while not found:
                time.sleep(0.01)
            asking.join()

    asyncio.run(main())
    status, text = found[0]
    main_thread = next(each for each in json.loads(text)["threads"] if each["thread"] == "MainThread")
    assert status == 200
    assert any("is_blocked.<locals>.main" in place for place in main_thread["stack"])


async def test_the_level_is_changed_for_a_while(port):
    logger = logging.getLogger("lockstep")
    assert await ask(port, "/loglevel?level=debug&for_s=60") == (200, '{"level":"info","left_s":null}')
    status, text = await ask(port, "/loglevel?level=debug&for_s=60", "POST")
    assert (status, json.loads(text)["level"], logger.level) == (200, "debug", logging.DEBUG)
    assert 0 < json.loads(text)["left_s"] <= 60
    levels = []
    LOG_LEVEL.subscribe(levels.append)
    try:
        status, text = await ask(port, "/loglevel?level=error&for_s=0.05", "POST")
        async with asyncio.timeout(30):
            while len(levels) < 2:
                await asyncio.sleep(0.01)
    finally:
        LOG_LEVEL.unsubscribe(levels.append)
    assert (status, levels, logger.level) == (200, ["error", "info"], logging.INFO)
    assert LOG_LEVEL.left_s is None


@pytest.mark.parametrize(
    ("query", "names"),
    [("", "level"), ("level=loud", "level"), ("level=debug&for_s=x", "for_s"), ("level=debug&for_s=0", "for_s"),
     ("level=debug&for_s=nan", "for_s"), ("level=debug&for_s=1e9", "for_s"), ("level=debug&for=1", "for")],
)  # fmt: skip
async def test_a_bad_change_is_refused_and_changes_nothing(port, query, names):
    status, text = await ask(port, f"/loglevel?{query}", "POST")
    assert (status, names in json.loads(text)["error"], LOG_LEVEL.level) == (400, True, "info")


async def test_others_than_operators_are_refused(port, monkeypatch):
    for path in ("/debug/stacks", "/debug/logs", "/debug/settings", "/debug/trace/1", "/loglevel"):
        assert (await ask(port, path, Origin="http://evil.example"))[0] == 403
    monkeypatch.setattr("lockstep_common.management.is_local", lambda host: host != "127.0.0.1")
    for path in ("/debug/stacks", "/debug/logs", "/debug/settings", "/debug/trace/1", "/loglevel"):
        assert (await ask(port, path))[0] == 403
    for path in ("/loglevel?level=debug", "/debug/profile", "/debug/trace/1"):
        assert (await ask(port, path, "POST"))[0] == 403
    assert LOG_LEVEL.level == "info"
    assert (await ask(port, "/healthz"))[0] == 200
    assert (await ask(port, "/metrics", "POST"))[0] == 405


@pytest.mark.parametrize(
    "name",
    ["", "a/b", "../stacks", "%2e%2e%2fstacks", "%00", "x" * 10_000, "0" * 31, "g" * 32, "0x" + "1" * 30, "?a=b"],
)
async def test_an_odd_name_of_a_trace_finds_nothing(port, name):
    status, text = await ask(port, f"/debug/trace/{name}")
    assert (status, json.loads(text)["spans"]) == (200, [])
    assert (await ask(port, f"/debug/trace/{name}", "POST"))[0] == 404


async def test_a_path_that_only_looks_like_an_operators_finds_nothing(port):
    for path in ("//debug/stacks/", "/debug", "/DEBUG/stacks", "/metrics/../debug/stacks"):
        assert (await ask(port, path))[0] == 404
    assert (await ask(port, "http://h/debug/stacks"))[0] == 403, "a page's name that points here"
    assert (await ask(port, "/debug/profile", "HEAD"))[0] == 404


def test_who_is_local():
    assert all(map(operations.is_local, ("127.0.0.1", "::ffff:127.0.0.1", "::1")))
    others = ("127.0.0.6", "127.8.0.1", "10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1", "", "localhost")
    assert not any(map(operations.is_local, others))


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-Forwarded-For", "10.0.0.1"), ("forwarded", "for=10.0.0.1"), ("x-envoy-attempt-count", "1"),
     ("l5d-client-id", "c"), ("Host", "evil.example:9001"), ("Host", "127.0.0.1.evil.example")],
)  # fmt: skip
async def test_a_mesh_and_a_page_of_another_name_are_no_operators(port, name, value):
    status, text = await ask(port, "/loglevel?level=debug", "POST", **{name: value})
    assert (status, "proxy" in text, LOG_LEVEL.level) == (403, True, "info")


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:9001", "10.0.0.7:9001"])
async def test_names_of_this_host_are_accepted(port, host, caplog):
    assert (await ask(port, "/loglevel?level=error", "POST", Host=host))[0] == 200
    (record,) = [each for each in caplog.records if "changed the log level" in each.getMessage()]
    assert (record.new_level, record.for_s) == ("error", 600.0)


async def test_settings_have_no_secrets(port):
    status, text = await ask(port, "/debug/settings")
    assert (status, json.loads(text)["settings"]) == (200, {"listen": "unix:w"})
    assert "python" in json.loads(text)["versions"]
    given = {"store": "redis://user:hidden@host/0", "password": "hidden", "keys": {"api_key": "hidden", "n": 1}}
    shown = without_secrets(given | {"list": ["rediss://:hidden@h"], "password_file": "/run/password", "token": None})
    assert "hidden" not in json.dumps(shown)
    assert (shown["password_file"], shown["token"], shown["keys"]["n"]) == ("/run/password", None, 1)
    assert shown["store"].endswith("@host/0")


def test_listeners_hear_each_level_once():
    level, heard = LogLevel(), []
    before = logging.getLogger("lockstep").level
    try:
        level.subscribe(heard.append)
        level.configure("info")
        level.change("debug", 60)
        level.change("info", 60)
        assert level.left_s is None
        level.unsubscribe(heard.append)
        level.configure("error")
    finally:
        logging.getLogger("lockstep").setLevel(before)
    assert heard == ["info", "debug", "info"]


class Profiles:
    """A service whose ranks are profiled."""

    def __init__(self):
        self.asked = []
        self.error = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def profile(self, steps):
        self.asked.append(steps)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return b"archive"


async def test_a_profile_is_given_to_operators_one_at_a_time(port):
    assert (await ask(port, "/debug/profile", "POST"))[0] == 404
    profiles = Profiles()
    reports = Reports(unready=lambda: None, profile=profiles.profile)
    async with managed("127.0.0.1", 0, reports, liveness_timeout_s=30) as own:
        assert await ask(own, "/debug/profile", "POST") == (200, "archive")
        assert await ask(own, "/debug/profile?steps=7", "POST") == (200, "archive")
        assert (await ask(own, "/debug/profile?steps=7"))[0] == 404
        assert (await ask(own, "/debug/profile?steps=7", "POST", Origin="http://evil.example"))[0] == 403
        for query, reason in (("steps=x", "whole number"), ("steps=", "whole number"), ("step=1", "unknown")):
            status, text = await ask(own, f"/debug/profile?{query}", "POST")
            assert (status, reason in text) == (400, True)
        profiles.error = LockstepError(ErrorCode.UNAVAILABLE, "no steps ran")
        assert await ask(own, "/debug/profile?steps=8", "POST") == (503, '{"error":"no steps ran"}')
        profiles.error = None
        profiles.may_end.clear()
        first = asyncio.create_task(ask(own, "/debug/profile?steps=9", "POST"))
        async with asyncio.timeout(30):
            while profiles.asked[-1] != 9:
                await asyncio.sleep(0.01)
        assert (await ask(own, "/debug/profile", "POST"))[0] == 409
        profiles.may_end.set()
        assert await first == (200, "archive")
    assert profiles.asked == [20, 7, 8, 9]


async def test_a_profile_that_the_end_of_the_service_cuts_off_is_answered(port):
    profiles = Profiles()
    profiles.may_end.clear()
    reports = Reports(unready=lambda: None, profile=profiles.profile)
    async with managed("127.0.0.1", 0, reports, liveness_timeout_s=30) as own:
        asking = asyncio.create_task(ask(own, "/debug/profile", "POST"))
        async with asyncio.timeout(30):
            while not profiles.asked:
                await asyncio.sleep(0.01)
        (running,) = [each for each in asyncio.all_tasks() if each.get_coro().__name__ == "profile"]
        running.cancel()
        assert await asking == (503, '{"error":"no profile: the service is ending"}')


def test_no_profile_is_asked_of_a_loop_that_is_closed():
    loop = asyncio.new_event_loop()
    loop.close()
    profiles = Profiles()
    operator = operations.Operations(loop, {}, {}, profiles.profile)
    assert operator.of("POST", "/debug/profile").status == 503
    assert profiles.asked == []


async def test_a_large_answer_may_be_taken_slowly(monkeypatch):
    """A profile of eight ranks has megabytes, and the operator may be far away."""
    size = 32 << 20

    async def profile(_):
        # The request has been read: from now on it is the limit of the answer alone.
        monkeypatch.setattr("lockstep_common.management.REQUEST_TIMEOUT_S", 0.2)
        return bytes(size)

    def take(port):
        with socket.socket() as far:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            far.settimeout(60)
            far.connect(("127.0.0.1", port))
            far.sendall(b"POST /debug/profile HTTP/1.0\r\nHost: localhost\r\n\r\n")
            taken = len(far.recv(1 << 16))
            time.sleep(1.0)
            while more := len(far.recv(1 << 20)):
                taken += more
        return taken

    async with managed("127.0.0.1", 0, Reports(lambda: None, profile=profile), liveness_timeout_s=30) as own:
        assert await asyncio.to_thread(take, own) > size
