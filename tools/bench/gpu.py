"""The speed of the engine's GPU path on this machine, in one table; with --tiny the same code on tiny shapes on a CPU.

    python tools/bench/gpu.py --out docs/bench/gpu.json
    python tools/bench/gpu.py --only decode --models llama-3-8b --batches 64 --contexts 32768
    python tools/bench/gpu.py --tiny

Weights are random: speed does not depend on them. Contexts are random too. Where the contexts of a batch do not fit,
its sequences share blocks of a pool far larger than any cache of the chip, so that every read is still from memory.
"""

import argparse
import dataclasses
import json
import logging
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np  # noqa: E402
import triton  # noqa: E402
from lockstep_engine import Engine, SamplingParams  # noqa: E402
from lockstep_engine.attention import StepLayout  # noqa: E402
from lockstep_engine.attention_triton import DecodeAttention, TritonAttention  # noqa: E402
from lockstep_engine.config import BLOCK_SIZE, HotWindow  # noqa: E402
from lockstep_engine.distributed import Alone  # noqa: E402
from lockstep_engine.graphs import (  # noqa: E402
    BuildCounter,
    CudaRecorder,
    DecodeInputs,
    GraphedStep,
    HostRecorder,
)
from lockstep_engine.kernels.triton_compress import compress  # noqa: E402
from lockstep_engine.kernels.triton_gate import silu_mul  # noqa: E402
from lockstep_engine.kernels.triton_norm import add_rms_norm  # noqa: E402
from lockstep_engine.kv_cache import KvCache  # noqa: E402
from lockstep_engine.model_config import ModelInfo  # noqa: E402
from lockstep_engine.models import BuiltModel, build_model  # noqa: E402
from lockstep_engine.scoring import Scoring  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
LAZY = HotWindow(sink=1, size=4)
Row = dict[str, Any]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama-3-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
    },
}


@dataclass(frozen=True)
class Settings:
    """What is measured: shapes, batches and contexts."""

    models: tuple[str, ...] = ("llama-3-8b", "llama-2-7b")
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    shards: tuple[tuple[str, int], ...] = tuple(
        (model, tp) for model in ("llama-2-7b", "llama-3-8b", "llama-3-70b") for tp in (1, 2, 4, 8)
        if (model, tp) != ("llama-3-70b", 1)
    )  # fmt: skip
    chunk: int = 2048
    repeats: int = 20
    warm_ups: int = 2
    dtype: torch.dtype = torch.bfloat16
    copy_bytes: int = 4 * 2**30
    kv_bytes: int = 40 * 2**30
    """Bytes of the pool at most."""
    rows: int = 8192
    """Number of rows for the kernels that work row by row."""
    rule: HotWindow = LAZY
    """The hot window of the runs with fp8."""
    compiled_peer: bool = True
    engine_model: str = "llama-3-1b"
    new_tokens: int = 128


TINY = Settings(
    models=("tiny",),
    batches=(1,),
    contexts=(50,),
    shards=(("tiny", 2),),
    chunk=4,
    repeats=1,
    warm_ups=0,
    rule=HotWindow(sink=1, size=1),
    dtype=torch.float32,
    copy_bytes=2**20,
    kv_bytes=2**20,
    rows=2,
    compiled_peer=False,
    engine_model="",
    new_tokens=4,
)


class Shard(Alone):
    """Rank 0 of a group without its other ranks: its own computation takes as long as with them."""

    def __init__(self, size: int) -> None:
        self.size = size


class Bench:
    """One run: its settings and results."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rows: list[Row] = []
        self.copy_gb_s = 0.0
        self._folder = tempfile.TemporaryDirectory()

    def add(self, section: str, what: str, value: float, unit: str, **about: Any) -> None:
        """A line of the table, printed at once."""
        row = {"section": section, "what": what, "value": float(f"{value:.4g}"), "unit": unit, **about}
        self.rows.append(row)
        rest = "  ".join(f"{name}={each}" for name, each in about.items())
        print(f"{section:10} {what:34} {value:12.4g} {unit:9} {rest}", flush=True)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of one call: the median of several after a warm-up."""
        times = []
        for _ in range(self.settings.warm_ups + self.settings.repeats):
            began = mark()
            work()
            times.append(mark() - began)
        return statistics.median(times[self.settings.warm_ups :])

    def recorded_seconds(self, work: Callable[[], torch.Tensor]) -> float:
        """Seconds of work that is launched as a graph, without the time of launching."""
        recorder = CudaRecorder(DEVICE) if CUDA else HostRecorder()
        recorder.prepare(work)
        recording = recorder.record(work)
        return self.seconds(recording.replay)

    def share(self, moved_bytes: float, seconds: float) -> float:
        """Share of the copy bandwidth."""
        return float(f"{moved_bytes / seconds / 1e9 / self.copy_gb_s:.3g}")

    def build(self, name: str, group: Alone | None = None) -> BuiltModel:
        """A model of random weights on the device, with the kernels that a rank uses for it."""
        longest = max(self.settings.contexts) + self.settings.chunk
        config = llama(name, longest)
        path = Path(self._folder.name) / name
        config.save_pretrained(path)
        info = ModelInfo(
            path=path,
            name=name,
            digest="",
            architecture="LlamaForCausalLM",
            model_type="llama",
            dtype="",
            context_length=longest,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            eos_ids=(),
            created=0,
            weight_files=(),
        )
        model = build_model(info, group or Alone(), self.settings.dtype)
        model.module.to_empty(device=DEVICE)
        for module in model.module.modules():
            if list(module.buffers(recurse=False)):
                model.module._init_weights(module)
        for parameter in model.module.parameters():
            parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
        assert model.fuse_on_gpu(longest)
        return model

    def cache(self, model: BuiltModel, sequences: int, context: int, fp8: bool) -> tuple[KvCache, np.ndarray]:
        """A cache of random contexts, and the tables of their last step."""
        geometry = {"layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
        geometry["dtype"] = self.settings.dtype
        used = -(-context // BLOCK_SIZE)
        rule = self.settings.rule if fp8 else None
        hot_used = used if rule is None else min(used, rule.blocks)
        cold_used = used - hot_used
        hot = sequences * hot_used
        cold = sequences * cold_used
        budget = self.settings.kv_bytes
        if fp8:
            cold = min(cold, budget // KvCache.cold_block_bytes(**geometry))
        else:
            hot = min(hot, budget // KvCache.block_bytes(**geometry))
        cache = KvCache(**geometry, blocks=hot, cold_blocks=cold, hot_window=rule, device=DEVICE)
        cache.keys.normal_()
        cache.values.normal_()
        for layer in range(model.layers if fp8 else 0):
            pool = cache.layer(layer).cold
            assert pool is not None
            assert pool.key_scales is not None
            assert pool.value_scales is not None
            for codes in (pool.keys, pool.values):
                codes.random_(0, 0x7F)
            pool.key_scales.fill_(0.01)
            pool.value_scales.fill_(0.01)
        chooser = np.random.default_rng(0)
        tables = np.empty((sequences, used), np.int32)
        tables[:] = spread(chooser, hot, tables.shape)
        if rule is not None and cold_used:
            end = rule.sink + cold_used
            tables[:, rule.sink : end] = cache.first_cold + spread(chooser, cold, (sequences, cold_used))
        return cache, tables


def spread(chooser: np.random.Generator, blocks: int, shape: tuple[int, int]) -> np.ndarray:
    """Blocks in disorder, each used about equally often."""
    count = shape[0] * shape[1]
    return np.resize(chooser.permutation(blocks), count).reshape(shape).astype(np.int32)


def mark() -> float:
    """The time after all launched work is done."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def llama(name: str, context: int) -> LlamaConfig:
    """The configuration of a shape."""
    return LlamaConfig(
        **{"tie_word_embeddings": False, "head_dim": None} | SHAPES[name],
        max_position_embeddings=context,
        eos_token_id=None,
    )


def weight_bytes(model: BuiltModel) -> int:
    """Bytes of weights that a decode step reads: all but the embedding, of which it reads some rows."""
    embedding = model.module.get_input_embeddings().weight
    head = model.module.get_output_embeddings().weight
    every = {parameter.data_ptr(): parameter.nbytes for parameter in model.module.parameters()}
    return sum(every.values()) - (embedding.nbytes if embedding.data_ptr() != head.data_ptr() else 0)


def kv_bytes(model: BuiltModel, context: int, settings: Settings, fp8: bool) -> int:
    """Bytes of one sequence's KV that a decode step reads."""
    hot = 2 * model.layers * model.kv_heads * model.head_dim * settings.dtype.itemsize
    if not fp8:
        return context * hot
    cold = max(0, (context - 1) // BLOCK_SIZE - settings.rule.size - settings.rule.sink) * BLOCK_SIZE
    return (context - cold) * hot + cold * 2 * model.layers * model.kv_heads * (model.head_dim + 4)


def body(model: BuiltModel, cache: KvCache) -> Callable[[DecodeInputs], torch.Tensor]:
    """A decode step from token ids to the next ones."""

    def step(inputs: DecodeInputs) -> torch.Tensor:
        return model.decode(cache, inputs).argmax(dim=-1)

    return step


def measure_machine(bench: Bench) -> None:
    """Bandwidth and arithmetic of the device, the reference for all other figures."""
    source = torch.empty(bench.settings.copy_bytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = bench.seconds(lambda: target.copy_(source))
    bench.copy_gb_s = 2 * source.nbytes / seconds / 1e9
    bench.add("machine", "copy, read and written", bench.copy_gb_s, "GB/s")
    size = 8192 if CUDA else 128
    a, b = (torch.randn(size, size, dtype=bench.settings.dtype, device=DEVICE) for _ in range(2))
    bench.add("machine", f"matrix product of {size}", 2 * size**3 / bench.seconds(lambda: a @ b) / 1e12, "TFLOP/s")


def measure_kernels(bench: Bench) -> None:
    """Each Triton kernel alone."""
    settings = bench.settings
    name = settings.models[0]
    config = llama(name, 1024)
    one = BuiltModel(
        module=torch.nn.Identity(), layers=1, kv_heads=config.num_key_value_heads, first_kv_head=0,
        total_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocab_size=0, hidden_act="", step=None,  # type: ignore[arg-type]
    )  # fmt: skip
    heads, dim = config.num_attention_heads, one.head_dim
    for fp8 in (False, True):
        for batch in settings.batches:
            context = settings.contexts[-1]
            cache, tables = bench.cache(one, batch, context, fp8)
            on_device = torch.from_numpy(tables).to(DEVICE)
            positions = torch.full((batch,), context - 1, device=DEVICE)
            attention = DecodeAttention(cache, positions, on_device)
            parts = [
                torch.randn(batch, count, dim, dtype=settings.dtype, device=DEVICE).transpose(0, 1)
                for count in (heads, one.kv_heads, one.kv_heads)
            ]
            seconds = bench.recorded_seconds(lambda: attention.attend(0, *parts, Scoring(dim**-0.5)))  # noqa: B023
            moved = batch * kv_bytes(one, context, settings, fp8)
            about = {"model": name, "batch": batch, "context": context, "kv": "fp8" if fp8 else "hot"}
            bench.add("kernels", "attention, decode", moved / seconds / 1e9, "GB/s", **about,
                      share=bench.share(moved, seconds))  # fmt: skip
    rows = settings.rows
    x, delta = (torch.randn(rows, config.hidden_size, dtype=settings.dtype, device=DEVICE) for _ in range(2))
    weight = torch.ones(config.hidden_size, dtype=settings.dtype, device=DEVICE)
    gate_up = torch.randn(rows, 2 * config.intermediate_size, dtype=settings.dtype, device=DEVICE)
    for what, work, moved in (
        ("norm with residual", lambda: add_rms_norm(x, delta, weight, 1e-5), 4 * x.nbytes),
        ("gate", lambda: silu_mul(gate_up), gate_up.nbytes * 1.5),
    ):
        seconds = bench.recorded_seconds(work)
        bench.add("kernels", what, moved / seconds / 1e9, "GB/s", rows=rows, share=bench.share(moved, seconds))
    blocks = min(rows, 4096)
    cache, _ = bench.cache(one, blocks, (settings.rule.blocks + 1) * BLOCK_SIZE, True)
    moves = torch.arange(blocks, dtype=torch.int32, device=DEVICE)[:, None].repeat(1, 2).contiguous()

    def quantize() -> torch.Tensor:
        compress(cache.cold_layers(0), moves)
        return moves

    token = 2 * one.kv_heads * (dim * settings.dtype.itemsize + dim + 4)
    seconds = bench.recorded_seconds(quantize)
    moved = blocks * BLOCK_SIZE * token
    bench.add("kernels", "compression of blocks", moved / seconds / 1e9, "GB/s", blocks=blocks,
              share=bench.share(moved, seconds))  # fmt: skip


def measure_decode(bench: Bench) -> None:
    """Whole decode steps, recorded, at every batch and context, fp8 off and on."""
    settings = bench.settings
    for name in settings.models:
        model = bench.build(name)
        weights = weight_bytes(model)
        for batch in settings.batches:
            for context in settings.contexts:
                speeds = []
                for fp8 in (False, True):
                    seconds = decode_seconds(bench, model, batch, context, fp8)
                    moved = weights + batch * kv_bytes(model, context, settings, fp8)
                    speeds.append(batch / seconds)
                    about = {"model": name, "batch": batch, "context": context, "kv": "fp8" if fp8 else "hot"}
                    bench.add("decode", "tokens", batch / seconds, "tokens/s", **about, step_ms=round(seconds * 1e3, 3),
                              share=bench.share(moved, seconds))  # fmt: skip
                bench.add(
                    "decode", "fp8 over hot", speeds[1] / speeds[0], "x", model=name, batch=batch, context=context
                )
        del model


def decode_seconds(bench: Bench, model: BuiltModel, batch: int, context: int, fp8: bool) -> float:
    """Seconds of one recorded step, with its inputs copied to the device."""
    cache, tables = bench.cache(model, batch, context, fp8)
    graphs = GraphedStep(body(model, cache), batch, tables.shape[1], DEVICE, sizes=[batch])
    graphs.capture()
    layout = single(batch, context, tables)
    ids = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    seconds = bench.seconds(lambda: graphs.run(ids, layout))
    graphs.close()
    return seconds


def single(batch: int, context: int, tables: np.ndarray) -> StepLayout:
    """The layout of a step that computes the last token of each context."""
    return StepLayout(np.full(batch, context - 1, np.int32), np.ones(batch, np.int32), tables)


def measure_prefill(bench: Bench) -> None:
    """A chunk of a prompt, at its beginning and behind a context."""
    for name in bench.settings.models:
        prefill_model(bench, name)


def prefill_model(bench: Bench, name: str) -> None:
    """The same for one model, which is gone afterwards."""
    settings = bench.settings
    model = bench.build(name)
    ids = torch.zeros(settings.chunk, dtype=torch.int64, device=DEVICE)
    last = torch.tensor([settings.chunk - 1], device=DEVICE)
    inner = weight_bytes(model) // settings.dtype.itemsize - model.module.get_output_embeddings().weight.numel()
    for start in (0, settings.contexts[len(settings.contexts) // 2]):
        cache, tables = bench.cache(model, 1, start + settings.chunk, False)
        layout = StepLayout(np.array([start], np.int32), np.array([settings.chunk], np.int32), tables)
        seconds = bench.seconds(lambda: model.logits(ids, TritonAttention(cache, layout), last))  # noqa: B023
        pairs = settings.chunk * (start + settings.chunk / 2)
        attention = 4 * model.module.config.num_attention_heads * model.head_dim * pairs * model.layers
        flops = 2 * inner * settings.chunk + attention
        bench.add("prefill", "chunk", flops / seconds / 1e12, "TFLOP/s", model=name, tokens=settings.chunk,
                  start=start, tokens_per_s=round(settings.chunk / seconds, 1))  # fmt: skip


def measure_graphs(bench: Bench) -> None:
    """The gain of recording a step, with the model's own modules and with the decoder, and its cost."""
    settings = bench.settings
    name, context = settings.models[0], settings.contexts[0]
    model = bench.build(name)
    by_modules = dataclasses.replace(model, decoder=None)
    for batch in settings.batches[:2]:
        cache, tables = bench.cache(model, batch, context, False)
        layout, ids = single(batch, context, tables), torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        inputs = DecodeInputs(
            torch.zeros(batch, dtype=torch.int64, device=DEVICE),
            torch.full((batch,), context - 1, device=DEVICE),
            torch.from_numpy(tables).to(DEVICE),
        )
        for what, step in (("modules", body(by_modules, cache)), ("decoder", body(model, cache))):
            eager = bench.seconds(lambda: step(inputs))  # noqa: B023
            graphs = GraphedStep(step, batch, tables.shape[1], DEVICE, sizes=[batch])
            graphs.capture()
            replayed = bench.seconds(lambda: graphs.run(ids, layout))  # noqa: B023
            graphs.close()
            for how, seconds in (("eager", eager), ("graph", replayed)):
                bench.add(
                    "graphs", f"{what}, {how}", batch / seconds, "tokens/s", model=name, batch=batch, context=context
                )
    largest = settings.batches[-1]
    ids = torch.zeros(largest, dtype=torch.int64, device=DEVICE)
    cache, tables = bench.cache(model, largest, context, False)
    counter = BuildCounter().install()
    graphs = GraphedStep(body(model, cache), largest, tables.shape[1], DEVICE)
    graphs.capture()
    before = counter.builds
    for count in range(1, largest + 1):
        graphs.run(ids[:count], single(count, context, tables[:count]))
    counter.remove()
    bench.add("graphs", "recorded sizes", len(graphs.sizes), "", model=name, up_to=largest)
    bench.add("graphs", "recording", graphs.seconds, "s", model=name)
    bench.add("graphs", "memory of recordings", graphs.bytes / 2**20, "MiB", model=name)
    bench.add("graphs", "kernels built while recording", before, "")
    bench.add("graphs", "kernels built after that", counter.builds - before, "")
    graphs.close()


def measure_shards(bench: Bench) -> None:
    """One rank's part of a step, without its collectives: what the prediction of tensor parallelism starts from."""
    context = bench.settings.contexts[0]
    for name, tp in bench.settings.shards:
        model = bench.build(name, Shard(tp))
        for batch in bench.settings.batches:
            seconds = decode_seconds(bench, model, batch, context, False)
            bench.add(
                "shards", "step of one rank", seconds * 1e3, "ms", model=name, tp=tp, batch=batch, context=context
            )
        del model


def measure_peer(bench: Bench) -> None:
    """`transformers` with its static cache, compiled."""
    settings = bench.settings
    name, context = settings.models[0], settings.contexts[0]
    steps = settings.repeats + settings.warm_ups + 2
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(llama(name, context + steps), dtype=settings.dtype).eval()
    forward = torch.compile(model.forward, mode="reduce-overhead") if settings.compiled_peer else model.forward
    for batch in settings.batches[:2]:
        cache = StaticCache(config=model.config, max_cache_len=context + steps)
        model(
            torch.zeros(batch, context - 1, dtype=torch.int64, device=DEVICE), past_key_values=cache, logits_to_keep=1
        )
        ids = torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE)
        positions = torch.full((batch, 1), context - 1, device=DEVICE)

        def step() -> None:
            out = forward(ids, past_key_values=cache, position_ids=positions)  # noqa: B023
            ids.copy_(out.logits[:, -1:].argmax(dim=-1))  # noqa: B023
            positions.add_(1)  # noqa: B023

        how = "compiled" if settings.compiled_peer else "eager"
        bench.add("peer", f"transformers static cache, {how}", batch / bench.seconds(step), "tokens/s", model=name,
                  batch=batch, context=context)  # fmt: skip


class _Phases(logging.Handler):
    """Records what the engine logs about its start."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.seconds |= getattr(record, "phases_s", {})


def measure_engine(bench: Bench) -> None:
    """The whole engine with its processes: start-up by phase; driver and ranks overlapped and one after the other."""
    settings = bench.settings
    path = ROOT / "models/reference"
    if settings.engine_model:
        path = Path(bench._folder.name) / "engine"
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(llama(settings.engine_model, 8192), dtype=settings.dtype)
        model.save_pretrained(path)
        del model
        for file in (ROOT / "models/reference").glob("*token*"):
            (path / file.name).write_bytes(file.read_bytes())
    for way in ({"overlap": True}, {"overlap": False}):
        phases = _Phases()
        logger = logging.getLogger("lockstep.engine")
        logger.addHandler(phases)
        level = logger.level
        logger.setLevel(logging.INFO)
        began = time.perf_counter()
        with Engine(str(path), device="cuda" if CUDA else "cpu", max_context=1024, prefix_cache=False, **way) as engine:
            ready = time.perf_counter() - began
            for batch in settings.batches:
                prompts = [[7 + row] * 32 for row in range(batch)]
                params = SamplingParams(max_tokens=settings.new_tokens, temperature=0, ignore_eos=True)
                seconds = bench.seconds(lambda: engine.generate_ids(prompts, params))  # noqa: B023
                bench.add("engine", "tokens", batch * settings.new_tokens / seconds, "tokens/s", model=path.name,
                          batch=batch, **way)  # fmt: skip
            status = engine.core.status()
            bench.add("engine", "driver's share of a step", status.driver_us / max(status.step_us, 1e-9), "", **way)
        logger.removeHandler(phases)
        logger.setLevel(level)
        bench.add("engine", "start-up", ready, "s", **way)
        for phase, seconds in phases.seconds.items():
            bench.add("engine", f"start-up: {phase}", seconds, "s", **way)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "kernels": measure_kernels,
    "decode": measure_decode,
    "prefill": measure_prefill,
    "graphs": measure_graphs,
    "shards": measure_shards,
    "peer": measure_peer,
    "engine": measure_engine,
}


def machine() -> Row:
    """The machine and the versions, to interpret the figures later."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "device": torch.cuda.get_device_name(0) if CUDA else f"CPU ({platform.machine()}), Triton interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit.stdout.strip(),
    }


def choose(arguments: argparse.Namespace) -> Settings:
    """The settings that the options describe."""
    settings = TINY if arguments.tiny else Settings()
    given = {
        name: tuple(getattr(arguments, name)) for name in ("models", "batches", "contexts") if getattr(arguments, name)
    }
    return dataclasses.replace(settings, **given)


def sections(only: Sequence[str] | None) -> Iterator[str]:
    """The selected sections, in order."""
    return (name for name in SECTIONS if not only or name in only)


def main() -> None:
    """Run the selected sections, print each line, and write all to --out."""
    parser = argparse.ArgumentParser(description=__doc__.partition(";")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; needs no GPU")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"some of: {', '.join(SHAPES)}")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--contexts", nargs="+", type=int)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    if not CUDA and not arguments.tiny:
        parser.error("there is no CUDA device here; --tiny runs on the CPU")
    bench = Bench(choose(arguments))
    report = {"command": shlex.join(["python", "tools/bench/gpu.py", *sys.argv[1:]]), "machine": machine()}
    print(report["machine"])
    with torch.inference_mode():
        measure_machine(bench)
        for name in sections(arguments.only):
            SECTIONS[name](bench)
            if CUDA:
                torch.cuda.empty_cache()
            if arguments.out:
                arguments.out.write_text(json.dumps({**report, "rows": bench.rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
