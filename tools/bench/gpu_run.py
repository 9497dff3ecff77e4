"""One run of the GPU's benchmark: its models and caches, how it measures, and its table."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_settings import CUDA, DEVICE, Settings, model_config
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.distributed import Alone
from lockstep_engine.graphs import BuildCounter
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.model_config import ModelInfo
from lockstep_engine.models import BuiltModel, build_model
from lockstep_engine.recorders import CudaRecorder, HostRecorder

Row = dict[str, Any]

_FIGURES = {"value", "share", "step_ms", "tokens_per_s"}
_SPEEDS = {"tokens/s", "TFLOP/s", "GB/s"}


class Bench:
    """One run: its settings and results."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.rows: list[Row] = []
        self.copy_gb_s = 0.0
        self.exact: bool | None = None
        """Whether the models of this section compute in the exact mode; None: the section has none."""
        self.builds = BuildCounter().install()
        """Of Triton's kernels, since the run began."""
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        """For models; gone with the run."""

    def add(self, section: str, what: str, value: float, unit: str, **about: Any) -> None:
        """A line of the table, printed at once."""
        about |= {} if self.exact is None else {"exact": self.exact}
        row = {"section": section, "what": what, "value": float(f"{value:.4g}"), "unit": unit, **about}
        self.rows.append(row)
        rest = "  ".join(f"{name}={each}" for name, each in about.items())
        print(f"{section:10} {what:34} {value:12.4g} {unit:9} {rest}", flush=True)

    def compare_modes(self, section: str) -> None:
        """Add how fast the exact mode is compared with the other one, for a section that has been measured in both."""
        rows = [row for row in self.rows if row["section"] == section and row["unit"] in _SPEEDS | {"ms"}]
        speeds: dict[bool, dict[str, float]] = {False: {}, True: {}}
        about: dict[str, Row] = {}
        for row in rows:
            if "exact" in row:
                same = {name: each for name, each in row.items() if name not in _FIGURES | {"exact"}}
                about[key := repr(same)] = same
                speeds[row["exact"]][key] = row["value"] if row["unit"] in _SPEEDS else 1 / row["value"]
        for key in (each for each in speeds[False] if each in speeds[True]):
            what = f"{about[key].pop('what')}: exact over not"
            rest = {name: each for name, each in about[key].items() if name not in ("section", "unit")}
            self.add(section, what, speeds[True][key] / speeds[False][key], "x", **rest)

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
        """A model of random weights on the device, with the kernels that a rank uses for it in the section's mode."""
        longest = max(self.settings.contexts) + self.settings.chunk
        config = model_config(name, longest)
        path = self.folder / name
        config.save_pretrained(path)
        info = ModelInfo(
            path=path,
            name=name,
            digest="",
            architecture="",
            model_type=config.model_type,
            dtype="",
            context_length=longest,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            eos_ids=(),
            created=0,
            weight_files=(),
        )
        model = build_model(info, group or Alone(), self.settings.dtype)
        assert self.exact is not None
        model.exact = self.exact
        model.module.to_empty(device=DEVICE)
        for module in model.module.modules():
            if list(module.buffers(recurse=False)):
                model.module._init_weights(module)
        for parameter in model.module.parameters():
            parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
        model.fuse_on_gpu(longest)
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


def weight_bytes(model: BuiltModel, tokens: int) -> float:
    """Bytes of weights that a step reads: all but the embedding, of which it reads some rows; of a mixture's experts as
    many as tokens that choose at random can be expected to choose.
    """
    embedding = model.module.get_input_embeddings().weight
    head = model.module.get_output_embeddings().weight
    every = {each.data_ptr(): each.nbytes * chosen_share(model, each, tokens) for each in model.module.parameters()}
    return sum(every.values()) - (embedding.nbytes if embedding.data_ptr() != head.data_ptr() else 0)


def chosen_share(model: BuiltModel, parameter: torch.Tensor, tokens: int) -> float:
    """The part of a parameter that so many tokens need."""
    if parameter.dim() < 3:  # only experts are stacked
        return 1
    return 1 - (1 - model.module.config.num_experts_per_tok / len(parameter)) ** tokens


def kv_bytes(model: BuiltModel, context: int, settings: Settings, fp8: bool) -> int:
    """Bytes of one sequence's KV that a decode step reads."""
    hot = 2 * model.layers * model.kv_heads * model.head_dim * settings.dtype.itemsize
    if not fp8:
        return context * hot
    cold = max(0, (context - 1) // BLOCK_SIZE - settings.rule.size - settings.rule.sink) * BLOCK_SIZE
    return (context - cold) * hot + cold * 2 * model.layers * model.kv_heads * (model.head_dim + 4)
