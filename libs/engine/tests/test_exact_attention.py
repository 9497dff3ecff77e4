"""Attention of the exact mode: a query's bits do not depend on chunks, on other sequences or on the number of
programs.
"""

from functools import partial

import pytest
import torch
from fast_cases import fast_if, further
from lockstep_engine.attention_triton import TritonAttention
from lockstep_engine.config import HotWindow
from lockstep_engine.kernels import triton_attention, triton_exact_attention
from texts import Texts, assert_all_close, dense
from triton_device import GPU

pytestmark = pytest.mark.skipif(GPU, reason="texts lie on the CPU")

exact = partial(TritonAttention, exact=True)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """So that short texts have several; a tile of float32 has 32 keys. Prefill has more rows than decoding, as with 16
    bits on a GPU."""
    monkeypatch.setattr(triton_exact_attention, "SEGMENT", 32)
    monkeypatch.setitem(triton_exact_attention.ROWS, torch.float32, 32)


OPTIONS = [
    further({}),
    fast_if(True, {"window": 20}),
    further({"soft_cap": 20.0}),
    fast_if(False, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    further({"hot_window": HotWindow(1, 1)}),
    fast_if(False, {"hot_window": HotWindow(0, 0)}),
    fast_if(False, {"hot_window": HotWindow(1, 2), "window": 50}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(map(str, each)))
@pytest.mark.usefixtures("ordered_products")
def test_any_steps_give_the_same_bits(options, monkeypatch):
    texts = Texts([20, 100, 41], kv_heads=1, seed=4, scale=3.0)
    at_once = texts.attend(exact, texts.at_once(), **options)
    assert_all_close(at_once, texts.attend(TritonAttention, texts.at_once(), **options))
    for seed, programs in ((5, 1), (6, 3)):
        monkeypatch.setattr(triton_attention, "splits_for", lambda *_, programs=programs: programs)
        other = texts.attend(exact, texts.in_random_chunks(seed), **options)
        for ours, expected in zip(other, at_once, strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("kind", [exact, TritonAttention], ids=["exact", "fast"])
@pytest.mark.parametrize(
    "hot_window",
    [
        fast_if(True, None),
        fast_if(True, HotWindow(1, 1)),
        fast_if(False, HotWindow(0, 0)),
        fast_if(False, HotWindow(2, 2)),
    ],
    ids=str,
)
def test_what_lies_before_the_window_is_not_read(kind, hot_window, monkeypatch):
    monkeypatch.setattr(triton_attention, "splits_for", lambda *_: 2)
    texts = Texts([20, 130], kv_heads=1, seed=4)
    steps, options = texts.in_random_chunks(5), {"hot_window": hot_window, "window": 50}
    kept, dropped = (texts.attend(kind, steps, drops=each, **options) for each in (False, True))
    assert all(torch.equal(*each) for each in zip(kept, dropped, strict=True))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.slow
def test_token_by_token_gives_the_bits_of_a_chunk(ordered_products, monkeypatch):
    monkeypatch.setattr(triton_attention, "splits_for", lambda *_: 2)
    texts = Texts([70, 9], kv_heads=2, seed=7)
    at_once = texts.attend(exact, texts.at_once(), hot_window=HotWindow(1, 1))
    alone = texts.attend(exact, texts.one_by_one(), hot_window=HotWindow(1, 1))
    assert all(torch.equal(*each) for each in zip(alone, at_once, strict=True))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.slow
def test_the_fast_mode_does_not_promise_it():
    """Shows that this test would notice: splits and tiles of the fast kernels follow the batch."""
    texts = Texts([150, 9], kv_heads=1, seed=4, scale=3.0)
    at_once = texts.attend(TritonAttention, texts.at_once())
    by_one = texts.attend(TritonAttention, texts.one_by_one())
    assert not all(torch.equal(*each) for each in zip(by_one, at_once, strict=True))


@pytest.mark.slow
def test_many_query_heads_to_a_key_head_fill_a_program_each():
    assert triton_exact_attention.queries_a_tile(71, torch.bfloat16) == 1
    assert triton_exact_attention.queries_a_tile(4, torch.bfloat16) == 16
    texts = Texts([40], heads=20, kv_heads=1, seed=2)
    assert_all_close(texts.attend(exact, texts.in_random_chunks(1)), dense(texts))
