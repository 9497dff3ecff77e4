"""The Responses API, through the official client where it matters what that makes of it."""

import openai
import pytest
from lockstep_api.v1 import worker_pb2
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter
from router_cluster import events_of
from scripted_worker import Script
from tool_models import ids_of, model_of, prompt_of, says

PARIS = '{"city": "Paris"}'
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALLS = (
    f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call><tool_call>{{"name": "weather"}}</tool_call>'
)
ASK = {"model": "reference", "input": "Is it raining?", "max_output_tokens": 500}


@pytest.fixture
async def cluster(make_cluster):
    return await make_cluster(1, model=model_of("thinking"))


@pytest.fixture
async def client(cluster):
    async with cluster.over_http() as http:
        yield openai.AsyncOpenAI(base_url=f"{http.base_url}/v1".replace("//v1", "/v1"), api_key="k", max_retries=0)


def check(response):
    """Validate a response against the client's own types, which the client itself does not."""
    TypeAdapter(Response).validate_python(response.model_dump(mode="json", exclude_unset=True))
    return response


async def test_a_text(client, cluster):
    ids = says(cluster, "Hm.\n</think>\n\nYes.")
    response = check(
        await client.responses.create(**ASK, instructions="Be brief.", temperature=0.5, metadata={"a": "b"})
    )
    assert (response.status, response.output_text, response.model) == ("completed", "Yes.", "reference")
    reasoning, message = response.output
    assert (reasoning.type, reasoning.content[0].text, reasoning.summary) == ("reasoning", "Hm.", [])
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert prompt_of(cluster).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs it raining?<|im_end|>"
    )
    usage = response.usage
    assert (usage.output_tokens, usage.total_tokens) == (len(ids), usage.input_tokens + len(ids))
    assert usage.output_tokens_details.reasoning_tokens == len(ids_of(cluster.tokenizer, "Hm.\n</think>"))
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert (response.store, response.previous_response_id, response.error) == (False, None, None)


async def test_calls(client, cluster):
    says(cluster, f"</think>I look. {CALLS}")
    response = check(await client.responses.create(**ASK, tools=[WEATHER]))
    message, first, second = response.output
    assert message.content[0].text == "I look."
    assert [(call.type, call.name, call.arguments) for call in (first, second)] == [
        ("function_call", "weather", PARIS),
        ("function_call", "weather", "{}"),
    ]
    assert first.call_id != second.call_id
    assert response.tools[0].name == "weather"
    assert "The weather." in prompt_of(cluster)


async def test_a_conversation_goes_on_with_the_items_of_its_answer(client, cluster):
    says(cluster, f"I wonder.</think>I look. {CALLS}")
    response = await client.responses.create(**ASK, tools=[WEATHER])
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
        for item in response.output
        if item.type == "function_call"
    ]
    says(cluster, "</think>Yes.")
    items = [{"role": "user", "content": "Is it raining?"}]
    for kept in (response.output, [item.model_dump() for item in response.output]):
        answer = await client.responses.create(**(ASK | {"input": [*items, *kept, *outputs]}), tools=[WEATHER])
        assert answer.output_text == "Yes."
        prompt = prompt_of(cluster)
        assert (
            "<|im_start|>assistant\n<think>I wonder.</think>I look."
            f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>'
            '<tool_call>{"name": "weather", "arguments": {}}</tool_call><|im_end|>\n'
        ) in prompt
        assert prompt.count("<tool_response>Rain.</tool_response>") == 2


class Weather(BaseModel):
    """A form for answers and arguments."""

    city: str


async def test_what_parse_adds_to_an_answer_may_come_back(client, cluster):
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"] | {"type": "function"}
    says(cluster, f'</think>{{"city": "Rome"}} {CALLS}')
    response = await client.responses.parse(**ASK, tools=[tool])
    message, *calls = response.output
    assert calls[0].parsed_arguments is not None
    message.content[0].parsed = {"city": "Rome"}  # as it is with `text_format`, which needs a worker with grammars
    user = {"role": "user", "content": "Is it raining?"}
    outputs = [{"type": "function_call_output", "call_id": item.call_id, "output": "Rain."} for item in calls]
    says(cluster, "</think>Yes.")
    for kept in (response.output, [item.model_dump() for item in response.output]):
        answer = await client.responses.create(**(ASK | {"input": [user, *kept, *outputs]}), tools=[tool])
        assert answer.output_text == "Yes."
        assert '{"city": "Rome"}<tool_call>' in prompt_of(cluster)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"mode": "explicit"}},
        {"reasoning": {"summary": "concise"}},
        {"reasoning": {"summary": "detailed", "generate_summary": "auto"}},
        {"tools": [WEATHER | {"description": None, "strict": None, "defer_loading": None}]},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": None}]},
                {"role": "assistant", "content": "b", "phase": "final_answer"},
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "c", "prompt_cache_breakpoint": {"mode": "explicit"}, "x": None}
                    ],
                },
            ]
        },
    ],
    ids=["cache", "concise", "detailed", "tools", "input"],
)
async def test_fields_of_the_client_that_change_nothing(cluster, fields):
    says(cluster, "</think>Yes.")
    response = await cluster.client.post("/v1/responses", json=ASK | fields)
    assert response.status_code == 200, response.text
    assert response.json()["output"][-1]["content"][0]["text"] == "Yes."


async def test_fields_of_chats_that_change_nothing(cluster):
    says(cluster, "</think>Yes.")
    part = {"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    fields = {"messages": [{"role": "user", "content": [part]}], "prompt_cache_options": {"mode": "explicit"}}
    response = await cluster.chat(**fields, max_tokens=100)
    assert response.status_code == 200, response.text


async def test_the_events_build_the_response(client, cluster):
    says(cluster, f"Hm.</think>I look. {CALLS}")
    whole = await client.responses.create(**ASK, tools=[WEATHER])
    events = [event async for event in await client.responses.create(**ASK, tools=[WEATHER], stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    last = check(events[-1].response)
    assert [(item.type, item.status) for item in last.output] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    assert last.output_text == whole.output_text == "I look."
    assert last.usage == whole.usage
    for index, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item.model_dump() == item.model_dump()
        assert {event.item_id for event in own[1:-1]} == {item.id}
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        if item.type == "function_call":
            assert deltas == item.arguments
            assert own[-2].type == "response.function_call_arguments.done"
            assert own[-2].arguments == item.arguments
        else:
            assert deltas == item.content[0].text
            assert (own[1].type, own[-2].type) == ("response.content_part.added", "response.content_part.done")
            assert own[-3].text == deltas


async def test_the_clients_own_accumulation_works(client, cluster):
    says(cluster, f"Hm.</think>I look. {CALLS}")
    async with client.responses.stream(**ASK, tools=[WEATHER]) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert "response.function_call_arguments.delta" in kinds
    assert final.output_text == "I look."


async def test_events_are_named_and_end_without_a_marker(cluster):
    says(cluster, "</think>Yes.")
    response = await cluster.client.post("/v1/responses", json=ASK | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    for block, (_, data) in zip(blocks[:-1], events_of(response), strict=True):
        assert block.startswith(f"event: {data['type']}\ndata: ")


@pytest.mark.parametrize("stream", [False, True])
async def test_too_few_tokens_make_it_incomplete(client, cluster, stream):
    says(cluster, "Hm.</think>Yes and no and so on")
    start = ids_of(cluster.tokenizer, "Hm.</think>Yes")
    response = await client.responses.create(**(ASK | {"max_output_tokens": len(start)}), stream=stream)
    if stream:
        event = [event async for event in response][-1]
        assert event.type == "response.incomplete"
        response = event.response
    check(response)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[-1].status) == ("Yes", "incomplete")


async def test_an_answer_without_text_has_an_empty_message(client, cluster):
    says(cluster, "<|im_end|>")
    response = check(await client.responses.create(**ASK))
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


async def test_a_failure_before_the_first_token_has_a_status(client, cluster):
    cluster.workers[0].script = Script(rejection=worker_pb2.Rejected(code="internal", message="bad"))
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="bad"):
            await client.responses.create(**ASK, stream=stream)


async def test_a_failure_later_is_an_event(client, cluster):
    says(
        cluster,
        "</think>Yes" + " and no" * 9,
        rejection=worker_pb2.Rejected(code="internal", message="bad"),
        reject_after=4,
    )
    events = [event async for event in await client.responses.create(**ASK, stream=True)]
    failed = events[-1]
    assert failed.type == "response.failed"
    check(failed.response)
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
    assert "bad" in failed.response.error.message
    assert failed.response.output[-1].status == "incomplete"


REFUSED = {"type": "refusal", "refusal": "I would rather not."}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, "include"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "markdown"}}}, "text.format.type"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "text"}]}]}, "input[0].summary[0].type"),
        ({"input": [{"role": "user", "content": [REFUSED]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "assistant", "content": [REFUSED | {"refusal": 3}]}]}, "input[0].content[0].text"),
        ({"stream_options": {}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"metadata": {f"k{n}": "v" for n in range(17)}}, "metadata"),
    ],
)
async def test_a_wrong_field_is_named(cluster, fields, param):
    says(cluster, "</think>Yes.")
    response = await cluster.client.post("/v1/responses", json=ASK | fields)
    if param is None:
        assert response.status_code == 200
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) in (("invalid_request", param), ("context_length_exceeded", param)), error


@pytest.mark.parametrize("fields", [{}, {"store": False}])
async def test_encrypted_reasoning_may_be_asked_for_and_there_is_none(cluster, fields):
    says(cluster, "Hm.</think>Yes.")
    body = ASK | fields | {"include": ["reasoning.encrypted_content"]}
    response = await cluster.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert "encrypted_content" not in response.text


async def test_a_summary_changes_nothing_and_a_refusal_is_text(cluster):
    says(cluster, "</think>Yes.")
    prompts = []
    for summary, content in (
        ([], "Well.\nI would rather not."),
        ([{"type": "summary_text", "text": "It thought."}], [{"type": "output_text", "text": "Well."}, REFUSED]),
    ):
        thought = {"type": "reasoning", "summary": summary, "content": [{"type": "reasoning_text", "text": "Hm."}]}
        said = {"type": "message", "role": "assistant", "content": content}
        user = {"role": "user", "content": "Do it."}
        response = await cluster.client.post("/v1/responses", json=ASK | {"input": [user, thought, said, user]})
        assert response.status_code == 200, response.text
        prompts.append(prompt_of(cluster))
    assert prompts[0] == prompts[1]
    assert "Well.\nI would rather not." in prompts[0]


async def test_fields_that_ask_for_nothing_are_accepted(cluster):
    says(cluster, "</think>Yes.")
    nothing = {"store": False, "previous_response_id": None, "include": [], "truncation": "disabled", "tools": []}
    nothing |= {"background": False, "service_tier": "auto", "top_logprobs": 0, "safety_identifier": "x"}
    nothing |= {"reasoning": {"effort": None, "summary": "auto"}, "text": {"format": {"type": "text"}}}
    response = await cluster.client.post("/v1/responses", json=ASK | nothing)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": [WEATHER]}, "tool_choice"),
        ({"tools": [WEATHER | {"strict": True}]}, "tools"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
async def test_workers_without_grammars_are_not_asked_for_one(make_cluster, fields, param):
    model = model_of("thinking")
    model["card"].grammar_engine = ""
    cluster = await make_cluster(1, model=model)
    response = await cluster.client.post("/v1/responses", json=ASK | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not cluster.workers[0].submits
