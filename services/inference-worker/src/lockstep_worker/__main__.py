"""`python -m lockstep_worker`."""

import sys

from lockstep_common.lifecycle import end_on_sigterm, obey_parent

if __name__ == "__main__":
    end_on_sigterm()
    obey_parent()
    from lockstep_worker.server import main

    sys.exit(main())
