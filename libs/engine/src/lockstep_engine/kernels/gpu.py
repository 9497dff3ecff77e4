"""Decides whether the Triton kernels can run. Does not load Triton."""

import logging
import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch

logger = logging.getLogger("lockstep.engine")

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 256
_WORD = 4
"""Components of fp8 that are read at once."""
EXACT_KERNELS = 1
"""Version of the arithmetic of the exact mode's kernels (`triton_linear`, `triton_rows`, `triton_exact_attention`):
part of the fingerprint. A change that may give other bits needs the next number."""


def usable(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels can serve a model of this type with heads of this width on this device."""
    fits = device.type == "cuda" and dtype in _TYPES and head_dim % _WORD == 0 and head_dim <= _WIDEST
    return fits and can_build()


@cache
def can_build() -> bool:
    """Whether Triton is installed, and finds a compiler for the C code by which it launches kernels."""
    if find_spec("triton") is None:
        return False
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return True
    logger.warning("Triton finds no C compiler (CC, gcc, clang): attention is computed by torch, without CUDA graphs")
    return False
