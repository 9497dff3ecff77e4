"""A stream whose connections break anywhere gives what the undisturbed one gives: nothing lost, doubled or changed."""

import itertools
import json
from dataclasses import replace

import fake_router
import pytest
from fake_router import FakeRouter, Network, error, text_of, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_client import (
    ConnectionFailedError,
    DeadlineExceededError,
    LockstepError,
    Policy,
    ProtocolError,
    StreamDiverged,
    StreamLost,
)
from lockstep_client.sse import Decoder, ServerSentEvent
from lockstep_client.steps import Head

A, B = "http://10.0.0.1", "http://10.0.0.2"
POLICY = Policy()
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
QUESTION = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "seed": 3}
CHAT_BODY = QUESTION | {"stream": True, "n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
TEXT_BODY = {"model": "reference", "prompt": "hi", "max_tokens": 5, "seed": 3, "stream": True}
RESPONSES = "/v1/responses"
RESPONSE_BODY = {"model": "reference", "input": "hi", "max_output_tokens": 4, "seed": 3, "stream": True}
BODIES = {CHAT: CHAT_BODY, TEXT: TEXT_BODY, RESPONSES: RESPONSE_BODY}
STRIDES = {CHAT: 37, TEXT: 1, RESPONSES: 7}
"""Bytes between two cuts: every byte of the short stream, and of the long one all parts of an event in turn."""


def history(outputs):
    """For each choice its roles, text, tokens with log probabilities and finishes; the usages and the end marks."""
    head, *events = outputs
    assert head.status == 200
    if events[0].type.startswith("response."):
        return response_history(events)
    choices, usages, ends, heads = {}, [], [], set()
    for event in events:
        assert isinstance(event, ServerSentEvent)
        if event.data == "[DONE]":
            ends.append(event.data)
            continue
        body = json.loads(event.data)
        heads.add((body["id"], body["created"]))
        usages += [body["usage"]] if body.get("usage") else []
        for choice in body["choices"]:
            roles, text, tokens, finishes = choices.setdefault(choice["index"], ([], [], [], []))
            delta = choice.get("delta", choice)
            roles += [delta["role"]] if "role" in delta else []
            text.append(delta.get("content", delta.get("text")) or "")
            listed = choice.get("logprobs") or {}
            tokens += [entry["token"] for entry in listed.get("content", ())] + listed.get("tokens", [])
            finishes += [choice["finish_reason"]] if choice.get("finish_reason") else []
    assert len(heads) == 1
    return {index: (r, "".join(t), k, f) for index, (r, t, k, f) in choices.items()}, usages, ends


IDS = ("id", "call_id", "created_at")


def response_history(events):
    """The events of a response without ids, which stay the same, and with texts joined: a repeat may cut them."""
    bodies = [json.loads(event.data) for event in events]
    assert [event.type for event in events] == [body["type"] for body in bodies]
    assert [body.pop("sequence_number") for body in bodies] == list(range(len(bodies)))
    ids = {}
    for body in bodies:
        response = body.get("response") or {}
        items = [*enumerate(response.get("output", ())), (body.get("output_index"), body.get("item") or {})]
        given = [(None, response), *items]
        given = [((index, name), each.pop(name)) for index, each in given for name in IDS if name in each]
        given += [((body["output_index"], "id"), body.pop("item_id"))] if "item_id" in body else []
        for place, value in given:
            assert ids.setdefault(place, value) == value, place
    joined = []
    for body in bodies:
        if joined and "delta" in body and joined[-1]["type"] == body["type"]:
            joined[-1]["delta"] += body["delta"]
        else:
            joined.append(body)
    return joined


def after_finish(path, body):
    """The bytes of a stream up to the end of what completes its answer."""
    mark = b'"response.completed"' if path == RESPONSES else b'"finish_reason": "length"'
    at = body.rindex(mark)
    return at + min(body[at:].index(end) + len(end) for end in (b"\n\n", b"\r\n\r\n") if end in body[at:])


def undisturbed(path):
    return history(Network({A: FakeRouter()}).request(path, BODIES[path], POLICY))


def length(path, **changes):
    router = FakeRouter(**changes)
    return len(router.respond("POST", path, {}, json.dumps(BODIES[path]).encode())[2])


@pytest.mark.parametrize("path", [CHAT, pytest.param(TEXT, marks=pytest.mark.slow), RESPONSES])
@pytest.mark.parametrize("line_end", [pytest.param("\n", marks=pytest.mark.slow), "\r\n"])
def test_cut_at_every_byte_is_resumed(path, line_end):
    expected = undisturbed(path)
    body = FakeRouter(line_end=line_end).respond("POST", path, {}, json.dumps(BODIES[path]).encode())[2]
    for cut in range(0, length(path, line_end=line_end), STRIDES[path] + 10 * (line_end == "\r\n")):
        router = FakeRouter(line_end=line_end)
        network = Network({A: router}, [cut])
        assert history(network.request(path, BODIES[path], POLICY)) == expected, cut
        assert len(router.generations) == 1, cut
        assert len(network.sent) == (1 if cut >= after_finish(path, body) else 2), cut


@pytest.mark.parametrize("path", [CHAT, pytest.param(TEXT, marks=pytest.mark.slow), RESPONSES])
@pytest.mark.parametrize("tokens_per_event", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_cut_at_every_byte_is_repeated_elsewhere(path, tokens_per_event):
    """The router dies with the connection; the other one never heard of the stream and groups tokens otherwise."""
    expected = undisturbed(path)
    for cut in range(0, length(path), STRIDES[path] + 10 * (tokens_per_event > 1)):
        first, second = FakeRouter("first"), FakeRouter("second", tokens_per_event)
        network = Network({A: first, B: second}, [cut])
        outputs = network.request(path, BODIES[path], POLICY, seed=cut)
        died = None
        given_outputs = []
        for output in outputs:
            given_outputs.append(output)
            if died is None:
                died = A if network.sent[0][0] is first else B
                network.routers[died] = None
        assert history(given_outputs) == expected, cut
        # An answer is not computed again for its end mark or its usage.
        origin = network.sent[0][0]
        is_complete = cut >= after_finish(path, origin.events(next(iter(origin.kept)), None)[2])
        assert len(first.generations) + len(second.generations) == (1 if is_complete else 2), cut
        keys = {
            headers["idempotency-key"]
            for router in (first, second)
            for method, _, headers in router.seen
            if method == "POST"
        }
        assert len(keys) == 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.one_of(st.none(), st.integers(0, 3000)), max_size=12),
    path=st.sampled_from([CHAT, TEXT, RESPONSES]),
    chunk_bytes=st.integers(1, 200),
    forgets=st.booleans(),
    group=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_any_number_of_cuts(cuts, path, chunk_bytes, forgets, group, seed):
    first, second = FakeRouter("first"), FakeRouter("second", group)
    network = Network({A: first, B: second}, cuts, chunk_bytes=chunk_bytes)
    outputs = []
    for output in network.request(path, BODIES[path], replace(POLICY, retries=50), seed=seed):
        outputs.append(output)
        if forgets and len(outputs) % 5 == 4:
            first.forget()
    assert history(outputs) == undisturbed(path)


def test_lost_stream_is_a_typed_error_with_what_came():
    first, second = FakeRouter("first"), FakeRouter("second")
    network = Network({A: first, B: second}, [900])
    outputs = network.request(TEXT, TEXT_BODY, replace(POLICY, on_lost="error"))
    assert isinstance(next(outputs), Head)
    first.resumes = second.resumes = False
    with pytest.raises(StreamLost) as lost:
        list(outputs)
    received = lost.value.received
    assert received.events > 1
    assert received.texts == {0: "".join(tokens_of(json.dumps("hi"), 3, 5)[: received.events])}
    assert received.stream_id in received.last_event_id
    assert received.texts[0] not in repr(lost.value) + repr(received)


@pytest.mark.parametrize("tokens_per_event", [1, 3])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2]]])
def test_usage_is_waited_for_only_if_no_finish_has_it(prompt, tokens_per_event):
    """Cut between the last finish and the end mark, for each number of choices, by a router that forgets."""
    fields = TEXT_BODY | {"prompt": prompt, "n": 2}
    choices = 4 if prompt in (["a", "b"], [[1], [2]]) else 2
    for wants_usage in (False, True):
        body = fields | ({"stream_options": {"include_usage": True}} if wants_usage else {})
        for tells_usage in (False, True):
            router = FakeRouter(tokens_per_event=tokens_per_event, tells_usage=tells_usage)
            router.make = _with_choices(router, choices)
            content = router.respond("POST", TEXT, {}, json.dumps(body).encode())[2]
            expected = history(Network({A: router}).request(TEXT, body, POLICY))
            router.generations.clear()
            network = Network({A: router}, [after_finish(TEXT, content)])
            outputs = []
            for output in network.request(TEXT, body, POLICY):
                outputs.append(output)
                router.forget()
            assert history(outputs) == expected
            assert len(router.generations) == (2 if wants_usage and not tells_usage else 1)
            assert len(expected[0]) == choices


def _with_choices(router, choices):
    make = router.make
    return lambda stream_id, path, body: make(stream_id, path, body | {"n": choices})


def test_complete_answer_needs_no_router_that_may_be_lost():
    content = FakeRouter().respond("POST", TEXT, {}, json.dumps(TEXT_BODY).encode())[2]
    network = Network({A: FakeRouter()}, [after_finish(TEXT, content)])
    outputs = network.request(TEXT, TEXT_BODY, replace(POLICY, on_lost="error"))
    collected = [next(outputs)]
    network.routers[A] = None
    assert history([*collected, *outputs]) == undisturbed(TEXT)
    assert network.clock.pauses == []


@pytest.mark.parametrize("code", ["draining", "internal"])
def test_failure_after_the_last_finish_is_none(code):
    router = FakeRouter(error_after=(TEXT_BODY["max_tokens"] + 1, {"message": "shutting down", "code": code}))
    assert history(Network({A: router}).request(TEXT, TEXT_BODY, POLICY)) == undisturbed(TEXT)
    assert len(router.generations) == 1


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_repeat_that_differs_is_refused(path):
    first, second = FakeRouter("router"), FakeRouter("router", salt="other")
    body = FakeRouter("router").respond("POST", path, {}, json.dumps(BODIES[path]).encode())[2]
    network = Network({A: first, B: second}, [after_finish(path, body) - 100])
    outputs = network.request(path, BODIES[path], POLICY)
    next(outputs)
    origin = network.sent[0][0]
    network.routers[A if origin is first else B] = None
    with pytest.raises(StreamDiverged) as diverged:
        list(outputs)
    assert diverged.value.received.texts[0]


def test_repeat_that_ends_early_is_refused():
    first, second = FakeRouter("router"), FakeRouter("router")
    network = Network({A: first, B: second}, [length(TEXT) - 400])
    outputs = network.request(TEXT, TEXT_BODY, POLICY)
    next(outputs)
    origin, other = (A, second) if network.sent[0][0] is first else (B, first)
    network.routers[origin] = None
    make = other.make
    other.make = lambda stream_id, path, body: make(stream_id, path, body | {"max_tokens": 2})
    with pytest.MonkeyPatch.context() as patch:
        tokens = fake_router.tokens_of
        patch.setattr(fake_router, "tokens_of", lambda prompt, seed, count: tokens(prompt, seed, 5)[:count])
        with pytest.raises(StreamDiverged):
            list(outputs)


def test_seed_is_drawn_once_and_sent_to_every_router():
    first, second = FakeRouter("first"), FakeRouter("second")
    body = {name: value for name, value in TEXT_BODY.items() if name != "seed"}
    network = Network({A: first, B: second}, [700])
    outputs = network.request(TEXT, body, POLICY)
    collected = [next(outputs)]
    network.routers[A if network.sent[0][0] is first else B] = None
    collected += list(outputs)
    (one,), (two,) = first.generations, second.generations
    assert one == two
    text = text_of(json.dumps("hi"), one["seed"], 5)
    assert history(collected)[0][0][1] == text


@pytest.mark.parametrize("path", [TEXT, RESPONSES])
def test_stream_that_fails_for_a_time_is_repeated(path):
    draining = {"message": "shutting down", "code": "draining"}
    router = FakeRouter(error_after=(5, draining))
    network = Network({A: router})
    assert history(network.request(path, BODIES[path], POLICY)) == undisturbed(path)
    assert len(router.generations) == 2
    assert network.clock.pauses


class Leaving(FakeRouter):
    """A router that leaves its streams to another one when they fail."""

    peer = None

    def events(self, stream_id, after):
        kept, fails = self.kept[stream_id], self.error_after is not None
        response = super().events(stream_id, after)
        if fails:
            self.peer.kept[stream_id] = kept
            self.peer.error_after = None
        return response


@pytest.mark.parametrize("on_lost", ["restart", "error"])
@pytest.mark.parametrize("code", ["draining", "unavailable", "worker_lost", "overloaded"])
def test_stream_that_another_router_continues_is_resumed_there(code, on_lost):
    routers = [Leaving(name, error_after=(3, {"message": "no more", "code": code})) for name in ("first", "second")]
    routers[0].peer, routers[1].peer = reversed(routers)
    network = Network(dict(zip((A, B), routers, strict=True)))
    policy = replace(POLICY, on_lost=on_lost)
    assert history(network.request(TEXT, TEXT_BODY, policy)) == undisturbed(TEXT)
    assert sum(len(router.generations) for router in routers) == 1
    assert [method for _, method in network.sent] == ["POST", "GET"]
    assert not network.clock.pauses


def test_failure_without_anything_new_is_not_resumed_again():
    """A stream that has failed where it ran gives its failure again."""
    router = FakeRouter(error_after=(3, {"message": "waited too long", "code": "unavailable"}))
    events = router.events

    def keep(stream_id, after):
        kept, error_after = router.kept[stream_id], router.error_after
        response = events(stream_id, after)
        if len(router.generations) == 1:
            kept.key = None  # the key of a stream that has failed is free
            router.kept[stream_id], router.error_after = kept, error_after
        return response

    router.events = keep
    network = Network({A: router})
    assert history(network.request(TEXT, TEXT_BODY, POLICY)) == undisturbed(TEXT)
    assert [method for _, method in network.sent][:3] == ["POST", "GET", "POST"]


def test_failure_is_given_to_who_wants_no_repeat():
    router = FakeRouter(error_after=(3, {"message": "no more", "code": "draining"}))
    *_, last = Network({A: router}).request(TEXT, TEXT_BODY, replace(POLICY, on_lost="error"))
    assert json.loads(last.data)["error"]["code"] == "draining"
    assert len(router.generations) == 1


@pytest.mark.parametrize("path", [TEXT, RESPONSES])
def test_stream_that_fails_for_good_reports_it(path):
    router = FakeRouter(error_after=(3, {"message": "bad", "code": "internal"}))
    *_, last = Network({A: router}).request(path, BODIES[path], POLICY)
    body = json.loads(last.data)
    assert body.get("response", body)["error"]["code"] == "internal"
    assert len(router.seen) == 1


@pytest.mark.parametrize("status", [502, 503, 504, 429])
def test_refusals_that_pass_are_waited_out(status):
    router = FakeRouter(refusals=[error(status, "x", "later")] * 2)
    network = Network({A: router})
    assert history(network.request(CHAT, CHAT_BODY, POLICY)) == undisturbed(CHAT)
    assert len(network.clock.pauses) == 2
    assert network.clock.pauses[0] <= POLICY.backoff_s


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured(status):
    refusal = (status, {"retry-after": "7"}, b"{}")
    network = Network({A: FakeRouter(refusals=[refusal])})
    assert history(network.request(CHAT, CHAT_BODY, POLICY)) == undisturbed(CHAT)
    assert network.clock.pauses == [7.0]


def test_stream_that_fails_without_tries_left_has_its_own_error():
    router = FakeRouter(error_after=(0, {"message": "the worker is gone", "code": "unavailable"}))
    policy = replace(POLICY, retries=0)
    with pytest.raises(LockstepError, match="the worker is gone"):
        list(Network({A: router}).request(CHAT, CHAT_BODY, policy))


def test_retry_after_that_is_too_long_fails_at_once():
    network = Network({A: FakeRouter(refusals=[(429, {"retry-after": "3600"}, b"{}")] * 2)})
    head, _ = network.request(CHAT, CHAT_BODY, POLICY)
    assert (head.status, head.headers["retry-after"]) == (429, "3600")
    assert network.clock.pauses == []


def test_overloaded_router_is_left_for_another_at_once():
    refusing, other = FakeRouter(refusals=[(503, {"retry-after": "5"}, b"{}")] * 9), FakeRouter("other")
    network = Network({A: refusing, B: other})
    for number in range(6):
        assert history(network.request(CHAT, CHAT_BODY, POLICY, seed=number)) == undisturbed(CHAT)
    assert network.clock.pauses == []


def test_client_errors_are_not_retried():
    for status, code in (
        (400, "invalid_request"),
        (401, "invalid_api_key"),
        (404, "model_not_found"),
        (422, "x"),
        (500, "internal"),
    ):
        network = Network(
            {
                A: FakeRouter(refusals=[error(status, code, "no")] * 2),
                B: FakeRouter(refusals=[error(status, code, "no")] * 2),
            }
        )
        head, content = network.request(CHAT, CHAT_BODY, POLICY)
        assert (head.status, json.loads(content)["error"]["code"]) == (status, code)
        assert len(network.sent) == 1


def test_tries_are_bounded_and_jittered():
    network = Network({A: None, B: None})
    with pytest.raises(ConnectionFailedError):
        list(network.request(CHAT, CHAT_BODY, POLICY))
    pauses = network.clock.pauses
    assert len(pauses) == POLICY.retries
    limits = [POLICY.backoff_s * 2**n for n in range(POLICY.retries)]
    assert all(0 <= pause <= limit for pause, limit in zip(pauses, limits, strict=True))
    assert len(set(pauses)) == len(pauses)


def test_connection_that_always_breaks_ends():
    network = Network({A: FakeRouter()}, itertools.repeat(20, 1000))
    with pytest.raises(ConnectionFailedError):
        list(network.request(CHAT, CHAT_BODY, POLICY))
    assert len(network.sent) <= 2 * (POLICY.retries + 1)


def test_deadline_ends_everything():
    network = Network({A: None})
    with pytest.raises((DeadlineExceededError, ConnectionFailedError)):
        list(network.request(CHAT, CHAT_BODY, replace(POLICY, timeout_s=1.0, retries=1000)))
    assert network.clock.now_s <= 101.0


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, TEXT_BODY),
        (TEXT, TEXT_BODY | {"stream": False}),
        ("/v1/embeddings", {"model": "reference", "input": ["hi"]}),
        ("/v1/models", None),
    ],
)
def test_deadline_ends_an_answer_that_trickles(path, body, refuses):
    """A byte from time to time is no silence."""
    router = FakeRouter(refusals=[error(503, "overloaded", "full")] * 9 if refuses else [])
    network = Network({A: router}, chunk_bytes=1)
    network.read_s = 1.0
    with pytest.raises(DeadlineExceededError):
        list(network.request(path, body, replace(POLICY, timeout_s=10.0)))
    assert network.clock.now_s <= 100 + 10 + POLICY.silence_timeout_s


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_deadline_does_not_fail_an_answer_whose_choices_are_complete(path):
    """Whatever it cuts off: an answer has one end."""
    body = FakeRouter().respond("POST", path, {}, json.dumps(BODIES[path]).encode())[2]
    complete_at, expected = after_finish(path, body), undisturbed(path)
    for bytes_in_time in range(complete_at - 40, len(body) + 2):
        network = Network({A: FakeRouter()}, chunk_bytes=1)
        network.read_s = 1.0
        policy = replace(POLICY, timeout_s=bytes_in_time + 0.5)
        outputs = []
        try:
            outputs.extend(network.request(path, BODIES[path], policy))
        except DeadlineExceededError:
            assert bytes_in_time < complete_at
            continue
        assert bytes_in_time >= complete_at
        assert history(outputs) == expected
        assert network.clock.now_s <= 100 + bytes_in_time + 1.5


def test_deadline_is_told_to_the_router():
    router = FakeRouter()
    list(Network({A: router}).request(CHAT, CHAT_BODY, replace(POLICY, timeout_s=30.0)))
    assert 29 < float(router.seen[0][2]["x-request-timeout"]) <= 30


@pytest.mark.parametrize(
    ("kind", "timeout_s", "is_avoided"),
    [
        ("silent", 7.0, False),
        ("connect", 7.0, False),
        ("broken", 7.0, True),
        ("late", 7.0, False),
        ("silent", 60.0, True),
        ("late", 60.0, True),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_router_is_avoided_for_a_failure_of_its_own_alone(path, kind, timeout_s, is_avoided):
    """Not because the caller's own deadline has ended the wait for it."""
    network = Network({A: FakeRouter("first"), B: FakeRouter("second")})
    network.silences, network.silence_kind = 1, kind
    outputs = network.request(path, BODIES.get(path), replace(POLICY, timeout_s=timeout_s))
    if timeout_s < POLICY.silence_timeout_s:
        with pytest.raises(DeadlineExceededError):
            list(outputs)
    else:
        head, *_ = outputs
        assert head.status == 200
    failed = network.sent[0][0].name
    asked = {network.routers[network.known.pick(()).root].name for _ in range(20)}
    assert asked == ({"first", "second"} - {failed} if is_avoided else {"first", "second"})


def test_router_of_a_stream_is_not_avoided_for_the_silence_before_the_callers_deadline():
    network = Network({A: FakeRouter("first"), B: FakeRouter("second")}, [300])
    network.cut_kind = "silent"
    with pytest.raises(DeadlineExceededError):
        list(network.request(CHAT, CHAT_BODY, replace(POLICY, timeout_s=7.0)))
    assert len(network.sent) == 1
    assert {network.known.pick(()).root for _ in range(20)} == {A, B}


def test_router_is_not_avoided_for_a_call_that_the_deadline_has_ended():
    network = Network({A: FakeRouter("first"), B: FakeRouter("second")}, [300])
    network.cut_kind, network.late_s = "late", 60.0
    with pytest.raises(DeadlineExceededError):
        list(network.request(CHAT, CHAT_BODY, replace(POLICY, timeout_s=60.0)))
    assert {network.known.pick(()).root for _ in range(20)} == {A, B}


def test_call_that_the_deadline_has_ended_a_little_early_is_that_error_too():
    network = Network({A: FakeRouter()})
    network.silences, network.silence_kind = 1, "late"
    policy = replace(POLICY, timeout_s=60.0, silence_timeout_s=60.0 - 2**-11)  # routers are told milliseconds
    with pytest.raises(DeadlineExceededError):
        list(network.request("/v1/models", None, policy))


def test_silent_stream_is_resumed():
    router = FakeRouter()
    network = Network({A: router})
    network.silences = 1
    assert history(network.request(CHAT, CHAT_BODY, POLICY)) == undisturbed(CHAT)
    assert network.clock.now_s >= 100 + POLICY.silence_timeout_s


@pytest.mark.parametrize(
    ("reported_s", "changes", "expected_s"),
    [
        ("18.75", {}, 23.75),
        ("18.75", {"keepalive_slack_s": None}, 45.0),
        ("", {}, 45.0),
        ("soon", {}, 45.0),
        ("100", {}, 45.0),
        ("18.75", {"timeout_s": 7.0}, 7.0),
    ],
)
def test_stream_is_silent_for_as_long_as_its_router_has_reported(reported_s, changes, expected_s):
    network = Network({A: FakeRouter(max_silence=reported_s)}, [300])
    assert history(network.request(CHAT, CHAT_BODY, replace(POLICY, **changes))) == undisturbed(CHAT)
    assert network.expected == [pytest.approx(expected_s)] * 2


def test_head_of_a_stream_comes_as_soon_as_a_comment():
    network = Network({A: FakeRouter(max_silence="2.5", resumes=False)}, [300])
    assert history(network.request(CHAT, CHAT_BODY, POLICY)) == undisturbed(CHAT)
    # Nothing was known at first, and a router that resumes a stream may have to fetch it from elsewhere.
    assert [method for _, method in network.sent] == ["POST", "GET", "POST"]
    assert network.waits == [45.0, 45.0, 7.5]


def test_what_a_router_has_told_is_forgotten_when_a_stream_does_not_tell_it():
    router = FakeRouter(max_silence="2.5")
    network = Network({A: router})
    assert history(network.request(CHAT, CHAT_BODY, POLICY)) == undisturbed(CHAT)
    router.max_silence = ""
    assert history(network.request(CHAT, CHAT_BODY, POLICY)) == undisturbed(CHAT)
    assert history(network.request(CHAT, CHAT_BODY, POLICY)) == undisturbed(CHAT)
    assert network.expected == [7.5, 45.0, 45.0]


def test_whole_answer_joins_its_generation_on_a_router_that_lives():
    router = FakeRouter()
    network = Network({A: router, B: FakeRouter("other")}, [40])
    _, content = network.request(TEXT, TEXT_BODY | {"stream": False}, POLICY)
    assert json.loads(content)["choices"][0]["text"] == text_of(json.dumps("hi"), 3, 5)
    assert {each for each, _ in network.sent} == {network.sent[0][0]}
    assert len(network.sent[0][0].generations) == 1


def test_whole_answer_that_takes_long_is_waited_for():
    router = FakeRouter()
    network = Network({A: router})
    network.silences = 8
    _, content = network.request(TEXT, TEXT_BODY | {"stream": False}, POLICY)
    assert json.loads(content)["choices"]
    assert network.clock.pauses == [POLICY.silence_timeout_s] * 8
    assert len(router.generations) == 1


def test_whole_answer_of_a_dead_router_comes_from_another():
    first, second = FakeRouter("first"), FakeRouter("second")
    network = Network({A: first, B: second}, [40])
    network.routers[A] = None
    _, content = network.request(TEXT, TEXT_BODY | {"stream": False}, POLICY)
    assert json.loads(content)["choices"][0]["text"] == text_of(json.dumps("hi"), 3, 5)


def test_addresses_of_a_name_are_routers():
    first, second = FakeRouter("first"), FakeRouter("second")
    network = Network({"http://routers.example:8000": None})
    outputs = network.request(CHAT, CHAT_BODY, POLICY)
    network.addresses["routers.example"] = ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.3"]
    network.routers = {"10.0.0.1": None, "10.0.0.2": second, "10.0.0.3": first}
    network.cuts = [300]
    collected = [next(outputs)]
    network.routers = {
        name: None if router is network.sent[0][0] else router for name, router in network.routers.items()
    }
    assert history(collected + list(outputs)) == undisturbed(CHAT)
    assert len(first.generations) == len(second.generations) == 1


def test_stream_behind_one_address_of_several_routers_is_found():
    """A service in front of two routers: connections go to either."""
    first, second = FakeRouter("first"), FakeRouter("second")
    network = Network({A: first}, [600])
    outputs = network.request(TEXT, TEXT_BODY, POLICY)
    collected = [next(outputs)]
    turns = iter([second, second, second, first])
    network.routers = _Turns(turns)
    collected += list(outputs)
    assert history(collected) == undisturbed(TEXT)
    assert not second.generations
    assert len(first.generations) == 1


class _Turns(dict):
    def __init__(self, turns):
        self._turns = turns

    def get(self, _):
        return next(self._turns)


def test_key_that_is_revoked_ends_the_stream():
    router = FakeRouter()
    network = Network({A: router}, [600])
    outputs = network.request(TEXT, TEXT_BODY, POLICY)
    next(outputs)
    router.refusals = [error(401, "invalid_api_key", "no")]
    with pytest.raises(LockstepError, match="no") as refused:
        list(outputs)
    assert refused.value.code == "invalid_api_key"
    assert refused.value.received.events


def test_resumption_sends_what_is_about_the_sender_and_nothing_else_of_the_request():
    router = FakeRouter()
    headers = {"Authorization": "Bearer secret", "X-Session-ID": "s", "Content-Type": "application/json"}
    network = Network({A: router}, [600])
    list(network.request(TEXT, TEXT_BODY, POLICY, headers=headers))
    method, _, sent = router.seen[1]
    assert method == "GET"
    assert sent["authorization"] == "Bearer secret"
    assert not {"x-session-id", "content-type", "idempotency-key", "x-lockstep-resumable"} & sent.keys()
    assert sent["last-event-id"].startswith("r-")


class Gateway(FakeRouter):
    """A router behind a gateway that knows its clients by a header of its own, or by a query."""

    def respond(self, method, path, headers, content):
        path, _, query = path.partition("?")
        if headers.get("Api-Key") != "mine" and query != "api-key=mine":
            return error(401, "unknown_client", "the gateway does not know you")
        return super().respond(method, path, headers, content)


def test_gateway_knows_who_resumes():
    router = Gateway()
    network = Network({A: router}, [600])
    outputs = network.request(TEXT, TEXT_BODY, POLICY, headers={"Api-Key": "mine"})
    assert history(outputs) == undisturbed(TEXT)
    assert [method for method, *_ in router.seen] == ["POST", "GET"]
    outputs = network.request(TEXT, TEXT_BODY, POLICY, headers={"Api-Key": "mine"})
    next(outputs)
    _, farewell = network.exchange.last_request()
    assert (farewell.method, farewell.headers) == ("DELETE", {"Api-Key": "mine"})


@pytest.mark.parametrize(("query", "headers"), [("", {"Api-Key": "mine"}), ("?api-key=mine", {})])
def test_gateway_knows_who_asks_whether_a_router_lives(query, headers):
    router = Gateway()
    network = Network({A: router})
    network.silences = 1
    _, content = network.request(TEXT + query, TEXT_BODY | {"stream": False}, POLICY, headers=headers)
    assert json.loads(content)["choices"]
    assert [path for _, path, _ in router.seen] == ["/healthz", TEXT]
    assert network.clock.pauses == [POLICY.silence_timeout_s]


def test_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("lockstep_client.generation.Decoder", lambda: Decoder(max_event_bytes=100))
    with pytest.raises(ProtocolError, match="longer than 100 bytes"):
        list(Network({A: FakeRouter()}, chunk_bytes=30).request(TEXT, TEXT_BODY, POLICY))
