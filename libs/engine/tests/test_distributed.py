"""Collectives through a shared segment: ranks in threads, each with a mapping of its own."""

import os
import threading

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gathering_ranks import agree_on_memory, gather_and_sum
from lockstep_engine import distributed
from lockstep_engine.distributed import Alone, SharedMemory, TorchDistributed, init_torch_distributed
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.sizes import segment_bytes

CAPACITY = 64 * 1024


def run_ranks(size, work, capacity=CAPACITY, on_progress=lambda rank: None):
    """work(group) in one thread for each rank; their results in order."""
    fd = Mailbox.create(segment_bytes(size, capacity), "test")
    progress = [0] * size
    results = [None] * size

    def count(rank):
        def counted():
            progress[rank] += 1
            on_progress(rank)

        return counted

    def run(rank):
        try:
            results[rank] = work(SharedMemory(fd, rank, size, capacity, count(rank)))
        except BaseException as error:  # raised in the test's thread
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    os.close(fd)
    assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results, progress


def contribution(rank, call, shape, dtype):
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return (torch.randn(shape, generator=generator) * 10 ** (call % 5)).to(dtype)


SHAPES = [(1,), (7, 3), (1, 64), (33, 64), (2, 5, 11), (32, 256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_rounds_of_different_shapes_and_types(size):
    """Sums are taken in the order of ranks, and all ranks hold the same bits, whoever comes late."""
    calls = [(call, SHAPES[call % len(SHAPES)], DTYPES[call % len(DTYPES)]) for call in range(60)]

    def work(group):
        chooser = torch.Generator().manual_seed(group.rank)
        given = []
        for call, shape, dtype in calls:
            if torch.rand((), generator=chooser) < 0.1:
                threading.Event().wait(0.003)
            x = contribution(group.rank, call, shape, dtype)
            given.append(group.all_gather(x) if call % 3 == 0 else group.all_reduce(x))
        return given

    results, progress = run_ranks(size, work)
    assert progress == [len(calls)] * size
    for call, shape, dtype in calls:
        parts = [contribution(rank, call, shape, dtype) for rank in range(size)]
        expected = torch.cat(parts, dim=-1)
        if call % 3:
            while len(parts) > 1:  # neighbours first
                sums = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
                parts = [*sums, *parts[2 * len(sums) :]]
            expected = parts[0]
        for rank in range(size):
            assert results[rank][call].dtype == dtype
            assert torch.equal(results[rank][call], expected)


def test_results_are_not_overwritten_by_later_calls():
    def work(group):
        kept = [group.all_gather(torch.full((4,), float(10 * call + group.rank))) for call in range(10)]
        return torch.stack(kept)

    results, _ = run_ranks(2, work)
    expected = torch.tensor([[10.0 * call] * 4 + [10.0 * call + 1] * 4 for call in range(10)])
    assert all(torch.equal(result, expected) for result in results)


def test_inputs_may_be_views_of_another_order():
    x = torch.arange(24.0).view(4, 6)

    def work(group):
        return group.all_reduce(x.clone().t()), group.all_gather(x.t())

    results, _ = run_ranks(2, work)
    for summed, gathered in results:
        assert torch.equal(summed, 2 * x.t())
        assert torch.equal(gathered, torch.cat([x.t(), x.t()], dim=-1))


@pytest.mark.parametrize("rows", [256, 257, 700])  # of 256 bytes: all of the capacity, one row more, several pieces
def test_tensors_above_the_capacity_are_sent_in_pieces(rows):
    def work(group):
        x = contribution(group.rank, 1, (rows, 64), torch.float32)
        return group.all_gather(x), group.all_reduce(x.clone())

    parts = [contribution(rank, 1, (rows, 64), torch.float32) for rank in range(2)]
    for gathered, added in run_ranks(2, work)[0]:
        assert torch.equal(gathered, torch.cat(parts, dim=-1))
        assert torch.equal(added, parts[0] + parts[1])


def test_an_empty_tensor_is_summed():
    results, progress = run_ranks(2, lambda group: group.all_reduce(torch.ones(0, 5)))
    assert [result.shape for result in results] == [(0, 5)] * 2
    assert progress == [1, 1]


def test_time_spent_waiting_is_counted():
    first_waits = threading.Event()

    def work(group):
        if group.rank == 1:
            assert first_waits.wait(30)
            threading.Event().wait(0.1)
        group.all_reduce(torch.ones(4))
        return group.spent_ns

    (waited, late), _ = run_ranks(2, work, on_progress=lambda rank: first_waits.set())
    assert waited > 80_000_000
    assert 0 < late < waited


def test_alone_changes_nothing():
    x = torch.randn(3)
    assert Alone().all_reduce(x) is x
    assert Alone().all_gather(x) is x


class SmallSums:
    """Takes sums of up to four elements, and counts them."""

    def __init__(self):
        self.taken = 0

    def fits(self, x):
        return x.numel() <= 4

    def all_reduce(self, x):
        self.taken += 1
        return x + 100


def test_small_sums_use_one_shot(tmp_path):
    store = tmp_path / "store"
    store.touch()
    init_torch_distributed("gloo", str(store), 0, 1, 60)
    try:
        entered = []
        small = SmallSums()
        group = TorchDistributed(0, 1, lambda: entered.append(1), deterministic=True, one_shot=small)
        assert torch.equal(group.all_reduce(torch.ones(4)), torch.full((4,), 101.0))
        assert torch.equal(group.all_reduce(torch.ones(5)), torch.ones(5))
        assert torch.equal(group.all_gather(torch.ones(2)), torch.ones(2))
        assert (small.taken, len(entered)) == (1, 3)
        assert group.spent_ns > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("size", "kib"), [(2, 1024), (4, 1024), (8, 256)])
def test_few_gpus_sum_larger_tensors_in_one_shot(size, kib, monkeypatch):
    """A step of 64 rows of Llama-3-8B and 70B is 512 KiB and 1 MiB in bfloat16."""

    class Asked(distributed.SymmetricMemory):
        def __init__(self, device, capacity):
            self._capacity = capacity

        def meet(self):
            pass

    monkeypatch.setattr(distributed, "SymmetricMemory", Asked)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    made = distributed.symmetric_memory(torch.device("cpu"), size)
    most = kib * 1024 // 2
    for hidden in (4096, 8192):
        assert made.fits(torch.empty(64, hidden, dtype=torch.bfloat16)) == (64 * hidden <= most)
    assert made.fits(torch.empty(most, dtype=torch.bfloat16))
    assert not made.fits(torch.empty(most + 8, dtype=torch.bfloat16))


@pytest.mark.slow
def test_gpus_agree_before_they_wait_for_one_that_has_failed(tmp_path):
    store = tmp_path / "store"
    store.touch()
    mp.spawn(agree_on_memory, (str(store),), 2)


@pytest.mark.slow
def test_parts_are_gathered_by_one_call_into_one_tensor(tmp_path):
    store = tmp_path / "store"
    store.touch()
    mp.spawn(gather_and_sum, (str(store),), 3)


def listening():
    """Addresses and ports on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def test_gloo_listens_on_loopback_only(tmp_path, monkeypatch):
    """Whoever reaches a port of torch.distributed can end or change a group: it authenticates nobody."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)
    before = listening()  # other tests of this process may have left something
    store = tmp_path / "store"
    store.touch()
    init_torch_distributed("gloo", str(store), 0, 1, 60)
    try:
        assert {ip for ip, _ in listening() - before} == {"127.0.0.1"}
        # Where the host's name is an address of the loopback interface, the port above shows nothing.
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    finally:
        dist.destroy_process_group()


def test_parts_of_16_bits_are_added_in_the_order_of_ranks_and_rounded_once():
    parts = [torch.tensor([each], dtype=torch.bfloat16) for each in (256.0, 1.0, 1.0, -256.0)]
    assert distributed.sum_in_order(parts).item() == 2.0  # rounded at each step it would be 0
    assert parts[0].item() == 256.0
    wide = [torch.tensor([each]) for each in (1e8, 1.0, -1e8)]
    assert distributed.sum_in_order(wide).item() == 0.0
