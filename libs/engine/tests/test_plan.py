"""Plans and results: what is unpacked is what was packed, and the largest ones fit the places made for them."""

import msgspec
import numpy as np
import pytest
from lockstep_engine.config import BLOCK_SIZE, SlidingWindow, WindowedLayers
from lockstep_engine.plan import (
    Plan,
    Result,
    RowSampling,
    StepLogprobs,
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
    message_sizes,
)
from lockstep_engine.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from lockstep_engine.sizes import pool_sizes
from specs import rank_spec

LARGEST = 2**31 - 1


def row_sampling(row, past=3):
    return RowSampling(
        sampling_row=row,
        temperature=0.1,
        top_k=LARGEST,
        top_p=0.1,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={LARGEST - each: 0.1 for each in range(MAX_LOGIT_BIAS)},
        logprobs=MAX_LOGPROBS,
        prompt_ids=[LARGEST] * past,
        emitted_ids=[LARGEST] * past,
        forbidden_ids=[LARGEST] * (MAX_STOP_IDS + 8),
        min_tokens=LARGEST,
    )


def make_plan(*, sequences, tokens, width, moves=0, scored=False, added=()):
    """Random numbers in every array."""
    rng = np.random.default_rng(sequences + tokens)

    def ints(*shape):
        return rng.integers(-1, LARGEST, shape, dtype=np.int32)

    return Plan(
        step=2**40,
        token_ids=ints(tokens),
        starts=ints(sequences),
        lengths=ints(sequences),
        sampling_rows=ints(sequences),
        samples=rng.integers(0, 2, sequences).astype(np.bool_),
        emitted=ints(sequences),
        uniforms=rng.random(sequences),
        tables=ints(sequences, width),
        moves=ints(moves, 2),
        late_moves=ints(moves, 2),
        added=list(added),
        targets=ints(tokens) if scored else None,
        vocabulary_logprobs=scored,
        hot_tables=ints(sequences, width) if moves else None,
    )


def same(one, other):
    """Field by field; arrays with their type, shape and alignment."""
    for name in one.__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            assert (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape), name
            assert theirs.flags.aligned, name
            assert theirs.tobytes() == mine.tobytes(), name
        else:
            assert theirs == mine, name
    return True


@pytest.mark.parametrize(
    "plan",
    [
        make_plan(sequences=1, tokens=1, width=1),
        make_plan(sequences=3, tokens=40, width=7, moves=5, scored=True, added=[row_sampling(0), row_sampling(2)]),
        make_plan(sequences=64, tokens=512, width=2, moves=1),
    ],
)
def test_a_rank_reads_the_plan_that_the_scheduler_made(plan):
    assert same(plan, decode_plan(encode_plan(plan)))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_driver_reads_the_result_that_rank_0_wrote(rows):
    scores = np.linspace(-3, 0, rows, dtype=np.float32)
    result = Result(
        7,
        [3, 5],
        [StepLogprobs(-0.5, [1, 2], [-0.5, -0.7]), None],
        12,
        3,
        unserved=[1],
        target_logprobs=scores,
        target_ranks=np.arange(rows, dtype=np.int32),
        vocabulary_logprobs=np.repeat(scores, 9).reshape(rows, 9),
    )
    assert same(result, decode_result(encode_result(result)))
    plain = Result(8, [], [], 0, 0)
    assert same(plain, decode_result(encode_result(plain)))


def test_an_array_of_another_type_is_refused_when_it_is_packed():
    plan = make_plan(sequences=1, tokens=1, width=1)
    plan.tables = plan.tables.astype(np.int64)
    with pytest.raises(KeyError):
        encode_plan(plan)


def test_a_plan_without_its_arrays_is_refused_when_it_is_unpacked():
    with pytest.raises(msgspec.ValidationError):
        decode_plan(msgspec.msgpack.encode([1, b"", b""]))


@pytest.mark.parametrize(("tokens", "prefill"), [(3, False), (4, True)])
def test_a_step_with_more_tokens_than_sequences_has_a_prefill(tokens, prefill):
    assert make_plan(sequences=3, tokens=tokens, width=1).has_prefill == prefill


@pytest.mark.parametrize(
    ("max_seqs", "context", "vocab", "windowed"),
    [
        (1, 64, 300, None),
        (8, 4096, 128_000, None),
        (3, 2, 40, None),
        (1, 131_072, 128_000, None),
        (8, 4096, 300, WindowedLayers(SlidingWindow(512), tuple(range(5)), 6)),
    ],
)
def test_the_largest_messages_of_an_engine_fit(max_seqs, context, vocab, windowed):
    """Every sampling row gets a new request at once, with penalties, bias and stop ids, and tables are as wide as they
    get, with every block moved out of the hot window.
    """
    spec = rank_spec(
        max_seqs=max_seqs, context_length=context, vocab_size=vocab, host_cache_bytes=2**40, windowed=windowed
    )
    plan_bytes, result_bytes = message_sizes(spec)
    plan = make_plan(
        sequences=max_seqs,
        tokens=spec.config.step_tokens,
        width=-(-context // BLOCK_SIZE),
        moves=max_seqs * (spec.hot_window.size + 1) // 2,
        scored=True,
        added=[row_sampling(max_seqs, past=context // 2)] * max_seqs,
    )
    pools = pool_sizes(spec, 2**60, 4, 1)
    slots = 4 if windowed is None else 4 * 6  # of a block that is compressed in one layer of six
    plan.spills = plan.loads = np.full((pools.hot + pools.cold, 1 + slots), LARGEST, dtype=np.int32)
    logprobs = StepLogprobs(-0.1, [LARGEST] * MAX_LOGPROBS, [-0.1] * MAX_LOGPROBS)
    scores = np.zeros(max_seqs, dtype=np.float32)
    result = Result(
        2**40,
        [LARGEST] * max_seqs,
        [logprobs] * max_seqs,
        2**40,
        2**40,
        unserved=list(range(max_seqs)),
        target_logprobs=scores,
        target_ranks=scores.astype(np.int32),
        vocabulary_logprobs=np.zeros((max_seqs, vocab), dtype=np.float32),
    )
    assert len(encode_plan(plan)) <= plan_bytes
    assert len(encode_result(result)) <= result_bytes
