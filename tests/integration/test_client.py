"""`lockstep_client` on `lockstep serve`: the router is killed under its streams, and started again on its port."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lockstep_client import Finish, LockstepClient, Policy, StreamLost, TextPiece, Usage
from lockstep_client.openai import OpenAI
from machine import title
from serving import Serve
from system import MODEL

pytestmark = pytest.mark.usefixtures("private_tmp")

TOKENS = 400
FIELDS = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": TOKENS, "seed": 5, "ignore_eos": True}
POLICY = Policy(retries=30, timeout_s=120.0)


@pytest.fixture(scope="module")
def serve(private_tmp: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve")) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def undisturbed(serve: Serve) -> str:
    with LockstepClient(serve.system.api, policy=POLICY) as client:
        return client.complete(**FIELDS).text


def kill_router(serve: Serve) -> None:
    (router,) = [process for process in serve.children() if title(process) == "lockstep: router"]
    router.kill()


def test_stream_survives_its_router(serve: Serve, undisturbed: str) -> None:
    text, others, killed = "", [], False
    with LockstepClient(serve.system.api, policy=POLICY) as client:
        for event in client.complete(**FIELDS, stream=True):
            if isinstance(event, TextPiece):
                text += event.text
                if not killed and len(text) > 20:
                    killed = True
                    kill_router(serve)
            else:
                others.append(event)
    assert killed
    assert text == undisturbed
    assert [type(each) for each in others] == [Finish, Usage]
    assert others[1].completion_tokens == TOKENS


@pytest.mark.slow
def test_stream_that_may_not_be_repeated_is_a_typed_error(serve: Serve, undisturbed: str) -> None:
    serve.system.until_ready()
    text = ""
    with LockstepClient(serve.system.api, policy=POLICY) as client:
        stream = client.complete(**FIELDS, stream=True, on_lost="error")
        events = iter(stream)
        while len(text) <= 20:
            event = next(events)
            text += event.text if isinstance(event, TextPiece) else ""
        kill_router(serve)
        with pytest.raises(StreamLost) as lost:
            list(events)
    assert lost.value.received.texts[0].startswith(text)
    assert undisturbed.startswith(lost.value.received.texts[0])


@pytest.mark.slow
def test_official_client_survives(serve: Serve, undisturbed: str) -> None:
    serve.system.until_ready()
    client = OpenAI(base_url=serve.system.api, api_key="none", policy=POLICY)
    fields = {name: value for name, value in FIELDS.items() if name != "ignore_eos"}
    text, killed = "", False
    for chunk in client.completions.create(**fields, stream=True, extra_body={"ignore_eos": True}):
        text += chunk.choices[0].text
        if not killed and len(text) > 20:
            killed = True
            kill_router(serve)
    assert killed
    assert text == undisturbed
