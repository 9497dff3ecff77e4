"""Keeps the pauses of Python's garbage collector short.

A full collection searches every container object of the process. After a service's imports these are several hundred
thousand, which takes 0.1 s and more, in which its event loop does nothing.
"""

import contextlib
import gc
from collections.abc import Iterator

_is_sparing = False
"""Whether `spare_existing_objects` was called. To count the spared objects takes 30 ms."""
_YOUNG_OBJECTS = 10_000
"""New container objects until the next collection; 700 by default. Almost all die without one. A request has about 50
at a time, and those of many that arrive together must not start a collection, which would find nothing.
"""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing inside, for the imports at a process's start: almost all of their objects stay, and to search
    them again and again takes a tenth to a fifth of the time of the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spare_existing_objects() -> None:
    """Collect now, and leave what exists then out of all later collections; called at the end of a service's start."""
    global _is_sparing  # noqa: PLW0603 - a fact of the process
    gc.collect()
    gc.freeze()
    _is_sparing = True
    gc.set_threshold(_YOUNG_OBJECTS)


def spare_loaded_objects() -> None:
    """The same without a collection now, for a service that has loaded something large for good.

    It does nothing in a process that has not called `spare_existing_objects`. Garbage of this moment is kept, so this
    is not for each request.
    """
    if _is_sparing:
        gc.freeze()
