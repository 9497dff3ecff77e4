"""What the GPU's benchmark measures of whole programs: `transformers`, and the engine with its processes."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from gpu_run import Bench
from gpu_settings import CUDA, DEVICE, model_config
from lockstep_engine import Engine, SamplingParams
from measure import ROOT
from transformers import AutoModelForCausalLM, StaticCache

CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}
"""How tokens are chosen."""


def measure_peer(bench: Bench) -> None:
    """`transformers` with its static cache, compiled."""
    settings = bench.settings
    name, context = settings.models[0], settings.contexts[0]
    steps = settings.repeats + settings.warm_ups + 2
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(model_config(name, context + steps), dtype=settings.dtype).eval()
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
    """The whole engine with its processes, for some numbers of ranks, the first of these also with driver and ranks one
    after the other: start-up by phase; greedy tokens and sampled ones.
    """
    path, (first, *others) = engine_model(bench), bench.settings.engine_tps
    for tp, overlap in ((first, True), (first, False), *((other, True) for other in others)):
        measure_one_engine(bench, path, tp=tp, overlap=overlap)


def engine_model(bench: Bench) -> Path:
    """The folder of the engine's model, with random weights on a GPU."""
    reference, settings = ROOT / "models/reference", bench.settings
    if not settings.engine_model:
        return reference
    path = bench.folder / "engine" / settings.engine_model
    if path.exists():
        return path
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(model_config(settings.engine_model, 8192), dtype=settings.dtype)
    model.save_pretrained(path)
    for file in reference.glob("*token*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


def measure_one_engine(bench: Bench, path: Path, **way: Any) -> None:
    """The same with these settings."""
    settings = bench.settings
    phases = _Phases()
    logger = logging.getLogger("lockstep.engine")
    logger.addHandler(phases)
    level = logger.level
    logger.setLevel(logging.INFO)
    began = time.perf_counter()
    device = "cuda" if CUDA else "cpu"
    with Engine(
        str(path), device=device, max_context=1024, prefix_cache=False, deterministic=bench.exact, **way
    ) as engine:
        ready = time.perf_counter() - began
        for batch in settings.batches:
            prompts = [[7 + row] * 32 for row in range(batch)]
            for choice, options in CHOICES.items():
                params = SamplingParams(max_tokens=settings.new_tokens, ignore_eos=True, **options)
                seconds = bench.seconds(lambda: engine.generate_ids(prompts, params))  # noqa: B023
                bench.add("engine", "tokens", batch * settings.new_tokens / seconds, "tokens/s", model=path.name,
                          batch=batch, choice=choice, **way)  # fmt: skip
        status = engine.core.status()
        bench.add("engine", "driver's share of a step", status.driver_us / max(status.step_us, 1e-9), "", **way)
    logger.removeHandler(phases)
    logger.setLevel(level)
    bench.add("engine", "start-up", ready, "s", **way)
    for phase, seconds in phases.seconds.items():
        bench.add("engine", f"start-up: {phase}", seconds, "s", **way)
