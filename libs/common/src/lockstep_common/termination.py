"""The last words of a process: one sentence in the file that the kubelet shows as a container's termination message."""

import os

DEFAULT_PATH = "/dev/termination-log"
PATH_VARIABLE = "LOCKSTEP_TERMINATION_LOG"
"""Names the file before settings are read; the setting `termination_log` has the same name."""

_MAX_BYTES = 4096  # what the kubelet keeps


def leave_message(message: str, path: str | None = None) -> None:
    """Write the message to `path` or, without one, where Kubernetes looks for it if that is there.

    That it cannot be written changes nothing: the message is on stderr too.
    """
    path = path or os.environ.get(PATH_VARIABLE) or (DEFAULT_PATH if os.path.isfile(DEFAULT_PATH) else None)
    if path is None:
        return
    try:
        with open(path, "wb") as file:
            file.write(message.encode(errors="replace")[:_MAX_BYTES])
    except OSError:
        pass
