"""The commands of docs/runbooks, run as they are written but for local ports and the namespace's name. Pods that alerts
name are any ones here.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from string import Template

from lockstep_tools.chaos.kubectl import Kubectl
from lockstep_tools.chaos.release import ROUTER, STATE

BOOKS = Path(__file__).parents[2] / "docs/runbooks"
NOT_HERE = (
    "nvidia-smi",
    "kubectl get certificates",
    "kubectl describe certificates",
    "kubectl get servicemonitors",
    "--previous",
)
"""What is in commands that need a GPU, cert-manager, the Prometheus operator or a container that was restarted."""

_LOOK = re.compile(r"^## Look\n+```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FORWARD = re.compile(r"kubectl port-forward (\S+) (\d+) &")
_DEADLINE_S = 60


def commands() -> list[str]:
    """What runbooks look with, each command once."""
    looks = [_LOOK.search(path.read_text()) for path in sorted(BOOKS.glob("Lockstep*.md"))]
    return list(dict.fromkeys(line for look in looks if look for line in look[1].splitlines()))


class Shell:
    """Runs commands in a release's namespace."""

    def __init__(self, kubectl: Kubectl, environment: dict[str, str], ports: dict[str, str]) -> None:
        self._kubectl = kubectl
        self._environment = environment
        self._ports = ports

    def complaint(self, line: str) -> str:
        """Why a command does not do what it is for; empty: it does. A search may find nothing."""
        line = line.replace("serviceaccount:serving:", f"serviceaccount:{self._kubectl.namespace}:")
        for port, local in self._ports.items():
            line = line.replace(f"localhost:{port}", f"localhost:{local}")
        if line.startswith("lockstep status"):
            line += f" --url http://localhost:{self._ports['8001']}"
        done = subprocess.run(
            ["bash", "-c", f'{line}; echo "${{PIPESTATUS[*]}}" >&2'],
            env=self._environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False,
        )  # fmt: skip
        first, *search = done.stderr.splitlines()[-1].split()
        return "" if first == "0" and set(search) <= {"0", "1"} else f"{line}: {done.stderr}{done.stdout[-500:]}"


@contextmanager
def shell(kubectl: Kubectl, lines: list[str], directory: Path) -> Iterator[Shell]:
    """With the namespace as the default one, and with the forwarded ports of these commands."""
    config = directory / "kubeconfig"
    config.write_text(kubectl.run("config", "view", "--raw"))
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    named = {"ROUTER": _any_pod(kubectl, ROUTER), "STATE": _any_pod(kubectl, STATE)}
    environment = os.environ | {"KUBECONFIG": str(config), "PATH": programs} | named
    chosen = ["kubectl", "config", "set-context", "--current", f"--namespace={kubectl.namespace}"]
    subprocess.run(chosen, env=environment, check=True, capture_output=True, timeout=_DEADLINE_S)
    with ExitStack() as held:
        forwards = [match.groups() for match in map(_FORWARD.fullmatch, lines) if match]
        ports = {
            port: held.enter_context(_forwarded(kubectl, Template(target).substitute(named), port))
            for target, port in forwards
        }
        yield Shell(kubectl, environment, ports)


def _any_pod(kubectl: Kubectl, component: str) -> str:
    pods = kubectl.json("get", "pods", "-l", f"app.kubernetes.io/component={component}")["items"]
    name: str = pods[0]["metadata"]["name"]
    return name


@contextmanager
def _forwarded(kubectl: Kubectl, target: str, port: str) -> Iterator[str]:
    """A port of a pod or a Service, at any free local one."""
    with kubectl.start("port-forward", target, f":{port}", "--address=127.0.0.1") as process:
        try:
            assert process.stdout is not None
            forwarded = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert forwarded, f"kubectl port-forward {target} {port} has failed"
            yield forwarded[1]
        finally:
            process.kill()
