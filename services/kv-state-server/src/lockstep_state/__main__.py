"""`python -m lockstep_state`."""

import sys

from lockstep_common.garbage import without_collections
from lockstep_common.lifecycle import end_on_sigterm, obey_parent, quiet_grpc

if __name__ == "__main__":
    end_on_sigterm()
    obey_parent()
    quiet_grpc()
    with without_collections():
        from lockstep_state.server import main

    sys.exit(main())
