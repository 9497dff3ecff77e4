"""/v1/embeddings with the official client, on workers that serve the reference model as an embedding model."""

import json
import math
import os
import signal
import threading
from collections.abc import Iterator

import openai
import pytest
from lockstep_tools.serving.stack import Stack, StackSettings
from machine import standing_still
from system import REFERENCE, System

TEXTS = [f"Once upon a time there were {count} {what}." for count in range(12) for what in ("frogs", "trees")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("models") / "reference"
    path.mkdir()
    for file in REFERENCE.iterdir():
        (path / file.name).symlink_to(file)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with pytest.MonkeyPatch.context() as patch:
        # A test stops ranks, and a machine may pause it meanwhile: no rank must count as one that hangs.
        patch.setenv("LOCKSTEP_DECODE_DEADLINE_S", "600")
        patch.setenv("LOCKSTEP_PREFILL_DEADLINE_S", "600")
        with Stack(StackSettings(str(path), workers=2, threads=1, device="cpu")) as running:
            running.wait_ready(60)
            yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    api = System(stack.url, stack.management_url).api
    with openai.OpenAI(base_url=api, api_key="anybody", max_retries=0, timeout=60) as client:
        yield client


def vectors(client: openai.OpenAI, texts: list[str] | str) -> list[list[float]]:
    return [entry.embedding for entry in client.embeddings.create(model="reference", input=texts, user="u").data]


def test_vectors_have_length_1_and_close_texts_are_closer(client: openai.OpenAI) -> None:
    given = ["The little dog ran to the park.", "A small dog ran to a park.", "She mixed flour and sugar for the cake."]
    close, closer, far = vectors(client, given)
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-6) for vector in (close, closer, far))

    def likeness(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert likeness(close, closer) > likeness(close, far)


@pytest.mark.slow
def test_bits_do_not_depend_on_what_else_is_computed(client: openai.OpenAI) -> None:
    alone = [vectors(client, text)[0] for text in TEXTS[:4]]
    generating = threading.Thread(
        target=lambda: client.completions.create(model="reference", prompt=TEXTS[0], max_tokens=80, n=4, user="u")
    )
    generating.start()
    together = vectors(client, TEXTS)
    generating.join()
    assert together[:4] == alone


@pytest.mark.slow
def test_texts_of_a_worker_that_dies_are_computed_by_the_other_one(client: openai.OpenAI, stack: Stack) -> None:
    texts = TEXTS * 20
    expected = vectors(client, TEXTS) * 20
    answers: list[list[list[float]]] = []
    asking = threading.Thread(target=lambda: answers.append(vectors(client, texts)))
    system = System(stack.url, stack.management_url)
    # The ranks stand until the worker is killed, so that the texts are not computed before.
    with standing_still([rank["pid"] for worker in system.until_ready().values() for rank in worker["ranks"]]):
        asking.start()
        # All texts of a session go to one worker.
        pid = stack.worker_pids[system.serving()["id"]]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    asking.join(60)
    stack.wait_ready(60)
    assert answers == [expected]


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="reference", input="a", dimensions=3)
    assert refused.value.param == "dimensions"
