"""YAML with a key twice in one mapping is refused, with its place; all other YAML is read as by the library."""

import pytest
import yaml
from lockstep_common.strict_yaml import DuplicateKeyError, load_yaml


@pytest.mark.parametrize(
    ("content", "key", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "a", 3),
        ("a:\n  - b: 1\n  - c: 1\n    'c': 2\n", "c", 4),
        ("a: {b: 1, b: 1}\n", "b", 1),
        ("? [x, {y: 1, y: 2}]\n: 1\n", "y", 1),
        ("a: &a {b: 1}\nc:\n  <<: *a\n  d: 1\n  d: 1\n", "d", 5),
        ("1: a\n1: b\n", "1", 2),
    ],
)
def test_a_key_that_is_there_twice_is_named_with_its_line(content, key, line):
    with pytest.raises(DuplicateKeyError, match=rf"the key {key} is there twice") as caught:
        load_yaml(content)
    assert caught.value.problem_mark.line + 1 == line


@pytest.mark.parametrize(
    "content",
    [
        "",
        "---\n",
        "text",
        "a: 1\nb: {a: 1}\nc: [{a: 1}, {a: 2}]\n",
        "1: a\n'1': b\n",
        "a: &a {b: 1}\nc: *a\nd: [*a, *a]\n",
        "a: &a {b: 1, c: 1}\nd: &d {<<: *a, b: 2}\ne: {<<: *d, b: 3, c: 3}\n",
        b"\xef\xbb\xbfa: \xc3\xa4\n",
    ],
)
def test_other_documents_are_what_the_library_reads(content):
    assert load_yaml(content) == yaml.safe_load(content)


def test_a_document_that_contains_itself_is_read():
    document = load_yaml("&a [*a]")
    assert document[0] is document


@pytest.mark.parametrize("content", ["a: [", "a: b: c", "!!python/object/apply:os.getcwd []", "a: 1\n---\nb: 1\n"])
def test_what_the_library_refuses_is_refused(content):
    with pytest.raises(yaml.YAMLError):
        load_yaml(content)
