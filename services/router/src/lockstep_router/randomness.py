"""Random numbers of the operating system, read many at a time: a request needs four, and each read is a system call."""

import os
from random import Random

_BYTES = 4096


class Randomness(Random):
    """As `random.SystemRandom`, with the bytes of the next requests kept in this process. They are used once.

    A forked process would use the same ones, so it begins with none.
    """

    def __init__(self) -> None:
        self._bytes = b""
        self._at = 0
        super().__init__()
        os.register_at_fork(after_in_child=self._forget)

    def seed(self, *_: object, **__: object) -> None:
        """Do nothing: it has no state to set."""

    def _forget(self) -> None:
        self._bytes, self._at = b"", 0

    def randbytes(self, n: int) -> bytes:
        """So many random bytes."""
        at = self._at
        end = at + n
        if end > len(self._bytes):
            if n > _BYTES:
                return os.urandom(n)
            self._bytes, at, end = os.urandom(_BYTES), 0, n
        self._at = end
        return self._bytes[at:end]

    def getrandbits(self, k: int, /) -> int:
        """An integer of so many random bits."""
        if k < 0:
            raise ValueError("number of bits must be non-negative")
        size = (k + 7) // 8
        return int.from_bytes(self.randbytes(size)) >> (size * 8 - k)

    def random(self) -> float:
        """A number in [0, 1)."""
        return self.getrandbits(53) * 2.0**-53


RANDOMNESS = Randomness()
"""Of this process. Its numbers cannot be guessed: ids and seeds come from it. Only the event loop's thread uses it."""


def new_id(size_bytes: int) -> str:
    """An id that cannot be guessed, in hexadecimal digits."""
    return RANDOMNESS.randbytes(size_bytes).hex()
