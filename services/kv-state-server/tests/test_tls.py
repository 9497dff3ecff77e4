"""With TLS the state server serves only peers that have a router's or a worker's certificate."""

import asyncio

import grpc
import pytest
from authority import ROUTER, WORKER, Authority, Mounted
from backends import PATIENCE_S
from grpc_health.v1 import health_pb2, health_pb2_grpc
from lockstep_common.telemetry import REGISTRY
from state_serving import Client, make_settings, serving
from test_names_service import bind, worker_of

STATE = "state.test"


@pytest.fixture
def authority():
    return Authority()


@pytest.fixture
def settings(tmp_path, authority):
    mounted = Mounted(tmp_path / "tls", authority, STATE)
    return make_settings(tmp_path, worker_identity=WORKER, **mounted.settings(ROUTER))


def dial(settings, authority, leaf):
    """A channel that shows a certificate and trusts the authority."""
    key = chain = None
    if leaf is not None:
        key = leaf.private_key_pem.bytes()
        chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    credentials = grpc.ssl_channel_credentials(authority.ca.cert_pem.bytes(), key, chain)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", STATE)]
    return grpc.aio.secure_channel(settings.listen, credentials, options=options)


@pytest.mark.parametrize("name", [ROUTER, WORKER])
async def test_routers_and_workers_are_served(settings, authority, name):
    async with serving(settings), dial(settings, authority, authority.issue(name)) as channel:
        await asyncio.wait_for(channel.channel_ready(), PATIENCE_S)
        client = Client(channel)
        assert (await bind(client, "w1")).bound
        assert await worker_of(client) == "w1"


@pytest.mark.parametrize("stranger", ["another name", "no certificate", "another authority", "expired", "plain text"])
async def test_strangers_get_nothing(settings, authority, stranger):
    before = REGISTRY.get_sample_value("lockstep_state_refused_peers_total") or 0.0
    async with serving(settings), dial(settings, authority, authority.issue(ROUTER)) as known:
        await asyncio.wait_for(known.channel_ready(), PATIENCE_S)
        channel = {
            "another name": lambda: dial(settings, authority, authority.issue("stranger.test", STATE)),
            "no certificate": lambda: dial(settings, authority, None),
            "another authority": lambda: dial(settings, authority, Authority().issue(ROUTER)),
            "expired": lambda: dial(settings, authority, authority.issue(ROUTER, expired=True)),
            "plain text": lambda: grpc.aio.insecure_channel(settings.listen),
        }[stranger]()
        async with channel:
            health = health_pb2_grpc.HealthStub(channel)
            for call in (lambda: worker_of(Client(channel)), lambda: health.Check(health_pb2.HealthCheckRequest())):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call()
                is_known = stranger == "another name"
                expected = grpc.StatusCode.PERMISSION_DENIED if is_known else grpc.StatusCode.UNAVAILABLE
                assert caught.value.code() == expected
        assert await worker_of(Client(known)) == ""
    refused = (REGISTRY.get_sample_value("lockstep_state_refused_peers_total") or 0.0) - before
    assert refused == (2 if stranger == "another name" else 0)
