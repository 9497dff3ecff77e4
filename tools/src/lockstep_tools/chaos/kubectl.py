"""`kubectl` as the one way to a cluster.

It is what people have and trust, with every kind of login; what an experiment does can be repeated by hand, word for
word; and no client library has to match the cluster's version.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep_tools.failure import UNUSABLE, CommandError

_TIMEOUT_S = 60.0


class Kubectl:
    """kubectl in one namespace of the cluster that KUBECONFIG names."""

    def __init__(self, namespace: str) -> None:
        if shutil.which("kubectl") is None:
            raise CommandError("kubectl is not installed", UNUSABLE)
        self.namespace = namespace

    def run(self, *arguments: str, stdin: str = "", timeout_s: float = _TIMEOUT_S) -> str:
        """What a command prints.

        Raises:
            CommandError: it failed, or took too long.
        """
        try:
            done = subprocess.run(
                self._command(arguments), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise CommandError(f"kubectl {arguments[0]} has not ended after {timeout_s:g} s") from None
        if done.returncode != 0:
            raise CommandError(f"kubectl {arguments[0]}: {_last_line(done.stderr)}")
        return done.stdout

    def json(self, *arguments: str) -> dict[str, Any]:
        """An object, or a list of them, as Kubernetes tells it."""
        found: dict[str, Any] = json.loads(self.run(*arguments, "-o", "json"))
        return found

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command whose output is read while it runs."""
        return subprocess.Popen(
            self._command(arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return ["kubectl", "-n", self.namespace, *arguments]


def run_script(script: Path, environment: Mapping[str, str], timeout_s: float) -> str:
    """What an experiment's script prints.

    Raises:
        CommandError: it failed, or took too long.
    """
    try:
        done = subprocess.run(
            ["bash", str(script)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{script} has not ended after {timeout_s:g} s") from None
    if done.returncode != 0:
        raise CommandError(f"{script} failed: {_last_line(done.stderr) or _last_line(done.stdout)}")
    return done.stdout


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
