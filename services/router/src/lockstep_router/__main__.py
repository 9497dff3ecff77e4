"""`python -m lockstep_router`."""

from lockstep_common.garbage import without_collections
from lockstep_common.lifecycle import end_on_sigterm

if __name__ == "__main__":
    end_on_sigterm()
    with without_collections():
        from lockstep_router.processes import main

    main()
