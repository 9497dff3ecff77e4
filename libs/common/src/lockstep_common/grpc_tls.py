"""Mutual TLS over gRPC: credentials that follow files, channels to other services, and the check of peers.

It is for services that have gRPC among their dependencies: this package has not.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from lockstep_common.tls import Certificates, has_identity

logger = logging.getLogger("lockstep.tls")

_BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def server_credentials(certificates: Certificates, *, verify_clients: bool = True) -> grpc.ServerCredentials:
    """Credentials that follow the files: each handshake uses the newest certificates.

    Args:
        certificates: the server's own, and the authority of its clients.
        verify_clients: a client has to show a certificate of that authority.
    """
    given = certificates.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca = given.ca if verify_clients else None
        return grpc.ssl_server_certificate_configuration([(given.key, given.cert)], root_certificates=ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        newest = certificates.current()
        if newest is given:
            return None
        given = newest
        return configuration()

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, verify_clients)


Dial = Callable[[str, tuple[tuple[str, object], ...]], grpc.aio.Channel]
"""Opens a channel to a target with these gRPC options."""


def dial_plain(target: str, options: tuple[tuple[str, object], ...]) -> grpc.aio.Channel:
    """A channel without TLS."""
    return grpc.aio.insecure_channel(target, options=options)


def dial_secure(
    target: str, options: tuple[tuple[str, object], ...], certificates: Certificates, identity: str
) -> grpc.aio.Channel:
    """A channel with the newest certificates to a server whose own has to be for an identity, a DNS name."""
    material = certificates.current()
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
    # Servers may be dialled by IP address, and their certificates hold names only.
    named = (*options, ("grpc.ssl_target_name_override", identity))
    return grpc.aio.secure_channel(target, credentials, options=named)


class PeerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Accepts calls only from peers whose certificate is for one of these identities.

    Args:
        identities: DNS names or URIs.
        refusal: the error message for others.
        on_refusal: called for each call that is refused.
    """

    def __init__(self, identities: Sequence[str], refusal: str, on_refusal: Callable[[], None]) -> None:
        self._identities = identities
        self._refusal = refusal
        self._on_refusal = on_refusal

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
        if len(shown) == 1 and any(has_identity(shown[0], identity) for identity in self._identities):
            return
        self._on_refusal()
        logger.debug("peer refused", extra={"peer": context.peer()})
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, self._refusal)
