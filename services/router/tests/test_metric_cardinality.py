"""Whatever clients send, the number of series that Prometheus has to store stays the same."""

import asyncio
import json

import pytest
from key_files import bearer, tenant, write_text
from lockstep_common.telemetry import REGISTRY
from lockstep_router import metrics
from lockstep_router.faces import access
from lockstep_router.workers.health.watch import PROBLEMS

HOSTILE = 10_000
"""Requests, each with another model, session, user, path and method."""
STREAMS = 200
MEASURED = {("model", "reference"), *(("problem", each) for each in PROBLEMS)}
"""Labels of what the router measures of the workers' model, the only one, when its time comes."""
ACCEPTED = 10_000
"""Requests that are answered, each of another session and of another tenant with a key of its own; each of these
tenants asks for another model that does not exist, too."""
TENANTS = 21
"""Values of the label for tenants: those with most requests, and `other`."""


def series():
    return {
        (sample.name, *sorted(sample.labels.items()))
        for family in REGISTRY.collect()
        if family.name.startswith("lockstep_")
        for sample in family.samples
    }


async def call(app, method, path, body, headers):
    """One request without a client library, which would take most of the test's time."""
    content, statuses = json.dumps(body).encode(), []
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if not messages:
            await asyncio.Event().wait()  # the client stays
        return messages.pop()

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content)), *headers]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "headers": fields, "client": ("10.0.0.1", 1),
        "server": ("router", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses[0]


@pytest.mark.parametrize(
    "outcome",
    [
        "finished", "cancelled", "invalid_request", "context_length_exceeded", "resource_exhausted", "overloaded",
        "unavailable", "worker_lost", "request_quarantined", "deadline_exceeded", "numerical_error", "internal",
    ],
)  # fmt: skip
def test_each_outcome_of_a_stream_is_counted_from_0(outcome):
    assert REGISTRY.get_sample_value("lockstep_router_streams_ended_total", {"outcome": outcome}) is not None


async def test_hostile_names_make_no_series(make_cluster):
    cluster = await make_cluster(1)
    body = {"model": "reference", "prompt": "hello world", "max_tokens": 1}

    async def send(number, model):
        text = f'{number}-\u202e{{"}}'
        headers = [(b"x-session-id", b"session-%d" % number), (b"x-request-id", b"request-%d" % number)]
        return await call(cluster.app, "POST", "/v1/completions", body | {"model": model, "user": text}, headers)

    # What honest and wrong requests make once.
    assert await send(0, "reference") == 200
    assert await send(0, "unknown") == 404
    assert await call(cluster.app, "POST", "/nowhere", {}, []) == 404
    before = series()
    statuses = set()
    for number in range(HOSTILE // 2):
        statuses.add(await send(number, f'model-{number}\n"}}'))
        statuses.add(await call(cluster.app, "POST", f"/v1/nowhere-{number}", {}, []))
    assert statuses == {404}
    assert {await send(number, "reference") for number in range(STREAMS)} == {200}
    assert {labels for _, *labels_of in series() - before for labels in labels_of} <= MEASURED


def tenants(of):
    """The tenants that these series name."""
    return {value for _, *labels in of for name, value in labels if name == "tenant"}


@pytest.mark.slow
async def test_ten_thousand_sessions_tenants_and_unknown_models_make_no_series(make_cluster, tmp_path):
    """Some tenants have series of their own, and share them out again once a minute; sessions never have."""
    keys = [f"lsk-of-tenant-{number:032}" for number in range(ACCEPTED)]
    entries = [tenant(f"t{number}", key) for number, key in enumerate(keys)]
    text = json.dumps({"tenants": entries}, separators=(",", ":"))  # with spaces the file would be too large
    cluster = await make_cluster(2, keys_file=write_text(tmp_path / "keys.yaml", text))
    body = {"model": "reference", "prompt": "hello world", "max_tokens": 1}

    async def send(number, model="reference"):
        own = {"x-session-id": f"session-{number}", "x-request-id": f"request-{number}"} | bearer(keys[number])
        headers = [(name.encode(), value.encode()) for name, value in own.items()]
        return await call(cluster.app, "POST", "/v1/completions", body | {"model": model, "user": f"{number}"}, headers)

    assert (await send(0), await send(0, "unknown")) == (200, 404)
    before = series()
    for begin in range(1, ACCEPTED, 100):
        numbers = range(begin, min(begin + 100, ACCEPTED))
        assert {await send(number) for number in numbers} == {200}
        assert {await send(number, f'model-{number}\n"}}') for number in numbers} == {404}
        now = series()
        assert len(tenants(now)) <= TENANTS
        # Of a tenant: its requests with two statuses, and its tokens in two directions.
        assert sum(bool(tenants([each])) for each in now - before) <= 4 * TENANTS
        others = {labels for each in now - before if not tenants([each]) for labels in each[1:]}
        assert others <= MEASURED
    assert sum(len(worker.submits) for worker in cluster.workers) == ACCEPTED


def test_what_is_counted_by_a_few_reasons_is_there_from_the_start():
    """Of a series that begins at 500, Prometheus sees no increase."""
    there = series()
    for name, label, values in (
        ("takeovers", "outcome", ("continued", "finished", "not_found", "away", "refused")),
        ("resumes", "outcome", ("running", "finished", "not_found", "invalid", "refused")),
        ("journal_writes", "outcome", ("ok", "stale", "full", "other", "dropped", "unavailable")),
        ("state_claims", "outcome", ("granted", "known", "away")),
        ("prefix_snapshots", "reason", ("start", "gap", "full")),
        ("refused_connections", "code", ("400", "408", "431", "503")),
    ):
        for value in values:
            assert (f"lockstep_router_{name}_total", (label, value)) in there


async def test_errors_of_every_route_are_there_from_the_start(make_cluster):
    """On a router that has had no request yet, a burst of errors is an increase."""
    cluster = await make_cluster(1)
    routes = {route.path for route in cluster.app.routes if route.path.startswith("/v1/")}
    assert routes == set(access.ENDPOINTS)
    values = {tuple(sample.labels.values()) for metric in metrics.REQUESTS.collect() for sample in metric.samples}
    for face in ("http", "websocket", "grpc"):
        for endpoint in routes:
            assert {(face, endpoint, code) for code in ("500", "503", "504")} <= values
