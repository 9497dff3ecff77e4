"""The bounds of every sampling parameter, and the field that an error names."""

import math

import pytest
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_common.protocol import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from lockstep_engine.request import Grammar, GrammarKind, PromptScores, SamplingParams

VOCAB = 2000

GOOD = {
    "max_tokens": [1, 10**9],
    "min_tokens": [0, 5, 2**63 - 1],
    "temperature": [0, 1e-6, 1.0, 100],
    "top_k": [0, 1, 2**63 - 1],
    "top_p": [1e-9, 0.5, 1],
    "min_p": [0, 0.5, 1],
    "repetition_penalty": [1e-3, 1, 100],
    "frequency_penalty": [-2, 0, 2],
    "presence_penalty": [-2, 0, 2],
    "seed": [0, 2**64 - 1],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "stop_token_ids": [(), (0, VOCAB - 1), tuple(range(MAX_STOP_IDS))],
    "logit_bias": [{}, {0: -1000, VOCAB - 1: 1000}, dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)],
    "ignore_eos": [True, False],
    "prompt_scores": list(PromptScores),
    "grammar": [None, Grammar(GrammarKind.JSON_OBJECT), Grammar(GrammarKind.REGEX, "ä" * (MAX_GRAMMAR_BYTES // 2))],
}
BAD = {
    "max_tokens": [0, -1],
    "min_tokens": [-1, 2**63],
    "temperature": [-0.1, 100.1, math.nan, math.inf],
    "top_k": [-1, 2**63],
    "top_p": [0, -0.5, 1.01, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, 101, math.nan, math.inf],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan, -math.inf],
    "seed": [-1, 2**64],
    "logprobs": [-1, MAX_LOGPROBS + 1],
    "stop_token_ids": [tuple(range(MAX_STOP_IDS + 1)), (VOCAB,), (-1,), (5, 2**40)],
    "logit_bias": [
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
        {VOCAB: 1.0},
        {-1: 1.0},
        {0: 1000.1},
        {0: -1001.0},
        {0: math.nan},
        {0: math.inf},
    ],
    "grammar": [
        Grammar(GrammarKind.REGEX, "ä" * (MAX_GRAMMAR_BYTES // 2) + "a"),
        Grammar(GrammarKind.JSON_SCHEMA),
        Grammar(GrammarKind.JSON_OBJECT, "{}"),
    ],
}


def cases(table):
    return [
        pytest.param(field, value, id=f"{field}={str(value)[:25]}")
        for field, values in table.items()
        for value in values
    ]


def test_the_defaults_are_valid():
    SamplingParams().validate(VOCAB)


@pytest.mark.parametrize(("field", "value"), cases(GOOD))
def test_values_within_bounds_are_accepted(field, value):
    SamplingParams(**{field: value}).validate(VOCAB)


@pytest.mark.parametrize(("field", "value"), cases(BAD))
def test_values_out_of_bounds_are_refused_and_the_field_is_named(field, value):
    with pytest.raises(LockstepError, match=f"^{field} ") as caught:
        SamplingParams(**{field: value}).validate(VOCAB)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.field == field


def test_every_setting_is_in_the_tables():
    assert set(GOOD) == set(SamplingParams.__dataclass_fields__)
