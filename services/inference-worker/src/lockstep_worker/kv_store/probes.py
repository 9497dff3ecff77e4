"""Small transfers that measure the way to the state server: at the start, and when no fetch has for a while.

Without them nothing would ever be fetched: the gate needs an estimate before the first fetch, and after a short
failure of the network the estimate would stay bad. Where the state server has no room for them, a fetch has to
measure the way instead.
"""

import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from random import Random

import xxhash
from lockstep_api.v1 import state_pb2
from lockstep_common.state_channel import StateAwayError, StateRefusedError
from lockstep_engine.remote_store import BlockForm, HeadRange

from lockstep_worker.kv_store.client import KvClient
from lockstep_worker.kv_store.link import Link
from lockstep_worker.kv_store.parts import PartReader, to_header, to_key

_TENANT = "-probe"
"""No tenant's name begins like this."""
_BLOCKS = 2
_FORM = BlockForm("uint8", (1 << 20,), 1 << 20)
_HEADS = HeadRange(0, 1)
_TTL_S = 600.0
_TIMEOUT_S = 10.0
_CALLS = 3
"""Calls without content that are timed."""


class NoRoomError(Exception):
    """The state server has not stored the blocks of the probe: latency was measured, bandwidth was not."""


class Probe:
    """The blocks that one worker stores and fetches to measure.

    Args:
        name: the worker's; each has blocks of its own.
    """

    def __init__(self, client: KvClient, link: Link, name: str) -> None:
        self._client = client
        self._link = link
        self._content = Random(name).randbytes(_FORM.length)
        self._hashes = [hashlib.sha256(f"{name}/{number}".encode()).digest() for number in range(_BLOCKS)]
        self._memory = memoryview(bytearray(_FORM.length))

    async def measure(self) -> None:
        """Measure latency and bandwidth.

        Raises:
            StateAwayError, StateRefusedError, DamagedError: they are not known.
            NoRoomError: bandwidth is not.
        """
        present = await self._look_up()  # not timed: the first call waits for the connection
        if present < _BLOCKS:
            with suppress(StateAwayError, StateRefusedError):  # whether it is away, the next call finds out
                await self._client.put(self._messages(), _TIMEOUT_S)
        for _ in range(_CALLS):
            began_at = self._link.clock()
            present = await self._look_up()
            self._link.note_call(self._link.clock() - began_at)
        if not present:
            raise NoRoomError
        keys = [to_key(each, _HEADS) for each in self._hashes[:present]]
        reader = PartReader(keys, _FORM, lambda _: self._memory)
        request = state_pb2.GetBlocksRequest(tenant=_TENANT, keys=keys)
        with self._link.transfer(len(keys) * _FORM.length) as transfer:
            async with aclosing(self._client.get(request, _TIMEOUT_S)) as messages:
                async for message in messages:
                    reader.take(message)
                    self._link.received(transfer, len(message.data))

    async def _look_up(self) -> int:
        heads = [state_pb2.HeadRange(first=_HEADS.first, count=_HEADS.count)]
        request = state_pb2.LookUpBlocksRequest(tenant=_TENANT, hashes=self._hashes, heads=heads)
        return (await self._client.look_up(request)).present

    async def _messages(self) -> AsyncIterator[state_pb2.PutBlocksRequest]:
        checksum = xxhash.xxh3_64_intdigest(self._content)
        for number, each in enumerate(self._hashes):
            header = to_header(to_key(each, _HEADS), _FORM, checksum)
            message = state_pb2.PutBlocksRequest(header=header, data=self._content)
            if not number:
                message.tenant, message.ttl_s = _TENANT, _TTL_S
            yield message
