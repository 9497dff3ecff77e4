"""Builds the kernels of the exact mode for a GPU on paper and says what came of it: run by `test_triton_builds.py` in a
process of its own.

    python build_exact.py 86
"""

import dataclasses
import json
import sys

import torch
from build_kernels import Kernels
from lockstep_engine.kernels import triton_coded, triton_exact_attention, triton_linear, triton_rows
from lockstep_engine.kernels.codes import Codes
from lockstep_engine.kernels.triton_attention import Paged, Tiles
from lockstep_engine.kernels.triton_linear import Groups
from lockstep_engine.scoring import Scoring
from paper_gpu import PaperGpu


def attend(kernels):
    """A step of decoding and one of prefill."""
    numbers, tables = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int32)
    paged = Paged(tables, tables, numbers, numbers, numbers, kernels.cache.hot_window)
    queries = kernels.empty(64, kernels.heads, kernels.dim).transpose(0, 1)
    out = kernels.empty(64, kernels.heads, kernels.dim)
    most = triton_exact_attention.queries_a_tile(kernels.heads // kernels.kv_heads, kernels.dtype)
    for size in (1, most):
        tiles = Tiles(numbers, numbers, size, 4)
        triton_exact_attention.attend(queries, kernels.cache.layer(0), paged, Scoring(1.0), tiles, out)


def coded(gpu):
    """Products on codes of three kinds; returns how many kernels were built."""
    before = gpu.compiled
    for ins in (4096, 512):
        scales, groups = torch.empty(1, 1024), torch.empty(ins // 64, 1024)
        words = torch.empty(1024, ins // 8, dtype=torch.int32)
        kinds = [Codes(torch.empty(1024, ins, dtype=torch.int8), scales, ins)]
        kinds += [Codes(words, groups[::2].contiguous(), 128, zeros=groups[::2].contiguous())]
        kinds += [Codes(words, groups, 64, table=torch.empty(16))]
        for weight in kinds:
            for rows in (1, 7, 64, 100, 128, 129, 300):
                triton_coded.product(torch.empty(rows, ins, dtype=torch.bfloat16), weight)
    return gpu.compiled - before


def main():
    gpu = PaperGpu(int(sys.argv[1])).install()
    products = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((32, 8, 128), (8, 2, 256), (71, 1, 64)):
            attend(Kernels(*shape, dtype=dtype))
        before = gpu.compiled
        for ins in (4096, 512):  # in several segments and in one
            weight = torch.empty(1, 1024, ins, dtype=dtype).transpose(1, 2)
            for rows in (1, 7, 64, 100, 256, 300, 2000):
                triton_linear.product(torch.empty(1, rows, ins, dtype=dtype), weight)
        products += gpu.compiled - before
        for tokens, ins in ((5, 4096), (2000, 4096), (2000, 512)):
            groups = Groups.of(torch.zeros(tokens, 2, dtype=torch.int64), 8, dtype)
            experts = torch.empty(8, 512, ins, dtype=dtype)
            triton_linear.grouped(torch.empty(tokens, ins, dtype=dtype), experts, None, groups, per_pair=False)
    triton_rows.sum_rows(torch.empty(3, 100))
    triton_rows.softmax(torch.empty(3, 100))
    built = coded(gpu)
    print(json.dumps({"products": products, "coded": built, "used": [dataclasses.asdict(each) for each in gpu.used]}))


if __name__ == "__main__":
    main()
