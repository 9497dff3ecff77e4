"""A token's logits have the same bits alone, in any chunk and beside any neighbours: every architecture, on this
machine as it is. `make test-bits` runs these tests with and without the kernels, and under modes of the libraries.
"""

import pytest
import torch
from checkpoints import CASES, VOCABULARY, make
from fast_cases import fast_if
from in_process import InProcessGroup
from lockstep_engine.config import HotWindow
from lockstep_engine.kernels import cpu
from texts import Texts, assert_same_bits, by_torch

pytestmark = pytest.mark.bits

SERVED = [name for name, case in CASES.items() if case.tps]
KINDS = ("llama", "llama-odd-heads", "mixtral", "gpt_oss", "deepseek_v3", "bloom", "gemma2", "falcon-new", "olmo2")
"""One of each kind: plain, odd heads, mixtures, sinks, latents, ALiBi, soft caps, shared heads, norms over ranks."""
CHUNKS = ((70,), (40, 20, *[1] * 10), (1, 2, 3, 4, 5, 6, 7, 8, 9, 25), (16, 16, 16, 22))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def measure(path, tp=1, **options):
    numerics = InProcessGroup(path, tp, **options).measure()
    assert numerics.deterministic
    return numerics.fingerprint


def in_chunks(group, ids, lengths):
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return torch.cat(
        [group.logits(ids[start : start + length], start) for start, length in zip(starts, lengths, strict=True)]
    )


@pytest.mark.parametrize("options", [{}, {"window": 20}, {"soft_cap": 30.0}], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_chunks_and_neighbours_do_not_matter_to_attention_in_torch(kv_heads, options):
    texts = Texts([1, 5, 15, 16, 17, 31, 32, 33, 130, 70], kv_heads=kv_heads, dim=32, seed=2)
    expected = texts.attend(by_torch, texts.at_once(), **options)
    assert_same_bits(texts.attend(by_torch, texts.one_by_one(), **options), expected)
    for seed in range(2):
        assert_same_bits(texts.attend(by_torch, texts.in_random_chunks(seed), **options), expected)


@pytest.mark.parametrize("name", [fast_if(name in KINDS, name) for name in SERVED])
def test_chunks_and_neighbours_do_not_matter(tmp_path, threads, name):
    path = make(name, tmp_path)[0]
    measured = set()
    for count in (1, 2):
        threads(count)
        measured.add(measure(path))
    assert len(measured) == 1 or cpu.build is None  # with the kernels the number of threads does not matter either


@pytest.mark.parametrize("name", [fast_if(name in KINDS, name) for name in SERVED])
def test_chunks_and_neighbours_do_not_matter_in_16_bits(tmp_path, name):
    measure(make(name, tmp_path)[0], dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        fast_if(dtype is torch.bfloat16, name, dtype)
        for name in KINDS
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ],
    ids=str,
)
def test_chunks_and_neighbours_do_not_matter_on_two_ranks_or_with_compression(tmp_path, threads, name, dtype):
    threads(2)
    path = make(name, tmp_path)[0]
    measure(path, 2, dtype=dtype)
    measure(path, dtype=dtype, hot_window=HotWindow(1, 2))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        fast_if(dtype is torch.float32 or name in ("llama", "gpt_oss", "deepseek_v3"), name, dtype)
        for name in KINDS
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_a_prompt_may_be_cut_anywhere(tmp_path, name, dtype):
    group = InProcessGroup(make(name, tmp_path)[0], 1, dtype=dtype)
    ids = torch.randint(2, VOCABULARY, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    first, *others = (in_chunks(group, ids, lengths) for lengths in CHUNKS)
    for other in others:
        assert torch.equal(other, first)
