"""The profile that an operator gets: an archive with what each rank has given, as it is.

The operator's command merges it: parsing megabytes of JSON here would make every stream wait.
"""

import asyncio
import io
import tarfile
from collections.abc import Sequence

from lockstep_worker.engine import EngineLike


async def profile_archive(engine: EngineLike, steps: int) -> bytes:
    """A tar archive with a part for each rank.

    Raises:
        LockstepError: there is no profile; it says why.
    """
    parts = await engine.profile(steps)
    return await asyncio.to_thread(_archive, parts)  # many megabytes are copied


def _archive(parts: Sequence[bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for rank, part in enumerate(parts):
            info = tarfile.TarInfo(f"rank-{rank}.gz")
            info.size, info.mode = len(part), 0o600
            tar.addfile(info, io.BytesIO(part))
    return file.getvalue()
