"""Limits that routers share in a real Redis, and what happens when it does not answer."""

import asyncio
import logging
import time

import pytest
from authority import Authority, Mounted
from key_files import KEY, OTHER_KEY, bearer, tenant, write
from limits.aio.storage import MemoryStorage
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.ports import free_port
from lockstep_common.telemetry import REGISTRY
from lockstep_common.tracing import CURRENT, Tracing
from lockstep_router.settings import RouterSettings
from lockstep_router.tenants import shared_storage
from lockstep_router.tenants.limits import TenantLimits
from lockstep_router.tenants.shared_storage import SharedStorage, open_storage
from lockstep_router.tenants.tenant import Tenant
from lockstep_router.traces import RequestTrace
from minutes import until_room_s
from pydantic import ValidationError
from redis_server import RedisServer
from router_cluster import eventually

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 3}
PASSWORD = "the-secret-of-redis"


@pytest.fixture
def redis(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.thaw()
    server.kill()


@pytest.fixture(autouse=True)
def patient(monkeypatch, caplog):
    """Redis is tried again soon, and warnings are seen."""
    caplog.set_level(logging.INFO, "lockstep.router")
    monkeypatch.setattr(shared_storage, "RETRY_S", 0.01)


@pytest.fixture(autouse=True)
async def minute():
    await asyncio.sleep(until_room_s())


@pytest.fixture
def routers(make_cluster, tmp_path):
    """Routers, each with a worker of its own, that count in one storage."""

    async def make(count, address, timeout_s=5.0, **limits):
        keys = write(tmp_path / "keys.yaml", tenant("search", KEY, **limits), tenant("chat", OTHER_KEY, **limits))
        settings = {"keys_file": keys, "limits_storage": address, "limits_storage_timeout_s": timeout_s}
        return [await make_cluster(1, **settings) for _ in range(count)]

    return make


async def ask(cluster, key=KEY, **fields):
    return await cluster.client.post("/v1/completions", json=BODY | fields, headers=bearer(key))


def is_fallback():
    return REGISTRY.get_sample_value("lockstep_router_limits_fallback") == 1


async def test_routers_count_together(redis, routers):
    one, other = await routers(2, redis.address, requests_per_minute=3)
    answers = [await ask(cluster) for cluster in (one, other, one, other, one)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0", "0"]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 120
    assert (await ask(other, OTHER_KEY)).status_code == 200, "tenants are counted apart"
    assert not is_fallback()


async def test_tokens_count_together(redis, routers):
    one, other = await routers(2, redis.address, tokens_per_minute=20)
    assert (await ask(one)).json()["usage"]["total_tokens"] == 7
    assert (await ask(other)).json()["usage"]["total_tokens"] == 7
    answer = await ask(one, max_tokens=16)
    assert answer.status_code == 200, "an answer may go beyond the limit"
    async with asyncio.timeout(30):
        while (refused := await ask(other)).status_code != 429:  # what an answer took is counted in the background
            await asyncio.sleep(0.01)
    assert refused.json()["error"]["param"] == "tokens_per_minute"


async def test_a_new_router_goes_on_where_the_others_are(redis, routers):
    (one,) = await routers(1, redis.address, requests_per_minute=2)
    assert [(await ask(one)).status_code for _ in range(2)] == [200, 200]
    (late,) = await routers(1, redis.address, requests_per_minute=2)
    assert (await ask(late)).status_code == 429


async def test_limits_hold_in_memory_while_redis_is_down_and_in_redis_when_it_is_back(redis, routers, caplog):
    one, other = await routers(2, redis.address, requests_per_minute=2)
    assert (await ask(one)).status_code == 200
    redis.kill()
    assert [(await ask(one)).status_code for _ in range(3)] == [200, 200, 429]
    assert [(await ask(other)).status_code for _ in range(3)] == [200, 200, 429], "each router by itself"
    assert is_fallback()
    redis.start()
    await eventually(lambda: caplog.text.count("limits of tenants are shared again") == 2)
    assert not is_fallback()
    assert [(await ask(one)).status_code, (await ask(other)).status_code] == [200, 200]
    assert (await ask(one)).status_code == 429, "they count together again"
    warnings = [record for record in caplog.records if "does not answer" in record.message]
    assert len(warnings) == 2, "once for each router"


async def test_requests_do_not_wait_for_a_redis_that_hangs(redis, routers, monkeypatch):
    (one,) = await routers(1, redis.address, timeout_s=0.2, requests_per_minute=1000)
    assert (await ask(one)).status_code == 200
    monkeypatch.setattr(shared_storage, "RETRY_S", 600.0)
    redis.freeze()
    failures = REGISTRY.get_sample_value("lockstep_router_limits_storage_failures_total")
    answers = [await ask(one) for _ in range(20)]
    assert {answer.status_code for answer in answers} == {200}
    assert REGISTRY.get_sample_value("lockstep_router_limits_storage_failures_total") == failures + 1
    assert is_fallback()


async def test_the_password_comes_from_a_file_and_is_nowhere_else(tmp_path, routers, make_cluster, caplog):
    server = RedisServer(tmp_path, PASSWORD)
    try:
        secret = tmp_path / "password"
        secret.write_text(f"{PASSWORD}\n")
        keys = write(tmp_path / "keys.yaml", tenant("search", KEY, requests_per_minute=1))
        settings = {"keys_file": keys, "limits_storage": server.address, "limits_storage_timeout_s": 5.0}
        cluster = await make_cluster(1, **settings, limits_storage_password_file=str(secret))
        assert [(await ask(cluster)).status_code for _ in range(2)] == [200, 429]
        assert not is_fallback()
        (refused,) = await routers(1, server.address, requests_per_minute=1)
        assert (await ask(refused)).status_code == 200
        assert is_fallback(), "without the password Redis refuses"
        secret.write_text("another one")
        wrong = await make_cluster(1, **settings, limits_storage_password_file=str(secret))
        assert (await ask(wrong)).status_code == 200
        assert is_fallback()
    finally:
        server.kill()
    assert PASSWORD not in caplog.text
    assert "another one" not in caplog.text


async def test_certificate_of_a_private_authority_is_trusted_by_setting(tmp_path, make_cluster):
    theirs = Mounted(tmp_path / "theirs", Authority(), "localhost")
    other = Mounted(tmp_path / "other", Authority(), "localhost")
    port = free_port()
    files = ["--tls-cert-file", theirs.cert, "--tls-key-file", theirs.key, "--tls-auth-clients", "no"]
    server = RedisServer(tmp_path / "redis", None, "--tls-port", str(port), *files)
    keys = write(tmp_path / "keys.yaml", tenant("search", KEY, requests_per_minute=2))
    settings = {"keys_file": keys, "limits_storage": f"rediss://localhost:{port}/0", "limits_storage_timeout_s": 5.0}
    try:
        one, another = [await make_cluster(1, **settings, limits_storage_ca=theirs.ca) for _ in range(2)]
        assert [(await ask(cluster)).status_code for cluster in (one, another, one)] == [200, 200, 429]
        assert not is_fallback()
        for trusted in ({}, {"limits_storage_ca": other.ca}):
            stranger = await make_cluster(1, **settings, **trusted)
            assert (await ask(stranger)).status_code == 200
            assert is_fallback(), "nobody vouches for this Redis"
    finally:
        server.kill()


# Without Redis.


class Failing:
    """A storage that fails, or answers when the test says so."""

    def __init__(self):
        self.error = None
        self.calls = 0
        self.answer = asyncio.Event()
        self.answer.set()

    async def acquire_sliding_window_entry(self, *_):
        self.calls += 1
        await self.answer.wait()
        if self.error is not None:
            raise self.error
        return True

    async def get_sliding_window(self, *_):
        return 0, 0.0, 0, 0.0


async def nothing():
    """Close no connection."""


def shared_over(failing, timeout_s=30.0):
    return SharedStorage(failing, MemoryStorage(), timeout_s=timeout_s, close=nothing)


async def acquire(storage):
    return await storage.acquire_sliding_window_entry("key", 1, 60)


async def test_the_storage_is_tried_in_the_background_and_used_once_it_answers():
    """No request waits for a trial."""
    failing = Failing()
    storage = shared_over(failing)
    failing.error = ConnectionError(PASSWORD)
    assert await acquire(storage)
    failing.answer.clear()
    await eventually(lambda: failing.calls == 2)
    assert not await acquire(storage), "counted in memory meanwhile"
    failing.error = None
    failing.answer.set()
    await eventually(lambda: not is_fallback())
    assert [await acquire(storage) for _ in range(2)] == [True, True]
    assert failing.calls == 4


async def test_a_router_that_nobody_asks_shares_its_limits_again():
    failing = Failing()
    storage = shared_over(failing)
    failing.error = ConnectionError()
    await acquire(storage)
    await eventually(lambda: failing.calls == 3)
    assert is_fallback()
    failing.error = None
    await eventually(lambda: not is_fallback())
    await storage.close()


async def test_a_storage_that_is_closed_is_tried_no_more():
    failing = Failing()
    storage = shared_over(failing)
    failing.error = ConnectionError()
    await acquire(storage)
    await eventually(lambda: failing.calls == 3)
    tasks = asyncio.all_tasks()
    await storage.close()
    assert asyncio.all_tasks() < tasks


async def test_what_takes_too_long_is_counted_in_memory():
    failing = Failing()
    failing.answer.clear()
    storage = shared_over(failing, timeout_s=0.01)
    began = time.monotonic()
    assert await acquire(storage)
    assert time.monotonic() - began < 20


async def test_a_trace_tells_how_long_a_request_waited_for_redis():
    """Of an answer, and of none in time. What is counted when the answer has ended is not waited for."""
    spans, failing = [], Failing()
    storage = shared_over(failing)
    request = RequestTrace(Tracing(ratio=1.0, slow_s=60.0, export=spans.extend).trace())
    CURRENT.set(request.root)
    await acquire(storage)
    TenantLimits(storage).charge(Tenant("search"), "tokens", 3)
    failing.answer.clear()
    await acquire(shared_over(failing, timeout_s=0.05))
    failing.answer.set()
    await eventually(lambda: failing.calls == 3)
    answered, missing = spans
    for span in spans:
        assert (span.name, span.parent_id) == ("limits", request.root.span_id)
        assert span.attributes["db.system.name"] == "redis"
    assert (answered.error, missing.error) == ("", "TimeoutError")
    assert missing.end_ns - missing.begin_ns >= 45_000_000


async def test_a_request_that_is_cancelled_says_nothing_about_the_storage():
    failing = Failing()
    failing.answer.clear()
    storage = shared_over(failing)
    asking = asyncio.create_task(acquire(storage))
    while not failing.calls:
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert not is_fallback()


async def test_failures_are_logged_rarely_and_without_their_words(monkeypatch, caplog):
    clock = [1000.0]
    monkeypatch.setattr(shared_storage, "RETRY_S", 0.0)  # the event loop's clock stands still too
    monkeypatch.setattr(shared_storage.time, "monotonic", lambda: clock[0])
    failing = Failing()
    failing.error = ConnectionError(f"redis://:{PASSWORD}@host refused")
    storage = shared_over(failing)
    await acquire(storage)
    while failing.calls < 59:
        await asyncio.sleep(0)
    assert len(caplog.records) == 1
    clock[0] += 60
    while len(caplog.records) < 2:
        await asyncio.sleep(0)
    await storage.close()
    assert PASSWORD not in caplog.text
    assert {record.error for record in caplog.records} == {"ConnectionError"}


@pytest.mark.parametrize(
    "address",
    [
        "",
        "redis://",
        "http://host:1",
        "redis://host:99999",
        "redis://host:x",
        "redis://host:6379/limits",
        "redis://host:6379/0/1",
        f"redis://:{PASSWORD}@host:6379/0",
        f"redis://user:{PASSWORD}@host:6379",
        f"redis://host:6379/0?password={PASSWORD}",
        "unix:/run/redis.sock",
        "redis://[::1",
    ],
)
def test_addresses_that_cannot_be_used_are_refused_without_being_quoted(address, capsys):
    with pytest.raises(SystemExit) as ended:
        RouterSettings.load("router", ["--workers", "unix:/a", "--limits-storage", address])
    assert ended.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("setting limits_storage: ")
    assert PASSWORD not in sentence


@pytest.mark.parametrize(
    "address", ["memory", "redis://host", "redis://host/", "rediss://user@host:6380/2", "redis://[::1]:6379"]
)
def test_addresses_that_can_be_used(address):
    assert RouterSettings(workers=["unix:/a"], limits_storage=address).limits_storage == address


def test_a_password_needs_a_storage():
    with pytest.raises(ValidationError, match="needs limits_storage"):
        RouterSettings(workers=["unix:/a"], limits_storage_password_file="/a")


@pytest.mark.parametrize("address", ["memory", "redis://host:6379/0"])
def test_authorities_need_a_storage_with_tls(address):
    with pytest.raises(ValidationError, match="needs a limits_storage that begins with rediss://"):
        RouterSettings(workers=["unix:/a"], limits_storage=address, limits_storage_ca="/a")


@pytest.mark.parametrize(("content", "named"), [(None, "cannot be read"), (b"no certificate", "cannot be used")])
def test_unusable_authorities_end_the_start(tmp_path, content, named):
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LockstepError, match=named) as refused:
        open_storage("rediss://host", None, 0.1, ca=str(path))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "limits_storage_ca")


@pytest.mark.parametrize(
    ("content", "named"), [(None, "cannot be read"), (b" \n", "has no password"), (b"\xff", "is not UTF-8")]
)
def test_unusable_passwords_end_the_start(tmp_path, content, named):
    if content is not None:
        (tmp_path / "password").write_bytes(content)
    with pytest.raises(LockstepError, match=named) as refused:
        open_storage("redis://host", str(tmp_path / "password"), 0.1)
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, "limits_storage_password_file")
