"""The token that stops an answer counts, and is no part of its text, whichever part of the router gives the text."""

from dataclasses import replace

import pytest
import sentencepiece_model
from lockstep_api.v1 import inference_pb2, worker_pb2
from lockstep_router.generation.choices import Choice
from lockstep_router.generation.parsing import Parsing
from lockstep_router.journals import ChoiceLog, Piece
from lockstep_router.resumption.replay import Replay
from router_cluster import events_of
from scripted_worker import Script
from sentencepiece_model import VOCAB, bytes_of, ids_of
from test_replay import STOP, stream_of
from tool_models import ids_of as ids_of_model
from tool_models import model_of

TEXT = ids_of("\u2581he", "llo", "\u2581world")
END = VOCAB["<end>"]
TOKENIZER = sentencepiece_model.tokenizer_of()
CALL = '{"name": "weather", "arguments": {}}'


def probs_of(ids):
    return [inference_pb2.Logprobs(chosen=inference_pb2.TokenLogprob(id=each, logprob=-1.0)) for each in ids]


def fed(choice, ids, *, at_once=1, with_logprobs=False):
    """The deltas of an answer that its last id stops."""
    deltas = []
    for first in range(0, len(ids), at_once):
        part = ids[first : first + at_once]
        is_last = first + at_once >= len(ids)
        update = worker_pb2.StreamTokens(
            ids=part, logprobs=probs_of(part) if with_logprobs else (), finish=STOP if is_last else 0
        )
        deltas += [delta for delta in [choice.feed(update)] if delta is not None]
    return deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("stops", [(), ("zzz",), ("world<e",)])
def test_text_does_not_have_it(at_once, with_logprobs, stops):
    choice = Choice(0, TOKENIZER, stops)
    deltas = fed(choice, [*TEXT, END], at_once=at_once, with_logprobs=with_logprobs)
    # A stop string that would need its text is not found without it, unless that is what ended the answer.
    assert text_of(deltas) == ("hello " if stops == ("world<e",) else "hello world")
    assert (deltas[-1].finish_reason, choice.tokens) == ("stop", 4)
    if with_logprobs and stops != ("world<e",):
        entries = [entry for delta in deltas for entry in delta.entries]
        assert [(entry.logprobs.chosen.id, entry.text_offset) for entry in entries][-1] == (END, 11)


def test_text_that_waits_comes_with_it():
    half = bytes_of("é")[:1]
    assert text_of(fed(Choice(0, TOKENIZER, ()), [*TEXT, *half, END])) == "hello world\ufffd"
    assert text_of(fed(Choice(0, TOKENIZER, ("world!",)), [*TEXT, END])) == "hello world"


def test_token_that_reaches_the_limit_keeps_its_text():
    choice = Choice(0, TOKENIZER, ())
    delta = choice.feed(worker_pb2.StreamTokens(ids=[END], finish=inference_pb2.FINISH_REASON_LENGTH))
    assert (delta.text, delta.finish_reason) == ("<end>", "length")


@pytest.mark.parametrize("stops", [(), ("zzz",), ("o w",), ("world!",), ("world<e",), ("rld",)])
@pytest.mark.parametrize("ids", [[*TEXT, END], TEXT, [END], [*TEXT, *bytes_of("é")[:1], END]])
def test_journal_gives_the_same_text(ids, stops):
    choice = Choice(0, TOKENIZER, stops)
    deltas = fed(choice, ids)
    for again in journal_of(ids[: choice.tokens], stops):
        assert text_of(again) == text_of(deltas)
        assert (again[-1].finish_reason, again[-1].tokens) == ("stop", choice.tokens)


def journal_of(ids, stops=(), parsing=None, tokenizer=TOKENIZER):
    """The deltas of an answer that was stopped, from its journal: of all tokens at once, and of each by itself."""
    for kind in ("chat", "responses"):
        kept = stream_of(1, stops=stops)
        kept = replace(kept, style=replace(kept.style, kind=kind), parsing=parsing)
        log = ChoiceLog()
        log.add(Piece(0, 0, ids, (), STOP))
        yield Replay(kept, [log], tokenizer).take()


@pytest.mark.parametrize("most", [None, 1])
@pytest.mark.parametrize("text", [CALL, f"{CALL}!", f"{CALL};", "no call", f"{CALL}; {CALL}", f"{CALL}; {CALL}!"])
def test_journal_gives_the_same_calls(text, most):
    tokenizer = sentencepiece_model.Tokenizer(model_of("llama3")["files"])
    parsing = Parsing(tool_format="llama3", names=frozenset({"weather"}), most_calls=most)
    choice = Choice(0, tokenizer, (), parsing, "s-0")
    deltas = fed(choice, ids_of_model(tokenizer, text))
    parts = [part for delta in deltas for part in delta.parts]
    whole = (text_of(deltas), "".join(map(str, parts)), deltas[-1].finish_reason)
    for again in journal_of(ids_of_model(tokenizer, text)[: choice.tokens], (), parsing, tokenizer):
        parts = [part for delta in again for part in delta.parts]
        assert (text_of(again), "".join(map(str, parts)), again[-1].finish_reason) == whole
    if most == 1 and text.startswith(CALL + ";"):
        assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("token", ["!", "<end>", "</s>"])
async def test_answers_do_not_have_it(make_cluster, token):
    cluster = await make_cluster(1, model=sentencepiece_model.model())
    ids = [*TEXT, VOCAB[token]]
    cluster.workers[0].script = Script(token=lambda _prompt_ids, _seed, at: ids[at], stop_after=len(ids))
    body = {"model": "reference", "prompt": "he", "stop_token_ids": [VOCAB[token]], "max_tokens": 20}
    whole = (await cluster.client.post("/v1/completions", json=body | {"logprobs": 0})).json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" hello world", "stop")
    assert choice["logprobs"]["tokens"] == [" he", "llo", " world", token]
    assert whole["usage"]["completion_tokens"] == 4
    for fields in ({}, {"resumable": True}, {"stop": ["zzz"]}):
        events = events_of(await cluster.client.post("/v1/completions", json=body | {"stream": True} | fields))
        choices = [data["choices"][0] for _, data in events if data != "[DONE]"]
        assert "".join(each["text"] for each in choices) == " hello world"
        assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("min_tokens", [0, 2, 3, 4, 9])
@pytest.mark.parametrize("at_once", [1, 3, 5])
def test_stop_strings_count_after_the_least_tokens(min_tokens, at_once):
    ids = [*TEXT, *ids_of("!", "\u2581he", "llo"), END]
    choice = Choice(0, TOKENIZER, ("lo wor", "hello"), min_tokens=min_tokens)
    text, tokens = {0: ("", 2), 2: ("hel", 3)}.get(min_tokens, ("hello world! ", 6))
    if min_tokens == 9:
        text, tokens = "hello world! hello", 7
    assert text_of(fed(choice, ids, at_once=at_once)) == text
    assert choice.tokens == tokens


async def test_least_tokens_hold_against_stop_strings(make_cluster):
    cluster = await make_cluster(1, model=sentencepiece_model.model())
    ids = [*TEXT, *TEXT]
    cluster.workers[0].script = Script(token=lambda _prompt_ids, _seed, at: ids[at])
    body = {"model": "reference", "prompt": "he", "max_tokens": 6, "stop": "llo"}
    for min_tokens, text in ((0, " he"), (2, " hello world he"), (5, " hello world hello world")):
        for fields in ({}, {"stream": True}, {"stream": True, "resumable": True}):
            response = await cluster.client.post("/v1/completions", json=body | {"min_tokens": min_tokens} | fields)
            bodies = [data for _, data in events_of(response) if data != "[DONE]"] if fields else [response.json()]
            assert "".join(each["choices"][0]["text"] for each in bodies) == text
