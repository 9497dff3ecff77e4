"""GGUF files with fields that are damaged or of another model: each is refused in a sentence."""

import pytest
from test_convert import CONFIGS, convert, rewrite, write_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert convert(write_checkpoint(folder / "given", CONFIGS["llama"]), folder / "m.gguf") == 0
    return folder / "m.gguf"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("block_count", 2**31, "its field llama.block_count is 2147483648, and its tensors are of 2 blocks"),
        ("block_count", 1, "its field llama.block_count is 1, and its tensors are of 2 blocks"),
        ("block_count", "two", "its field llama.block_count is 'two', and its tensors are of 2 blocks"),
        ("attention.head_count", 0, "cannot read its fields"),
        ("attention.head_count", 3, "cannot read its fields"),
        ("attention.head_count_kv", 0, "cannot read its fields"),
        ("rope.dimension_count", 0, "cannot read its fields"),
        ("tokenizer.ggml.bos_token_id", 99999, "one is of a token that is not there"),
    ],
)
def test_numbers_that_no_model_has_are_refused(key, value, sentence, file, tmp_path, capsys):
    key = key if key.startswith("tokenizer") else f"llama.{key}"
    rewrite(file, tmp_path / "m.gguf", without_fields=(key,), fields={key: value})
    assert convert(tmp_path / "m.gguf", tmp_path / "back") == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "back").exists()


def test_a_tokenizer_without_merges_is_refused(file, tmp_path, capsys):
    fields = ("tokenizer.ggml.merges", "tokenizer.huggingface.json")
    rewrite(file, tmp_path / "m.gguf", without_fields=fields)
    assert convert(tmp_path / "m.gguf", tmp_path / "back") == 2
    assert "its tokenizer lacks fields" in " ".join(capsys.readouterr().err.split())
