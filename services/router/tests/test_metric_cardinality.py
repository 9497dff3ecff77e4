"""Whatever clients send, the number of series that Prometheus has to store stays the same."""

import asyncio
import json

import pytest
from lockstep_common.telemetry import REGISTRY
from lockstep_router import metrics
from lockstep_router.faces import access

HOSTILE = 10_000
"""Requests, each with another model, session, user, path and method."""
STREAMS = 200


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
    # The router measures the worker's model, the only one, when its time comes.
    assert {labels for _, *labels_of in series() - before for labels in labels_of} <= {("model", "reference")}


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
            assert {(face, endpoint, "500"), (face, endpoint, "503")} <= values
