"""Bytes that somebody has damaged on their way."""

import random


def bent(draw: random.Random, data: bytes) -> bytes:
    """The data with some bytes replaced, inserted or left out."""
    made = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(made) + 1)
        match draw.randrange(3):
            case 0:
                made[at:at] = draw.randbytes(draw.randrange(5))
            case 1:
                made[at : at + draw.randrange(4)] = b""
            case _:
                made[at : at + 1] = draw.randbytes(1)
    return bytes(made)
