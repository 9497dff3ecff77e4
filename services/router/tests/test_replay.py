"""An answer that is cut anywhere and continued from its journal is the answer that was not cut."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_store_contract import record
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_common.errors import LockstepError
from lockstep_router.generation.choices import Choice
from lockstep_router.generation.style import Style
from lockstep_router.journals import ChoiceLog, ChoiceRecord, Outcome, Piece, StoredStream
from lockstep_router.resumption import After, Event, Position, Reading
from lockstep_router.resumption.replay import Replay
from scripted_worker import VOCAB_SIZE

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
TEXT = "a naïve 😀 café costs 5€ — naïve indeed 中文 and 👩‍👩‍👧 too"
"""Its characters are spread over several tokens."""


class Growing:
    """A stream that a test lets grow."""

    def __init__(self, choices):
        self.logs = [ChoiceLog() for _ in range(choices)]
        self.outcome = None


def stream_of(choices, *, stops=(), with_logprobs=False):
    """The record of a stream with so many choices."""
    sampling = inference_pb2.Sampling(max_tokens=5000, logprobs=1 if with_logprobs else None)
    return replace(
        record(),
        stops=tuple(stops),
        style=Style("chat", stream=True, include_usage=True, logprobs=with_logprobs),
        choices=tuple(ChoiceRecord(f"s-{index}", sampling) for index in range(choices)),
    )


def pieces_of(index, ids, sizes, *, with_logprobs=False, finish=LENGTH, is_alone=False):
    """A choice's tokens in pieces of these sizes, one after the other. The finish comes with the last one or, if it is
    the limit's, alone; the token that stopped an answer comes with its finish, by itself if `is_alone`.
    """
    made, position = [], 0
    while position < len(ids):
        count = sizes[len(made) % len(sizes)]
        if is_alone and finish == STOP and position < len(ids) - 1:
            count = min(count, len(ids) - 1 - position)
        part = ids[position : position + count]
        probs = [
            inference_pb2.Logprobs(
                chosen=inference_pb2.TokenLogprob(id=each, logprob=-0.25 * (position + n)),
                top=[inference_pb2.TokenLogprob(id=each + 1, logprob=-1.0)],
            )
            for n, each in enumerate(part)
        ]
        made.append(Piece(index, position, part, probs if with_logprobs else ()))
        position += len(part)
    if (is_alone and finish != STOP) or not made:
        return [*made, Piece(index, position, [], (), finish)]
    return [*made[:-1], replace(made[-1], finish=finish)]


async def history(kept, source, tokenizer, after=None, feed=()):
    """The events that a reading gives; what is in `feed` comes one by one, after what was there has been read."""
    feed = iter(feed)
    arrival = Arrival(source, feed)
    reading = Reading(kept, source, tokenizer, arrival=arrival, on_close=lambda: None, is_resumed=after is not None)
    if after is not None:
        await reading.skip(After("r-1", str(after), "Last-Event-ID"))
    return [event async for events in reading.events() for event in events], reading


class Arrival:
    """Lets the stream grow whenever its reader waits."""

    def __init__(self, source, feed):
        self._source, self._feed = source, feed

    def clear(self):
        """Nothing: the next piece comes when it is waited for."""

    async def wait(self):
        piece = next(self._feed, None)
        if piece is None:
            self._source.outcome = Outcome()
        elif not self._source.logs[piece.index].finish:
            self._source.logs[piece.index].add(piece)


def trimmed(source, events):
    """The logs as the router writes them: without what follows a stop string."""
    for event in events:
        log = source.logs[event.delta.index]
        if event.delta.finish_reason is not None and event.delta.tokens < len(log.ids):
            del log.ids[event.delta.tokens :]
            del log.logprobs[event.delta.tokens :]
        if event.delta.finish_reason == "stop":
            log.finish = STOP
    return StoredStream(None, source.logs, Outcome())


def summary(events, choices):
    """For each choice: its text, its tokens with log probabilities and offsets, its finishes."""
    made = {index: ["", [], []] for index in range(choices)}
    for event in events:
        parts = made[event.delta.index]
        parts[0] += event.delta.text
        parts[1] += [(entry.logprobs.SerializeToString(), entry.text_offset) for entry in event.delta.entries]
        parts[2] += [event.delta.finish_reason] if event.delta.finish_reason else []
    return made


def undisturbed(kept, feed, tokenizer):
    """What a client gets that never leaves and has no journal."""
    made = [Choice(index, tokenizer, kept.stops) for index in range(len(kept.choices))]
    events = []
    for piece in feed:
        update = worker_pb2.StreamTokens(ids=piece.ids, logprobs=piece.logprobs, finish=piece.finish)
        delta = made[piece.index].feed(update)
        events += [] if delta is None else [Event(delta, None)]
    return summary(events, len(made)), sum(choice.tokens for choice in made)


async def check_every_cut(kept, feed, tokenizer):
    """Cut the answer after every event, and continue it from its journal."""
    choices = len(kept.choices)
    source = Growing(choices)
    events, whole = await history(kept, source, tokenizer, feed=feed)
    expected, tokens = undisturbed(kept, feed, tokenizer)
    assert summary(events, choices) == expected
    assert whole.usage.completion_tokens == tokens
    assert all(len(finishes) == 1 for _, _, finishes in expected.values())
    stored = trimmed(source, events)
    for cut in range(len(events) + 1):
        after = events[cut - 1].position if cut else Position.start(choices)
        rest, reading = await history(kept, stored, tokenizer, after)
        assert summary(events[:cut] + rest, choices) == expected, str(after)
        assert reading.usage == whole.usage
        assert reading.delivered_tokens + sum(max(0, each) for each in after.tokens) == whole.usage.completion_tokens
        assert str(reading.position) == str(events[-1].position)
    return expected


@given(
    data=st.data(),
    choices=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    with_logprobs=st.booleans(),
    is_alone=st.booleans(),
)
@settings(max_examples=60, deadline=None)
async def test_every_cut_of_any_answer(tokenizer, data, choices, sizes, with_logprobs, is_alone):
    text_ids = tokenizer.encode(TEXT)
    any_ids = st.lists(st.sampled_from(text_ids) | st.integers(0, VOCAB_SIZE - 1), max_size=25)
    ids = any_ids | st.integers(0, len(text_ids)).map(lambda count: text_ids[:count])
    stops = data.draw(st.lists(st.sampled_from(["naïve", "é c", "5€", "—", "👩‍👩", "zzz", "a"]), max_size=2))
    finish = data.draw(st.sampled_from([STOP, LENGTH]))
    chosen = [
        pieces_of(index, data.draw(ids), sizes, with_logprobs=with_logprobs, finish=finish, is_alone=is_alone)
        for index in range(choices)
    ]
    order = data.draw(st.permutations([index for index, pieces in enumerate(chosen) for _ in pieces]))
    iterators = [iter(pieces) for pieces in chosen]
    feed = [next(iterators[index]) for index in order]
    await check_every_cut(stream_of(choices, stops=stops, with_logprobs=with_logprobs), feed, tokenizer)


@pytest.mark.parametrize("stops", [[], ["indeed"], ["é costs"], ["👩‍👩‍👧"], ["zzz"]])
async def test_every_cut_of_a_text_of_many_bytes(tokenizer, stops):
    ids = tokenizer.encode(TEXT)
    assert any(tokenizer.token_text(each) is None for each in ids)
    expected = await check_every_cut(
        stream_of(1, stops=stops, with_logprobs=True), pieces_of(0, ids, [1], with_logprobs=True), tokenizer
    )
    assert expected[0][0] == (TEXT.partition(stops[0])[0] if stops else TEXT)
    assert expected[0][2] == (["stop"] if stops and stops[0] in TEXT else ["length"])


async def test_held_back_text_comes_with_a_finish_without_tokens(tokenizer):
    ids = tokenizer.encode("to be or")
    kept = stream_of(1, stops=["or not"])
    expected = await check_every_cut(kept, pieces_of(0, ids, [1], is_alone=True), tokenizer)
    assert expected[0] == ["to be or", [], ["length"]]


@pytest.mark.parametrize("stops", [(), (" too",)])
async def test_position_between_events_is_taken_too(tokenizer, stops):
    kept, ids = stream_of(1, stops=stops), tokenizer.encode(TEXT)
    source = Growing(1)
    source.logs[0].add(Piece(0, 0, ids, (), LENGTH))
    for tokens in range(len(ids) + 1):
        before = Replay(kept, [ChoiceLog(source.logs[0].ids[:tokens])], tokenizer).take()
        rest, _ = await history(kept, source, tokenizer, Position((tokens,), (False,)))
        text = "".join(delta.text for delta in [*before, *(event.delta for event in rest)])
        assert text == (TEXT.removesuffix(" too") if stops else TEXT)
        assert [event.delta.finish_reason for event in rest if event.delta.finish_reason] == [
            "stop" if stops else "length"
        ]


async def test_long_answers_are_read_in_parts(tokenizer):
    source = Growing(2)
    for log in source.logs:
        log.ids = array("I", [tokenizer.encode("a")[0]] * 5000)
        log.finish = LENGTH
    events, reading = await history(stream_of(2), source, tokenizer)
    assert len(events) > 30
    assert reading.usage.completion_tokens == 10_000
    rest, _ = await history(stream_of(2), source, tokenizer, Position((4990, 5000), (False, True)))
    assert [(event.delta.index, event.delta.tokens) for event in rest] == [(0, 5000)]


@pytest.mark.parametrize(("tokens", "finished"), [((4,), (False,)), ((2,), (True,)), ((4,), (True,)), ((9,), (False,))])
async def test_positions_that_the_stream_has_not_reached(tokenizer, tokens, finished):
    source = Growing(1)
    source.logs[0].ids = array("I", tokenizer.encode("a b c")[:3])
    with pytest.raises(LockstepError) as refused:
        await history(stream_of(1), source, tokenizer, Position(tokens, finished))
    assert refused.value.field == "Last-Event-ID"
