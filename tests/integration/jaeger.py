"""A real Jaeger as the collector of a test: OTLP over gRPC in, traces in memory, queries over HTTP."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from google.protobuf import json_format
from lockstep_common.ports import free_port
from machine import wait_for
from opentelemetry.proto.trace.v1 import trace_pb2
from otlp_receiver import Received, received

_ROOT = Path(__file__).parents[2]
_KIT = "KUBE_KIT"
_TRACES = 1000
"""That it keeps and gives at most: far more than a test makes."""
_IDS = ("traceId", "spanId", "parentSpanId")


def jaeger_program() -> Path | None:
    """`jaeger` on PATH, or the one that the kit for clusters unpacks; None where neither is."""
    if found := shutil.which("jaeger"):
        return Path(found)
    kit = Path(os.environ.get(_KIT, _ROOT / "../shared/kube"))
    if not (kit / "bin/jaeger.xz").exists():
        return None
    home = _ROOT / "build/kit"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes, and the kit does not expect two at a time
        subprocess.run([kit / "tools", "jaeger"], env=os.environ | {"KUBE_HOME": str(home)}, check=True, timeout=120)
    return home / "bin/jaeger"


class Jaeger:
    """What a running Jaeger has got, as its query API shows it."""

    def __init__(self, address: str, query: str) -> None:
        self.address = address
        self._client = httpx.Client(base_url=query, timeout=30.0, trust_env=False, verify=False)  # no TLS

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            return self._client.get("/api/v3/services").status_code == 200
        except httpx.TransportError:
            return False

    def trace(self, trace_id: str) -> list[Received]:
        """The spans of one trace."""
        answer = self._client.get(f"/api/v3/traces/{trace_id}")
        return [] if answer.status_code == 404 else _spans(answer)

    @property
    def spans(self) -> list[Received]:
        """The spans of all traces."""
        by_id = {span.span_id: span for answer in self._answers() for span in _spans(answer)}
        return list(by_id.values())

    @property
    def raw(self) -> bytes:
        """The query API's answers about all traces."""
        return b"".join(answer.content for answer in self._answers())

    def _answers(self) -> list[httpx.Response]:
        """Of each service; a trace is in the answer of each service that it has spans of."""
        services = self._client.get("/api/v3/services").raise_for_status().json()["services"]
        assert services
        return [self._client.get("/api/v3/traces", params=_query(service)).raise_for_status() for service in services]

    def close(self) -> None:
        """Close the connections to it."""
        self._client.close()


def _query(service: str) -> dict[str, str | int]:
    """Every trace of a service: the API wants a time, which here is from yesterday to tomorrow."""
    begin, end = (
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + offset_s)) for offset_s in (-86_400, 86_400)
    )
    return {
        "query.service_name": service,
        "query.start_time_min": begin,
        "query.start_time_max": end,
        "query.num_traces": _TRACES,
    }


def _spans(answer: httpx.Response) -> list[Received]:
    """Of an answer of the query API: OTLP as JSON, in which ids are hexadecimal where protobuf has base64."""
    body = answer.raise_for_status().json()
    parsed = json_format.ParseDict(_with_base64(body["result"]), trace_pb2.TracesData(), ignore_unknown_fields=True)
    return received(parsed.resource_spans)


def _with_base64(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _with_base64(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_base64(each) for each in value]
    return base64.b64encode(bytes.fromhex(value)).decode() if key in _IDS else value


@contextmanager
def jaeger(program: Path, directory: Path) -> Iterator[Jaeger]:
    """A Jaeger on free ports, with its configuration and log in this directory."""
    otlp, query, grpc = (f"127.0.0.1:{free_port()}" for _ in range(3))
    settings = {
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
            "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "warn"}},
        },
        "extensions": {
            "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": _TRACES}}}},
            "jaeger_query": {
                "storage": {"traces": "memory"},
                "http": {"endpoint": query},
                "grpc": {"endpoint": grpc},
            },
        },
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": otlp}}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
    }
    file, log = directory / "jaeger.yaml", directory / "jaeger.log"
    file.write_text(json.dumps(settings))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, "--config", file],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"OTEL_TRACES_SAMPLER": "always_off"},  # it would send traces of its own
        )
    running = Jaeger(otlp, f"http://{query}")

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        return running.is_up()

    try:
        wait_for(is_up, "jaeger answers")
        yield running
    finally:
        running.close()
        process.kill()
        process.wait(30)
