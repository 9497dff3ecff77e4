"""Reads files with passwords and keys. Their contents are in no log and no error."""

from pathlib import Path

from lockstep_common.errors import invalid

from lockstep_state.values import KEY_BYTES

_MAX_BYTES = 4096


def read_password(setting: str, path: str | None) -> str | None:
    """The password in a file; None without a path.

    Raises:
        LockstepError: INVALID_REQUEST, the file cannot be used.
    """
    return None if path is None else _read(setting, path)


def read_keys(setting: str, path: str | None) -> list[bytes]:
    """The keys in a file, one a line; none without a path.

    Raises:
        LockstepError: INVALID_REQUEST, the file cannot be used.
    """
    if path is None:
        return []
    try:
        keys = [bytes.fromhex(line) for line in _read(setting, path).split()]
    except ValueError:
        keys = []
    if not keys or any(len(key) != KEY_BYTES for key in keys):
        raise invalid(setting, f"({path}) must have keys of {KEY_BYTES} bytes in hexadecimal, one a line")
    return keys


def _read(setting: str, path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise invalid(setting, f"({path}) cannot be read: {error.strerror or type(error).__name__}") from None
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        raise invalid(setting, f"({path}) is not UTF-8") from None
    if not text or len(content) > _MAX_BYTES:
        raise invalid(setting, f"({path}) is empty, or has more than {_MAX_BYTES} bytes")
    return text
