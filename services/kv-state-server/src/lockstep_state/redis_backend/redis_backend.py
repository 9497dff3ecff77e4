"""The backend on Redis: what is not a journal, and all of it together."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from lockstep_api.v1 import state_pb2
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_state.backend import Binding, Block, Lease, Limits, StoredStream, Take, Write
from lockstep_state.errors import over_quota, unavailable
from lockstep_state.redis_backend import scripts
from lockstep_state.redis_backend.connect import RedisOptions
from lockstep_state.redis_backend.journals import Journals
from lockstep_state.redis_backend.ledger import Item, Ledger
from lockstep_state.redis_backend.store import Command, Store
from lockstep_state.values import Values

_LEASE_KEEP_MS = 3_600_000
_LENGTH_BYTES = 4
_NAME_BYTES = 650
"""Memory of a name in Redis besides what it is bound to, its reservation included, about."""
_TRIES = 4
_WARN_EVERY_S = 60.0

logger = logging.getLogger("lockstep.state")


class RedisBackend:
    """Everything in Redis. It is a cache and no archive: Redis may lose what it has acknowledged.

    Args:
        options: how Redis is reached.
        values: how values are written.
        limits: of a stream and of a tenant.
    """

    def __init__(self, options: RedisOptions, values: Values, limits: Limits) -> None:
        self._store = Store(options)
        self._block_share = options.max_block_share
        self._warned_at = -_WARN_EVERY_S
        self._values = values
        self._ledger = Ledger(self._store, limits)
        self._journals = Journals(self._store, values, self._ledger, limits)

    @property
    def unready(self) -> str | None:
        """See `Backend`."""
        return "Redis does not answer" if self._store.is_open else None

    async def append(self, writes: Sequence[Write]) -> list[state_pb2.WriteResult]:
        """See `Backend`."""
        return await self._journals.append(writes)

    async def read(self, key: str, take: Take | None = None) -> StoredStream | None:
        """See `Backend`."""
        return await self._journals.read(key, take)

    async def head(self, key: str) -> StoredStream | None:
        """See `Backend`."""
        return await self._journals.head(key)

    async def trim(self, tenant: str, keys: Sequence[str], tombstone_ttl_s: float) -> int:
        """See `Backend`."""
        return await self._journals.trim(tenant, keys, tombstone_ttl_s)

    async def bind(
        self,
        tenant: str,
        key: str,
        binding: Binding,
        ttl_s: float,
        expected: bytes | None,
        stream: str = "",  # noqa: ARG002
    ) -> tuple[bool, Binding]:
        """See `Backend`. Redis evicts nothing."""
        if not await self._store.one("reserve", self._ledger.command(_name_item(tenant, key, binding, ttl_s))):
            raise over_quota()
        damaged = b""
        for _ in range(_TRIES):
            done, value, left_s = await self._bind(key, binding, ttl_s, expected, damaged)
            now = Binding(b"") if value is None else self._unpack(key, value)
            if now is not None:
                if not done:  # what was reserved is for what is there
                    await self._ledger.note([_name_item(tenant, key, now, left_s)])
                return done, now
            damaged = value or b""
        raise unavailable("a value is damaged again and again")

    async def _bind(
        self, key: str, binding: Binding, ttl_s: float, expected: bytes | None, damaged: bytes
    ) -> tuple[bool, bytes | None, float]:
        place = _place(key)
        arguments = (
            self._values.fingerprints(place, binding.target),
            self._values.write(place, _pack(binding)),
            int(ttl_s * 1000),
            int(expected is not None),
            self._values.fingerprints(place, expected) if expected else "",
            damaged,
        )
        done, value, left_ms = await self._store.one("bind", Command((self._name(key),), arguments, scripts.BIND))
        return bool(done), value, left_ms / 1000

    async def bound(self, key: str) -> Binding | None:
        """See `Backend`."""
        value = await self._store.one("bound", Command((self._name(key),), ("HGET", "v")))
        return None if value is None else self._unpack(key, value)

    async def touch(self, tenant: str, key: str, ttl_s: float) -> Binding | None:
        """See `Backend`."""
        name = (self._name(key),)
        commands = [Command(name, ("HGET", "v")), Command(name, ("PEXPIRE", int(ttl_s * 1000)))]
        value = _first(await self._store.many("bound", commands, is_batch=False))
        now = None if value is None else self._unpack(key, value)
        if now is not None:
            await self._ledger.note([_name_item(tenant, key, now, ttl_s)])
        return now

    async def unbind(self, tenant: str, key: str, target: bytes | None) -> bool:
        """See `Backend`."""
        argument = "" if target is None else self._values.fingerprints(_place(key), target)
        done = await self._store.one("unbind", Command((self._name(key),), (argument,), scripts.UNBIND))
        if done:
            await self._ledger.forget("n", tenant, [key])
        return bool(done)

    async def acquire(self, key: str, owner: str, ttl_s: float) -> tuple[bool, Lease]:
        """See `Backend`."""
        return await self._lease("acquire", key, owner, 0, ttl_s)

    async def renew(self, key: str, owner: str, epoch: int, ttl_s: float) -> tuple[bool, Lease]:
        """See `Backend`."""
        return await self._lease("renew", key, owner, epoch, ttl_s)

    async def release(self, key: str, owner: str, epoch: int) -> tuple[bool, Lease]:
        """See `Backend`."""
        return await self._lease("release", key, owner, epoch, 0.0)

    async def lease(self, key: str) -> Lease:
        """See `Backend`."""
        return (await self._lease("look_up", key, "", 0, 0.0))[1]

    async def put(self, blocks: Sequence[Block]) -> list[bool]:
        """See `Backend`."""
        asked = [self._ledger.command(_reservation(block)) for block in blocks] + list(map(self._room, blocks))
        replies = _raised(await self._store.many("reserve", asked))
        reserved = [block for block, has_quota in zip(blocks, replies, strict=False) if has_quota]
        rooms = list(zip(blocks, replies[len(blocks) :], strict=True))
        roomy = {block.key for block, (room, _) in rooms if self._is_room(room)}
        there = {block.key for block, (_, is_there) in rooms if is_there}
        admitted = [block for block in reserved if block.key in roomy]
        answers = await self._store.many("put", [self._set(block) for block in admitted])
        pairs = zip(admitted, answers, strict=True)
        stored = {block.key for block, answer in pairs if not isinstance(answer, LockstepError)}
        # One that was there already is still there, and keeps its reservation.
        lost = [block for block in reserved if block.key not in stored and block.key not in there]
        await self._ledger.note([("b", block.tenant, block.key, -1, 0.0) for block in lost])
        for answer in answers:
            if isinstance(answer, LockstepError) and answer.code is not ErrorCode.OVERLOADED:
                raise answer
        return [block.key in stored for block in blocks]

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `Backend`. Damaged ones are removed, so that they are not reported as present."""
        answers = await self._store.many("get", [Command((self._block(key),), ("GET",)) for key in keys])
        stored = _raised(answers)
        pairs = zip(keys, stored, strict=True)
        values = [None if value is None else self._values.read(self._block(key), value) for key, value in pairs]
        found = zip(keys, stored, values, strict=True)
        await self._unlink([key for key, raw, value in found if raw is not None and value is None])
        return values

    async def sizes(self, keys: Sequence[str]) -> list[int]:
        """See `Backend`."""
        answers = await self._store.many("sizes", [Command((self._block(key),), ("STRLEN",)) for key in keys])
        return _raised(answers)

    async def discard(self, tenant: str, keys: Sequence[str]) -> None:
        """See `Backend`."""
        _raised(await self._unlink(keys))
        await self._ledger.forget("b", tenant, keys)

    async def run(self) -> None:
        """Probe Redis while it does not answer."""
        await self._store.run()

    async def close(self) -> None:
        """Close the connections."""
        await self._store.close()

    async def _unlink(self, keys: Sequence[str]) -> list[Any]:
        return await self._store.many("discard", [Command((self._block(key),), ("UNLINK",)) for key in keys])

    def _name(self, key: str) -> str:
        return self._store.key("name", key)

    def _block(self, key: str) -> str:
        return self._store.key("block", key)

    def _set(self, block: Block) -> Command:
        key = self._block(block.key)
        return Command((key,), ("SET", self._values.write(key, block.value), "PX", int(block.ttl_s * 1000)))

    def _room(self, block: Block) -> Command:
        """Asks whether a server takes a block, and has it. It may get a few more: what others store in between is not
        counted.
        """
        return Command((self._block(block.key),), (len(block.value), str(self._block_share)), scripts.HAS_ROOM)

    def _is_room(self, answer: int) -> bool:
        now = time.monotonic()
        if answer < 0 and now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            logger.warning("no KV blocks are stored: the user of Redis lacks the right to INFO (+info)")
        return answer > 0

    async def _lease(self, operation: str, key: str, owner: str, epoch: int, ttl_s: float) -> tuple[bool, Lease]:
        arguments = (operation, owner, epoch, int(ttl_s * 1000), _LEASE_KEEP_MS)
        command = Command((self._store.key("lease", key),), arguments, scripts.LEASE)
        done, holder, granted, left_ms = await self._store.one("lease", command)
        return bool(done), Lease(holder.decode(errors="replace"), granted, left_ms / 1000)

    def _unpack(self, key: str, value: bytes) -> Binding | None:
        plain = self._values.read(_place(key), value)
        if plain is None:
            return None
        length = int.from_bytes(plain[:_LENGTH_BYTES], "big")
        return Binding(plain[_LENGTH_BYTES : _LENGTH_BYTES + length], plain[_LENGTH_BYTES + length :])


def _place(key: str) -> str:
    return f"name:{key}"


def _name_item(tenant: str, key: str, binding: Binding, ttl_s: float) -> Item:
    """What a name takes: nothing if it is not bound."""
    size_bytes = _NAME_BYTES + len(binding.target) + len(binding.note) if binding.target else -1
    return "n", tenant, key, size_bytes, ttl_s


def _reservation(block: Block) -> Item:
    return "b", block.tenant, block.key, len(block.value), block.ttl_s


def _pack(binding: Binding) -> bytes:
    return len(binding.target).to_bytes(_LENGTH_BYTES, "big") + binding.target + binding.note


def _first(answers: Sequence[Any]) -> Any:
    return _raised(answers)[0]


def _raised(answers: Sequence[Any]) -> list[Any]:
    """The answers, unless one is an error."""
    for answer in answers:
        if isinstance(answer, LockstepError):
            raise answer
    return list(answers)
