"""A Kubernetes API server that takes Events of one namespace: real HTTP, and faults on demand."""

import asyncio

import yaml
from aiohttp import web

NAMESPACE = "chat"
TOKEN = "very-secret-token"


class FakeEvents:
    def __init__(self):
        self.events = {}
        self.requests = 0
        self.status = 200
        self.mute = False
        self._runner = None
        self._port = 0

    async def start(self):
        app = web.Application()
        path = f"/api/v1/namespaces/{NAMESPACE}/events"
        app.router.add_post(path, self._create)
        app.router.add_patch(path + "/{name}", self._patch)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
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

    def said(self):
        """(type, reason, message, count) of all Events."""
        return [(each["type"], each["reason"], each["message"], each["count"]) for each in self.events.values()]

    async def _fault(self, request):
        self.requests += 1
        if self.mute:
            await asyncio.sleep(3600)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "who are you?")
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
