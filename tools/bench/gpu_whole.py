"""What the GPU's benchmark measures of whole programs: `transformers`, and the engine with its processes."""

import logging
import time

import torch
from gpu_run import Bench
from gpu_settings import CUDA, DEVICE, llama
from lockstep_engine import Engine, SamplingParams
from measure import ROOT
from transformers import AutoModelForCausalLM, StaticCache


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
        path = bench.folder / "engine"
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
