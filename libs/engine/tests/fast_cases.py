"""Which cases of a test `make test` leaves to `make test-slow`."""

import pytest


def fast_if(is_fast, *values):
    """A case that is slow, unless `is_fast`, because others compute the same code."""
    return pytest.param(*values, marks=() if is_fast else pytest.mark.slow)
