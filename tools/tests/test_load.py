import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from fake_openai import Event, FakeOpenAI, Received, Refusal, events, script
from lockstep_tools.load import logbook
from lockstep_tools.load.comparison import compare
from lockstep_tools.load.endpoint import Endpoint
from lockstep_tools.load.generator import drive
from lockstep_tools.load.history import violations
from lockstep_tools.load.mix import mixed_requests

STATUS = {
    "router": {"id": "r1"},
    "workers": [{"id": "w0", "target": "w0:9000", "state": "ready", "incarnation": 7, "epoch": 2}],
}


def answer(number: int, request: Received) -> list[bytes | float]:
    """As many tokens as asked for, of each choice; the text is a function of the request alone."""
    return script(answer_events(request), 0.002)


def answer_events(request: Received) -> list[Event]:
    chat = "messages" in request.body
    choices = request.body.get("n", 1)
    tokens = min(request.body["max_tokens"], 12)
    sent = []
    for choice in range(choices):
        for event in events([f" {choice}{n}" for n in range(tokens)], chat=chat, logprobs=True)[:-2]:
            event.data["choices"][0]["index"] = choice
            sent.append(event)
    usage = {"prompt_tokens": 5, "completion_tokens": tokens * choices}
    return [*sent, Event({"choices": [], "usage": usage}), Event("[DONE]")]


@pytest.fixture
def served(server: FakeOpenAI) -> FakeOpenAI:
    server.answer = answer
    server.headers = {"X-Lockstep-Router": "r1"}
    server.status = STATUS
    return server


def lines(text: str, kind: str) -> list[dict]:
    return [entry for entry in map(json.loads, text.splitlines()) if entry["kind"] == kind]


def test_the_lines_of_a_load_hold_all_that_the_comparison_needs_and_no_words(served: FakeOpenAI, lockstep) -> None:
    flags = ("--url", served.url, "--management-url", served.root, "--clients", "3", "--seconds", "0.5")
    result = lockstep("load", *flags)
    assert (result.returncode, result.stderr) == (0, "")
    undisturbed = [logbook.from_entry(entry) for entry in lines(result.stdout, logbook.UNDISTURBED)]
    streams = [logbook.from_entry(entry) for entry in lines(result.stdout, logbook.STREAM)]
    assert [history.number for history in undisturbed] == list(range(len(mixed_requests("m"))))
    assert {history.client for history in streams} == {0, 1, 2}
    assert {history.router for history in streams} == {"r1"}
    assert compare(streams, undisturbed).holds
    assert (undisturbed[4].choices, undisturbed[4].tokens) == ([0, 1], 24)
    (status,) = lines(result.stdout, logbook.STATUS)
    assert status["workers"] == {"w0": ["ready", 7, 2]}
    (summary,) = lines(result.stdout, logbook.SUMMARY)
    assert (summary["holds"], summary["comparison"]["streams"]) == (True, len(streams))
    for words in (" 01", "dark night", "Call me"):
        assert words not in result.stdout


def test_a_changed_text_fails_the_load(served: FakeOpenAI, lockstep) -> None:
    def damaged(number: int, request: Received) -> list[bytes | float]:
        sent = answer_events(request)
        if number == 15:  # the first after the undisturbed ones
            choice = sent[3].data["choices"][0]
            choice["text" if "text" in choice else "delta"] = "!" if "text" in choice else {"content": "!"}
        return script(sent, 0.002)

    served.answer = damaged
    result = lockstep("load", "--url", served.url, "--clients", "3", "--seconds", "0.5")
    assert result.returncode == 1
    (summary,) = lines(result.stdout, logbook.SUMMARY)
    (problem,) = summary["comparison"]["problems"]
    assert "from token 4 on the text is not that of the undisturbed stream" in problem


def test_a_load_ends_well_at_a_signal(served: FakeOpenAI) -> None:
    load = subprocess.Popen(
        [sys.executable, "-m", "lockstep_tools.cli", "load", "--url", served.url, "--until-signal"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ,
    )
    assert load.stdout is not None
    seen = []
    for line in load.stdout:
        seen.append(line)
        if json.loads(line)["kind"] == logbook.STREAM:
            load.send_signal(signal.SIGTERM)
            break
    seen += load.stdout.readlines()
    assert load.wait(10) == 0
    assert json.loads(seen[-1])["kind"] == logbook.SUMMARY
    assert not any(entry["cancelled"] for entry in lines("".join(seen), logbook.STREAM))


def test_a_load_of_no_time_has_at_most_one_stream_of_each_client(served: FakeOpenAI, lockstep) -> None:
    result = lockstep("load", "--url", served.url, "--seconds", "0", "--clients", "2")
    (summary,) = lines(result.stdout, logbook.SUMMARY)
    assert (result.returncode, summary["comparison"]["streams"] <= 2) == (0, True)


def test_a_load_that_waits_for_a_server_ends_at_a_signal(lockstep) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        load = subprocess.Popen(
            [sys.executable, "-m", "lockstep_tools.cli", "load", "--wait", "3600", "--url", url],
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ,
        )
        silent.accept()  # it asks for the models now
        load.send_signal(signal.SIGINT)
        assert load.communicate(timeout=15)[1] == "lockstep: stopped before the load began\n"
        assert load.returncode == 1


@pytest.mark.parametrize("model", [(), ("--model", "m")])
def test_a_load_without_a_server_is_exit_code_2(lockstep, model: tuple[str, ...]) -> None:
    result = lockstep("load", "--url", "http://127.0.0.1:1/v1", "--wait", "0", *model)
    assert result.returncode == 2
    assert "no server answers" in result.stderr


def test_a_model_that_is_given_need_not_be_listed(served: FakeOpenAI, lockstep) -> None:
    served.models = ()
    flags = ("--url", served.url, "--seconds", "0", "--clients", "1", "--wait", "0")
    assert lockstep("load", *flags, "--model", "m").returncode == 0
    assert lockstep("load", *flags).returncode == 2


def test_an_address_of_the_status_that_is_none_is_refused_by_its_name(served: FakeOpenAI, lockstep) -> None:
    result = lockstep("load", "--url", served.url, "--management-url", "foo")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("lockstep: --management-url foo: not a URL")


def test_a_load_whose_reader_goes_away_ends(served: FakeOpenAI) -> None:
    load = subprocess.Popen(
        [sys.executable, "-m", "lockstep_tools.cli", "load", "--url", served.url, "--until-signal"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ,
    )
    assert load.stdout is not None
    assert load.stderr is not None
    for line in load.stdout:
        if json.loads(line)["kind"] == logbook.STREAM:
            break
    load.stdout.close()
    try:
        assert load.wait(20) == 1
    finally:
        load.kill()
    assert load.stderr.read() == ""


def test_a_server_that_fails_undisturbed_is_refused(served: FakeOpenAI, lockstep) -> None:
    served.answer = lambda number, request: Refusal(500, "?")
    result = lockstep("load", "--url", served.url)
    assert result.returncode == 1
    assert "request 0 is wrong with nothing disturbed" in result.stderr


async def test_a_line_gives_the_history_back(served: FakeOpenAI) -> None:
    (history,) = await drive(Endpoint(served.url), mixed_requests("m")[4:5], clients=1)
    entry = json.loads(logbook.to_line(logbook.STREAM, history, 1000.0))
    again = logbook.from_entry(entry)
    assert violations(again, require_ids=True) == violations(history, require_ids=True) == []
    assert [again.marks(choice) for choice in again.choices] == [history.marks(choice) for choice in history.choices]
    assert (again.tokens, again.usage) == (history.tokens, history.usage)
    assert again.started_s == pytest.approx(history.started_s + 1000, abs=1e-3)
    assert again.gaps_s == pytest.approx(history.gaps_s, abs=1e-3)


async def test_refused_and_unreachable_requests_are_distinguished(served: FakeOpenAI) -> None:
    served.answer = lambda number, request: Refusal(503, {"error": {"message": "busy"}})
    served.headers = {"X-Lockstep-Router": "r1", "Retry-After": "2"}
    (refused,) = await drive(Endpoint(served.url), mixed_requests("m")[:1], clients=1)
    assert (refused.status, refused.retry_after, refused.router) == (503, "2", "r1")
    nobody = Endpoint("http://127.0.0.1:1/v1", connect_timeout_s=1, connect_retries=2)
    (unreachable,) = await drive(nobody, mixed_requests("m")[:1], clients=1)
    assert (unreachable.status, unreachable.connect_failures) == (None, 3)
    assert "no server answers" in (unreachable.error or "")


async def test_a_silent_stream_fails_at_the_limit(served: FakeOpenAI) -> None:
    served.answer = lambda number, request: script(answer_events(request), 1.0)
    (history,) = await drive(Endpoint(served.url, silence_limit_s=0.2), mixed_requests("m")[:1], clients=1)
    assert "said nothing for 0.2 s" in (history.error or "")
