"""`python -m lockstep_worker`."""

import sys

from lockstep_common.lifecycle import obey_parent

from lockstep_worker.server import main

if __name__ == "__main__":
    obey_parent()
    sys.exit(main())
