"""Mutual TLS of the worker's gRPC port, and of its calls of the state server: its own certificate, and the check of its
peers.

A peer without a certificate of the authority fails in the handshake. One whose certificate is for another identity gets
PERMISSION_DENIED for every call, including health and reflection.
"""

from functools import partial

from lockstep_common.grpc_tls import Dial, PeerInterceptor, dial_plain, dial_secure
from lockstep_common.tls import Certificates, TlsFiles

from lockstep_worker import metrics
from lockstep_worker.settings import WorkerSettings


def load_certificates(settings: WorkerSettings) -> Certificates | None:
    """The certificates that the settings name; None without TLS.

    Raises:
        LockstepError: INVALID_REQUEST, the files cannot be used.
    """
    if not settings.tls_cert or not settings.tls_key:
        return None
    names = {"cert": "tls_cert", "key": "tls_key", "ca": "tls_ca"}
    return Certificates("worker", TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca), names)


def check_peers(settings: WorkerSettings) -> PeerInterceptor:
    """Accepts calls from routers only."""
    refusal = "the certificate is not for a router of this worker"
    return PeerInterceptor((settings.peer_identity or "",), refusal, metrics.STRANGERS.inc)


def state_dial(settings: WorkerSettings, certificates: Certificates | None) -> Dial:
    """How the state server is dialled: its certificate has to be for `state_identity`."""
    if certificates is None:
        return dial_plain
    return partial(dial_secure, certificates=certificates, identity=settings.state_identity or "")
