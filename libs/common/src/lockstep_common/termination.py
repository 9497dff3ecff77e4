"""Writes the container's termination message: one sentence in the file that the kubelet reads."""

import os

DEFAULT_PATH = "/dev/termination-log"
PATH_VARIABLE = "LOCKSTEP_TERMINATION_LOG"
"""Names the file before the settings are read; it is also the variable of the setting `termination_log`."""

_MAX_BYTES = 4096  # what the kubelet keeps


def leave_message(message: str, path: str | None = None) -> None:
    """Write the message to `path` or, without one, to Kubernetes' default path if that file exists.

    A failure to write it is ignored: the message is on stderr too.
    """
    path = path or os.environ.get(PATH_VARIABLE) or (DEFAULT_PATH if os.path.isfile(DEFAULT_PATH) else None)
    if path is None:
        return
    try:
        with open(path, "wb") as file:
            file.write(message.encode(errors="replace")[:_MAX_BYTES])
    except OSError:
        pass
