"""The real zygote and real ranks, one of which runs out of memory."""

import numpy as np
import torch
from lockstep_engine import rank, zygote

_STEP = 4


def main(point):
    {"sampler": _fail_in_sampler, "forward": _fail_in_forward}[point]()
    zygote.main()


def _fail_in_sampler():
    """Of a request with penalties, where its past is counted."""

    def bincount(*_, **__):
        raise MemoryError

    np.bincount = bincount


def _fail_in_forward():
    """On rank 1 of the first epoch, behind the collective of the embedding."""
    launch = rank.Rank._launch

    def failing(self, plan, idle):
        if (self._spec.rank, self._spec.epoch, plan.step) == (1, 1, _STEP):
            calls = iter(range(2))
            reduce = self._group.all_reduce

            def second_fails(x):
                if next(calls):
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore advice.")
                return reduce(x)

            self._group.all_reduce = second_fails
        return launch(self, plan, idle)

    rank.Rank._launch = failing
