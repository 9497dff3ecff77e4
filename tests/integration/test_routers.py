"""`lockstep serve --routers 2`: a stream whose router is killed goes on at the other one."""

import signal
from pathlib import Path

import httpx
import psutil
import pytest
from lockstep_client import Finish, LockstepClient, Policy, TextPiece, Usage
from machine import left_since, title, traces, wait_for
from serving import Serve
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL

pytestmark = pytest.mark.usefixtures("private_tmp")

FIELDS = {
    "model": MODEL,
    "prompt": "It was a dark night, and",
    "max_tokens": SLOW_TOKENS,
    "seed": 5,
    "ignore_eos": True,
}
POLICY = Policy(retries=30, timeout_s=120.0)


def kill_router_of(pair: Serve, urls: list[str]) -> None:
    """Kill the router that this process is connected to."""
    ports = {int(url.rpartition(":")[2]) for url in urls}
    (port,) = {
        each.raddr.port
        for each in psutil.Process().net_connections("tcp")
        if each.raddr and each.raddr.port in ports and each.status == psutil.CONN_ESTABLISHED
    }
    for process in pair.children():
        if title(process) == "lockstep: router" and any(
            each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp")
        ):
            process.kill()
            return
    raise AssertionError("no router listens there")


def test_stream_goes_on_at_the_other_router(tmp_path: Path, slow_steps: SlowSteps) -> None:
    """Its client may not begin it again, so what continues it is the state server."""
    before = traces()
    with Serve(tmp_path, "--routers", "2") as pair:
        pair.ready()
        assert "lockstep: state" in pair.titles()
        urls = pair.routers()
        assert len(urls) == 2
        for url in urls:
            wait_for(lambda url=url: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, f"{url} is ready")
        text, ends, killed = "", [], False
        with LockstepClient([f"{url}/v1" for url in urls], policy=POLICY) as client:
            undisturbed = client.complete(**FIELDS).text
        with slow_steps.during(), LockstepClient([f"{url}/v1" for url in urls], policy=POLICY) as client:
            for event in client.complete(**FIELDS, stream=True, on_lost="error"):
                if not isinstance(event, TextPiece):
                    ends.append(type(event))
                    continue
                text += event.text
                if not killed and len(text) > 60:
                    killed = True
                    pair.until_mirrored()  # else the other router may not know it yet
                    kill_router_of(pair, urls)
                    slow_steps.end()
        assert killed
        assert (text, ends) == (undisturbed, [Finish, Usage])
        pair.interrupt(signal.SIGINT)
        assert pair.end() == 0
    assert left_since(before) == []
