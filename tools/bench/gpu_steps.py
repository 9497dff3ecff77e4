"""What the GPU's benchmark measures of the machine, of kernels and of single steps."""

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from gpu_run import Bench, chosen_share, kv_bytes, weight_bytes
from gpu_settings import CUDA, DEVICE, model_config
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_triton import DecodeAttention, TritonAttention
from lockstep_engine.chunk_graphs import ChunkSize, GraphedChunks
from lockstep_engine.config import BLOCK_SIZE, RECORDED_TOKENS
from lockstep_engine.distributed import Alone
from lockstep_engine.graphs import DecodeInputs, GraphedStep
from lockstep_engine.kernels.triton_compress import compress
from lockstep_engine.kernels.triton_gate import silu_mul
from lockstep_engine.kernels.triton_norm import add_rms_norm
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.models import BuiltModel
from lockstep_engine.recorders import recorder_for
from lockstep_engine.scoring import Scoring


class Shard(Alone):
    """Rank 0 of a group without its other ranks: its own computation takes as long as with them."""

    def __init__(self, size: int) -> None:
        self.size = size


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
    config = model_config(name, 1024)
    one = BuiltModel(
        module=torch.nn.Identity(), layers=1, kv_heads=config.num_key_value_heads, first_kv_head=0,
        total_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        latent=0, vocab_size=0, hidden_act="", step=None,  # type: ignore[arg-type]
    )  # fmt: skip
    heads, dim = config.num_attention_heads, one.head_dim
    for fp8 in (False, True):
        for batch in settings.batches:
            context = settings.contexts[-1]
            cache, tables = bench.cache(one, batch, context, fp8)
            on_device = torch.from_numpy(tables).to(DEVICE)
            positions = torch.full((batch,), context - 1, device=DEVICE)
            parts = [
                torch.randn(batch, count, dim, dtype=settings.dtype, device=DEVICE).transpose(0, 1)
                for count in (heads, one.kv_heads, one.kv_heads)
            ]
            moved = batch * kv_bytes(one, context, settings, fp8)
            about = {"model": name, "batch": batch, "context": context, "kv": "fp8" if fp8 else "hot"}
            for exact in settings.modes:
                attention = DecodeAttention(cache, positions, on_device, exact=exact)
                seconds = bench.recorded_seconds(lambda: attention.attend(0, *parts, Scoring(dim**-0.5)))  # noqa: B023
                bench.add("kernels", "attention, decode", moved / seconds / 1e9, "GB/s", **about, exact=exact,
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
        for batch in settings.batches:
            weights = weight_bytes(model, batch)
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
    ids = some_ids(model, batch)
    seconds = bench.seconds(lambda: graphs.run(ids, layout))
    graphs.close()
    return seconds


def some_ids(model: BuiltModel, count: int) -> torch.Tensor:
    """Token ids that differ: equal ones would all choose the same experts of a mixture."""
    chooser = torch.Generator(device=DEVICE).manual_seed(0)
    return torch.randint(model.vocab_size, (count,), generator=chooser, device=DEVICE)


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
    ids = some_ids(model, settings.chunk)
    last = torch.tensor([settings.chunk - 1], device=DEVICE)
    outer = {
        model.module.get_input_embeddings().weight.data_ptr(),
        model.module.get_output_embeddings().weight.data_ptr(),
    }
    inner = {
        each.data_ptr(): each.numel() * chosen_share(model, each, 1)
        for each in model.module.parameters()
        if each.data_ptr() not in outer
    }
    later = settings.contexts[len(settings.contexts) // 2]
    for start, fp8 in ((0, False), (later, False), (later, True)):
        cache, tables = bench.cache(model, 1, start + settings.chunk, fp8)
        layout = chunk(start, settings.chunk, tables, cache)
        seconds = bench.seconds(lambda: model.logits(ids, TritonAttention(cache, layout, exact=model.exact), last))  # noqa: B023
        pairs = settings.chunk * (start + settings.chunk / 2)
        attention = 4 * model.module.config.num_attention_heads * model.head_dim * pairs * model.layers
        flops = 2 * sum(inner.values()) * settings.chunk + attention
        bench.add("prefill", "chunk", flops / seconds / 1e12, "TFLOP/s", model=name, tokens=settings.chunk,
                  start=start, kv="fp8" if fp8 else "hot", tokens_per_s=round(settings.chunk / seconds, 1))  # fmt: skip


def chunk(start: int, length: int, tables: np.ndarray, cache: KvCache) -> StepLayout:
    """The layout of a step that computes the tokens of one sequence from a position on. Blocks go cold in other steps,
    so that those of the chunk have a hot version, too.
    """
    hot = None
    if cache.hot_window is not None:
        hot = np.where(tables < cache.first_cold, tables, 0).astype(np.int32)
    return StepLayout(np.array([start], np.int32), np.array([length], np.int32), tables, hot)


def measure_graphs(bench: Bench) -> None:
    """The gain of recording a step, with the model's own modules and with the decoder, and its cost."""
    settings = bench.settings
    name, context = settings.models[0], settings.contexts[0]
    model = bench.build(name)
    by_modules = dataclasses.replace(model, decoder=None)
    for batch in settings.batches[:2]:
        cache, tables = bench.cache(model, batch, context, False)
        layout, ids = single(batch, context, tables), some_ids(model, batch)
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
    measure_chunk_graphs(bench, name, model, context)
    largest = settings.batches[-1]
    ids = some_ids(model, largest)
    cache, tables = bench.cache(model, largest, context, False)
    graphs = GraphedStep(body(model, cache), largest, tables.shape[1], DEVICE)
    graphs.capture()
    before = bench.builds.builds
    for count in range(1, largest + 1):
        graphs.run(ids[:count], single(count, context, tables[:count]))
    bench.add("graphs", "recorded sizes", len(graphs.sizes), "", model=name, up_to=largest)
    bench.add("graphs", "recording", graphs.seconds, "s", model=name)
    bench.add("graphs", "memory of recordings", graphs.bytes / 2**20, "MiB", model=name)
    bench.add("graphs", "kernels built until then", before, "")
    bench.add("graphs", "kernels built after that", bench.builds.builds - before, "")
    graphs.close()


def measure_chunk_graphs(bench: Bench, name: str, model: BuiltModel, context: int) -> None:
    """The gain of recording a chunk of a prompt behind a context."""
    for tokens in sorted({min(each, bench.settings.chunk, RECORDED_TOKENS) for each in (32, 128, 512)}):
        cache, tables = bench.cache(model, 1, context + tokens, False)
        layout, ids, rows = chunk(context, tokens, tables, cache), some_ids(model, tokens), np.array([tokens - 1])
        last = torch.from_numpy(rows).to(DEVICE)
        graphs = GraphedChunks(
            partial(model.mix, cache),
            [ChunkSize(tokens, 1)],
            tables.shape[1],
            DEVICE,
            recorder_for(DEVICE),
            compressed=False,
        )
        graphs.capture()
        for how, work in (
            ("eager", lambda: model.logits(ids, TritonAttention(cache, layout, exact=model.exact), last)),  # noqa: B023
            ("graph", lambda: graphs.run(ids, layout, rows)),  # noqa: B023
        ):
            speed = tokens / bench.seconds(work)
            bench.add("graphs", f"chunk, {how}", speed, "tokens/s", model=name, tokens=tokens, start=context)
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
