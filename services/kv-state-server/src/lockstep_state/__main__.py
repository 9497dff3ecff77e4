"""`python -m lockstep_state`."""

import sys

from lockstep_common.lifecycle import end_on_sigterm, obey_parent

if __name__ == "__main__":
    end_on_sigterm()
    obey_parent()
    from lockstep_state.server import main

    sys.exit(main())
