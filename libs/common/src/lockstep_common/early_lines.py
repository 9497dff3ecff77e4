"""Lines that are logged before the log is set up: they are about the settings, which say how the log is set up."""

import logging


class _Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.records.append(record)


def keep_lines() -> None:
    """Keep what is logged from now on, unless it goes somewhere already."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(_Kept())


def kept_lines() -> list[logging.LogRecord]:
    """What was kept."""
    kept = [handler for handler in logging.getLogger().handlers if isinstance(handler, _Kept)]
    return [record for handler in kept for record in handler.records]
