"""Counters by tenant: few series whatever names come, and none that goes backwards."""

import random

from lockstep_router.top_tallies import OTHER, TopTallies
from prometheus_client import CollectorRegistry


class Counted:
    def __init__(self, places=3):
        self.now = 0.0
        self.registry = CollectorRegistry()
        self.tallies = TopTallies(
            "lockstep_tokens", "Tokens.", ["tenant", "direction"], places=places, registry=self.registry,
            clock=lambda: self.now,
        )  # fmt: skip
        self.seen = {}

    def add(self, **amounts):
        for name, amount in amounts.items():
            self.tallies.add(name, ("in",), amount)

    def end_interval(self):
        self.now += 61

    def values(self):
        (family,) = self.tallies.collect()
        return {sample.labels["tenant"]: sample.value for sample in family.samples}

    def increase(self):
        """How much all series have grown since the last call; one that was not there has begun at 0."""
        (family,) = self.tallies.collect()
        now = {tuple(sample.labels.items()): sample.value for sample in family.samples}
        grown = [value - self.seen.get(key, 0) for key, value in now.items()]
        assert min(grown, default=0) >= 0
        self.seen = now
        return sum(grown)


def test_few_names_have_their_own_counters():
    counted = Counted()
    counted.add(a=5, b=7)
    counted.add(a=1)
    assert counted.values() == {"a": 6, "b": 7}
    assert counted.registry.get_sample_value("lockstep_tokens_total", {"tenant": "a", "direction": "in"}) == 6


def test_the_rest_is_other():
    counted = Counted()
    counted.add(a=5, b=7, c=1, d=100, e=100)
    assert counted.values() == {"a": 5, "b": 7, "c": 1, OTHER: 200}


def test_who_has_more_takes_the_place_of_who_has_least_and_other_does_not_jump():
    counted = Counted()
    counted.add(a=5, b=7, c=1, d=6, e=1)
    counted.end_interval()
    counted.add(d=10)
    assert counted.values() == {"a": 5, "b": 7, "d": 10, OTHER: 6 + 1}  # nothing of what c had
    counted.end_interval()  # in the last interval only d was there
    counted.add(c=2)
    assert counted.values() == {"a": 5, "b": 7, "d": 10, OTHER: 6 + 1 + 2}
    counted.end_interval()
    counted.add(c=3)
    assert counted.values()["c"] == 3


def test_a_name_that_is_other_has_no_counter_of_its_own():
    counted = Counted()
    counted.add(**{OTHER: 5, "a": 1})
    counted.end_interval()
    counted.add(b=1)
    assert counted.values() == {OTHER: 5, "a": 1, "b": 1}


def test_ten_thousand_hostile_names_neither_make_series_nor_hide_who_has_most():
    counted, rng = Counted(places=20), random.Random(7)
    for interval in range(3):
        names = [f"hostile-{interval}-{number}" for number in range(10_000)] + ["heavy"] * 1000
        rng.shuffle(names)
        for name in names:
            counted.tallies.add(name, ("in",), 1)
            assert len(counted.tallies._candidates) <= 80
        assert counted.increase() == 11_000
        counted.end_interval()
    values = counted.values()
    assert len(values) <= 21
    assert values["heavy"] >= 1000


def test_the_series_grow_by_what_is_counted_whoever_is_displaced():
    counted, rng, displaced = Counted(places=5), random.Random(11), set()
    for _ in range(40):
        total, before = 0, set(counted.values())
        for _ in range(50):
            name, amount = f"t{int(rng.paretovariate(0.5)) % 30}", rng.randrange(5)
            counted.tallies.add(name, (rng.choice(("in", "out")),), amount)
            total += amount
        assert counted.increase() == total
        displaced |= before - set(counted.values())
        counted.end_interval()
    assert displaced
