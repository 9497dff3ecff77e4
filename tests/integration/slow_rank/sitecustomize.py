"""Faults of ranks, each while the file exists that a variable of the environment names. Python imports this at its
start; only workers and their processes that fork ranks are changed. No service has a switch for any of it.

SLOW_RANK_FILE: the last rank computes 50 ms longer a step. RANK_PACE_FILE: before each collective every rank computes
for as many ms as the file says for it, such as `20 26`; `{engine}` in its path is the engine's label. HELD_RANKS_FILE:
ranks that start do not get further.
HASTY_FILE: profiles of an idle engine end after a second. STEP_PAUSE_MS is no file but how long every rank sleeps in
each step, always.
"""

import os
import sys
import time

DELAY_S = 0.05

if any("lockstep_engine.zygote" in argument for argument in sys.orig_argv) and "STEP_PAUSE_MS" in os.environ:
    from lockstep_engine.rank import Rank

    hurried = Rank.forward

    def resting(self, *arguments):
        time.sleep(float(os.environ["STEP_PAUSE_MS"]) / 1000)
        return hurried(self, *arguments)

    Rank.forward = resting

if any("lockstep_engine.zygote" in argument for argument in sys.orig_argv) and "SLOW_RANK_FILE" in os.environ:
    from lockstep_engine.rank import Rank

    forward = Rank.forward

    def delayed(self, *arguments):
        if self._spec.rank == self._spec.config.tp - 1 and os.path.exists(os.environ["SLOW_RANK_FILE"]):
            time.sleep(DELAY_S)
        return forward(self, *arguments)

    Rank.forward = delayed

if any("lockstep_engine.zygote" in argument for argument in sys.orig_argv) and "RANK_PACE_FILE" in os.environ:
    from lockstep_engine.distributed import SharedMemory
    from lockstep_engine.rank import Rank

    exchange, computing = SharedMemory.exchange, Rank.forward
    pace_file = os.environ["RANK_PACE_FILE"].replace("{engine}", sys.orig_argv[-2])

    def stepping(self, *arguments):
        self._group.left_at = time.perf_counter()  # what was before it is no computing
        return computing(self, *arguments)

    def paced(self, x):
        try:
            with open(pace_file) as file:
                wanted_s = float(file.read().split()[self.rank]) / 1000
        except (FileNotFoundError, IndexError):
            wanted_s = 0.0
        computed_s = time.perf_counter() - getattr(self, "left_at", time.perf_counter())
        # A busy machine wakes a process late: then less is missing the next time, so that the mean is as wanted.
        surplus_s = min(1.0, getattr(self, "surplus_s", 0.0)) + computed_s - wanted_s
        self.surplus_s = surplus_s if wanted_s else 0.0
        if self.surplus_s < 0:
            began = time.perf_counter()
            time.sleep(-self.surplus_s)
            self.surplus_s += time.perf_counter() - began
        parts = exchange(self, x)
        self.left_at = time.perf_counter()
        return parts

    SharedMemory.exchange, Rank.forward = paced, stepping

if any("lockstep_engine.zygote" in argument for argument in sys.orig_argv) and "HELD_RANKS_FILE" in os.environ:
    from lockstep_engine.rank import Rank

    join = Rank.join

    def held(self, *arguments):
        while os.path.exists(os.environ["HELD_RANKS_FILE"]):
            time.sleep(0.02)
        return join(self, *arguments)

    Rank.join = held

if any("lockstep_worker" in argument for argument in sys.orig_argv) and "HASTY_FILE" in os.environ:
    from lockstep_engine import profile_collection

    first_step_s, run = profile_collection.FIRST_STEP_S, profile_collection.ProfileCollection.run

    async def hasty(self, *arguments):
        profile_collection.FIRST_STEP_S = 1.0 if os.path.exists(os.environ["HASTY_FILE"]) else first_step_s
        return await run(self, *arguments)

    profile_collection.ProfileCollection.run = hasty
