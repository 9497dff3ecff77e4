import json

import pytest
from fake_openai import FakeOpenAI, events, script

LOAD = ("--clients", "2", "--requests", "4", "--max-tokens", "4")


def test_the_report_is_a_table_or_json(server: FakeOpenAI, lockstep) -> None:
    table = lockstep("bench", "--url", server.url, *LOAD)
    assert (table.returncode, table.stderr) == (0, "")
    for words in (
        "time to first token",
        "between tokens",
        "longest silence",
        "p99",
        "16 tokens",
        "tokens/s",
        "0 failed",
    ):
        assert words in table.stdout
    assert "\x1b" not in table.stdout
    report = json.loads(lockstep("bench", "--url", server.url, *LOAD, "--json").stdout)
    assert (report["streams"], report["tokens"], report["failed"], report["violations"]) == (4, 16, 0, [])
    assert report["longest_silence_ms"]["max"] >= report["inter_token_ms"]["p50"]


def test_requests_are_what_the_options_say(server: FakeOpenAI, lockstep) -> None:
    result = lockstep(
        "bench", "--url", server.url, *LOAD, "--model", "other", "--prompt-tokens", "7", "--temperature", "0"
    )
    assert result.returncode == 0
    body = server.received[0].body
    assert (body["model"], len(body["prompt"].split()), body["max_tokens"], body["temperature"]) == ("other", 7, 4, 0)
    assert len({request.body["seed"] for request in server.received}) == 4


def test_a_lost_token_is_exit_code_1(server: FakeOpenAI, lockstep) -> None:
    def answer(number, request):
        sent = events(["a", "b", "c", "d"])
        return script(sent[:2] + sent[1:] if number == 3 else sent)

    server.answer = answer
    result = lockstep("bench", "--url", server.url, *LOAD)
    assert result.returncode == 1
    assert "1 wrong" in result.stdout
    assert "position 2 came after 2" in result.stdout


def test_no_server_is_exit_code_2(lockstep) -> None:
    result = lockstep("bench", "--url", "http://127.0.0.1:1/v1")
    assert result.returncode == 2
    assert "no server answers at http://127.0.0.1:1/v1" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("bench",), ("check", "--timeout", "1"), ("chat",)])
@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://[::1", "gopher://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, lockstep, command: tuple[str, ...], proxy: str
) -> None:
    for name in ("no_proxy", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("all_proxy", proxy)
    result = lockstep(*command, "--url", "http://router.invalid/v1")
    assert result.returncode == 2
    assert "prox" in result.stderr.lower()
    assert result.stderr.startswith("lockstep: ")
    assert result.stderr.count("\n") == 1
