"""The fields that routers take besides OpenAI's: each arrives as it is given, over HTTP and in the messages of gRPC."""

import pytest
from fake_router import FakeRouter, serving
from lockstep_api.v1 import inference_pb2 as pb
from lockstep_client import InvalidRequestError, LockstepClient, StructuredOutputs
from lockstep_client.grpc_messages import generate_message

ASK = [{"role": "user", "content": "hi"}]
CONSTRAINTS: dict[str, tuple[StructuredOutputs, pb.StructuredOutputs]] = {
    "regex": ({"regex": "[a-z]+"}, pb.StructuredOutputs(regex="[a-z]+")),
    "grammar": ({"grammar": 'start: "a"'}, pb.StructuredOutputs(grammar='start: "a"')),
    "choice": ({"choice": ["yes", "no"]}, pb.StructuredOutputs(choice=pb.Texts(texts=["yes", "no"]))),
    "schema": ({"json": {"type": "null"}}, pb.StructuredOutputs(json='{"type": "null"}')),
    "schema as text": ({"json": "{}"}, pb.StructuredOutputs(json="{}")),
    "object": ({"json_object": True}, pb.StructuredOutputs(json_object=True)),
}


@pytest.fixture
def router():
    return FakeRouter()


@pytest.fixture
def client(router):
    with serving(router) as server, LockstepClient(server.url) as made:
        yield made


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_structured_outputs(client, router, name):
    given, message = CONSTRAINTS[name]
    client.complete("x", model="reference", max_tokens=2, structured_outputs=given)
    client.chat(ASK, model="reference", max_tokens=2, structured_outputs=given)
    for body, is_chat in zip(router.generations, (False, True), strict=True):
        assert body["structured_outputs"] == given
        assert generate_message(body, is_chat=is_chat).structured_outputs == message


def test_suffix_and_best_of(client, router):
    client.complete("x", model="reference", max_tokens=2, suffix=" tail", n=2, best_of=3)
    (body,) = router.generations
    assert (body["suffix"], body["best_of"], body["n"]) == (" tail", 3, 2)
    message = generate_message(body, is_chat=False)
    assert (message.suffix, message.best_of, message.n) == (" tail", 3, 2)


def test_values_for_the_chat_template(client, router):
    given = {"enable_thinking": False, "depth": 2, "share": 0.5, "style": "short"}
    client.chat(ASK, model="reference", max_tokens=2, chat_template_kwargs=given)
    (body,) = router.generations
    assert body["chat_template_kwargs"] == given
    sent = generate_message(body, is_chat=True).conversation.chat_template_kwargs
    assert {name: getattr(value, value.WhichOneof("value")) for name, value in sent.items()} == given


def test_fields_that_are_none_are_left_out(client, router):
    client.complete("x", model="reference", max_tokens=2, suffix=None, best_of=None, structured_outputs=None)
    (body,) = router.generations
    assert not {"suffix", "best_of", "structured_outputs"} & body.keys()


@pytest.mark.parametrize(
    ("body", "is_chat", "field"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, False, "structured_outputs"),
        ({"structured_outputs": {"colour": "red"}}, False, "structured_outputs"),
        ({"structured_outputs": {"choice": 5}}, False, "structured_outputs"),
        ({"suffix": 5}, False, "suffix"),
        ({"best_of": "3"}, False, "best_of"),
        ({"chat_template_kwargs": {"a": [1]}}, True, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": None}}, True, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": True}}, False, "chat_template_kwargs"),
    ],
)
def test_what_messages_of_grpc_cannot_hold_is_refused_by_name(body, is_chat, field):
    with pytest.raises(InvalidRequestError) as refused:
        generate_message({"model": "reference"} | body, is_chat=is_chat)
    assert refused.value.field == field


def test_messages_of_answers_may_be_sent_back_with_what_clients_add_to_them():
    function = {"name": "look", "arguments": '{"at": 1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    added = message | {
        "tool_calls": [call | {"index": 0, "function": function | {"parsed_arguments": {"at": 1}}}],
        "parsed": {"answer": 42},
        "provider_specific_fields": {"refusal": None},
        "refusal": None,
        "annotations": [{"type": "url_citation", "url_citation": {"url": "http://a.test"}}],
    }
    plain, other = (generate_message({"messages": [*ASK, each]}, is_chat=True) for each in (message, added))
    assert plain == other
    with pytest.raises(InvalidRequestError) as refused:
        generate_message({"messages": [message | {"audio": {"id": "a"}}]}, is_chat=True)
    assert refused.value.field == "messages"


def test_refusal_of_an_answer_may_be_sent_back():
    parts = [{"type": "text", "text": "well"}, {"type": "refusal", "refusal": "no"}]
    messages = [
        {"role": "assistant", "content": "well", "refusal": "no"},
        {"role": "assistant", "content": parts, "refusal": ""},
    ]
    assert list(generate_message({"messages": messages}, is_chat=True).conversation.messages) == [
        pb.ChatMessage(role="assistant", content="well", refusal="no"),
        pb.ChatMessage(role="assistant", content_parts=["well", "no"], refusal=""),
    ]
    with pytest.raises(InvalidRequestError) as refused:
        generate_message({"messages": [{"role": "user", "content": parts}]}, is_chat=True)
    assert refused.value.field == "messages"
