"""Has a rank's steps recorded at its start, or says why they run without graphs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine import fast_path
from lockstep_engine.attention import StepLayout
from lockstep_engine.cache_sizing import CacheSizing
from lockstep_engine.chunk_graphs import ChunkInputs, GraphedChunks, chunk_sizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import RankSpec
from lockstep_engine.graphs import MAX_RECORDED_SEQS, DecodeInputs, GraphedStep
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.largest_step import SMALLEST_POOLS
from lockstep_engine.recorders import NotRecordableError, recorder_for

logger = logging.getLogger("lockstep.engine")


@dataclass(frozen=True)
class RecordedSteps:
    """The recorded steps of a rank."""

    decode: GraphedStep
    chunks: GraphedChunks | None
    """None: steps with prompt tokens are not recorded."""

    def that_fit(self, layout: StepLayout, rows: NDArray[np.int64]) -> GraphedStep | GraphedChunks | None:
        """Those of which one can run as a step; None: there is none. `rows`: as for `Rank.forward`."""
        if self.decode.fits(layout):
            return self.decode
        return self.chunks if self.chunks is not None and self.chunks.fits(layout, rows) else None

    def close(self) -> None:
        """Free the recordings. Call it before the process group is destroyed."""
        self.decode.close()
        if self.chunks is not None:
            self.chunks.close()


class StepRecorder:
    """Records the steps of one rank: those that decode, and smaller ones with chunks of prompts.

    Args:
        spec: of the rank.
        device: which computes.
        compute: computes a step over a cache.
        agree: gathers the ranks' reasons not to record.
        records: whether steps are to be recorded.
    """

    def __init__(
        self,
        spec: RankSpec,
        device: torch.device,
        compute: Callable[[KvCache, DecodeInputs | ChunkInputs], torch.Tensor],
        agree: Callable[[str], list[str]],
        *,
        records: bool,
    ) -> None:
        self._spec = spec
        self._device = device
        self._compute = compute
        self._agree = agree
        self._records = self._records_chunks = records

    def estimate_bytes(self, caches: CacheSizing) -> int:
        """Bytes that recorded steps will take, estimated by recording some over a minimal cache. If they cannot be
        recorded, the reason is logged and steps run without graphs.
        """
        if not self._records:
            return 0
        estimates: list[int] = []
        recorded = self._make(caches.make(SMALLEST_POOLS), lambda steps: estimates.append(steps.estimate_bytes()))
        if recorded is None:
            return 0
        recorded.close()
        return sum(estimates)

    def record(self, cache: KvCache) -> RecordedSteps | None:
        """Record steps over a cache; None: the model cannot be recorded."""
        return self._make(cache, lambda steps: steps.capture()) if self._records else None

    def _make(self, cache: KvCache, act: Callable[[GraphedStep | GraphedChunks], None]) -> RecordedSteps | None:
        """The steps over a cache, after `act`: those with chunks first, which need more of the memory that all share. A
        model of which only decode steps can be recorded does without the others.
        """
        recorder, compute = recorder_for(self._device), self._compute
        spec, width = self._spec, -(-self._spec.model.context_length // BLOCK_SIZE)
        most, compressed = min(spec.config.max_seqs, MAX_RECORDED_SEQS), spec.config.hot_window is not None

        def body(inputs: DecodeInputs | ChunkInputs) -> torch.Tensor:
            return compute(cache, inputs)

        decode = GraphedStep(body, most, width, self._device, recorder, agree=self._agree)
        chunks = None
        if self._records_chunks and spec.config.step_tokens > 1:
            sizes = chunk_sizes(spec.config.step_tokens, most)
            chunks = GraphedChunks(body, sizes, width, self._device, recorder, compressed=compressed, agree=self._agree)
        recorded, without_chunks = RecordedSteps(decode, chunks), ""
        try:
            if chunks is not None:
                try:
                    act(chunks)
                except NotRecordableError as error:
                    recorded, without_chunks = RecordedSteps(decode, None), str(error)
            act(decode)
        except NotRecordableError as error:
            recorded.close()
            self._records = False
            fast_path.without_graphs(spec.config, str(error))
            return None
        except BaseException:
            recorded.close()
            raise
        if without_chunks:
            self._records_chunks = False
            logger.warning("steps with prompt tokens run without CUDA graphs: %s", without_chunks)
        return recorded
