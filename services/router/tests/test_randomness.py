"""Random numbers that are read many at a time are used once, by one process."""

import os

import pytest
from lockstep_router.randomness import RANDOMNESS, Randomness, new_id


def test_no_bytes_come_twice():
    source = Randomness()
    given = b"".join(source.randbytes(12) for _ in range(2000))
    pieces = {given[at : at + 12] for at in range(0, len(given), 12)}
    assert len(pieces) == 2000


@pytest.mark.parametrize("size", [0, 1, 12, 4095, 4096, 4097, 10_000])
def test_as_many_bytes_as_asked_for(size):
    source = Randomness()
    source.randbytes(5)
    assert len(source.randbytes(size)) == size


def test_numbers_are_in_their_ranges():
    source = Randomness()
    bits = [source.getrandbits(63) for _ in range(1000)]
    assert max(bits) < 1 << 63
    assert max(bits) >= 1 << 60
    assert source.getrandbits(0) == 0
    values = [source.uniform(1.0, 2.0) for _ in range(1000)]
    assert 1.0 <= min(values) < 1.2 < 1.8 < max(values) <= 2.0
    assert {source.randrange(3) for _ in range(200)} == {0, 1, 2}


def test_a_forked_process_has_others():
    RANDOMNESS.randbytes(8)  # some are left
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, RANDOMNESS.randbytes(16))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 16) != RANDOMNESS.randbytes(16)
    os.close(reading)
    os.close(writing)


def test_an_id_is_hexadecimal():
    assert len(new_id(12)) == 24
    assert int(new_id(12), 16) != int(new_id(12), 16)
