"""Experiments without a cluster: victims, excuses, detection, outcomes, and a whole run against a scripted kubectl."""

import base64
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from lockstep_tools.chaos.experiments import EXPERIMENTS, Breaks, Victim, scripts
from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.laboratory import Laboratory
from lockstep_tools.chaos.outcome import assign, conclude
from lockstep_tools.chaos.release import ROUTER, WORKER, Pod, Release
from lockstep_tools.chaos.trial import Trial, Victims, burst_report, choose, noticed_s
from lockstep_tools.failure import CommandError
from lockstep_tools.load.endpoint import Piece
from lockstep_tools.load.history import History, StreamRequest
from scripted_cluster import left

FAULT_S = 1000.0


def pod(name: str, node: str, component: str = WORKER) -> Pod:
    return Pod(name, component, node, ready=True, restarts=0, leaving=False, uid=name)


PODS = [pod("w0", "n1"), pod("w1", "n2"), pod("r-a", "n1", ROUTER), pod("r-b", "n2", ROUTER)]


def stream(began_s: float, ended_s: float, router: str | None = "r-a", error: str | None = None, **more) -> History:
    """Three tokens, the last one at the end."""
    times = (began_s + 0.1, began_s + 0.2, ended_s)
    pieces = [Piece(at_s, f":{n}", 0, "x") for n, at_s in enumerate(times, start=1)]
    if error is None:
        pieces[-1] = Piece(ended_s, ":3", 0, "x", finish="length")
        pieces += [Piece(ended_s, ":3", usage={"completion_tokens": 3}), Piece(ended_s, ":3", done=True)]
    else:
        del pieces[-1]
    request = StreamRequest("", {"stream_options": {"include_usage": True}})
    return History(
        request, started_s=began_s, ended_s=ended_s, pieces=pieces, error=error, router=router, **{"status": 200} | more
    )


UNDISTURBED = [stream(1.0, 2.0)]


def trial(name: str, **more) -> Trial:
    victims = Victims(workers=["w0"], routers=["r-a"], node="n1")
    return Trial(EXPERIMENTS[name], victims, FAULT_S, recovered_s=FAULT_S + 10, **more)


def test_victims_take_turns() -> None:
    names = [choose(EXPERIMENTS["rank-kill"], PODS, number, "n1").workers for number in range(3)]
    assert names == [["w0"], ["w1"], ["w0"]]
    links = [choose(EXPERIMENTS["link-cut"], PODS, number, "n1") for number in range(4)]
    assert len({(link.workers[0], link.routers[0]) for link in links}) == 4


def test_the_node_of_the_load_is_never_disturbed() -> None:
    assert choose(EXPERIMENTS["node-cut"], PODS, 0, "n1") == Victims(["w1"], ["r-b"], "n2")
    assert choose(EXPERIMENTS["node-drain"], PODS, 5, "n2") == Victims(["w0"], ["r-a"], "n1")


@pytest.mark.parametrize("moved", ["w1", "r-b"])
def test_a_node_with_the_only_worker_or_router_is_not_cut_off(moved: str) -> None:
    crowded = [pod(each.name, "n1" if each.name == moved else each.node, each.component) for each in PODS]
    with pytest.raises(CommandError, match="no node can be disturbed"):
        choose(EXPERIMENTS["node-cut"], crowded, 0, "n2")


def test_every_experiment_has_a_script_and_a_readme() -> None:
    for experiment in EXPERIMENTS.values():
        script = scripts() / experiment.name / "run.sh"
        assert os.access(script, os.X_OK)
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
        readme = (script.parent / "README.md").read_text()
        for heading in ("## What it does", "## What to watch", "## What is expected"):
            assert heading in readme, (experiment.name, heading)
    assert {path.parent.name for path in scripts().glob("*/run.sh")} == {*EXPERIMENTS, "load", "clean"}


@pytest.mark.parametrize(
    ("name", "history", "excused"),
    [
        ("router-kill", stream(999, 1001, error="broke"), True),
        ("router-kill", stream(999, 1001, "r-b", error="broke"), False),
        ("router-kill", stream(999, 1001, None, error="broke", status=None), True),
        ("router-kill", stream(1004, 1005, None, error="broke", status=None), False),
        ("router-kill", stream(1001, 1002, None, error="refused", status=None, connect_failures=3), False),
        ("node-cut", stream(999, 1030, error="silent"), True),
        ("node-cut", stream(999, 1030, "r-b", error="silent"), False),
        ("node-cut", stream(1001, 1007, None, error="unreachable", status=None, connect_failures=3), True),
        ("node-cut", stream(1011, 1017, None, error="unreachable", status=None, connect_failures=3), False),
        ("rank-kill", stream(999, 1001, error="broke"), False),
        ("rank-kill", stream(999, 1001, error="busy", status=503, retry_after="1"), False),
        ("fill-queue", stream(999, 1001, error="busy", status=503, retry_after="1"), True),
        ("fill-queue", stream(999, 1001, error="busy", status=429, retry_after="1"), True),
        ("fill-queue", stream(999, 1001, error="busy", status=503), False),
        ("fill-queue", stream(999, 1001, error="bug", status=500), False),
    ],
)
def test_only_what_the_fault_itself_breaks_is_excused(name: str, history: History, excused: bool) -> None:
    comparison = conclude(EXPERIMENTS[name], [trial(name, histories=[history])], UNDISTURBED, 1.0).comparison
    assert comparison.excused.total() == excused
    assert comparison.failed == (not excused)


def test_a_router_takes_requests_until_its_streams_break() -> None:
    """On a slow machine that is long after the signal; requests that came later are not excused."""
    broken = [stream(999, 1006, error="broke"), stream(999, 1020, error="silent")]
    unanswered = [stream(at, 1009, None, error="broke", status=None) for at in (1005, 1008)]
    trials = [trial("router-kill", histories=[*broken, *unanswered])]
    comparison = conclude(EXPERIMENTS["router-kill"], trials, UNDISTURBED, 1.0).comparison
    assert (comparison.excused.total(), comparison.failed) == (3, 1)


def test_streams_belong_to_the_fault_before_their_end() -> None:
    first, second = trial("rank-kill"), trial("rank-kill")
    second.fault_s = FAULT_S + 100
    ended = [stream(990, 999), stream(999, 1001), stream(1090, 1101)]
    assert assign([second, first], ended) == ended[:1]
    assert (first.histories, second.histories) == (ended[1:2], ended[2:])


def test_silences_are_those_of_streams_that_lived_through_the_trial() -> None:
    made = trial("rank-kill", histories=[stream(999, 1003), stream(1002, 1003), stream(1020, 1090)])
    assert made.silences_s() == pytest.approx([3.8, 0.8])
    assert made.first_tokens_s() == pytest.approx([0.1])
    outcome = conclude(EXPERIMENTS["rank-kill"], [made], UNDISTURBED, 1.0)
    assert (outcome.comparison.holds, outcome.in_time, outcome.holds) == (True, False, False)
    assert conclude(EXPERIMENTS["rank-kill"], [made], UNDISTURBED, 4.0).holds


def test_a_fault_without_a_stream_is_no_success() -> None:
    measured, empty = trial("rank-kill", histories=[stream(999, 1001)]), trial("rank-kill")
    assert conclude(EXPERIMENTS["rank-kill"], [measured], UNDISTURBED, 1.0).problems == []
    outcome = conclude(EXPERIMENTS["rank-kill"], [measured, empty], UNDISTURBED, 1.0)
    assert (outcome.holds, outcome.problems) == (False, ["nothing was measured: no stream ended after the fault"])
    broken = trial("router-kill", histories=[stream(999, 1001, error="broke")])
    outcome = conclude(EXPERIMENTS["router-kill"], [broken], UNDISTURBED, 1.0)
    assert (outcome.comparison.holds, outcome.holds) == (True, False)
    assert "nothing was measured: no stream ran between" in outcome.problems[0]


@pytest.mark.parametrize(
    ("name", "noticed", "holds"),
    [
        ("link-cut", {}, False),
        ("node-cut", {}, False),
        ("link-cut", {"detected_s": FAULT_S + 1.6}, True),
        ("node-cut", {"reported": True}, True),
        ("node-drain", {}, True),
        ("redis-kill", {}, True),
    ],
)
def test_a_cut_that_no_router_notices_is_no_success(name: str, noticed: dict, holds: bool) -> None:
    made = trial(name, histories=[stream(999.5, 1000.5, "r-b")], **noticed)
    outcome = conclude(EXPERIMENTS[name], [made], UNDISTURBED, 1.0)
    assert outcome.holds is holds
    assert [problem.partition(":")[0] for problem in outcome.problems] == (
        [] if holds else ["no router noticed the fault"]
    )


@pytest.mark.parametrize("name", ["link-cut", "node-cut"])
def test_a_cut_says_how_many_packets_it_dropped_and_fails_without_any(cluster: Path, name: str) -> None:
    def cut() -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"NAMESPACE": "serving", "WORKER": "w-0", "ROUTER": "r-a"}
        command = ["bash", scripts() / name / "run.sh"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    well = cut()
    assert (well.returncode, well.stderr) == (0, "")
    assert [line.split()[0] for line in well.stdout.splitlines()] == ["fault", "dropped", "joined"]
    assert "dropped 12 packets" in well.stdout
    (cluster / "flaw").write_text("bypassed")
    bypassed = cut()
    assert (bypassed.returncode, bypassed.stderr.startswith("the cut of n1 dropped no packet: ")) == (1, True)
    assert not any(each.startswith(("rules", "container", "pod")) for each in left(cluster))


def test_the_silence_of_a_victim_router_is_not_counted() -> None:
    made = trial("router-kill", histories=[stream(999, 1009), stream(999, 1001, "r-b")])
    assert made.silences_s() == pytest.approx([1.8])


def test_detection_is_the_first_stream_that_leaves_a_victim() -> None:
    entry = {"time": "1970-01-01T00:16:40.250Z", "message": "stream leaves worker", "worker": "w0"}
    assert noticed_s(json.dumps(entry), {"w0"}) == 1000.25
    assert noticed_s(json.dumps(entry), set()) == 1000.25
    assert noticed_s(json.dumps(entry), {"w1"}) is None
    assert noticed_s(json.dumps(entry | {"message": "request"}), {"w0"}) is None
    assert noticed_s("no json", {"w0"}) is None


BURST = {"failed": 2, "refusals": {"503, Retry-After": 2}, "errors": {"busy": 2}, "violations": []}


@pytest.mark.parametrize(
    ("burst", "problem"),
    [
        (BURST, None),
        (None, "reported nothing"),
        (BURST | {"failed": 0, "refusals": {}}, "never full"),
        (BURST | {"failed": 3}, "3 requests failed, 2 of them refused"),
        (BURST | {"refusals": {"503, no Retry-After": 2}}, "got 503, no Retry-After"),
        (BURST | {"violations": ["request 1: 0 end marks"]}, "0 end marks"),
    ],
)
def test_an_overload_must_refuse_with_retry_after_and_serve_the_rest(burst, problem: str | None) -> None:
    outcome = conclude(EXPERIMENTS["fill-queue"], [trial("fill-queue", burst=burst)], UNDISTURBED, 1.0)
    assert outcome.holds is (problem is None)
    assert problem is None or any(problem in each for each in outcome.problems)


@pytest.mark.parametrize("line", ["", "Killed", "[1]", "3"])
def test_a_burst_that_was_killed_has_no_report(line: str) -> None:
    assert burst_report(line) is None
    assert burst_report(json.dumps(BURST)) == BURST


class Listed:
    """A kubectl that lists pods."""

    namespace = "serving"

    def __init__(self, *pods: tuple[str, str, str]) -> None:
        self._pods = pods

    def json(self, *_: str) -> dict:
        return {"items": [self._item(*each) for each in self._pods]}

    @staticmethod
    def _item(name: str, component: str, phase: str) -> dict:
        metadata = {"name": name, "uid": name, "labels": {"app.kubernetes.io/component": component}}
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        return {"metadata": metadata, "spec": {}, "status": {"phase": phase, "conditions": [ready]}}


def test_evicted_pods_do_not_keep_a_release_from_being_ready() -> None:
    pods = [("w-0", WORKER, "Running"), ("r-a", ROUTER, "Running"), ("r-old", ROUTER, "Failed")]
    assert [each.name for each in Release("lockstep", Listed(*pods)).ready_pods()] == ["w-0", "r-a"]
    with pytest.raises(CommandError, match="not ready: r-b"):
        Release("lockstep", Listed(*pods, ("r-b", ROUTER, "Pending"))).ready_pods()


def test_a_release_is_settled_whatever_other_charts_run_in_it(cluster: Path) -> None:
    """An umbrella chart may have a database with the same label of the release. Its pods are not counted."""
    release = Release("lockstep", Kubectl("serving"))
    assert {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in release.controllers()} == {
        WORKER,
        ROUTER,
    }
    assert release.is_settled()


@pytest.mark.parametrize(("there", "missing"), [(ROUTER, WORKER), (WORKER, ROUTER)])
def test_a_release_without_workers_or_routers_is_refused(there: str, missing: str) -> None:
    laboratory = Laboratory(Release("lockstep", Listed(("a", there, "Running"))))
    with pytest.raises(CommandError, match=f"release lockstep has no {missing}"), laboratory:
        pass


def test_an_outcome_is_plain_data() -> None:
    outcome = conclude(EXPERIMENTS["rank-kill"], [trial("rank-kill", histories=[stream(999, 1001)])], UNDISTURBED, 1.0)
    printed = json.loads(json.dumps(outcome.as_json()))
    assert (printed["experiment"], printed["trials"], printed["recovery_ms"]["max"]) == ("rank-kill", 1, 10000.0)


def test_what_may_break_is_what_the_script_kills() -> None:
    for experiment in EXPERIMENTS.values():
        if experiment.breaks is not Breaks.NONE:
            assert experiment.victim in (Victim.ROUTER, Victim.NODE)


def test_a_command_that_cannot_be_done_is_refused(lockstep, cluster: Path) -> None:
    nameless = lockstep("chaos")
    assert (nameless.returncode, "name an experiment" in nameless.stderr) == (2, True)
    unknown = lockstep("chaos", "earthquake")
    assert (unknown.returncode, "no experiment 'earthquake'" in unknown.stderr) == (2, True)
    nobody = lockstep("chaos", "rank-kill", "-n", "nowhere")
    assert (nobody.returncode, nobody.stderr) == (2, "lockstep: no release lockstep in namespace nowhere\n")
    (cluster / "bin/kubectl").write_text("#!/bin/sh\necho 'the server is gone' >&2\nexit 1\n")
    gone = lockstep("chaos", "rank-kill")
    assert (gone.returncode, gone.stderr) == (1, "lockstep: kubectl get: the server is gone\n")


def test_a_release_that_is_not_ready_is_left_alone(lockstep, cluster: Path) -> None:
    (cluster / "flaw").write_text("not ready")
    result = lockstep("chaos", "rank-kill", "-n", "serving")
    assert (result.returncode, result.stderr) == (1, "lockstep: not ready: w-0\n")


RUN = ("chaos", "rank-kill", "-n", "serving", "--clients", "2", "--json")


def test_an_experiment_from_its_load_to_its_outcome(lockstep, cluster: Path) -> None:
    result = lockstep(*RUN, timeout_s=60)
    assert result.returncode == 0, result.stderr
    (outcome,) = json.loads(result.stdout)
    assert (outcome["trials"], outcome["holds"], outcome["victims"][0]["workers"]) == (1, True, ["w-0"])
    assert outcome["comparison"]["streams"] > 2
    assert 0 <= outcome["detection_ms"]["max"] < outcome["recovery_ms"]["max"] < 20_000
    assert "rank-kill 1/1 (w-0): recovered after" in result.stderr
    load = (cluster / "applied-lockstep-load").read_text()
    for line in ("image: registry/lockstep/tools:1", '"--clients=2"', "runAsNonRoot: true"):
        assert line in load
    assert "ca-file" not in load
    assert left(cluster) == []


def test_the_load_gets_its_key_from_a_secret_that_ends_with_its_pod(lockstep, cluster: Path) -> None:
    (cluster / "key").write_text("sk-lockstep-secret\n")
    result = lockstep(*RUN, "--resume", "--api-key-file", str(cluster / "key"), timeout_s=60)
    assert result.returncode == 0, result.stderr
    secret = yaml.safe_load((cluster / "applied-secret-lockstep-load").read_text())
    assert base64.b64decode(secret["data"]["api-key"]) == b"sk-lockstep-secret"
    (owner,) = secret["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Pod", "lockstep-load")
    assert owner["uid"]
    (container,) = yaml.safe_load((cluster / "applied-lockstep-load").read_text())["spec"]["containers"]
    reference = {"name": "lockstep-load", "key": "api-key"}
    assert "--resume" in container["args"]
    assert container["env"] == [{"name": "LOCKSTEP_API_KEY", "valueFrom": {"secretKeyRef": reference}}]
    assert "sk-lockstep-secret" not in result.stdout + result.stderr
    assert left(cluster) == []


@pytest.mark.parametrize("content", [None, "", "two\nlines", "é"])
def test_a_key_file_without_a_key_is_refused(lockstep, cluster: Path, content: str | None) -> None:
    if content is not None:
        (cluster / "key").write_text(content)
    result = lockstep(*RUN, "--api-key-file", str(cluster / "key"))
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "--api-key-file" in result.stderr


def test_the_load_asks_a_release_with_tls_by_the_name_in_its_certificate(lockstep, cluster: Path) -> None:
    (cluster / "flaw").write_text("TLS")
    result = lockstep(*RUN, timeout_s=60)
    assert result.returncode == 0, result.stderr
    spec = yaml.safe_load((cluster / "applied-lockstep-load").read_text())["spec"]
    assert spec["hostAliases"] == [{"ip": "10.96.0.1", "hostnames": ["lockstep-router.serving.svc"]}]
    (container,) = spec["containers"]
    urls = ["--url=https://lockstep-router.serving.svc:8000/v1", "--management-url=https://10.96.0.1:8000"]
    files = ["--ca-file=/etc/lockstep-tls/ca.crt", "--client-cert=/etc/lockstep-tls/tls.crt"]
    assert set(urls + files) < set(container["args"])
    own, http = spec["volumes"][1]["projected"]["sources"]
    assert own == {"secret": {"name": "lockstep-router-tls"}}
    assert http["secret"]["name"] == "lockstep-router-tls"
    assert left(cluster) == []


def test_the_load_asks_at_an_ipv6_address(lockstep, cluster: Path) -> None:
    (cluster / "flaw").write_text("IPV6")
    result = lockstep(*RUN, timeout_s=60)
    assert result.returncode == 0, result.stderr
    spec = yaml.safe_load((cluster / "applied-lockstep-load").read_text())["spec"]
    assert spec["hostAliases"] == [{"ip": "fd00:10:96::1", "hostnames": ["lockstep-router.serving.svc"]}]
    assert "--management-url=http://[fd00:10:96::1]:8000" in spec["containers"][0]["args"]


def drain(cluster: Path, **variables: str) -> tuple[str, str]:
    """Run the script of `node-drain` for node n1; what it labels, and what it drains."""
    environment = os.environ | {"NAMESPACE": "serving", "WORKER": "w-0", "NODE": "n1"} | variables
    subprocess.run([scripts() / "node-drain/run.sh"], env=environment, check=True, timeout=60)
    assert not list(cluster.glob("cordoned-*"))
    labelled = cluster / "labelled"
    return labelled.read_text() if labelled.exists() else "", (cluster / "drained").read_text()


def test_a_node_is_drained_of_the_pods_of_this_release_alone(cluster: Path) -> None:
    """`kubectl drain` selects pods in all namespaces, and a release of the same name may be in another one."""
    labelled, drained = drain(cluster)
    assert labelled.startswith("serving pods -l app.kubernetes.io/instance=lockstep,")
    label = labelled.rpartition(" ")[2]
    assert re.fullmatch(r"lockstep\.dev/drained=[0-9]+", label)
    assert drained.endswith(f"--pod-selector={label}")


def test_a_node_is_drained_of_all_pods_on_demand(cluster: Path) -> None:
    labelled, drained = drain(cluster, SELECTOR="")
    assert (labelled, drained.rpartition(" ")[2]) == ("", "--pod-selector=")


def test_a_changed_stream_fails_the_experiment_and_is_shown(lockstep, cluster: Path) -> None:
    (cluster / "flaw").write_text("changed")
    result = lockstep(*RUN[:-1], timeout_s=60)
    assert result.returncode == 1
    assert "from token 2 on the text is not that of the undisturbed stream" in result.stdout
    assert "rank-kill" in result.stdout


def test_a_script_that_cannot_make_its_fault_ends_the_run(lockstep, cluster: Path) -> None:
    (cluster / "flaw").write_text("no rank")
    result = lockstep(*RUN, timeout_s=60)
    assert result.returncode == 1
    assert result.stderr.endswith("rank-kill/run.sh failed: no rank runs in this pod\n")
    assert left(cluster) == []


def test_what_was_found_before_an_interruption_is_shown(lockstep, cluster: Path) -> None:
    """The second trial fails: its worker does not exist."""
    result = lockstep(*RUN, "--times", "2", timeout_s=60)
    assert result.returncode == 1
    (outcome,) = json.loads(result.stdout)
    assert (outcome["trials"], outcome["holds"]) == (1, True)
    assert "rank-kill/run.sh failed" in result.stderr
