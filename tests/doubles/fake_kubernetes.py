"""Kubernetes API servers for tests: real HTTP on loopback, with faults on demand.

`FakeEndpointSlices` lists and watches EndpointSlices, `FakeEvents` takes Events. Each serves one namespace and nothing
else, and writes the kubeconfig with which a client finds it.
"""

import asyncio
import contextlib
import json

import yaml
from aiohttp import web

NAMESPACE = "chat"
SELECTOR = "app.kubernetes.io/name=lockstep"
TOKEN = "very-secret-token"


def endpoint(address, pod=None, uid=None, **conditions):
    """An entry of an EndpointSlice."""
    entry = {"addresses": [address], "conditions": conditions or {"ready": True}}
    if pod is not None:
        entry["targetRef"] = {"kind": "Pod", "name": pod, "namespace": NAMESPACE, "uid": uid or f"uid of {pod}"}
    return entry


def endpoint_slice(name, *endpoints, port=9000, family="IPv4", **changes):
    """An EndpointSlice."""
    return {
        "metadata": {"name": name, "namespace": NAMESPACE},
        "addressType": family,
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
        "endpoints": list(endpoints) or None,  # the real server sends null for an empty list
    } | changes


class FakeKubernetes:
    """The common part of both servers: the listener, the kubeconfig, and the fault of a server that never answers."""

    def __init__(self):
        self.mute = False  # accepts requests and never answers
        self._runner = None
        self._port = 0

    async def start(self):
        """Listen; on the same port again after `stop`."""
        app = web.Application()
        self._add_routes(app.router)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        """Stop listening."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def kubeconfig(self, path):
        """Write a file for KUBECONFIG."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        path.write_text(yaml.safe_dump(config))

    def _add_routes(self, router):
        raise NotImplementedError


class FakeEndpointSlices(FakeKubernetes):
    """Lists and watches of EndpointSlices."""

    def __init__(self):
        super().__init__()
        self.slices = {}
        self.version = 100
        self.lists = 0
        self.watches = 0
        self.list_status = 200
        self.watch_status = 200
        self.oldest = 0  # events before this version are forgotten
        self.tokens = set()
        self._events = []
        self._changed = asyncio.Event()
        self._open = set()

    def _add_routes(self, router):
        router.add_get("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices", self._answer)

    async def stop(self):
        """Stop listening and reset what was connected."""
        if self._runner is not None:
            self.break_watches()
        await super().stop()

    # What happens in the cluster.

    def put(self, value):
        name = value["metadata"]["name"]
        self._happen("MODIFIED" if name in self.slices else "ADDED", value)
        self.slices[name] = value

    def delete(self, name):
        self._happen("DELETED", self.slices.pop(name))

    def forget(self):
        """As after a compaction: a watch cannot resume from an earlier version."""
        self.oldest = self.version = self.version + 1
        self._wake()

    def break_watches(self):
        for transport in self._open:
            transport.abort()

    def _happen(self, kind, value):
        self.version += 1
        value["metadata"]["resourceVersion"] = str(self.version)
        # Kept as JSON: later changes of the object by the test do not change the event.
        self._events.append((self.version, json.dumps({"type": kind, "object": value}).encode() + b"\n"))
        self._wake()

    def _wake(self):
        self._changed.set()
        self._changed = asyncio.Event()

    # HTTP.

    async def _answer(self, request):
        self.tokens.add(request.headers.get("authorization", ""))
        if self.mute:
            await asyncio.sleep(3600)
        if request.match_info["namespace"] != NAMESPACE or request.query.get("labelSelector") != SELECTOR:
            return _status(403, "forbidden")
        return await (self._watch(request) if request.query.get("watch") else self._list())

    async def _list(self):
        self.lists += 1
        if self.list_status != 200:
            return _status(self.list_status, "not now")
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": [*self.slices.values()]})

    async def _watch(self, request):
        self.watches += 1
        if self.watch_status != 200:
            return _status(self.watch_status, "no watching")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        self._open.add(request.transport)
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(int(request.query["timeoutSeconds"])):
                await self._stream(response, int(request.query["resourceVersion"]))
        self._open.discard(request.transport)
        return response

    async def _stream(self, response, seen):
        while True:
            changed = self._changed
            if seen < self.oldest:
                gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
                await response.write(json.dumps(gone).encode() + b"\n")
                return
            for version, line in self._events:
                if version > seen:
                    await response.write(line)
                    seen = version
            await changed.wait()


class FakeEvents(FakeKubernetes):
    """Creation and patching of Events."""

    def __init__(self):
        super().__init__()
        self.events = {}
        self.requests = 0
        self.status = 200

    def _add_routes(self, router):
        path = f"/api/v1/namespaces/{NAMESPACE}/events"
        router.add_post(path, self._create)
        router.add_patch(path + "/{name}", self._patch)

    def said(self):
        """(type, reason, message, count) of all Events."""
        return [(each["type"], each["reason"], each["message"], each["count"]) for each in self.events.values()]

    async def _fault(self, request):
        self.requests += 1
        if self.mute:
            await asyncio.sleep(3600)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        return _status(self.status, "not now") if self.status != 200 else None

    async def _create(self, request):
        if fault := await self._fault(request):
            return fault
        event = await request.json()
        self.events[event["metadata"]["name"]] = event
        return web.json_response(event, status=201)

    async def _patch(self, request):
        if fault := await self._fault(request):
            return fault
        assert request.content_type == "application/merge-patch+json"
        event = self.events.get(request.match_info["name"])
        if event is None:
            return _status(404, "no such Event")
        event.update(await request.json())
        return web.json_response(event)


def _status(code, message):
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
