"""`lockstep_client` on `lockstep serve`: the router is killed under its streams, and started again on its port."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lockstep_client import Finish, LockstepClient, Policy, StreamLost, TextPiece, Usage
from lockstep_client.openai import OpenAI
from machine import title
from serving import Serve
from slow_steps import SLOW_TOKENS, SlowSteps
from system import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("private_tmp")]

TOKENS = SLOW_TOKENS
FIELDS = {"model": MODEL, "prompt": "It was a dark night, and", "max_tokens": TOKENS, "seed": 5, "ignore_eos": True}
POLICY = Policy(retries=30, timeout_s=120.0)


@pytest.fixture(scope="module")
def serve(private_tmp: Path, slow_steps: SlowSteps, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with Serve(tmp_path_factory.mktemp("serve")) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def undisturbed(serve: Serve) -> str:
    with LockstepClient(serve.system.api, policy=POLICY) as client:
        return client.complete(**FIELDS).text


def router_of(serve: Serve) -> psutil.Process:
    """Found before a stream begins: on a busy machine the search takes as long as a short stream."""
    (router,) = [process for process in serve.children() if title(process) == "lockstep: router"]
    return router


def test_stream_survives_its_router(serve: Serve, slow_steps: SlowSteps, undisturbed: str) -> None:
    router = router_of(serve)
    text, others, killed = "", [], False
    with slow_steps.during(), LockstepClient(serve.system.api, policy=POLICY) as client:
        for event in client.complete(**FIELDS, stream=True):
            if isinstance(event, TextPiece):
                text += event.text
                if not killed and len(text) > 20:
                    killed = True
                    router.kill()
                    slow_steps.end()
            else:
                others.append(event)
    assert killed
    assert text == undisturbed
    assert [type(each) for each in others] == [Finish, Usage]
    assert others[1].completion_tokens == TOKENS


@pytest.mark.slow
def test_stream_that_may_not_be_repeated_is_a_typed_error(
    serve: Serve, slow_steps: SlowSteps, undisturbed: str
) -> None:
    serve.system.until_ready()
    router = router_of(serve)
    text = ""
    with slow_steps.during(), LockstepClient(serve.system.api, policy=POLICY) as client:
        stream = client.complete(**FIELDS, stream=True, on_lost="error")
        events = iter(stream)
        while len(text) <= 20:
            event = next(events)
            text += event.text if isinstance(event, TextPiece) else ""
        router.kill()
        with pytest.raises(StreamLost) as lost:
            list(events)
    received = lost.value.received.texts[0]
    assert received.startswith(text)
    assert undisturbed.startswith(received)


@pytest.mark.slow
def test_official_client_survives(serve: Serve, slow_steps: SlowSteps, undisturbed: str) -> None:
    serve.system.until_ready()
    client = OpenAI(base_url=serve.system.api, api_key="none", policy=POLICY)
    router = router_of(serve)
    fields = {name: value for name, value in FIELDS.items() if name != "ignore_eos"}
    text, killed = "", False
    with slow_steps.during():
        for chunk in client.completions.create(**fields, stream=True, extra_body={"ignore_eos": True}):
            text += chunk.choices[0].text
            if not killed and len(text) > 20:
                killed = True
                router.kill()
                slow_steps.end()
    assert killed
    assert text == undisturbed
