import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from authority import Authority
from fake_openai import FakeOpenAI, Received, Refusal, Script, events, script
from lockstep_tools.commands import check
from lockstep_tools.load.endpoint import Endpoint

WHOLE = {"choices": [{"message": {"content": "a night"}}], "usage": {"completion_tokens": 2}}


def answer(number: int, request: Received) -> Script | Refusal:
    if request.body.get("stream"):
        return script(events(["a", "b", "c", "d"]))
    return Refusal(200, WHOLE)  # a complete answer, not a stream


@pytest.fixture
def served(server: FakeOpenAI) -> FakeOpenAI:
    server.headers = {"X-Lockstep-Router": "r1"}
    server.answer = answer
    return server


class Worker:
    """A worker's management port that serves readiness only."""

    def __init__(self) -> None:
        self.ready = True
        self.figures = b"lockstep_state_breaker_open 0.0\n"
        self.status_of_metrics = 200
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                body = b'{"status":"%s"}' % (b"ready" if worker.ready else b"the worker takes no requests")
                body = worker.figures if self.path == "/metrics" else body
                ready = 200 if worker.ready and self.path == "/readyz" else 503
                self.send_response(worker.status_of_metrics if self.path == "/metrics" else ready)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.server.shutdown()
    made.server.server_close()


def with_certificate(worker: Worker, name: str, directory: Path) -> Path:
    """Let the port speak HTTPS; returns the file of the authority."""
    authority = Authority()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue(name).configure_cert(context)
    worker.server.socket = context.wrap_socket(worker.server.socket, server_side=True)
    ca = directory / "ca.crt"
    ca.write_bytes(authority.ca.cert_pem.bytes())
    return ca


def test_each_check_has_a_line(served: FakeOpenAI, worker: Worker, lockstep) -> None:
    result = lockstep("check", "--url", served.url, "--workers", f"http://localhost:{worker.port}", "--timeout", "5")
    assert (result.returncode, result.stderr) == (0, "")
    chat, stream, workers = result.stdout.splitlines()
    assert chat.startswith("ok   chat: 2 tokens of fake from r1 in ")
    assert stream.startswith("ok   stream: 4 tokens in order")
    assert workers == "ok   workers: 1 behind localhost, each serving (127.0.0.1)"


@pytest.mark.parametrize("content", ["", None])
async def test_an_answer_of_reasoning_alone_is_an_answer(server: FakeOpenAI, content: str | None) -> None:
    message = {"content": content, "reasoning_content": "let me think"}
    thought = Refusal(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 16}})
    server.answer = lambda number, request: thought
    assert (await check._chat(Endpoint(server.url), None)).startswith("16 tokens of fake from ")


@pytest.mark.parametrize(
    ("message", "problem"), [({"content": ""}, "0 characters in 2 tokens"), (None, "the answer is no chat completion")]
)
async def test_an_empty_answer_is_none(server: FakeOpenAI, message: object, problem: str) -> None:
    nothing = Refusal(200, {"choices": [{"message": message}], "usage": {"completion_tokens": 2}})
    server.answer = lambda number, request: nothing
    with pytest.raises(check.CheckError, match=problem):
        await check._chat(Endpoint(server.url), None)


def test_control_characters_of_a_server_are_shown_escaped(served: FakeOpenAI, lockstep) -> None:
    served.models = ("fake\x1b[2J",)
    assert "2 tokens of fake\\x1b[2J from r1" in lockstep("check", "--url", served.url).stdout


def test_a_worker_that_is_not_ready_fails_and_is_named(served: FakeOpenAI, worker: Worker, lockstep) -> None:
    worker.ready = False
    result = lockstep("check", "--url", served.url, "--workers", f"http://127.0.0.1:{worker.port}", "--timeout", "2")
    assert result.returncode == 1
    assert f"FAIL workers: 127.0.0.1:{worker.port} is not ready: " in result.stdout
    assert "ok   chat" in result.stdout


def test_https_is_checked_against_the_given_authority(
    served: FakeOpenAI, worker: Worker, tmp_path: Path, lockstep
) -> None:
    ca = with_certificate(worker, "localhost", tmp_path)
    flags = ("check", "--url", served.url, "--workers", f"https://localhost:{worker.port}", "--timeout", "2")
    assert lockstep(*flags, "--timeout", "30", "--ca-file", str(ca)).returncode == 0
    stranger = lockstep(*flags)
    assert (stranger.returncode, "certificate verify failed" in stranger.stdout.lower()) == (1, True)
    missing = lockstep(*flags, "--ca-file", str(tmp_path / "none"))
    assert (missing.returncode, "No such file" in missing.stderr) == (2, True)


def test_certificates_may_be_for_other_names_than_the_addresses(
    served: FakeOpenAI, worker: Worker, tmp_path: Path, lockstep
) -> None:
    ca = with_certificate(worker, "workers.internal", tmp_path)
    url = f"https://localhost:{worker.port}"
    flags = ("check", "--url", served.url, "--workers", url, "--state", url, "--ca-file", str(ca))
    names = ("--workers-name", "workers.internal", "--state-name", "workers.internal")
    named = lockstep(*flags, *names, "--timeout", "30")
    assert named.returncode == 0, named.stdout
    other = lockstep(*flags, "--timeout", "2")
    assert (other.returncode, other.stdout.count("certificate is not valid for 'localhost'")) == (1, 2)


def test_without_a_server_each_check_fails(lockstep) -> None:
    result = lockstep("check", "--url", "http://127.0.0.1:1/v1", "--workers", "http://127.0.0.1:1", "--timeout", "1")
    assert result.returncode == 1
    assert result.stdout.count("FAIL ") == 3
    assert "Traceback" not in result.stderr


def test_a_system_that_comes_up_late_is_waited_for(served: FakeOpenAI, lockstep) -> None:
    def late(number: int, request: Received) -> Script | Refusal:
        return Refusal(503, {"error": {"message": "no worker is ready"}}) if number < 3 else answer(number, request)

    served.answer = late
    result = lockstep("check", "--url", served.url, "--timeout", "20")
    assert (result.returncode, len(served.received)) == (0, 4)


def test_an_address_that_is_no_url_is_refused(lockstep) -> None:
    result = lockstep("check", "--workers", "lockstep-workers")
    assert result.returncode == 2
    assert "--workers lockstep-workers: not a URL such as http://lockstep-workers:9001" in result.stderr


@pytest.mark.parametrize("url", ["http://127.1.2.3:80", "https://127.1.2.3:443", "https://127.1.2.3"])
def test_a_management_port_may_be_the_one_of_its_scheme(lockstep, served: FakeOpenAI, url: str) -> None:
    """Nothing serves there, which is found out by asking."""
    result = lockstep("check", "--url", served.url, "--workers", url, "--timeout", "1")
    assert result.returncode == 1, result.stderr
    assert f"FAIL workers: 127.1.2.3:{443 if 'https' in url else 80} " in result.stdout


async def test_state_server_is_asked_for_its_store(worker: Worker) -> None:
    target, url = Endpoint("http://localhost/v1", None), httpx.URL(f"http://localhost:{worker.port}")
    assert await check._state(target, url) == "localhost serving"
    worker.figures = b"lockstep_state_breaker_open 1.0\n"
    with pytest.raises(check.CheckError, match="its Redis does not answer"):
        await check._state(target, url)
    worker.ready = False
    with pytest.raises(check.CheckError, match="is not ready"):
        await check._state(target, url)


async def test_a_store_that_cannot_be_looked_at_is_not_said_to_be_used(worker: Worker) -> None:
    target, url = Endpoint("http://localhost/v1", None), httpx.URL(f"http://localhost:{worker.port}")
    worker.status_of_metrics, worker.figures = 403, b'{"error":"a client certificate is needed"}'
    said = await check._state(target, url)
    assert said == "localhost ready; whether it uses its store is not known: that needs --client-cert"
    worker.status_of_metrics = 500
    with pytest.raises(check.CheckError, match="answers /metrics with status 500"):
        await check._state(target, url)
