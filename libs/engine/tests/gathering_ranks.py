"""One of some gloo ranks, in a process of its own: module-level, so that a spawned process can import it."""

import torch
import torch.distributed as dist
from lockstep_engine import distributed
from lockstep_engine.distributed import TorchDistributed, init_torch_distributed
from torch.utils._python_dispatch import TorchDispatchMode

SIZE = 3


class CountedCalls(TorchDispatchMode):
    """Notes the collectives that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.collectives = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith("c10d."):
            self.collectives.append(str(func))
        return func(*args, **(kwargs or {}))


def gather_and_sum(rank, store):
    torch.set_num_threads(1)
    init_torch_distributed("gloo", store, rank, SIZE, 60)
    group = TorchDistributed(rank, SIZE, lambda: None, deterministic=True)
    for shape in [(5,), (1, 4), (3, 4), (2, 3, 4), (0, 4)]:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            generator = torch.Generator().manual_seed(7)
            parts = [(torch.randn(shape, generator=generator) * 100).to(dtype) for _ in range(SIZE)]
            turned = [part.movedim(-1, 0) for part in parts]
            assert torch.equal(group.all_gather(parts[rank]), torch.cat(parts, dim=-1))
            assert torch.equal(group.all_gather(turned[rank]), torch.cat(turned, dim=-1))
            assert torch.equal(group.all_reduce(parts[rank].clone()), parts[0] + parts[1] + parts[2])
    with CountedCalls() as counted:
        group.all_gather(torch.ones(2, 4))
    assert counted.collectives == ["c10d._allgather_base_.default"], counted.collectives
    dist.destroy_process_group()


class StandInMemory:
    """Stands in for symmetric memory between processes: its ranks wait for each other, and rank 1 fails in one step."""

    fails_in = ""
    done = ()

    def __init__(self, device, capacity):
        self._do("allocate")

    def meet(self):
        dist.barrier()  # as a rendezvous, it ends when all ranks have come
        self._do("meet")

    def _do(self, step):
        if dist.get_rank() == 1 and self.fails_in == step:
            raise RuntimeError(f"no memory to {step}")
        StandInMemory.done += (step,)


def agree_on_memory(rank, store):
    init_torch_distributed("gloo", store, rank, 2, 60)
    distributed.SymmetricMemory = StandInMemory
    torch.cuda.can_device_access_peer = lambda *_: (StandInMemory.fails_in, rank) != ("peer", 1)
    for fails_in, done in (("peer", ()), ("allocate", ("allocate",)), ("meet", ("allocate", "meet"))):
        StandInMemory.fails_in, StandInMemory.done = fails_in, ()
        assert distributed.symmetric_memory(torch.device("cpu"), 2) is None
        assert StandInMemory.done == (done if rank == 0 else done[:-1]), fails_in
    StandInMemory.fails_in = ""
    assert isinstance(distributed.symmetric_memory(torch.device("cpu"), 2), StandInMemory)
    dist.destroy_process_group()
