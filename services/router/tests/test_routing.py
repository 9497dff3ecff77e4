"""Sessions stick to workers, and only those move that must."""

from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_router.workers.routing import Load, choose, rank

WORKERS = [f"w{index}" for index in range(8)]
names = st.text(alphabet="abé-0\0", max_size=12)
worker_ids = st.lists(names, min_size=1, max_size=8, unique=True)


@given(names, worker_ids)
def test_order_depends_on_nothing_but_names(session, workers):
    order = rank(session, workers)
    assert sorted(order) == sorted(workers)
    assert rank(session, reversed(workers)) == order


@given(names, worker_ids)
def test_worker_that_leaves_takes_only_its_own_sessions(session, workers):
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


@given(names, st.lists(st.integers(0, 9), min_size=3, max_size=3), st.integers(0, 5))
@settings(max_examples=60)
def test_session_leaves_its_worker_only_for_a_long_queue(session, queues, threshold):
    loads = [Load(f"w{index}", queued, 0) for index, queued in enumerate(queues)]
    own = rank(session, [load.worker_id for load in loads])[0]
    queued = {load.worker_id: load.queued for load in loads}
    chosen = choose(session, loads, threshold)
    if queued[own] <= threshold:
        assert chosen == own
    else:
        assert queued[chosen] == min(queues)


def test_equally_loaded_workers_are_told_apart_by_preference():
    loads = [Load(worker, 5, 5) for worker in WORKERS]
    assert choose("session:x", loads, 2) == rank("session:x", WORKERS)[0]


def test_running_streams_break_ties_between_queues():
    own = rank("session:x", ["w0", "w1", "w2"])[0]
    loads = [Load(w, 9 if w == own else 0, 4 if w == "w1" else 1) for w in ("w0", "w1", "w2")]
    expected = min((load for load in loads if load.worker_id != own), key=lambda load: load.running).worker_id
    assert choose("session:x", loads, 2) == expected


def test_burst_does_not_all_go_to_the_same_other_worker():
    own = rank("session:x", ["w0", "w1", "w2"])[0]
    loads = [Load(w, 9 if w == own else 0, 0, sent=3 if w == "w1" else 0) for w in ("w0", "w1", "w2")]
    expected = next(w for w in ("w0", "w2", "w1") if w != own)
    assert choose("session:x", loads, 2) == expected
