"""The kernels that choose tokens, against the sampler's twin in torch."""

import math

import numpy as np
import pytest
import torch
from fast_cases import fast_if, further
from lockstep_engine.kernels import triton_sampling
from lockstep_engine.kernels.triton_sampling import Tuning
from lockstep_engine.sampling import Sampler
from lockstep_engine.transfers import to_device, to_device_at_once
from test_sampler_rows import row_sampling
from triton_device import DEVICE

FIELDS = [
    {},
    {"temperature": 0},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_k": 1},
    {"top_k": 7, "top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1e-30},
    {"temperature": 20, "top_p": 0.95},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {3: 2.0}},
]


def chosen(logits, *, kernels):
    rows, vocabulary = logits.shape
    sampler = Sampler(rows, vocabulary, DEVICE, kernels=kernels)
    for row in range(rows):
        sampler.add(row_sampling(row, **FIELDS[row % len(FIELDS)]))
    draws = np.random.default_rng(7).random(rows)
    return sampler.sample(logits, np.arange(rows, dtype=np.int32), np.zeros(rows, np.int32), draws).read()[0]


def random_rows(vocabulary):
    return torch.randn(len(FIELDS), vocabulary, generator=torch.Generator().manual_seed(1)) * 3


def tied_rows(vocabulary):
    return torch.randint(0, 3, (len(FIELDS), vocabulary), generator=torch.Generator().manual_seed(2)).float()


def few_allowed(vocabulary):
    logits = torch.full((len(FIELDS), vocabulary), -math.inf)
    logits[:, 5], logits[:, 17] = 1, 0.5
    return logits


def no_numbers(vocabulary):
    logits = random_rows(vocabulary)
    logits[0, 4], logits[2, 9], logits[1, 3] = math.nan, math.inf, math.nan
    logits[5] = -math.inf
    logits[6, 0] = -math.inf
    return logits


def any_pattern(vocabulary):
    """Numbers of all sizes and both signs."""
    patterns = torch.randint(0, 2**16, (len(FIELDS), vocabulary), generator=torch.Generator().manual_seed(3))
    logits = patterns.to(torch.int16).view(torch.float16).float()
    return logits.where(logits.isfinite(), -0.0)


SLOWER_ROWS = (tied_rows, few_allowed, any_pattern)


@pytest.mark.parametrize(
    "rows", [random_rows, no_numbers, *(pytest.param(rows, marks=pytest.mark.slow) for rows in SLOWER_ROWS)]
)
@pytest.mark.parametrize(
    ("vocabulary", "tuning", "dtype"),
    [
        further(128, Tuning(128, bits=5), torch.float32),
        fast_if(False, 131, Tuning(64, bits=3), torch.float32),
        (131, Tuning(64, bits_of_16=3), torch.float16),
        fast_if(False, 128, Tuning(128, bits_of_16=4), torch.bfloat16),
    ],
)
def test_kernels_choose_what_torch_chooses(rows, vocabulary, tuning, dtype, monkeypatch):
    monkeypatch.setattr(triton_sampling, "Tuning", lambda: tuning)
    logits = rows(vocabulary).to(dtype).to(DEVICE)
    assert chosen(logits, kernels=True) == chosen(logits, kernels=False)


def test_a_token_does_not_depend_on_the_other_rows():
    logits = random_rows(128).to(torch.float16).to(DEVICE)
    draws = np.random.default_rng(7).random(len(FIELDS))
    sampler = Sampler(len(FIELDS), 128, DEVICE, kernels=True)
    for row, fields in enumerate(FIELDS):
        sampler.add(row_sampling(row, **fields))
    alone = [
        sampler.sample(logits[row : row + 1], np.array([row], np.int32), np.zeros(1, np.int32), draws[row : row + 1])
        for row in range(len(FIELDS))
    ]
    assert [each.read()[0][0] for each in alone] == chosen(logits, kernels=True)


def test_a_step_of_the_same_requests_takes_one_copy_if_any(monkeypatch):
    """Each takes the host time. What is launched is in the table of launches, which a test asserts."""
    copies = []
    monkeypatch.setattr("lockstep_engine.sampling.to_device", lambda *given: copies.append(given) or to_device(*given))
    sampler = Sampler(1, 128, DEVICE, kernels=True)
    rows, logits = np.zeros(1, np.int32), torch.zeros(1, 128, dtype=torch.float16, device=DEVICE)
    for fields, count in (({"temperature": 0}, 0), ({}, 1), ({"top_p": 0.9}, 1)):
        sampler.add(row_sampling(0, **fields))
        copies.clear()
        sampler.sample(logits, rows, rows, np.zeros(1))
        assert len(copies) == count


def test_arrays_are_one_copy():
    arrays = [np.arange(3), np.ones((2, 3), np.float32), np.empty((0, 4), np.int32), np.array([7], np.int32)]
    copied = to_device_at_once(arrays, DEVICE)
    assert len({each.untyped_storage().data_ptr() for each in copied}) == 1
    assert all(each.data_ptr() % 16 == 0 for each in copied)
    for array, there in zip(arrays, copied, strict=True):
        assert there.dtype is torch.from_numpy(array).dtype
        np.testing.assert_array_equal(there.cpu().numpy(), array)
