"""Connections and calls to the Kubernetes API server.

Import this module only where it is used: the client library takes 0.3 s and about 45 MiB. A package that uses it must
depend on `kubernetes`. Every failure is a `KubernetesError` with one sentence, which never contains a token.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import ClientError, ClientResponse
from aiohttp.http_exceptions import HttpProcessingError
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.client.exceptions import OpenApiException

_IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"
_MAX_SENTENCE_CHARS = 300


class KubernetesError(Exception):
    """A call that failed; `status` is the HTTP status if there was an answer, else 0."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence[:_MAX_SENTENCE_CHARS])
        self.status = status


async def connect() -> ApiClient:
    """A client for the API server: with the pod's service account in a cluster, else as `KUBECONFIG` says.

    The service account's token is read again at least once a minute, since Kubernetes rotates it.

    Raises:
        KubernetesError: neither exists, or it cannot be read.
    """
    configuration = Configuration()
    try:
        if os.environ.get(_IN_CLUSTER_VARIABLE):
            config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            # The library's own default has the variable's value of the time when it was imported.
            path = os.environ.get("KUBECONFIG", config.KUBE_CONFIG_DEFAULT_LOCATION)
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=path, client_configuration=configuration
            )
        return ApiClient(configuration)
    except Exception as error:  # the library checks the files little and may raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise KubernetesError(f"no way to the API server: {reason}") from None


class ApiConnection:
    """The client of one user: made when it is first needed, and again after `close`."""

    def __init__(self) -> None:
        self._client: ApiClient | None = None

    async def client(self) -> ApiClient:
        """The client, as `connect` makes it.

        Raises:
            KubernetesError: as for `connect`.
        """
        if self._client is None:
            self._client = await connect()
        return self._client

    async def close(self) -> None:
        """Close the client if there is one. The next one reads certificates and tokens again."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()  # type: ignore[no-untyped-call]


async def answer(call: Awaitable[ClientResponse], deadline_s: float) -> dict[str, Any]:
    """The object in the answer to a call (one of the library's `…_without_preload_content`).

    Raises:
        KubernetesError: there is no answer in time, or it is an error or no object.
    """
    with _as_kubernetes_error():
        async with asyncio.timeout(deadline_s):
            response = await call
            try:
                return _checked(response.status, await response.read())
            finally:
                response.release()


async def events(call: Awaitable[ClientResponse], deadline_s: float) -> AsyncIterator[dict[str, Any]]:
    """The events of a watch until the server ends it. The first item is empty and means that the watch is open.

    Raises:
        KubernetesError: the watch is refused, breaks, reports an ERROR event, or has not ended after `deadline_s`.
    """
    until = asyncio.get_running_loop().time() + deadline_s
    with _as_kubernetes_error():
        async with asyncio.timeout_at(until):
            response = await call
    try:
        with _as_kubernetes_error():
            if response.status >= 400:
                async with asyncio.timeout_at(until):
                    _checked(response.status, await response.read())
            yield {}
            while True:
                # One deadline around the whole loop would also cancel the caller's work between two events.
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
def _as_kubernetes_error() -> Iterator[None]:
    """Translate any exception of the library into a KubernetesError."""
    try:
        yield
    except TimeoutError:
        raise KubernetesError("the API server does not answer in time") from None
    except HttpProcessingError as error:  # for example, an event of more than 4 MiB; its words quote the answer
        raise KubernetesError(f"the API server's answer cannot be read: {type(error).__name__}") from None
    except (ClientError, OpenApiException, OSError, ValueError, KeyError) as error:
        raise KubernetesError(f"the API server cannot be asked: {error or type(error).__name__}") from None
