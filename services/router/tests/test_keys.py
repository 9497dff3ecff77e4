"""With a file of keys no client gets anything without a valid key, and keys change without a restart."""

import asyncio
import contextlib
import datetime
import json
import logging
import resource

import pytest
from key_files import KEY, OTHER_KEY, SECOND_KEY, bearer, digest, tenant, write, write_text
from lockstep_common.errors import LockstepError
from lockstep_common.telemetry import REGISTRY, JsonFormatter, exposition_for
from lockstep_router.faces import bodies
from lockstep_router.faces.rest import generating
from lockstep_router.tenants import KeyFile, key_file
from router_cluster import eventually, least_mean_s
from router_process import start
from scripted_worker import Script

BODY = {"model": "reference", "prompt": "hello world", "max_tokens": 3}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, tenant("search", KEY), tenant("chat", OTHER_KEY))
    return path


@pytest.fixture
async def guarded(make_cluster, keys):
    return await make_cluster(1, keys_file=str(keys))


def is_refused(response):
    return (
        response.status_code == 401
        and response.headers["www-authenticate"] == "Bearer"
        and response.json()["error"]["code"] == "invalid_api_key"
        and response.json()["error"]["type"] == "invalid_request_error"
    )


async def test_every_route_needs_a_key(guarded):
    routes = [(method, route.path) for route in guarded.app.routes for method in route.methods]
    assert ("POST", "/v1/chat/completions") in routes
    assert ("GET", "/openapi.json") in routes
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]
    paths = {path.replace("{model:path}", "reference") for _, path in routes}
    unknown = {"/", "/docs", "/redoc", "/nowhere", "/metrics", "/status", "/v1", "/v1/streams/a", "/v1/models/"}
    odd = {"//healthz", "/healthz/", "/healthz/../v1/models", "/%2e%2e/v1/models", "/v1/models;/healthz", "/HEALTHZ"}
    open_routes = {("GET", "/healthz"), ("GET", "/readyz")}
    async with guarded.over_http() as client:
        for path in sorted(paths | unknown | odd):
            for method in methods:
                response = await client.request(method, path)
                if (method, path) in open_routes:
                    assert response.status_code == 200
                elif method == "HEAD":
                    assert response.status_code == 401, path
                else:
                    assert is_refused(response), (method, path)
    assert not guarded.workers[0].submits


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")],
        [("authorization", f"Bearer {KEY}x")],
        [("authorization", f"Bearer {KEY[:-1]}")],
        [("authorization", f"Bearer {KEY} {KEY}")],
        [("authorization", f"Bearer {digest(KEY)}")],
        [("authorization", f"Bearer {KEY.upper()}")],
        [("authorization", b"Bearer \xff\xfe\x80")],
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")],
        [("authorization", "Bearer other"), ("authorization", f"Bearer {KEY}")],
        [("x-api-key", KEY)],
        [("cookie", f"authorization=Bearer {KEY}")],
    ],
)
async def test_only_one_valid_bearer_key_is_taken(guarded, headers):
    headers = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in headers]
    assert is_refused(await guarded.client.post("/v1/completions", json=BODY, headers=headers))
    assert is_refused(await guarded.client.get(f"/v1/models?key={KEY}", headers=headers))


async def test_valid_key_is_served(guarded):
    async with guarded.over_http() as client:
        assert (await client.post("/v1/completions", json=BODY, headers=bearer(KEY))).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": f"bearer   {KEY}"})).status_code == 200
        assert (await client.get("/nowhere", headers=bearer(KEY))).status_code == 404
        assert (await client.get("/openapi.json", headers=bearer(KEY))).status_code == 200


async def test_each_request_of_a_connection_needs_its_own_key(guarded):
    async with guarded.over_http() as client:
        for _ in range(2):
            assert (await client.get("/v1/models", headers=bearer(KEY))).status_code == 200
            assert is_refused(await client.get("/v1/models"))
            assert is_refused(await client.get("/v1/models", headers=bearer("other")))
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        request = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n%s\r\n"
        allowed = request % f"authorization: Bearer {KEY}\r\n".encode()
        writer.write(allowed)
        assert b" 200 OK" in await reader.readuntil(b"\r\n")
        await reader.readuntil(b"}]}")
        # Two at once: the second one is begun only if the first one is answered, and needs a key in any case.
        writer.write(allowed + request % b"")
        answers = b""
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(1):
                while data := await reader.read(1 << 16):
                    answers += data
        assert answers.count(b" 200 OK") == 1
        writer.close()


async def test_wrong_key_is_answered_before_the_body_arrives(guarded, monkeypatch):
    def reserve(self):
        raise AssertionError("a body was read")

    monkeypatch.setattr(bodies.BodyBudget, "reserve", reserve)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer no\r\nexpect: 100-continue\r\n"
    async with guarded.over_http() as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(head + b"content-length: 1000000\r\n\r\n")
        async with asyncio.timeout(5):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer
        assert b"100 Continue" not in answer
        writer.close()


async def test_keys_are_compared_in_constant_time(keys, monkeypatch):
    file = KeyFile(str(keys))
    assert file.authenticate(KEY.encode()).tenant.name == "search"
    compared = []

    def compare(found, given):
        compared.append((found, given))
        return False

    monkeypatch.setattr(key_file.hmac, "compare_digest", compare)
    with pytest.raises(LockstepError):
        file.authenticate(KEY.encode())
    assert compared == [(digest(KEY), digest(KEY))]


async def test_rotation_without_a_restart(guarded, keys):
    guarded.router.keys.check_s = 0.01
    async with guarded.over_http() as client:

        async def status_with(key):
            return (await client.get("/v1/models", headers=bearer(key))).status_code

        async def becomes(key, status):
            async with asyncio.timeout(10):
                while await status_with(key) != status:
                    await asyncio.sleep(0.01)

        assert await status_with(SECOND_KEY) == 401
        write(keys, tenant("search", KEY, SECOND_KEY))
        await becomes(SECOND_KEY, 200)
        assert await status_with(KEY) == 200
        write(keys, tenant("search", SECOND_KEY))
        await becomes(KEY, 401)
        assert await status_with(SECOND_KEY) == 200
        assert await status_with(OTHER_KEY) == 401


BROKEN = {
    "nothing": "",
    "no YAML": "tenants: [",
    "a key": KEY,
    "a list": "[]",
    "no tenants": "{}",
    "a key in place of its hash": json.dumps({"tenants": [{"name": "a", "keys": [{"sha256": KEY}]}]}),
    "a key as a field": json.dumps({"tenants": [{"name": "a", "keys": [{KEY: 1}]}]}),
    "a key as a name": json.dumps({"tenants": [{"name": f"{KEY} of a", "keys": []}]}),
    "upper case": json.dumps({"tenants": [{"name": "a", "keys": [{"sha256": digest(KEY).upper()}]}]}),
    "a key in wrong YAML": f"tenants:\n- name: a\n  keys: {KEY}: {KEY}\n",
    "the same key twice": json.dumps({"tenants": [tenant("a", KEY), tenant("b", KEY)]}),
    "a field twice": f"tenants:\n- name: a\n  keys: [{{sha256: {digest(KEY)}}}]\n  keys: []\n",
    "a key as a field, twice": f"tenants:\n- {KEY}: 1\n  {KEY}: 2\n",
    "the same tenant twice": json.dumps({"tenants": [tenant("a", KEY), tenant("a", OTHER_KEY)]}),
    "a local time": json.dumps({"tenants": [tenant("a", KEY, not_after="2030-01-01T00:00:00")]}),
    "no limit": json.dumps({"tenants": [tenant("a", KEY, requests_per_minute=0)]}),
    "a limit as text": json.dumps({"tenants": [tenant("a", KEY, tokens_per_minute="5")]}),
    "an object of Python": "tenants: !!python/object/apply:os.getcwd []",
    "too much": "#" * (2 << 20),
    "bytes": "tenants: \x00\x01",
    "no truth value": "tenants: !!bool x",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
async def test_broken_file_changes_nothing_and_is_reported_once(keys, caplog, text):
    file = KeyFile(str(keys))
    failures = key_file.metrics.KEYS_RELOADS.labels("failed")._value
    before = failures.get()
    write_text(keys, text)
    with caplog.at_level(logging.INFO, "lockstep"):
        for _ in range(3):
            file.check()
    assert file.authenticate(KEY.encode()).tenant.name == "search"
    assert failures.get() == before + 1
    (record,) = caplog.records
    assert "keys_file" in record.getMessage()
    written = JsonFormatter("router").format(record)
    assert KEY not in written
    assert digest(KEY) not in written.lower()
    write(keys, tenant("search", SECOND_KEY))
    file.check()
    assert file.authenticate(SECOND_KEY.encode())


async def test_line_of_a_field_that_is_there_twice_is_named(keys, caplog):
    file = KeyFile(str(keys))
    write_text(keys, BROKEN["a field twice"])
    file.check()
    assert caplog.messages == [f"API keys not reloaded: keys_file ({keys}) has a field twice (line 4)"]


async def test_missing_file_changes_nothing_until_it_is_back(keys):
    file = KeyFile(str(keys))
    keys.unlink()
    file.check()
    assert file.authenticate(KEY.encode())
    write(keys, tenant("search", SECOND_KEY))
    file.check()
    with pytest.raises(LockstepError):
        file.authenticate(KEY.encode())


async def test_file_that_could_not_be_read_is_read_later_without_a_change(keys, caplog):
    """As after a change of its mode, which these tests cannot make: root reads all files."""
    file = KeyFile(str(keys))
    write(keys, tenant("search", SECOND_KEY))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.ERROR, "lockstep"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            file.check()
            file.check()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert file.authenticate(KEY.encode())
    assert [record.message for record in caplog.records] == [
        f"API keys not reloaded: keys_file ({keys}) cannot be read: Too many open files"
    ]
    file.check()
    with pytest.raises(LockstepError):
        file.authenticate(KEY.encode())
    assert file.authenticate(SECOND_KEY.encode())


async def test_refused_contents_are_parsed_once(keys, monkeypatch):
    """A large file takes seconds, and it is checked each second."""
    file = KeyFile(str(keys))
    loads, load = [], key_file.load_yaml
    monkeypatch.setattr(key_file, "load_yaml", lambda *args: loads.append(args) or load(*args))
    write_text(keys, BROKEN["no tenants"])
    for _ in range(3):
        file.check()
    assert len(loads) == 1


async def test_file_may_name_nobody(keys):
    """All keys are revoked: an operator means that."""
    file = KeyFile(str(keys))
    write(keys)
    file.check()
    with pytest.raises(LockstepError):
        file.authenticate(KEY.encode())


@pytest.mark.parametrize("text", ["tenants: [", BROKEN["a key in place of its hash"]])
async def test_router_does_not_start_with_a_broken_file(tmp_path, text):
    path = write_text(tmp_path / "keys.yaml", text)
    running = await start("--workers", "unix:/nowhere.sock", "--port", "0", "--keys-file", path)
    _, errors = await asyncio.wait_for(running.communicate(), 60)
    assert running.returncode == 2
    assert errors.decode().startswith("keys_file (")
    assert KEY not in errors.decode()


async def test_key_expires(make_cluster, tmp_path):
    now = datetime.datetime.now(datetime.UTC)
    soon, past = now + datetime.timedelta(seconds=5), now - datetime.timedelta(seconds=1)
    path = tmp_path / "keys.yaml"
    write(
        path,
        tenant("past", SECOND_KEY, not_after=past.isoformat()),
        tenant("soon", KEY, not_after=soon.isoformat()),
        tenant("never", OTHER_KEY),
    )
    cluster = await make_cluster(1, keys_file=str(path))
    assert (await cluster.client.get("/v1/models", headers=bearer(KEY))).status_code == 200
    response = await cluster.client.get("/v1/models", headers=bearer(SECOND_KEY))
    assert is_refused(response)
    assert "expired" in response.json()["error"]["message"]
    await asyncio.sleep(max(0.0, (soon - datetime.datetime.now(datetime.UTC)).total_seconds()) + 0.05)
    assert is_refused(await cluster.client.get("/v1/models", headers=bearer(KEY)))
    assert (await cluster.client.get("/v1/models", headers=bearer(OTHER_KEY))).status_code == 200


async def test_times_of_yaml_are_taken(tmp_path):
    text = f"tenants:\n- name: a\n  keys:\n  - sha256: {digest(KEY)}\n    not_after: 2020-01-01T00:00:00+02:00\n"
    with pytest.raises(LockstepError, match="expired"):
        KeyFile(write_text(tmp_path / "keys.yaml", text)).authenticate(KEY.encode())


async def test_tenant_and_not_the_key_separates_prefix_caches(guarded, keys):
    worker = guarded.workers[0]
    write(keys, tenant("search", KEY, SECOND_KEY), tenant("chat", OTHER_KEY))
    guarded.router.keys.check()
    for key in (KEY, SECOND_KEY, OTHER_KEY):
        assert (await guarded.client.post("/v1/completions", json=BODY, headers=bearer(key))).status_code == 200
    assert [submit.tenant for submit in worker.submits] == ["search", "search", "chat"]


async def test_without_a_file_keys_grant_and_deny_nothing(cluster):
    for headers in ({}, bearer("anything")):
        assert (await cluster.client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


def lines(caplog, name):
    formatter = JsonFormatter("router")
    return [json.loads(formatter.format(record)) for record in caplog.records if record.name == name]


async def test_audit_log_names_tenant_and_key(guarded, caplog):
    logging.getLogger("lockstep").setLevel(logging.ERROR)  # the audit log does not depend on it
    async with guarded.over_http() as client:
        response = await client.post("/v1/completions", json=BODY, headers=bearer(KEY))
        await client.post("/v1/completions", json={"prompt": 5}, headers=bearer(OTHER_KEY))
        await client.get("/v1/models", headers=bearer("wrong"))
        await client.get("/healthz")
        await client.get("/somewhere/else")
    await eventually(lambda: len(lines(caplog, "lockstep.audit")) == 4)
    done, invalid, refused, unknown = lines(caplog, "lockstep.audit")
    known = {"time", "level", "service", "message"}
    assert done["message"] == "audit"
    assert {name: value for name, value in done.items() if name not in known} == {
        "tenant": "search",
        "key_id": digest(KEY)[:8],
        "request_id": response.headers["x-request-id"],
        "face": "http",
        "endpoint": "/v1/completions",
        "status": 200,
        "prompt_tokens": response.json()["usage"]["prompt_tokens"],
        "completion_tokens": 3,
    }
    assert (invalid["tenant"], invalid["key_id"], invalid["status"]) == ("chat", digest(OTHER_KEY)[:8], 400)
    for line in (refused, unknown):
        assert (line["tenant"], line["key_id"], line["endpoint"], line["status"]) == ("", "", "other", 401)


async def test_audit_log_counts_what_a_client_that_left_has_used(guarded, caplog):
    guarded.workers[0].script = Script(delay_s=0.02)
    async with guarded.over_http() as client:
        body = BODY | {"max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, headers=bearer(KEY)) as response:
            await anext(response.aiter_lines())
        await eventually(lambda: lines(caplog, "lockstep.audit"))
    (line,) = lines(caplog, "lockstep.audit")
    assert line["status"] == 499
    assert line["completion_tokens"] > 0


async def test_no_key_and_no_text_is_logged_exported_or_passed_on(guarded, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    text = "canary-of-a-prompt"
    wrong = "canary-of-a-wrong-key"
    guarded.fail_after(2)
    seen = []
    origin_of = generating.origin_of

    def note(scope, fields, record, router):
        seen.append(repr(scope["headers"]) + repr(fields))
        return origin_of(scope, fields, record, router)

    monkeypatch.setattr(generating, "origin_of", note)
    async with guarded.over_http() as client:
        for key in (KEY, wrong):
            for body in (BODY | {"prompt": text}, BODY | {"prompt": text, "max_tokens": text}, {text: text}):
                response = await client.post("/v1/completions", json=body, headers=bearer(key))
                assert key not in response.text
    logged = "\n".join(JsonFormatter("router").format(record) for record in caplog.records)
    assert "request failed" in logged
    hashes = [digest(KEY), digest(wrong), digest(wrong)[:8]]
    for canary in (KEY, wrong, text, *hashes):
        assert canary not in logged
        assert canary.encode() not in exposition_for("")[0]
        assert canary not in "".join(map(str, guarded.workers[0].submits))
    assert seen
    assert "authorization" not in "".join(seen)


async def test_refusals_take_little_time(guarded):
    async def refused():
        assert (await guarded.client.post("/v1/completions", json=BODY, headers=bearer("no"))).status_code == 401

    assert await least_mean_s(refused) < 0.01


async def test_requests_and_tokens_are_counted_by_tenant_and_streams_by_outcome(guarded):
    def count(name, **labels):
        return REGISTRY.get_sample_value(f"lockstep_router_{name}_total", labels) or 0

    def counts():
        return (
            count("tenant_requests", tenant="search", code="200"),
            count("tenant_tokens", tenant="search", direction="in"),
            count("tenant_tokens", tenant="search", direction="out"),
            count("streams_ended", outcome="finished"),
        )

    before, nobody = counts(), count("tenant_requests", tenant="", code="401")
    async with guarded.over_http() as client:
        answer = (await client.post("/v1/completions", json=BODY, headers=bearer(KEY))).json()
        await client.post("/v1/completions", json=BODY)
    grown = [now - then for now, then in zip(counts(), before, strict=True)]
    assert grown == [1, answer["usage"]["prompt_tokens"], 3, 1]
    assert count("tenant_requests", tenant="", code="401") == nobody == 0
