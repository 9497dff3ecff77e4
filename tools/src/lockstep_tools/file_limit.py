"""How many files, and so connections, this process may have open."""

import resource


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as it may; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
