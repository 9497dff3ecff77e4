"""The names of KV blocks in a store outside of the machine: equal names mean equal contents, whoever computed them.

A block's name is the SHA-256 of its version and of a chain over the exact token ids up to its end. The chain begins
with all that decides what the ranks compute for these ids: the model, the numerics, the dtypes and the rule of
compression, the tenant. It does not say which heads a part has: the store keeps the parts of a block by their heads.
"""

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from lockstep_engine.blocks import BlockKey
from lockstep_engine.config import BLOCK_SIZE, EngineConfig, WindowedLayers
from lockstep_engine.control import Ready

_SCHEMA = "lockstep-kv-block-1"
"""Changes with the layout of a block's contents in host memory."""
_VERSIONS = {False: b"uncompressed", True: b"compressed"}


def seed(
    config: EngineConfig,
    model_digest: str,
    ready: Ready,
    tenant: str,
    adapter: str = "",
    windowed: WindowedLayers | None = None,
) -> bytes:
    """The beginning of the chain of a tenant's texts.

    Args:
        config: its compression decides about contents.
        model_digest: names the model, its configuration and its weights.
        ready: names the ranks' numerics. Without a fingerprint nothing promises equal bits, also not between two steps
            of the same worker; then the kind of device stands for it.
        tenant: the salt: equal texts of two tenants have no name in common.
        adapter: names weights that are added to the model's; empty: none.
        windowed: layers whose contents cold blocks do not have, and which come last in hot ones.
    """
    exact = ready.fingerprint if ready.deterministic else ""
    window = config.hot_window_with(windowed)
    parts = (
        f"{_SCHEMA}-latent" if ready.latent else _SCHEMA,
        model_digest,
        exact or f"not exact: {ready.device.partition(':')[0]}",
        ready.dtype,
        None if window is None else (window.sink, window.size),
        sorted(config.kv_compressed_layers),
        BLOCK_SIZE,
        adapter,
        tenant.encode("utf-8", "surrogatepass"),
    )
    layers = () if windowed is None else (windowed.numbers, config.hot_window is None)
    return hashlib.sha256(msgspec.msgpack.encode((*parts, *layers))).digest()


def chain(begin: bytes, keys: Iterable[BlockKey]) -> Iterator[bytes]:
    """The chain's links at the ends of consecutive blocks; `begin`: the seed, or the link before the first of them."""
    link = begin
    for key in keys:
        link = hashlib.sha256(link + key.tokens).digest()
        yield link


def block_name(link: bytes, *, cold: bool) -> bytes:
    """The name of a version of the block at whose end the chain has this link."""
    return hashlib.sha256(link + _VERSIONS[cold]).digest()
