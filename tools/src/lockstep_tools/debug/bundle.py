"""The bundle: a tar.gz of parts, each bounded, with a list of those that could not be collected."""

import io
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lockstep_tools.debug.process import PART_BYTES, PartError
from lockstep_tools.failure import CommandError

BUNDLE_BYTES = 256 << 20
"""Most bytes of all parts together."""


class Bundle:
    """Writes a bundle; leaving the block completes it, or removes it when the block fails. Its methods raise a
    `CommandError` when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.failed: dict[str, str] = {}
        """Why parts are not in it."""
        self.parts = 0
        self._path = path
        self._bytes = 0
        self._folder = path.name.removesuffix(".tar.gz")
        path.touch(mode=0o600, exist_ok=False)
        self._tar = tarfile.open(path, "w:gz")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._tar.close()
        except OSError as failure:
            self._path.unlink(missing_ok=True)
            if error is None:
                raise self._unwritable(failure) from None
        if error is not None:
            self._path.unlink(missing_ok=True)

    def _unwritable(self, error: OSError) -> CommandError:
        return CommandError(f"{self._path} cannot be written: {error.strerror or error}")

    def add(self, name: str, make: Callable[[], bytes]) -> bytes | None:
        """Add a part; None if it cannot be made, which is noted."""
        try:
            body = make()
            if len(body) > PART_BYTES or self._bytes + len(body) > BUNDLE_BYTES:
                raise PartError(f"{len(body)} bytes are too many")
        except PartError as error:
            self.failed[name] = str(error)
            return None
        self._write(name, body)
        return body

    def conclude(self, summary: str, facts: dict[str, Any]) -> None:
        """Add the summary and the list of what is missing, for which there is always room."""
        self._write("summary.txt", summary.encode())
        self._write(
            "manifest.json", json.dumps(facts | {"parts": self.parts, "failed": self.failed}, indent=2).encode()
        )

    def _write(self, name: str, body: bytes) -> None:
        info = tarfile.TarInfo(f"{self._folder}/{name}")
        info.size, info.mtime, info.mode = len(body), int(time.time()), 0o600
        try:
            self._tar.addfile(info, io.BytesIO(body))
        except OSError as error:
            raise self._unwritable(error) from None
        self._bytes += len(body)
        self.parts += 1
