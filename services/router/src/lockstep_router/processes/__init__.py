"""Several processes of one router on the same ports, and the parent that keeps them running.

The kernel spreads connections over the processes (SO_REUSEPORT). Sessions are hashed, so the processes choose the same
workers without talking to each other. All else is as with several routers: resumable streams, idempotency and limits
are each process's own.
"""

from lockstep_common.lifecycle import obey_parent, quiet_grpc

from lockstep_router.settings import RouterSettings


def main() -> None:
    """The entry point of a router: one process, or the parent of several."""
    obey_parent()
    quiet_grpc()  # in children too
    settings = RouterSettings.load("lockstep-router")
    # The parent does without the modules that serve, and its children load them themselves.
    if settings.processes > 1:
        from lockstep_router.processes.parent import run_parent  # noqa: PLC0415

        run_parent(settings)
    else:
        from lockstep_router.server import run  # noqa: PLC0415

        run(settings)
