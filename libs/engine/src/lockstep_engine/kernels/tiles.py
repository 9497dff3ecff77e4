"""Chooses the tiles of the attention kernels from what a GPU has, and over how many programs keys are split.

Does not load Triton. What kernels with these tiles need on each GPU is in docs/bench/gpu-kernels.md: compiled, not
measured. Tiles of decoding over fp8 blocks and those of the exact mode (`triton_linear`, `triton_exact_attention`) were
chosen by measurements on an H200 (docs/bench/gpu.md is what they reach); nothing was measured on other GPUs.
"""

from dataclasses import dataclass

import torch

MAX_SPLITS = 64
"""Most programs that share a tile's keys; a power of two."""
DECODE_PROGRAMS = 4
"""Programs of the decode kernel that a multiprocessor holds at once, with heads of 128, over hot or fp8 blocks: as
compiled for all GPUs below. A step has at most that many, so that none waits for another to end."""
MIN_KEYS_PER_SPLIT = 128
"""Fewer keys are not worth a program of their own: its partial result costs more than it gains."""
PRODUCT_ROWS = (16, 64, 128)
"""Most rows of each of the exact mode's tiles of products but the last. With more than the last of these, one program
has all segments of a sum (`triton_linear`)."""
LEAST_GROUP = 16
"""In products on weights of codes (`triton_coded`) a multiple of so many inputs share a scale, or all do: a step of a
sum has inputs of one group, and the matrix units take 16."""
_LARGE_SHARED_BYTES = 160 * 1024
"""GPUs have either 99 KiB of shared memory for a program, or at least this."""
_LATENT_ROWS = 16
"""Rows of a program of latent attention: its sums are 512 wide and its queries 576, and more rows spill registers in
the loop over keys..."""
_LATENT_WIDE_ROWS = 64
"""...but where the matrix units read queries and keys from shared memory."""
_LATENT_WIDE_SHARED_BYTES = 224 * 1024
"""Shared memory of the GPUs that do so, and have room for it."""


@dataclass(frozen=True)
class GpuLimits:
    """What a GPU of a compute capability has: NVIDIA's table of technical specifications."""

    shared_bytes: int
    """Shared memory of a program."""
    processor_shared_bytes: int
    """Shared memory of a multiprocessor; each program on it takes 1 KiB more than it asks for."""
    warps: int
    """Warps of a multiprocessor."""
    registers: int = 65536
    """32-bit registers of a multiprocessor."""

    def programs(self, registers: int, shared_bytes: int, warps: int) -> int:
        """How many programs fit a multiprocessor at once.

        Args:
            registers: of a thread; a warp gets them in units of 256.
            shared_bytes: of a program.
            warps: of a program.
        """
        by_registers = self.registers // (-(-registers * 32 // 256) * 256 * warps)
        by_shared = self.processor_shared_bytes // (shared_bytes + 1024)
        return min(by_registers, by_shared, self.warps // warps)


LIMITS = {
    80: GpuLimits(166_912, 167_936, 64),
    86: GpuLimits(101_376, 102_400, 48),
    89: GpuLimits(101_376, 102_400, 48),
    90: GpuLimits(232_448, 233_472, 64),
    100: GpuLimits(232_448, 233_472, 64),
}
"""By compute capability, times ten: A100; A10 and 3090; L4, L40S and 4090; H100 and H200; B200."""


def limits_of(capability: int, shared_bytes: int) -> GpuLimits:
    """The row of a GPU that may not be in the table: then that of the latest one before it with as much shared memory.

    Args:
        capability: compute capability, times ten.
        shared_bytes: what the device says that a program may have.
    """
    if capability in LIMITS:
        return LIMITS[capability]
    enough = [each for arch, each in LIMITS.items() if arch <= capability and each.shared_bytes <= shared_bytes]
    return enough[-1] if enough else LIMITS[86]


@dataclass(frozen=True)
class Shape:
    """Tuning parameters of a program. They change no result beyond rounding."""

    keys: int
    """Keys in a tile; a multiple of 16."""
    warps: int
    stages: int


def shape_for(
    dim_pad: int, block_m: int, dtype: torch.dtype, shared_bytes: int, *, scaled: bool = False, native: bool = True
) -> Shape:
    """A shape that fits the registers of GPUs since Ampere, and a program's shared memory.

    Args:
        dim_pad: width of a head, rounded up to a power of two.
        block_m: rows of a tile of queries.
        dtype: the queries' type.
        shared_bytes: what a program may have on this GPU.
        scaled: cold blocks are fp8.
        native: the GPU converts fp8 itself; arithmetic in its place needs registers.
    """
    small = shared_bytes < _LARGE_SHARED_BYTES
    if dtype is torch.float32:
        return Shape(keys=32 if dim_pad <= 128 and not small else 16, warps=4, stages=1)
    if block_m <= 32:  # decode: several programs on a multiprocessor hide each other's waits
        # Measured on an H200, torch 2.11, Triton 3.6, Llama-3-8B's heads, 64 sequences of 8192 tokens: fp8 blocks take
        # 402 us with two warps, 646 with four.
        warps = 2 if scaled and block_m <= 16 and dim_pad <= 128 else 4
        if dim_pad > 128 and block_m > 16:  # prefill on some GPUs: see `triton_attention.queries_a_tile`
            warps = 8
        return Shape(keys=_decode_keys(dim_pad, small=small), warps=warps, stages=2)
    if dim_pad > 128:
        return Shape(keys=16 if small else 32, warps=8, stages=1 if small else 2)
    narrow = dim_pad > 64 and (small or (scaled and not native))
    return Shape(keys=32 if narrow else 64, warps=8 if block_m > 64 else 4, stages=2)


def _decode_keys(dim_pad: int, *, small: bool) -> int:
    if dim_pad <= 64:
        return 64
    return 16 if small and dim_pad > 128 else 32


def splits_for(tiles: int, kv_heads: int, context: int, programs: int) -> int:
    """Over how many programs a decoding sequence's keys are split, so that they fill the GPU.

    Args:
        tiles: decoding sequences of the step.
        kv_heads: key/value heads on this rank.
        context: most keys of a sequence; where a step is recorded, the longest that it may have.
        programs: how many the GPU holds at once.
    """
    wanted = programs // (tiles * kv_heads)
    return max(1, min(MAX_SPLITS, wanted, -(-context // MIN_KEYS_PER_SPLIT)))


def latent_rows(needed: int, dtype: torch.dtype, shared_bytes: int, *, exact: bool, scaled: bool) -> int:
    """Rows of a program of latent attention. In the exact mode all programs have as many, so that all of their products
    are made by one instruction.

    Args:
        needed: query heads of the tokens that share a program, or several if they do not fit in one.
        dtype: the queries' type.
        shared_bytes: what a program may have on this GPU.
        exact: in the exact mode.
        scaled: cold blocks are fp8, whose conversion takes registers.
    """
    is_wide = shared_bytes >= _LATENT_WIDE_SHARED_BYTES and dtype is not torch.float32
    return _LATENT_WIDE_ROWS if is_wide and needed > _LATENT_ROWS and not (exact or scaled) else _LATENT_ROWS


def latent_shape(dtype: torch.dtype) -> Shape:
    """The shape of a program of latent attention, the same for both modes: it fits 99 KiB of shared memory with 16
    rows, and registers but for some words that are put aside between the loops. In float32 some KiB a thread are in
    the usual mode.
    """
    if dtype is torch.float32:
        return Shape(keys=16, warps=8, stages=1)
    return Shape(keys=32, warps=8, stages=2)
