"""The grammars that workers get, of required calls, forms of texts and strict tools: each takes what it should, and
nothing else, and the router's parsers read that.
"""

import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer
from lockstep_api.v1 import inference_pb2
from tool_models import ids_of, model_of, says

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add"}},
]
ASK = [{"role": "user", "content": "Is it raining?"}]
PARIS, ANY = '{"city": "Paris", "days": 2}', '{"x": [1, {"y": null}]}'
FORMS = {
    "hermes": ('<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', "{}\n{}"),
    "llama3": ('{{"name": "{}", "parameters": {}}}', "{}; {}"),
    "mistral": ('{{"name": "{}", "arguments": {}}}', "[TOOL_CALLS][{}, {}]"),
    "plain": ('{{"name": "{}", "arguments": {}}}', "[{}, {}]"),
}
ONE = {"hermes": "{}", "llama3": "{}", "mistral": "[TOOL_CALLS][{}]", "plain": "[{}]"}
BARE = ("llama3", "plain")


async def make(make_cluster, name):
    """A cluster of one worker. A model without a place for tools gets them in plain text."""
    settings = {"model_tool_formats": {"reference": "json"}} if name.endswith("plain") else {}
    return await make_cluster(1, model=model_of(name), **settings)


async def grammar_of(cluster, field="tools", **fields):
    """What says whether the grammar takes a text, and the first choice of the answer."""
    response = await cluster.chat(**({"messages": ASK, "tools": TOOLS, "max_tokens": 500} | fields))
    assert response.status_code == 200, response.text
    grammar = cluster.workers[0].submits[-1].sampling.grammar
    assert (grammar.kind, grammar.field) == (inference_pb2.GRAMMAR_KIND_LARK, field)
    rules = re.findall(r"^(\w+)(?:\[lazy\])?:(.*)", grammar.text, re.MULTILINE)
    used = {word for _, rule in rules for word in re.findall(r"\w+", rule)}
    assert {name for name, _ in rules} - used == {"start"}, "each rule is for something"
    tokenizer = LLTokenizer(
        cluster.workers[0].files.tokenizer_json.decode(), n_vocab=cluster.workers[0].card.vocab_size
    )
    matcher = LLMatcher(tokenizer, grammar.text)
    assert not matcher.is_error(), matcher.get_error()

    def takes(text, *, is_spelled=False):
        """`is_spelled`: the model writes each marker as ordinary characters."""
        fresh, parts = matcher.deep_copy(), text if is_spelled else [text]
        ids = [token_id for part in parts for token_id in ids_of(cluster.tokenizer, part)]
        return fresh.validate_tokens(ids) == len(ids) and fresh.consume_tokens(ids) and fresh.is_accepting()

    return takes, response.json()["choices"][0]


@pytest.mark.parametrize("name", sorted(FORMS))
async def test_required(make_cluster, name):
    cluster = await make(make_cluster, name)
    form, two = FORMS[name]
    good = two.format(form.format("weather", PARIS), form.format("add", ANY))
    says(cluster, good)
    takes, choice = await grammar_of(cluster, tool_choice="required")
    assert takes(good)
    assert takes(ONE[name].format(form.format("weather", '{"city": "Paris é"}')))
    assert not takes("Yes.")
    assert not takes(f"Yes. {good}")
    for bad in (form.format("fly", "{}"), form.format("weather", '{"town": "x"}'), form.format("add", "3")):
        assert not takes(ONE[name].format(bad))
    # The parser reads what the grammar takes.
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert calls == [("weather", PARIS), ("add", ANY)]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", sorted(FORMS))
async def test_a_named_function_once(make_cluster, name):
    cluster = await make(make_cluster, name)
    form, two = FORMS[name]
    weather, add = (form.format(*call) for call in (("weather", PARIS), ("add", ANY)))
    says(cluster, ONE[name].format(weather))
    choice = {"type": "function", "function": {"name": "weather"}}
    takes, _ = await grammar_of(cluster, tool_choice=choice)
    assert takes(ONE[name].format(weather))
    assert not takes(ONE[name].format(add))
    assert not takes(two.format(weather, weather))


async def test_in_plain_text(make_cluster):
    cluster = await make(make_cluster, "plain")
    text = f'[{{"name": "weather", "arguments": {PARIS}}}]'
    says(cluster, text)
    takes, choice = await grammar_of(cluster, tool_choice="required")
    assert takes(text)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS


THINKING = ["thinking", "special thinking", "plain thinking"]


@pytest.mark.parametrize("name", THINKING)
async def test_reasoning_comes_before_required_calls(make_cluster, name):
    cluster = await make(make_cluster, name)
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    says(cluster, f"Hm.\n</think>\n\n{call}")
    takes, choice = await grammar_of(cluster, tool_choice="required")
    assert takes(f"Hm.\n</think>\n\n{call}")
    assert takes(f"</think>{call}")
    assert not takes(call)
    assert not takes("Hm.\n</think>\n\nYes.")
    assert choice["message"]["reasoning_content"] == "Hm."
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    takes, _ = await grammar_of(cluster, tool_choice="required", **off)
    assert takes(call)


async def test_a_form_of_the_text_has_no_say_in_a_call(make_cluster):
    """instructor sends both."""
    cluster = await make(make_cluster, "hermes")
    call = FORMS["hermes"][0].format("weather", PARIS)
    says(cluster, call)
    choice = {"type": "function", "function": {"name": "weather"}}
    takes, answer = await grammar_of(cluster, tool_choice=choice, response_format={"type": "json_object"})
    assert takes(call)
    assert not takes(PARIS)
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == PARIS


async def test_auto_leaves_the_model_free(make_cluster):
    cluster = await make(make_cluster, "hermes")
    says(cluster, "Yes.")
    await cluster.chat(messages=ASK, tools=TOOLS, max_tokens=500, tool_choice="auto")
    assert not cluster.workers[0].submits[-1].sampling.HasField("grammar")


FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
FORMS_OF_PARIS = [
    ({"response_format": FORMAT}, "response_format", PARIS, '{"town": "Paris"}'),
    ({"response_format": {"type": "json_object"}}, "response_format", PARIS, "[1]"),
    ({"structured_outputs": {"json": WEATHER}}, "structured_outputs.json", PARIS, "{}"),
    ({"structured_outputs": {"regex": "a/b\n[^)/]+|\\/\\n"}}, "structured_outputs.regex", "a/b\n<c>", "a/b"),
    ({"structured_outputs": {"choice": ["so }", "so {"]}}, "structured_outputs.choice", "so }", "so"),
    (
        {"structured_outputs": {"grammar": 'start: A "}" // ends }\nA: /[{}]x/'}},
        "structured_outputs.grammar",
        "}x}",
        "}x",
    ),
]


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize(("fields", "field", "good", "bad"), FORMS_OF_PARIS)
async def test_reasoning_comes_before_a_form(make_cluster, name, fields, field, good, bad):
    cluster = await make(make_cluster, name)
    says(cluster, f"Hm.\n</think>\n\n{good}")
    takes, choice = await grammar_of(cluster, field, tools=None, **fields)
    assert takes(f"Hm.\n</think>\n\n{good}")
    assert takes(f"</think>{good}")
    assert not takes(good)
    assert not takes(f"Hm.\n</think>\n\n{bad}")
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == good


async def test_a_model_that_begins_its_reasoning_itself_may_leave_it_out(make_cluster):
    cluster = await make(make_cluster, "self thinking")
    says(cluster, f"<think>\nHm.\n</think>\n\n{PARIS}")
    takes, choice = await grammar_of(cluster, "response_format", tools=None, response_format=FORMAT)
    assert takes(f"<think>\nHm.\n</think>\n\n{PARIS}")
    assert takes(PARIS)
    assert not takes(f"Hm.\n</think>\n\n{PARIS}")
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", PARIS)
    says(cluster, PARIS)
    _, choice = await grammar_of(cluster, "response_format", tools=None, response_format=FORMAT)
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == PARIS


async def test_a_form_in_gbnf_takes_the_place_of_reasoning(make_cluster):
    cluster = await make(make_cluster, "thinking")
    says(cluster, "yes")
    gbnf = {"grammar": 'root ::= "yes" | "no"'}
    response = await cluster.chat(messages=ASK, max_tokens=500, structured_outputs=gbnf)
    assert response.json()["choices"][0]["message"]["content"] == "yes"
    assert cluster.workers[0].submits[-1].sampling.grammar.text == gbnf["grammar"]


async def test_a_form_of_responses(make_cluster):
    cluster = await make(make_cluster, "thinking")
    says(cluster, f"Hm.</think>{PARIS}")
    schema = {"type": "json_schema", "name": "a", "schema": WEATHER}
    body = {"model": "reference", "input": "hi", "text": {"format": schema}}
    response = await cluster.client.post("/v1/responses", json=body)
    grammar = cluster.workers[0].submits[-1].sampling.grammar
    assert (grammar.kind, grammar.field) == (inference_pb2.GRAMMAR_KIND_LARK, "text.format")
    assert response.json()["text"]["format"] == schema
    assert [part["type"] for part in response.json()["output"]] == ["reasoning", "message"]
    assert response.json()["output"][1]["content"][0]["text"] == PARIS


@pytest.mark.parametrize("name", sorted(FORMS))
async def test_calls_or_a_form(make_cluster, name):
    cluster = await make(make_cluster, name)
    form, two = FORMS[name]
    weather = ONE[name].format(form.format("weather", PARIS))
    says(cluster, weather)
    takes, choice = await grammar_of(cluster, "response_format", response_format=FORMAT)
    assert takes(weather)
    assert takes(two.format(form.format("weather", PARIS), form.format("add", ANY)))
    assert takes(PARIS)
    assert not takes("Yes.")
    assert not takes(f"{PARIS} {weather}")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
    says(cluster, PARIS)
    _, choice = await grammar_of(cluster, "response_format", response_format=FORMAT)
    assert choice["message"]["content"] == PARIS
    assert not choice["message"].get("tool_calls")


async def test_calls_or_a_form_after_reasoning(make_cluster):
    cluster = await make(make_cluster, "plain thinking")
    call = FORMS["hermes"][0].format("weather", PARIS)
    says(cluster, f"Hm.</think>{call}")
    takes, choice = await grammar_of(cluster, "response_format", response_format=FORMAT)
    assert takes(f"Hm.</think>{call}")
    assert takes(f"Hm.</think>\n{PARIS}")
    assert not takes("Hm.</think>Yes.")
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS


STRICT = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {"type": "null"}}}}},
]


OPENED = ("Hm.</think>", "Hm.\n</think>\n\n")
STRICT_MODELS = {
    **{name: (name, ("",)) for name in FORMS if name not in BARE},
    **{name: (name, ("", "\n\n")) for name in BARE},
    "plain thinking": ("hermes", OPENED),
    "thinking": ("hermes", (*OPENED, "<think>\nHm.</think>")),
    "thinking llama3": ("llama3", OPENED),
    "plain thinking llama3": ("llama3", OPENED),
    "self thinking llama3": ("llama3", ("", "<think>Hm.</think>\n\n")),
    "thinking plain": ("plain", OPENED),
}
"""The format of each model's calls, and what may come before them."""


@pytest.mark.parametrize("name", STRICT_MODELS)
async def test_calls_of_strict_tools_conform(make_cluster, name):
    cluster = await make(make_cluster, name)
    kind, befores = STRICT_MODELS[name]
    form, two = FORMS[kind]
    is_bare = kind in BARE
    weather = ONE[kind].format(form.format("weather", PARIS))
    says(cluster, befores[-1] + weather)
    takes, choice = await grammar_of(cluster, tools=STRICT, tool_choice="auto")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
    assert choice["message"]["content"] is None
    key = "parameters" if kind == "llama3" else "arguments"
    others = [{"id": "1", "name": "weather", key: {}}, {"type": "functions", "name": "weather", key: {}}]
    for before in befores:
        assert takes(before + weather)
        # A function that is not strict takes any object.
        assert takes(before + two.format(form.format("weather", PARIS), form.format("add", ANY)))
        for text in ("", "Yes.", "[a](b)", "See <tool_cal", "a { b", f"Yes. {weather}"):
            assert takes(before + text), text
        bad = [form.format("weather", '{"town": "x"}'), form.format("fly", "{}")]
        bad += [json.dumps(each) for each in others] if is_bare else []
        for call in bad:
            assert not takes(before + ONE[kind].format(call)), call
            assert is_bare or not takes(f"{before}Yes. {ONE[kind].format(call)}"), call
            assert not takes(before + ONE[kind].format(call), is_spelled=True), call
        assert takes(before + '{"city": 3}') == (not is_bare)
    takes, _ = await grammar_of(cluster, tools=STRICT, parallel_tool_calls=False)
    assert takes(befores[0] + weather)
    assert not takes(befores[0] + two.format(form.format("weather", PARIS), form.format("add", ANY)))


async def test_reasoning_has_one_end(make_cluster):
    """However it is spelled: the parser reads text."""
    cluster = await make(make_cluster, "thinking")
    says(cluster, f"Hm.</think>{PARIS}")
    takes, _ = await grammar_of(cluster, "response_format", tools=None, response_format=FORMAT)
    assert takes(f"Hm. < /think></think>{PARIS}")
    assert not takes(f"Hm.</think>{PARIS}", is_spelled=True)


async def test_calls_of_strict_tools_behind_a_marker(make_cluster):
    """Llama's marker, behind text."""
    cluster = await make(make_cluster, "llama3")
    says(cluster, "Yes.")
    takes, _ = await grammar_of(cluster, tools=STRICT)
    good, bad = (FORMS["llama3"][0].format("weather", arguments) for arguments in (PARIS, "{}"))
    for before in ("", "Yes."):
        assert takes(f"{before}<|python_tag|>{good}")
        assert not takes(f"{before}<|python_tag|>{bad}")
        assert not takes(f"{before}<|python_tag|>{bad}", is_spelled=True)
    for between in ("; ", ";", "\n"):
        assert takes(f"{good}{between}{good}")


async def test_names_outside(make_cluster):
    """Later models of Mistral have a token that stands between a name and its arguments."""
    model = model_of("mistral arguments")
    cluster = await make_cluster(1, model=model)
    one = "[TOOL_CALLS]{}[ARGS]{}"
    says(cluster, one.format("weather", PARIS))
    for fields in ({"tool_choice": "required"}, {"tools": STRICT}):
        takes, choice = await grammar_of(cluster, **fields)
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
        assert takes(one.format("weather", PARIS) + one.format("add", ANY))
        assert takes(FORMS["mistral"][1].format(*[FORMS["mistral"][0].format("weather", PARIS)] * 2))
        assert not takes(one.format("weather", "{}"))
        assert not takes(one.format("fly", PARIS))


async def test_descriptions_are_in_no_grammar(make_cluster):
    """So their length does not count."""
    long = [{"type": "function", "function": {"name": f"f{n}", "description": "x" * 16_000}} for n in range(4)]
    model = model_of("hermes")
    model["card"].context_length = 1 << 17
    cluster = await make_cluster(1, model=model)
    for fields in ({"tools": [*STRICT, *long]}, {"tools": long, "response_format": FORMAT}):
        response = await cluster.chat(messages=ASK, max_tokens=5, **fields)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("text", ["[" * 60_000, '{"const": "\\ud800"}', "[]", "3", "{"])
async def test_a_schema_that_is_none_reaches_workers_as_it_is(make_cluster, text):
    """They say what is wrong with it."""
    cluster = await make(make_cluster, "thinking")
    says(cluster, "1")
    response = await cluster.chat(messages=ASK, max_tokens=5, structured_outputs={"json": text})
    assert response.status_code == 200, response.text
    assert cluster.workers[0].submits[-1].sampling.grammar.text == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a"}, "tool_choice": "required"}, "structured_outputs.regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}
            | {"tool_choice": "required"},
            "tools[0]",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "é" * 40_000}}}]}
            | {"tool_choice": "required"},
            "tools",
        ),
    ],
)
async def test_what_cannot_be_forced_is_refused(make_cluster, fields, param):
    model = model_of("hermes")
    model["card"].context_length = 1 << 17
    cluster = await make_cluster(1, model=model)
    response = await cluster.chat(**({"messages": ASK, "tools": TOOLS} | fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_workers_without_grammars_force_nothing(make_cluster):
    model = model_of("hermes")
    model["card"].grammar_engine = ""
    cluster = await make_cluster(1, model=model)
    for fields, param in (({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"), ({"tools": STRICT}, "tools")):
        response = await cluster.chat(messages=ASK, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
