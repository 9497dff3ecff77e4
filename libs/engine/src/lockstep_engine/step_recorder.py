"""Has a rank's decode steps recorded at its start, or says why they run without graphs."""

from collections.abc import Callable

import torch

from lockstep_engine import fast_path
from lockstep_engine.cache_sizing import CacheSizing
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import RankSpec
from lockstep_engine.graphs import MAX_RECORDED_SEQS, DecodeInputs, GraphedStep
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.largest_step import SMALLEST_POOLS
from lockstep_engine.recorders import NotRecordableError


class StepRecorder:
    """Records the decode steps of one rank.

    Args:
        spec: of the rank.
        device: which computes.
        decode: computes a step over a cache.
        agree: gathers the ranks' reasons not to record.
        records: whether steps are to be recorded.
    """

    def __init__(
        self,
        spec: RankSpec,
        device: torch.device,
        decode: Callable[[KvCache, DecodeInputs], torch.Tensor],
        agree: Callable[[str], list[str]],
        *,
        records: bool,
    ) -> None:
        self._spec = spec
        self._device = device
        self._decode = decode
        self._agree = agree
        self._records = records

    def estimate_bytes(self, caches: CacheSizing) -> int:
        """Bytes that recorded decode steps will take, estimated by recording some over a minimal cache. If they cannot
        be recorded, the reason is logged and steps run without graphs.
        """
        if not self._records:
            return 0
        graphs = self._graphed(caches.make(SMALLEST_POOLS))
        try:
            return graphs.estimate_bytes()
        except NotRecordableError as error:
            self._give_up(error)
            return 0
        finally:
            graphs.close()

    def record(self, cache: KvCache) -> GraphedStep | None:
        """Record decode steps over a cache; None: the model cannot be recorded."""
        if not self._records:
            return None
        graphs = self._graphed(cache)
        try:
            graphs.capture()
        except NotRecordableError as error:
            self._give_up(error)
            return None
        return graphs

    def _graphed(self, cache: KvCache) -> GraphedStep:
        def body(inputs: DecodeInputs) -> torch.Tensor:
            return self._decode(cache, inputs)

        width = -(-self._spec.model.context_length // BLOCK_SIZE)
        most = min(self._spec.config.max_seqs, MAX_RECORDED_SEQS)
        return GraphedStep(body, most, width, self._device, agree=self._agree)

    def _give_up(self, error: NotRecordableError) -> None:
        self._records = False
        fast_path.without_graphs(self._spec.config, str(error))
