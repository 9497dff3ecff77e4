"""A rank group without processes: `tp` models in threads, exchanging through the real shared segment."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from lockstep_engine.attention import StepLayout, step_attention
from lockstep_engine.config import EngineConfig
from lockstep_engine.distributed import Alone, Collectives, SharedMemory
from lockstep_engine.kernels import cpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.mailbox import Mailbox
from lockstep_engine.model_config import inspect_model
from lockstep_engine.models import build_model
from lockstep_engine.sizes import segment_bytes
from lockstep_engine.weights import load_weights

torch.set_num_threads(1)  # ranks are threads here; more would only fight

_CAPACITY = 4 * 2**20
_BLOCKS = 64


class InProcessGroup:
    """Computes logits for one sequence, as a rank group would."""

    def __init__(self, path: Path, tp: int, max_context: int | None = None) -> None:
        self.tp = tp
        self._info = inspect_model(EngineConfig(model=str(path), tp=tp, max_context=max_context))
        groups: list[Collectives] = [Alone()]
        if tp > 1:
            fd = Mailbox.create(segment_bytes(tp, _CAPACITY), "test")
            groups = [SharedMemory(fd, rank, tp, _CAPACITY, lambda: None) for rank in range(tp)]
        self._ranks = [self._build(group) for group in groups]
        self.fused = sum(type(module).__name__ == "FusedLayer" for module in self._ranks[0][1].module.modules())

    def _build(self, group):
        device = torch.device("cpu")
        model = build_model(self._info, group, torch.float32)
        load_weights(model.module, self._info, group, device)
        if cpu.usable(model.head_dim):
            model.fuse(self._info.context_length)
        cache = KvCache(
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            blocks=_BLOCKS,
            dtype=torch.float32,
            device=device,
        )
        return group, model, cache

    def logits(self, ids: list[int], start: int) -> torch.Tensor:
        """Logits [len(ids), vocabulary] of tokens at positions start, start + 1, …; what came before is in the
        cache.
        """
        table = np.arange(_BLOCKS, dtype=np.int32)[::-1].reshape(1, -1).copy()
        layout = StepLayout(np.array([start], np.int32), np.array([len(ids)], np.int32), table)
        results: list[torch.Tensor | None] = [None] * self.tp

        def run(rank: int) -> None:
            group, model, cache = self._ranks[rank]
            with torch.inference_mode():
                attention = step_attention(cache, layout, deterministic=True, plain=model.plain_attention)
                local = model.logits(torch.tensor(ids), attention, torch.arange(len(ids)))
                results[rank] = group.all_gather(local)[:, : model.vocab_size].clone()

        _all(run, self.tp)
        first = results[0]
        assert first is not None
        assert all(torch.equal(first, each) for each in results if each is not None)  # all ranks hold the same bits
        return first


def _all(run: Callable[[int], None], count: int) -> None:
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
