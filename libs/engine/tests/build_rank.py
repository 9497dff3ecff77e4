"""Runs a rank on a GPU on paper, whose kernels are built and compute nothing, and says how many it builds until it is
ready and how many after that, while it serves requests of many lengths: run by `test_triton_builds.py` in a process of
its own.

    python build_rank.py CHECKPOINT_NAME [codes]

codes: its layers have 4 bits, in groups with zero points.
"""

import json
import sys
import tempfile
from pathlib import Path

import packers
from checkpoints import make
from in_process_rank import InProcessRank
from lockstep_engine import SamplingParams, kernel_check
from lockstep_engine.gpu_codes import coded_weights
from lockstep_engine.kernels import gpu, triton_attention, triton_sampling
from paper_gpu import PaperGpu

PROCESSORS = 16
SEQUENCES = 40
"""More than this many processors split the keys of."""


def with_zeros(out, inside, seed):
    return packers.packed(out, inside, zeros="packed", seed=seed)


def main():
    paper = PaperGpu(90, examine=False).install()
    gpu.usable = lambda *_: True
    triton_attention.processors = lambda device: PROCESSORS
    # Nothing computes the logits: they are not compared with torch's, and NaN in their memory would end requests.
    compare = kernel_check.compare
    kernel_check.compare = lambda *args: compare(*args)[:0]
    choose = triton_sampling.choose

    def choose_first(*args):
        return tuple(each.zero_() for each in (*choose(*args), args[-1]))[:2]

    triton_sampling.choose = choose_first
    with tempfile.TemporaryDirectory() as folder:
        path, _ = make(sys.argv[1], Path(folder) / "made")
        if sys.argv[2:] == ["codes"]:
            config = packers.compressed_config("pack-quantized", bits=4, strategy="group", group_size=32)
            path, _ = packers.quantized_twin(path, Path(folder), config, with_zeros)
        settings = {"max_seqs": SEQUENCES, "max_batch_tokens": 64, "kv_hot_window": 16, "kv_memory_bytes": 2**24}
        with InProcessRank(path, device="cpu", dtype="bfloat16", deterministic=False, threads=1, **settings) as served:
            ready = paper.compiled
            requests = [
                ([5 + row] * (1 + 5 * row % 29), SamplingParams(max_tokens=30 + 7 * row % 23, temperature=0))
                for row in range(SEQUENCES + 5)
            ]
            served.run(*requests)
            served.run(([9] * 200, SamplingParams(max_tokens=3, temperature=0)))
            recorded, served.rank.graphs = served.rank.graphs, None  # as steps are computed that are too large
            served.run(([8] * 57, SamplingParams(max_tokens=3, temperature=0)), *requests[:5])
            plans = served.plans
            report = {
                "ready": ready,
                "later": served.rank.builds.builds,
                "recorded": list(recorded.decode.sizes) if recorded else [],
                "coded": len(coded_weights(served.rank.model.module)),
                "moves": sum(len(plan.moves) + len(plan.late_moves) for plan in plans),
                "most_sequences": max(len(plan.lengths) for plan in plans),
            }
            assert paper.compiled == report["ready"] + report["later"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
