"""Mutual TLS of the worker's gRPC port: its own certificate, and the check of its peers.

A peer without a certificate of the authority fails in the handshake. One whose certificate is for another identity gets
PERMISSION_DENIED for every call, including health and reflection.
"""

import inspect
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from lockstep_common.tls import Certificates, TlsFiles, has_identity, server_context

from lockstep_worker import metrics
from lockstep_worker.settings import WorkerSettings

logger = logging.getLogger("lockstep.worker")

_BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def load_certificates(settings: WorkerSettings) -> Certificates | None:
    """The certificates that the settings name; None without TLS.

    Raises:
        LockstepError: INVALID_REQUEST, the files cannot be used.
    """
    if not settings.tls_cert or not settings.tls_key:
        return None
    names = {"cert": "tls_cert", "key": "tls_key", "ca": "tls_ca"}
    return Certificates("worker", TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca), names)


def management_context(settings: WorkerSettings, certificates: Certificates | None) -> ssl.SSLContext | None:
    """The TLS context of the management port; None: plain HTTP. Kubelets show no certificate, Prometheus does."""
    if not settings.management_tls or certificates is None:
        return None
    return server_context(certificates, verify_clients=ssl.CERT_OPTIONAL)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that follow the files: each handshake uses the newest certificates."""
    given = certificates.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(given.key, given.cert)], root_certificates=given.ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        newest = certificates.current()
        if newest is given:
            return None
        given = newest
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)


class PeerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Accepts calls only from peers whose certificate is for one identity."""

    def __init__(self, identity: str) -> None:
        self._identity = identity

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The method's handler, preceded by the check of the peer."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        checked = {name: self._checked(getattr(handler, name)) for name in _BEHAVIOURS if getattr(handler, name)}
        return handler._replace(**checked)

    def _checked(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behaviour):

            async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                await self._check(context)
                async for response in behaviour(request, context):
                    yield response

            return generate

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        return call

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        shown = context.auth_context().get("x509_pem_cert", ())
        if len(shown) == 1 and has_identity(shown[0], self._identity):
            return
        metrics.STRANGERS.inc()
        logger.debug("peer refused", extra={"peer": context.peer()})
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the certificate is not for a router of this worker")
