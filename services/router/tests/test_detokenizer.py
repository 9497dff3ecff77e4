"""Pieces of text add up to the whole, whatever the tokens are."""

import itertools

import pytest
import sentencepiece_model
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_router.text.detokenizer import MAX_WAITING, Detokenizer
from scripted_worker import VOCAB_SIZE
from sentencepiece_model import VOCAB, bytes_of, ids_of
from tokenizers import decoders

token_lists = st.lists(st.integers(0, VOCAB_SIZE + 10), max_size=60)


def pieces_of(tokenizer, ids, preceding=()):
    detokenizer = Detokenizer(tokenizer, preceding=preceding)
    return [*(detokenizer.step(token_id) for token_id in ids), detokenizer.flush()]


@given(ids=token_lists)
@settings(max_examples=150)
def test_pieces_of_any_ids_add_up(tokenizer, ids):
    with_text = [token_id for token_id in ids if tokenizer.token_bytes(token_id)]  # not the aliases of control tokens
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(with_text)


@given(data=st.data())
@settings(max_examples=150)
def test_pieces_of_broken_characters_add_up(tokenizer, data):
    parts = [token_id for token_id in range(VOCAB_SIZE) if not tokenizer.token_bytes(token_id).isascii()]
    ids = data.draw(st.lists(st.sampled_from(parts) | st.integers(0, 10), max_size=80))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=st.text(alphabet="ab é中😀\n\u200d\ufffd", max_size=60))
def test_pieces_of_any_text_add_up(tokenizer, text):
    assert "".join(pieces_of(tokenizer, tokenizer.encode(text))) == text


class WithoutTexts:
    """A tokenizer whose tokens have no texts of their own."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def token_text(self, token_id):
        return None


@given(data=st.data())
@settings(max_examples=150)
def test_pieces_do_not_depend_on_the_way_they_are_found(tokenizer, data):
    parts = [token_id for token_id in range(VOCAB_SIZE) if tokenizer.token_text(token_id) is None]
    assert 10 < len(parts) < VOCAB_SIZE / 2
    ids = data.draw(st.lists(st.sampled_from(parts) | st.integers(0, VOCAB_SIZE + 10), max_size=60))
    assert pieces_of(tokenizer, ids) == pieces_of(WithoutTexts(tokenizer), ids)


def test_character_waits_for_its_last_byte(tokenizer):
    ids = tokenizer.encode("😀!")
    pieces = pieces_of(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("") >= 3


def test_text_goes_on_among_bytes_that_never_make_a_character(tokenizer):
    byte = next(i for i in range(VOCAB_SIZE) if tokenizer.token_bytes(i) == b"\xa1")
    pieces = pieces_of(tokenizer, [byte] * 200)
    waiting = 0
    for piece in pieces:
        waiting = 0 if piece else waiting + 1
        assert waiting <= MAX_WAITING
    assert "".join(pieces) == "\ufffd" * 200


def test_special_and_unknown_ids_have_no_text(tokenizer):
    assert pieces_of(tokenizer, [0, 1, 2, 3, VOCAB_SIZE + 5]) == [""] * 6


def test_leading_space_is_dropped_once_and_kept_later():
    tokenizer = sentencepiece_model.tokenizer_of()
    ids = ids_of("\u2581he", "llo", "\u2581world", "!", "\u2581", "\u2581he")
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "hello world!  he"


def test_byte_tokens_make_characters():
    tokenizer = sentencepiece_model.tokenizer_of()
    ids = [*ids_of("\u2581he"), *bytes_of("é😀"), *ids_of("!")]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "heé😀!"
    assert not any("\ufffd" in piece for piece in pieces)


SPACED = {
    "strip": sentencepiece_model.tokenizer_of(),
    "metaspace": sentencepiece_model.tokenizer_of(decoders.Metaspace()),
}
PROMPTS = {
    "one word": ids_of("\u2581he", "llo"),
    "many words": ids_of("\u2581he", "llo", "\u2581world", "!") * 10,
    "a space": ids_of("\u2581"),
    "a special token at its end": ids_of("\u2581he", "llo", "</s>"),
    "special tokens among the words": ids_of("\u2581he", *["</s>"] * 40, "llo", "</s>"),
    "unknown ids": [*ids_of("\u2581he", "llo"), len(VOCAB) + 3],
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("decoder", SPACED)
def test_text_after_a_prompt_keeps_its_leading_space(decoder, prompt):
    tokenizer, ids = SPACED[decoder], ids_of("\u2581world", "!", "\u2581he", "llo")
    known = [each for each in prompt if tokenizer.token_bytes(each)]
    text = "".join(pieces_of(tokenizer, ids, prompt))
    assert tokenizer.decode(known) + text == tokenizer.decode(known + ids)
    assert text == " world! hello"


@pytest.mark.parametrize("prompt", [[], ids_of("</s>"), ids_of("</s>") * 100, bytes_of("é")[:1]])
def test_text_after_nothing_begins_a_text(prompt):
    assert "".join(pieces_of(SPACED["strip"], ids_of("\u2581world", "!"), prompt)) == "world!"


@given(data=st.data(), decoder=st.sampled_from(sorted(SPACED)))
@settings(max_examples=100)
def test_texts_after_any_prompt_add_up(data, decoder):
    tokenizer = SPACED[decoder]
    words = [ids_of(each) for each in (*sentencepiece_model.WORDS, "</s>", "<end>")] + [bytes_of("é"), bytes_of("😀")]
    prompt, ids = (list(itertools.chain(*data.draw(st.lists(st.sampled_from(words), max_size=20)))) for _ in range(2))
    whole = tokenizer.decode(prompt + ids)
    assert tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, ids, prompt)) == whole


def test_character_that_a_prompt_leaves_unfinished_does_not_reach_the_text():
    tokenizer, ids = SPACED["strip"], bytes_of("é")
    prompt = [*ids_of("\u2581he", "llo"), *ids[:1]]
    assert "".join(pieces_of(tokenizer, [*ids[1:], *ids_of("\u2581world")], prompt)) == "\ufffd world"


@given(ids=token_lists, prompt=token_lists)
@settings(max_examples=100)
def test_texts_of_bytes_do_not_depend_on_the_prompt(tokenizer, ids, prompt):
    assert pieces_of(tokenizer, ids, prompt) == pieces_of(tokenizer, ids)


@given(ids=st.lists(st.integers(0, len(VOCAB) + 3), max_size=20), last=st.integers(0, len(VOCAB) + 3))
@settings(max_examples=100)
def test_rest_with_a_last_id_is_what_comes_with_it(ids, last):
    detokenizer = Detokenizer(SPACED["strip"])
    for token_id in ids:
        detokenizer.step(token_id)
    rest = detokenizer.rest_with(last)
    assert rest == detokenizer.step(last) + detokenizer.flush()
