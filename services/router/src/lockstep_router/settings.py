"""The router's settings: flags, `LOCKSTEP_…` environment, YAML file."""

import os
import socket
from typing import Annotated, Literal

from lockstep_common.settings import ServiceSettings
from pydantic import Field, field_validator
from pydantic_settings import NoDecode


def default_router_id() -> str:
    """A name that no other live router has."""
    return f"{socket.gethostname()}-{os.getpid()}"


class RouterSettings(ServiceSettings):
    """How one router process behaves. Times are in seconds."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one and logs it.")
    workers: Annotated[tuple[str, ...], NoDecode] = Field(
        min_length=1,
        max_length=1024,
        description="gRPC targets of the workers: unix:/path or host:port, comma-separated.",
    )
    router_id: str = Field(
        default_factory=default_router_id, min_length=1, max_length=128, description="This router's name to workers."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")

    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body; more is 413.")
    body_timeout_s: float = Field(30.0, gt=0, description="A request's body must have arrived by then.")
    write_timeout_s: float = Field(60.0, gt=0, description="A client that reads nothing for this long is cut off.")
    max_streams: int = Field(4096, ge=1, description="Streams at a time; more is 503 with Retry-After.")
    max_n: int = Field(16, ge=1, le=128, description="Largest `n` of a request.")
    max_prompts: int = Field(64, ge=1, le=4096, description="Most prompts in one completion request.")
    max_unread_tokens: int = Field(
        4096, ge=1, description="Tokens held for a client that reads slowly; beyond, its stream is paused."
    )

    first_token_deadline_s: float = Field(30.0, gt=0, description="An attempt without its first token moves on.")
    inter_token_deadline_s: float = Field(
        5.0, gt=0, description="A stream without a token, on a worker that finishes no step, moves on."
    )
    heartbeat_timeout_s: float = Field(1.5, gt=0, description="A worker silent for this long loses its streams.")
    connect_timeout_s: float = Field(3.0, gt=0, description="From dialling a worker to its Hello.")
    tokenizer_timeout_s: float = Field(30.0, gt=0, description="To fetch a model's tokenizer files from a worker.")
    backoff_initial_s: float = Field(0.1, gt=0, description="First pause before dialling a worker again.")
    backoff_max_s: float = Field(1.0, gt=0, description="Longest pause before dialling a worker again.")
    max_attempts: int = Field(6, ge=1, description="Workers a stream may lose in a row without getting a token.")
    resume_deadline_s: float = Field(
        60.0, gt=0, description="A stream waits this long for a worker before its client gets an error."
    )
    queue_threshold: int = Field(
        2, ge=0, description="A session leaves its worker for the least loaded one when more requests than this queue."
    )
    drain_timeout_s: float = Field(60.0, ge=0, description="After SIGTERM, streams may run on for this long.")

    @field_validator("workers", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """`a,b` as environment and flags give it."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("workers")
    @classmethod
    def _check_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for target in targets:
            if not is_target(target):
                raise ValueError(f"{target!r} is neither unix:/path nor host:port")
        if len(set(targets)) < len(targets):
            raise ValueError("a worker is listed twice")
        return targets


def is_target(text: str) -> bool:
    """Whether this is a gRPC target of the two forms that the router takes."""
    if text.startswith("unix:"):
        return len(text) > len("unix:")
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536
