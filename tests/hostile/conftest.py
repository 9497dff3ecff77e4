"""A router under eight well-behaved streams, for attacks."""

import random
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "services/kv-state-server/tests"))

from lockstep_tools.hostile.observer import Observer
from target import Target
from trial import FLAGS, Scene

_STREAMS = 8
_START_S = 60.0


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    given = pytestconfig.getoption("--fuzz-seed")
    number = secrets.randbelow(2**32) if given is None else given
    print(f"seed {number}")
    return int(number)


@pytest.fixture
def seeded(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Target(grpc=True, flags=FLAGS) as target, Observer(target.address, streams=_STREAMS) as observer:
        deadline = time.monotonic() + _START_S
        while target.streams() < _STREAMS:
            assert time.monotonic() < deadline, observer.take().failures
            time.sleep(0.1)
        yield Scene(target, observer)
