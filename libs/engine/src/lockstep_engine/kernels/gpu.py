"""Decides whether the Triton kernels can run, and keeps the reason if they cannot. Triton is loaded for a GPU only."""

import importlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from lockstep_common.errors import ErrorCode, LockstepError

from lockstep_engine.device_failures import is_of_device, is_of_kernel
from lockstep_engine.kernels import prebuilt

logger = logging.getLogger("lockstep.engine")

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 256
_WIDEST_LATENT, _WIDEST_REST = 512, 64
"""Of latent attention: a latent, and what keys have beside it."""
_WORD = 4
"""Components of fp8 that are read at once."""
_MAX_QUOTED_CHARS = 300

GIVEN_UP: list[str] = []
"""Why kernels are not used any more in this process, though nothing speaks against them here."""
EXACT_KERNELS = 2
"""Version of the arithmetic of the exact mode's kernels (`triton_linear`, `triton_rows`, `triton_exact_attention`):
part of the fingerprint. A change that may give other bits needs the next number."""


def usable(device: torch.device, dtype: torch.dtype, head_dim: int, latent: int = 0) -> bool:
    """Whether the kernels can serve a model of this type with heads of this width on this device; `latent`: as in
    `KvCache`.
    """
    return problem(device, dtype, head_dim, latent) is None


def problem(device: torch.device, dtype: torch.dtype, head_dim: int, latent: int = 0) -> str | None:
    """Why the kernels cannot serve such a model on this device; None: they can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    if dtype not in _TYPES:
        return f"there are no kernels for {dtype}"
    if latent:
        rest = head_dim - latent
        if latent % _WORD or rest % _WORD or latent > _WIDEST_LATENT or not 0 < rest <= _WIDEST_REST:
            return (
                f"latents are {latent} wide and keys {rest} beside them; kernels take multiples of {_WORD} up to "
                f"{_WIDEST_LATENT} and {_WIDEST_REST}"
            )
    elif head_dim % _WORD or head_dim > _WIDEST:
        return f"heads are {head_dim} wide; kernels take multiples of {_WORD} up to {_WIDEST}"
    return build_problem() or (GIVEN_UP[0] if GIVEN_UP else None)


@cache
def build_problem() -> str | None:
    """Why Triton cannot launch kernels here; None: nothing is missing, as far as can be checked without a GPU.

    Triton launches kernels through a module in C, which is prebuilt in images and else needs a C compiler.
    """
    if find_spec("triton") is None:
        return "Triton is not installed"
    where = prebuilt.folder()
    problem = None if where is None else prebuilt.module_problem(where)
    if where is not None and problem is None:
        return None
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        if problem is not None:
            logger.warning("%s: a C compiler is used instead", problem)
        return None
    return problem or "Triton finds no C compiler (CC, gcc, clang) and no prebuilt module"


def give_up(reason: str) -> None:
    """Do without the kernels from now on, in this process."""
    GIVEN_UP.append(reason)


def try_attention(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    per_head: int,
    *,
    compressed: bool,
    windowed: bool = False,
    hot_alone: bool = False,
    exact: bool = False,
    latent: int = 0,
) -> None:
    """Load the kernels of attention for a model and launch them once, before anything relies on them. If one cannot be,
    `problem` says so from now on. Errors of memory and of the device pass.

    Args:
        device: a GPU.
        dtype: the model's.
        head_dim: width of a head.
        per_head: query heads of one key/value head.
        compressed: whether the cache has cold blocks.
        windowed: whether some layers see a window of keys only.
        hot_alone: whether these have no cold blocks.
        exact: whether the exact mode's kernels will serve.
        latent: as in `KvCache`.
    """
    if problem(device, dtype, head_dim, latent) is not None:
        return
    kernel = "Triton"
    try:
        prebuilt.activate()
        launches = importlib.import_module("lockstep_engine.kernels.launches")  # loads Triton
        for window in (False, True) if windowed else (False,):
            is_compressed = compressed and not (window and hot_alone)
            form = {"compressed": is_compressed, "window": window, "exact": exact, "latent": latent}
            for call in launches.attention_calls(per_head, head_dim, dtype, **form):
                kernel = call.kernel
                call.launch(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    # Triton raises OutOfResources, CompilationError, CalledProcessError, AssertionError, ImportError and others, which
    # have no base of their own.
    except Exception as error:
        if is_of_device(error):  # it says nothing about the kernel: the ranks are started again
            raise
        give_up(f"kernel {kernel} cannot run: {first_line(error)}")


@contextmanager
def refusing_failures(rank: int, *, used: bool = True) -> Iterator[None]:
    """Around the work of a rank's start that launches the kernels that will serve. One that cannot be built or launched
    now never can be, so the rank refuses to serve and is not started again. Other errors pass: those of memory, of a
    peer, of the device.

    Args:
        rank: named by the error.
        used: whether the kernels serve; else all errors pass.

    Raises:
        LockstepError: INTERNAL with the reason.
    """
    try:
        yield
    except Exception as error:
        if not used or not is_of_kernel(error):
            raise
        said = f"rank {rank}: the GPU's kernels cannot serve this model: {first_line(error)}"
        raise LockstepError(ErrorCode.INTERNAL, said) from error


def first_line(error: BaseException) -> str:
    """An error in one line, with its type: Triton's messages have many, and may end in the kernel's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"[:_MAX_QUOTED_CHARS]
