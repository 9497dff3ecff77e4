"""The stream of `Kv.Get`, checked against what was asked and written into the memory of the blocks.

A part is what some heads have of one block. Parts come in the order asked for, each as a header and then its bytes. A
part counts once its length and its checksum are right; whatever is not exactly a part that was asked for ends the
stream as damaged, and nothing after it counts.
"""

from collections.abc import Callable, Sequence

import xxhash
from lockstep_api.v1 import state_pb2
from lockstep_engine.remote_store import BlockForm, HeadRange

SCHEMA = 1
"""Of blocks; the state server's protocol has the number."""


class DamagedError(Exception):
    """What has come is not what was asked for."""


def to_key(block_hash: bytes, heads: HeadRange) -> state_pb2.BlockKey:
    """A part's key."""
    return state_pb2.BlockKey(hash=block_hash, heads=state_pb2.HeadRange(first=heads.first, count=heads.count))


def to_header(key: state_pb2.BlockKey, form: BlockForm, checksum: int) -> state_pb2.BlockHeader:
    """The header of a part."""
    return state_pb2.BlockHeader(
        schema=SCHEMA, key=key, dtype=form.dtype, shape=form.shape, length=form.length, checksum=checksum
    )


class PartReader:
    """Reads the parts of some blocks.

    Args:
        keys: of the parts asked for, block by block.
        form: of each part.
        into: the memory of a part by its index in `keys`, `form.length` bytes.
    """

    def __init__(self, keys: Sequence[state_pb2.BlockKey], form: BlockForm, into: Callable[[int], memoryview]) -> None:
        self.complete = 0
        """Leading parts that are written and checked."""
        self._keys = keys
        self._form = form
        self._into = into
        self._header: state_pb2.BlockHeader | None = None
        self._memory = memoryview(b"")
        self._written = 0
        self._checksum = xxhash.xxh3_64()

    def take(self, message: state_pb2.GetBlocksResponse) -> bool:
        """Take the next message; false: a part is missing, so what follows is of no use.

        Raises:
            DamagedError: it is not what was asked for.
        """
        if message.index >= len(self._keys) or message.index < self.complete:
            raise DamagedError("index")
        if message.HasField("header"):
            if self._header is not None:
                raise DamagedError("length")
            self._check(message.header, self._keys[message.index])
            if message.index > self.complete:
                return False
            self._begin(message.header)
        elif self._header is None or message.index != self.complete:
            raise DamagedError("header")
        self._write(message.data)
        return True

    def end(self) -> None:
        """The stream has ended.

        Raises:
            DamagedError: within a part.
        """
        if self._header is not None:
            raise DamagedError("length")

    def _check(self, header: state_pb2.BlockHeader, key: state_pb2.BlockKey) -> None:
        expected = to_header(key, self._form, header.checksum)
        # Compared as bytes, so that fields that this version does not know make a difference too.
        if header.SerializeToString(deterministic=True) != expected.SerializeToString(deterministic=True):
            raise DamagedError("header")

    def _begin(self, header: state_pb2.BlockHeader) -> None:
        self._header = header
        self._memory = self._into(self.complete).cast("B")
        if len(self._memory) != self._form.length:
            raise ValueError(f"the memory of a part has {len(self._memory)} bytes instead of {self._form.length}")
        self._written = 0
        self._checksum.reset()

    def _write(self, data: bytes) -> None:
        """Write and sum up a message: at most a few MiB, well under a millisecond each."""
        assert self._header is not None
        end = self._written + len(data)
        if end > self._form.length:
            raise DamagedError("length")
        self._memory[self._written : end] = data
        self._checksum.update(data)
        self._written = end
        if end == self._form.length:
            if self._checksum.intdigest() != self._header.checksum:
                raise DamagedError("checksum")
            self._header, self._memory = None, memoryview(b"")
            self.complete += 1
