"""Names of KV blocks outside of the machine: equal only where the contents are."""

from dataclasses import replace

import msgspec
import pytest
from lockstep_engine import EngineConfig
from lockstep_engine.blocks import extend_keys
from lockstep_engine.config import SlidingWindow, WindowedLayers
from lockstep_engine.control import Ready
from lockstep_engine.remote_keys import block_name, chain, seed
from scripted_ranks import words

CONFIG = EngineConfig(model="m")
READY = Ready(True, "cpu", "float32", "bits")


def names(tokens, config=CONFIG, digest="model", ready=READY, tenant="", adapter="", *, cold=False):
    keys = []
    extend_keys(keys, tokens, tenant)
    return [block_name(link, cold=cold) for link in chain(seed(config, digest, ready, tenant, adapter), keys)]


def test_a_name_depends_on_all_tokens_before_the_end_of_its_block():
    text = words(64, 1)
    first = names(text)
    assert len(set(first)) == 4
    assert names([*text, 5])[:4] == first
    changed = names([*text[:20], text[20] + 1, *text[21:]])
    assert changed[0] == first[0]
    assert not set(changed[1:]) & set(first)


@pytest.mark.parametrize(
    "other",
    [
        {"digest": "another"},
        {"tenant": "a"},
        {"adapter": "fine"},
        {"cold": True},
        {"config": replace(CONFIG, kv_compression="none")},
        {"config": replace(CONFIG, kv_hot_window=128)},
        {"config": replace(CONFIG, kv_compression="per_layer", kv_compressed_layers=(1,))},
        {"ready": msgspec.structs.replace(READY, fingerprint="other bits")},
        {"ready": msgspec.structs.replace(READY, dtype="bfloat16")},
        {"ready": msgspec.structs.replace(READY, deterministic=False)},
        {"ready": msgspec.structs.replace(READY, latent=32)},
    ],
    ids="-".join,
)
def test_names_differ_with_what_decides_about_contents(other):
    assert not set(names(words(32, 1))) & set(names(words(32, 1), **other))


def test_names_differ_with_the_layers_that_cold_blocks_lack():
    configs = CONFIG, replace(CONFIG, kv_compression="none"), replace(CONFIG, kv_compression="immediate")
    layers = None, *(WindowedLayers(SlidingWindow(60), numbers, 3) for numbers in ((0,), (0, 1)))
    assert len({seed(config, "model", READY, "", windowed=each) for config in configs for each in layers}) == 9


def test_without_exact_bits_ranks_of_one_kind_share():
    """Their tokens do not promise more without the store."""
    first, second, cpu = (Ready(False, device, "bfloat16", "") for device in ("cuda:0", "cuda:1", "cpu"))
    assert names(words(32, 1), ready=first) == names(words(32, 1), ready=second)
    assert not set(names(words(32, 1), ready=first)) & set(names(words(32, 1), ready=cpu))


def test_the_names_are_those_of_the_schema():
    """They change only together with the schema: other workers have stored blocks under them."""
    assert names([*range(16)])[0].hex() == "45cbd82a9bafdab3ad8f4400e5e733a91410636d89a9ea8cb67f4007134e967a"
