"""The Lua scripts: what has to be atomic. Each touches the keys of one hash tag, so that a cluster can run it."""

import hashlib
from dataclasses import dataclass, field
from importlib import resources


@dataclass(frozen=True)
class Script:
    """A script and the digest that Redis knows it by."""

    text: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "digest", digest)


def _load(name: str) -> Script:
    return Script(_text("checked") + _text(name))


def _text(name: str) -> str:
    return (resources.files(__package__) / f"{name}.lua").read_text()


APPEND = _load("append")
READ = _load("read")
TRIM = _load("trim")
REPAIR = _load("repair")
LEDGER = _load("ledger")
HAS_ROOM = _load("has_room")
BIND = _load("bind")
UNBIND = _load("unbind")
LEASE = _load("lease")
