import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from fake_openai import Event, FakeOpenAI, Received, Refusal, events, script
from lockstep_tools.commands import chat
from rich.console import Console

MESSAGES = "first\n/reset\nsecond\n\nthird\n/quit\nnever\n"


def answers(number: int, request: Received) -> list[bytes | float]:
    return script(events([f"answer {number}", ", done"], chat=True, finish="stop"))


def test_lines_become_a_conversation(server: FakeOpenAI, lockstep) -> None:
    server.answer = answers
    result = lockstep("chat", "--url", server.url, "--system", "be brief", "--temperature", "0", stdin=MESSAGES)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "answer 1, done\nanswer 2, done\nanswer 3, done\n"
    system = {"role": "system", "content": "be brief"}
    bodies = [request.body for request in server.received]
    assert [body["messages"] for body in bodies] == [
        [system, {"role": "user", "content": "first"}],
        [system, {"role": "user", "content": "second"}],
        [
            system,
            {"role": "user", "content": "second"},
            {"role": "assistant", "content": "answer 2, done"},
            {"role": "user", "content": "third"},
        ],
    ]
    assert all((body["model"], body["temperature"], body["max_tokens"]) == ("fake", 0, 512) for body in bodies)
    sessions = [request.headers["x-session-id"] for request in server.received]
    assert sessions[0] != sessions[1] == sessions[2]


def test_a_failed_answer_is_reported_and_not_kept(server: FakeOpenAI, lockstep) -> None:
    refusal = Refusal(400, {"error": {"message": "the conversation is too long"}})
    server.answer = lambda number, request: refusal if number == 1 else answers(number, request)
    result = lockstep("chat", "--url", server.url, stdin="one\ntwo\n")
    assert result.returncode == 1
    assert "the conversation is too long" in result.stderr
    assert server.received[1].body["messages"] == [{"role": "user", "content": "two"}]


def test_a_refusal_that_passes_is_not_seen(server: FakeOpenAI, lockstep) -> None:
    refusal = Refusal(503, {"error": {"message": "no worker is ready"}})
    server.answer = lambda number, request: refusal if number == 1 else answers(number, request)
    result = lockstep("chat", "--url", server.url, stdin="one\n")
    assert (result.returncode, result.stdout, result.stderr) == (0, "answer 2, done\n", "")
    assert server.received[0].body == server.received[1].body


def test_what_came_before_a_failure_stays_in_the_conversation(server: FakeOpenAI, lockstep) -> None:
    broken = script([*events(["half"], chat=True)[:1], Event({"error": {"message": "lost"}})])
    server.answer = lambda number, request: broken if number == 1 else answers(number, request)
    lockstep("chat", "--url", server.url, stdin="one\ntwo\n")
    assert server.received[1].body["messages"][1] == {"role": "assistant", "content": "half"}


def test_no_server_is_one_sentence(lockstep) -> None:
    result = lockstep("chat", "--url", "http://127.0.0.1:1/v1", stdin="hello\n")
    assert result.returncode == 2
    assert "no server answers at http://127.0.0.1:1/v1" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_api_key_comes_from_the_environment(server: FakeOpenAI, lockstep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    lockstep("chat", "--url", server.url, "--api-key-env", "MY_KEY", stdin="hello\n")
    assert server.received[0].headers["authorization"] == "Bearer secret"


HOSTILE = "a\x1b]0;owned\x07b\tc\nd"


def test_an_answer_is_unchanged_where_no_terminal_reads_it(server: FakeOpenAI, lockstep) -> None:
    thought = Event({"choices": [{"index": 0, "delta": {"reasoning_content": "let me think"}}]})
    server.answer = lambda number, request: script([thought, *events([HOSTILE], chat=True, finish="stop")])
    assert lockstep("chat", "--url", server.url, stdin="hello\n").stdout == f"{HOSTILE}\n"


def test_an_error_of_the_server_is_shown_with_control_characters_escaped(server: FakeOpenAI, lockstep) -> None:
    server.answer = lambda number, request: Refusal(400, {"error": {"message": "no \x1b[2J"}})
    assert lockstep("chat", "--url", server.url, stdin="hello\n").stderr == "no \\x1b[2J\n"


def test_input_that_is_no_utf_8_is_replaced(server: FakeOpenAI) -> None:
    server.answer = answers
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "lockstep_tools.cli", "chat", "--url", server.url]
    done = subprocess.run(
        command, input=b"a \xff\n", capture_output=True, env=os.environ | environment, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert server.received[0].body["messages"] == [{"role": "user", "content": "a \ufffd"}]


def test_half_a_character_of_the_server_does_not_end_the_conversation(server: FakeOpenAI, lockstep) -> None:
    half = Event(r'{"choices": [{"index": 0, "delta": {"content": "a\ud83d"}, "finish_reason": null}]}')
    server.answer = lambda number, request: script([half, *events(["b"], chat=True, finish="stop")])
    result = lockstep("chat", "--url", server.url, stdin="one\ntwo\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "a\\ud83db\n" * 2
    assert server.received[1].body["messages"][1] == {"role": "assistant", "content": "a?b"}


@pytest.mark.parametrize("key", ["lsk-secret\n", "  lsk-secret \r\n"])
@pytest.mark.parametrize("command", [("chat",), ("bench", "--requests", "1")])
def test_white_space_around_the_api_key_is_dropped(
    server: FakeOpenAI, lockstep, monkeypatch: pytest.MonkeyPatch, key: str, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    result = lockstep(*command, "--url", server.url, "--api-key-env", "MY_KEY", stdin="hello\n")
    assert (result.returncode, server.received[0].headers["authorization"]) == (0, "Bearer lsk-secret")


@pytest.mark.parametrize("key", ["lsk-secret\nmore", "lsk-sécret", "lsk-\udcff-secret"])
@pytest.mark.parametrize("command", ["chat", "bench", "check", "load"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    server: FakeOpenAI, lockstep, monkeypatch: pytest.MonkeyPatch, key: str, command: str
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    result = lockstep(command, "--url", server.url, "--api-key-env", "MY_KEY")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "lockstep: --api-key-env MY_KEY: the key must be printable ASCII characters\n"


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lockstep_tools.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm"},
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def see(self, text: str, within_s: float = 10) -> None:
        """Wait until `text` has been shown after all that was waited for before."""
        deadline = time.monotonic() + within_s
        while text not in self.shown:
            assert select.select([self._ours], [], [], max(0, deadline - time.monotonic()))[0], self.shown
            self.shown += os.read(self._ours, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def await_prompt(self) -> None:
        """Wait until it is shown and a moment longer: only then readline handles signals and control keys."""
        self.see("> ")
        time.sleep(0.3)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(server: FakeOpenAI) -> Iterator[Terminal]:
    server.answer = lambda number, request: script(events(["word "] * 100, chat=True), 0.1 if number == 1 else 0.0)
    made = Terminal("chat", "--url", server.url)
    yield made
    made.close()


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(server: FakeOpenAI, terminal: Terminal) -> None:
    terminal.see("Ctrl-D ends")
    terminal.await_prompt()
    terminal.type("hello\n")
    terminal.see("word word")
    terminal.process.send_signal(signal.SIGINT)
    terminal.see("stopped")
    terminal.await_prompt()
    terminal.type("again\n")
    terminal.see("100 tokens")
    terminal.see("cut at --max-tokens")
    history = server.received[1].body["messages"]
    assert [message["role"] for message in history] == ["user", "assistant", "user"]
    assert history[1]["content"].startswith("word word")
    terminal.await_prompt()
    terminal.process.send_signal(signal.SIGINT)
    terminal.see("/quit ends")
    terminal.await_prompt()
    terminal.type("\x04")
    assert terminal.process.wait(5) == 0


def test_a_terminal_shows_reasoning_dimmed_and_control_characters_escaped(server: FakeOpenAI) -> None:
    deltas = ["let me ", "think\x1b[2J"]
    thoughts = [Event({"choices": [{"index": 0, "delta": {"reasoning_content": text}}]}) for text in deltas]
    server.answer = lambda number, request: script([*thoughts, *events([HOSTILE, "e"], chat=True, finish="stop")])
    terminal = Terminal("chat", "--url", server.url)
    try:
        terminal.await_prompt()
        terminal.type("hello\n")
        terminal.see("\x1b[2mlet me \x1b[0m\x1b[2mthink\\x1b[2J\x1b[0m\r\n\r\na\\x1b]0;owned\\x07b\tc\r\nde\r\n")
    finally:
        terminal.close()


def test_the_prompt_has_a_colour_unless_none_is_wanted() -> None:
    assert "\x1b[1;36m" in chat._prompt(Console(force_terminal=True, color_system="standard", no_color=False))
    assert chat._prompt(Console(force_terminal=True, color_system="standard", no_color=True)) == "> "
