"""Commands for a served system need neither engine nor services: the image with these commands has no torch."""

import os
import subprocess
import sys

import pytest
from fake_openai import FakeOpenAI, Received, Refusal, Script, events, script

ABSENT = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "lockstep_engine", "lockstep_router")
ABSENT += ("lockstep_worker", "lockstep_api", "fastapi", "uvicorn", "pydantic", "kubernetes", "prometheus_client")

BLOCKER = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from lockstep_tools.cli import main
sys.exit(main(sys.argv[1:]))
"""


def slim(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command where none of these is installed."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ,
    )


def answer(number: int, request: Received) -> Script | Refusal:
    if not request.body.get("stream"):
        return Refusal(200, {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}})
    chat = "messages" in request.body
    sent = events(["a", "b"], chat=chat, logprobs=True)
    if request.body.get("n") == 2:
        other = events(["a", "b"], chat=chat, logprobs=True)[:2]
        for event in other:
            event.data["choices"][0]["index"] = 1
        sent[2].data["usage"]["completion_tokens"] = 4
        sent[2:2] = other
    return script(sent)


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--timeout", "5"),
        ("load", "--seconds", "0.1", "--clients", "1"),
        ("bench", "--requests", "2"),
        ("chat",),
        ("status",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_for_a_served_system(server: FakeOpenAI, arguments: tuple[str, ...]) -> None:
    server.answer = answer
    server.status = {"router": {"id": "r1"}, "workers": [{"id": "w0", "state": "ready"}]}
    result = slim(*arguments, "--url", server.url, stdin="hello\n")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_experiments_can_be_listed() -> None:
    result = slim("chaos", "--list")
    assert (result.returncode, result.stderr) == (0, "")
    assert "rank-kill" in result.stdout


@pytest.mark.parametrize("command", ["serve", "generate", "demo"])
def test_commands_that_need_the_engine_say_so(command: str, model: str) -> None:
    result = slim(command, model, *(["x"] if command == "generate" else []))
    assert result.returncode == 2
    assert "is not installed here; it comes with lockstep-tools[engine]" in result.stderr
    assert result.stderr.count("\n") == 1
