"""`lockstep debug`: what it reads in two looks at a worker, what a bundle holds, and how it reaches pods."""

import contextlib
import http.server
import json
import os
import subprocess
import sys
import tarfile
import threading

import pytest
from lockstep_tools import cli
from lockstep_tools.chaos.release import Pod
from lockstep_tools.debug import bundle as bundles
from lockstep_tools.debug import cluster, local
from lockstep_tools.debug.bundle import Bundle
from lockstep_tools.debug.findings import of_log, of_worker
from lockstep_tools.debug.process import PartError
from lockstep_tools.failure import CommandError

STACK = """\
Thread 0x7f (most recent call first):
  File "/x/threading.py", line 1 in wait

Current thread 0x7e (most recent call first):
  File "/x/distributed.py", line 99 in all_gather
  File "/x/rank.py", line 7 in launch
"""


def rank(number, steps, collectives, process_state="running", stack=STACK, **marks):
    return {
        "rank": number,
        "pid": 100 + number,
        "state": "ready",
        "process_state": process_state,
        "steps": steps,
        "collectives": collectives,
        "stack": stack,
    } | marks


def gpu_rank(number, launched, reached):
    """Hosts of GPUs have launched all collectives before the devices reach them."""
    return rank(number, 5, 52, launched=launched, reached=reached)


def look(*ranks, runs_s=0.0, state="ready", epoch=1, reason=""):
    return {"state": state, "epoch": epoch, "reason": reason, "step_runs_s": runs_s, "ranks": list(ranks)}


def sentences(first, last):
    return [finding.sentence for finding in of_worker("w", first, last)]


def test_a_worker_that_moves_or_rests_is_not_mentioned():
    assert sentences(look(rank(0, 5, 50), rank(1, 5, 50)), look(rank(0, 9, 90), rank(1, 9, 89), runs_s=2.0)) == []
    rests = look(rank(0, 5, 50), rank(1, 5, 50))
    assert sentences(rests, rests) == []


def test_the_rank_that_the_others_wait_for_is_stuck():
    stuck = look(rank(0, 5, 52), rank(1, 5, 51), rank(2, 5, 52), runs_s=3.0)
    (finding,) = of_worker("w", stuck, stuck)
    assert finding.sentence.startswith("w: rank 1 (pid 101) is STUCK: no rank has moved for the 3.0 s of this step")
    assert finding.stack.splitlines()[0] == 'File "/x/distributed.py", line 99 in all_gather'


def test_ranks_at_the_same_place_are_not_blamed():
    stuck = look(rank(0, 5, 52), rank(1, 5, 52), runs_s=3.0)
    (sentence,) = sentences(stuck, stuck)
    assert "all ranks are at the same place" in sentence
    assert "STUCK" not in sentence


@pytest.mark.parametrize(
    ("ranks", "stuck", "what"),
    [
        (
            [(90, 80), (90, 80), (90, 79)],
            2,
            "; its device stands still; it has 5 steps and 52 collectives, and reached mark 79 of 90,",
        ),
        (
            [(90, 80), (78, 78), (90, 80)],
            1,
            ": its host stands still; it has 5 steps and 52 collectives, and reached mark 78 of 78,",
        ),
    ],
)
def test_the_rank_whose_device_has_come_least_far_is_stuck(ranks, stuck, what):
    """The hosts' counts of collectives are equal, so that they would name none."""
    seen = look(*(gpu_rank(number, *marks) for number, marks in enumerate(ranks)), runs_s=3.0)
    (sentence,) = sentences(seen, seen)
    assert sentence.startswith(f"w: rank {stuck} (pid {100 + stuck}) is STUCK: ")
    assert what in sentence


@pytest.mark.parametrize("ranks", [[(90, 80), (90, 80)], [(90, 80), (95, 80)], [(90, 90), (90, 90)]])
def test_devices_at_the_same_place_are_not_blamed(ranks):
    seen = look(*(gpu_rank(number, *marks) for number, marks in enumerate(ranks)), runs_s=3.0)
    (sentence,) = sentences(seen, seen)
    assert "all ranks are at the same place" in sentence
    assert "STUCK" not in sentence


def test_a_device_that_moves_between_two_looks_is_not_stuck():
    first = look(gpu_rank(0, 90, 60), gpu_rank(1, 90, 60), runs_s=2.0)
    assert sentences(first, look(gpu_rank(0, 90, 62), gpu_rank(1, 90, 61), runs_s=3.0)) == []


def test_a_stopped_rank_is_named_with_its_place_and_those_of_the_others():
    """Also if it has moved between the looks: it runs for a moment in each of them."""
    before = look(rank(0, 5, 50), rank(1, 4, 49, "stopped", STACK.replace("launch", "forward")), runs_s=3.0)
    stopped = look(rank(0, 6, 52), rank(1, 5, 51, "stopped", STACK.replace("launch", "forward")), runs_s=0.1)
    first, second = of_worker("w", before, stopped)
    assert first.sentence.startswith("w: rank 1 (pid 101) is STOPPED after 5 steps and 51 collectives; rank 0 has 6")
    assert first.stack.splitlines()[1] == 'File "/x/rank.py", line 7 in forward'
    assert (second.sentence, "launch" in second.stack) == ("w: rank 0 (pid 100) is in", True)


def test_a_rank_that_a_debugger_holds_has_no_stack():
    held = look(rank(0, 6, 52), rank(1, 5, 51, "stopped by a debugger", ""), runs_s=3.0)
    first, _ = of_worker("w", held, held)
    assert "is STOPPED BY A DEBUGGER after" in first.sentence
    assert first.sentence.endswith("its stack cannot be read")
    assert not first.stack


def test_ranks_that_were_killed_between_two_looks_are_named_by_the_first():
    found = sentences(
        look(rank(0, 6, 52), rank(1, 5, 51, "stopped", "")),
        look(state="restarting", epoch=2, reason="rank 1 has not finished its step"),
    )
    assert [sentence.partition(" (")[0] for sentence in found] == [
        "w: ranks are restarting: rank 1 has not finished its step",
        "w: rank 1",
        "w: rank 0",
    ]


def test_the_log_tells_the_newest_loss_and_its_stack():
    failed = {"message": "rank failed", "rank": 1, "epoch": 3, "pid": 7, "step": 9, "reason": "died", "time": "T"}
    lines = [
        {"message": "rank failed", "rank": 0, "epoch": 1},
        {"message": "rank wrote to stderr", "rank": 1, "epoch": 3, "stderr": f"Fatal\n{STACK}"},
        {"message": "rank wrote to stderr", "rank": 1, "epoch": 2, "stderr": '  File "old", line 1 in x'},
        failed,
    ]
    (finding,) = of_log("w", ["{cut", *map(json.dumps, lines)])
    assert finding.sentence == "w: rank 1 (pid 7) FAILED at T after 9 steps of epoch 3: died"
    assert finding.stack.splitlines() == [
        'File "/x/distributed.py", line 99 in all_gather',
        'File "/x/rank.py", line 7 in launch',
    ]
    assert of_log("w", ["{}"]) == []


def test_a_bundle_is_bounded_and_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "PART_BYTES", 100)
    monkeypatch.setattr(bundles, "BUNDLE_BYTES", 150)

    def fails():
        raise PartError("no answer")

    with Bundle(tmp_path / "b.tar.gz") as bundle:
        assert bundle.add("a", lambda: b"x" * 100) == b"x" * 100
        assert bundle.add("large", lambda: b"x" * 101) is None
        assert bundle.add("late", lambda: b"x" * 60) is None
        assert bundle.add("gone", fails) is None
        bundle.conclude("s" * 200, {"lockstep": "1"})
    with tarfile.open(tmp_path / "b.tar.gz") as tar:
        names = tar.getnames()
        manifest = json.load(tar.extractfile("b/manifest.json"))
    assert names == ["b/a", "b/summary.txt", "b/manifest.json"]
    assert manifest["failed"] == {
        "large": "101 bytes are too many",
        "late": "60 bytes are too many",
        "gone": "no answer",
    }
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o77 == 0
    with pytest.raises(FileExistsError):
        Bundle(tmp_path / "b.tar.gz")


class Service(http.server.BaseHTTPRequestHandler):
    """A worker's management port."""

    stacks = None
    """Status and body of what it says instead of the stacks."""

    def do_GET(self):
        engine = look(rank(0, 5, 52), rank(1, 5, 51), runs_s=3.0)
        status, stacks = self.stacks or (200, {"engine": engine, "threads": []})
        body = json.dumps(stacks if self.path == "/debug/stacks" else {"page": self.path}).encode()
        self.send_response(status if self.path == "/debug/stacks" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


class Release:
    """Of two pods: one whose port is forwarded, one without a management port."""

    def __init__(self, port):
        self.port, self.kubectl, self.ended = port, self, 0

    def require(self):
        return [Pod(name, "inference-worker", "n", True, 0, False, name) for name in ("w-0", "w-1")]

    def json(self, *_):
        container = {"ports": [{"name": "management", "containerPort": 9001}], "livenessProbe": {"httpGet": {}}}
        return {
            "items": [
                {"metadata": {"name": "w-0"}, "spec": {"containers": [container]}},
                {"metadata": {"name": "w-1"}, "spec": {"containers": [{}]}},
                {"metadata": {"name": "another"}, "spec": {}},
            ]
        }

    says = ""

    def start(self, *arguments, errors):
        errors.write(self.says)
        assert arguments == ("port-forward", "pod/w-0", ":9001", "--address=127.0.0.1")
        self.stdout = self
        return self

    def readline(self):
        return f"Forwarding from 127.0.0.1:{self.port} -> 9001\n"

    def kill(self):
        self.ended += 1

    def wait(self, _):
        return 0

    def run(self, *arguments, timeout_s):
        return f"{arguments[1]} within {timeout_s:g} s"


def test_a_release_is_looked_into_by_port_forward(tmp_path, monkeypatch, capsys):
    path = tmp_path / "cluster.tar.gz"
    with served() as port:
        release = Release(port)
        monkeypatch.setattr("lockstep_tools.commands.debug.Kubectl", lambda _: release)
        monkeypatch.setattr("lockstep_tools.commands.debug.Release", lambda *_: release)
        assert cli.main(["debug", "--release", "lockstep", "--output", str(path), "--interval", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "! pod-w-0: rank 1 (pid 101) is STUCK" in printed
    assert "not collected: pod-w-1: the pod has no port named management" in printed
    assert release.ended == 1
    with tarfile.open(path) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        assert tar.extractfile("cluster/cluster/pods.txt").read() == b"pods within 10 s"
    assert {"pod-w-0/metrics.txt", "pod-w-0/settings.json", "cluster/events.txt", "summary.txt"} <= names


@pytest.mark.parametrize(
    ("status", "stacks", "says"),
    [(403, {}, "! pod-w-0 refuses operators: HTTP 403; run it on that host or with --client-cert"),
     (404, {"error": "not found"}, "! pod-w-0 has no stacks: not found"),
     (503, {"error": "no process answers"}, "! pod-w-0 has no stacks: no process answers"),
     (200, {"processes": {"0": {"threads": []}, "1": None}}, "! pod-w-0: its process 1 does not answer")],
)  # fmt: skip
def test_a_service_without_stacks_is_unusual_and_its_other_parts_are_collected(
    status, stacks, says, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "cluster.tar.gz"
    monkeypatch.setattr(Service, "stacks", (status, stacks))
    with served() as port:
        release = Release(port)
        monkeypatch.setattr("lockstep_tools.commands.debug.Kubectl", lambda _: release)
        monkeypatch.setattr("lockstep_tools.commands.debug.Release", lambda *_: release)
        assert cli.main(["debug", "--release", "lockstep", "--output", str(path), "--interval", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert says in printed
    assert "nothing unusual" not in printed
    with tarfile.open(path) as tar:
        assert {"cluster/pod-w-0/metrics.txt", "cluster/pod-w-0/status.json"} <= set(tar.getnames())


def test_a_pod_that_is_not_forwarded_is_a_failed_part(monkeypatch):
    release = Release(1)
    monkeypatch.setattr(Release, "readline", lambda _: "")
    monkeypatch.setattr(Release, "says", "error: unable to forward port: Forbidden\n")
    with cluster.forwarded(release) as (found, failed):
        assert found == []
        assert failed["w-0"] == "kubectl port-forward: error: unable to forward port: Forbidden"


@pytest.mark.parametrize("failure", [SystemExit, KeyboardInterrupt, CommandError])
def test_a_bundle_that_is_not_completed_is_removed(failure, tmp_path):
    def interrupted():
        with Bundle(tmp_path / "b.tar.gz") as bundle:
            bundle.add("part", lambda: b"x")
            raise failure("stopped")

    with pytest.raises(failure):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1 << 20, 20_000])
def test_a_full_disk_is_a_sentence(size, tmp_path):
    """A part is too large, or what remains to be written at the end is."""
    code = (
        "import os, resource, sys\nfrom pathlib import Path\nfrom lockstep_tools.debug.bundle import Bundle\n"
        "from lockstep_tools.failure import CommandError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        f"try:\n    with Bundle(Path(sys.argv[1])) as bundle: bundle.add('part', lambda: os.urandom({size}))\n"
        "except CommandError as error: print(error.message)\n"
    )
    path = tmp_path / "b.tar.gz"
    command = [sys.executable, "-c", code, str(path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, f"{path} cannot be written: File too large\n"), done.stderr
    assert not path.exists()


@pytest.mark.parametrize(
    "arguments", [["--release", "r", "--pid", "1"], ["--url", "http://127.0.0.1:9"], ["--pid", "1"]]
)
def test_what_cannot_be_looked_into_is_said(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep_tools.debug.local.process_tree", lambda pid: iter([pid]))
    assert cli.main(["debug", *arguments]) == 2
    assert capsys.readouterr().err.startswith("lockstep: ")
    assert list(tmp_path.iterdir()) == []


def test_the_name_that_a_worker_gives_itself_stays_in_the_bundles_folder(monkeypatch):
    worker = {"id": "../../tmp/e v\n", "pid": 1, "target": "unix:/run/worker.sock"}
    monkeypatch.setattr(
        local, "fetch", lambda _client, url: json.dumps({"workers": [worker], "level": "info", "url": url})
    )
    _, found = local.from_router(None, "http://127.0.0.1:8001")
    assert found.name == "worker-.._.._tmp_e_v_"


def test_the_parent_of_a_routers_processes_answers_for_them():
    """These have no management port, and would be named for having no stacks."""
    wait = "print('ready', flush=True); sys.stdin.read()"
    named = "import sys, subprocess; from lockstep_common.lifecycle import name_process; name_process({!r}); "
    child = named.format("router") + wait
    start = (
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE); "
        "child.stdout.readline(); "
    )
    command = [sys.executable, "-c", named.format("router parent") + start + wait]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout.readline() == b"ready\n"
        assert [each.name for each in local.below(None, parent.pid)] == ["router-parent"]
        (child_pid,) = set(local.process_tree(parent.pid)) - {parent.pid}
        assert [each.name for each in local.below(None, child_pid)] == ["router"]
        parent.stdin.close()
