"""The kernels that choose tokens, against the sampler's twin in torch."""

import math

import numpy as np
import pytest
import torch
from lockstep_engine.kernels import triton_sampling
from lockstep_engine.kernels.triton_sampling import Tuning
from lockstep_engine.sampling import Sampler
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


@pytest.mark.parametrize("rows", [random_rows, tied_rows, few_allowed, no_numbers])
@pytest.mark.parametrize(("vocabulary", "tuning"), [(128, Tuning(128, 5)), (331, Tuning(64, 3)), (331, Tuning(512, 5))])
def test_kernels_choose_what_torch_chooses(rows, vocabulary, tuning, monkeypatch):
    monkeypatch.setattr(triton_sampling, "Tuning", lambda: tuning)
    logits = rows(vocabulary).to(DEVICE)
    assert chosen(logits, kernels=True) == chosen(logits, kernels=False)
