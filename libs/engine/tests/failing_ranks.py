"""The real zygote and real ranks, which run out of memory at their start or at a point of a step."""

from functools import partial

import torch
from lockstep_engine import rank, zygote
from lockstep_engine.rank import Rank
from lockstep_engine.rank_main import run_rank
from lockstep_engine.sampling import Sampler
from lockstep_engine.sampling_table import penalised

_STEP = 4


def main(point):
    zygote.main(
        {"sampler": _load_failing_sampler, "forward": _load_failing_forward, "start": _load_failing_start}[point]
    )


def _load_failing_sampler():
    """A request with penalties, whose past has to be counted, finds no memory."""
    rank.Sampler = FailingSampler
    return run_rank


class FailingSampler(Sampler):
    def add(self, sampling):
        if penalised(sampling):
            raise MemoryError
        super().add(sampling)


def _load_failing_forward():
    return partial(run_rank, kind=FailsInForward)


class FailsInForward(Rank):
    """Rank 1 of the first epoch fails in a step, after the collective of the embedding."""

    def __init__(self, spec, *args):
        self._fails = (spec.rank, spec.epoch) == (1, 1)
        super().__init__(spec, *args)

    def join(self, *args):
        self._collectives = FailingCollectives(super().join(*args))
        return self._collectives

    def launch(self, plan, idle):
        if self._fails and plan.step == _STEP:
            self._collectives.left = 1
        return super().launch(plan, idle)


def _load_failing_start():
    return partial(run_rank, kind=FailsInStart)


class FailsInStart(Rank):
    """Rank 1 of the first epoch fails at its start, before a collective in which the other one waits."""

    def join(self, *args):
        collectives = FailingCollectives(super().join(*args))
        if (self._spec.rank, self._spec.epoch) == (1, 1):
            collectives.left = 0
        return collectives


class FailingCollectives:
    """Passes everything on to a group of ranks, until there is no memory for a sum."""

    def __init__(self, group):
        self._group = group
        self.rank, self.size, self.spent_ns = group.rank, group.size, 0
        self.left = None
        """Sums that will still be made; None: all."""

    def all_reduce(self, x):
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore advice.")
        if self.left is not None:
            self.left -= 1
        return self._group.all_reduce(x)

    def all_gather(self, x):
        return self._group.all_gather(x)
