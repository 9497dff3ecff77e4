"""Certificates for Redis are followed while the state server runs, and calls in progress are not broken by that."""

import asyncio
import contextlib
import logging
import ssl

import pytest
from authority import Authority, Mounted
from backends import PATIENCE_S, eventually
from cryptography import x509
from lockstep_common.errors import LockstepError
from lockstep_common.telemetry import REGISTRY
from lockstep_state.redis_backend.connect import RedisOptions
from lockstep_state.redis_backend.store import Command, Store

SET = Command(("key",), ("SET", "value"))


class MutualServer:
    """Answers every command, over mutual TLS, and knows whose certificates were shown."""

    def __init__(self, directory, authority):
        files = Mounted(directory, authority, "localhost")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.cert, files.key)
        self._context.load_verify_locations(files.ca)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self.shown = []
        """The certificate of each command."""
        self.refused = set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._connections = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "localhost", 0, ssl=self._context)
        self.address = f"rediss://localhost:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.drop()

    def drop(self):
        for writer in self._connections:
            writer.close()

    async def _serve(self, reader, writer):
        self._connections.add(writer)
        name = name_in(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while name not in self.refused and (line := await reader.readline()):
                for _ in range(int(line[1:])):
                    await reader.readexactly(int((await reader.readline())[1:]) + 2)
                self.shown.append(name)
                await self.may_answer.wait()
                writer.write(b"+OK\r\n")
        self._connections.discard(writer)
        writer.close()


def name_in(certificate):
    names = x509.load_der_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return names.value.get_values_for_type(x509.DNSName)[0]


@pytest.fixture
def authority():
    return Authority()


@pytest.fixture
def ours(tmp_path, authority):
    return Mounted(tmp_path / "ours", authority, "first.test")


@pytest.fixture
async def server(tmp_path, authority):
    async with MutualServer(tmp_path / "theirs", authority) as server:
        yield server


@contextlib.asynccontextmanager
async def stored(server, ours):
    options = RedisOptions(
        server.address, ca=ours.ca, cert=ours.cert, key=ours.key, timeout_s=PATIENCE_S, batch_timeout_s=5, probe_s=0.05
    )
    store = Store(options)
    running = asyncio.create_task(store.run())
    try:
        yield store
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def shows(store, server, name):
    """Whether a new call shows this certificate."""
    with contextlib.suppress(LockstepError):
        assert await store.one("set", SET) is True
        return server.shown[-1] == name
    return False


def reloads(outcome):
    return REGISTRY.get_sample_value("lockstep_tls_reloads_total", {"certificate": "store", "outcome": outcome}) or 0


async def test_changed_certificates_are_shown_soon_and_calls_in_progress_go_on(server, ours, authority):
    loaded = reloads("loaded")
    async with stored(server, ours) as store:
        assert await shows(store, server, "first.test")
        server.may_answer.clear()
        calls = [asyncio.create_task(store.one("set", SET)) for _ in range(3)]
        asked = len(server.shown) + 3
        await eventually(lambda: _is(len(server.shown) == asked))
        ours.write(authority, "second.test")
        await eventually(lambda: _is(reloads("loaded") == loaded + 1))
        await asyncio.sleep(0.2)
        server.may_answer.set()
        assert await asyncio.gather(*calls) == [True] * 3
        assert await shows(store, server, "second.test")


async def test_certificates_that_cannot_be_used_are_reported_once_and_change_nothing(server, ours, authority, caplog):
    failed = reloads("failed")
    async with stored(server, ours) as store:
        assert await shows(store, server, "first.test")
        with open(ours.key) as file:
            key = file.read()
        ours.write(authority, "second.test")
        with open(ours.key, "w") as file:
            file.write(key)  # of the other certificate
        await eventually(lambda: _is(reloads("failed") == failed + 1))
        await asyncio.sleep(0.3)  # some checks
        assert await shows(store, server, "first.test")
        assert [each.levelno for each in caplog.records] == [logging.ERROR]
        assert "KEY_VALUES_MISMATCH" in caplog.text
        ours.write(authority, "third.test")
        await eventually(lambda: shows(store, server, "third.test"))


async def test_new_certificates_end_an_outage(server, ours, authority):
    async with stored(server, ours) as store:
        assert await shows(store, server, "first.test")
        server.refused.add("first.test")
        server.drop()
        while not store.is_open:
            with pytest.raises(LockstepError):
                await store.one("set", SET)
        await asyncio.sleep(0.2)  # some probes
        assert store.is_open
        ours.write(authority, "second.test")
        await eventually(lambda: shows(store, server, "second.test"))
        assert not store.is_open


async def _is(condition):
    return condition
