"""Ranks that record decode steps, and fail where they are told to; here so that processes can import it."""

import functools

import torch
import torch.distributed as dist
from lockstep_engine.distributed import TorchDistributed, gather_reasons, init_torch_distributed
from lockstep_engine.graphs import GraphedStep
from lockstep_engine.recorders import HostRecorder, NotRecordableError

CPU = torch.device("cpu")


class Failing(HostRecorder):
    """Fails with the recording, or the preparation, of one number."""

    def __init__(self, *, record=0, prepare=0, error=RuntimeError):
        super().__init__()
        self._left = {"record": record, "prepare": prepare}
        self._error = error

    def _count(self, what):
        self._left[what] -= 1
        if self._left[what] == 0:
            raise self._error(f"no {what} here\nmore about it")

    def prepare(self, work):
        self._count("prepare")
        super().prepare(work)

    def record(self, work):
        self._count("record")
        return super().record(work)


def recorded(group, **fails):
    """How recording ends on this rank: what is said, and whether it has recordings."""
    step = GraphedStep(
        lambda inputs: inputs.ids + 1,
        8,
        4,
        CPU,
        Failing(**fails.get(f"rank_{group.rank}", {})),
        agree=functools.partial(gather_reasons, group),
    )
    try:
        step.capture()
    except NotRecordableError as error:
        return f"without: {error}", bool(step._recordings)
    except RuntimeError as error:
        return f"failed: {error}", bool(step._recordings)
    return "", bool(step._recordings)


def over_gloo(rank, store):
    init_torch_distributed("gloo", store, rank, 2, 60)
    group = TorchDistributed(rank, 2, lambda: None, deterministic=False)
    assert recorded(group, rank_1={"record": 3}) == ("without: rank 1: RuntimeError: no record here", False)
    assert recorded(group) == ("", True)
    dist.destroy_process_group()
