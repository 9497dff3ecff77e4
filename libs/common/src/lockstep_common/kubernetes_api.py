"""The way to the Kubernetes API server, for the services that speak to it.

Import it only where it is used, since the client library takes 0.3 s and some 45 MiB; who does depends on `kubernetes`.
Whatever goes wrong on the way comes out as a `KubernetesError` with one sentence. A token is never part of it.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientError, ClientResponse
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import OpenApiException

_IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"
_MAX_SENTENCE_CHARS = 300


class KubernetesError(Exception):
    """A call that failed, in one sentence; `status` is the HTTP status if there was an answer, else 0."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence[:_MAX_SENTENCE_CHARS])
        self.status = status


async def connect() -> ApiClient:
    """A client for the API server: with the pod's service account in a cluster, else as `KUBECONFIG` says.

    The service account's token is read anew at least once a minute, since Kubernetes rotates it.

    Raises:
        KubernetesError: there is neither, or it cannot be read.
    """
    configuration = Configuration()
    try:
        if os.environ.get(_IN_CLUSTER_VARIABLE):
            config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            # The library's own default is the variable's value at the time of its import.
            path = os.environ.get("KUBECONFIG", config.KUBE_CONFIG_DEFAULT_LOCATION)
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=path, client_configuration=configuration
            )
        return ApiClient(configuration)
    except Exception as error:  # of files in any state: the library checks little and passes on what it meets
        reason = " ".join(str(error).split()) or type(error).__name__
        raise KubernetesError(f"no way to the API server: {reason}") from None


async def answer(call: Awaitable[ClientResponse], deadline_s: float) -> dict[str, Any]:
    """The object that a call (one of the library's `…_without_preload_content`) is answered with.

    Raises:
        KubernetesError: no answer in time, or none that is of use.
    """
    with _told():
        async with asyncio.timeout(deadline_s):
            response = await call
            try:
                return _checked(response.status, await response.read())
            finally:
                response.release()


async def events(call: Awaitable[ClientResponse], deadline_s: float) -> AsyncIterator[dict[str, Any]]:
    """The events of a watch until the server ends it; the first item is an empty one, given when the watch stands.

    Raises:
        KubernetesError: the watch cannot be had, breaks, says ERROR, or is not over after `deadline_s`.
    """
    until = asyncio.get_running_loop().time() + deadline_s
    with _told():
        async with asyncio.timeout_at(until):
            response = await call
    try:
        with _told():
            if response.status >= 400:
                async with asyncio.timeout_at(until):
                    _checked(response.status, await response.read())
            yield {}
            while True:
                # Not one deadline around it all: it would hit whatever the caller does between two events.
                async with asyncio.timeout_at(until):
                    line = await response.content.readline()
                if not line:
                    return
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _refusal(event["object"], 0)
                yield event
    finally:
        response.close()


def _checked(status: int, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise KubernetesError(f"the API server answers {status} and no object", status)
    if status >= 400:
        raise _refusal(value, status)
    return value


def _refusal(value: dict[str, Any], status: int) -> KubernetesError:
    """The error in a `Status` object."""
    status = int(value.get("code") or status)
    return KubernetesError(f"the API server answers {status}: {value.get('message') or value.get('reason')}", status)


@contextmanager
def _told() -> Iterator[None]:
    """Whatever the library raises, as one kind of error with a sentence."""
    try:
        yield
    except TimeoutError:
        raise KubernetesError("the API server does not answer in time") from None
    except (ClientError, OpenApiException, OSError, ValueError, KeyError) as error:
        raise KubernetesError(f"the API server cannot be asked: {error or type(error).__name__}") from None
