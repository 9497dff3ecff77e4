"""The router's certificates: for clients over HTTPS, and for workers and the state server, which accept no other peers.

Without certificates in the settings both sides use plain text. A worker has to show a certificate for
`peer_identity`, the state server one for `state_identity`; gRPC checks that in the handshake, before the first byte.
"""

import ssl
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import grpc
from lockstep_common.grpc_tls import dial_plain, dial_secure, server_credentials
from lockstep_common.tls import Certificates, TlsFiles, server_context
from lockstep_common.watched_files import watched

from lockstep_router.settings import RouterSettings


@dataclass(frozen=True)
class RouterTls:
    """The certificates that the settings name."""

    workers: Certificates | None
    http: Certificates | None
    peer_identity: str
    state_identity: str
    verify_clients: bool
    manage: bool

    @classmethod
    def load(cls, settings: RouterSettings) -> "RouterTls":
        """Read the certificates.

        Raises:
            LockstepError: INVALID_REQUEST, the files cannot be used.
        """
        workers = http = None
        if settings.tls_cert and settings.tls_key:
            names = {"cert": "tls_cert", "key": "tls_key", "ca": "tls_ca"}
            files = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca)
            workers = Certificates("workers", files, names)
        if settings.http_tls_cert and settings.http_tls_key:
            names = {"cert": "http_tls_cert", "key": "http_tls_key", "ca": "http_tls_client_ca"}
            files = TlsFiles(settings.http_tls_cert, settings.http_tls_key, settings.http_tls_client_ca)
            http = Certificates("http", files, names)
        verify_clients = settings.http_tls_client_ca is not None
        peer_identity, state_identity = settings.peer_identity or "", settings.state_identity or ""
        return cls(workers, http, peer_identity, state_identity, verify_clients, settings.management_tls)

    def dial(self, target: str, options: tuple[tuple[str, object], ...]) -> grpc.aio.Channel:
        """A channel to a worker, with the newest certificates."""
        return self._dial(target, options, self.peer_identity)

    def dial_state(self, target: str, options: tuple[tuple[str, object], ...]) -> grpc.aio.Channel:
        """A channel to the state server, with the newest certificates."""
        return self._dial(target, options, self.state_identity)

    def _dial(self, target: str, options: tuple[tuple[str, object], ...], identity: str) -> grpc.aio.Channel:
        if self.workers is None:
            return dial_plain(target, options)
        return dial_secure(target, options, self.workers, identity)

    @property
    def http_context(self) -> ssl.SSLContext | None:
        """The TLS context for clients; None: plain HTTP."""
        if self.http is None:
            return None
        return server_context(self.http, verify_clients=ssl.CERT_REQUIRED if self.verify_clients else ssl.CERT_NONE)

    @property
    def grpc_credentials(self) -> grpc.ServerCredentials | None:
        """The credentials for clients over gRPC: each handshake uses the newest certificates. None: plain text."""
        if self.http is None:
            return None
        return server_credentials(self.http, verify_clients=self.verify_clients)

    @property
    def management_context(self) -> ssl.SSLContext | None:
        """The TLS context of the management port. Kubelets show no certificate. None: plain HTTP."""
        if not self.manage or self.workers is None:
            return None
        return server_context(self.workers, verify_clients=ssl.CERT_OPTIONAL)

    @property
    def management_certificates(self) -> Certificates | None:
        """What routers show each other on management ports; None: these are plain HTTP."""
        return self.workers if self.manage else None

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Within this context, changed files are read again and problems with them are reported."""
        return watched(*(each for each in (self.workers, self.http) if each is not None))
