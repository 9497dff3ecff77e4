"""The simulation of the routing policies: it sees what policies differ in, and `hybrid` keeps its promises in it."""

import pytest
import routing
from lockstep_common.prefix_keys import BLOCK_TOKENS
from routing import Ask, SimulatedWorker, conversations, spread


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hybrid_spreads_80_percent_load_evenly(seed: int) -> None:
    uniform, zipf = (spread("hybrid", exponent, seconds=60, seed=seed) for exponent in (0.0, 1.1))
    assert 0.75 < uniform.figures()["taken"] < 0.85
    assert uniform.imbalance < 0.05
    assert zipf.imbalance < 0.10


def test_simulation_sees_the_imbalance_of_policies_that_have_it() -> None:
    assert spread("sticky", 1.1, seconds=60).imbalance > 0.2
    assert spread("round_robin", 0.0, seats=(32, 128), seconds=60).imbalance > 0.3
    assert spread("weighted", 0.0, seats=(32, 128), seconds=60).imbalance < 0.1


def test_conversations_keep_their_prefixes_where_a_policy_has_affinity() -> None:
    named = {policy: conversations(policy, seconds=20).figures() for policy in ("sticky", "stateless")}
    assert named["sticky"]["hit_rate"] > named["stateless"]["hit_rate"] + 0.2
    assert named["sticky"]["ttft_p50_s"] < named["stateless"]["ttft_p50_s"]
    unnamed = {
        policy: conversations(policy, named=False, seconds=20).figures() for policy in ("sticky", "prefix_aware")
    }
    assert unnamed["prefix_aware"]["hit_rate"] > unnamed["sticky"]["hit_rate"] + 0.1


def test_reports_make_expectations_right_that_are_guesses_without_them() -> None:
    reported, guessed = (
        conversations("prefix_aware", named=False, seats=8, seconds=20, reports_blocks=reports).figures()
        for reports in (True, False)
    )
    assert reported["wrong_share"] < guessed["wrong_share"]
    assert reported["hit_rate"] > guessed["hit_rate"] - 0.02


def test_same_seed_gives_the_same_figures_and_another_seed_others() -> None:
    first, again, other = (conversations("prefix_aware", seconds=5, seed=seed).figures() for seed in (4, 4, 5))
    assert first == again
    assert first != other


def test_worker_caches_prefixes_and_evicts_the_least_recently_used() -> None:
    worker = SimulatedWorker(0, seats=9, cache_blocks=6)
    first, second = ([number] * BLOCK_TOKENS * 4 for number in (1, 2))
    cached = []
    for tokens in (first, first, second, first):
        ask = Ask(0.0, "", tokens, 0.001, 1.0)
        worker.begin(ask, 0.0)
        cached.append(ask.cached)
    assert cached == [0, 4 * BLOCK_TOKENS - 1, 0, 2 * BLOCK_TOKENS]


def test_prefills_of_a_worker_follow_each_other() -> None:
    worker = SimulatedWorker(0, seats=9, cache_blocks=0)
    asks = [Ask(0.0, "", [1] * 100, 0.01, 3.0) for _ in range(2)]
    assert [worker.begin(ask, 0.0) for ask in asks] == pytest.approx([4.0, 5.0])
    assert [ask.first_token_s for ask in asks] == pytest.approx([1.0, 2.0])


def test_tables_have_a_cell_for_each_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "POLICIES", ("hybrid",))
    monkeypatch.setattr(routing, "BOUNDS", ())
    monkeypatch.setattr(routing, "spread", lambda policy, exponent, **rest: spread(policy, exponent, seconds=2))
    monkeypatch.setattr(
        routing, "conversations", lambda policy, named=True, **rest: conversations(policy, named=named, seconds=2)
    )
    (side,) = routing.sides()
    name, results = side[0], {part: routing.measured_part(side, part) for part in routing.PARTS}
    assert len(routing.spread_row(name, results)) == len(routing.SPREAD)
    assert len(routing.turns_row(name, results)) == len(routing.TURNS)
