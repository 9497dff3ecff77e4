"""`python -m lockstep_router.processes.child`: a process of a router. Its settings come from the parent on stdin."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

from lockstep_common.lifecycle import end_on_sigterm, obey_parent


def main() -> None:
    """Serve until a signal or the parent's end."""
    from lockstep_common.management import Reports, reporting  # noqa: PLC0415 - a signal may come during the imports

    from lockstep_router.processes.channel import answer_parent  # noqa: PLC0415
    from lockstep_router.server import run  # noqa: PLC0415
    from lockstep_router.settings import RouterSettings  # noqa: PLC0415

    obey_parent()
    connection: Connection[bytes, bytes] = Connection(os.dup(sys.stdin.fileno()))
    settings = RouterSettings.model_validate_json(connection.recv_bytes())

    @asynccontextmanager
    async def to_parent(settings: RouterSettings, reports: Reports, _: object) -> AsyncIterator[None]:
        """Answer the parent; it has the management port."""
        async with reporting(reports, liveness_timeout_s=settings.liveness_timeout_s) as answers:
            answer_parent(connection, answers)
            yield

    def on_listening(_: dict[str, object]) -> None:
        print("listening", flush=True)

    run(settings, reporting=to_parent, on_listening=on_listening)


if __name__ == "__main__":
    end_on_sigterm()
    main()
