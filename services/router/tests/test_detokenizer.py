"""Pieces of text add up to the whole, whatever the tokens are."""

from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_api.v1 import worker_pb2
from lockstep_router.text.detokenizer import MAX_WAITING, Detokenizer
from lockstep_router.text.tokenizer import Tokenizer
from scripted_worker import VOCAB_SIZE
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

token_lists = st.lists(st.integers(0, VOCAB_SIZE + 10), max_size=60)


def pieces_of(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
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


def sentencepiece_like():
    """A tokenizer like Llama 2's: spaces as U+2581, bytes as <0xNN>, the first space dropped."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in ("\u2581", "\u2581he", "llo", "\u2581world", "!"):
        vocab[token] = len(vocab)
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    files = worker_pb2.TokenizerFiles(digest="sp", tokenizer_json=rust.to_str().encode())
    return Tokenizer(files), vocab


def test_leading_space_is_dropped_once_and_kept_later():
    tokenizer, vocab = sentencepiece_like()
    ids = [vocab[token] for token in ("\u2581he", "llo", "\u2581world", "!", "\u2581", "\u2581he")]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids) == "hello world!  he"


def test_byte_tokens_make_characters():
    tokenizer, vocab = sentencepiece_like()
    ids = [vocab["\u2581he"], *(vocab[f"<0x{byte:02X}>"] for byte in "é😀".encode()), vocab["!"]]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == "heé😀!"
    assert not any("\ufffd" in piece for piece in pieces)
