"""Bytes of tokens, chat templates, and files that cannot be read."""

import json

import pytest
from lockstep_api.v1 import worker_pb2
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_router.text.chat_template import ChatTemplate
from lockstep_router.text.tokenizer import Tokenizer
from scripted_worker import VOCAB_SIZE, tokenizer_files

MESSAGES = [{"role": "user", "content": "a <b> & 'c'"}]


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
    text = "Größe: 😀 and\ttabs\n"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_text_of_a_token_is_what_the_library_makes_of_it(tokenizer):
    texts = {token_id: tokenizer.token_text(token_id) for token_id in range(VOCAB_SIZE + 10)}
    known = {token_id: text for token_id, text in texts.items() if text is not None}
    assert len(known) > VOCAB_SIZE / 2
    assert known == {token_id: tokenizer.decode([token_id]) for token_id in known}


def test_token_with_characters_that_stand_for_no_byte_is_taken_as_it_is():
    content = json.loads(tokenizer_files().tokenizer_json)
    token = "\u0120\u20ac"  # a space as GPT-2's table writes it, and a character that the table does not have
    content["model"]["vocab"][token] = unusual = max(content["model"]["vocab"].values()) + 1
    tokenizer = Tokenizer(worker_pb2.TokenizerFiles(digest="x", tokenizer_json=json.dumps(content).encode()))
    assert tokenizer.token_text(unusual) == tokenizer.decode([unusual]) == token
    assert tokenizer.token_bytes(unusual) == token.encode()


def test_special_tokens_have_their_name_and_unknown_ones_nothing(tokenizer):
    assert tokenizer.token_bytes(1) == b"</s>"
    assert tokenizer.token_bytes(VOCAB_SIZE + 1) == b""


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"model": 3}'])
def test_unreadable_files_are_a_value_error(content):
    with pytest.raises(ValueError, match="tokenizer x"):
        Tokenizer(worker_pb2.TokenizerFiles(digest="x", tokenizer_json=content))


def test_model_without_template_has_none():
    assert Tokenizer(tokenizer_files(template="")).chat_template is None


def test_special_tokens_reach_the_template_in_either_form():
    files = tokenizer_files(template="{{ bos_token }}{{ eos_token }}")
    files.tokenizer_config_json = json.dumps({"bos_token": {"content": "<B>"}, "eos_token": "<E>"}).encode()
    assert Tokenizer(files).chat_template.render(MESSAGES) == "<B><E>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", "a <b> & 'c'"),
        ("{{ messages[0] | tojson }}", json.dumps(MESSAGES[0])),
        ("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}", "  user\n"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools is none %}none{% endif %}", "none"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_template_has_what_templates_expect(source, text):
    assert ChatTemplate(source, {}).render(MESSAGES) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users') }}",
        "{{ messages[9].content.x }}",
        "{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_failing_and_escaping_templates_are_the_requests_error(source):
    with pytest.raises(LockstepError) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.field == "messages"


def test_template_that_does_not_parse_is_a_value_error():
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate("{% if %}", {})
