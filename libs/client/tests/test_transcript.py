"""A repeat gives only what is new, however its events are divided."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_client import Answer, Finish, ReasoningPiece, TextPiece, ToolCallPiece
from lockstep_client.channels import DivergedError
from lockstep_client.events import answer_of, events_of
from lockstep_client.sse import ServerSentEvent
from lockstep_client.transcript import Transcript

THOUGHT, ANSWER, ARGUMENTS = "I shall look.", "Here it is: 🙂", '{"city": "Köln"}'


def pieces(text, ends):
    """The text in pieces that end at these places."""
    places = sorted({0, len(text), *(end % (len(text) + 1) for end in ends)})
    return [text[begin:end] for begin, end in pairwise(places)]


def stream(call_id, ends):
    """An answer with reasoning, text and a tool call."""
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(THOUGHT, ends)]
    deltas += [{"content": piece} for piece in pieces(ANSWER, ends)]
    call = {"index": 0, "id": call_id, "type": "function", "function": {"name": "look", "arguments": ""}}
    deltas.append({"tool_calls": [call]})
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": each}}]} for each in pieces(ARGUMENTS, ends)]
    finishes = [None] * len(deltas) + ["tool_calls"]
    for delta, finish in zip([*deltas, {}], finishes, strict=True):
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        yield {"id": f"chatcmpl-{call_id}", "created": len(call_id), "choices": [choice]}


def passed(transcript, bodies):
    """What a client gets of chunks."""
    events = (transcript.pass_on(ServerSentEvent(json.dumps(body)), body) for body in bodies)
    return [json.loads(event.data) for event in events if event is not None]


def seen(bodies):
    """What a client makes of chunks."""
    events = [event for body in bodies for event in events_of(body, "")]
    calls = [event for event in events if isinstance(event, ToolCallPiece)]
    return {
        "reasoning": "".join(event.text for event in events if isinstance(event, ReasoningPiece)),
        "text": "".join(event.text for event in events if isinstance(event, TextPiece)),
        "names": [(call.id, call.name) for call in calls if call.name],
        "arguments": "".join(call.arguments for call in calls),
        "finishes": [event.reason for event in events if isinstance(event, Finish)],
        "heads": {(body["id"], body["created"]) for body in bodies},
    }


WHOLE = seen(list(stream("call-1", [])))
ENDS = st.lists(st.integers(0, 40), max_size=8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(ENDS, st.integers(0, 30)), max_size=3), ENDS)
def test_repeats_are_one_stream(broken, last):
    """Each run but the last breaks after some events; a repeat has other pieces and another id of the call."""
    transcript, gained = Transcript(), []
    for number, (ends, count) in enumerate(broken):
        gained += passed(transcript, list(stream("call-1" if number == 0 else f"call-{number}00", ends))[:count])
        transcript.start_over()
    is_first = not any(count for _, count in broken)
    gained += passed(transcript, stream("call-1" if is_first else "call-999", last))
    transcript.check_end()
    found = seen(gained)
    if is_first or broken[0][1]:
        assert found["heads"] == WHOLE["heads"]
    assert len(found["heads"]) == 1
    assert len(found["names"]) == 1
    for name in ("reasoning", "text", "arguments", "finishes"):
        assert found[name] == WHOLE[name]


@pytest.mark.parametrize(("old", "new"), [("look", "book"), ("Here", "There"), ("Köln", "Bonn"), ("shall", "will")])
def test_differences_are_found(old, new):
    transcript = Transcript()
    passed(transcript, list(stream("call-1", []))[:-1])
    transcript.start_over()
    changed = [json.loads(json.dumps(body, ensure_ascii=False).replace(old, new)) for body in stream("call-1", [7])]
    with pytest.raises(DivergedError):
        passed(transcript, changed)


def test_end_before_what_was_given_is_found():
    transcript = Transcript()
    passed(transcript, list(stream("call-1", []))[:-1])
    transcript.start_over()
    passed(transcript, list(stream("call-1", []))[:3])
    with pytest.raises(DivergedError):
        transcript.check_end()


def test_whole_answer_with_a_tool_call():
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
    message = {"role": "assistant", "content": None, "reasoning_content": THOUGHT, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    answer = answer_of({"id": "c", "model": "m", "choices": [choice], "usage": None})
    assert isinstance(answer, Answer)
    assert (answer.text, answer.choices[0].reasoning) == ("", THOUGHT)
    assert answer.choices[0].tool_calls[0].arguments == ARGUMENTS
