"""What a rank tests at its start, before it serves: its kernels, its numerics and its pace. It also warms up."""

import logging
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep_engine.attention import StepLayout
from lockstep_engine.canary import Numerics, measure
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.control import RankSpec
from lockstep_engine.kernel_check import check_kernels
from lockstep_engine.kernels import cpu, gpu
from lockstep_engine.kernels.tiles import PRODUCT_ROWS
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.linear import multiplies_integers
from lockstep_engine.models import BuiltModel
from lockstep_engine.sizes import canary_tokens

logger = logging.getLogger("lockstep.engine")

Forward = Callable[[torch.Tensor, StepLayout, NDArray[np.int64]], torch.Tensor]
"""See `Rank.forward`."""


class SelfTest:
    """The tests of one rank's start.

    Args:
        spec: of the rank.
        model: its part of the model.
        cache: its KV cache, in which no block is used yet.
        forward: computes a step.
        device, dtype: where and in what type it does.
        deterministic: whether bits must not depend on the batch.
    """

    def __init__(
        self,
        spec: RankSpec,
        model: BuiltModel,
        cache: KvCache,
        forward: Forward,
        *,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool,
    ) -> None:
        self._spec = spec
        self._model = model
        self._cache = cache
        self._forward = forward
        self._device = device
        self._dtype = dtype
        self._deterministic = deterministic

    def run(self, forward_by_torch: Forward, *, by_kernels: bool) -> Numerics:
        """Test what will serve, and warm it up.

        Args:
            forward_by_torch: as `forward`, without the kernels.
            by_kernels: whether the GPU's kernels compute.


        Raises:
            LockstepError: the GPU's kernels do not compute what torch computes.
        """
        if by_kernels:
            tokens, vocab_size = self._tokens(), self._model.vocab_size
            check_kernels(self._spec.rank, self._forward, forward_by_torch, self._cache, vocab_size, tokens)
        numerics = self._measure()
        if self._deterministic and not numerics.deterministic:
            logger.warning(
                "the self-test found bits that depend on the batch or on chunks: streams cannot be continued exactly"
            )
        if by_kernels:
            self._warm_up()
        return numerics

    def _warm_up(self) -> None:
        """Run the GPU's kernels in the forms that the canary does not use: with keys split over programs and not, and
        for blocks that are compressed after a step. Serving must not have to build a kernel.
        """
        cache = self._cache
        longest = -(-self._spec.model.context_length // BLOCK_SIZE)
        # One long sequence, whose keys are split; then as many as there can be, whose keys are not.
        for count, width in ((1, longest), (self._spec.config.max_seqs, 1)):
            tables = np.zeros((count, width), np.int32)
            layout = StepLayout(tables[:, 0].copy(), np.ones(count, np.int32), tables)
            self._forward(torch.zeros(count, dtype=torch.int64, device=self._device), layout, np.arange(count))
        if cache.hot_window is not None and cache.cold_blocks:
            cache.compress(np.zeros((1, 2), np.int32))
        cache.clear(torch.zeros(1, dtype=torch.int64, device=self._device))

    def _measure(self) -> Numerics:
        """Run the self-test. It also warms up what is allocated or selected at first use."""
        cache, hot_window, config = self._cache, self._cache.hot_window, self._spec.config
        description = f"{self._dtype} {hot_window} {sorted(config.kv_compressed_layers)}"
        if hot_window is not None and cache.hot_layers:
            description += f" hot layers {cache.hot_layers}"
        if self._device.type == "cuda":
            # A short text does not show whether another GPU's products, or another compiler's, agree on every input.
            architecture = torch.cuda.get_device_capability(self._device)
            description += (
                f" cuda {architecture} torch {torch.__version__} triton {version('triton')} exact {gpu.EXACT_KERNELS}"
            )
        elif config.tp_shards > 1:
            description += f" shards {config.tp_shards}"
        if multiplies_integers(self._model.module):
            description += " integers"
        if self._device.type == "cpu" and cpu.build is None:
            # torch's routines: a short text does not show whether another machine's agree on every input, nor whether
            # they do for matrices of the width that another number of ranks has.
            capability = torch.backends.cpu.get_cpu_capability()
            description += f" torch {torch.__version__} {capability} {torch.get_num_threads()} tp {config.tp}"
        return measure(
            self._forward,
            cache,
            self._model.vocab_size,
            self._tokens(),
            description,
            neighbours=self._deterministic,
            chunks=self._exact_gpu,
            together=[most + 1 for most in PRODUCT_ROWS if most < config.step_tokens] if self._exact_gpu else [],
        )

    @property
    def _exact_gpu(self) -> bool:
        return self._deterministic and self._model.on_gpu

    def _tokens(self) -> int:
        """Length of the texts of a start's tests: the cache has blocks for it."""
        cache, hot_window = self._cache, self._cache.hot_window
        blocks = cache.padding_block
        if hot_window is not None:
            blocks = min(blocks, cache.cold_blocks + hot_window.blocks)
        return max(2, min(canary_tokens(self._spec, exact_gpu=self._exact_gpu), blocks * BLOCK_SIZE))
