"""`lockstep serve` from start to end: its output, what `ps` shows, how it ends, what is left."""

import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from machine import left_since, port_is_free, title, traces, wait_for
from serving import END_S, START_S, Serve, run
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL, is_idle

pytestmark = pytest.mark.usefixtures("private_tmp")

GRACE_S = 8.0
"""What `lockstep serve` waits for after a Ctrl-C, at most."""
QUESTION = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": 8, "temperature": 0}


def listening(processes: list[psutil.Process]) -> list[tuple[str, str, int]]:
    """The TCP ports of processes: title, address, port; sorted."""
    return sorted(
        (title(process), each.laddr.ip, each.laddr.port)
        for process in processes
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    )


def test_from_start_to_ctrl_c(tmp_path: Path) -> None:
    before = traces()
    with Serve(tmp_path, "--tp", "2") as serve:
        wait_for(lambda: "lockstep: serve" in serve.titles(), "serve names itself")
        serve.ready()
        answer = httpx.post(f"{serve.system.api}/completions", json=QUESTION, timeout=30, trust_env=False)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert "reference" in serve.output
        assert "✓ w0 ready after" in serve.notes
        (console,) = re.findall(r"^console +(http://\S+)$", serve.output, re.MULTILINE)
        page = httpx.get(console, timeout=30, trust_env=False)
        assert (page.status_code, "<title>Lockstep console</title>" in page.text) == (200, True)

        assert serve.titles() == [
            "lockstep: rank w0/0",
            "lockstep: rank w0/1",
            "lockstep: router",
            "lockstep: serve",
            "lockstep: worker w0",
            "lockstep: zygote w0",
        ]
        by_title = {title(process): process.pid for process in serve.children()}
        # Ranks have no port that could be attacked: the router's two and the worker's metrics are for this machine.
        ports = listening([psutil.Process(serve.pid), *serve.children()])
        assert [name for name, _, _ in ports] == ["lockstep: router"] * 2 + ["lockstep: worker w0"]
        assert {address for _, address, _ in ports} == {"127.0.0.1"}

        code, out, _ = run("status", "--json", "--url", serve.system.management_url)
        status = json.loads(out)
        assert code == 0
        assert status["router"]["pid"] == by_title["lockstep: router"]
        (worker,) = status["workers"]
        assert (worker["id"], worker["state"], worker["epoch"]) == ("w0", "ready", 1)
        assert worker["pid"] == by_title["lockstep: worker w0"]
        assert [rank["pid"] for rank in worker["ranks"]] == [by_title[f"lockstep: rank w0/{n}"] for n in (0, 1)]
        code, out, _ = run("status", "--url", serve.system.management_url)
        assert code == 0
        assert "w0" in out
        assert "rank 1" in out

        below = serve.children()
        began_s = time.monotonic()
        serve.interrupt(signal.SIGINT)
        assert serve.end() == 0
        assert time.monotonic() - began_s < GRACE_S
        assert not any(process.is_running() for process in below)
        assert "stopping" in serve.notes
        assert "Traceback" not in serve.notes
        assert port_is_free(serve.port)
    assert left_since(before) == []
    code, _, notes = run("status", "--url", serve.system.management_url)
    assert (code, "no router answers" in notes) == (2, True)


def test_a_single_worker_continues_its_streams_after_a_rank_died(tmp_path: Path, slow_steps: SlowSteps) -> None:
    """There is no other worker: the stream waits for the same worker's next epoch."""
    with Serve(tmp_path, "--tp", "2") as serve, ThreadPoolExecutor(1) as elsewhere:
        serve.ready()
        body = QUESTION | {"max_tokens": SLOW_TOKENS, "ignore_eos": True}

        def answer() -> str:
            response = httpx.post(f"{serve.system.api}/completions", json=body, timeout=60, trust_env=False)
            return response.raise_for_status().json()["choices"][0]["text"]

        undisturbed = answer()
        serve.system.until_idle()
        with slow_steps.during():
            disturbed = elsewhere.submit(answer)
            worker = serve.system.serving()
            os.kill(worker["ranks"][0]["pid"], signal.SIGKILL)
        assert disturbed.result() == undisturbed
        assert serve.system.worker("w0")["epoch"] == 2
        assert serve.system.router()["failovers"] == 1
        assert serve.kill() == []


@pytest.mark.parametrize("after_s", [0.3, 1.2])
def test_sigkill_leaves_no_orphan_and_the_next_start_clears_the_sockets(
    tmp_path: Path, private_tmp: Path, after_s: float
) -> None:
    """In the middle of a start; the test above does it to a ready system."""
    before = traces()
    with Serve(tmp_path, "--workers", "2") as serve:
        time.sleep(after_s)
        assert serve.kill() == []
    abandoned = set(private_tmp.glob("lockstep-stack-*"))
    assert len(abandoned) <= 1
    with Serve(tmp_path) as again:
        wait_for(lambda: [*set(private_tmp.glob("lockstep-stack-*")) - abandoned], "the next one listens", 20)
        assert not any(directory.exists() for directory in abandoned)
        again.interrupt(signal.SIGINT)
        assert again.end() == 0
    assert left_since(before) == []


def test_sigterm_lets_a_running_stream_end(tmp_path: Path) -> None:
    """Its rank is stopped meanwhile, so that the stream cannot be over before anything has been looked at."""
    before = traces()
    with Serve(tmp_path) as serve:
        serve.ready()
        (rank,) = serve.system.worker("w0")["ranks"]
        url = f"{serve.system.api}/completions"
        # So few tokens that a slow machine computes them in the time of the drain, 5 s.
        body = QUESTION | {"max_tokens": 20, "stream": True}
        complete = httpx.post(url, json=body | {"stream": False}, timeout=30, trust_env=False).json()["choices"][0][
            "text"
        ]
        serve.system.until(lambda all_: all(map(is_idle, all_.values())), "that request is over")
        os.kill(rank["pid"], signal.SIGSTOP)
        with (
            ThreadPoolExecutor(1) as elsewhere,
            httpx.Client(timeout=0.2, trust_env=False, verify=False) as impatient,
        ):
            streaming = elsewhere.submit(read_stream, url, body)
            serve.system.serving()
            serve.interrupt(signal.SIGTERM)
            wait_for(lambda: is_draining(impatient, url), "new requests are refused")
            assert not streaming.done(), streaming.exception()
            os.kill(rank["pid"], signal.SIGCONT)
            assert streaming.result() == complete
        assert serve.end() == 0
    assert left_since(before) == []


def read_stream(url: str, body: dict[str, object]) -> str:
    """The text of a stream, which has to have an end mark."""
    with httpx.stream("POST", url, json=body, timeout=30, trust_env=False, verify=False) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def is_draining(client: httpx.Client, url: str) -> bool:
    """A new request is refused because the router drains; until then it would wait, and is not waited for."""
    try:
        answer = client.post(url, json=QUESTION)
    except httpx.TimeoutException:
        return False
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    return True


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_even_for_a_stopped_worker(tmp_path: Path) -> None:
    before = traces()
    with Serve(tmp_path) as serve:
        serve.ready()
        os.kill(serve.system.worker("w0")["pid"], signal.SIGSTOP)
        serve.interrupt(signal.SIGINT)
        wait_for(lambda: "stopping" in serve.notes, "the first Ctrl-C is heard")
        began_s = time.monotonic()
        serve.interrupt(signal.SIGINT)
        assert serve.end() == 0
        assert time.monotonic() - began_s < GRACE_S / 2
    assert left_since(before) == []


@pytest.mark.slow
def test_a_worker_that_keeps_failing_ends_it_with_the_reason(tmp_path: Path) -> None:
    """A failure that the model's directory does not show: ranks without memory for one block."""
    before = traces()
    with Serve(tmp_path, "--kv-memory", "1") as serve:
        assert serve.end(START_S + END_S) == 2  # it ends after its start
        assert "no memory for the KV cache" in serve.notes
        assert "Traceback" not in serve.notes
    assert left_since(before) == []


def test_a_taken_port_is_an_error_and_its_holder_keeps_it(tmp_path: Path) -> None:
    before = traces()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        code, out, notes = run("serve", "--port", port)
        assert code == 2
        assert out == ""
        assert notes == f"lockstep: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert left_since(before) == []
