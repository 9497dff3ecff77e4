#!/usr/bin/env python3
"""A kubectl for a cluster that is not there: a release, a load that streams, a worker that comes back when killed.

Run as `kubectl`; FAKE_CLUSTER names a directory that holds its state between calls. `flaw` in it says what goes wrong.
"""

import json
import os
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_CLUSTER"])
CLIENTS, CALM = 2, 3
ROUTERS = ("r-a", "r-b")
VICTIM = "w-0"


def flaw() -> str:
    return (STATE / "flaw").read_text() if (STATE / "flaw").exists() else ""


def pod(name: str, component: str, node: str) -> dict:
    return {
        "metadata": {"name": name, "uid": name, "labels": {"app.kubernetes.io/component": component}},
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


PODS = [pod("w-0", "inference-worker", "n1"), pod("w-1", "inference-worker", "n2")]
PODS += [pod("r-a", "router", "n1"), pod("r-b", "router", "n2")]
CONTROLLER = {
    "metadata": {"generation": 1},
    "spec": {"replicas": 2},
    "status": {"observedGeneration": 1, "readyReplicas": 2, "updatedReplicas": 2},
}


def say(**entry: object) -> None:
    print(json.dumps(entry), flush=True)


def stream(kind: str, number: int, client: int, mark: str) -> None:
    """A stream of two tokens that took a tenth of a second and has just ended."""
    now = time.time()
    done = [100.0, 2, None, 0, None, None, None, {"completion_tokens": 2}, True]
    pieces = [[50.0, 1, 0, 1, "aa", 1], [100.0, 2, 0, 1, mark, 1, "length"], done]
    rest = dict.fromkeys(("error", "retry_after")) | {"cancelled": False, "status": 200, "connect_failures": 0}
    say(kind=kind, number=number, client=client, began=now - 0.1, ended=now, router="r-a", pieces=pieces, **rest)


def tell_status(epoch: int, state: str = "ready") -> None:
    for router in ROUTERS:
        say(kind="status", at=time.time(), router=router, workers={"w-0": [state, 1, epoch], "w-1": ["ready", 1, 1]})
        time.sleep(0.002)  # no two lines of one moment


def follow() -> None:
    """The load's log: in peace, then streams until told to stop, with the worker's new life after the fault."""
    for number in range(CALM):
        stream("calm", number, 0, "bb")
    tell_status(1)
    number, killed_s = 0, 0.0
    while not (STATE / "stop").exists():
        if not killed_s and (STATE / "fault").exists():
            killed_s = time.time()
            tell_status(1, "restarting")
            time.sleep(0.1)  # later than the router's log line about it
            tell_status(2)
        for client in range(CLIENTS):
            changed = time.time() < killed_s + 0.3 and flaw() == "changed"
            stream("stream", number, client, "cc" if changed else "bb")
            number += 1
        time.sleep(0.02)
    say(kind="summary", holds=True)


def get(arguments: list[str]) -> None:
    kind, output = arguments[0], arguments[-1]
    if output.startswith("jsonpath"):
        print("r-a True" if "range" in output else "registry/lockstep/router:1" if "image" in output else "lockstep")
    elif kind == "pods":
        print(json.dumps({"items": PODS}))
    elif kind == "pod":
        print(json.dumps(pod(arguments[1], "load", "n2")))
    else:
        print(json.dumps({"items": [CONTROLLER, CONTROLLER]}))


def execute(arguments: list[str]) -> None:
    if arguments[0] == "lockstep-load":
        (STATE / "stop").touch()
        return
    assert arguments[0] == VICTIM
    if flaw() == "no rank":
        print("no rank runs in this pod", file=sys.stderr)
        sys.exit(1)
    print(f"fault {time.time():.9f}")
    (STATE / "fault").touch()


def logs(arguments: list[str]) -> None:
    if "--follow" in arguments:
        follow()
        return
    at_s = (STATE / "fault").stat().st_mtime + 0.03  # the clock of files lags by some ms
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s)) + f".{int(at_s % 1 * 1000):03d}Z"
    say(time=moment, message="stream leaves worker", worker=VICTIM, reason="restarting")


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "-n":
        del arguments[:2]
    verb, rest = arguments[0], arguments[1:]
    if verb == "apply":
        (STATE / "applied").write_text(sys.stdin.read())
    elif verb != "delete":
        {"get": get, "exec": execute, "logs": logs}[verb](rest)


main()
