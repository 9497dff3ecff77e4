"""Makes the client for an address: one server, sentinels or a cluster. Addresses have no password; a file has it.

The router's `limits_storage` has rules of its own (`lockstep_router.tenants.shared_storage`): there the address goes to
another library, which knows single servers only.
"""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lockstep_common.watched_files import Signature, signature_of
from redis.asyncio import Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import NoBackoff

_SCHEMES = ("redis", "redis+cluster", "redis+sentinel")
_PORTS = {"redis": 6379, "redis+cluster": 6379, "redis+sentinel": 26379}
_MAX_DATABASE = 1 << 16


@dataclass(frozen=True)
class RedisOptions:
    """How Redis is reached and how long it is waited for."""

    address: str
    """`redis://host:port/database`, `redis+cluster://host:port,host:port`, or
    `redis+sentinel://host:port,host:port/database?master=name`; with `rediss` for TLS.
    """
    username: str | None = None
    password: str | None = None
    sentinel_password: str | None = None
    ca: str | None = None
    """PEM file of the authorities for TLS; those of the system if not set."""
    cert: str | None = None
    key: str | None = None
    """PEM files of this client's certificate and its key."""
    prefix: str = "lockstep:"
    """Of all keys, for the ACL user."""
    timeout_s: float = 0.05
    """For a small operation."""
    batch_timeout_s: float = 0.5
    """For a batch of writes, a whole stream or blocks."""
    connections: int = 32
    """To one server."""
    max_block_share: float = 0.75
    """Part of a server's `maxmemory` up to which it takes blocks."""
    breaker_failures: int = 3
    probe_s: float = 1.0


@dataclass(frozen=True)
class Address:
    """The parts of an address."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    has_tls: bool
    database: int = 0
    master: str = ""


def parse_address(address: str) -> Address:
    """The parts of an address; raises ValueError for one that cannot be used. The message does not quote it."""
    try:
        parts = urlsplit(address)
        query = parse_qs(parts.query, strict_parsing=bool(parts.query))
        has_tls = parts.scheme.startswith("rediss")
        kind = "redis" + parts.scheme.removeprefix("rediss" if has_tls else "redis")
        if kind not in _SCHEMES or parts.fragment:
            raise ValueError
        if "@" in parts.netloc:
            raise _PasswordError
        hosts = tuple(_host(kind, each) for each in parts.netloc.split(","))
        path = parts.path.removeprefix("/")
        database = int(path) if path else 0
        masters = query.pop("master", [])
    except _PasswordError:
        raise ValueError("must have no user and no password: they have settings of their own") from None
    except ValueError:
        raise ValueError("must be redis://, redis+cluster:// or redis+sentinel:// with hosts and ports") from None
    if query or len(masters) > 1 or bool(masters) != (kind == "redis+sentinel"):
        raise ValueError("must have ?master=name with redis+sentinel://, and nothing else there")
    if (kind == "redis" and len(hosts) > 1) or (kind == "redis+cluster" and database):
        raise ValueError("has several hosts without a cluster or sentinels, or a database with a cluster")
    if not 0 <= database < _MAX_DATABASE:
        raise ValueError("has a database that does not exist")
    return Address(kind, hosts, has_tls, database, masters[0] if masters else "")


class _PasswordError(Exception):
    """The address has a password."""


def _host(kind: str, text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError
    return parts.hostname, parts.port or _PORTS[kind]


def signature(options: RedisOptions) -> tuple[Signature, ...]:
    """What changes with the files for TLS; empty without TLS."""
    if not parse_address(options.address).has_tls:
        return ()
    return tuple(map(signature_of, (options.ca, options.cert, options.key)))


def problem_of_files(options: RedisOptions) -> str | None:
    """Why the files for TLS cannot be used; None if they can. It quotes nothing of them."""
    try:
        context = ssl.create_default_context(cafile=options.ca)
        if options.cert is not None:
            context.load_cert_chain(options.cert, options.key, password=_no_password)
    except ssl.SSLError as error:
        return error.reason or type(error).__name__
    except OSError as error:
        return error.strerror or type(error).__name__
    except ValueError:
        return "a key is encrypted"
    return None


def _no_password() -> str:
    """Instead of a prompt."""
    raise ValueError


def connect(options: RedisOptions) -> "Redis | RedisCluster":
    """A client. Nothing is connected yet. Its connections read the files for TLS once: others need another client.

    Nothing is tried again: an operation that Redis has done may not be done twice, or the second answer would be given.
    Connections that Redis has closed are noticed before they are used. Clusters are the exception, as slots move.
    """
    address = parse_address(options.address)
    common: dict[str, Any] = {
        "socket_timeout": options.batch_timeout_s,
        "socket_connect_timeout": options.batch_timeout_s,
        "retry": Retry(NoBackoff(), 1 if address.kind == "redis+cluster" else 0),
        "protocol": 2,
    }
    if address.has_tls:
        common |= {"ssl": True, "ssl_ca_certs": options.ca, "ssl_certfile": options.cert, "ssl_keyfile": options.key}
    login: dict[str, Any] = {"username": options.username, "password": options.password}
    if address.kind == "redis+cluster":
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return RedisCluster(startup_nodes=nodes, max_connections=options.connections, **common, **login)
    common["max_connections"] = options.connections
    if address.kind == "redis+sentinel":
        sentinel_login = {"password": options.sentinel_password} if options.sentinel_password else {}
        sentinels: Any = Sentinel  # its types are incomplete
        sentinel = sentinels(list(address.hosts), sentinel_kwargs=common | sentinel_login, **common)
        master: Redis = sentinel.master_for(address.master, db=address.database, **login)
        return master
    host, port = address.hosts[0]
    return Redis(host=host, port=port, db=address.database, **common, **login)


async def close(client: "Redis | RedisCluster") -> None:
    """Close all connections of a client, those to sentinels too."""
    pool: Any = getattr(client, "connection_pool", None)  # a cluster's client has none
    sentinels: list[Redis] = pool.sentinel_manager.sentinels if isinstance(pool, SentinelConnectionPool) else []
    await asyncio.gather(*(each.aclose() for each in (client, *sentinels)), return_exceptions=True)
