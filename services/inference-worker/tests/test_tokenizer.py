import json
import logging

import pytest
from harness import tokenizer_json
from lockstep_common.errors import ErrorCode, LockstepError
from lockstep_worker.tokenizer import load_tokenizer


def test_files_are_passed_on_as_they_are(model_dir):
    files = load_tokenizer(model_dir)
    assert files.tokenizer_json == (model_dir / "tokenizer.json").read_bytes()
    assert files.tokenizer_config_json == (model_dir / "tokenizer_config.json").read_bytes()
    assert files.chat_template == "{{ messages }}"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_the_digest_covers_every_file(model_dir, name):
    before = load_tokenizer(model_dir).digest
    changed = {"tokenizer.json": tokenizer_json("hello", "world")}
    (model_dir / name).write_text(changed.get(name, '{"changed": 1}'))
    assert load_tokenizer(model_dir).digest != before


def test_the_digest_does_not_depend_on_the_directory(model_dir, tmp_path):
    assert load_tokenizer(model_dir.rename(tmp_path / "moved")).digest == "".join(
        load_tokenizer(tmp_path / "moved").digest
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, ""),
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], ""),
        (["odd"], ""),
    ],
)
def test_the_chat_template_of_the_configuration(model_dir, template, expected):
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(model_dir).chat_template == expected


def test_the_template_file_comes_first(model_dir):
    (model_dir / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(model_dir).chat_template == "from the file"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{% if m %}{% break %}{% endif %}{% endfor %}{{ tools | tojson }}", None),
        ("{% generation %}{{ messages }}{% endgeneration %}{{ 'x' * 10**12 }}", None),
        ("{% unheard_of %}", "Encountered unknown tag 'unheard_of'"),
        ("{{ messages | unheard_of }}", "No filter named 'unheard_of'"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_logged_and_passed_on(model_dir, template, reason, caplog):
    (model_dir / "chat_template.jinja").write_text(template)
    with caplog.at_level(logging.ERROR, "lockstep.worker"):
        assert load_tokenizer(model_dir).chat_template == template
    assert bool(caplog.records) is (reason is not None)
    assert reason is None or reason in caplog.text


def test_the_configuration_may_be_missing(model_dir):
    (model_dir / "tokenizer_config.json").unlink()
    files = load_tokenizer(model_dir)
    assert (files.tokenizer_config_json, files.chat_template) == (b"", "")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", '{"model": {"voc', "not complete JSON"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json is no tokenizer: "),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "is no tokenizer: "),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_what_cannot_be_used_is_named(model_dir, name, content, sentence):
    path = model_dir / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LockstepError, match=sentence) as caught:
        load_tokenizer(model_dir)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
