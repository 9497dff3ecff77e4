"""`tool_choice` required or named: the grammar that workers get takes calls of each format, and nothing else."""

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
}
ONE = {"hermes": "{}", "llama3": "{}", "mistral": "[TOOL_CALLS][{}]"}


async def make(make_cluster, name, **settings):
    model = model_of(name)
    model["card"].grammar_engine = "test"
    return await make_cluster(1, model=model, **settings)


async def grammar_of(cluster, **fields):
    response = await cluster.chat(messages=ASK, tools=TOOLS, max_tokens=500, **fields)
    assert response.status_code == 200, response.text
    grammar = cluster.workers[0].submits[-1].sampling.grammar
    assert (grammar.kind, grammar.field) == (inference_pb2.GRAMMAR_KIND_LARK, "tools")
    tokenizer = LLTokenizer(
        cluster.workers[0].files.tokenizer_json.decode(), n_vocab=cluster.workers[0].card.vocab_size
    )
    matcher = LLMatcher(tokenizer, grammar.text)
    assert not matcher.is_error(), matcher.get_error()

    def takes(text):
        fresh, ids = matcher.deep_copy(), ids_of(cluster.tokenizer, text)
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
    cluster = await make(make_cluster, "plain", model_tool_formats={"reference": "json"})
    text = f'[{{"name": "weather", "arguments": {PARIS}}}]'
    says(cluster, text)
    takes, choice = await grammar_of(cluster, tool_choice="required")
    assert takes(text)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS


@pytest.mark.parametrize("name", ["thinking", "special thinking"])
async def test_reasoning_comes_first(make_cluster, name):
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


async def test_a_form_of_the_answer_takes_the_place_of_reasoning(make_cluster):
    cluster = await make(make_cluster, "thinking")
    says(cluster, '{"a": 1}')
    response = await cluster.chat(messages=ASK, max_tokens=500, response_format={"type": "json_object"})
    assert response.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    body = {"model": "reference", "input": "hi", "text": {"format": schema}}
    response = await cluster.client.post("/v1/responses", json=body)
    grammar = cluster.workers[0].submits[-1].sampling.grammar
    assert (grammar.kind, grammar.field) == (inference_pb2.GRAMMAR_KIND_JSON_SCHEMA, "text.format")
    assert response.json()["text"]["format"] == schema
    assert response.json()["output"][0]["content"][0]["text"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
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
    model["card"].grammar_engine, model["card"].context_length = "test", 1 << 17
    cluster = await make_cluster(1, model=model)
    response = await cluster.chat(**({"messages": ASK, "tools": TOOLS} | fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_workers_without_grammars_force_nothing(make_cluster):
    cluster = await make_cluster(1, model=model_of("hermes"))
    response = await cluster.chat(messages=ASK, tools=TOOLS, tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
