"""Makes rank 1 compute for longer, while the file exists that SLOW_RANK_FILE names, and profiles of an idle engine end
after a second, while the one exists that HASTY_FILE names. Python imports this at its start; only workers and their
processes that fork ranks are changed.
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

if any("lockstep_worker" in argument for argument in sys.orig_argv) and "HASTY_FILE" in os.environ:
    from lockstep_engine import profile_collection

    first_step_s, run = profile_collection._FIRST_STEP_S, profile_collection.ProfileCollection.run

    async def hasty(self, *arguments):
        profile_collection._FIRST_STEP_S = 1.0 if os.path.exists(os.environ["HASTY_FILE"]) else first_step_s
        return await run(self, *arguments)

    profile_collection.ProfileCollection.run = hasty
