"""The KV cache of a rank: of what form it is for a model, and how many blocks of it there is memory for."""

from typing import Any

import torch
from lockstep_common.errors import invalid

from lockstep_engine.blocks import PoolSizes
from lockstep_engine.control import RankSpec
from lockstep_engine.kernels import gpu
from lockstep_engine.kv_cache import KvCache
from lockstep_engine.models import BuiltModel
from lockstep_engine.sizes import host_sizes, kv_memory_bytes, pool_sizes
from lockstep_engine.virtual_shards import held_shards


class CacheSizing:
    """Makes caches for a rank's part of a model, in the type that it computes in."""

    def __init__(self, spec: RankSpec, model: BuiltModel, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._total_kv_heads = model.total_kv_heads
        # The compiled CPU kernel reads values by token, and those among keys lie by component.
        by_gpu = device.type != "cpu" or gpu.usable(device, dtype, model.head_dim, model.latent)
        self._hot_layers = () if spec.model.windowed is None else spec.model.windowed.numbers
        self._geometry: dict[str, Any] = {
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "dtype": dtype,
            "latent": model.latent if by_gpu else 0,
        }

    def make(self, blocks: PoolSizes) -> KvCache:
        """A cache of such pools."""
        return KvCache(
            **self._geometry,
            blocks=blocks.hot,
            cold_blocks=blocks.cold,
            hot_window=self._spec.compressed,
            compressed_layers=self._spec.config.kv_compressed_layers or None,
            hot_layers=self._hot_layers,
            device=self._device,
        )

    def affordable(self, free_bytes: int | None, reserved_bytes: int) -> PoolSizes:
        """Blocks of the KV cache that there is memory for.

        Args:
            free_bytes: of the device; None: it is the CPU.
            reserved_bytes: what recorded steps and others take beside it.

        Raises:
            LockstepError: `kv_compressed_layers` names a layer that the model does not have.
        """
        config, layers = self._spec.config, self._geometry["layers"]
        unknown = [layer for layer in config.kv_compressed_layers if layer >= layers]
        if unknown:
            raise invalid("kv_compressed_layers", f"names layer {unknown[0]}; the model has {layers}, counted from 0")
        memory = kv_memory_bytes(config, free_bytes, reserved_bytes)
        compressed = () if self._spec.compressed is None else config.kv_compressed_layers or None
        geometry = self._geometry | {"layers": layers - len(self._hot_layers)}
        cold = KvCache.cold_block_bytes(**geometry, compressed_layers=compressed)
        sizes = KvCache.block_bytes(**self._geometry), cold
        pools = pool_sizes(self._spec, memory, *sizes)
        # Also on a GPU, whose sums have no shards: ranks without exact bits share with those of another tp as well.
        units = held_shards(self._total_kv_heads, config.tp, config.tp_shards)
        host = host_sizes(config, self._device.type, bool(pools.cold), *sizes, units)
        return PoolSizes(pools.hot, pools.cold, host)
