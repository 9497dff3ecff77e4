"""Where traces go and which are kept: the settings, and the standard variables of OpenTelemetry for what they leave
open.

`OTEL_EXPORTER_OTLP_HEADERS`, `…_CERTIFICATE`, `…_CLIENT_KEY`, `…_CLIENT_CERTIFICATE` and `…_COMPRESSION`,
`OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` are read by the SDK itself.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol
from urllib.parse import urlsplit

from lockstep_common.errors import invalid

Protocols = Literal["grpc", "http"]
DEFAULT_RATIO = 0.1
_MEMORY = "memory"
"""A value of `OTEL_TRACES_EXPORTER`, which is Lockstep's own, and of the setting `otlp_endpoint`."""
_RATIO_IN_MEMORY = 1.0
"""Spans in memory cost no collector anything, and their reader looks for a certain request."""
_PROTOCOLS: dict[str, Protocols] = {"grpc": "grpc", "http/protobuf": "http", "http": "http"}
_TIMEOUT_S = 5.0
_DELAY = "OTEL_BSP_SCHEDULE_DELAY"
_DELAY_S = 5.0
_MOST_DELAY_S = 3600.0
_HTTP_PATH = "/v1/traces"


class Given(Protocol):
    """The settings of a service, as far as they are about traces."""

    @property
    def otlp_endpoint(self) -> str | None: ...  # noqa: D102
    @property
    def otlp_protocol(self) -> Protocols | None: ...  # noqa: D102
    @property
    def trace_ratio(self) -> float | None: ...  # noqa: D102
    @property
    def trace_slow_s(self) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class TraceOptions:
    """Where traces go and which are kept."""

    endpoint: str
    """A URL; for gRPC also host:port, in plain text. Empty: traces are kept in memory only."""
    protocol: Protocols
    ratio: float
    slow_s: float
    timeout_s: float = _TIMEOUT_S
    """Longest time of one export, with its retries."""
    delay_s: float = _DELAY_S
    """Longest time that a span waits for others before it is exported."""
    is_whole_url: bool = False
    """Whether the endpoint is that of traces, to which no path is added."""

    @property
    def is_insecure(self) -> bool:
        """Whether the collector is spoken to in plain text."""
        return not self.endpoint.startswith("https://")

    @property
    def http_endpoint(self) -> str:
        """The URL for OTLP over HTTP. One without a path gets the standard one."""
        base = self.endpoint if "://" in self.endpoint else f"http://{self.endpoint}"
        if self.is_whole_url or urlsplit(base).path.rstrip("/").endswith(_HTTP_PATH):
            return base
        return base.rstrip("/") + _HTTP_PATH


def trace_options(given: Given, environment: Mapping[str, str] = os.environ) -> TraceOptions | None:
    """The options; None: there are no traces.

    Raises:
        LockstepError: INVALID_REQUEST, a variable of OpenTelemetry has no usable value.
    """
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    own = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    endpoint = given.otlp_endpoint or own or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if _MEMORY in (environment.get("OTEL_TRACES_EXPORTER"), given.otlp_endpoint):
        return TraceOptions("", "grpc", _ratio(given, environment, _RATIO_IN_MEMORY), given.trace_slow_s)
    if not endpoint:
        return None
    is_whole = given.otlp_endpoint is None and bool(own)
    return TraceOptions(
        endpoint,
        _protocol(given, environment),
        _ratio(given, environment, DEFAULT_RATIO),
        given.trace_slow_s,
        delay_s=_delay_s(environment),
        is_whole_url=is_whole,
    )


def _protocol(given: Given, environment: Mapping[str, str]) -> Protocols:
    if given.otlp_protocol is not None:
        return given.otlp_protocol
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    if name not in environment:
        name = "OTEL_EXPORTER_OTLP_PROTOCOL"
    value = environment.get(name, "grpc")
    if value not in _PROTOCOLS:
        raise invalid(name, "must be grpc or http/protobuf")
    return _PROTOCOLS[value]


def _ratio(given: Given, environment: Mapping[str, str], default: float) -> float:
    if given.trace_ratio is not None:
        return given.trace_ratio
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_")
    if sampler in ("always_on", "always_off"):
        return float(sampler == "always_on")
    value = environment.get("OTEL_TRACES_SAMPLER_ARG", "")
    if not value:
        return default
    try:
        ratio = float(value)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise invalid("OTEL_TRACES_SAMPLER_ARG", "must be a number from 0 to 1")
    return ratio


def _delay_s(environment: Mapping[str, str]) -> float:
    value = environment.get(_DELAY, "")
    if not value:
        return _DELAY_S
    delay_s = int(value[:10]) / 1e3 if value.isascii() and value.isdigit() else 0.0
    if not 0 < delay_s <= _MOST_DELAY_S:
        raise invalid(_DELAY, f"must be a number of milliseconds from 1 to {_MOST_DELAY_S * 1e3:.0f}")
    return delay_s
