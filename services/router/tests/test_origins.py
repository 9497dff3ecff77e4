"""Web pages of other sites that a browser lets send requests to a router without keys."""

import pytest
from key_files import KEY, bearer, tenant, write
from test_connections import connection

BODY = '{"model": "reference", "prompt": "hello"}'
CHAT = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
EVIL = "http://evil:8000"


async def status_of(client, method, path, host, **headers):
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "content-type: text/plain", f"content-length: {len(BODY)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    async with connection(client, "\r\n".join([*lines, "", BODY]).encode()) as (reader, _):
        return int((await reader.readline()).split()[1])


@pytest.mark.parametrize(
    ("headers", "host", "status"),
    [
        ({}, "router.example", 200),
        ({"sec_fetch_mode": "cors"}, "router.example", 200),
        ({"sec_fetch_site": "none"}, "localhost:8000", 200),
        ({"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}, "localhost:8000", 200),
        ({"origin": "http://[::1]:8000"}, "[::1]:8000", 200),
        ({"origin": "https://chat.example", "sec_fetch_site": "cross-site"}, "localhost:8000", 200),
        ({"origin": EVIL, "sec_fetch_site": "cross-site"}, "localhost:8000", 403),
        ({"origin": "http://localhost:3000", "sec_fetch_site": "same-site"}, "localhost:8000", 403),
        ({"origin": EVIL}, "evil:8000", 403),
        ({"origin": "null"}, "localhost:8000", 403),
        ({"origin": ""}, "localhost:8000", 403),
        ({"origin": "http://["}, "localhost:8000", 403),
        ({"sec_fetch_site": "cross-site"}, "localhost:8000", 403),
    ],
)
async def test_pages_of_other_sites_send_nothing(make_cluster, headers, host, status):
    cluster = await make_cluster(1, websocket_origins="https://chat.example")
    async with cluster.over_http() as client:
        for path in ("/v1/completions", "/tokenize"):
            assert await status_of(client, "POST", path, host, **headers) == status, path
        reading = status if "origin" in headers else 200
        assert await status_of(client, "GET", "/v1/models", host, **headers) == reading


async def test_refusal_names_the_setting(cluster):
    response = await cluster.client.post("/v1/completions", content=BODY, headers={"origin": EVIL})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (403, "origin_not_allowed", "Origin")
    assert "websocket_origins" in error["message"]
    assert not any(worker.submits for worker in cluster.workers)


async def test_all_origins_can_be_allowed(make_cluster):
    cluster = await make_cluster(1, websocket_origins="*")
    for headers in ({"origin": EVIL}, {"sec-fetch-site": "cross-site"}):
        assert (await cluster.client.post("/v1/completions", content=BODY, headers=headers)).status_code == 200


async def test_keys_keep_pages_out_by_themselves(make_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    write(keys, tenant("search", KEY))
    cluster = await make_cluster(1, keys_file=str(keys))
    page = {"origin": EVIL, "sec-fetch-site": "cross-site"}
    for headers, status in ((page, 401), (page | bearer(KEY), 200)):
        assert (await cluster.client.post("/v1/completions", content=BODY, headers=headers)).status_code == status


async def test_the_consoles_own_chat_goes_on(make_cluster):
    cluster = await make_cluster(1, console="public")
    here = {"host": "localhost:8000"}
    # A dashboard's link to the console is of another site.
    linked = here | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await cluster.client.get("/console/", headers=linked)).status_code == 200
    own = here | {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
    response = await cluster.client.post("/v1/chat/completions", headers=own, json=CHAT)
    assert response.status_code == 200
    state = await cluster.client.get("/console/state", headers=here | {"sec-fetch-site": "same-origin"})
    assert state.status_code == 200
