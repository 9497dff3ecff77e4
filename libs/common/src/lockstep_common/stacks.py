"""Where the threads and the tasks of this process are, as places in the code: no values of variables.

It may be called in any thread, also while the event loop is busy or blocked.
"""

import asyncio
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

_MAX_THREADS = 64
_MAX_FRAMES = 60
"""Of one thread: the innermost ones."""
_MAX_AWAITS = 20
_MAX_TASK_PLACES = 100


def thread_stacks() -> list[dict[str, Any]]:
    """Each thread's name and stack, the innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = list(sys._current_frames().items())[:_MAX_THREADS]
    return [{"thread": names.get(ident, "?"), "stack": _places(frame)} for ident, frame in frames]


def task_places(loop: asyncio.AbstractEventLoop) -> list[dict[str, Any]]:
    """Where the tasks of a loop wait: each different place with the number of tasks there, most tasks first."""
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # they change faster than they can be listed
        return []
    places = Counter(_awaits(task) for task in tasks)
    return [{"tasks": count, "awaits": list(place)} for place, count in places.most_common(_MAX_TASK_PLACES)]


def _places(frame: FrameType | None) -> list[str]:
    places: list[str] = []
    while frame is not None and len(places) < _MAX_FRAMES:
        places.append(_place(frame))
        frame = frame.f_back
    return places[::-1]


def _awaits(task: "asyncio.Task[Any]") -> tuple[str, ...]:
    """The coroutines of a task, each awaiting the next one."""
    places: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None and len(places) < _MAX_AWAITS:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            places.append(_place(frame))
        awaited = getattr(awaited, "cr_await", None)
    return tuple(places)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    path = code.co_filename
    for root in ("/site-packages/", "/src/", "/lib/"):
        path = path.rpartition(root)[2]
    return f"{path}:{frame.f_lineno} {code.co_qualname}"
