"""Each policy chooses as it says, in every process alike, and its state is bounded."""

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_api.v1 import worker_pb2
from lockstep_common.prefix_keys import BLOCK_TOKENS
from lockstep_router import metrics
from lockstep_router.policies import Policy, RequestFacts, WorkerFacts, imbalance, make_policy, rank
from lockstep_router.policies.weighted import weighted_score
from lockstep_router.settings import RouterSettings
from lockstep_router.status import status_body
from policy_choices import choices
from router_cluster import eventually

BUILT_IN = ("sticky", "hybrid", "stateless", "round_robin", "weighted", "least_loaded", "prefix_aware")
WORKERS = [f"w{index}" for index in range(8)]
names = st.text(alphabet="abé-0\0", max_size=12)
worker_ids = st.lists(names, min_size=1, max_size=8, unique=True)
loads = st.builds(
    lambda **facts: facts,
    queued=st.integers(0, 9),
    running=st.integers(0, 9),
    sent=st.integers(0, 9),
    queue_wait_s=st.sampled_from([0.0, 0.5, 2.0]),
    capacity=st.integers(0, 100),
)


def make(name, **tuning):
    return make_policy(name, RouterSettings(workers=["host:1"], **tuning))


def choose(policy, session, workers, **facts):
    return policy.choose(RequestFacts(session, **facts), workers)


def idle(ids=WORKERS):
    return [WorkerFacts(worker_id) for worker_id in ids]


# What all policies have in common.


@pytest.mark.parametrize("name", BUILT_IN)
@given(session=names, stream=names, facts=st.lists(loads, min_size=1, max_size=6))
@settings(max_examples=40)
def test_choice_is_one_of_the_workers_and_depends_on_nothing_but_the_facts(name, session, stream, facts):
    workers = [WorkerFacts(f"w{index}", **each) for index, each in enumerate(facts)]
    request = RequestFacts(session, stream, "t", list(range(100)))
    policy = make(name)
    chosen = policy.choose(request, workers)
    assert chosen in {worker.worker_id for worker in workers}
    assert policy.choose(request, workers) == chosen
    assert make(name).choose(request, list(reversed(workers))) == chosen


def reported(worker, topics):
    """Reports of a worker, as it sends them: a snapshot, then news, after which it has the prompts of these topics."""
    keys = [key for topic in topics for key in RequestFacts("", tenant="t", prompt_ids=prompt(topic)).prefix_keys]
    gone = RequestFacts("", tenant="t", prompt_ids=prompt("z")).prefix_keys
    half = len(keys) // 2
    reports = (
        worker_pb2.PrefixReport(number=1, snapshot=True, added=[*keys[:half], *gone]),
        worker_pb2.PrefixReport(number=2, added=keys[half:], removed=gone),
    )
    return {"worker_id": worker, "reports": [report.SerializeToString().hex() for report in reports]}


@pytest.mark.parametrize("name", ["sticky", "hybrid", "weighted", "stateless", "least_loaded", "prefix_aware"])
def test_another_process_makes_the_same_choices(name):
    topics = ["ab", "bc", "c", "", "d"]
    workers = [
        reported(f"w{index}", topics[index])
        | {"queued": index % 4, "running": [1, 3, 6, 9, 1][index], "capacity": 100 + index}
        for index in range(5)
    ]
    requests = [
        {"session": f"session:{n}", "stream_id": f"session:{n}", "tenant": "t", "prompt_ids": prompt("abcdz"[n % 5])}
        for n in range(300)
    ]
    facts = {"policy": name, "workers": workers, "requests": requests}
    command = [sys.executable, str(Path(__file__).with_name("policy_choices.py"))]
    other = subprocess.run(command, input=json.dumps(facts), capture_output=True, check=True, timeout=60, text=True)
    made = choices(**facts)
    assert json.loads(other.stdout) == made
    assert len(set(made)) > 1
    unreported = choices(name, [each | {"reports": []} for each in workers], requests)
    assert (made != unreported) == (name == "prefix_aware")


@pytest.mark.parametrize("name", ["sticky", "hybrid", "weighted", "prefix_aware"])
def test_worker_that_leaves_takes_only_its_own_sessions(name):
    policy, workers = make(name), [WorkerFacts(f"w{n}", capacity=50 * (n + 1)) for n in range(5)]
    sessions = [f"session:{index}" for index in range(500)]
    before = {session: choose(policy, session, workers) for session in sessions}
    assert set(before.values()) == {worker.worker_id for worker in workers}
    for gone in workers:
        rest = [worker for worker in workers if worker is not gone]
        after = {session: choose(policy, session, rest) for session in sessions}
        assert {s for s in sessions if after[s] != before[s]} == {s for s in sessions if before[s] == gone.worker_id}


# Rendezvous hashing.


@given(names, worker_ids)
def test_order_depends_on_nothing_but_names(session, workers):
    order = rank(session, workers)
    assert sorted(order) == sorted(workers)
    assert rank(session, reversed(workers)) == order


@given(names, worker_ids)
def test_order_of_the_others_stays_when_a_worker_leaves(session, workers):
    order = rank(session, workers)
    for gone in workers:
        assert rank(session, [worker for worker in workers if worker != gone]) == [w for w in order if w != gone]


def test_order_is_the_same_in_every_process_and_release():
    assert rank("session:alice", ["w0", "w1", "w2", "w3"]) == ["w3", "w1", "w0", "w2"]


def test_new_worker_gets_its_share_and_no_session_moves_elsewhere():
    sessions = [f"session:{index}" for index in range(4000)]
    before = {session: rank(session, WORKERS)[0] for session in sessions}
    after = {session: rank(session, [*WORKERS, "new"])[0] for session in sessions}
    moved = [session for session in sessions if before[session] != after[session]]
    assert all(after[session] == "new" for session in moved)
    assert abs(len(moved) / len(sessions) - 1 / 9) < 0.03


def test_sessions_spread_evenly():
    counts = dict.fromkeys(WORKERS, 0)
    for index in range(8000):
        counts[rank(f"user:{index}", WORKERS)[0]] += 1
    assert all(800 < count < 1200 for count in counts.values())


# sticky


@given(names, st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 5))
@settings(max_examples=60)
def test_session_leaves_its_worker_only_for_a_long_queue(session, queues, threshold):
    workers = [WorkerFacts(f"w{index}", queued=queued) for index, queued in enumerate(queues)]
    own = rank(session, [worker.worker_id for worker in workers])[0]
    queued = {worker.worker_id: worker.queued for worker in workers}
    chosen = choose(make("sticky", queue_threshold=threshold), session, workers)
    if queued[own] <= threshold:
        assert chosen == own
    else:
        assert queued[chosen] == min(queues)


@pytest.mark.parametrize("name", ["sticky", "hybrid"])
def test_equally_loaded_workers_are_told_apart_by_preference(name):
    workers = [WorkerFacts(worker, queued=5, running=5) for worker in WORKERS]
    assert choose(make(name), "session:x", workers) == rank("session:x", WORKERS)[0]


def test_running_streams_break_ties_between_queues():
    own = rank("session:x", ["w0", "w1", "w2"])[0]
    workers = [WorkerFacts(w, queued=9 if w == own else 0, running=4 if w == "w1" else 1) for w in ("w0", "w1", "w2")]
    expected = min((worker for worker in workers if worker.worker_id != own), key=lambda worker: worker.running)
    assert choose(make("sticky"), "session:x", workers) == expected.worker_id


def test_burst_does_not_all_go_to_the_same_other_worker():
    own = rank("session:x", ["w0", "w1", "w2"])[0]
    workers = [WorkerFacts(w, queued=9 if w == own else 0, sent=3 if w == "w1" else 0) for w in ("w0", "w1", "w2")]
    expected = next(w for w in ("w0", "w2", "w1") if w != own)
    assert choose(make("sticky"), "session:x", workers) == expected


# hybrid


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8), st.sampled_from([1.01, 1.1, 1.25, 2.0]))
def test_no_worker_gets_more_than_the_bound(running, bound):
    workers = [WorkerFacts(f"w{index}", running=each) for index, each in enumerate(running)]
    policy = make("hybrid", load_bound=bound)
    for number in range(20):
        chosen = choose(policy, f"session:{number}", workers)
        of_chosen = next(worker for worker in workers if worker.worker_id == chosen)
        assert of_chosen.requests < max(4, bound * (sum(running) + 1) / len(workers))


def test_few_requests_are_within_every_bound():
    order = rank("session:x", WORKERS)
    for running, expected in ((3, order[0]), (4, order[1])):
        workers = [WorkerFacts(w, running=running if w == order[0] else 0) for w in WORKERS]
        assert choose(make("hybrid"), "session:x", workers) == expected


def test_session_goes_down_its_order_when_workers_are_above_the_bound():
    order = rank("session:x", WORKERS)
    policy = make("hybrid", load_bound=1.25)
    for full in range(3):
        workers = [WorkerFacts(w, running=20 if w in order[:full] else 10) for w in WORKERS]
        assert choose(policy, "session:x", workers) == order[full]


def test_what_was_just_sent_counts_as_load():
    order = rank("session:x", WORKERS)
    workers = [WorkerFacts(w, running=10, sent=10 if w == order[0] else 0) for w in WORKERS]
    assert choose(make("hybrid"), "session:x", workers) == order[1]


def test_session_leaves_a_worker_within_the_bound_that_has_a_queue():
    order = rank("session:x", WORKERS)
    workers = [WorkerFacts(w, queued=3 if w == order[0] else 0, running=7 if w == order[0] else 10) for w in WORKERS]
    assert choose(make("hybrid", queue_threshold=2), "session:x", workers) == order[1]
    assert choose(make("hybrid", queue_threshold=3), "session:x", workers) == order[0]


# stateless, least_loaded, round_robin


def test_stateless_takes_the_least_loaded_and_spreads_ties():
    workers = [WorkerFacts("w0", queued=1), WorkerFacts("w1", running=1), WorkerFacts("w2", sent=1)]
    assert choose(make("stateless"), "session:x", [*workers, WorkerFacts("w3")]) == "w3"
    policy = make("stateless")
    chosen = Counter(choose(policy, "session:x", workers, stream_id=f"s{n}") for n in range(300))
    assert min(chosen[worker.worker_id] for worker in workers) > 60


def test_least_loaded_takes_the_shorter_wait_of_two():
    waits = {worker: float(number) for number, worker in enumerate(WORKERS)}
    workers = [WorkerFacts(worker, queue_wait_s=waits[worker]) for worker in WORKERS]
    policy, chosen = make("least_loaded"), {}
    for number in range(400):
        pair = rank(f"s{number}", WORKERS)[:2]
        chosen[number] = choose(policy, "session:x", workers, stream_id=f"s{number}")
        assert chosen[number] == min(pair, key=waits.__getitem__)
    # The worst of eight is never the better one of two, and the best one is in a quarter of all pairs.
    assert set(chosen.values()) == set(WORKERS[:-1])
    assert 60 < list(chosen.values()).count("w0") < 140


def test_least_loaded_compares_requests_where_nobody_waits():
    workers = [WorkerFacts("w0", running=4), WorkerFacts("w1", running=3)]
    assert choose(make("least_loaded"), "session:x", workers) == "w1"


def test_round_robin_takes_turns_also_when_workers_come_and_go():
    policy, workers = make("round_robin"), idle(["w0", "w1", "w2"])

    def send(among):
        chosen = choose(policy, "session:x", among)
        policy.note_sent(RequestFacts("session:x"), WorkerFacts(chosen))
        return chosen

    assert [send(workers) for _ in range(6)] == ["w0", "w1", "w2"] * 2
    assert [send(workers[1:]) for _ in range(2)] == ["w1", "w2"]
    assert [send([*workers, WorkerFacts("w3")]) for _ in range(4)] == ["w3", "w0", "w1", "w2"]


def test_round_robin_forgets_workers_of_long_ago():
    policy = make("round_robin")
    for number in range(5000):
        policy.note_sent(RequestFacts(""), WorkerFacts(f"w{number}"))
    assert len(policy._sent) == 4096
    assert choose(policy, "", idle(["w4999", "w0"])) == "w0"


# weighted


def test_shares_are_those_of_the_capacities():
    capacities = {"w0": 100, "w1": 200, "w2": 300, "w3": 400}
    workers = [WorkerFacts(worker, capacity=capacity) for worker, capacity in capacities.items()]
    policy = make("weighted")
    counts = Counter(choose(policy, f"session:{n}", workers) for n in range(10_000))
    assert all(abs(counts[worker] / 10_000 - capacity / 1000) < 0.02 for worker, capacity in capacities.items())


def test_worker_that_grows_only_gains_sessions():
    small = [WorkerFacts(worker, capacity=100) for worker in WORKERS]
    grown = [WorkerFacts("w0", capacity=150), *small[1:]]
    policy, moved = make("weighted"), 0
    for number in range(2000):
        before, after = (choose(policy, f"session:{number}", workers) for workers in (small, grown))
        moved += before != after
        assert after in (before, "w0")
    assert 0 < moved / 2000 < 0.1


def test_weighted_score_is_finite_for_every_hash(monkeypatch):
    for hashed in (0, 2**64 - 1):
        monkeypatch.setattr("lockstep_router.policies.weighted.score", lambda *_, hashed=hashed: hashed)
        assert 0 < weighted_score("session:x", WorkerFacts("w0", capacity=5)) < float("inf")


def test_session_leaves_a_long_queue_for_the_least_load_per_capacity():
    workers = [
        WorkerFacts("big", queued=8, capacity=400),
        WorkerFacts("small", queued=4, capacity=100),
        WorkerFacts("full", queued=9, capacity=100),
    ]
    assert {choose(make("weighted"), f"session:{n}", workers) for n in range(50)} == {"big"}


# prefix_aware


def prompt(*words):
    """A prompt of ten blocks for each word, and the last token, which is always computed."""
    return [ord(word) * 1000 + at for word in words for at in range(10 * BLOCK_TOKENS)] + [1]


class Cached:
    """The blocks of one prompt."""

    def __init__(self, ids, tenant="t"):
        self.keys = RequestFacts("", tenant=tenant, prompt_ids=ids).prefix_keys

    def known(self, keys):
        return next(
            (n for n, (own, key) in enumerate(zip(self.keys, keys, strict=False)) if own != key), len(self.keys)
        )


def test_stream_goes_where_its_prefix_is():
    own = rank("session:x", WORKERS)[0]
    other = next(worker for worker in WORKERS if worker != own)
    workers = [WorkerFacts(w, blocks=Cached(prompt("a", "b")) if w == other else None) for w in WORKERS]
    policy = make("prefix_aware")
    assert choose(policy, "session:x", workers, tenant="t", prompt_ids=prompt("a", "b", "c")) == other
    assert choose(policy, "session:x", workers, tenant="t", prompt_ids=prompt("c", "a", "b")) == own
    assert choose(policy, "session:x", workers, tenant="other", prompt_ids=prompt("a", "b", "c")) == own


def test_longest_prefix_wins_and_less_than_half_counts_for_nothing():
    workers = [
        WorkerFacts("w0"),
        WorkerFacts("w1", blocks=Cached(prompt("a"))),
        WorkerFacts("w2", blocks=Cached(prompt("a", "b"))),
    ]
    policy = make("prefix_aware")
    for number in range(20):
        session = f"session:{number}"
        own = rank(session, ["w0", "w1", "w2"])[0]
        assert choose(policy, session, workers, tenant="t", prompt_ids=prompt("a", "b", "c")) == "w2"
        assert choose(policy, session, workers, tenant="t", prompt_ids=prompt("a", "c", "d")) == own


def test_loaded_worker_loses_its_prefixes_streams():
    policy = make("prefix_aware", load_bound=1.5)
    for running, expected in ((17, "w0"), (18, "w1")):
        workers = [
            WorkerFacts("w0", running=running, blocks=Cached(prompt("a"))),
            WorkerFacts("w1", running=5),
        ]
        assert choose(policy, "session:x", workers, tenant="t", prompt_ids=prompt("a")) == expected


def test_only_policies_that_use_prefixes_say_so():
    assert [name for name in BUILT_IN if make(name).uses_prefixes] == ["prefix_aware"]
    assert not make("prefix_aware").notes_sent


# Policies of other packages.


class LastOne(Policy):
    uses_prefixes = True

    def __init__(self):
        self.sent = []

    def choose(self, request, workers):
        if request.session == "raise":
            raise RuntimeError("broken")
        return "nobody" if request.session == "unknown" else workers[-1].worker_id

    def note_sent(self, request, worker):
        if request.session == "raise":
            raise RuntimeError("broken")
        self.sent.append(worker.worker_id)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package with entry points, as pip would."""

    def install(**points):
        info = tmp_path / "foreign-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[lockstep.policies]\n{lines}")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    (tmp_path / "foreign_policies.py").write_text("LastOne = None\ndef broken():\n    raise OSError('no disk')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import foreign_policies  # noqa: PLC0415

    foreign_policies.LastOne = LastOne
    yield install
    del sys.modules["foreign_policies"]


def test_policy_of_another_package_chooses(installed):
    installed(mine="foreign_policies:LastOne")
    policy = make("mine", policy="mine")
    assert policy.uses_prefixes
    assert choose(policy, "session:x", idle()) == "w7"
    policy.note_sent(RequestFacts("session:x"), WorkerFacts("w7"))
    assert policy._policy.sent == ["w7"]


@pytest.mark.parametrize("session", ["raise", "unknown"])
def test_sticky_chooses_when_it_fails(installed, session):
    installed(mine="foreign_policies:LastOne")
    policy, before = make("mine"), metrics.POLICY_FAILURES._value.get()
    assert choose(policy, session, idle()) == rank(session, WORKERS)[0]
    policy.note_sent(RequestFacts(session), WorkerFacts("w0"))
    failures = metrics.POLICY_FAILURES._value.get() - before
    assert failures == (2 if session == "raise" else 1)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("foreign_policies:broken", "no disk"),
        ("foreign_policies:missing", "missing"),
        ("not_there:policy", "not_there"),
        ("builtins:dict", "no Policy"),
    ],
)
def test_policy_that_cannot_be_used_ends_the_process_and_names_the_setting(installed, capsys, value, sentence):
    installed(mine=value)
    for flags, setting in ((["--policy", "mine"], "policy"), (["--model-policies", "m=mine"], "model_policies")):
        with pytest.raises(SystemExit) as caught:
            RouterSettings.load("router", ["--workers", "a:1", *flags])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert f"setting {setting}:" in error
        assert sentence in error


# Imbalance.


@pytest.mark.parametrize(
    ("requests", "ratio"), [([4, 4, 4], 1.0), ([6, 3, 3], 1.5), ([1, 0, 0], 1.0), ([0, 0], 1.0), ([3, 0, 0], 3.0)]
)
def test_imbalance_is_the_most_over_the_average(requests, ratio):
    assert imbalance(requests) == ratio


# In a router.


def test_settings_name_a_policy_for_each_model():
    given = RouterSettings.load(
        "router", ["--workers", "a:1", "--policy", "hybrid", "--model-policies", "a/b=c=weighted,d=round_robin"]
    )
    assert [given.policy_of(model) for model in ("a/b=c", "d", "e")] == ["weighted", "round_robin", "hybrid"]
    assert RouterSettings(workers=["a:1"], model_policies={"d": "stateless"}).policy_of("d") == "stateless"


async def test_router_uses_the_models_policy_and_shows_it(make_cluster):
    cluster = await make_cluster(3, policy="hybrid", model_policies={"reference": "round_robin"})
    before = metrics.PICKS.labels("round_robin").value
    for _ in range(6):
        assert (await cluster.complete()).status_code == 200
    assert [len(worker.submits) for worker in cluster.workers] == [2, 2, 2]
    assert metrics.PICKS.labels("round_robin").value == before + 6
    (model,) = status_body(cluster.router)["models"]
    assert model["policy"] == "round_robin"


async def test_imbalance_is_measured_for_models_with_ready_workers(make_cluster):
    cluster = await make_cluster(2)
    cluster.workers[0].queued = 6
    cluster.workers[1].queued = 2
    await eventually(lambda: cluster.router.workers.imbalances == {"reference": 1.5})
    assert metrics.LOAD_IMBALANCE.labels("reference")._value.get() == 1.5
    assert status_body(cluster.router)["models"][0]["load_imbalance"] == 1.5
    for worker in cluster.workers:
        await worker.kill()
    await eventually(lambda: cluster.router.workers.imbalances == {})
    # Other tests' routers in this process had other models.
    samples = [sample for metric in metrics.LOAD_IMBALANCE.collect() for sample in metric.samples]
    assert not any(sample.labels["model"] == "reference" for sample in samples)
