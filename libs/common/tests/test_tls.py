"""Certificates follow their files, and unusable files never replace usable certificates."""

import asyncio
import contextlib
import datetime
import errno
import logging
import os
import ssl
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from authority import Authority, Mounted
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from lockstep_common import tls
from lockstep_common.errors import LockstepError
from lockstep_common.settings import check_identity
from lockstep_common.telemetry import REGISTRY
from lockstep_common.tls import Certificates, TlsFiles, has_identity, server_context
from lockstep_common.watched_files import watched

NAMES = {"cert": "tls_cert", "key": "tls_key", "ca": "tls_ca"}
CHECK_S = 0.1


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def mounted(tmp_path: Path, authority: Authority) -> Mounted:
    return Mounted(tmp_path / "tls", authority, "a.test")


def load(mounted: Mounted, name: str = "test") -> Certificates:
    return Certificates(name, TlsFiles(mounted.cert, mounted.key, mounted.ca), NAMES, check_s=CHECK_S)


def refusal(mounted: Mounted) -> str:
    with pytest.raises(LockstepError) as caught:
        load(mounted)
    return caught.value.message


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


def reloads(name: str, outcome: str) -> float:
    labels = {"certificate": name, "outcome": outcome}
    return REGISTRY.get_sample_value("lockstep_tls_reloads_total", labels) or 0.0


def test_both_outcomes_of_a_reload_are_counted_from_0(mounted):
    """A counter that appears with 1 has not increased for Prometheus: the alert would miss the first failure."""
    load(mounted, "counted")
    for outcome in ("loaded", "failed"):
        labels = {"certificate": "counted", "outcome": outcome}
        assert REGISTRY.get_sample_value("lockstep_tls_reloads_total", labels) == 0


async def test_files_that_are_swapped_are_used_next(mounted, authority):
    certificates = load(mounted, "swapped")
    first = certificates.current()
    assert certificates.current() is first
    mounted.write(authority, "b.test", valid_days=9)
    async with watched(certificates):
        await until(lambda: reloads("swapped", "loaded") == 1)
    assert certificates.current().cert != first.cert
    expiry = REGISTRY.get_sample_value("lockstep_tls_certificate_expiry_timestamp_seconds", {"certificate": "swapped"})
    assert 8.9 < (expiry - time.time()) / 86400 < 9.1


async def test_key_that_openssl_refuses_changes_nothing(mounted, authority):
    """A short RSA key matches its certificate, and no connection could be made with it."""
    certificates = load(mounted, "short key")
    context = server_context(certificates, verify_clients=ssl.CERT_OPTIONAL)
    first = certificates.current()
    pair = rsa.generate_private_key(65537, 1024)
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a.test")])
    made = x509.CertificateBuilder(name, name, pair.public_key(), 1, now, now + datetime.timedelta(days=1))
    version = mounted.directory / "..short"
    version.mkdir()
    (version / "tls.crt").write_bytes(made.sign(pair, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    (version / "tls.key").write_bytes(
        pair.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (version / "ca.crt").write_bytes(authority.ca.cert_pem.bytes())
    mounted._swap(version.name)
    async with watched(certificates):
        await until(lambda: reloads("short key", "failed") == 1)
    assert certificates.current() is first
    assert context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
    assert "is refused by OpenSSL" in refusal(mounted)


@pytest.mark.parametrize("damage", ["missing", "no PEM", "another key", "expired"])
async def test_files_that_cannot_be_used_change_nothing_and_are_reported_once(mounted, authority, damage, caplog):
    name = f"damaged: {damage}"
    certificates = load(mounted, name)
    first = certificates.current()
    if damage == "missing":
        (mounted.directory / "tls.crt").unlink()
    elif damage == "expired":
        mounted.write(authority, "a.test", expired=True)
    else:
        file = (mounted.directory / "tls.key").resolve()
        file.write_bytes(b"nothing" if damage == "no PEM" else authority.issue("a.test").private_key_pem.bytes())
    with caplog.at_level(logging.INFO, "lockstep.tls"):
        async with watched(certificates):
            await until(lambda: reloads(name, "failed") == 1)
            await asyncio.sleep(5 * CHECK_S)
    assert reloads(name, "failed") == 1
    assert certificates.current() is first
    (record,) = caplog.records
    assert record.getMessage().startswith("certificates not reloaded: tls_")
    assert "PRIVATE KEY" not in caplog.text
    if damage != "missing":
        mounted.write(authority, "a.test")
        async with watched(certificates):
            await until(lambda: reloads(name, "loaded") == 1)


def test_what_cannot_be_used_at_start_is_one_sentence(mounted, authority):
    mounted.write(authority, "a.test", expired=True)
    assert refusal(mounted).startswith(f"tls_cert ({mounted.cert}) has expired at 20")
    leaf = authority.issue("a.test")
    key = serialization.load_pem_private_key(leaf.private_key_pem.bytes(), None)
    (mounted.directory / "tls.key").unlink()
    assert refusal(mounted) == f"tls_key ({mounted.key}) cannot be read: No such file or directory"
    (mounted.directory / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert "is encrypted" in refusal(mounted)
    (mounted.directory / "tls.crt").unlink()
    (mounted.directory / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    assert refusal(mounted) == f"tls_cert ({mounted.cert}) holds no PEM certificate"


def damage_curve(mounted: Mounted) -> None:
    """Give the certificate a public key on an unknown curve."""
    certificate = x509.load_pem_x509_certificate(Path(mounted.cert).read_bytes())
    known, unknown = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030163")
    encoded = certificate.public_bytes(serialization.Encoding.DER)
    assert known in encoded
    Path(mounted.cert).write_bytes(ssl.DER_cert_to_PEM_cert(encoded.replace(known, unknown)).encode())


def test_public_key_of_an_unknown_kind_is_one_sentence(mounted):
    damage_curve(mounted)
    assert refusal(mounted) == f"tls_cert ({mounted.cert}) cannot be used: UnsupportedAlgorithm"


def test_certificate_is_used_as_soon_as_it_is_valid(mounted, monkeypatch, caplog):
    now = datetime.datetime.now(datetime.UTC)
    begin = now.replace(microsecond=0) + datetime.timedelta(hours=1)

    class Early(Authority):
        def issue(self, *names: str, **_: object) -> trustme.LeafCert:
            return self.ca.issue_cert(*names, not_before=begin)

    certificates = load(mounted, "early")
    certificates.check_s = 0.0
    first = certificates.current()
    mounted.write(Early(), "a.test")
    with caplog.at_level(logging.INFO, "lockstep.tls"):
        for _ in range(3):
            assert certificates.current() is first
        monkeypatch.setattr(tls, "datetime", SimpleNamespace(now=lambda _: begin))
        assert certificates.current() is not first
    refused, loaded = [record.getMessage() for record in caplog.records]
    assert refused.endswith(f"is not valid before {begin.isoformat()}")
    assert loaded == "certificates reloaded"
    assert (reloads("early", "failed"), reloads("early", "loaded")) == (1, 1)


async def test_files_are_read_again_when_there_are_descriptors_again(mounted, authority, monkeypatch):
    certificates = load(mounted, "descriptors")
    mounted.write(authority, "b.test")

    def make(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async with watched(certificates):
        with monkeypatch.context() as patched:
            patched.setattr(os, "memfd_create", make)
            await until(lambda: reloads("descriptors", "failed") == 1)
        await until(lambda: reloads("descriptors", "loaded") == 1)


async def test_watching_survives_a_check_that_fails(caplog):
    class Failing:
        check_s = 0.01
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks in (1, 2, 4):
                raise RuntimeError("can't start new thread")

    failing, other = Failing(), Failing()
    other.checks = 10
    with caplog.at_level(logging.ERROR, "lockstep.files"):
        async with watched(failing, other):
            await until(lambda: failing.checks >= 5)
    assert other.checks >= 14
    assert [record.getMessage() for record in caplog.records] == ["files not checked"] * 2  # once until one succeeds


async def test_each_connection_gets_the_newest_chain_and_authorities(mounted, authority):
    certificates = load(mounted, "context")
    context = server_context(certificates, verify_clients=ssl.CERT_REQUIRED)
    server = await asyncio.start_server(lambda _, writer: writer.write(b"hello\n"), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def greeted(trusted: Authority, signed_by: Authority, name: str) -> bytes:
        client = ssl.create_default_context(cadata=trusted.ca.cert_pem.bytes().decode())
        signed_by.issue("client.test").configure_cert(client)
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
            try:
                return await reader.readline()
            finally:
                writer.close()

    async with server:
        assert await greeted(authority, authority, "a.test") == b"hello\n"
        newer = Authority()
        mounted.write(newer, "b.test")
        async with watched(certificates):
            await until(lambda: reloads("context", "loaded") == 1)
        assert await greeted(newer, newer, "b.test") == b"hello\n"
        # With TLS 1.3 a client knows that it has been refused when it reads.
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert await greeted(newer, authority, "b.test") == b""


def test_identity_is_an_exact_alternative_name(authority):
    def pem(*names: str) -> bytes:
        return authority.issue(*names).cert_chain_pems[0].bytes()

    assert has_identity(pem("router.test", "other.test"), "Router.test")
    assert not has_identity(pem("router.test"), "outer.test")
    assert not has_identity(pem("*.test"), "router.test")
    assert not has_identity(pem("router@mail.test"), "router@mail.test")
    assert not has_identity(pem("10.0.0.1"), "10.0.0.1")
    assert not has_identity(b"nothing", "router.test")


def test_identity_may_be_a_uri():
    uri = "spiffe://cluster.local/ns/a/sa/router"
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "router.test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    assert has_identity(pem, uri)
    assert not has_identity(pem, uri + "/2")
    assert not has_identity(pem, "router.test")  # the subject counts for nothing
    assert check_identity(uri) == uri
    with pytest.raises(ValueError, match="gRPC checks no URI"):
        check_identity(uri, may_be_uri=False)


@pytest.mark.parametrize("identity", ["", "-a.test", "a..b", "10.0.0.1", "a b", "a" * 64, "*.test", "://x"])
def test_identity_that_is_no_name_is_refused(identity):
    with pytest.raises(ValueError, match="must be a DNS name or a URI"):
        check_identity(identity)
