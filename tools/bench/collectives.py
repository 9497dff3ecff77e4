"""Times of sums between ranks by size, with every transport of this machine, and predictions from them for tensor
parallelism on GPUs.

One process a rank, as in the engine, and the engine's own classes. Without GPUs shared memory and gloo are measured;
with two or more, NCCL and symmetric memory, as single calls and replayed from a CUDA graph.

    python tools/bench/collectives.py --save      writes docs/bench/collectives.json and .md
"""

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import measure
import prediction
import torch
import torch.distributed as dist
from lockstep_engine.distributed import (
    Collectives,
    SharedMemory,
    TorchDistributed,
    init_torch_distributed,
    symmetric_memory,
)
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.sizes import segment_bytes

SIZES = [8 * 1024 * 2**n for n in range(12)]  # 8 KiB to 16 MiB
CAPACITY = 8 * 2**20  # 512 tokens of 4,096 floats, as in the engine
GRAPH_CALLS = 20
TIMEOUT_S = 300.0

CPU_WAYS = ("shared memory", "gloo")
CUDA_WAYS = ("NCCL", "symmetric memory", "NCCL in a graph", "symmetric memory in a graph")


def join(way: str, rank: int, size: int, segment: str, store: str) -> Collectives:
    """The engine's collectives of one kind."""
    if way == "shared memory":
        return SharedMemory(os.open(segment, os.O_RDWR), rank, size, CAPACITY, lambda: None)
    cuda = way in CUDA_WAYS
    if cuda:
        torch.cuda.set_device(rank)
    init_torch_distributed("nccl" if cuda else "gloo", store, rank, size, TIMEOUT_S)
    one_shot = symmetric_memory(torch.device("cuda", rank), size) if way.startswith("symmetric") else None
    return TorchDistributed(rank, size, lambda: None, deterministic=False, one_shot=one_shot)


def host_times(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of each call, on the host's clock."""
    times: list[float] = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def device_times(call: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of a call, on the GPU's clock: several runs of `calls` calls, each divided by their number."""
    times: list[float] = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return times


def in_graph(call: Callable[[], object]) -> Callable[[], None]:
    """`GRAPH_CALLS` calls as one replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


def enough(size: int) -> int:
    """Calls of a size: the larger, the fewer."""
    return max(20, min(400, 64 * 2**20 // size))


def run_rank(way: str, rank: int, size: int, sizes: Sequence[int], segment: str, store: str, results: Any) -> None:
    """Run one rank: sum tensors of each size; rank 0 reports the times."""
    torch.set_num_threads(1)
    group = join(way, rank, size, segment, store)
    cuda = way in CUDA_WAYS
    dtype = torch.bfloat16 if cuda else torch.float32
    for nbytes in sizes:
        x = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device="cuda" if cuda else "cpu")

        def call(x: torch.Tensor = x) -> object:
            return group.all_reduce(x)

        host_times(call, 10)
        if way.endswith("graph"):
            times = [each / GRAPH_CALLS for each in device_times(in_graph(call), 5)]
        else:
            times = device_times(call, 50) if cuda else host_times(call, enough(nbytes))
        if rank == 0:
            results.put((nbytes, statistics.median(times), sorted(times)[int(len(times) * 0.9)]))
    if way != "shared memory":
        dist.destroy_process_group()


def latencies(way: str, size: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Median and 90th percentile of a sum's microseconds, by its bytes, among `size` processes."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    fd = Mailbox.create(segment_bytes(size, CAPACITY), "bench")
    segment = f"/proc/{os.getpid()}/fd/{fd}"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=run_rank, args=(way, rank, size, sizes, segment, f"{folder}/store", results), daemon=True
            )
            for rank in range(size)
        ]
        for each in ranks:
            each.start()
        rows = []
        try:
            for _ in sizes:
                nbytes, median, p90 = results.get(timeout=TIMEOUT_S)
                rows.append(
                    {"way": way, "ranks": size, "bytes": nbytes, "median_us": round(median, 1), "p90_us": round(p90, 1)}
                )
            for each in ranks:
                each.join(TIMEOUT_S)
        except queue.Empty:
            raise SystemExit(f"{way} among {size} ranks did not answer within {TIMEOUT_S:.0f} s") from None
        finally:
            for each in ranks:
                each.kill()
            os.close(fd)
    return rows


def human(nbytes: int) -> str:
    """8 KiB, 16 MiB."""
    return f"{nbytes // 1024} KiB" if nbytes < 2**20 else f"{nbytes // 2**20} MiB"


def latency_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sizes down, transports and ranks across: median / 90th percentile."""
    columns = sorted({(row["ranks"], row["way"]) for row in rows})
    cells = {(row["ranks"], row["way"], row["bytes"]): f"{row['median_us']:g} / {row['p90_us']:g}" for row in rows}
    return measure.table(
        ["bytes", *(f"{way}, {ranks} ranks" for ranks, way in columns)],
        [
            [human(nbytes), *(cells[ranks, way, nbytes] for ranks, way in columns)]
            for nbytes in sorted({row["bytes"] for row in rows})
        ],
    )


def prediction_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a model and latency; speed-up, and the share of the step that is communication, by GPUs."""
    cells = {(row["model"], row["batch"], row["latency"], row["gpus"]): row for row in rows}
    lines = []
    for model, batch, latency in dict.fromkeys((row["model"], row["batch"], row["latency"]) for row in rows):
        found = [cells.get((model, batch, latency, gpus)) for gpus in (2, 4, 8)]
        first = next(each for each in found if each is not None)
        lines.append(
            [
                model,
                f"{batch} x {first['context']}" + ("" if first["fits_one_gpu"] else " *"),
                latency,
                f"{first['one_gpu_ms']:.2f}",
                first["shard"],
                *("" if each is None else f"{each['speed_up']:.2f}x, {each['communication']:.0%}" for each in found),
            ]
        )
    header = [
        "model",
        "batch x context",
        "all-reduce",
        "1 GPU, ms a step",
        "shard's time",
        "2 GPUs",
        "4 GPUs",
        "8 GPUs",
    ]
    return measure.table(header, lines)


def check_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Predicted against published."""
    return measure.table(
        ["model", "GPUs", "published tokens/s", "predicted", "error", "all-reduce, us"],
        [
            [
                row["model"],
                row["gpus"],
                row["measured_tokens_per_s"],
                row["predicted_tokens_per_s"],
                "fitted" if row["fitted"] else f"{row['error']:+.1%}",
                row["latency_us"],
            ]
            for row in rows
        ],
    )


def budget_table() -> str:
    """The time that a sum may take on 4 GPUs for the goal of 3.8x, and for 85 % efficiency (3.4x)."""
    lines = []
    for model in prediction.MODELS:
        for batch, context in ((1, 1024), (64, 4096)):
            budgets = [prediction.affordable_us(model, prediction.H200, 4, goal, batch, context) for goal in (3.8, 3.4)]
            cells = [f"{budget:.1f} us" if budget > 0 else "unreachable" for budget in budgets]
            lines.append([model.name, f"{batch} x {context}", human(prediction.message_bytes(model, batch)), *cells])
    return measure.table(["model", "batch x context", "message", "for 3.8x", "for 3.4x"], lines)


def measured_latencies(rows: Sequence[Mapping[str, Any]]) -> list[prediction.Latency]:
    """Curves from this machine's GPUs, as the predictions take them."""
    curves = []
    for way in dict.fromkeys(row["way"] for row in rows if row["way"] in CUDA_WAYS):
        points: dict[int, dict[int, float]] = {}
        for row in rows:
            if row["way"] == way:
                points.setdefault(row["ranks"], {})[row["bytes"]] = row["median_us"]
        curves.append(prediction.Latency(f"{way}, measured", "this run", points, max(SIZES)))
    return curves


def shard_times(path: Path) -> dict[str, dict[int, float]]:
    """Measured steps of shards alone on a GPU: [{"model", "tp", "step_us"}, …] at batch 1 and 1,024 tokens."""
    times: dict[str, dict[int, float]] = {}
    for row in json.loads(path.read_text()):
        times.setdefault(row["model"], {})[int(row["tp"])] = row["step_us"] * 1e-6
    return times


def report_text(report: Mapping[str, Any]) -> str:
    """The page for people."""
    quoted = "\n".join(f"- {each.name}: {each.source}." for each in prediction.QUOTED)
    device = prediction.H200
    method = (
        f"Decoding on {device.name}s ({device.bandwidth / 1e12:.1f} TB/s, {device.source}), "
        f"{prediction.KERNELS_A_LAYER} kernels a layer at {prediction.KERNEL_S * 1e6:.1f} us that no sharing shortens. "
        "Beside each speed-up the share of a step that is communication. An asterisk: the model and its cache do not "
        "fit one GPU, whose time is computed as if they did."
    )
    return "\n\n".join(
        [
            "# Collectives, and tensor parallelism on GPUs",
            "Microseconds of one sum, median / 90th percentile of rank 0's calls:",
            latency_table(report["latencies"]),
            "## Predicted speed-up",
            method,
            prediction_table(report["predictions"]),
            f"Latencies that are quoted, not measured here:\n\n{quoted}",
            "What one sum may cost for a speed-up on 4 GPUs:",
            budget_table(),
            "## The same arithmetic against published measurements",
            "gpt-fast on 8 A100s: a latency for each number of GPUs is read off Llama-2-7B, the others are foretold:",
            check_table(report["check"]),
        ]
    )


def main() -> None:
    """Measure, predict, print; keep the results with --save."""
    parser = argparse.ArgumentParser(description="Latency of sums between ranks, and what it means on GPUs.")
    gpus = torch.cuda.device_count()
    several = [n for n in (2, 4, 8) if n <= gpus]
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=several or [2, 4], help="numbers of ranks (%(default)s)"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes (default: 8 KiB to 16 MiB)")
    parser.add_argument("--shards", type=Path, help="JSON with measured steps of shards, for the predictions")
    parser.add_argument("--save", action="store_true", help="write docs/bench/collectives.json and .md")
    arguments = parser.parse_args()
    about = measure.machine()
    ways = CPU_WAYS + (CUDA_WAYS if several else ())
    rows = []
    for size in arguments.ranks:
        for way in ways:
            if way in CPU_WAYS or size in several:
                rows += latencies(way, size, arguments.sizes)
    shards = shard_times(arguments.shards) if arguments.shards else None
    report = {
        "machine": about,
        "latencies": rows,
        "predictions": prediction.predictions([*measured_latencies(rows), *prediction.QUOTED], shards),
        "check": prediction.check(),
    }
    text = report_text(report)
    print(text)
    if arguments.save:
        measure.save("collectives", report, text)


if __name__ == "__main__":
    main()
