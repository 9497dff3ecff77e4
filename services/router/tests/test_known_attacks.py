"""Attacks that have hurt other servers: `tests/README.md` has the list, and where the others are tested."""

import asyncio

import pytest

SECRETS = {
    "cache_salt": "a\0b",
    "prompt_embeds": "AAAA",
    "prompt_token_ids": [1, 2],
    "mm_processor_kwargs": {"a": 1},
    "kv_transfer_params": {"remote_block_ids": [1]},
    "block_hashes": ["00"],
    "stream_id": "a",
    "attempt": 1,
    "emitted_ids": [1],
    "tenant": "other",
    "lora_path": "/etc",
}
"""Names of what is inside servers: a client's value would be another request's, a file or a tensor."""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"])
async def test_clients_cannot_set_what_is_inside(cluster, path):
    asked = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"input": "hi"},
        "/v1/embeddings": {"input": "hi"},
    }[path]
    for name, value in SECRETS.items():
        response = await cluster.client.post(path, json={"model": "reference", **asked, name: value})
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == name
    assert not any(worker.submits for worker in cluster.workers)


async def test_addresses_in_requests_are_never_fetched(cluster):
    visits = []

    async def visited(reader, writer):
        visits.append(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(visited, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
        {"type": "file", "file": {"file_id": url}},
        {"type": "video_url", "video_url": {"url": url}},
    ]
    async with server:
        for part in parts:
            response = await cluster.chat(messages=[{"role": "user", "content": [part]}], max_tokens=2)
            assert response.status_code == 400
            assert response.json()["error"]["param"].startswith("messages[0].content[0]")
        body = {
            "model": "reference",
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        }
        assert (await cluster.client.post("/v1/responses", json=body)).status_code == 400
        # As text it is nothing but text, and a schema's address of another one is not followed.
        assert (await cluster.chat(messages=[{"role": "user", "content": url}], max_tokens=2)).status_code == 200
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": url}}}
        await cluster.chat(messages=[{"role": "user", "content": "hi"}], max_tokens=2, response_format=schema)
    assert visits == []
