"""The routers that a client knows: their addresses, and which of them failed lately.

A name with several addresses is several routers. All methods may be called from several threads.
"""

import ipaddress
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from random import Random
from threading import Lock
from urllib.parse import urlsplit

import httpx

MAX_ROUTERS = 256
_MAX_AVOID_S = 60.0
_DNS_TTL_S = 10.0
_GRPC_SCHEMES = ("grpc", "grpcs")


@dataclass(frozen=True)
class Router:
    """One address of one base URL; without an address the name is resolved by the connection."""

    root: str
    """The base URL without /v1 and without a slash at its end."""
    address: str | None = None

    def __str__(self) -> str:
        return self.root if self.address is None else f"{self.root} ({self.address})"


@dataclass(frozen=True)
class Name:
    """A host name to resolve."""

    host: str
    port: int


@dataclass
class _Failure:
    until_s: float
    count: int


def root_of(base_url: str) -> str:
    """A base URL without /v1, as httpx writes it: the host in lower case, without the scheme's own port.

    Raises:
        ValueError: it is no URL of a known scheme, or it has a user or password; one of gRPC has no port, or a path.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https", *_GRPC_SCHEMES) or not parts.hostname:
        raise ValueError("base_urls must be URLs such as http://127.0.0.1:8000/v1 or grpc://127.0.0.1:9000")
    if parts.username or parts.password:
        raise ValueError("base_urls must not contain a user or password")
    if parts.scheme in _GRPC_SCHEMES and (parts.port is None or parts.path.rstrip("/") not in ("", "/v1")):
        raise ValueError("base_urls of gRPC must have a port and no path, as grpc://127.0.0.1:9000")
    try:
        parts.hostname.encode("idna")  # as a look-up does, which raises a UnicodeError, and no OSError
        written = str(httpx.URL(parts.geturl()))
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"base_urls: {error}") from None
    return written.rstrip("/").removesuffix("/v1").rstrip("/")


def is_grpc(root: str) -> bool:
    """Whether a router is spoken to over gRPC."""
    return urlsplit(root).scheme in _GRPC_SCHEMES


class Routers:
    """The known routers, and a bounded memory of their failures."""

    def __init__(self, base_urls: Iterable[str], *, avoid_s: float, clock: Callable[[], float], random: Random) -> None:
        self.roots = tuple(dict.fromkeys(root_of(url) for url in base_urls))
        if not self.roots:
            raise ValueError("base_urls must name at least one router")
        if len(self.roots) > MAX_ROUTERS:
            raise ValueError(f"base_urls must not name more than {MAX_ROUTERS} routers")
        self._avoid_s = avoid_s
        self._clock = clock
        self._random = random
        self._lock = Lock()
        self._names = {root: name for root in self.roots if (name := _name_of(root)) is not None}
        self._addresses: dict[Name, tuple[str, ...]] = {}
        self._resolved_s: dict[Name, float] = {}
        self._failures: dict[Router, _Failure] = {}
        self._silences_s: dict[str, float] = {}
        """By root, how long the streams of its routers may be silent, as these have reported it."""

    def resolve_nothing(self) -> None:
        """Leave the look-up of names to the connections."""
        with self._lock:
            self._names.clear()

    def take_stale_names(self) -> list[Name]:
        """The names whose addresses the caller should look up now.

        One that has addresses is given to one caller: other requests go on with these meanwhile.
        """
        now = self._clock()
        with self._lock:
            stale = [
                name
                for name in dict.fromkeys(self._names.values())
                if now - self._resolved_s.get(name, float("-inf")) >= _DNS_TTL_S
            ]
            self._resolved_s |= dict.fromkeys((name for name in stale if name in self._addresses), now)
            return stale

    def learn(self, name: Name, addresses: Iterable[str]) -> None:
        """Note what a look-up gave; none: the addresses known before stay."""
        found = tuple(dict.fromkeys(addresses))[:MAX_ROUTERS]
        with self._lock:
            self._resolved_s[name] = self._clock()
            if found:
                self._addresses[name] = found
                known = set(self._all())
                self._failures = {router: each for router, each in self._failures.items() if router in known}

    def known(self) -> list[Router]:
        """All routers."""
        with self._lock:
            return self._all()

    def pick(self, tried: Collection[Router]) -> Router | None:
        """A router that has not been tried, at random; one that failed lately only if there is no other."""
        with self._lock:
            now = self._clock()
            left = [router for router in self._all() if router not in tried]
            well = [router for router in left if not self._is_avoided(router, now)]
            if well:
                return self._random.choice(well)
            return min(left, key=lambda router: self._failures[router].until_s, default=None)

    def note_silence(self, router: Router, silence_s: float | None) -> None:
        """Note how long a router's streams may be silent; None: it does not say, or no longer does."""
        with self._lock:
            if silence_s is None:
                self._silences_s.pop(router.root, None)
            else:
                self._silences_s[router.root] = silence_s

    def silence_of(self, router: Router) -> float | None:
        """How long a router's streams are silent at most; None: it is not known."""
        with self._lock:
            return self._silences_s.get(router.root)

    def failed(self, router: Router, for_s: float | None = None) -> None:
        """Avoid a router for a time; the default grows with each failure in a row."""
        with self._lock:
            count = self._failures[router].count + 1 if router in self._failures else 1
            avoid_s = min(_MAX_AVOID_S, self._avoid_s * 2.0 ** min(count - 1, 16)) if for_s is None else for_s
            if router in self._all():
                self._failures[router] = _Failure(self._clock() + avoid_s, count)

    def worked(self, router: Router) -> None:
        """Forget the failures of a router."""
        with self._lock:
            self._failures.pop(router, None)

    def _is_avoided(self, router: Router, now: float) -> bool:
        failure = self._failures.get(router)
        return failure is not None and failure.until_s > now

    def _all(self) -> list[Router]:
        return [
            Router(root, address)
            for root in self.roots
            for address in (self._addresses.get(self._names[root], (None,)) if root in self._names else (None,))
        ]


def _name_of(root: str) -> Name | None:
    """The host name of a URL; None for an address and for this machine, which need no look-up."""
    parts = urlsplit(root)
    host = parts.hostname or ""
    if host == "localhost":
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return Name(host, parts.port or (443 if parts.scheme == "https" else 80))
    return None
