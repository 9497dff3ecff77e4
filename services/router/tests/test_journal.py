"""The journal takes exactly the next tokens of the current attempt, whatever arrives."""

from hypothesis import given
from hypothesis import strategies as st
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_router.streams.journal import Acceptance, Journal


def journal(max_tokens=20, logprobs=None):
    sampling = inference_pb2.Sampling(max_tokens=max_tokens, logprobs=logprobs)
    made = Journal("s", "m", "d", [1, 2], sampling, "session")
    made.next_submit("w0")
    return made


def frame(position, ids, attempt=1, **fields):
    return worker_pb2.StreamTokens(stream_id="s", attempt=attempt, position=position, ids=ids, **fields)


arbitrary_frames = st.lists(
    st.builds(
        frame,
        st.integers(0, 12),
        st.lists(st.integers(0, 9), max_size=4),
        st.integers(0, 3),
        finish=st.sampled_from([0, 0, 0, 1]),
    ),
    max_size=30,
)


@given(arbitrary_frames)
def test_emitted_ids_only_ever_grow_at_the_end(frames):
    record = journal(max_tokens=10)
    for one in frames:
        before = list(record.emitted_ids)
        acceptance = record.accept(one)
        if acceptance is Acceptance.ACCEPTED:
            assert one.attempt == record.attempt
            assert record.emitted_ids == before + list(one.ids)
            assert not one.ids or one.position == len(before)
        else:
            assert record.emitted_ids == before
        assert len(record.emitted_ids) <= 10


def test_acceptance_of_updates():
    record = journal(max_tokens=4)
    assert record.accept(frame(0, [5, 6])) is Acceptance.ACCEPTED
    assert record.accept(frame(0, [5, 6])) is Acceptance.DUPLICATE
    assert record.accept(frame(1, [6, 7])) is Acceptance.DUPLICATE
    assert record.accept(frame(3, [7])) is Acceptance.GAP
    assert record.accept(frame(2, [7], attempt=2)) is Acceptance.STALE_ATTEMPT
    assert record.accept(frame(2, [])) is Acceptance.EMPTY
    assert record.accept(frame(2, [7, 8, 9])) is Acceptance.MALFORMED
    assert record.accept(frame(2, [7], finish=77)) is Acceptance.MALFORMED
    assert record.accept(frame(2, [7], finish=inference_pb2.FINISH_REASON_TOOL_CALLS)) is Acceptance.MALFORMED
    assert record.accept(frame(0, [], finish=1)) is Acceptance.MALFORMED
    assert record.accept(frame(3, [], finish=1)) is Acceptance.GAP
    assert record.accept(frame(2, [7, 8])) is Acceptance.ACCEPTED
    assert record.is_full
    assert record.accept(frame(4, [], finish=1)) is Acceptance.ACCEPTED


def test_tokens_without_the_log_probabilities_asked_for_are_malformed():
    record = journal(logprobs=0)
    assert record.accept(frame(0, [5])) is Acceptance.MALFORMED
    assert record.accept(frame(0, [5], logprobs=[inference_pb2.Logprobs()])) is Acceptance.ACCEPTED


def test_submit_carries_all_that_another_worker_needs():
    record = journal()
    record.accept(frame(0, [5, 6]))
    submit = record.next_submit("w1")
    assert (submit.stream_id, submit.attempt) == ("s", 2)
    assert (list(submit.prompt_ids), list(submit.emitted_ids)) == ([1, 2], [5, 6])
    assert submit.sampling == record.sampling
    assert record.accept(frame(2, [7], attempt=1)) is Acceptance.STALE_ATTEMPT
