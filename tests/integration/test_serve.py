"""`lockstep serve` from start to end: what it says, what `ps` shows, how it ends, what is left."""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from machine import left_since, port_is_free, title, traces, wait_for
from serving import Serve, run
from system import MODEL

pytestmark = pytest.mark.usefixtures("private_tmp")

QUESTION = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": 8, "temperature": 0}


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

        assert serve.titles() == [
            "lockstep: rank w0/0",
            "lockstep: rank w0/1",
            "lockstep: router",
            "lockstep: serve",
            "lockstep: worker w0",
            "lockstep: zygote w0",
        ]
        by_title = {title(process): process.pid for process in serve.children()}

        code, out, _ = run("status", "--json", "--url", serve.system.url)
        status = json.loads(out)
        assert code == 0
        assert status["router"]["pid"] == by_title["lockstep: router"]
        (worker,) = status["workers"]
        assert (worker["id"], worker["state"], worker["epoch"]) == ("w0", "ready", 1)
        assert worker["pid"] == by_title["lockstep: worker w0"]
        assert [rank["pid"] for rank in worker["ranks"]] == [by_title[f"lockstep: rank w0/{n}"] for n in (0, 1)]
        code, out, _ = run("status", "--url", serve.system.url)
        assert code == 0
        assert "w0" in out
        assert "rank 1" in out

        below = serve.children()
        began_s = time.monotonic()
        serve.interrupt(signal.SIGINT)
        assert serve.end() == 0
        assert time.monotonic() - began_s < 5
        assert not any(process.is_running() for process in below)
        assert "stopping" in serve.notes
        assert "Traceback" not in serve.notes
        assert port_is_free(serve.port)
    assert left_since(before) == []
    code, _, notes = run("status", "--url", serve.system.url)
    assert (code, "no router answers" in notes) == (2, True)


def test_a_lone_worker_goes_on_with_what_its_dead_rank_was_doing(tmp_path: Path) -> None:
    """Nobody else can: the stream waits for the same worker's next epoch."""
    with Serve(tmp_path, "--tp", "2") as serve, ThreadPoolExecutor(1) as elsewhere:
        serve.ready()

        def answer() -> str:
            response = httpx.post(
                f"{serve.system.api}/completions", json=QUESTION | {"max_tokens": 250}, timeout=30, trust_env=False
            )
            return response.raise_for_status().json()["choices"][0]["text"]

        calm = answer()
        serve.system.until_idle()
        disturbed = elsewhere.submit(answer)
        worker = serve.system.serving()
        os.kill(worker["ranks"][0]["pid"], signal.SIGKILL)
        assert disturbed.result() == calm
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
    before = traces()
    with Serve(tmp_path) as serve:
        serve.ready()
        url = f"{serve.system.api}/completions"
        body = QUESTION | {"max_tokens": 150, "stream": True}
        whole = httpx.post(url, json=body | {"stream": False}, timeout=30, trust_env=False).json()["choices"][0]["text"]
        with httpx.stream("POST", url, json=body, timeout=30, trust_env=False) as response:
            lines = response.iter_lines()
            for _ in range(8):
                next(lines)
            serve.interrupt(signal.SIGTERM)
            time.sleep(0.2)
            refused = httpx.post(url, json=QUESTION, timeout=5, trust_env=False)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1] if line.startswith("data: ")]
        assert whole.endswith("".join(texts))
        assert serve.end() == 0
    assert left_since(before) == []


def test_a_second_ctrl_c_does_not_wait_even_for_a_stopped_worker(tmp_path: Path) -> None:
    before = traces()
    with Serve(tmp_path) as serve:
        serve.ready()
        os.kill(serve.system.worker("w0")["pid"], signal.SIGSTOP)
        serve.interrupt(signal.SIGINT)
        time.sleep(0.5)
        assert serve.process.poll() is None
        began_s = time.monotonic()
        serve.interrupt(signal.SIGINT)
        assert serve.end() == 0
        assert time.monotonic() - began_s < 2
    assert left_since(before) == []


def test_a_worker_that_keeps_failing_ends_it_and_says_so(tmp_path: Path) -> None:
    """What cannot be told from the directory alone: ranks without memory for one block."""
    before = traces()
    with Serve(tmp_path, "--kv-memory", "1") as serve:
        assert serve.end() == 2
        assert "no memory for the KV cache" in serve.notes
        assert "Traceback" not in serve.notes
    assert left_since(before) == []


def test_a_taken_port_is_told_and_the_holder_left_alone(tmp_path: Path) -> None:
    before = traces()
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        began_s = time.monotonic()
        code, out, notes = run("serve", "--port", port)
        assert time.monotonic() - began_s < 5
        assert code == 2
        assert out == ""
        assert notes == f"lockstep: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert left_since(before) == []
