from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from fake_openai import FakeOpenAI, Received, Refusal, Script, events, script
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from lockstep_tools.check import HEALTH_SERVICES

WHOLE = {"choices": [{"message": {"content": "a night"}}], "usage": {"completion_tokens": 2}}


def answer(number: int, request: Received) -> Script | Refusal:
    if request.body.get("stream"):
        return script(events(["a", "b", "c", "d"]))
    return Refusal(200, WHOLE)  # whole, that is: no stream


@pytest.fixture
def served(server: FakeOpenAI) -> FakeOpenAI:
    server.headers = {"X-Lockstep-Router": "r1"}
    server.answer = answer
    return server


class Worker:
    """A gRPC server with nothing but health."""

    def __init__(self) -> None:
        self.health = health.HealthServicer()
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def say(self, service: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set(service, status.SERVING if serving else status.NOT_SERVING)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    for service in HEALTH_SERVICES:
        made.say(service, serving=True)
    yield made
    made.server.stop(None)


def test_each_check_has_a_line(served: FakeOpenAI, worker: Worker, lockstep) -> None:
    result = lockstep("check", "--url", served.url, "--grpc", f"localhost:{worker.port}", "--timeout", "5")
    assert (result.returncode, result.stderr) == (0, "")
    chat, stream, workers = result.stdout.splitlines()
    assert chat.startswith("ok   chat: 2 tokens of fake from r1 in ")
    assert stream.startswith("ok   stream: 4 tokens in order")
    assert workers == "ok   workers: 1 behind localhost, each serving (127.0.0.1)"


def test_a_worker_that_is_not_ready_fails_and_is_named(served: FakeOpenAI, worker: Worker, lockstep) -> None:
    worker.say("lockstep.v1.Worker", serving=False)
    result = lockstep("check", "--url", served.url, "--grpc", f"127.0.0.1:{worker.port}", "--timeout", "2")
    assert result.returncode == 1
    assert f"FAIL workers: 127.0.0.1:{worker.port} says NOT_SERVING of lockstep.v1.Worker" in result.stdout
    assert "ok   chat" in result.stdout


def test_nobody_there_fails_each_check(lockstep) -> None:
    result = lockstep("check", "--url", "http://127.0.0.1:1/v1", "--grpc", "127.0.0.1:1", "--timeout", "1")
    assert result.returncode == 1
    assert result.stdout.count("FAIL ") == 3
    assert "Traceback" not in result.stderr


def test_a_system_that_comes_up_late_is_waited_for(served: FakeOpenAI, lockstep) -> None:
    def late(number: int, request: Received) -> Script | Refusal:
        return Refusal(503, {"error": {"message": "no worker is ready"}}) if number < 3 else answer(number, request)

    served.answer = late
    result = lockstep("check", "--url", served.url, "--timeout", "20")
    assert (result.returncode, len(served.received)) == (0, 4)


def test_an_address_without_a_port_is_refused(lockstep) -> None:
    result = lockstep("check", "--grpc", "lockstep-workers")
    assert result.returncode == 2
    assert "--grpc lockstep-workers: not an address such as lockstep-workers:9000" in result.stderr
