"""API keys from a file that is read again when it changes. It decides whose request a key makes.

The file holds hashes of keys. A plain SHA-256 is enough, and bcrypt or the like would do harm: keys are 256 random
bits, which cannot be guessed from a hash however fast it is computed, and a slow hash would let wrong keys take the
router's time. A file that cannot be used never replaces a usable one. No key, no hash and no line of the file is
ever in a log or an error.
"""

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

import yaml
from lockstep_common.errors import ErrorCode, LockstepError, invalid
from lockstep_common.protocol import PRIORITIES
from lockstep_common.strict_yaml import DuplicateKeyError, load_yaml
from lockstep_common.watched_files import signature_of
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from lockstep_router import metrics
from lockstep_router.tenants.tenant import Tenant

logger = logging.getLogger("lockstep.router")

_MAX_FILE_BYTES = 1 << 20
_KEY_ID_CHARS = 8
_SETTING = "keys_file"
_NOTHING_REFUSED = (b"", "")

_Limit = Annotated[int, Field(strict=True, ge=1)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _KeyEntry(_Entry):
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    not_after: AwareDatetime | None = None


class _TenantEntry(_Entry):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    keys: list[_KeyEntry]
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent_streams: _Limit | None = None
    priority: Literal["low", "normal", "high"] = "normal"


class _File(_Entry):
    tenants: list[_TenantEntry]


@dataclass(frozen=True)
class Access:
    """What a key gives access to."""

    tenant: Tenant
    key_id: str
    """The first characters of the key's hash: they name the key in logs, and do not reveal it."""
    digest: str = field(repr=False)
    """The key's hash, to find out later whether the key is still valid."""


@dataclass(frozen=True)
class _Key:
    digest: str
    not_after: datetime | None
    access: Access


class KeyFile:
    """The keys in a file. `check` may run in a thread while `authenticate` runs."""

    def __init__(self, path: str, *, check_s: float = 1.0) -> None:
        """Read the file.

        Args:
            path: the file's.
            check_s: interval between two checks of the file, in seconds.

        Raises:
            LockstepError: INVALID_REQUEST, the file cannot be used.
        """
        self.check_s = check_s
        self._path = path
        self._refused = _NOTHING_REFUSED
        self._signature = signature_of(path)
        self._keys = _keys_in(path, _content_of(path))
        for outcome in ("loaded", "failed"):
            metrics.KEYS_RELOADS.labels(outcome)  # from 0, so that an alert sees the first one

    def check(self) -> None:
        """Read the file if it has changed. If it cannot be used, this is reported once and nothing changes."""
        signature = signature_of(self._path)
        if signature == self._signature:
            self._refused = _NOTHING_REFUSED
            return
        digest = b""
        try:
            # A refused file is read at each check: a change of its mode alone may make it readable.
            content = _content_of(self._path)
            digest = hashlib.sha256(content).digest()
            if digest == self._refused[0]:  # a large file takes seconds
                return
            keys = _keys_in(self._path, content)
        except LockstepError as error:
            # A file that is being replaced is complete at the next check; any other problem is reported once.
            refused = (digest, error.message)
            if signature_of(self._path) == signature and refused != self._refused:
                self._refused = refused
                metrics.KEYS_RELOADS.labels("failed").inc()
                logger.error("API keys not reloaded: %s", error.message)
            return
        self._signature, self._keys, self._refused = signature, keys, _NOTHING_REFUSED
        metrics.KEYS_RELOADS.labels("loaded").inc()
        logger.info("API keys reloaded", extra={"keys": len(keys)})

    @property
    def tenants(self) -> list[Tenant]:
        """The tenants that have keys, by their names."""
        found = {key.access.tenant.name: key.access.tenant for key in self._keys.values()}
        return [found[name] for name in sorted(found)]

    def authenticate(self, key: bytes) -> Access:
        """Whose request a key makes.

        Raises:
            LockstepError: INVALID_API_KEY, there is no such key, or its time is over.
        """
        return self._find(hashlib.sha256(key).hexdigest())

    def renew(self, access: Access) -> Access:
        """What the same key gives access to now, for connections that outlive a change of the file.

        Raises:
            LockstepError: INVALID_API_KEY, there is no such key any more, or its time is over.
        """
        return self._find(access.digest)

    def _find(self, digest: str) -> Access:
        # The look-up takes a time that depends on hashes, not on keys, and the comparison takes always the same.
        found = self._keys.get(digest)
        if found is None or not hmac.compare_digest(found.digest, digest):
            raise LockstepError(ErrorCode.INVALID_API_KEY, "the API key is not valid")
        if found.not_after is not None and time.time() > found.not_after.timestamp():
            raise LockstepError(ErrorCode.INVALID_API_KEY, "the API key has expired")
        return found.access


def _content_of(path: str) -> bytes:
    """The file's contents.

    Raises:
        LockstepError: INVALID_REQUEST, it cannot be read, or is too large.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror or error}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise _unusable(path, f"has more than {_MAX_FILE_BYTES} bytes")
    return content


def _keys_in(path: str, content: bytes) -> Mapping[str, _Key]:
    """The keys by their hashes; the same contents always give the same keys or error.

    Raises:
        LockstepError: INVALID_REQUEST, the contents cannot be used.
    """
    try:
        parsed = _File.model_validate(_parse(path, content))
    except ValidationError as error:
        raise _unusable(path, _sentence(error)) from None
    names = [tenant.name for tenant in parsed.tenants]
    if len(set(names)) < len(names):
        raise _unusable(path, "names a tenant twice")
    keys: dict[str, _Key] = {}
    for entry in parsed.tenants:
        tenant = Tenant(
            entry.name,
            entry.requests_per_minute,
            entry.tokens_per_minute,
            entry.concurrent_streams,
            PRIORITIES[entry.priority],
        )
        for key in entry.keys:
            if key.sha256 in keys:
                raise _unusable(path, f"has key {key.sha256[:_KEY_ID_CHARS]} twice")
            access = Access(tenant, key.sha256[:_KEY_ID_CHARS], key.sha256)
            keys[key.sha256] = _Key(key.sha256, key.not_after, access)
    return keys


def _parse(path: str, content: bytes) -> Any:
    try:
        return load_yaml(content)
    except yaml.MarkedYAMLError as error:
        # The error's own words quote the file.
        what = "has a field twice" if isinstance(error, DuplicateKeyError) else "is not YAML"
        at = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise _unusable(path, f"{what}{at}") from None
    except MemoryError:  # there may be enough at the next check
        raise
    except Exception:  # the constructors of the library raise anything, for example KeyError for `!!bool x`
        raise _unusable(path, "is not YAML") from None


def _sentence(error: ValidationError) -> str:
    """The first problem: where it is, and what. Values and unknown names are left out, they may be keys."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "extra_forbidden":
        return f"has an unknown field in {_place(first['loc'][:-1])}"
    if first["type"] == "string_pattern_mismatch":
        wanted = (
            "64 hexadecimal digits in lower case" if first["loc"][-1] == "sha256" else "a name of A-Z a-z 0-9 . _ -"
        )
        return f"has in {_place(first['loc'])} not {wanted}"
    return f"is wrong in {_place(first['loc'])}: {first['msg']}"


def _place(loc: tuple[int | str, ...]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return place.removeprefix(".") or "its outermost level"


def _unusable(path: str, reason: str) -> LockstepError:
    return invalid(_SETTING, f"({path}) {reason}")
