"""The cache returns what was stored, and zeros elsewhere."""

import numpy as np
import pytest
import torch
from lockstep_engine.config import BLOCK_SIZE
from lockstep_engine.kv_cache import KvCache

BLOCKS = 9


def make(layers=2, kv_heads=3, head_dim=10, dtype=torch.float32, latent=0):
    return KvCache(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        blocks=BLOCKS,
        dtype=dtype,
        device=torch.device("cpu"),
        latent=latent,
    )


@pytest.mark.parametrize(("kv_heads", "head_dim", "dtype"), [(3, 10, torch.float32), (1, 64, torch.bfloat16)])
@pytest.mark.parametrize("seed", range(3))
def test_gather_returns_what_was_stored(seed, kv_heads, head_dim, dtype):
    """A few steps, each with tokens in random cells (later ones overwrite), against a dictionary."""
    torch.manual_seed(seed)
    chooser = np.random.default_rng(seed)
    cache = make(kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    zero = torch.zeros(kv_heads, head_dim, dtype=dtype)
    model = {}
    for _ in range(6):
        for layer in range(2):
            cells = chooser.choice(BLOCKS * BLOCK_SIZE, size=11, replace=False)
            keys, values = torch.randn(2, kv_heads, 11, head_dim).to(dtype)
            cache.store(layer, keys, values, torch.from_numpy(cells))
            for token, at in enumerate(cells.tolist()):
                model[layer, at] = keys[:, token], values[:, token]

    tables = np.array([[4, 0, -1], [8, 4, 7]], np.int32)
    for layer in range(2):
        keys, values = cache.gather(layer, cache.block_index(tables), 2 * kv_heads)
        assert keys.shape == values.shape == (2 * kv_heads, 3 * BLOCK_SIZE, head_dim)
        for sequence, table in enumerate(tables.tolist()):
            for position in range(3 * BLOCK_SIZE):
                at = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                key, value = (
                    model.get((layer, at), (zero, zero)) if table[position // BLOCK_SIZE] >= 0 else (zero, zero)
                )
                rows = slice(sequence * kv_heads, (sequence + 1) * kv_heads)
                assert torch.equal(keys[rows, position], key)
                assert torch.equal(values[rows, position], value)


def test_stored_tensors_may_be_views_of_another_order():
    cache, plain = make(), make()
    keys, values = torch.randn(2, 20, 3, 10)
    cells = torch.arange(20) + 30
    cache.store(1, keys.transpose(0, 1), values.transpose(0, 1), cells)
    plain.store(1, keys.transpose(0, 1).contiguous(), values.transpose(0, 1).contiguous(), cells)
    assert torch.equal(cache.keys, plain.keys)
    assert torch.equal(cache.values, plain.values)


def test_clear_zeroes_full_blocks_in_all_layers_and_no_others():
    cache = make()
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("inf"))
    cache.clear(torch.tensor([2, 7]))
    for block in range(BLOCKS):
        for tensor in (cache.keys, cache.values):
            cleared = (tensor[:, :, block] == 0).all()
            assert bool(cleared) == (block in (2, 7))


def test_the_padding_block_stays_zero():
    cache = make()
    cells = torch.arange(BLOCKS * BLOCK_SIZE)
    everything = torch.ones(3, len(cells), 10)
    cache.store(0, everything, everything, cells)
    assert (cache.keys[:, :, cache.padding_block] == 0).all()
    assert (cache.keys[0, :, : cache.padding_block] == 1).all()
    assert (cache.values[:, :, cache.padding_block] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_block_is_as_computed(dtype):
    cache = make(layers=5, kv_heads=2, head_dim=48, dtype=dtype)
    said = KvCache.block_bytes(layers=5, kv_heads=2, head_dim=48, dtype=dtype)
    assert cache.keys.nbytes + cache.values.nbytes == said * (BLOCKS + 1)


def test_values_of_a_latent_are_the_first_components_of_keys():
    cache = make(layers=2, kv_heads=1, head_dim=48, latent=32)
    keys = torch.randn(1, 3, 48)
    cache.store(1, keys, keys, torch.tensor([5, 16, 17]))
    index = cache.block_index(np.array([[0, 1]], np.int32))
    found_keys, found_values = cache.gather(1, index, 1)
    assert torch.equal(found_keys[:, [5, 16, 17]], keys)
    assert torch.equal(found_values[:, [5, 16, 17]], keys[..., :32])
    assert cache.keys.nbytes == KvCache.block_bytes(
        layers=2, kv_heads=1, head_dim=48, dtype=torch.float32, latent=32
    ) * (BLOCKS + 1)
    assert [tensor is cache.keys for tensor, _ in cache.block_tensors(cold=False)] == [True]
    cache.clear(torch.tensor([0, 1]))
    assert not cache.values.any()
