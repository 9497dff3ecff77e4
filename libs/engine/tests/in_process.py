"""A rank group without processes: `tp` models in threads, exchanging through the real shared segment."""

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from lockstep_engine.attention import StepLayout
from lockstep_engine.attention_choice import step_attention
from lockstep_engine.canary import Numerics, measure
from lockstep_engine.config import EngineConfig, HotWindow
from lockstep_engine.distributed import Alone, Collectives, SharedMemory
from lockstep_engine.kernels import cpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.sizes import segment_bytes
from lockstep_engine.weights import load_weights
from numpy.typing import NDArray

torch.set_num_threads(1)  # ranks are threads here; more would only fight

_CAPACITY = 4 * 2**20
_BLOCKS = 64


class InProcessGroup:
    """Computes logits for one sequence, as a rank group would."""

    def __init__(
        self,
        path: Path,
        tp: int,
        max_context: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        hot_window: HotWindow | None = None,
        blocks: int = _BLOCKS,
        compressed_layers: Collection[int] | None = None,
        shards: int = 1,
        hot_layers: Collection[int] = (),
        copies: bool = False,
    ) -> None:
        self._shards = shards
        self.tp, self._blocks, self._compressed_layers = tp, blocks, compressed_layers
        self._dtype, self._hot_window = dtype, hot_window
        self._hot_layers, self._copies = hot_layers, copies
        self._info = inspect_model(EngineConfig(model=str(path), tp=tp, max_context=max_context, kv_compression="none"))
        groups: list[Collectives] = [Alone()]
        if tp > 1:
            fd = Mailbox.create(segment_bytes(tp, _CAPACITY), "test")
            groups = [SharedMemory(fd, rank, tp, _CAPACITY, lambda: None) for rank in range(tp)]
        self._ranks = [self._build(group) for group in groups]
        self.models = [model for _, model, _ in self._ranks]
        self.caches = [cache for _, _, cache in self._ranks]
        self.fused = sum(type(module).__name__ == "FusedLayer" for module in self._ranks[0][1].module.modules())

    def _build(self, group):
        device = torch.device("cpu")
        model = build_model(self._info, group, self._dtype, shards=self._shards)
        load_weights(model.module, self._info, device)
        if cpu.build and self._dtype is torch.float32:
            model.fuse(self._info.context_length)
        cache = KvCache(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            blocks=self._blocks,
            dtype=self._dtype,
            device=device,
            hot_window=None if self._copies else self._hot_window,
            cold_blocks=0 if self._hot_window is None else self._blocks,
            compressed_layers=self._compressed_layers,
            hot_layers=self._hot_layers,
        )
        return group, model, cache

    def logits(self, ids: list[int], start: int) -> torch.Tensor:
        """Logits [len(ids), vocabulary] of tokens at positions start, start + 1, …; what came before is in the
        cache.
        """
        table = np.arange(self._blocks, dtype=np.int32)[::-1].reshape(1, -1).copy()
        layout = StepLayout(np.array([start], np.int32), np.array([len(ids)], np.int32), table)
        results: list[torch.Tensor | None] = [None] * self.tp

        def run(rank: int) -> None:
            results[rank] = self.forward(rank, torch.tensor(ids), layout, np.arange(len(ids))).clone()

        on_all(run, self.tp)
        first = results[0]
        assert first is not None
        assert all(torch.equal(first, each) for each in results if each is not None)  # all ranks hold the same bits
        return first

    def measure(self, together: Sequence[int] = ()) -> Numerics:
        """The self-test of every rank, which must find the same."""
        results: list[Numerics | None] = [None] * self.tp

        def run(rank: int) -> None:
            results[rank] = self.measure_alone(rank, together)

        on_all(run, self.tp)
        first = results[0]
        assert first is not None
        assert all(each == first for each in results)
        return first

    def measure_alone(self, rank: int = 0, together: Sequence[int] = ()) -> Numerics:
        """The self-test of one rank, in this thread."""
        cache, vocab_size = self._ranks[rank][2], self._ranks[rank][1].vocab_size
        with torch.inference_mode():
            forward = functools.partial(self.forward, rank)
            return measure(forward, cache, vocab_size, 104, str(self._dtype), neighbours=True, together=together)

    def forward(self, rank: int, ids: torch.Tensor, layout: StepLayout, rows: NDArray[np.int64]) -> torch.Tensor:
        group, model, cache = self._ranks[rank]
        with torch.inference_mode():
            attention = step_attention(cache, layout, deterministic=True)
            return group.all_gather(model.logits(ids, attention, torch.from_numpy(rows)))[:, : model.vocab_size]


def on_all(run: Callable[[int], None], count: int) -> None:
    """Call `run` with each rank's number, in threads.

    Raises:
        BaseException: the first of theirs.
    """
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
