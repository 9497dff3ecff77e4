"""`lockstep logs` finds the lines that are wanted, in the order of time, and shows hostile ones as text."""

import io
import json
import os
import select
import subprocess
import sys
import threading
from datetime import UTC, datetime

import pytest
from lockstep_tools import cli
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import Pod, Release
from lockstep_tools.escaping import harmless, harmless_lines
from lockstep_tools.logs import sources
from lockstep_tools.logs.lines import Choice, Line, moment, parse, readable

HOSTILE = "\x1b[2J\x1b]0;own\x07 a\u202eb\u2066c \u200b\ud800 é 日本 \r\n"


def entry(second, message, **fields):
    time = f"2026-01-31T10:00:{second:02d}.000Z"
    return json.dumps({"time": time, "level": "info", "service": "router", "message": message} | fields)


ROUTER = [
    entry(1, "request", request_id="req-1"),
    entry(5, "stream leaves worker", stream="req-1-0", level="warning", worker="w-0"),
    entry(9, "request", request_id="req-10"),
]
WORKER = [
    entry(2, "rank failed", service="worker w0", rank=1, step=7, level="error", stack="File x\n  line 1"),
    "Segmentation fault",
    entry(6, "ranks are ready", service="worker w0", rank=0),
]


@pytest.fixture
def files(tmp_path):
    for name, lines in (("router", ROUTER), ("worker", WORKER)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return [str(tmp_path / "router"), str(tmp_path / "worker")]


def shown(capsys, *arguments):
    code = cli.main(["logs", *arguments])
    return code, capsys.readouterr().out.splitlines()


def test_lines_of_several_files_are_in_order(capsys, files):
    code, lines = shown(capsys, *files)
    assert code == 0
    assert [line.split(": ")[1].split(" ")[0] for line in lines if not line.startswith("    ")] == [
        "request",
        "rank",
        "Segmentation",
        "stream",
        "ranks",
        "request",
    ]
    assert lines[2:4] == ["    File x", "      line 1"]


def test_lines_that_json_leaves_out_do_not_count_for_the_tail(capsys, tmp_path):
    (tmp_path / "log").write_text("\n".join([*ROUTER, "plain", "text", "at the end"]) + "\n")
    assert shown(capsys, str(tmp_path / "log"), "--json", "--tail", "2") == (0, ROUTER[1:])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--request", "req-1"], [ROUTER[0], ROUTER[1]]),
        (["--request", "chatcmpl-req-1"], [ROUTER[0], ROUTER[1]]),
        (["--rank", "1"], [WORKER[0]]),
        (["--level", "warning"], [WORKER[0], ROUTER[1]]),
        (["--service", "worker"], [WORKER[0], WORKER[2]]),
        (["--service", "worker w0", "--rank", "0"], [WORKER[2]]),
        (["--since", "2026-01-31T10:00:05", "--until", "2026-01-31T12:00:09+02:00"], [ROUTER[1], WORKER[2]]),
        (["--tail", "1"], [ROUTER[2]]),
    ],
)
def test_filters(capsys, files, options, expected):
    code, lines = shown(capsys, *reversed(files), *options, "--json")
    assert (code, lines) == (0, expected)


@pytest.mark.parametrize(
    ("asked", "fields", "is_wanted"),
    [
        ("1", {"request_id": "1"}, True),
        ("1", {"request_id": "abc-1-2"}, False),
        ("abc", {"request_id": "abc-1-2"}, False),
        ("abc", {"request_id": "other-abc-1"}, False),
        ("cmpl-abc", {"request_id": "abc"}, True),
        ("resp_abc", {"request_id": "abc"}, True),
        ("cmpl-abc", {"request_id": "cmpl-abc"}, True),  # a client may choose it
        ("abc", {"request_id": "cmpl-abc"}, False),
        ("7f3a", {"stream": "7f3a-0"}, True),
        ("7f3a", {"stream": "7f3a-10-2"}, True),
        ("7f3a", {"stream": "7f3a-10-2-1"}, False),
        ("7f3a", {"stream": "7f3a-x"}, False),
        ("7f3a-0", {"stream": "7f3a-0-1"}, True),
        ("1", {"stream": "7f3a-1-2"}, False),
        ("7f3a" * 8, {"trace_id": "7f3a" * 8}, True),
        ("7f3a" * 8, {"trace": f"00-{'7f3a' * 8}-{'1' * 16}-01"}, True),
        ("1" * 16, {"trace": f"00-{'7f3a' * 8}-{'1' * 16}-01"}, False),
        ("01", {"trace": f"00-{'7f3a' * 8}-{'1' * 16}-01"}, False),
        ("abc", {"request_id": ["abc"], "stream": 1}, False),
        ("None", {"request_id": None}, False),
        ("None", {}, False),
    ],
)
def test_a_request_is_found_by_its_own_id_alone(capsys, tmp_path, asked, fields, is_wanted):
    """Clients choose ids, so one may be part of another."""
    line = entry(1, "request", **fields)
    (tmp_path / "log").write_text(line + "\n")
    assert shown(capsys, str(tmp_path / "log"), "--request", asked, "--json")[1] == [line] * is_wanted


def test_nothing_found_is_exit_code_1(capsys, files):
    assert shown(capsys, *files, "--request", "other") == (1, [])


@pytest.mark.parametrize(
    "arguments", [[], ["f", "--release", "r"], ["f", "--follow", "5"], ["nowhere"], ["-", "--since", "soon"]]
)
def test_what_cannot_be_done_is_said(capsys, arguments):
    assert cli.main(["logs", *arguments]) == 2
    assert capsys.readouterr().err.startswith("lockstep: ")


def test_hostile_text_is_shown_escaped(capsys, monkeypatch):
    fields = json.dumps({"message": HOSTILE, HOSTILE: HOSTILE, "stack": HOSTILE, "level": [HOSTILE], "time": {"a": 1}})
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{fields}\n{HOSTILE}{'[' * 100_000}\n"))
    code, lines = shown(capsys, "-")
    text = "".join(lines)
    assert code == 0
    assert text.replace("é", "").replace("日本", "").isascii()
    assert text.isprintable()
    assert "\\x1b[2J" in text
    assert "\\u202e" in text


def test_stdin_is_shown_as_it_comes():
    command = [sys.executable, "-m", "lockstep_tools.cli", "logs", "-", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    logs = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        for line in (ROUTER[1], ROUTER[0]):
            logs.stdin.write(f"{line}\n")
            logs.stdin.flush()
            assert select.select([logs.stdout], [], [], 30)[0], "nothing is shown before the end"
            assert logs.stdout.readline() == f"{line}\n"
    finally:
        logs.communicate(timeout=30)
    assert logs.returncode == 0


def test_of_stdin_too_the_newest_lines_can_be_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{ROUTER[1]}\n{ROUTER[0]}\n"))
    assert shown(capsys, "-", "--tail", "1", "--json") == (0, ROUTER[1:2])


def test_an_age_of_any_size_is_taken(capsys, files):
    assert len(shown(capsys, files[0], "--since", "999999999999d")[1]) == 3
    assert shown(capsys, files[0], "--since", "0001-01-01T00:00:00+14:00")[0] == 2


def test_a_line_without_end_is_cut(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("y" * 1_000_000 + "\n" + ROUTER[0] + "\n"))
    code, lines = shown(capsys, "-")
    assert (code, len(lines), len(lines[0]) < 70_000) == (0, 2, True)


class Cluster:
    """A release whose pods' logs are given; `kubectl logs -f` does not end by itself."""

    def __init__(self, logs):
        self.logs, self.kubectl, self.commands, self.killed = logs, self, [], 0

    def require(self):
        return [Pod(name, kind, "n", True, 0, False, name) for name, kind, _ in self.logs]

    def pods(self):
        return self.require()

    def start(self, *arguments, errors):
        self.commands.append(arguments)
        (lines,) = [lines for name, _, lines in self.logs if name == arguments[1]]
        if lines is None:
            errors.write("a warning\nError from server (NotFound): \x1b[2J gone\n")
        return Process(self, lines)


class Process:
    """It fails without lines, and after a last one that is None."""

    def __init__(self, cluster, lines):
        self._cluster, self._code = cluster, int(not lines or lines[-1] is None)
        self.stdout = io.StringIO("".join(f"{line}\n" for line in filter(None, lines or ())))

    def kill(self):
        self._cluster.killed += 1

    def wait(self, _):
        return self._code

    def poll(self):
        return self._code


def test_both_services_of_a_release_are_read_at_once():
    cluster = Cluster([("r-a", "router", ROUTER), ("w-0", "inference-worker", WORKER), ("redis", "redis", ["x"])])
    since = "2026-01-31T10:00:00.000Z"
    lines = list(sources.from_release(cluster, tail=7, since=since, follow_s=None, on_failure=pytest.fail))
    assert sorted(line.source for line in lines) == ["r-a"] * 3 + ["w-0"] * 3
    options = ("--tail=7", "--since-time=2026-01-31T10:00:00.000Z")
    assert cluster.commands == [("logs", pod, *options) for pod in ("r-a", "w-0")]
    assert cluster.killed == 2


class Changing(Cluster):
    """A release whose containers, by look at its pods, are these: (pod, how often it was restarted, its lines). They
    have ended when their lines have been read, but for the pods that are in `running`.

    It changes only when the lines of all commands so far have been read.
    """

    def __init__(self, *looks, running=()):
        super().__init__([])
        self.looks, self.running = list(looks), running

    def require(self):
        self.logs = [(name, "router", lines) for name, _, lines in self.looks[0]]
        self.seen = [
            Pod(name, "router", "n", True, restarts, False, name, runs=name in self.running)
            for name, restarts, _ in self.looks.pop(0)
        ]
        return self.seen

    def pods(self):
        if self.killed < len(self.commands):
            return self.seen
        return self.require() if self.looks else []


def followed(cluster, monkeypatch):
    monkeypatch.setattr(sources, "LOOK_S", 0.05)
    failures = []
    lines = sources.from_release(cluster, tail=7, since="", follow_s=60.0, on_failure=failures.append)
    return [(line.source, line.fields["message"]) for line in lines if line.fields], failures


def said(*messages):
    return [json.dumps({"message": each, "time": "2026-01-31T10:00:00.000Z"}) for each in messages]


def test_containers_that_start_meanwhile_are_followed_too(monkeypatch):
    """It ends with the release."""
    first, second, third = said("first"), said("second"), said("third")
    cluster = Changing([("a", 0, first)], [("a", 0, first)], [("a", 1, second), ("b", 0, third)])
    lines, failures = followed(cluster, monkeypatch)
    assert (sorted(lines), failures) == ([("a", "first"), ("a", "second"), ("b", "third")], [])
    assert cluster.commands == [
        ("logs", "a", "-f", "--tail=7"),
        ("logs", "a", "-f", "--tail=-1"),
        ("logs", "b", "-f", "--tail=-1"),
    ]


def test_a_pod_that_cannot_be_followed_yet_is_tried_again(monkeypatch):
    """Such as one whose image is being pulled."""
    cluster = Changing([("a", 0, None)], [("a", 0, None)], [("a", 0, said("first"))])
    assert followed(cluster, monkeypatch) == ([("a", "first")], [])


def test_after_a_broken_connection_lines_go_on_where_they_ended(monkeypatch):
    cluster = Changing([("a", 0, [*said("first"), None])], [("a", 0, said("second"))])
    assert followed(cluster, monkeypatch) == ([("a", "first"), ("a", "second")], [])
    assert cluster.commands[1] == ("logs", "a", "-f", "--tail=-1", "--since-time=2026-01-31T10:00:00.000Z")


def test_a_container_that_still_runs_is_read_on_when_its_connection_ends(monkeypatch):
    """`kubectl logs -f` ends with exit code 0 when the kubelet is started again."""
    cluster = Changing([("a", 0, said("first"))], [("a", 0, said("second"))], running={"a"})
    assert followed(cluster, monkeypatch) == ([("a", "first"), ("a", "second")], [])
    assert cluster.commands[1] == ("logs", "a", "-f", "--tail=-1", "--since-time=2026-01-31T10:00:00.000Z")


@pytest.mark.parametrize("first", [[None], []], ids=["failed", "without a line"])
def test_of_a_container_that_runs_no_more_lines_than_wanted_are_read_though_the_first_try_gave_none(monkeypatch, first):
    cluster = Changing([("a", 0, first)], [("a", 0, said("first"))], running={"a"})
    assert followed(cluster, monkeypatch) == ([("a", "first")], [])
    assert cluster.commands == [("logs", "a", "-f", "--tail=7")] * 2


@pytest.mark.parametrize(
    ("states", "runs"),
    [(["running"], True), (["running", "running"], True), (["running", "terminated"], False), (["waiting"], False)],
)
def test_a_pod_runs_if_all_of_its_containers_do(states, runs):
    class Listed:
        def json(self, *_):
            containers = [{"restartCount": 1, "state": {state: {}}} for state in states]
            metadata = {"name": "a", "uid": "u", "labels": {"app.kubernetes.io/component": "router"}}
            return {"items": [{"metadata": metadata, "spec": {}, "status": {"containerStatuses": containers}}]}

    (pod,) = Release("lockstep", Listed()).pods()
    assert (pod.runs, pod.restarts) == (runs, len(states))


class Starting(Cluster):
    """A pod whose container has not started at the first look; later it is followed until the release is gone, which
    is when a line of it has been shown.
    """

    def __init__(self):
        super().__init__([("a", "router", None)])
        self.is_shown = False

    def pods(self):
        self.logs = [("a", "router", said("first"))]
        return [] if self.is_shown else self.require()

    def start(self, *arguments, errors):
        process = super().start(*arguments, errors=errors)
        return process if process.wait(0) else Unending(self, said("first"))


class Unending(Process):
    """It has no end of its own."""

    def __init__(self, cluster, lines):
        super().__init__(cluster, lines)
        self._lines, self._is_killed, self.stdout = self.stdout, threading.Event(), self

    def readline(self, most):
        line = self._lines.readline(most)
        if not line:
            self._is_killed.wait()
        return line

    def kill(self):
        super().kill()
        self._is_killed.set()


def test_a_pod_that_is_followed_by_now_is_not_named_for_an_earlier_try(monkeypatch):
    monkeypatch.setattr(sources, "LOOK_S", 0.05)
    cluster, failures = Starting(), []
    for line in sources.from_release(cluster, tail=7, since="", follow_s=60.0, on_failure=failures.append):
        cluster.is_shown = line.fields.get("message") == "first"
    assert (len(cluster.commands), failures) == (2, [])


def test_an_age_is_a_moment():
    now = datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert moment("15m", now) == "2026-01-31T09:45:00.000Z"
    assert not Choice(since=moment("1h", now)).wants(parse("f", "not JSON"))
    assert readable(parse("f", "{}")) == "f: {}"
    assert harmless("a\tb") == "a\\x09b"
    assert harmless_lines("a\tb\n\r\x1b") == "a\tb\n\\x0d\\x1b"


@pytest.mark.parametrize("follow", [(), ("--follow", "1")])
def test_a_pod_whose_lines_cannot_be_read_is_named(monkeypatch, capsys, follow):
    cluster = Cluster([("r-a", "router", ROUTER), ("w-0", "inference-worker", None)])
    monkeypatch.setattr("lockstep_tools.commands.logs.Release", lambda *_: cluster)
    code = cli.main(["logs", "--release", "lockstep", "--json", *follow])
    output, errors = capsys.readouterr()
    assert (code, output.splitlines()) == (1, ROUTER)
    assert errors == "lockstep: kubectl logs w-0: exit code 1: Error from server (NotFound): \\x1b[2J gone\n"


def test_the_newest_lines_are_those_of_all_sources_by_time(capsys, files):
    """Not those of the source that was read last."""
    assert shown(capsys, *files, "--tail", "2", "--json") == (0, [WORKER[2], ROUTER[2]])
    assert shown(capsys, *reversed(files), "--tail", "2", "--json") == (0, [WORKER[2], ROUTER[2]])


def test_only_the_lines_to_be_shown_are_kept():
    alive = 0

    class Counted(Line):
        def __init__(self, number):
            nonlocal alive
            alive += 1
            super().__init__("f", "", {"message": "m", "time": f"{number:06d}"})

        def __del__(self):
            nonlocal alive
            alive -= 1

    def lines():
        for number in range(1000):
            yield Counted(number)
            assert alive <= 12

    assert [line.time for line in sources.in_order(lines(), 10)] == [f"{number:06d}" for number in range(990, 1000)]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A kubectl whose `logs` prints a line that is not UTF-8 and a good one; that of the pod `hung` never ends then."""
    program = tmp_path / "kubectl"
    program.write_text(
        "#!/bin/sh\n"
        f"printf 'Segmentation \\377 fault\\n%s\\n' '{ROUTER[0]}'\n"
        'case "$*" in *hung*) exec sleep 600 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Kubectl("default")


def test_what_is_not_text_does_not_hide_the_lines_after_it(kubectl, monkeypatch, capsys):
    cluster = Cluster([("r-a", "router", None)])
    cluster.kubectl = kubectl
    monkeypatch.setattr("lockstep_tools.commands.logs.Release", lambda *_: cluster)
    assert shown(capsys, "--release", "lockstep", "--json") == (0, ROUTER[:1])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n" + ROUTER[1].encode()), encoding="utf-8"))
    assert shown(capsys, "-", "--json") == (0, ROUTER[1:2])


def test_a_kubectl_that_hangs_is_not_waited_for_without_end(kubectl, monkeypatch, capsys):
    monkeypatch.setattr(sources, "SILENT_S", 1.0)
    cluster = Cluster([("r-a", "router", None), ("hung", "router", None)])
    cluster.kubectl = kubectl
    monkeypatch.setattr("lockstep_tools.commands.logs.Release", lambda *_: cluster)
    assert cli.main(["logs", "--release", "lockstep", "--json"]) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "lockstep: kubectl logs hung: it gives no more lines and does not end"
    )
