"""Decides what happens where a GPU would serve on a slow path: without the Triton kernels, without CUDA graphs, or with
kernels that are compiled only at the start. A slow path gives the same results and would not be noticed, so it is an
error unless the setting `fast_path` allows it.
"""

import logging
from collections.abc import Callable

from lockstep_common.errors import invalid

from lockstep_engine.config import EngineConfig
from lockstep_engine.kernels import prebuilt

logger = logging.getLogger("lockstep.engine")

_MAX_NAMED = 8


def common_reason(agree: Callable[[str], list[str]], reason: str | None) -> str | None:
    """Why some rank cannot use the kernels; None: all can. Ranks that differ would wait for each other in different
    collectives until the start's deadline, whose message names no reason.

    Args:
        agree: given what this rank says ("": nothing), returns what all ranks say, in their order.
        reason: why this rank cannot.
    """
    reasons = agree(reason or "")
    first = next((rank for rank, said in enumerate(reasons) if said), None)
    if first is None:
        return None
    return f"rank {first}: {reasons[first]}" if len(reasons) > 1 else reasons[first]


def without_kernels(config: EngineConfig, reason: str) -> None:
    """The device is a GPU, and attention is computed by torch."""
    _missing(config, f"attention is computed by torch, without Triton's kernels and CUDA graphs: {reason}", "")


def without_graphs(config: EngineConfig, reason: str) -> None:
    """Steps of decoding cannot be recorded."""
    _missing(config, f"decode steps run without CUDA graphs: {reason}", ", or set cuda_graphs to false")


def check_prebuilt(config: EngineConfig) -> None:
    """After the start's kernels were loaded: were they compiled when the image was built?

    Raises:
        LockstepError: they were not, and `fast_path` is `prebuilt`.
    """
    if prebuilt.folder() is None:
        if config.fast_path == "prebuilt":
            raise invalid("fast_path", f"is prebuilt, and {prebuilt.FOLDER_VARIABLE} names no folder of kernels")
        return
    missing = sorted(set(prebuilt.MISSES.names))
    if not missing:
        return
    named = ", ".join(missing[:_MAX_NAMED])
    if config.fast_path == "prebuilt":
        raise invalid("fast_path", f"is prebuilt, and {len(missing)} kernels are not, for this model and GPU: {named}")
    logger.warning("%d kernels were compiled at this start, because the image has none for it: %s", len(missing), named)


def _missing(config: EngineConfig, sentence: str, other_way: str) -> None:
    """Refuse the slow path, or log it.

    Raises:
        LockstepError: INVALID_REQUEST with the reason.
    """
    if config.device == "cuda" and config.fast_path != "preferred":
        raise invalid(
            "fast_path", f"is {config.fast_path}, but {sentence}. Set it to preferred to allow that{other_way}"
        )
    logger.warning("%s", sentence)
