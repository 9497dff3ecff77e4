"""Random numbers as a pure function of (seed, position), so that a resumed stream draws the same numbers as an unbroken
one.
"""

import hashlib
import struct

_SCALE = 2.0**-53


def uniform(seed: int, position: int) -> float:
    """A pseudorandom number in [0, 1), uniformly distributed, that depends on the seed and the output position only.

    BLAKE2b as a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); 53 bits
    of the digest become the mantissa.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"lockstep-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * _SCALE
