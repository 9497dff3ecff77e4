"""The text of a completion continues its prompt's text, with tokenizers that drop the space that begins a text."""

import json
from dataclasses import replace

import pytest
import sentencepiece_model
from lockstep_router.journals import ChoiceLog, StoredStream
from lockstep_router.resumption.continuation import continued
from router_cluster import events_of
from scripted_worker import Script
from sentencepiece_model import ids_of
from takeover_cluster import Sharing, mirrored
from test_replay import stream_of

ANSWER = ids_of("\u2581world", "!", "\u2581he", "llo")
TEXT = " world! hello"
PROMPT = ids_of("\u2581he", "llo")
BODY = {"model": "reference", "max_tokens": len(ANSWER), "user": "u"}


def answers(workers, **script):
    for worker in workers:
        worker.script = Script(token=lambda _prompt_ids, _seed, at: ANSWER[at], **script)


@pytest.fixture
async def cluster(make_cluster):
    made = await make_cluster(1, model=sentencepiece_model.model())
    answers(made.workers)
    return made


async def complete(cluster, **fields):
    response = await cluster.client.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    return response


def text_of(events):
    return "".join(data["choices"][0]["text"] for _, data in events if data != "[DONE]" and data.get("choices"))


@pytest.mark.parametrize("prompt", ["he", PROMPT, [PROMPT, PROMPT]], ids=["text", "ids", "several"])
async def test_space_after_the_prompt_is_part_of_the_text(cluster, prompt):
    whole = (await complete(cluster, prompt=prompt, n=2)).json()
    assert {choice["text"] for choice in whole["choices"]} == {TEXT}
    for resumable in (False, True):
        streamed = events_of(await complete(cluster, prompt=prompt, stream=True, resumable=resumable))
        first = [(key, data) for key, data in streamed if data != "[DONE]" and data["choices"][0]["index"] == 0]
        assert text_of(first) == TEXT


async def test_echoed_prompt_and_text_are_one_text(cluster):
    body = (await complete(cluster, prompt=PROMPT, echo=True)).json()
    assert body["choices"][0]["text"] == "hello" + TEXT == cluster.tokenizer.decode(PROMPT + ANSWER)


async def test_log_probabilities_agree_with_the_text(cluster):
    (choice,) = (await complete(cluster, prompt=PROMPT, logprobs=1)).json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == TEXT
    assert [
        TEXT[offset:].startswith(token)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    ] == [True] * len(ANSWER)


async def test_stop_string_may_begin_with_the_first_space(cluster):
    (choice,) = (await complete(cluster, prompt=PROMPT, stop=" world")).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


async def test_answers_to_conversations_begin_a_text(cluster):
    body = {"messages": [{"role": "user", "content": "he"}]} | BODY
    response = await cluster.client.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"]["content"] == TEXT.lstrip()


async def test_another_router_continues_the_text(tmp_path):
    async with Sharing(tmp_path, sentencepiece_model.tokenizer_of(), sentencepiece_model.model()) as sharing:
        first, second = await sharing.router("first"), await sharing.router("second")
        answers(sharing.workers, delay_s=0.3)
        body = BODY | {"prompt": PROMPT, "stream": True, "resumable": True, "logprobs": 0}
        async with first.over_http() as client, client.stream("POST", "/v1/completions", json=body) as response:
            stream_id = response.headers["x-lockstep-stream-id"]
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    json.loads(line[6:])
                    break
        await mirrored(first)
        events = events_of(await second.client.get(f"/v1/streams/{stream_id}"))
        assert text_of(events) == TEXT
        offsets = [
            offset
            for _, data in events
            if data != "[DONE]" and data["choices"][0]["logprobs"]
            for offset in data["choices"][0]["logprobs"]["text_offset"]
        ]
        assert offsets == [0, 6, 7, 10]


@pytest.mark.parametrize(("kind", "continues"), [("text", True), ("chat", False), ("responses", False)])
async def test_a_journal_says_whether_its_texts_continue_prompts(kind, continues):
    kept = stream_of(1)
    kept = replace(kept, style=replace(kept.style, kind=kind))
    prepared = continued(StoredStream(kept, [ChoiceLog()], None), sentencepiece_model.tokenizer_of(), 0)
    assert prepared.continues_prompts == continues
