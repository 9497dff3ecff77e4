"""Counts in exponential buckets follow their formula, stay few, and have the wire's form of rows."""

import math
import random

import pytest
from lockstep_common.exponential import FINEST_SCHEMA, MAX_BUCKETS, ZERO_THRESHOLD, ExponentialBuckets, Row, bucket_of

SCHEMAS = range(-4, FINEST_SCHEMA + 1)


def counted(*values):
    buckets = ExponentialBuckets()
    for value in values:
        buckets.add(value)
    return buckets.snapshot()


def numbers(row):
    """The counts of a row by the buckets' numbers."""
    found, number, deltas, count = {}, 0, iter(row.deltas), 0
    for offset, length in row.spans:
        number += offset
        for _ in range(length):
            count += next(deltas)
            found[number] = count
            number += 1
    assert next(deltas, None) is None
    return found


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_bucket_has_the_values_above_the_bound_before_it_up_to_its_own(schema):
    base = 2.0 ** (2.0**-schema)
    random_values = random.Random(1)
    for value in (math.exp(random_values.uniform(-80, 80)) for _ in range(2000)):
        number = bucket_of(value, schema)
        assert base ** (number - 1) * (1 - 1e-12) < value <= base**number * (1 + 1e-12)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("power", [-120, -16, -1, 0, 1, 2, 15, 16, 17, 1000])
def test_a_power_of_two_is_the_bound_of_its_bucket(schema, power):
    value = 2.0**power
    number = math.ceil(power * 2.0**schema)
    assert bucket_of(value, schema) == number
    is_bound = power * 2.0**schema == number
    assert bucket_of(math.nextafter(value, math.inf), schema) == number + is_bound
    assert bucket_of(math.nextafter(value, 0.0), schema) in (number, math.ceil((power - 1e-9) * 2.0**schema))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_infinity_is_above_the_largest_number(schema):
    assert bucket_of(math.inf, schema) == bucket_of(math.nextafter(math.inf, 0.0), schema) + 1
    assert bucket_of(5e-324, schema) == math.ceil(-1074 * 2.0**schema)


def test_zero_negative_values_and_what_is_no_number():
    found = counted(0.0, -0.0, ZERO_THRESHOLD, -ZERO_THRESHOLD, 2.0, -2.0, -4.0, math.inf, -math.inf, math.nan)
    assert (found.count, found.zero_count) == (10, 4)
    infinite = bucket_of(math.inf, found.schema)
    assert numbers(found.positive) == {8: 1, infinite: 1}
    assert numbers(found.negative) == {8: 1, 16: 1, infinite: 1}


def test_several_equal_values_at_once():
    buckets = ExponentialBuckets()
    buckets.add(1.0, 3)
    buckets.add(1.0, 2)
    assert numbers(buckets.snapshot().positive) == {0: 5}


def test_a_row_of_up_to_two_empty_buckets_is_within_a_span():
    row = Row.of({-3: 2, -2: 5, 1: 1, 5: 4})
    assert row.spans == [(-3, 5), (3, 1)]
    assert row.deltas == [2, 3, -5, 0, 1, 3]
    assert Row.of({}) == Row([], [])


def test_the_schema_is_lowered_when_there_are_too_many_buckets():
    random_values = random.Random(2)
    values = [random_values.choice((-1, 1)) * math.exp(random_values.uniform(-40, 40)) for _ in range(5000)]
    found = counted(*values)
    positive, negative = numbers(found.positive), numbers(found.negative)
    assert found.schema < FINEST_SCHEMA
    assert len(positive) + len(negative) <= MAX_BUCKETS
    assert found.count == len(values) == sum(positive.values()) + sum(negative.values())
    for row, sign in ((positive, 1), (negative, -1)):
        expected = {}
        for value in (value * sign for value in values if value * sign > 0):
            number = bucket_of(value, found.schema)
            expected[number] = expected.get(number, 0) + 1
        assert {number: count for number, count in row.items() if count} == expected


def test_all_numbers_that_there_are_have_a_bound():
    found = counted(*(2.0**power for power in range(-127, 1024)))
    assert found.count == 1151
    assert len(numbers(found.positive)) <= MAX_BUCKETS


def test_a_seed_is_at_the_bounds():
    seeded = ExponentialBuckets.seeded((0.5, 1.0, 2.0), (3, 0, 2, 1)).snapshot()
    assert seeded.count == 6
    assert numbers(seeded.positive) == {-8: 3, 8: 2, 9: 1}
