"""Which cases of a test `make test` leaves to `make test-slow`, and that to `make test-exhaustive`."""

import pytest


def fast_if(is_fast, *values):
    """A case that is slow, unless `is_fast`, because others compute the same code."""
    return pytest.param(*values, marks=() if is_fast else pytest.mark.slow)


def further(*values):
    """A case beyond those that CI runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
