"""Many readers of streams: those of one owner do not keep others from theirs."""

import contextlib

import pytest
from key_files import KEY, OTHER_KEY, bearer, tenant, write
from lockstep_router.resumption.readings import MAX_OF_STREAM
from test_resumption import STREAM, leave_after, slow


@contextlib.asynccontextmanager
async def readers_of(client, stream_id, count, key):
    """Clients that read a stream until the end, and the answers of those that were refused."""
    async with contextlib.AsyncExitStack() as stack:
        refused = []
        for _ in range(count):
            response = await stack.enter_async_context(
                client.stream("GET", f"/v1/streams/{stream_id}", headers=bearer(key))
            )
            if response.status_code != 200:
                await response.aread()
                refused.append(response)
        yield refused


@contextlib.asynccontextmanager
async def stream_of(client, key, **fields):
    """The id of a long stream that its client reads until the end."""
    body = STREAM | {"max_tokens": 200} | fields
    async with client.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as response:
        assert response.status_code == 200, await response.aread()
        yield response.headers["x-lockstep-stream-id"]


@pytest.mark.parametrize(
    ("limits", "allowed", "status", "said"),
    [
        ({"concurrent_streams": 1}, 4, 429, "concurrent_streams of 1"),
        ({}, MAX_OF_STREAM - 1, 503, f"{MAX_OF_STREAM} clients read this stream already"),
    ],
)
async def test_readers_of_one_tenant_leave_the_others_theirs(make_cluster, tmp_path, limits, allowed, status, said):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY, **limits), tenant("chat", OTHER_KEY))
    cluster = await make_cluster(1, keys_file=str(keys), max_streams=20)
    slow(cluster)
    async with cluster.over_http() as client, stream_of(client, KEY) as stream_id:
        async with readers_of(client, stream_id, 19, KEY) as refused:
            assert len(refused) == 19 - allowed
            assert {response.status_code for response in refused} == {status}
            assert said in refused[0].json()["error"]["message"]
            assert int(refused[0].headers["retry-after"]) >= 1
            other = await client.post("/v1/completions", json=STREAM, headers=bearer(OTHER_KEY))
            assert other.status_code == 200
            assert len(other.text) > 0
        async with readers_of(client, stream_id, 1, KEY) as refused:
            assert not refused, "those that have left do not count"
        await client.delete(f"/v1/streams/{stream_id}", headers=bearer(KEY))


async def test_who_reads_the_most_gets_no_more_when_there_is_little_room(make_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY), tenant("chat", OTHER_KEY))
    cluster = await make_cluster(1, keys_file=str(keys), max_streams=8)
    slow(cluster)
    async with cluster.over_http() as client, stream_of(client, KEY) as ours, stream_of(client, OTHER_KEY) as theirs:
        async with readers_of(client, ours, 8, KEY) as refused:
            assert [response.status_code for response in refused] == [503] * 2
            async with readers_of(client, theirs, 3, OTHER_KEY) as beyond:
                assert [response.status_code for response in beyond] == [503], "all of the room is taken"
                assert "too many clients" in beyond[0].json()["error"]["message"]
                last, _ = await leave_after(client, STREAM | {"max_tokens": 200, "user": "v"}, 1, **bearer(KEY))
                async with readers_of(client, last, 1, KEY) as none:
                    assert not none, "the only reading of a stream has room of its own"
        for stream_id, key in ((ours, KEY), (theirs, OTHER_KEY), (last, KEY)):
            await client.delete(f"/v1/streams/{stream_id}", headers=bearer(key))
