"""What a killed `lockstep chaos` has left on the cluster can be removed, whenever and however it was killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from lockstep_tools.chaos.experiments import scripts
from scripted_cluster import FAKE_KUBECTL, OTHERS_RULES, left

pytestmark = pytest.mark.slow

RELEASE = subprocess.check_output(["cksum"], input="serving/lockstep", text=True).split()[0]
"""The release in names outside of its namespace."""
CUT = f"cut-{RELEASE}-n1"
CONTAINER = f"container-{CUT}"
RUN = ("chaos", "rank-kill", "-n", "serving", "--clients", "2", "--json")


def wait_until(holds: Callable[[], object], what: str, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


def wait_for_cut(cluster: Path) -> int:
    """Wait until node n1 drops packets in both directions; the process id of the container that cuts it."""
    wait_until(
        lambda: sum("-j LOCKSTEP-" in line for line in (cluster / "rules-n1").read_text().splitlines()) == 2, "cut"
    )
    return int((cluster / CONTAINER).read_text())


def run_killed(cluster: Path, experiment: str, at: str, scope: str) -> None:
    """Run an experiment that is killed with SIGKILL during the command that has `at` in its line."""
    (cluster / "kill_at").write_text(at)
    (cluster / "kill_scope").write_text(scope)
    command = [sys.executable, "-m", "lockstep_tools.cli", "chaos", experiment, "-n", "serving", "--clients", "2"]
    started = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, start_new_session=True
    )
    assert started.wait(60) == -signal.SIGKILL, "it ended before the command at which it should be killed"
    wait_until(lambda: not orphans(cluster), "its scripts end")


def orphans(cluster: Path) -> list[str]:
    """Scripts and commands for this cluster that still run; the pods' own containers are no part of them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            mine = process.environ().get("FAKE_CLUSTER") == str(cluster)
            if mine and ("k8s/chaos" in line or f"{FAKE_KUBECTL} kubectl" in line or f"{FAKE_KUBECTL} helm" in line):
                found.append(line)
    return found


MOMENTS = {
    "the load streams": ("rank-kill", "get pod lockstep-load"),
    "a rank has been killed": ("rank-kill", "exec w-0"),
    "the burst is about to begin": ("fill-queue", "delete pod lockstep-burst"),
    "the burst runs": ("fill-queue", "get pod lockstep-burst"),
    "the drain is recorded": ("node-drain", "patch configmap"),
    "the node is drained": ("node-drain", "drain n1"),
    "the node is back": ("node-drain", "uncordon"),
    "the release is upgraded": ("upgrade", "helm upgrade"),
    "the release is rolled back": ("upgrade", "helm rollback"),
    "the cut is recorded": ("link-cut", "patch configmap"),
    "the cut begins": ("node-cut", "-n lockstep-chaos apply"),
    "packets are dropped": ("node-cut", f"get pod {CUT}"),
    "the cut is over": ("node-cut", "-n lockstep-chaos delete pod"),
}
"""An experiment, and a part of the command line after which it is killed."""

ALONE = ("the load streams", "the node is drained", "the release is upgraded", "packets are dropped")


@pytest.mark.parametrize(
    ("when", "scope"), [*((when, "machine") for when in MOMENTS), *((when, "process") for when in ALONE)]
)
def test_nothing_is_left_of_a_run_that_was_killed(lockstep, cluster: Path, when: str, scope: str) -> None:
    """It is killed alone, or with its machine: then its scripts die too."""
    run_killed(cluster, *MOMENTS[when], scope)
    cleaned = lockstep("chaos", "--clean", "-n", "serving", timeout_s=60)
    assert cleaned.returncode == 0, cleaned.stderr
    assert left(cluster) == []
    again = lockstep("chaos", "--clean", "-n", "serving")
    assert (again.returncode, again.stdout) == (0, "nothing is left of interrupted runs\n")


def test_the_next_run_removes_what_a_killed_one_has_left(lockstep, cluster: Path) -> None:
    run_killed(cluster, "node-drain", "drain n1", "machine")
    assert "cordoned-n1" in left(cluster)
    (cluster / "fault").unlink()
    result = lockstep(*RUN, timeout_s=60)
    assert result.returncode == 0, result.stderr
    assert "left by an interrupted run: node/n1 uncordoned" in result.stderr
    assert left(cluster) == []


def test_a_container_that_is_killed_during_a_cut_removes_its_rules_when_it_is_started_again(
    lockstep, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is cut off then: only its own kubelet can act on it."""
    monkeypatch.setenv("SECONDS_CUT", "60")
    running = subprocess.Popen(
        ["bash", str(scripts() / "node-cut/run.sh")],
        env=os.environ | {"NAMESPACE": "serving", "NODE": "n1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.killpg(wait_for_cut(cluster), signal.SIGKILL)
    _, errors = running.communicate(timeout=20)
    assert (running.returncode, errors) == (1, "the cut of n1 did not run to its end\n")
    assert (cluster / "rules-n1").read_text() == OTHERS_RULES
    assert lockstep("chaos", "--clean", "-n", "serving", timeout_s=60).returncode == 0
    assert left(cluster) == []


def test_a_forced_deletion_in_the_middle_of_a_cut_is_undone_from_the_record(
    lockstep, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container and its pod are gone at once, and with them everything that could have removed the rules."""
    monkeypatch.setenv("SECONDS_CUT", "60")
    run_killed(cluster, "link-cut", "-n lockstep-chaos apply", "machine")
    pid = wait_for_cut(cluster)
    (cluster / f"objects/pod:lockstep-chaos:{CUT}").unlink()
    os.killpg(pid, signal.SIGKILL)
    wait_until(lambda: not (cluster / CONTAINER).exists(), "the container is gone")
    assert "rules-n1" in left(cluster)
    cleaned = lockstep("chaos", "--clean", "-n", "serving", timeout_s=60)
    assert "n1: no rule is left" in cleaned.stdout
    assert left(cluster) == []


def put(cluster: Path, kind: str, namespace: str, name: str, labels: dict[str, str]) -> str:
    """Put an object on the cluster; the name of its file there."""
    (cluster / "objects").mkdir(exist_ok=True)
    file = cluster / "objects" / f"{kind}:{namespace}:{name}"
    file.write_text(json.dumps({"metadata": {"name": name, "labels": labels}}))
    return file.name


def test_a_namespace_that_somebody_else_has_made_is_neither_used_nor_deleted(lockstep, cluster: Path) -> None:
    theirs = put(cluster, "namespace", "", "lockstep-chaos", {"team": "theirs"})
    pod = put(cluster, "pod", "lockstep-chaos", "theirs", {"lockstep.dev/chaos": "lockstep"})
    before = {name: (cluster / "objects" / name).read_text() for name in (theirs, pod)}
    result = lockstep("chaos", "link-cut", "-n", "serving", "--clients", "2", timeout_s=60)
    assert result.returncode == 1
    assert "namespace lockstep-chaos, which experiments make and delete, was not made by them" in result.stderr
    assert lockstep("chaos", "--clean", "-n", "serving", timeout_s=60).returncode == 0
    assert {name: (cluster / "objects" / name).read_text() for name in left(cluster)} == before


def test_the_cut_of_another_release_of_the_same_name_is_not_touched(lockstep, cluster: Path) -> None:
    namespace = put(cluster, "namespace", "", "lockstep-chaos", {"app.kubernetes.io/managed-by": "lockstep-chaos"})
    labels = {"lockstep.dev/chaos": "lockstep", "lockstep.dev/release-namespace": "staging"}
    theirs = put(cluster, "pod", "lockstep-chaos", "cut-1-n1", labels)
    own = labels | {"lockstep.dev/release-namespace": "serving"}
    put(cluster, "pod", "lockstep-chaos", CUT, own)
    assert lockstep("chaos", "--clean", "-n", "serving", timeout_s=60).returncode == 0
    assert left(cluster) == [namespace, theirs]


def test_upgrades_after_the_experiments_are_not_rolled_back(lockstep, cluster: Path) -> None:
    run_killed(cluster, *MOMENTS["the release is upgraded"], "machine")
    (cluster / "helm").write_text(json.dumps([8, 8]))
    cleaned = lockstep("chaos", "--clean", "-n", "serving", timeout_s=60)
    assert cleaned.returncode == 0, cleaned.stderr
    assert "revision 8 is newer than the experiment's: not rolled back" in cleaned.stdout
    assert json.loads((cluster / "helm").read_text()) == [8, 8]
    assert lockstep("chaos", "--clean", "-n", "serving").stdout == "nothing is left of interrupted runs\n"


def test_a_rollback_that_was_broken_off_is_made_again(lockstep, cluster: Path) -> None:
    run_killed(cluster, *MOMENTS["the release is upgraded"], "machine")
    (cluster / "helm").write_text(json.dumps([3, 2]))
    (cluster / "helm_status").write_text("pending-rollback")
    cleaned = lockstep("chaos", "--clean", "-n", "serving", timeout_s=60)
    assert "rolled back to revision 1" in cleaned.stdout, cleaned.stderr
    assert left(cluster) == []


def test_the_record_of_a_release_that_is_gone_is_removed(lockstep, cluster: Path) -> None:
    run_killed(cluster, *MOMENTS["the release is upgraded"], "machine")
    (cluster / "bin/helm").write_text("#!/bin/sh\necho 'Error: release: not found' >&2\nexit 1\n")
    cleaned = lockstep("chaos", "--clean", "-n", "serving", timeout_s=60)
    assert cleaned.returncode == 0, cleaned.stderr
    assert "release lockstep is gone\n" in cleaned.stdout
    assert lockstep("chaos", "--clean", "-n", "serving").stdout == "nothing is left of interrupted runs\n"


@pytest.mark.parametrize(
    ("when", "program", "question"),
    [("the node is drained", "kubectl", "get node n1"), ("the release is upgraded", "helm", "status")],
)
def test_what_cannot_be_asked_now_stays_in_the_record(
    lockstep, cluster: Path, when: str, program: str, question: str
) -> None:
    run_killed(cluster, *MOMENTS[when], "machine")
    script = cluster / "bin" / program
    works = script.read_text()
    script.write_text(works.replace("exec", f'case "$*" in *"{question}"*) exit 1 ;; esac\nexec'))
    assert lockstep("chaos", "--clean", "-n", "serving", timeout_s=60).returncode == 1
    script.write_text(works)
    assert lockstep("chaos", "--clean", "-n", "serving", timeout_s=60).returncode == 0
    assert left(cluster) == []
