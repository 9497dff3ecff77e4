"""The file that a command writes in the end. It is made in the beginning, so that no work is done for a wrong path."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep_tools.failure import UNUSABLE, CommandError


@contextmanager
def new_file(path: Path, option: str) -> Iterator[Callable[[bytes], None]]:
    """Make a file that only its owner can read; it is removed if the block fails. The block writes it, at once.

    Args:
        path: the file.
        option: what gave the path.

    Raises:
        CommandError: there is such a file already, or it cannot be made, or not be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CommandError(f"{option} {path}: there is such a file already", UNUSABLE) from None
    except OSError as error:
        raise _unwritable(path, option, error) from None

    def write(data: bytes) -> None:
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
        except OSError as error:
            raise _unwritable(path, option, error) from None

    try:
        yield write
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _unwritable(path: Path, option: str, error: OSError) -> CommandError:
    return CommandError(f"{option} {path}: {error.strerror or error}", UNUSABLE)
