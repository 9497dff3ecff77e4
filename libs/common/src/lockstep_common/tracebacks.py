"""The text of an exception for logs: where it happened and its type, without its message.

Messages of exceptions often quote what they are about: a prompt, an output, a key. Logs must not. An error of the
operating system keeps its message, which names a file or an address, and an error of ours its code.
"""

import traceback
from collections.abc import Iterator

from lockstep_common.errors import LockstepError

_MAX_FRAMES = 60
"""Of one exception: the innermost ones."""
_MAX_CAUSES = 8
"""Exceptions shown of one chain or group."""


def traceback_text(error: BaseException) -> str:
    """The exception with those that caused it, the first one first, as Python prints them; no messages."""
    chain = list(_chain(error))[:_MAX_CAUSES]
    return "\n\n".join(map(_one, reversed(chain)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, those in it if it is a group, and its causes; each once."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MAX_CAUSES:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            waiting.extend(each.exceptions)
        cause = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if cause is not None:
            waiting.append(cause)


def _one(error: BaseException) -> str:
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__, limit=-_MAX_FRAMES))
    return "".join(["Traceback (most recent call last):\n", *frames, sentence(error)])


def sentence(error: BaseException) -> str:
    """The exception's type, and what is known to be harmless of its message."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(error, LockstepError):
        return f"{name}: {error.code}"
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {error.strerror}" + (f": {error.filename!r}" if error.filename else "")
    return name
