"""Reasoning and tool calls in a model's text: the same parts, however the text is cut into pieces."""

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from lockstep_router.output.generic_json import GENERIC_JSON
from lockstep_router.output.hermes import HERMES
from lockstep_router.output.json_calls import MAX_HELD_CHARS, Calls, JsonCalls
from lockstep_router.output.llama3 import LLAMA3
from lockstep_router.output.mistral import MISTRAL
from lockstep_router.output.parser import OutputParser
from lockstep_router.output.parts import CallArguments, CallName, Content, Reasoning
from lockstep_router.output.reasoning import REASONING_FORMATS, ReasoningSplit

NAMES = {"weather", "add"}
SYNTAXES = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "json": GENERIC_JSON}
THINK = REASONING_FORMATS["think"]
PARIS = '{"city": "Paris", "when": {"days": [1, 2]}}'
ADD = '<tool_call>{"name": "add"}</tool_call>'


def parser_of(syntax, *, reasoning=None, is_open=False, most=None):
    calls = JsonCalls(syntax, Calls(NAMES.__contains__, lambda index: f"id-{index}", most))
    return OutputParser(None if reasoning is None else ReasoningSplit(reasoning, is_open=is_open), calls)


def joined(parts):
    """The parts as (kind, text) with neighbours of a kind joined, and calls as (name, id, arguments)."""
    result = []
    for part in parts:
        match part:
            case CallName():
                assert part.index == sum(item[0] == "call" for item in result)
                result.append(["call", part.name, part.id, ""])
            case CallArguments():
                assert result[-1][0] == "call"
                assert part.index == sum(item[0] == "call" for item in result) - 1
                result[-1][-1] += part.text
            case Content() | Reasoning():
                kind = type(part).__name__.lower()
                assert part.text
                if result and result[-1][0] == kind:
                    result[-1][-1] += part.text
                else:
                    result.append([kind, part.text])
    return [tuple(item) for item in result]


def parse(syntax, pieces, **options):
    parser = parser_of(syntax, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return joined(parts + parser.finish())


def call(name, arguments, index=0):
    return ("call", name, f"id-{index}", arguments)


CASES = {
    "hermes": [
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', [call("weather", PARIS)]),
        (
            f'Let me see.\n\n<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>\n{ADD}\nDone. ',
            [("content", "Let me see."), call("weather", PARIS), call("add", "{}", 1), ("content", "Done. ")],
        ),
        (
            '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
            [("content", '<tool_call>{"name": "fly", "arguments": {}}</tool_call>')],
        ),
        ("<tool_call>nothing", [("content", "<tool_call>nothing")]),
        ('<tool_call>{"name": "add', [("content", '<tool_call>{"name": "add')]),
        ("a < b <tool", [("content", "a < b <tool")]),
        (
            '<tool_call> <tool_call>{"name": "add", "arguments": {}}</tool_call>',
            [("content", "<tool_call>"), call("add", "{}")],
        ),
        # The model forgets a bracket, or the marker.
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call><tool_call>{"name": "weather"} oh' + ADD,
            [call("add", '{"a": 1}'), call("weather", "{}", 1), call("add", "{}", 2)],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": </tool_call> x', [call("add", '{"a": '), ("content", "x")]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1', [call("add", '{"a": 1')]),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>}\\""}}</tool_call>',
            [call("add", '{"a": "</tool_call>}\\""}')],
        ),
        (
            '<tool_call>{"id": 7, "x": [{"name": 1}], "name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [call("add", '{"a": 1}')],
        ),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud83d \\ud83d\\ude00\\"}"}</tool_call>',
            [call("add", '{"a": "\ufffd \U0001f600"}')],
        ),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', [call("add", "{}")]),
        ('<tool_call>{"name": ["add"]}</tool_call>', [("content", '<tool_call>{"name": ["add"]}</tool_call>')]),
        (
            '<tool_call>[{"name": "add"}, {"name": "weather"}]</tool_call> ',
            [call("add", "{}"), call("weather", "{}", 1)],
        ),
        # One marker for several calls, or none behind the last one.
        (
            '<tool_call>{"name": "add"}\n{"name": "weather"}\n</tool_call> So.',
            [call("add", "{}"), call("weather", "{}", 1), ("content", "So.")],
        ),
        (
            '<tool_call>[{"name": "add"} {"name": "weather"}]</tool_call>',
            [call("add", "{}"), call("weather", "{}", 1)],
        ),
        (
            '<tool_call>{"name": "add"}\n{"name": "fly"}</tool_call>',
            [call("add", "{}"), ("content", '{"name": "fly"}')],
        ),
        (
            '<tool_call>{"name": "add"}\n{"name": "fly"}\n</tool_call>\nSo.</tool_call>',
            [call("add", "{}"), ("content", '{"name": "fly"}\nSo.</tool_call>')],
        ),
        (
            f'<tool_call>{{"name": "add"}}{{"name": "fly"}}{ADD}',
            [call("add", "{}"), ("content", '{"name": "fly"}'), call("add", "{}", 1)],
        ),
        ('<tool_call>{"name": "add"}{"name": "fly"} </tool', [call("add", "{}"), ("content", '{"name": "fly"} ')]),
        ('<tool_call>{"name": "add"}\nIt is fine. ', [call("add", "{}"), ("content", "It is fine. ")]),
        ('<tool_call>{"name": "add"}\nFine </tool', [call("add", "{}"), ("content", "Fine ")]),
        ('<tool_call>{"name": "add", "arguments": {} Fine.', [call("add", "{}"), ("content", "Fine.")]),
        ('<tool_call>{"name": "add"} oh</tool_call> Fine.', [call("add", "{}"), ("content", "Fine.")]),
        ("just  text\n", [("content", "just  text\n")]),
    ],
    "llama3": [
        (f'{{"name": "weather", "parameters": {PARIS}}}', [call("weather", PARIS)]),
        (
            f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}; {{"name": "add"}}',
            [call("weather", PARIS), call("add", "{}", 1)],
        ),
        ('\n{"name": "add"}\n{"name": "add"}', [call("add", "{}"), call("add", "{}", 1)]),
        ('Look: {"name": "add"}', [("content", 'Look: {"name": "add"}')]),
        ('I call <|python_tag|>{"name": "add"}', [("content", "I call"), call("add", "{}")]),
        ('{"title": "add"}', [("content", '{"title": "add"}')]),
        ('{"name": "Paris", "parameters": {}}', [("content", '{"name": "Paris", "parameters": {}}')]),
        ("<|python_tag|>print(1)", [("content", "<|python_tag|>print(1)")]),
        ('{"name": "add"} and more', [call("add", "{}"), ("content", "and more")]),
        ("[1, 2]", [("content", "[1, 2]")]),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]', [call("weather", PARIS)]),
        (
            'Well.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}] So.',
            [("content", "Well."), call("add", '{"a": 1}'), call("add", '{"a": 2}', 1), ("content", "So.")],
        ),
        (
            f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]add{{}}",
            [call("weather", PARIS), call("add", "{}", 1)],
        ),
        ('[TOOL_CALLS]add[CALL_ID]x[ARGS]{"a": "]"}', [call("add", '{"a": "]"}')]),
        ("[TOOL_CALLS]fly{}", [("content", "[TOOL_CALLS]fly{}")]),
        ("[TOOL_CALLS]add", [("content", "[TOOL_CALLS]add")]),
        ("[TOOL_CALLS][]", [("content", "[TOOL_CALLS][]")]),
        (
            '[TOOL_CALLS][{"name": "add"}, {"name": "fly"}]',
            [call("add", "{}"), ("content", ', {"name": "fly"}]')],
        ),
        ("[TOOL", [("content", "[TOOL")]),
    ],
    "json": [
        (f'{{"name": "weather", "arguments": {PARIS}}}', [call("weather", PARIS)]),
        (' [{"name": "add"}, {"name": "add"}] ', [call("add", "{}"), call("add", "{}", 1)]),
        ("No call.", [("content", "No call.")]),
        ("[1]", [("content", "[1]")]),
        ("", []),
    ],
}
ALL = [(name, text, expected) for name, cases in CASES.items() for text, expected in cases]


@pytest.mark.parametrize(("name", "text", "expected"), ALL)
def test_whole_text(name, text, expected):
    assert parse(SYNTAXES[name], [text]) == expected


@pytest.mark.parametrize(("name", "text", "expected"), ALL)
def test_one_character_at_a_time(name, text, expected):
    assert parse(SYNTAXES[name], text) == expected


TEXTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "<think>",
            "</think>",
            "</th",
            "<to",
            '{"name": "add"',
            '"arguments": ',
            '"parameters": ',
            '{"a": "x"}',
            '{"name": "fly"}',
            "add",
            '"',
            "\\",
            "{",
            "}",
            "[",
            "]",
            ",",
            ";",
            ":",
            " ",
            "\n",
            "word ",
            "null",
            '"\\u00e9"',
            "<",
            "é🌨",
        ]
    ),
    max_size=14,
).map("".join)


def cut(text, places):
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@settings(max_examples=400, deadline=None, print_blob=True)
@given(
    name=st.sampled_from(sorted(SYNTAXES)),
    text=TEXTS,
    places=st.lists(st.integers(0, 300), max_size=12),
    reasoning=st.sampled_from([None, THINK]),
    is_open=st.booleans(),
    most=st.sampled_from([None, 1]),
)
@example("hermes", '<tool_call>{"name": "add"} </tool_call> a', [24, 30, 31, 40], None, False, None)
def test_the_parts_do_not_depend_on_the_pieces(name, text, places, reasoning, is_open, most):
    options = {"reasoning": reasoning, "is_open": is_open, "most": most}
    whole = parse(SYNTAXES[name], [text], **options)
    assert parse(SYNTAXES[name], cut(text, places), **options) == whole
    assert parse(SYNTAXES[name], text, **options) == whole


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(SYNTAXES)), text=TEXTS)
def test_nothing_is_lost_if_there_is_no_call(name, text):
    parts = parse(SYNTAXES[name], [text])
    if not any(part[0] == "call" for part in parts):
        assert "".join(part[1] for part in parts) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["</tool_call>", '"}]', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), min_size=1
    ),
    size=st.integers(1, 9),
    ascii_only=st.booleans(),
)
def test_any_arguments_arrive_as_they_were_written(calls, size, ascii_only):
    written = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in calls]
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in written]
    texts = {
        "hermes": "".join(f"<tool_call>\n{each}\n</tool_call>\n" for each in objects),
        "llama3": "; ".join(objects),
        "mistral": f"[TOOL_CALLS][{', '.join(objects)}]",
        "json": f"[{', '.join(objects)}]",
    }
    expected = [call(name, arguments, index) for index, (name, arguments) in enumerate(written)]
    for name, text in texts.items():
        assert parse(SYNTAXES[name], [text[at : at + size] for at in range(0, len(text), size)]) == expected


def test_arguments_are_given_as_they_come():
    parser = parser_of(HERMES)
    assert parser.feed('<tool_call>{"name": "add", "argu') == [CallName(0, "id-0", "add")]
    assert parser.feed('ments": {"a": "on') == [CallArguments(0, '{"a": "on')]
    assert parser.feed('e"') == [CallArguments(0, 'e"')]
    assert parser.feed("}}") == [CallArguments(0, "}")]
    assert parser.feed("</tool_call>") == []
    assert parser.finish() == []


def test_content_waits_only_for_what_may_be_a_marker():
    parser = parser_of(HERMES)
    assert parser.feed("a <") == [Content("a")]
    assert parser.feed("b <tool_") == [Content(" <b")]
    assert parser.feed("call") == []
    assert parser.feed("ing") == [Content(" <tool_calling")]


@pytest.mark.parametrize("name", sorted(SYNTAXES))
def test_an_answer_ends_after_the_most_calls(name):
    text = {
        "hermes": '<tool_call>{"name": "add"}</tool_call>' * 2,
        "llama3": '{"name": "add"}; {"name": "add"}',
        "mistral": '[TOOL_CALLS][{"name": "add"}, {"name": "add"}]',
        "json": '[{"name": "add"}, {"name": "add"}]',
    }[name]
    parser = parser_of(SYNTAXES[name], most=1)
    assert joined(parser.feed(text)) == [call("add", "{}")]
    assert parser.has_ended
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("name", "broken", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', ""),
        ("llama3", '{"name": "add", "parameters": {"a": 1};', '{"a": 1}'),
        ("mistral", '[TOOL_CALLS]add{"a": <', '{"a": '),
        ("json", '[{"name": "add", "arguments": {"a": 1}; ', '{"a": 1}'),
    ],
)
def test_a_broken_call_is_one_of_the_most(name, broken, arguments):
    parser, others = parser_of(SYNTAXES[name], most=1), '<tool_call>{"name": "add"}</tool_call>[TOOL_CALLS]add{} ok'
    assert joined(parser.feed(broken + others)) == [call("add", arguments)]
    assert parser.has_ended
    assert parser.finish() == []


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_an_object_without_a_name_for_too_long_is_content(size):
    text = '<tool_call>{"x": "' + "y" * (2 * MAX_HELD_CHARS) + '", "name": "add"}</tool_call>'
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(HERMES, pieces) == [("content", text)]


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_text_after_a_call_waits_only_so_long_for_the_closing_marker(size):
    for count in (MAX_HELD_CHARS, MAX_HELD_CHARS + 1):
        rest = "y" * count + "</tool_call>"
        text = '<tool_call>{"name": "add"}' + rest
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        is_content = count > MAX_HELD_CHARS
        assert parse(HERMES, pieces) == [call("add", "{}"), *([("content", "y" * count)] if is_content else [])]


def test_deep_nesting_is_no_problem():
    arguments = '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"
    assert parse(HERMES, [f'<tool_call>{{"name": "add", "arguments": {arguments}}}']) == [call("add", arguments)]
    deep = '<tool_call>{"name": ' + "[" * 50_000
    assert parse(HERMES, [deep]) == [("content", deep)]


@pytest.mark.parametrize("pieces_of", [lambda text: [text], list], ids=["whole", "characters"])
@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", False, [("reasoning", "Hm."), ("content", "Yes. ")]),
        ("Hm.\n</think>\n\nYes.", True, [("reasoning", "Hm."), ("content", "Yes.")]),
        ("<think>Hm.</think>Yes.", True, [("reasoning", "Hm."), ("content", "Yes.")]),
        ("\n<think>\n\n</think>\n\nYes.", False, [("content", "Yes.")]),
        (" Yes. <think>no</think>", False, [("content", " Yes. <think>no</think>")]),
        ("<think> on and on </thi", False, [("reasoning", "on and on </thi")]),
        ("<thi", False, [("content", "<thi")]),
        ("", True, []),
        (
            '<think>a <tool_call>{"name": "add"}</tool_call></think>\n<tool_call>{"name": "add"}</tool_call>',
            False,
            [("reasoning", 'a <tool_call>{"name": "add"}</tool_call>'), call("add", "{}")],
        ),
    ],
)
def test_reasoning(text, is_open, expected, pieces_of):
    assert parse(HERMES, pieces_of(text), reasoning=THINK, is_open=is_open) == expected


def call_of(syntax, name="add"):
    return json.dumps({"name": name, "parameters" if syntax == "llama3" else "arguments": {}})


CUT = [
    ("hermes", f"{ADD}{ADD}", len(ADD)),
    ("hermes", f"<tool_call>[{call_of('hermes')}, {call_of('hermes')}]</tool_call>", len(call_of("hermes")) + 12),
    ("llama3", f"{call_of('llama3')}; {call_of('llama3')}", len(call_of("llama3"))),
    ("llama3", f"[{call_of('llama3')}, {call_of('llama3')}]", len(call_of("llama3")) + 1),
    ("mistral", f"[TOOL_CALLS][{call_of('mistral')}, {call_of('mistral')}]", len(call_of("mistral")) + 13),
    ("mistral", "[TOOL_CALLS]add{}[TOOL_CALLS]weather[ARGS]{}", 17),
    ("json", f"{call_of('json')}\n{call_of('json')}", len(call_of("json"))),
]


@pytest.mark.parametrize(("name", "text", "first"), CUT)
def test_the_beginning_of_a_further_call_is_no_content(name, text, first):
    assert text[:first].endswith("}") or name == "hermes"
    for end in range(first, len(text) + 1):
        parts = parse(SYNTAXES[name], text[:end])
        assert [part[0] for part in parts] in (["call"], ["call", "call"]), text[:end]


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("hermes", f"{ADD} Done <", "Done <"),
        ("hermes", f"{ADD}<tool_call>no JSON", "<tool_call>no JSON"),
        ("mistral", "[TOOL_CALLS]add{}[TOOL_CALLS]is what I write", "[TOOL_CALLS]is what I write"),
        ("mistral", "[TOOL_CALLS]add{}, so it is", ", so it is"),
    ],
)
def test_other_text_after_a_call_is_content(name, text, rest):
    assert parse(SYNTAXES[name], [text]) == [call("add", "{}"), ("content", rest)]
