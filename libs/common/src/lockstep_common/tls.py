"""Certificates from files that are read again when they change, and the check of a peer's identity.

It provides contexts of `ssl` for HTTP, and the PEM bytes for gRPC. It never imports gRPC. cert-manager and the kubelet
replace files by swapping a symbolic link. Files read from both sides of a swap do not match: they are refused and read
again. Certificates that cannot be used never replace usable ones. Keys are never in a log or an error.
"""

import logging
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from prometheus_client import Counter, Gauge

from lockstep_common.errors import LockstepError, invalid
from lockstep_common.telemetry import REGISTRY
from lockstep_common.watched_files import Signature, signature_of

logger = logging.getLogger("lockstep.tls")

EXPIRY = Gauge(
    "lockstep_tls_certificate_expiry_timestamp_seconds",
    "When the certificate in use expires, in seconds since 1970.",
    ["certificate"],
    registry=REGISTRY,
)
RELOADS = Counter(
    "lockstep_tls_reloads",
    "Times that changed files were read, by outcome: `loaded`, or `failed` and the old certificates were kept.",
    ["certificate", "outcome"],
    registry=REGISTRY,
)

_MAX_FILE_BYTES = 1 << 20
_URI_MARK = "://"


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: a chain with the leaf first, its key, and the authorities that must have signed peers."""

    cert: str
    key: str
    ca: str | None = None


@dataclass(frozen=True)
class Material:
    """The checked contents of the files."""

    cert: bytes
    key: bytes
    ca: bytes | None
    expires_at: datetime


class Certificates:
    """The newest usable certificates of one set of files. Safe to use from several threads."""

    def __init__(self, name: str, files: TlsFiles, settings: Mapping[str, str], *, check_s: float = 1.0) -> None:
        """Read the files.

        Args:
            name: the certificate's name in logs and metrics.
            files: the paths.
            settings: the names of the settings for `cert`, `key` and `ca`, for errors.
            check_s: shortest interval between two checks of the files, in seconds.

        Raises:
            LockstepError: INVALID_REQUEST, the files cannot be used.
        """
        self.name = name
        self.check_s = check_s
        self._files = files
        self._settings = settings
        self._lock = Lock()
        self._checked_at = time.monotonic()
        self._reported: tuple[tuple[Signature, ...], str] | None = None
        self._signature = self._sign()
        self._material = self._read()
        EXPIRY.labels(name).set(self._material.expires_at.timestamp())
        for outcome in ("loaded", "failed"):
            RELOADS.labels(name, outcome)  # a series that begins with 1 has no increase, and the first failure no alert

    def current(self) -> Material:
        """The certificates for a new connection."""
        self.check()
        return self._material

    def check(self) -> None:
        """Read the files if they have changed and `check_s` has passed since the last check."""
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at >= self.check_s:
                self._checked_at = now
                self._reread()

    def _reread(self) -> None:
        signature = self._sign()
        if signature == self._signature:
            self._reported = None
            return
        try:
            material = self._read()
        except LockstepError as error:
            # Refused files are read at each check: they may become usable without a change, at a time or by their
            # mode. A half-finished swap is complete at the next check; any other problem is reported once.
            problem = (signature, error.message)
            if self._sign() == signature and self._reported != problem:
                self._reported = problem
                RELOADS.labels(self.name, "failed").inc()
                logger.error("certificates not reloaded: %s", error.message, extra={"certificate": self.name})
            return
        self._signature, self._material, self._reported = signature, material, None
        EXPIRY.labels(self.name).set(material.expires_at.timestamp())
        RELOADS.labels(self.name, "loaded").inc()
        logger.info(
            "certificates reloaded", extra={"certificate": self.name, "expires": material.expires_at.isoformat()}
        )

    def _sign(self) -> tuple[Signature, ...]:
        return tuple(map(signature_of, (self._files.cert, self._files.key, self._files.ca)))

    def _read(self) -> Material:
        try:
            return self._read_checked()
        except LockstepError:
            raise
        except Exception as error:  # a key of an unknown kind, or no file descriptors left
            # Not the error's own words: they may quote a key.
            reason = error.strerror if isinstance(error, OSError) else None
            raise self._unusable("cert", f"cannot be used: {reason or type(error).__name__}") from None

    def _read_checked(self) -> Material:
        cert = self._bytes("cert", self._files.cert)
        key = self._bytes("key", self._files.key)
        ca = None if self._files.ca is None else self._bytes("ca", self._files.ca)
        leaf = self._certificates("cert", cert)[0]
        if ca is not None:
            self._certificates("ca", ca)
        self._check_key(key, leaf)
        now = datetime.now(UTC)
        if leaf.not_valid_after_utc <= now:
            raise self._unusable("cert", f"has expired at {leaf.not_valid_after_utc.isoformat()}")
        if leaf.not_valid_before_utc > now:
            raise self._unusable("cert", f"is not valid before {leaf.not_valid_before_utc.isoformat()}")
        material = Material(cert, key, ca, leaf.not_valid_after_utc)
        # OpenSSL has rules of its own, for example for the length of keys.
        self._check_context("cert", material, ssl.CERT_NONE)
        if ca is not None:
            self._check_context("ca", material, ssl.CERT_REQUIRED)
        return material

    def _check_context(self, kind: str, material: Material, verify_clients: ssl.VerifyMode) -> None:
        try:
            _make_context(material, verify_clients)
        except ssl.SSLError as error:
            raise self._unusable(kind, f"is refused by OpenSSL: {error.reason or error}") from None

    def _bytes(self, kind: str, path: str) -> bytes:
        try:
            with open(path, "rb") as file:
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self._unusable(kind, f"cannot be read: {error.strerror or error}") from None
        if len(content) > _MAX_FILE_BYTES:
            raise self._unusable(kind, f"has more than {_MAX_FILE_BYTES} bytes")
        return content

    def _certificates(self, kind: str, content: bytes) -> Sequence[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(content)
        except ValueError:
            raise self._unusable(kind, "holds no PEM certificate") from None

    def _check_key(self, content: bytes, leaf: x509.Certificate) -> None:
        try:
            key = serialization.load_pem_private_key(content, password=None)
        except TypeError:
            raise self._unusable("key", "is encrypted; a key without a password is needed") from None
        except (ValueError, UnsupportedAlgorithm):
            raise self._unusable("key", "holds no PEM private key") from None
        if _public_bytes(key.public_key()) != _public_bytes(leaf.public_key()):
            raise self._unusable("key", f"is not the key of the certificate in {self._files.cert}")

    def _unusable(self, kind: str, reason: str) -> LockstepError:
        setting = self._settings[kind]
        return invalid(setting, f"({getattr(self._files, kind)}) {reason}")


def _public_bytes(key: Any) -> bytes:
    encoded: bytes = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return encoded


class _ServerContext(ssl.SSLContext):
    """A context that uses the newest certificates for every connection.

    An authority or a chain cannot be removed from a context in use, so each change makes a new one.
    """

    certificates: Certificates
    verify_clients: ssl.VerifyMode
    _material: Material | None = None
    _newest: ssl.SSLContext | None = None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Call the newest context; asyncio and uvloop call this for each connection."""
        return self._current().wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """Call the newest context."""
        return self._current().wrap_socket(*args, **kwargs)

    def _current(self) -> ssl.SSLContext:
        material = self.certificates.current()
        if self._newest is None or self._material is not material:
            self._newest, self._material = _make_context(material, self.verify_clients), material
        return self._newest


def server_context(certificates: Certificates, *, verify_clients: ssl.VerifyMode) -> ssl.SSLContext:
    """A context for servers that follows the files.

    Args:
        certificates: the server's own.
        verify_clients: whether clients must, may or need not show a certificate. One that is shown must be signed by
            one of the authorities in the files.
    """
    context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.certificates = certificates
    context.verify_clients = verify_clients
    context._current()
    return context


def management_context(certificates: Certificates | None) -> ssl.SSLContext | None:
    """The TLS context of a management port; None: plain HTTP. Kubelets show no certificate, Prometheus does."""
    return None if certificates is None else server_context(certificates, verify_clients=ssl.CERT_OPTIONAL)


def _make_context(material: Material, verify_clients: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, material)
    if verify_clients is not ssl.CERT_NONE:
        _trust(context, material)
        context.verify_mode = verify_clients
    return context


def client_context(material: Material) -> ssl.SSLContext:
    """A context for clients that show this certificate, and verify the server's name and authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, material)
    _trust(context, material)
    return context


def _load(context: ssl.SSLContext, material: Material) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The chain can only be loaded from a path. An anonymous file holds exactly the contents that were checked.
    descriptor = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(material.cert.rstrip() + b"\n" + material.key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _trust(context: ssl.SSLContext, material: Material) -> None:
    assert material.ca is not None
    context.load_verify_locations(cadata=material.ca.decode("ascii", errors="replace"))


def is_uri(identity: str) -> bool:
    """Whether an identity is a URI, such as `spiffe://cluster.local/router`, and not a DNS name."""
    return _URI_MARK in identity


def has_identity(certificate_pem: bytes, identity: str) -> bool:
    """Whether a certificate's subject alternative names hold exactly this DNS name or URI.

    Wildcards do not match, and the subject is ignored.

    Args:
        certificate_pem: a certificate whose signature has been verified before.
        identity: the DNS name or URI to look for.
    """
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    if is_uri(identity):
        return identity in names.get_values_for_type(x509.UniformResourceIdentifier)
    return identity.lower() in [name.lower() for name in names.get_values_for_type(x509.DNSName)]
