"""Builds latent attention for a GPU on paper, of DeepSeek-V3's widths, and says what came of it: run by
`test_triton_builds.py` in a process of its own.

    python build_latent.py 90
"""

import dataclasses
import json
import sys

import torch
from lockstep_engine.kernels import launches
from paper_gpu import PaperGpu

FORMS = [(16, False, False), (16, False, True), (16, True, False), (16, True, True)]
"""Heads of a rank, with a tp of 8; whether old blocks are fp8; the exact mode."""
WIDE = [(128, False, False)]
"""The same with a tp of 1, where programs of more than 16 rows have other tiles."""


def main():
    arch = int(sys.argv[1])
    gpu = PaperGpu(arch).install()
    used = []
    for heads, compressed, exact in FORMS + (WIDE if arch in (90, 100) else []):
        form = {"compressed": compressed, "exact": exact}
        for call in launches.attention_calls(heads, 576, torch.bfloat16, latent=512, **form):
            call.launch(torch.device("cpu"))
        used += [dataclasses.asdict(each) | form | {"heads": heads} for each in gpu.used]
        gpu.used.clear()
    launches.Call("store", (1, 576, torch.bfloat16, 512)).launch(torch.device("cpu"))
    used += [dataclasses.asdict(each) for each in gpu.used]
    print(json.dumps({"used": used}))


if __name__ == "__main__":
    main()
