"""Whatever the OpenAPI document allows or forbids, no request is answered with an error of the router's own.

`--fuzz-cases 100000` for a long run by hand.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import requests
from hypothesis import strategies
from target import Target

if TYPE_CHECKING:
    import schemathesis  # takes a second, and each process of pytest-xdist imports this file

_TIMEOUT_S = 30.0
_MAX_TOKENS = 4
_MIN_ANSWERED = 0.05
"""The share of cases that must be answered, so that errors do not hide what is behind the checks."""
_TEXT = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
}
"""The field with a request's text."""
_SHARES = 2
"""Tests that have a part of the cases each, so that two processes have work."""
_DRAWN_FIELDS = 2
"""A request with many drawn fields is nearly always refused, for one of them."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Target(token_every_s=0.0, max_tokens=_MAX_TOKENS) as target:
        host, port = target.address
        yield f"http://{host}:{port}"
        assert target.is_alive


def described(address: str) -> schemathesis.BaseSchema:
    """The document as the router serves it, but for the model's name: any other is refused before anything is done."""
    import schemathesis  # noqa: PLC0415

    document = requests.get(f"{address}/openapi.json", timeout=_TIMEOUT_S).json()
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": "reference"}
    return schemathesis.openapi.from_dict(document)


def with_few_drawn_fields(case: schemathesis.Case, places: list[int]) -> schemathesis.Case:
    """The case with a plain text and some of its other fields only."""
    text = _TEXT.get(case.path)
    if text is not None and isinstance(case.body, dict):
        drawn = sorted(case.body.keys() - {"model", text})
        kept = {drawn[place % len(drawn)] for place in places} if drawn else set()
        plain = [{"role": "user", "content": "a word"}] if text == "messages" else "a word"
        case.body = {"model": "reference", text: plain} | {name: case.body[name] for name in sorted(kept)}
    return case


@pytest.mark.slow
@pytest.mark.parametrize("share", range(_SHARES))
def test_no_request_causes_an_error_of_the_router(address, share, pytestconfig, summarize) -> None:
    from schemathesis import GenerationMode  # noqa: PLC0415

    seed = pytestconfig.getoption("--fuzz-seed")
    seed = secrets.randbelow(2**32) if seed is None else seed
    print(f"seed {seed}")
    seed += share
    operations = [found.ok() for found in described(address).get_all_operations()]
    taking = [operation for operation in operations if operation.body]
    assert len(taking) == 6
    cases = pytestconfig.getoption("--fuzz-cases") // len(taking) // _SHARES
    statuses: Counter[int] = Counter()
    session = requests.Session()

    def check(case: schemathesis.Case) -> None:
        response = case.call(base_url=address, session=session, timeout=_TIMEOUT_S)
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{case.as_curl_command()} {response.text}"
        assert "server_error" not in response.text  # in a stream

    for operation in operations:
        strategy = operation.as_strategy(GenerationMode.POSITIVE)
        if operation.body:
            places = strategies.lists(strategies.integers(0, 1000), max_size=_DRAWN_FIELDS)
            strategy |= strategies.builds(with_few_drawn_fields, strategy, places)
            strategy |= operation.as_strategy(GenerationMode.NEGATIVE)
        run = hypothesis.given(strategy)(check)
        run = hypothesis.settings(
            max_examples=cases if operation.body else 20,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )(run)
        hypothesis.seed(seed)(run)()
    total = sum(statuses.values())
    summarize(
        f"schema: {total} requests, share {share}, seed {seed - share}, by status: {dict(sorted(statuses.items()))}"
    )
    assert total > cases * len(taking) / 2
    assert statuses[200] > _MIN_ANSWERED * total
