"""Collectives between GPUs: NCCL, and symmetric memory for small sums. One process a GPU, as in a rank group."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lockstep_engine.distributed import TorchDistributed, init_torch_distributed, one_shot_bytes, symmetric_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZE = min(4, torch.cuda.device_count())


def contribution(rank, elements, dtype):
    generator = torch.Generator().manual_seed(elements * 10 + rank)
    return (torch.randn(elements, generator=generator) * 10).to(dtype)


def in_order(elements, dtype, *, quick=True):
    """The parts' sum in the order of ranks. In one shot each sum is rounded; else the last one is, from float32."""
    total = contribution(0, elements, dtype)
    total = total if quick else total.float()
    for rank in range(1, SIZE):
        total = total + contribution(rank, elements, dtype)
    return total.to(dtype)


def join(rank, store):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    init_torch_distributed("nccl", store, rank, SIZE, 120)
    one_shot = symmetric_memory(device, SIZE)
    group = TorchDistributed(rank, SIZE, lambda: None, deterministic=True, on_gpu=True, one_shot=one_shot)
    return device, one_shot, group


def sums_are_taken_in_the_order_of_ranks(rank, store):
    device, one_shot, group = join(rank, store)
    assert one_shot is not None
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        most = one_shot_bytes(SIZE) // dtype.itemsize
        for elements in (1, 3, 8, 4096, 4097, most, most + 8, 4 * most):
            x = contribution(rank, elements, dtype).to(device)
            quick = one_shot.fits(x)
            assert quick == (dtype is not torch.float16 and elements % 8 == 0 and elements <= most)
            for _ in range(3):  # the buffer is used again at once
                total = group.all_reduce(x.clone())
                assert torch.equal(total.cpu(), in_order(elements, dtype, quick=quick))
    dist.destroy_process_group()


def a_view_in_the_middle_of_a_tensor_is_summed(rank, store):
    device, one_shot, group = join(rank, store)
    x = contribution(rank, 4096, torch.bfloat16).to(device).view(16, 256)
    whole = in_order(4096, torch.bfloat16).view(16, 256)
    assert one_shot.fits(x[3:5])
    assert torch.equal(group.all_reduce(x[3:5]).cpu(), whole[3:5])
    assert not one_shot.fits(x[:, 1:3])
    assert torch.equal(group.all_reduce(x[:, 1:3].clone()).cpu(), whole[:, 1:3])
    dist.destroy_process_group()


def a_graph_holds_the_sums(rank, store):
    device, _, group = join(rank, store)
    x = contribution(rank, 4096, torch.bfloat16).to(device)
    static = torch.zeros_like(x)
    group.all_reduce(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = group.all_reduce(group.all_reduce(static) / SIZE)
    for scale in (1, 2):
        static.copy_(x * scale)
        graph.replay()
        total = (in_order(4096, torch.bfloat16) * scale) / SIZE
        assert torch.allclose(out.float().cpu(), total.float() * SIZE, rtol=0.02)
    torch.cuda.synchronize()
    del graph
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "work", [sums_are_taken_in_the_order_of_ranks, a_view_in_the_middle_of_a_tensor_is_summed, a_graph_holds_the_sums]
)
def test_gpus_sum(work, tmp_path):
    store = tmp_path / "store"
    store.touch()
    mp.spawn(work, (str(store),), SIZE)
