"""A body that is decoded in one step means what it means the general way, or goes the general way."""

import json
import random

import pytest
from lockstep_common.errors import LockstepError
from lockstep_router.faces.identity import Origin
from lockstep_router.faces.openai.fields import parse
from lockstep_router.faces.openai.plain import MAX_BYTES, decode
from lockstep_router.faces.rest.generating import CHAT, COMPLETIONS
from lockstep_router.settings import RouterSettings

SETTINGS = RouterSettings(workers=("unix:/none",))
ORIGIN = Origin({"x-session-id": "s"})
MAX_VALUES = 150_000

TEXTS = ["", "a", "hello world", "naïve \u4f60\u597d", "\U0001f600", "\x00", '"\\/\b', "x" * 257, "x" * 1025]
NUMBERS = [0, -0, 1, -1, 2, 2.0, 0.5, 1e-9, 1.0000001, 1e2, -2, -2.5, 16, 1 << 31, (1 << 31) - 1, 1 << 63, 1 << 64]
NUMBERS += [-(1 << 63), -(1 << 63) - 1, 1e308, 10**30]
OTHERS = [None, True, False, [], {}, [1], ["a"], ["a", "b"], [""], [None], ["x" * 257], ["a"] * 17, {"a": 1}]
OPTIONS = [{"include_usage": True}, {"include_usage": None}, {"include_obfuscation": True}, {"other": 1}, {}]
VALUES = TEXTS + NUMBERS + OTHERS + OPTIONS
SHARED = [
    "model",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "response_format",
    "structured_outputs",
    "stream",
    "stream_options",
    "user",
    "resumable",
    "metadata",
    "store",
    "tools",
    "tool_choice",
    "logprobs",
    "unknown",
]
ROLES = ["system", "developer", "user", "assistant", "tool", "other", "user\n", "", None]


def message(rng):
    made = {"role": rng.choice(ROLES[:4] * 4 + ROLES), "content": rng.choice(TEXTS * 3 + OTHERS)}
    if rng.random() < 0.2:
        made[rng.choice(["name", "tool_calls", "tool_call_id", "refusal", "reasoning_content"])] = rng.choice(VALUES)
    return made


def good(endpoint, rng):
    body = {"model": "m", "max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": "x", "stream": True, "user": "u"}
    body = {key: value for key, value in body.items() if key == "model" or rng.random() < 0.5}
    if endpoint is COMPLETIONS:
        return body | {"prompt": rng.choice(TEXTS)}
    return body | {"messages": [message(rng) for _ in range(rng.randrange(1, 4))]}


def bodies(endpoint, rng, count):
    """JSON texts: most are nearly right."""
    own = ["prompt", "echo", "suffix", "best_of"] if endpoint is COMPLETIONS else ["messages", "max_completion_tokens"]
    for _ in range(count):
        body = good(endpoint, rng)
        for _ in range(rng.choice([0, 1, 1, 2])):
            body[rng.choice(SHARED + own)] = rng.choice(VALUES)
        text = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
        if rng.random() < 0.2:  # damaged bytes
            at = rng.randrange(len(text))
            damage = rng.choice([b"", b"\x00", b"\xff", b"\\ud800", b"\n", b'"', b"1", b".", b"e5", b",", b"\\u0041"])
            text = text[:at] + damage + text[at + rng.choice([0, 1]) :]
        yield text


def general(endpoint, text):
    body = parse(endpoint.model, text, max_values=MAX_VALUES)
    return endpoint.request(body, ORIGIN, SETTINGS), endpoint.style(body)


def outcome(made):
    """What `made` returns, or the words of its error."""
    try:
        return made()
    except LockstepError as error:
        return error.openai_body()


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT], ids=["completions", "chat"])
@pytest.mark.parametrize("seed", range(4))
def test_same_request_or_same_error(endpoint, seed):
    taken = 0
    for text in bodies(endpoint, random.Random(seed), 4000):
        plain = decode(endpoint.decoder, text, MAX_VALUES)
        if plain is None:
            continue
        taken += 1
        quick = outcome(lambda plain=plain: (endpoint.request(plain, ORIGIN, SETTINGS), endpoint.style(plain)))
        assert quick == outcome(lambda text=text: general(endpoint, text)), f"seed {seed}: {text!r}"
    assert taken > 100, f"seed {seed}"


def test_usual_bodies_are_plain():
    for endpoint, own in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        text = json.dumps({"model": "m", "stream": True, "stream_options": {"include_usage": True}} | own).encode()
        assert decode(endpoint.decoder, text, MAX_VALUES) is not None


def test_large_bodies_go_the_general_way():
    text = json.dumps({"model": "m", "prompt": "x" * MAX_BYTES}).encode()
    assert decode(COMPLETIONS.decoder, text, MAX_VALUES) is None
    assert decode(COMPLETIONS.decoder, b'{"model":"m","prompt":"x"}', 10) is None


def test_role_is_the_whole_text():
    """A role with a line break behind it is refused, which the general way does."""
    text = json.dumps({"model": "m", "messages": [{"role": "user\n", "content": "a"}]}).encode()
    assert decode(CHAT.decoder, text, MAX_VALUES) is None
    assert outcome(lambda: general(CHAT, text))["error"]["param"] == "messages[0].role"
