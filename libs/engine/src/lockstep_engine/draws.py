"""Randomness as a pure function of (seed, position), so that a resumed stream draws what the unbroken one would have
drawn.
"""

import hashlib
import struct

_SCALE = 2.0**-53


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that looks uniform and depends on nothing but the seed and the output position.

    BLAKE2b as a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); 53 bits
    of the digest become the mantissa.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"lockstep-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * _SCALE
