"""Redis with an ACL user, with TLS, and what it holds of private data."""

import logging

import pytest
import redis
from authority import Authority, Mounted
from backends import OPTIONS, SECRET, keep
from lockstep_common.errors import LockstepError
from lockstep_common.ports import free_port
from lockstep_common.telemetry import REGISTRY
from redis_server import RedisServer
from state_serving import served
from test_journal_service import OK, append_one, piece, reading, record
from test_kv_service import FULL, STORED, get, header, key, put
from test_names_service import acquire, bind, renew, worker_of

RIGHTS = "+@read +@write +@scripting +@connection +time -@dangerous +info"  # as the README says


async def use_all(client):
    """Something of each service."""
    assert (await append_one(client, record=record(), pieces=[piece(0, 0, 5)])).outcome == OK
    assert list((await reading(client)).logs[0].ids) == [5]
    assert (await bind(client, "private-worker")).bound
    assert await worker_of(client) == "private-worker"
    lease = await acquire(client, "a")
    assert (await renew(client, "a", lease.epoch)).granted
    content = b"private-content"
    assert await put(client, (header("a", content), content)) == [STORED]
    assert await get(client, key("a")) == {0: content}


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "password"
    path.write_text("a-password\n")
    return str(path)


async def test_user_with_the_rights_of_the_readme_is_enough(tmp_path, password_file):
    user = f"--user state on >a-password ~own:* {RIGHTS}".split()
    server = RedisServer(tmp_path / "redis", None, *user)
    login = {"store_username": "state", "store_password_file": password_file, "store_prefix": "own:"}
    try:
        async with served(tmp_path, store=server.address, **login) as client:
            await use_all(client)
    finally:
        server.kill()


async def test_encrypted_values_and_hashed_keys_show_nothing(tmp_path, redis_server):
    path = tmp_path / "keys"
    path.write_text(f"{SECRET.hex()}\n")
    options = {"store": redis_server.address, "store_prefix": "sealed:", "encryption_key_file": str(path)}
    async with served(tmp_path, **options) as client:
        await use_all(client)
        with redis.Redis.from_url(redis_server.address) as server:
            names = list(server.scan_iter("sealed:*"))
            everything = b"".join([*names, *map(server.dump, names)])
    assert len(names) >= 5
    for private in (b"private", client.tenant.encode(), b"reference"):
        assert private not in everything


async def test_redis_with_mutual_tls(tmp_path):
    authority = Authority()
    theirs = Mounted(tmp_path / "theirs", authority, "localhost")
    ours = Mounted(tmp_path / "ours", authority, "state.test")
    port = free_port()
    files = ["--tls-cert-file", theirs.cert, "--tls-key-file", theirs.key, "--tls-ca-cert-file", ours.ca]
    server = RedisServer(tmp_path / "redis", None, "--tls-port", str(port), *files)
    options = {"store": f"rediss://localhost:{port}/0", "store_ca": ours.ca}
    try:
        async with served(tmp_path, **options, store_cert=ours.cert, store_key=ours.key) as client:
            await use_all(client)
    finally:
        server.kill()


async def test_user_without_the_right_to_info_stores_journals_and_no_blocks(tmp_path, password_file, caplog):
    """It is not known whether they would leave room for journals. The log says what is missing."""
    caplog.set_level(logging.WARNING, logger="lockstep.state")
    user = f"--user state on >a-password ~own:* {RIGHTS.removesuffix(' +info')}".split()
    server = RedisServer(tmp_path / "redis", None, *user)
    login = {"store_username": "state", "store_password_file": password_file, "store_prefix": "own:"}
    try:
        async with served(tmp_path, store=server.address, **login) as client:
            for name in ("a", "b"):
                assert await put(client, (header(name, b"content"), b"content")) == [FULL]
            assert (await append_one(client, record=record(), pieces=[piece(0, 0, 5)])).outcome == OK
    finally:
        server.kill()
    assert caplog.text.count("+info") == 1


@pytest.mark.parametrize("given", ["another-password", None])
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_a_refused_password_is_told_from_a_redis_that_cannot_be_reached(tmp_path, given, scheme):
    server = RedisServer(tmp_path / "redis", "a-password")
    address = f"{scheme}://127.0.0.1:{server.port}" + ("/0" if scheme == "redis" else "")
    before = failures("login")
    try:
        async with keep(scheme, address, OPTIONS | {"password": given, "breaker_failures": 2}) as kept:
            for _ in range(2):
                with pytest.raises(LockstepError, match="it refuses the user or the password"):
                    await kept.backend.bound(kept.key())
            assert kept.backend.unready is not None
            assert failures("login") >= before + 2
    finally:
        server.kill()


def failures(reason):
    return REGISTRY.get_sample_value("lockstep_state_store_failures_total", {"reason": reason})
