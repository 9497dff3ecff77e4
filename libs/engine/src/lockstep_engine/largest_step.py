"""Measures what the largest step takes of a GPU's memory, before the KV cache gets the rest.

A rank runs that step once at its start, with its real code, over a cache of next to nothing: the longest prompt chunks,
every row sampled with every option, prompt tokens scored. So the KV cache never takes memory that a step needs, and
settings that cannot work fail at the start.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from lockstep_common.errors import invalid
from lockstep_common.protocol import MAX_LOGPROBS

from lockstep_engine.blocks import PoolSizes
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import RankSpec
from lockstep_engine.device_failures import is_out_of_memory
from lockstep_engine.fast_path import common_reason
from lockstep_engine.kernels.gpu import first_line
from lockstep_engine.plan import Plan, RowSampling, mask_words

SMALLEST_POOLS = PoolSizes(1, 1)
"""The cache over which the step is run: all sequences share its blocks, and overwrite each other's tokens."""


class DeviceMemory(Protocol):
    """Memory of a device. Tests have one of their own."""

    def free_bytes(self) -> int:
        """Bytes of free device memory."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Run the work, and return the most memory that it held beyond what was held before. Does not wait for the
        device afterwards: another rank may have failed, so that a collective never ends.
        """
        ...


class CudaMemory:
    """A GPU's memory. Peaks are those of torch's allocator, which holds more than the tensors: it takes memory from the
    GPU in larger pieces.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        """See `DeviceMemory.free_bytes`: of all processes, after torch's allocator has given back what it keeps."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See `DeviceMemory.peak_bytes`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        work()
        return torch.cuda.max_memory_reserved(self._device) - before


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; None for the CPU, whose KV cache has a size of its own."""
    return CudaMemory(device) if device.type == "cuda" else None


def measure_largest_step(
    spec: RankSpec, memory: DeviceMemory, run: Callable[[Plan], object], agree: Callable[[str], list[str]]
) -> int:
    """Run the largest step and return the bytes that it needs beside weights and KV cache. All ranks call it.

    Args:
        spec: the rank's.
        memory: of its device.
        run: executes a plan over a cache of `SMALLEST_POOLS`.
        agree: given what this rank says ("": nothing), returns what all ranks say, in their order.

    Raises:
        LockstepError: INVALID_REQUEST, on all ranks: one of them has no memory for the step.
    """
    config, plan, needed, reason = spec.config, largest_plan(spec), 0, None
    try:
        needed = memory.peak_bytes(lambda: run(plan))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
    reason = common_reason(agree, reason)
    if reason is None:
        return needed
    raise invalid(
        "max_batch_tokens",
        f"is {config.step_tokens}, and there is no memory beside the weights for a step of {len(plan.token_ids)} "
        f"tokens and {config.max_seqs} sequences (max_seqs), each up to {spec.model.context_length} tokens long "
        f"(max_context); lower one of these: {reason}",
    )


def largest_plan(spec: RankSpec) -> Plan:
    """A step that needs as much memory as any: as many sequences as run at once, at the end of the longest context, of
    which as few as possible have all tokens but one of each; all sample with all options; as many prompt tokens are
    scored as in any step. Block tables are for a cache of `SMALLEST_POOLS`.
    """
    config, context, vocabulary = spec.config, spec.model.context_length, spec.model.vocab_size
    count, hot_window = config.max_seqs, spec.compressed
    more = config.step_tokens - count - np.arange(count) * (context - 1)
    lengths = (1 + np.clip(more, 0, context - 1)).astype(np.int32)
    starts = (context - lengths).astype(np.int32)
    hot_tables = np.zeros((count, -(-context // BLOCK_SIZE)), np.int32)
    tables, moved = hot_tables.copy(), 0
    if hot_window is not None:
        last = hot_window.first_hot(tables.shape[1] - 1)
        tables[:, hot_window.sink : last] = SMALLEST_POOLS.hot + 1  # the first cold block's id
        first = np.maximum(hot_window.sink, np.maximum(starts - 1, 0) // BLOCK_SIZE - hot_window.size)
        moved = int((last - first).clip(0).sum())
    rows = np.arange(count, dtype=np.int32)
    targets = np.full(int(lengths.sum()), -1, np.int32)
    targets[:count] = 0
    return Plan(
        step=0,
        token_ids=np.zeros(len(targets), np.int32),
        starts=starts,
        lengths=lengths,
        sampling_rows=rows,
        samples=np.ones(count, np.bool_),
        emitted=np.zeros(count, np.int32),
        uniforms=np.zeros(count),
        tables=tables,
        moves=np.zeros((moved, 2), np.int32),
        late_moves=np.empty((0, 2), np.int32),
        added=[_all_options(row) for row in range(count)],
        targets=targets,
        vocabulary_logprobs=True,
        hot_tables=hot_tables,
        masked=rows,
        masks=np.full((count, mask_words(vocabulary)), -1, np.int32),
    )


def _all_options(row: int) -> RowSampling:
    """Settings for which the sampler computes everything that it can: in torch top_p alone sorts the whole
    vocabulary.
    """
    return RowSampling(
        sampling_row=row,
        temperature=1.0,
        top_k=0,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={0: 1.0},
        logprobs=MAX_LOGPROBS,
        prompt_ids=[0],
        emitted_ids=[],
        forbidden_ids=[0],
        min_tokens=1,
    )
