"""The sampler with masks: only allowed tokens are chosen, with the probabilities that they have among themselves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_engine.draws import uniform
from lockstep_engine.plan import mask_words
from lockstep_engine.sampling import Sampler, _unpack, _unpack_on_device
from test_sampler_rows import CPU, random_logits, row_sampling, survivors

VOCAB = 100


def pack(allowed, vocabulary=VOCAB):
    """The words of a mask."""
    bits = np.zeros(32 * mask_words(vocabulary), np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def sample(logits, samplings, allowed, draws, emitted=0):
    """Ids and log probabilities for rows of logits [rows, vocabulary]; `allowed`: by row, None: all tokens."""
    sampler = Sampler(len(samplings), logits.shape[1], CPU)
    for each in samplings:
        sampler.add(each)
    masked = [row for row, each in enumerate(allowed) if each is not None]
    return sampler.sample(
        torch.as_tensor(logits),
        np.arange(len(samplings), dtype=np.int32),
        np.full(len(samplings), emitted, np.int32),
        np.array(draws, np.float64),
        np.array(masked, np.int32) if masked else None,
        np.stack([pack(allowed[row], logits.shape[1]) for row in masked]) if masked else None,
    ).read()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    allowed=st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.sampled_from([1e-6, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    penalty=st.sampled_from([0.0, -2.0, 2.0]),
    bias=st.sampled_from([0.0, 1000.0, -1000.0]),
    logprobs=st.sampled_from([-1, 0, 5]),
)
def test_only_allowed_tokens_are_chosen_whatever_the_settings(
    seed, allowed, temperature, top_k, top_p, min_p, repetition_penalty, penalty, bias, logprobs
):
    rng = np.random.default_rng(seed)
    sampling = row_sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=penalty,
        presence_penalty=penalty,
        logit_bias={int(token): bias for token in rng.integers(0, VOCAB, 5)},
        logprobs=logprobs,
        prompt_ids=rng.integers(0, VOCAB, 10).tolist(),
        emitted_ids=rng.integers(0, VOCAB, 10).tolist(),
    )
    logits = random_logits(seed, VOCAB, scale=10)[None]
    (token,), (entry,) = sample(logits, [sampling], [allowed], [uniform(seed, 1)])
    assert token in allowed
    if logprobs >= 0:
        assert math.isfinite(entry.chosen)
        assert set(entry.top_ids) <= allowed
        assert len(entry.top_ids) == min(logprobs, len(allowed))
        assert all(map(math.isfinite, entry.top_logprobs))


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1)])
def test_filters_see_the_allowed_tokens_only(top_k, top_p, min_p):
    """The distribution is that of the reference, given the allowed tokens as its vocabulary."""
    allowed = sorted({3, 8, 15, 31, 32, 63, 64, 77, 99})
    logits = random_logits(11, VOCAB)
    kept = survivors(logits[allowed], top_k=top_k, top_p=top_p, min_p=min_p)
    draws = [(number + 0.5) / 2000 for number in range(2000)]
    sampling = [row_sampling(number, top_k=top_k, top_p=top_p, min_p=min_p) for number in range(len(draws))]
    ids, _ = sample(np.repeat(logits[None], len(draws), 0), sampling, [allowed] * len(draws), draws)
    whole = sum(kept.values())
    for index, token in enumerate(allowed):
        assert ids.count(token) / len(draws) == pytest.approx(kept.get(index, 0) / whole, abs=2e-3)
    assert set(ids) == {allowed[index] for index in kept}


def test_log_probabilities_are_those_among_the_allowed_tokens():
    allowed = [5, 40, 90]
    logits = random_logits(2, VOCAB)
    _, (entry,) = sample(logits[None], [row_sampling(temperature=0.0, logprobs=20)], [allowed], [0.0])
    expected = torch.log_softmax(torch.tensor(logits[allowed]), 0).sort(descending=True)
    assert entry.top_logprobs == pytest.approx(expected.values.tolist(), abs=1e-5)
    assert entry.top_ids == [allowed[index] for index in expected.indices.tolist()]
    assert entry.chosen == entry.top_logprobs[0]


@pytest.mark.parametrize(
    "settings_", [{}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 7}, {"repetition_penalty": 1.3}]
)
def test_rows_without_a_mask_keep_their_bits(settings_):
    samplings = [row_sampling(row, logprobs=20, prompt_ids=[1], emitted_ids=[2], **settings_) for row in range(4)]
    logits = np.stack([random_logits(row, VOCAB) for row in range(4)])
    draws = [uniform(1, row) for row in range(4)]
    alone = sample(logits, samplings, [None] * 4, draws)
    beside = sample(logits, samplings, [None, {1}, None, {2, 3}], draws)
    for part in (0, 1):
        assert [beside[part][row] for row in (0, 2)] == [alone[part][row] for row in (0, 2)]
    assert beside[0][1] == 1


@pytest.mark.parametrize("vocabulary", [31, 32, 33, 64, 100])
def test_masks_are_unpacked_alike_on_every_device(vocabulary):
    rng = np.random.default_rng(vocabulary)
    masks = rng.integers(-(2**31), 2**31, (3, mask_words(vocabulary))).astype(np.int32)
    expected = [[bool(int(row[token // 32]) >> token % 32 & 1) for token in range(vocabulary)] for row in masks]
    assert _unpack(masks, vocabulary, CPU).tolist() == expected
    assert _unpack_on_device(masks, vocabulary, CPU).tolist() == expected
