import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_openai import FakeOpenAI
from lockstep_tools.cli import COMMANDS


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; began = time.process_time()\n"  # the machine may be busy
        "from lockstep_tools.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'httpx', 'rich', 'pydantic', 'lockstep_engine'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() - began < 0.3\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    for name, summary in COMMANDS.items():
        assert f"{name} " in result.stdout
        assert summary in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples_and_loads_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom lockstep_tools.cli import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert result.stdout.startswith(f"usage: lockstep {command} ")
    assert f"\nexamples:\n  lockstep {command}" in result.stdout


def test_version(lockstep) -> None:
    assert lockstep("--version").stdout == "lockstep 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "COMMAND"),
        (("fly",), "fly"),
        (("serve", "--workers", "0"), "--workers: must be between 1 and 64 (given: 0)"),
        (("serve", "--port", "70000"), "--port"),
        (("bench", "--clients", "many"), "--clients: not a whole number: 'many'"),
        (("chat", "--temperature", "hot"), "--temperature: not a number: 'hot'"),
        (("chat", "--temperature", "3"), "--temperature: must be between 0 and 2 (given: 3)"),
        (("chat", "--url", "nonsense"), "--url nonsense: not a URL"),
        (("chat", "--url", "http://a..b/v1"), "--url http://a..b/v1: must have a host that is a name or an address"),
        (("status", "--url", "http://a..b:8001"), "must have a host that is a name or an address"),
        (("status", "--url", "http://xn--:8001"), "--url http://xn--:8001: "),
        (("check", "--workers", "http://a..b:9001"), "--workers http://a..b:9001: not a URL"),
        (("generate", "."), "PROMPT"),
    ],
)
def test_usage_errors_are_exit_code_2_and_name_the_mistake(lockstep, arguments: tuple[str, ...], words: str) -> None:
    result = lockstep(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_the_terminal_lacks_are_shown_escaped(
    lockstep, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    listing = lockstep("chaos", "--list")
    assert (listing.returncode, listing.stderr) == (0, "")
    assert "\\u2264 " in listing.stdout
    assert "lockstep: \\u2264.gguf does not exist" in lockstep("convert", "\u2264.gguf", "b").stderr


@pytest.mark.parametrize(
    "arguments", [("generate", ".", "\udcff"), ("chat", "--system", "\udcff"), ("bench", "--model", "\udcff")]
)
def test_arguments_that_are_no_text_are_refused(lockstep, arguments: tuple[str, ...]) -> None:
    result = lockstep(*arguments)
    assert result.returncode == 2
    assert "not text in this terminal's encoding: '\\udcff'" in result.stderr
    assert "Traceback" not in result.stderr


def refused(lockstep, *arguments: str) -> str:
    """The one sentence with which a command ends, before it says that it starts anything."""
    result = lockstep(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1, result.stderr
    return str(result.stderr)


def test_a_bad_model_is_refused_before_anything_starts(lockstep, tmp_path: Path, model: str) -> None:
    missing, empty, cut = tmp_path / "missing", tmp_path / "empty", tmp_path / "cut"
    assert "no such directory" in refused(lockstep, "serve", str(missing))
    assert "no such directory" in refused(lockstep, "generate", str(missing), "x")
    empty.mkdir()
    assert "config.json is missing" in refused(lockstep, "serve", str(empty))
    cut.mkdir()
    for file in Path(model).iterdir():
        content = file.read_bytes()
        (cut / file.name).write_bytes(content[:-1] if file.suffix == ".safetensors" else content)
    assert "cut short" in refused(lockstep, "serve", str(cut))
    assert "4 attention heads cannot be split over tp = 3" in refused(lockstep, "serve", model, "--tp", "3")


def test_a_taken_port_is_refused_before_anything_starts(lockstep, model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused(lockstep, "serve", model, "--port", str(port))
        assert sentence == f"lockstep: cannot listen on 127.0.0.1:{port}: Address already in use\n"


@pytest.mark.parametrize("options", [("--port", "65535"), ("--port", "0", "--management-port", "65535")])
def test_ports_after_the_last_one_are_refused(lockstep, model: str, options: tuple[str, ...]) -> None:
    sentence = refused(lockstep, "serve", model, "--routers", "2", *options)
    assert sentence == "lockstep: there is no port 65537 for a further router: ports end at 65535\n"


def test_a_host_that_is_not_ours_is_refused(lockstep, model: str) -> None:
    assert "cannot listen on 192.0.2.1" in refused(lockstep, "serve", model, "--host", "192.0.2.1", "--port", "0")
    assert "cannot listen on a..b:0: must have a" in refused(lockstep, "serve", model, "--host", "a..b", "--port", "0")


def test_the_reference_model_is_the_default(lockstep, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen" in refused(lockstep, "serve", "--port", str(taken.getsockname()[1]))


def in_shell(redirected: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with its standard streams redirected by a shell."""
    return subprocess.run(
        ["sh", "-c", f"exec {shlex.join([sys.executable, '-m', 'lockstep_tools.cli', *arguments])} {redirected}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ,
    )


@pytest.mark.parametrize("arguments", [("keys", "tenant"), ("chaos", "--list")])
def test_a_full_disk_behind_stdout_is_one_sentence(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    result = in_shell(">/dev/full", *arguments)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "lockstep: the output cannot be written: No space left on device"
    assert "Traceback" not in result.stderr


def test_a_full_disk_behind_stderr_changes_no_exit_code() -> None:
    assert in_shell("2>/dev/full", "convert", "a", "b").returncode == 2


@pytest.mark.parametrize(
    ("redirected", "arguments", "code"),
    [(">&-", ("chaos", "--list"), 0), ("2>&-", ("convert", "a", "b"), 2), (">&- 2>&- <&-", ("chaos", "--list"), 0)],
)
def test_closed_streams_are_no_error(redirected: str, arguments: tuple[str, ...], code: int) -> None:
    result = in_shell(redirected, *arguments)
    assert (result.returncode, result.stderr) == (code, "")


def test_closed_input_is_empty(server: FakeOpenAI) -> None:
    assert in_shell("<&-", "chat", "--url", server.url).returncode == 0
    result = in_shell("<&-", "generate", "model", "-")
    assert (result.returncode, result.stderr) == (2, "lockstep: the PROMPT is empty\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """Its code is the one of the signal, and what the command has begun is removed. Twice at once is one end."""
    code = (
        "import pathlib, sys, time\nfrom lockstep_tools import cli\nfrom lockstep_tools.commands import keys\n"
        "def run(_):\n"
        "    try:\n        print('begun', flush=True)\n        time.sleep(60)\n"
        "    finally:\n        time.sleep(0.5)\n        pathlib.Path(sys.argv[1]).touch()\n"
        "keys.run = run\nsys.exit(cli.main(['keys', 'tenant']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "removed")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | os.environ,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(number)
    assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 128 + number
    assert (tmp_path / "removed").exists()


@pytest.mark.parametrize("name", ["[/missing]", "[red]"])
def test_brackets_of_a_path_are_no_markup(lockstep, name: str) -> None:
    result = lockstep("eval", "perplexity", name, "--text", __file__)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert name in result.stderr
