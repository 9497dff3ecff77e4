"""The session comes from header, user or key, in this order, and keys are never stored."""

import pytest
from lockstep_api.v1 import inference_pb2, inference_pb2_grpc
from lockstep_router.faces import identity
from lockstep_router.faces.idempotency import scope_of
from lockstep_router.faces.identity import Origin


def test_session_comes_from_header_then_user_then_key():
    everything = {"x-session-id": "s1", "authorization": "Bearer secret-key"}
    assert identity.caller(Origin(everything), "alice").session == "session:s1"
    del everything["x-session-id"]
    assert identity.caller(Origin(everything), "alice").session == "user:alice"
    assert identity.caller(Origin(everything), None).session.startswith("key:")
    assert identity.caller(Origin({}), None).session != identity.caller(Origin({}), None).session


def test_key_is_hashed():
    name = identity.tenant({"authorization": "Bearer secret-key"})
    assert name == identity.tenant({"authorization": "bearer  secret-key"})
    assert "secret" not in name
    assert len(name) == 32
    assert identity.tenant({"authorization": "Bearer other"}) != name


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "secret", "Bearer EMPTY", "bearer  not-needed "]
)
def test_other_authorization_is_no_tenant(value):
    assert identity.tenant({"authorization": value}) == ""


def test_sane_request_id_is_kept():
    assert identity.request_id({"x-request-id": "my-req_1.a"}) == "my-req_1.a"


@pytest.mark.parametrize("value", ["", "a" * 65, "a b", "a\nb", "a:1", "é", "-x", "<script>"])
def test_odd_request_id_is_replaced(value):
    made = identity.request_id({"x-request-id": value})
    assert made != value
    assert identity.request_id({"x-request-id": made}) == made


def test_only_well_formed_trace_context_is_passed_on():
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    assert identity.caller(Origin({"traceparent": good}), None).traceparent == good
    assert identity.caller(Origin({"traceparent": good + "x"}), None).traceparent == ""


def test_clients_without_a_key_are_told_apart_by_address():
    first, second = Origin({}, "10.0.0.1"), Origin({}, "10.0.0.2")
    assert identity.caller(first, None).tenant == identity.caller(first, "alice").tenant
    assert identity.caller(first, None).tenant != identity.caller(second, None).tenant
    assert "10.0" not in identity.caller(first, None).tenant
    assert identity.caller(Origin({}), None).tenant == ""


def test_clients_without_a_key_that_share_a_cache_do_not_share_idempotency_keys():
    origins = [Origin({}, address, shares_cache=True) for address in ("10.0.0.1", "10.0.0.2")]
    assert {identity.caller(origin, None).tenant for origin in origins} == {""}
    assert len({scope_of("k", "Idempotency-Key", origin) for origin in origins}) == 2


def test_key_is_the_tenant_wherever_its_client_is():
    key = {"authorization": "Bearer secret-key"}
    tenants = {identity.caller(Origin(key, address), None).tenant for address in ("10.0.0.1", "10.0.0.2", "")}
    assert tenants == {identity.tenant(key)}


TENANTS = pytest.mark.parametrize(
    ("settings", "headers", "tenant"),
    [
        ({}, {}, identity.anonymous_tenant("127.0.0.1")),
        ({}, {"x-forwarded-for": "10.0.0.1"}, identity.anonymous_tenant("127.0.0.1")),
        ({"trusted_proxies": "127.0.0.0/8"}, {"x-forwarded-for": "10.0.0.1"}, identity.anonymous_tenant("10.0.0.1")),
        (
            {"trusted_proxies": "127.0.0.0/8,10.9.0.0/16"},
            {"x-forwarded-for": "10.0.0.7, 10.0.0.1, 10.9.1.1"},
            identity.anonymous_tenant("10.0.0.1"),
        ),
        ({"trusted_proxies": "127.0.0.0/8"}, {"x-forwarded-for": "[fd00::1]:99"}, identity.anonymous_tenant("fd00::1")),
        ({"trusted_proxies": "127.0.0.0/8"}, {}, identity.anonymous_tenant("127.0.0.1")),
        ({"trusted_proxies": "10.0.0.0/8"}, {"x-forwarded-for": "10.0.0.1"}, identity.anonymous_tenant("127.0.0.1")),
        ({"anonymous_cache": "shared"}, {}, ""),
        ({}, {"authorization": "Bearer k"}, identity.tenant({"authorization": "Bearer k"})),
        ({}, {"authorization": "Bearer EMPTY"}, identity.anonymous_tenant("127.0.0.1")),
    ],
)


@TENANTS
async def test_workers_get_the_tenant(make_cluster, settings, headers, tenant):
    cluster = await make_cluster(1, **settings)
    async with cluster.over_http() as client:
        body = {"model": "reference", "prompt": "hi", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert cluster.workers[0].submits[0].tenant == tenant


@TENANTS
async def test_workers_get_the_tenant_over_grpc(make_cluster, settings, headers, tenant):
    cluster = await make_cluster(1, **settings)
    async with cluster.over_grpc() as channel:
        message = inference_pb2.GenerateRequest(model="reference", prompt="hi")
        call = inference_pb2_grpc.InferenceStub(channel).Generate(message, metadata=tuple(headers.items()))
        assert [event async for event in call]
    assert cluster.workers[0].submits[0].tenant == tenant


async def test_idempotency_keys_over_grpc_belong_to_the_client_behind_the_proxy(make_cluster):
    cluster = await make_cluster(1, trusted_proxies="127.0.0.0/8")
    async with cluster.over_grpc() as channel:
        stub, message = inference_pb2_grpc.InferenceStub(channel), inference_pb2.GenerateRequest(model="reference")
        message.prompt = "hi"
        for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
            call = stub.Generate(message, metadata=(("idempotency-key", "k"), ("x-forwarded-for", address)))
            assert [event async for event in call]
    assert len(cluster.workers[0].submits) == 2, "the second one has the answer of the first"
