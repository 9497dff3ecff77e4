"""The sampler against a reference in plain Python, and what must hold whatever the logits are."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lockstep_engine import drawing, sampling_table
from lockstep_engine.draws import uniform
from lockstep_engine.plan import NO_TOKEN, RowSampling
from lockstep_engine.sampling import Sampler
from sampler_twin import RowByRow
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
LAST_DRAW = 1 - 2**-53
"""The largest number that `uniform` can give."""


class CountedOperations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def row_sampling(number=0, **settings_):
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "logprobs": -1,
        "prompt_ids": [],
        "emitted_ids": [],
        "forbidden_ids": [],
        "min_tokens": 0,
    }
    return RowSampling(sampling_row=number, **{**defaults, **settings_})


def sample(logits, sampling, draws, emitted=0):
    """Ids for equal rows of logits [vocabulary], one for each draw."""
    sampler = Sampler(1, len(logits), CPU)
    sampler.add(sampling)
    rows = torch.as_tensor(logits, dtype=torch.float32).repeat(len(draws), 1)
    count = len(draws)
    ids, _ = sampler.sample(
        rows, np.zeros(count, np.int32), np.full(count, emitted, np.int32), np.array(draws, np.float64)
    ).read()
    return ids


def sample_one(logits, draw=0.5, emitted=0, **settings_):
    return sample(logits, row_sampling(**settings_), [draw], emitted)[0]


def random_logits(seed, vocabulary, scale=3.0):
    return (np.random.default_rng(seed).normal(size=vocabulary) * scale).astype(np.float32)


def survivors(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, require=bool):
    """Reference: {id: probability, not normalised} of what the filters leave, one by one. Equals stay together.

    `require` is told whether it is the settings that decide, not rounding.
    """
    scaled = [float(each) / temperature for each in logits]
    peak = max(scaled)
    weights = [math.exp(each - peak) for each in scaled]
    order = sorted(range(len(weights)), key=lambda id_: -weights[id_])
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        whole, so_far, count = sum(weights[id_] for id_ in order), 0.0, 0
        while so_far < top_p * whole * (1 - 1e-12) and count < len(order):
            so_far += weights[order[count]]
            require(abs(so_far / whole - top_p) > 1e-5)
            count += 1
        order = order[:count]
    require(all(weight == 1 or abs(weight - min_p) > 1e-5 * min_p for weight in weights))
    least = max(weights[order[-1]], min_p)
    total = sum(weights)
    return {id_: weight / total for id_, weight in enumerate(weights) if weight >= least}


def assert_inverse_cdf(ids, draws, kept):
    """Each id is the one at which the sum over the kept ids, in their order, goes beyond the draw."""
    total = sum(kept.values())
    for id_, draw in zip(ids, draws, strict=True):
        assert id_ in kept
        below = sum(weight for other, weight in kept.items() if other < id_) / total
        above = below + kept[id_] / total
        assert below - 1e-6 <= draw <= above + 1e-6


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 20),
        "top_k": st.one_of(st.just(0), st.integers(1, 60)),
        "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1)),
    }
)
DRAWS = [0.0, *(uniform(7, position) for position in range(40)), LAST_DRAW]


class TestFilters:
    @settings(derandomize=True, deadline=None, database=None, max_examples=300)
    @given(st.integers(0, 2**32), st.integers(2, 50), FILTERS)
    def test_any_combination_draws_as_the_reference(self, seed, vocabulary, filters):
        logits = random_logits(seed, vocabulary)
        kept = survivors(logits, **filters, require=assume)
        assert_inverse_cdf(sample(logits, row_sampling(**filters), DRAWS), DRAWS, kept)

    @settings(derandomize=True, deadline=None, database=None, max_examples=100)
    @given(st.lists(st.integers(0, 3), min_size=2, max_size=12), FILTERS)
    def test_equally_likely_tokens_survive_together(self, logits, filters):
        kept = survivors(logits, **filters, require=assume)
        for id_ in kept:
            assert {other for other, logit in enumerate(logits) if logit == logits[id_]} <= set(kept)
        assert_inverse_cdf(sample(logits, row_sampling(**filters), DRAWS), DRAWS, kept)

    @pytest.mark.parametrize("seed", range(5))
    def test_greedy_takes_the_largest_logit(self, seed):
        logits = random_logits(seed, 331)
        for draw in (0.0, 0.5, LAST_DRAW):
            assert sample_one(logits, draw, temperature=0.0, top_k=5, top_p=0.1, min_p=0.5) == int(logits.argmax())

    def test_greedy_takes_the_first_of_equals(self):
        assert sample_one([1, 5, 5, 0, 5], temperature=0.0) == 1

    @pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.001}])
    def test_the_narrowest_filters_are_greedy(self, filters):
        logits = random_logits(3, 331)
        assert set(sample(logits, row_sampling(**filters), DRAWS)) == {int(logits.argmax())}

    def test_a_large_k_keeps_all(self):
        logits = random_logits(3, 20)
        assert sample(logits, row_sampling(top_k=2**31), DRAWS) == sample(logits, row_sampling(), DRAWS)

    def test_temperature_flattens(self):
        logits = [0.0, 10.0]
        assert sum(sample(logits, row_sampling(temperature=100.0), DRAWS)) < len(DRAWS) * 0.8
        assert sum(sample(logits, row_sampling(temperature=0.5), DRAWS[1:-1])) == len(DRAWS) - 2

    @pytest.mark.parametrize("draw", [0.0, LAST_DRAW])
    def test_the_ends_of_the_unit_interval_never_give_a_token_without_weight(self, draw):
        logits = [-math.inf, 1.0, -math.inf, 1.0, -math.inf]
        assert sample_one(logits, draw) == (1 if draw == 0 else 3)
        assert sample_one([0.0, 9.0, 0.0], draw, top_k=1) == 1


def adjusted(logits, sampling, emitted=0):
    """Reference: logits after penalties, bias and min_tokens."""
    out = [float(each) for each in logits]
    for id_ in range(len(out)):
        count = sampling.emitted_ids.count(id_)
        if count or id_ in sampling.prompt_ids:
            out[id_] = (
                out[id_] / sampling.repetition_penalty if out[id_] > 0 else out[id_] * sampling.repetition_penalty
            )
        out[id_] -= sampling.frequency_penalty * count + (sampling.presence_penalty if count else 0)
        out[id_] += sampling.logit_bias.get(id_, 0)
        if emitted < sampling.min_tokens and id_ in sampling.forbidden_ids:
            out[id_] = -math.inf
    return out


IDS = st.lists(st.integers(0, 29), max_size=40)


class TestAdjustments:
    @settings(derandomize=True, deadline=None, database=None, max_examples=200)
    @given(
        st.integers(0, 2**32),
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 1.0]),
                "repetition_penalty": st.floats(0.1, 5),
                "frequency_penalty": st.floats(-2, 2),
                "presence_penalty": st.floats(-2, 2),
                "prompt_ids": IDS.filter(len),
                "emitted_ids": IDS,
                "logit_bias": st.dictionaries(st.integers(0, 29), st.floats(-100, 100), max_size=5),
                "forbidden_ids": st.lists(st.integers(0, 29), max_size=4),
                "min_tokens": st.integers(0, 3),
            }
        ),
        st.integers(0, 4),
    )
    def test_any_combination_is_as_the_reference(self, seed, fields, emitted):
        logits, sampling = random_logits(seed, 30), row_sampling(**fields)
        reference = adjusted(logits, sampling, emitted)
        ids = sample(logits, sampling, [0.5], emitted)
        if sampling.temperature == 0:
            assert reference[ids[0]] >= max(reference) - 1e-4
        else:
            assert_inverse_cdf(ids, [0.5], survivors(reference))

    def test_penalties_count_every_token_as_it_is_emitted(self):
        logits = random_logits(5, 30)
        fields = {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "prompt_ids": [1]}
        sampler = Sampler(1, 30, CPU)
        sampler.add(row_sampling(**fields))
        emitted = []
        for position in range(40):
            (id_,), _ = sampler.sample(
                torch.from_numpy(logits)[None], np.array([0], np.int32), np.array([position], np.int32), np.array([0.5])
            ).read()
            reference = adjusted(logits, row_sampling(**fields, emitted_ids=emitted))
            assert reference[id_] >= max(reference) - 1e-4
            emitted.append(id_)
        assert len(set(emitted)) > 5

    def test_a_resumed_stream_is_penalised_as_the_unbroken_one(self):
        logits = torch.from_numpy(random_logits(6, 30))[None]
        fields = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3, "prompt_ids": [1, 2]}

        def generate(sampler, positions):
            return [
                sampler.sample(
                    logits, np.array([0], np.int32), np.array([position], np.int32), np.array([uniform(1, position)])
                ).read()[0][0]
                for position in positions
            ]

        unbroken = Sampler(1, 30, CPU)
        unbroken.add(row_sampling(**fields))
        whole = generate(unbroken, range(30))
        resumed = Sampler(1, 30, CPU)
        resumed.add(row_sampling(**fields, emitted_ids=whole[:13]))
        assert generate(resumed, range(13, 30)) == whole[13:]

    def test_a_new_occupant_inherits_nothing(self):
        logits = random_logits(5, 30)
        best = int(logits.argmax())
        sampler = Sampler(1, 30, CPU)
        sampler.add(row_sampling(temperature=0.0, presence_penalty=2.0, prompt_ids=[best], emitted_ids=[best] * 5))
        sampler.add(
            row_sampling(temperature=0.0, presence_penalty=2.0, repetition_penalty=100.0, prompt_ids=[(best + 1) % 30])
        )
        ids, _ = sampler.sample(
            torch.from_numpy(logits)[None], np.array([0], np.int32), np.array([0], np.int32), np.array([0.5])
        ).read()
        assert ids == [best]

    def test_bias_decides(self):
        logits = random_logits(5, 30)
        assert sample_one(logits, logit_bias={7: 1000.0}) == 7
        assert sample_one(logits, temperature=0.0, logit_bias={int(logits.argmax()): -1000.0}) != int(logits.argmax())

    def test_forbidden_ids_come_back_at_min_tokens(self):
        logits = random_logits(5, 30)
        best = int(logits.argmax())
        fields = {"temperature": 0.0, "forbidden_ids": [best], "min_tokens": 3}
        assert [sample_one(logits, emitted=count, **fields) == best for count in range(5)] == [False] * 3 + [True] * 2


class TestLogprobs:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"temperature": 0.0},
            {"temperature": 0.3, "top_k": 3},
            {"logit_bias": {3: 50.0}},
            {"repetition_penalty": 2.0, "prompt_ids": [1, 2, 3]},
        ],
    )
    def test_are_those_of_the_models_own_distribution(self, fields, dtype):
        logits = torch.from_numpy(random_logits(8, 331)).to(dtype)
        sampler = Sampler(1, 331, CPU)
        sampler.add(row_sampling(logprobs=5, **fields))
        before = logits.clone()
        (id_,), (given_,) = sampler.sample(
            logits[None], np.array([0], np.int32), np.array([0], np.int32), np.array([0.5])
        ).read()
        expected = torch.log_softmax(before.double(), dim=-1)
        assert given_.chosen == pytest.approx(float(expected[id_]), abs=1e-5)
        assert given_.top_ids == expected.topk(5).indices.tolist()
        assert given_.top_logprobs == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
        assert given_.top_logprobs == sorted(given_.top_logprobs, reverse=True)
        assert torch.equal(logits, before)

    def test_rows_get_what_they_ask_for(self):
        sampler = Sampler(3, 331, CPU)
        for number, count in enumerate((-1, 0, 20)):
            sampler.add(row_sampling(number, logprobs=count))
        logits = torch.from_numpy(random_logits(8, 331)).repeat(3, 1)
        ids, (none, chosen, top) = sampler.sample(
            logits, np.arange(3, dtype=np.int32), np.zeros(3, np.int32), np.full(3, 0.5)
        ).read()
        assert len(set(ids)) == 1
        assert none is None
        assert (chosen.top_ids, chosen.top_logprobs) == ([], [])
        assert len(top.top_ids) == len(set(top.top_ids)) == 20
        assert chosen.chosen == top.chosen

    def test_more_than_the_vocabulary_gives_all_of_it(self):
        sampler = Sampler(1, 7, CPU)
        sampler.add(row_sampling(logprobs=20))
        _, (given_,) = sampler.sample(
            torch.from_numpy(random_logits(8, 7))[None],
            np.array([0], np.int32),
            np.array([0], np.int32),
            np.array([0.5]),
        ).read()
        assert sorted(given_.top_ids) == list(range(7))


SETTINGS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1, "logprobs": 3},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "prompt_ids": [1, 2, 3], "emitted_ids": [4, 4], "logprobs": 20},
    {"frequency_penalty": -0.5, "presence_penalty": 1.0, "prompt_ids": [9]},
    {"logit_bias": {5: 3.0, 6: -100.0}, "temperature": 0.0, "logprobs": 0},
    {"forbidden_ids": [1, 7], "min_tokens": 4},
]


class TestRows:
    @pytest.mark.parametrize("seed", range(3))
    def test_a_row_is_the_same_alone_and_among_others(self, seed):
        count, vocabulary = len(SETTINGS), 331
        logits = torch.from_numpy(
            np.stack([random_logits(100 * seed + row, vocabulary, scale=2.0) for row in range(count)])
        )
        draws = np.array([uniform(seed, row) for row in range(count)])
        emitted = np.arange(count, dtype=np.int32) % 6

        def run(rows):
            sampler = Sampler(count, vocabulary, CPU)
            for number in rows:
                sampler.add(row_sampling(number, **SETTINGS[number]))
            return sampler.sample(logits[rows], np.array(rows, np.int32), emitted[rows], draws[rows]).read()

        together = run(list(range(count)))
        backwards = run(list(range(count))[::-1])
        assert [list(each)[::-1] for each in backwards] == [list(each) for each in together]
        for row in range(count):
            alone = run([row])
            assert alone == ([together[0][row]], [together[1][row]])

    def test_rows_may_stand_in_any_order(self):
        logits = random_logits(1, 331)
        sampler = Sampler(8, 331, CPU)
        sampler.add(row_sampling(6, temperature=0.0))
        sampler.add(row_sampling(2, logit_bias={11: 1000.0}))
        ids, _ = sampler.sample(
            torch.from_numpy(logits).repeat(2, 1), np.array([6, 2], np.int32), np.zeros(2, np.int32), np.full(2, 0.3)
        ).read()
        assert ids == [int(logits.argmax()), 11]


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 6},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(filters):
    logits = random_logits(21, 12, scale=0.7)
    kept = survivors(logits, **filters)
    draws = [uniform(99, position) for position in range(6000)]
    ids = sample(logits, row_sampling(**filters), draws)
    total = sum(kept.values())
    expected = {id_: len(draws) * weight / total for id_, weight in kept.items()}
    assert set(ids) <= set(expected)
    assert min(expected.values()) > 15
    statistic = sum((ids.count(id_) - count) ** 2 / count for id_, count in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


INF, NAN, HUGE = math.inf, math.nan, 3.4e38
EXTREME_ROWS = {
    "all inf": [INF] * 40,
    "all -inf": [-INF] * 40,
    "all nan": [NAN] * 40,
    "one inf": [0.0] * 20 + [INF] + [0.0] * 19,
    "two inf": [INF] + [0.0] * 38 + [INF],
    "one nan": [0.0] * 20 + [NAN] + [0.0] * 19,
    "one finite": [-INF] * 20 + [1.0] + [-INF] * 19,
    "huge": [HUGE, -HUGE] * 20,
    "all huge": [HUGE] * 40,
    "all -huge": [-HUGE] * 40,
    "inf and -inf": [INF, -INF] * 20,
    "everything": [INF, -INF, NAN, HUGE, -HUGE, 0.0, 1e-45, -1e-45] * 5,
}
EXTREME_SETTINGS = [
    *SETTINGS,
    {"temperature": 1e-6},
    {"temperature": 1e-30},
    {"temperature": 1e-45},
    {"temperature": 1e-300},
    {"temperature": 100.0},
    {"temperature": 1e-30, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
    {"logit_bias": {0: 1000.0, 1: -1000.0}, "logprobs": 20},
    {"repetition_penalty": 100.0, "prompt_ids": list(range(40))},
    {"repetition_penalty": 1e-6, "prompt_ids": list(range(40))},
    {"forbidden_ids": list(range(40)), "min_tokens": 9},
    {"forbidden_ids": list(range(40)), "min_tokens": 9, "temperature": 0.0},
]


@pytest.mark.parametrize("row", EXTREME_ROWS.values(), ids=EXTREME_ROWS)
def test_extreme_logits_give_a_token_of_the_vocabulary_or_none(row):
    has_no_token = any(math.isnan(each) for each in row) or not math.isfinite(max(row))
    for fields in EXTREME_SETTINGS:
        ids = sample(row, row_sampling(**fields), DRAWS)
        assert all(id_ == NO_TOKEN if has_no_token else 0 <= id_ < 40 for id_ in ids), fields


@pytest.mark.parametrize("row", EXTREME_ROWS.values(), ids=EXTREME_ROWS)
def test_extreme_logits_do_not_disturb_other_rows(row):
    good = random_logits(4, 40)
    for fields in ({}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "logprobs": 3}):
        sampler = Sampler(2, 40, CPU)
        sampler.add(row_sampling(0, **fields))
        sampler.add(row_sampling(1, **fields))
        rows = torch.stack([torch.tensor(row), torch.from_numpy(good)])
        ids, logprobs = sampler.sample(
            rows, np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.full(2, 0.6)
        ).read()
        alone, alone_logprobs = sampler.sample(
            rows[1:], np.array([1], np.int32), np.zeros(1, np.int32), np.full(1, 0.6)
        ).read()
        assert (ids[1:], logprobs[1:]) == (alone, alone_logprobs)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-45, 1e-300])
def test_a_temperature_near_zero_is_nearly_greedy(temperature):
    logits = random_logits(9, 331)
    assert set(sample(logits, row_sampling(temperature=temperature), DRAWS)) == {int(logits.argmax())}


def test_the_only_finite_logit_is_chosen():
    assert set(sample(EXTREME_ROWS["one finite"], row_sampling(), DRAWS)) == {20}


MIXED = [
    *SETTINGS,
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 200, "top_p": 0.9},
    {"top_k": 300},
    {"temperature": 0.8, "min_p": 0.3, "logprobs": 5},
    {"temperature": 0.5, "frequency_penalty": 0.4, "prompt_ids": [3], "logit_bias": {9: 2.0, 3: -1.0}, "logprobs": 3},
]


def mixed_batch(count, vocabulary, steps):
    """Samplings of many kinds, and for each step logits, emitted counts and uniform numbers."""
    samplings = [row_sampling(number, **MIXED[number % len(MIXED)]) for number in range(count)]
    for step in range(steps):
        logits = np.stack([random_logits(1000 * step + row, vocabulary, scale=2.0) for row in range(count)])
        draws = np.array([uniform(row, step) for row in range(count)])
        yield samplings, torch.from_numpy(logits), np.full(count, step, np.int32), draws


class TestBatch:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_many_kinds_of_rows_get_the_bits_of_rows_computed_one_by_one(self, dtype, monkeypatch):
        monkeypatch.setattr(sampling_table, "TILE", 331 * 5)  # several tiles of each kind
        numbers = np.random.default_rng(0).permutation(64).astype(np.int32)
        sampler = twin = None
        for samplings, logits, emitted, draws in mixed_batch(64, 331, 8):
            if sampler is None:
                sampler, twin = Sampler(64, 331, CPU), RowByRow(samplings, 331)
                for each in samplings:
                    sampler.add(each)
            step = logits.to(dtype), numbers, emitted, draws
            assert sampler.sample(*step).read() == twin.sample(*step)

    def test_the_number_of_operations_does_not_grow_with_the_rows(self):
        def operations(count):
            (batch,) = mixed_batch(count, 331, 1)
            samplings, logits, emitted, draws = batch
            sampler = Sampler(count, 331, CPU)
            for each in samplings:
                sampler.add(each)
            with CountedOperations() as counted:
                sampler.sample(logits, np.arange(count, dtype=np.int32), emitted, draws)
            return counted.names

        assert operations(len(MIXED)) == operations(4 * len(MIXED))

    def test_settings_are_sent_to_the_device_once(self):
        def copies(step, emitted):
            with CountedOperations() as counted:
                sampler.sample(step[1], np.arange(16, dtype=np.int32), np.full(16, emitted, np.int32), step[3])
            return sum(counted.names.values())

        (step,) = mixed_batch(16, 331, 1)
        sampler = Sampler(16, 331, CPU)
        for each in step[0]:
            sampler.add(each)
        first, again = copies(step, 5), copies(step, 6)
        assert again < first
        assert copies(step, 7) == again
        sampler.add(row_sampling(3, top_k=2))
        assert copies(step, 8) > again

    def test_lists_of_ids_come_and_go_with_their_requests(self):
        logits = torch.zeros(3, 30)
        sampler = Sampler(3, 30, CPU)
        rows = np.arange(3, dtype=np.int32)
        for wanted in ([4, 9, 2], [4, None, 2], [None, 8, 2], [1, 8, None], [None, None, None]):
            for row, id_ in enumerate(wanted):
                bias = {} if id_ is None else {id_: 5.0, id_ + 1: 1.0, id_ + 2: 1.0}
                sampler.add(row_sampling(row, temperature=0.0, logit_bias=dict(list(bias.items())[: row + 1])))
            ids, _ = sampler.sample(logits, rows, rows, np.zeros(3)).read()
            assert ids == [id_ or 0 for id_ in wanted]


class TestIntegerSums:
    """A GPU's prefix sums, on the CPU."""

    def test_equal_exact_sums_within_their_unit(self):
        weights = torch.rand(4, 5000, generator=torch.Generator().manual_seed(1))
        exact = np.cumsum(weights.double().numpy(), axis=1)
        assert np.abs(drawing.integer_sums(weights).numpy() - exact).max() < 5000 * 2**-44

    def test_do_not_depend_on_the_order_of_additions(self):
        weights = torch.softmax(torch.randn(1, 3000, generator=torch.Generator().manual_seed(2)) * 9, dim=-1)
        total = drawing.integer_sums(weights)[0, -1]
        assert all(
            drawing.integer_sums(weights[:, torch.randperm(3000, generator=torch.Generator().manual_seed(seed))])[0, -1]
            == total
            for seed in range(20)
        )

    def test_the_largest_vocabulary_fits(self):
        sums = drawing.integer_sums(torch.ones(1, 2**19 - 1))
        assert sums[0, -1] == 2**19 - 1
        assert bool((sums.diff() > 0).all())

    @pytest.mark.parametrize("fields", [{}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}, {"temperature": 1e-30}])
    def test_draw_the_tokens_that_sums_of_floats_draw(self, fields, monkeypatch):
        logits = random_logits(12, 331)
        expected = sample(logits, row_sampling(**fields), DRAWS)
        monkeypatch.setattr(drawing, "prefix_sums", drawing.integer_sums)
        assert sample(logits, row_sampling(**fields), DRAWS) == expected


class TestLogitsThatAreNoNumbers:
    @pytest.mark.parametrize("poison", [math.nan, math.inf])
    @pytest.mark.parametrize("where", [0, 17, 39])
    @pytest.mark.parametrize("settings_", [{}, {"temperature": 0}, {"top_k": 3, "top_p": 0.9}, {"presence_penalty": 1}])
    def test_give_no_token_and_change_no_other_row(self, poison, where, settings_):
        sampler = Sampler(3, 40, CPU)
        for row in range(3):
            sampler.add(row_sampling(row, **settings_))
        logits = torch.tensor(np.stack([random_logits(seed, 40) for seed in range(3)]))
        rows, none = np.arange(3, dtype=np.int32), np.zeros(3, np.int32)
        draws = np.array([0.2, 0.5, 0.9])
        healthy, _ = sampler.sample(logits, rows, none, draws).read()
        poisoned = logits.clone()
        poisoned[1, where] = poison
        for row in range(3):
            sampler.add(row_sampling(row, **settings_))
        ids, _ = sampler.sample(poisoned, rows, none, draws).read()
        assert ids == [healthy[0], NO_TOKEN, healthy[2]]
        (last,) = sampler.last(torch.from_numpy(rows[1:2].astype(np.int64))).tolist()
        assert 0 <= last < 40  # the next step may have been planned with it
        assert sampler.last_here(rows).tolist() == [healthy[0], last, healthy[2]]

    def test_include_a_row_without_any_number(self):
        assert sample_one([-math.inf] * 5) == NO_TOKEN

    @pytest.mark.parametrize("temperature", [0, 1])
    def test_do_not_include_excluded_tokens(self, temperature):
        assert sample_one([-math.inf, 1.0, -math.inf], temperature=temperature) == 1
        assert sample_one([1.0, 5.0], forbidden_ids=[1], min_tokens=2, temperature=temperature) == 0
        sampler = Sampler(1, 40, CPU)
        sampler.add(row_sampling(temperature=temperature))
        zeros = np.zeros(1, np.int32)
        masks = np.array([[1 << 7, 0]], np.int32)
        assert sampler.sample(torch.zeros(1, 40), zeros, zeros, np.array([0.5]), zeros, masks).read()[0] == [7]

    def test_are_found_behind_a_mask(self):
        sampler = Sampler(1, 40, CPU)
        sampler.add(row_sampling())
        zeros, logits = np.zeros(1, np.int32), torch.zeros(1, 40)
        logits[0, 3] = math.nan
        masks = np.array([[1 << 7, 0]], np.int32)
        assert sampler.sample(logits, zeros, zeros, np.array([0.5]), zeros, masks).read()[0] == [NO_TOKEN]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_are_found_where_min_tokens_excludes_them(self, temperature, dtype):
        sampler = Sampler(1, 40, CPU)
        sampler.add(row_sampling(temperature=temperature, forbidden_ids=[3], min_tokens=2))
        zeros, logits = np.zeros(1, np.int32), torch.zeros(1, 40, dtype=dtype)
        logits[0, 3] = math.nan
        assert sampler.sample(logits, zeros, zeros, np.array([0.5])).read()[0] == [NO_TOKEN]


def test_memory_that_runs_out_for_a_new_request_changes_no_other_row(monkeypatch):
    sampler, make = Sampler(2, 40, CPU), np.array
    sampler.add(row_sampling(0, temperature=0, logit_bias={7: 100.0}))

    def short(values, dtype=None):
        if dtype is np.float32:
            raise MemoryError
        return make(values, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "array", short)
        with pytest.raises(MemoryError):
            sampler.add(row_sampling(1, temperature=0, logit_bias={3: 100.0}))
    # The step that brought the request computes it, too.
    rows, logits = np.array([1, 0], np.int32), torch.arange(40.0).repeat(2, 1)
    ids, _ = sampler.sample(logits, rows, np.zeros(2, np.int32), np.zeros(2)).read()
    assert ids == [39, 7]
