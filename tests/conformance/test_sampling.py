"""Every sampling field does what OpenAI's documentation says, on a real model."""

import math
from collections import Counter

import openai
import pytest
from system import MODEL, System

PROMPT = "It was a dark night, and"
GREEDY = {"model": MODEL, "prompt": PROMPT, "temperature": 0}


def text(client: openai.OpenAI, **fields) -> str:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30} | fields
    return client.completions.create(**request).choices[0].text


def test_a_seed_gives_the_same_text_again(client: openai.OpenAI) -> None:
    texts = [text(client, seed=seed) for seed in (1, 2, 3, 1, 2, 3)]
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3


def test_without_a_seed_texts_differ(client: openai.OpenAI) -> None:
    assert len({text(client) for _ in range(3)}) == 3


@pytest.mark.parametrize("temperature", [0, 0.01])
def test_no_temperature_is_greedy(client: openai.OpenAI, temperature: float) -> None:
    assert len({text(client, temperature=temperature, seed=seed, max_tokens=12) for seed in range(3)}) == 1


def test_a_tiny_nucleus_is_greedy(client: openai.OpenAI) -> None:
    greedy = text(client, temperature=0)
    assert text(client, top_p=1e-6, seed=5) == greedy
    assert text(client, extra_body={"top_k": 1}, seed=5) == greedy
    assert text(client, extra_body={"min_p": 1.0}, seed=5) == greedy


def test_high_temperature_makes_texts_differ_more(client: openai.OpenAI) -> None:
    def kinds(temperature: float) -> int:
        texts = [text(client, temperature=temperature, seed=seed, max_tokens=6) for seed in range(6)]
        return len(set(texts))

    assert kinds(0.05) < kinds(2.0)


def test_penalties_stop_repetition(client: openai.OpenAI) -> None:
    def most_common(**penalty: float) -> int:
        answer = client.completions.create(max_tokens=150, logprobs=0, **GREEDY, **penalty)
        return Counter(answer.choices[0].logprobs.tokens).most_common(1)[0][1]

    plain = most_common()
    assert most_common(frequency_penalty=1.5) < plain
    assert most_common(presence_penalty=2.0) < plain
    assert most_common(extra_body={"repetition_penalty": 1.5}) < plain


def test_logit_bias_forces_and_bans(client: openai.OpenAI, system: System) -> None:
    (forced,) = system.tokenize(" the")
    assert text(client, temperature=0, max_tokens=4, logit_bias={str(forced): 100}) == " the the the the"
    first = client.completions.create(max_tokens=1, **GREEDY).choices[0].text
    (banned,) = system.tokenize(first)
    assert not text(client, temperature=0, max_tokens=1, logit_bias={str(banned): -100}).startswith(first)


def test_n_choices(client: openai.OpenAI) -> None:
    seeded = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, n=3, seed=4)
    texts = [choice.text for choice in seeded.choices]
    assert [choice.index for choice in seeded.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert seeded.usage.completion_tokens == 60
    again = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, n=3, seed=4)
    assert [choice.text for choice in again.choices] == texts
    greedy = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=20, n=3
    )
    assert len({choice.message.content for choice in greedy.choices}) == 1


def test_n_choices_streamed(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "n": 3, "seed": 4}
    complete = [choice.text for choice in client.completions.create(**request).choices]
    streamed = ["", "", ""]
    for chunk in client.completions.create(**request, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == complete


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    complete = text(client, temperature=0, max_tokens=40)
    stop = complete[20:23]
    for stops in (stop, [stop], ["never to be found", stop]):
        answer = client.completions.create(max_tokens=40, stop=stops, **GREEDY)
        assert answer.choices[0].text == complete[: complete.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 40


def test_every_stop_string_is_found_wherever_tokens_end(client: openai.OpenAI) -> None:
    answer = client.completions.create(max_tokens=24, logprobs=0, **GREEDY)
    complete, tokens = answer.choices[0].text, answer.choices[0].logprobs.tokens
    assert "".join(tokens) == complete
    ends = [sum(map(len, tokens[: n + 1])) for n in range(len(tokens))]
    across = [end for end in ends if 4 < end < len(complete) - 3][::4]
    assert len(across) > 3
    for end in across:
        stop = complete[end - 2 : end + 2]  # two characters of one token and two of the next
        expected = complete[: complete.index(stop)]
        assert text(client, temperature=0, max_tokens=24, stop=stop) == expected
        chunks = client.completions.create(max_tokens=24, stop=stop, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_stop_token_ids_end_the_text(client: openai.OpenAI, system: System) -> None:
    answer = client.completions.create(max_tokens=12, logprobs=0, **GREEDY)
    token = answer.choices[0].logprobs.tokens[5]
    (stop_id,) = system.tokenize(token)
    stopped = client.completions.create(max_tokens=12, extra_body={"stop_token_ids": [stop_id]}, **GREEDY)
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens == answer.choices[0].logprobs.tokens.index(token) + 1


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=10,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 10
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.choices[0].message.content
    for entry in entries:
        likely = [top.logprob for top in entry.top_logprobs]
        assert len(likely) == 5
        assert likely == sorted(likely, reverse=True)
        assert entry.logprob == likely[0] <= 0
        assert entry.token == entry.top_logprobs[0].token
        assert sum(map(math.exp, likely)) <= 1 + 1e-5


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(max_tokens=10, logprobs=3, **GREEDY)
    logprobs, complete = answer.choices[0].logprobs, answer.choices[0].text
    assert "".join(logprobs.tokens) == complete
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 10
    assert [complete[at : at + len(t)] for at, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
        logprobs.tokens
    )
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3
        assert chosen == max(top.values())


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 10, "seed": 3}
    request |= {"logprobs": True, "top_logprobs": 2}
    complete = client.chat.completions.create(**request).choices[0].logprobs.content
    chunks = client.chat.completions.create(**request, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == complete


def test_logprobs_of_a_sampled_token_are_the_models_own(client: openai.OpenAI) -> None:
    """They do not depend on temperature or on the other sampling settings."""
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "logprobs": 5}
    greedy = client.completions.create(**request, temperature=0).choices[0].logprobs.top_logprobs
    warm = client.completions.create(**request, temperature=1.5, top_p=0.5, seed=2).choices[0].logprobs
    most_likely = {token: pytest.approx(value, abs=1e-4) for token, value in greedy[0].items()}
    # The sampled token is there as well, whether it is one of the five or not.
    assert {token: value for token, value in warm.top_logprobs[0].items() if token in most_likely} == most_likely
    assert warm.tokens[0] in warm.top_logprobs[0]
