import pytest
from conftest import eventually
PROMPT = "hello world"
async def test_smoke(cluster):
    r = await cluster.complete()
    print(r.status_code, r.text)
    assert r.json()["choices"][0]["text"] == cluster.undisturbed(PROMPT, 7, 12)
    r = await cluster.chat(stream=True)
    print(r.text)
    print((await cluster.client.get("/status")).text)
    w, others = cluster.worker_of("user:u")
    for k in range(12):
        w.script.die_after = k
        r = await cluster.complete()
        assert r.json()["choices"][0]["text"] == cluster.undisturbed(PROMPT, 7, 12), k
        await eventually(lambda: len(cluster.router.workers.ready())==2)
    print((await cluster.client.get("/metrics")).text[-6000:])
