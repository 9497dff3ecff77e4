"""The headers of a request as a plain dictionary: quick to make and to read."""

from collections.abc import Sequence


def header_fields(raw: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by their names in lower case; of several with one name the first.

    Args:
        raw: the headers of an ASGI scope, whose names are in lower case.
    """
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(raw)}
