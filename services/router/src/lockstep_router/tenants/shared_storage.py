"""Counters of tenants' limits in Redis, which all routers share, with this router's memory in reserve.

No request fails because of Redis, and none waits for it longer than a short timeout. While Redis does not answer,
limits count in this router's memory: they still hold, for each router by itself. A task in the background tries Redis
again. No address and no error's own words are in a log, because they may have a password.
"""

import asyncio
import logging
import re
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from limits.aio.storage import MemoryStorage, RedisStorage
from lockstep_common.errors import invalid
from lockstep_common.tracing.calls import calling_store

from lockstep_router import metrics
from lockstep_router.tenants.limits import Storage

logger = logging.getLogger("lockstep.router")

Result = TypeVar("Result")

MEMORY = "memory"
_TLS = "rediss"
_SCHEMES = ("redis", _TLS)
_DATABASE = re.compile(r"/[0-9]*")
_PREFIX = "lockstep:limits"
_CONNECTIONS = 32
"""Connections to Redis, and operations that use them at a time; others wait, no longer than the timeout."""
RETRY_S = 1.0
"""While Redis does not answer, it is tried this often."""
_TRIAL_KEY = "trial"
"""What a trial counts. It writes, because a Redis that is full or read-only still reads."""
_TRIAL_EXPIRY_S = 1
_LOG_EVERY_S = 60.0
_MAX_PASSWORD_BYTES = 4096


def check_address(address: str) -> None:
    """Raise ValueError for an address of a storage that cannot be used. The message does not quote it.

    The state server's addresses have other rules. Here the address goes to the library `limits`: it is of one server,
    and it may have a user, for whom there is no other setting.
    """
    if address == MEMORY:
        return
    try:
        parts = urlsplit(address)
        has_host, password, _ = bool(parts.hostname), parts.password, parts.port
    except ValueError:
        raise ValueError("is no address") from None
    is_database = not parts.path or _DATABASE.fullmatch(parts.path)  # the library takes another path for database 0
    if parts.scheme not in _SCHEMES or not has_host or not is_database or parts.query or parts.fragment:
        raise ValueError("must be memory, redis://host:port/database or rediss://host:port/database")
    if password is not None:
        raise ValueError("must have no password: name a file with it in limits_storage_password_file")


def has_tls(address: str) -> bool:
    """Whether a storage at this address, which can be used, is spoken to over TLS."""
    return urlsplit(address).scheme == _TLS


def open_storage(
    address: str, password_file: str | None, timeout_s: float, *, ca: str | None = None
) -> "SharedStorage | None":
    """The storage at an address; None: each router counts in its memory.

    Args:
        address: of the storage.
        password_file: with its password.
        timeout_s: longest wait for it.
        ca: PEM file of authorities for TLS, besides those of the system.

    Raises:
        LockstepError: INVALID_REQUEST, the file with the password or that of the authorities cannot be used.
    """
    if address == MEMORY:
        return None
    options: dict[str, Any] = {
        "max_connections": _CONNECTIONS,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
    }
    if password_file is not None:
        options["password"] = _read_password(password_file)
    if ca is not None:
        _check_authorities(ca)
        options["ssl_ca_certs"] = ca
    redis = RedisStorage(address, implementation="redispy", key_prefix=_PREFIX, **options)
    client: Any = redis.bridge
    return SharedStorage(redis, MemoryStorage(), timeout_s=timeout_s, close=client.get_connection().aclose)


def _read_password(path: str) -> str:
    setting = "limits_storage_password_file"
    try:
        with Path(path).open("rb") as file:
            password = file.read(_MAX_PASSWORD_BYTES + 1).strip().decode()
    except OSError as error:
        raise invalid(setting, f"({path}) cannot be read: {error.strerror or type(error).__name__}") from None
    except UnicodeDecodeError:
        raise invalid(setting, f"({path}) is not UTF-8") from None
    if not 0 < len(password) <= _MAX_PASSWORD_BYTES:
        raise invalid(setting, f"({path}) has no password of at most {_MAX_PASSWORD_BYTES} bytes")
    return password


def _check_authorities(path: str) -> None:
    """Raise now what each connection would fail with: routers without the storage go on, and each counts by itself."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        reason = f"cannot be used: {error.reason or type(error).__name__}"
    except OSError as error:
        reason = f"cannot be read: {error.strerror or type(error).__name__}"
    else:
        return
    raise invalid("limits_storage_ca", f"({path}) {reason}")


class SharedStorage:
    """A storage that others share, and a reserve that is used while it fails.

    Args:
        shared: the storage.
        reserve: never fails.
        timeout_s: longest wait for `shared`.
        close: closes the connections.
    """

    def __init__(
        self, shared: Storage, reserve: Storage, *, timeout_s: float, close: Callable[[], Awaitable[None]]
    ) -> None:
        self._close = close
        self._shared = shared
        self._reserve = reserve
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_CONNECTIONS)
        self._returning: asyncio.Task[None] | None = None
        """Tries the storage while it fails; None: it does not fail."""
        self._logged_at = -_LOG_EVERY_S
        metrics.LIMITS_FALLBACK.set(0)

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """See `Storage`."""
        return await self._run(lambda storage: storage.acquire_sliding_window_entry(key, limit, expiry, amount))

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """See `Storage`."""
        return await self._run(lambda storage: storage.get_sliding_window(key, expiry))

    async def close(self) -> None:
        """Close the connections."""
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.gather(self._returning, return_exceptions=True)
        await self._close()

    async def _run(self, work: Callable[[Storage], Awaitable[Result]]) -> Result:
        if self._returning is not None:
            return await work(self._reserve)
        try:
            return await self._ask(work)
        except Exception as error:  # whatever a library and a network can raise
            self._note_failure(error)
            return await work(self._reserve)

    async def _ask(self, work: Callable[[Storage], Awaitable[Result]]) -> Result:
        with calling_store("limits", "redis"):
            async with asyncio.timeout(self._timeout_s), self._turns:
                return await work(self._shared)

    def _note_failure(self, error: Exception) -> None:
        now = time.monotonic()
        metrics.LIMITS_FALLBACK.set(1)
        metrics.LIMITS_STORAGE_FAILURES.inc()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "the storage of limits does not answer: they count in this router's memory",
                extra={"error": type(error).__name__},
            )
        if self._returning is None:
            # Not in the request's context: what it tries is not part of the request's trace.
            self._returning = asyncio.get_running_loop().create_task(self._return(), context=Context())

    async def _return(self) -> None:
        """Try the storage until it answers. Requests alone would not do: without any, it would count as failing."""
        while not await self._try():
            pass
        self._returning = None
        metrics.LIMITS_FALLBACK.set(0)
        logger.info("limits of tenants are shared again")

    async def _try(self) -> bool:
        await asyncio.sleep(RETRY_S)
        try:
            await self._ask(
                lambda storage: storage.acquire_sliding_window_entry(_TRIAL_KEY, sys.maxsize, _TRIAL_EXPIRY_S)
            )
        except Exception as error:  # as above
            self._note_failure(error)
            return False
        return True
