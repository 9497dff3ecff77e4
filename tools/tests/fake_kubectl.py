#!/usr/bin/env python3
"""`kubectl`, `helm` and `iptables` of a simulated cluster: python fake_kubectl.py PROGRAM ARGUMENT...

The cluster is a directory, FAKE_CLUSTER: objects as JSON files, iptables rules of each node, logs. It has a release
with two workers and two routers, a load that streams, and a worker that comes back when a rank is killed. A pod whose
command is a shell on the node really runs it, with these iptables, and restarts it when it fails, as a kubelet does.

These programs are started a hundred times in a test: without the installed packages (`python -S -E`), and what only
some commands use is imported by those.

A test writes two files there. `flaw` names the fault. `kill_at` is a part of a command line: a command that contains it
kills, when it has ended, the `lockstep` that it runs for, alone or with all its scripts (`kill_scope`: process,
machine).
"""

import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_CLUSTER"])
OBJECTS = STATE / "objects"
CLIENTS, UNDISTURBED, CHANGED = 2, 3, 20
ROUTERS = ("r-a", "r-b")
VICTIM = "w-0"
CHAOS = "lockstep-chaos"
MOST_RESTARTS = 3


def flaw() -> str:
    return (STATE / "flaw").read_text() if (STATE / "flaw").exists() else ""


def pod(name: str, component: str, node: str) -> dict:
    return {
        "metadata": {
            "name": name,
            "namespace": "serving",
            "uid": name,
            "labels": {"app.kubernetes.io/component": component, "app.kubernetes.io/instance": "lockstep"},
        },
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.0.{len(name)}",
            "conditions": [{"type": "Ready", "status": "False" if unready(name) else "True"}],
        },
    }


def unready(name: str) -> bool:
    return name == VICTIM and flaw() == "not ready"


PODS = [pod("w-0", "inference-worker", "n1"), pod("w-1", "inference-worker", "n2")]
PODS += [pod("r-a", "router", "n1"), pod("r-b", "router", "n2")]
NODES = ("n1", "n2")


def controller(component: str) -> dict:
    labels = {"app.kubernetes.io/component": component, "app.kubernetes.io/instance": "lockstep"}
    status = {"observedGeneration": 1, "readyReplicas": 2, "updatedReplicas": 2}
    return {"metadata": {"generation": 1, "labels": labels}, "spec": {"replicas": 2}, "status": status}


CONTROLLERS = [controller("inference-worker"), controller("router"), controller("not of Lockstep's chart")]


# Objects that commands create, by kind, namespace and name.


def path_of(kind: str, namespace: str, name: str) -> Path:
    return OBJECTS / f"{kind}:{namespace}:{name}"


def stored(kind: str, namespace: str) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(OBJECTS.glob(f"{kind}:{namespace}:*"))]


def store(kind: str, namespace: str, value: dict) -> None:
    OBJECTS.mkdir(exist_ok=True)
    value["metadata"].setdefault("namespace", namespace)
    made = path_of(kind, namespace, value["metadata"]["name"])
    fresh = made.with_name(f".{os.getpid()}")
    fresh.write_text(json.dumps(value))
    fresh.rename(made)


def fail(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(1)


# The load in its pod.


def say(**entry: object) -> None:
    print(json.dumps(entry), flush=True)


def stream(kind: str, number: int, client: int, mark: str) -> None:
    """A stream of two tokens that took a tenth of a second and has just ended."""
    now = time.time()
    done = [100.0, 2, None, 0, None, None, None, {"completion_tokens": 2}, True]
    pieces = [[50.0, 1, 0, 1, "aa", 1], [100.0, 2, 0, 1, mark, 1, "length"], done]
    rest = dict.fromkeys(("error", "retry_after")) | {"cancelled": False, "status": 200, "connect_failures": 0}
    say(kind=kind, number=number, client=client, began=now - 0.1, ended=now, router="r-a", pieces=pieces, **rest)


def report_status(epoch: int, state: str = "ready") -> None:
    for router in ROUTERS:
        say(kind="status", at=time.time(), router=router, workers={"w-0": [state, 1, epoch], "w-1": ["ready", 1, 1]})
        time.sleep(0.002)  # no two lines have the same time


def follow() -> None:
    """The load's log: undisturbed streams, then load until stopped, with the worker's new life after the fault."""
    for number in range(UNDISTURBED):
        stream("undisturbed", number, 0, "bb")
    report_status(1)
    number, first = 0, None  # the first stream after the fault
    while not (STATE / "stop").exists() and path_of("pod", "serving", "lockstep-load").exists():
        if first is None and (STATE / "fault").exists():
            first = number
            report_status(1, "restarting")
            time.sleep(0.1)  # later than the router's log line about it
            report_status(2)
        for client in range(CLIENTS):
            changed = first is not None and number < first + CHANGED and flaw() == "changed"
            stream("stream", number, client, "cc" if changed else "bb")
            number += 1
        time.sleep(0.02)
    say(kind="summary", holds=True)


# kubectl.


def get(namespace: str, arguments: list[str]) -> None:
    kind, names = arguments[0], [each for each in arguments[1:2] if not each.startswith("-")]
    output = arguments[arguments.index("-o") + 1] if "-o" in arguments else ""
    label = arguments[arguments.index("-l") + 1] if "-l" in arguments else ""
    if kind in ("pods", "pod"):
        everywhere = "--all-namespaces" in arguments
        found = stored("pod", "*" if everywhere else namespace) + (PODS if everywhere or namespace == "serving" else [])
        if "--field-selector" in arguments:
            node = arguments[arguments.index("--field-selector") + 1].removeprefix("spec.nodeName=")
            found = [each for each in found if each["spec"]["nodeName"] == node]
        found = [each for each in found if all(matches(each["metadata"]["labels"], term) for term in terms(label))]
    elif kind == "node":
        found = [{"metadata": {"name": name}, "unschedulable": (STATE / f"cordoned-{name}").exists()} for name in NODES]
    elif kind in ("configmap", "namespace"):
        found = stored(kind, namespace if kind == "configmap" else "")
    else:
        found = [
            each for each in CONTROLLERS if all(matches(each["metadata"]["labels"], term) for term in terms(label))
        ]
    if names:
        found = [each for each in found if each["metadata"]["name"] == names[0]]
        if not found:
            if "--ignore-not-found" not in arguments:
                fail(f'{kind} "{names[0]}" not found')
            return
    show(kind, found, output)


def terms(selector: str) -> list[str]:
    """`a=b,c in (d,e),f` by its commas outside of parentheses."""
    return [each for each in re.split(r",(?![^(]*\))", selector) if each]


def matches(labels: dict[str, str], term: str) -> bool:
    if (listed := re.fullmatch(r"(\S+) in \((.*)\)", term)) is not None:
        return labels.get(listed[1]) in listed[2].split(",")
    name, equal, value = term.partition("=")
    if name.endswith("!"):
        return labels.get(name[:-1]) != value
    return labels.get(name) == value if equal else name in labels


def show(kind: str, found: list[dict], output: str) -> None:
    """What `-o OUTPUT` prints, for the outputs that scripts and commands ask for."""
    if output == "name":
        print("\n".join(f"{kind.rstrip('s')}/{each['metadata']['name']}" for each in found))
    elif output == "json":
        print(json.dumps({"items": found} if kind in ("pods", "statefulsets,deployments") else found[0]))
    elif output.startswith("go-template"):
        print("\n".join(f"{key} {value}" for each in found for key, value in each.get("data", {}).items()))
    elif "range .items" in output:
        print("\n".join(f"{each['metadata']['name']} True" for each in found))
    elif "clusterIP" in output:
        scheme = "https" if flaw() == "TLS" else "http"
        address = "fd00:10:96::1" if flaw() == "IPV6" else "10.96.0.1"
        print(f"{scheme} lockstep-router.serving.svc {address} 8000")
    elif "managed-by" in output:
        for each in found:
            print(each["metadata"]["name"], each["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by", ""))
    else:
        (one,) = found
        fields = {
            ".metadata.uid": one["metadata"].get("uid", ""),
            ".status.phase": one.get("status", {}).get("phase", ""),
            ".status.podIP": one.get("status", {}).get("podIP", ""),
            ".spec.nodeName": one.get("spec", {}).get("nodeName", ""),
            ".spec.unschedulable": str(one.get("unschedulable", False)).lower(),
            "image": "registry/lockstep/router:1",
            '"tls"': "lockstep-router-tls" if flaw() == "TLS" else "",
            '"http-tls"': "",
        }
        print(next((value for name, value in fields.items() if name in output), "lockstep"), end="")


def apply(namespace: str, arguments: list[str]) -> None:
    import site  # noqa: PLC0415
    import subprocess  # noqa: PLC0415

    site.main()
    import yaml  # noqa: PLC0415

    text = sys.stdin.read()
    value = yaml.safe_load(text)
    kind = value["kind"].lower()
    value["status"] = {"phase": "Running"}
    if kind == "pod":
        (STATE / f"applied-{value['metadata']['name']}").write_text(text)
        value["spec"].setdefault("nodeName", "n2")
    value["metadata"].setdefault("uid", value["metadata"]["name"])
    if kind == "secret":
        (STATE / f"applied-secret-{value['metadata']['name']}").write_text(text)
    store(kind, namespace if kind in ("pod", "secret") else "", value)
    if value["spec"].get("hostNetwork") if kind == "pod" else False:
        kubelet = [sys.executable, "-S", "-E", __file__, "kubelet", namespace, value["metadata"]["name"]]
        quiet = subprocess.DEVNULL  # it must not hold the pipes of the command, which ends before it
        subprocess.run(kubelet, stdin=quiet, stdout=quiet, stderr=quiet, check=True)
    elif kind == "pod" and value["metadata"]["name"] == "lockstep-burst":
        store("pod", namespace, value | {"status": {"phase": "Failed"}})


def create(namespace: str, arguments: list[str]) -> None:
    if "-f" in arguments:
        value = json.load(sys.stdin)
        if path_of("namespace", "", value["metadata"]["name"]).exists():
            fail(f'namespaces "{value["metadata"]["name"]}" already exists')
        store("namespace", "", value)
        return
    kind, name = arguments[:2]
    value = {"apiVersion": "v1", "kind": kind.capitalize(), "metadata": {"name": name}}
    if "--dry-run=client" in arguments:
        print(json.dumps(value))
    else:
        store(kind, namespace, value)


def label(namespace: str, arguments: list[str]) -> None:
    if arguments[0] == "pods":
        (STATE / "labelled").write_text(" ".join([namespace, *arguments]))
        return
    value = json.load(sys.stdin)
    value["metadata"]["labels"] = dict(each.split("=") for each in arguments if "=" in each)
    print(json.dumps(value))


def patch(namespace: str, arguments: list[str]) -> None:
    (value,) = [each for each in stored("configmap", namespace) if each["metadata"]["name"] == arguments[1]]
    change = json.loads(arguments[-1])
    data = value.get("data", {}) | change["data"]
    value["data"] = {key: each for key, each in data.items() if each is not None}
    store("configmap", namespace, value)


def delete(namespace: str, arguments: list[str]) -> None:
    words = [each for each in arguments if not each.startswith("-")]
    kind, names = words[0].split("/")[0], [words[0].split("/")[1]] if "/" in words[0] else words[1:]
    for name in names:
        made = path_of(kind, "" if kind == "namespace" else namespace, name)
        if kind == "pod" and (running := STATE / f"container-{name}").exists():
            os.kill(int(running.read_text()), signal.SIGTERM)
            while running.exists():
                time.sleep(0.01)
        made.unlink(missing_ok=True)
        if kind == "pod":
            path_of("secret", namespace, name).unlink(missing_ok=True)  # its owner is the pod


def execute(_: str, arguments: list[str]) -> None:
    if arguments[0] == "lockstep-load":
        (STATE / "stop").touch()
        return
    assert arguments[0] == VICTIM
    if flaw() == "no rank":
        fail("no rank runs in this pod")
    print(f"fault {time.time():.9f}")
    (STATE / "fault").touch()


def logs(_: str, arguments: list[str]) -> None:
    if "--follow" in arguments:
        follow()
    elif arguments[0] == "lockstep-burst":
        print(json.dumps({"failed": 1, "errors": {}, "refusals": {"503, Retry-After": 1}, "violations": []}))
    elif (said := STATE / f"logs-{arguments[0]}").exists():
        print(said.read_text(), end="")
    elif (STATE / "fault").exists():
        at_s = (STATE / "fault").stat().st_mtime + 0.03  # the clock of files lags by some ms
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s)) + f".{int(at_s % 1 * 1000):03d}Z"
        say(time=moment, message="stream leaves worker", worker=VICTIM, reason="restarting")


def drain(_: str, arguments: list[str]) -> None:
    (STATE / f"cordoned-{arguments[0]}").touch()
    (STATE / "drained").write_text(" ".join(arguments))
    (STATE / "fault").touch()


def uncordon(_: str, arguments: list[str]) -> None:
    (STATE / f"cordoned-{arguments[0]}").unlink(missing_ok=True)
    print(f"node/{arguments[0]} uncordoned")


VERBS = {
    "get": get, "apply": apply, "create": create, "label": label, "patch": patch, "delete": delete, "exec": execute,
    "logs": logs, "drain": drain, "uncordon": uncordon,
}  # fmt: skip


def kubectl(arguments: list[str]) -> None:
    namespace = "serving"
    if "-n" in arguments:
        at = arguments.index("-n")
        namespace = arguments[at + 1]
        del arguments[at : at + 2]
    VERBS[arguments[0]](namespace, arguments[1:])


def helm(arguments: list[str]) -> None:
    """A release's revision grows with every upgrade and rollback, and its annotation says which one it looks like."""
    revision, like = json.loads((STATE / "helm").read_text()) if (STATE / "helm").exists() else (1, 1)
    if arguments[0] == "status":
        status = STATE / "helm_status"
        print(f"info:\n  status: {status.read_text() if status.exists() else 'deployed'}\nversion: {revision}")
        return
    (STATE / "fault").touch()
    revision += 1
    like = revision if arguments[0] == "upgrade" else int(arguments[2])
    (STATE / "helm").write_text(json.dumps([revision, like]))


# A node.


def kubelet(arguments: list[str]) -> None:
    """Run a pod's container until it succeeds; its output is the pod's log. It is not a child of this process."""
    import subprocess  # noqa: PLC0415

    if os.fork():
        return
    os.setsid()
    namespace, name = arguments
    made = path_of("pod", namespace, name)
    (value,) = [each for each in stored("pod", namespace) if each["metadata"]["name"] == name]
    (container,) = value["spec"]["containers"]
    running = STATE / f"container-{name}"
    for _ in range(MOST_RESTARTS + 1):
        with (STATE / f"logs-{name}").open("w") as out:
            command = [*container["command"][2:], *container["args"]]
            started = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | {"NODE": value["spec"]["nodeName"]},
            )
            running.write_text(str(started.pid))
            code = started.wait()
        if code == 0 or not made.exists():
            break
    running.unlink()
    if made.exists():
        store("pod", namespace, value | {"status": {"phase": "Failed" if code else "Succeeded"}})


def list_chain(rules: list[str], chain: str) -> None:
    """What the rule of a chain, which drops packets, has dropped, as `-L -v -x` prints it."""
    if f"-N {chain}" not in rules:
        fail("iptables: No chain/target/match by that name.")
    packets = 0 if flaw() == "bypassed" else 12
    print("    pkts      bytes target     prot opt in     out     source               destination")
    print(f"{packets:8} {60 * packets:8} DROP       all  --  *      *       0.0.0.0/0            0.0.0.0/0")


def iptables(arguments: list[str]) -> None:
    """Rules of the mangle table, as `-S` prints them."""
    arguments = [each for each in arguments if each not in ("-w", "-n", "-v", "-x", "-t", "mangle")]
    table = STATE / f"rules-{os.environ['NODE']}"
    with (STATE / "xtables.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rules = table.read_text().splitlines()
        action, chain, rest = arguments[0], "".join(arguments[1:2]), " ".join(arguments[2:])
        here = [rule for rule in rules if rule.startswith(f"-A {chain} ")]
        match action:
            case "-S":
                print("\n".join(rules))
            case "-L":
                list_chain(rules, chain)
            case "-N" if f"-N {chain}" in rules:
                fail("iptables: Chain already exists.")
            case "-N":
                rules.append(f"-N {chain}")
            case "-F":
                rules = [rule for rule in rules if rule not in here]
            case "-X" if here or any(rule.endswith(f"-j {chain}") for rule in rules):
                fail("iptables: Too many links.")
            case "-X":
                rules.remove(f"-N {chain}")
            case "-A" | "-I":
                rules.append(f"-A {chain} {rest}")
            case "-D":
                rules.remove(f"-A {chain} {rest}")
        table.write_text("\n".join(rules) + "\n")


def die_if_asked(line: str) -> None:
    """Kill the command that this program runs for, with all that it has started or alone."""
    wanted = STATE / "kill_at"
    if not wanted.exists() or wanted.read_text() not in line:
        return
    import contextlib  # noqa: PLC0415
    import site  # noqa: PLC0415

    site.main()
    import psutil  # noqa: PLC0415

    wanted.unlink()
    scope = (STATE / "kill_scope").read_text()
    parents = psutil.Process().parents()
    (command,) = [each for each in parents if "lockstep_tools.cli" in " ".join(each.cmdline())]
    if scope == "machine":
        for each in [*command.children(recursive=True), command]:
            if each.pid != os.getpid():
                with contextlib.suppress(psutil.NoSuchProcess):  # some have ended by themselves meanwhile
                    each.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    command.kill()


def main() -> None:
    program, *arguments = sys.argv[1:]
    line = f"{program} {' '.join(arguments)}"
    {"kubectl": kubectl, "helm": helm, "iptables": iptables, "kubelet": kubelet}[program](arguments)
    sys.stdout.flush()
    if program in ("kubectl", "helm"):
        die_if_asked(line)


main()
