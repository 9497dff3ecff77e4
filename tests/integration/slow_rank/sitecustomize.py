"""Makes rank 1 compute for longer, while the file exists that SLOW_RANK_FILE names. Python imports this at its start;
only the process that forks ranks is changed.
"""

import os
import sys
import time

DELAY_S = 0.05

if any("lockstep_engine.zygote" in argument for argument in sys.orig_argv) and "SLOW_RANK_FILE" in os.environ:
    from lockstep_engine.rank import Rank

    forward = Rank.forward

    def delayed(self, *arguments):
        if self._spec.rank == 1 and os.path.exists(os.environ["SLOW_RANK_FILE"]):
            time.sleep(DELAY_S)
        return forward(self, *arguments)

    Rank.forward = delayed
