"""Access to a cluster, by `kubectl` alone.

Users have it, and it supports every kind of login. Each command of an experiment can be repeated by hand, and no client
library has to match the cluster's version.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lockstep_tools.failure import UNUSABLE, CommandError

_TIMEOUT_S = 60.0
_UNDO_S = 30.0
_NOTE_CHARS = 4000


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
            failure = CommandError(f"kubectl {arguments[0]}: {_last_line(done.stderr)}")
            # For whoever reads a traceback: a script that fails in a pod may end with the lines of another thread.
            failure.add_note(done.stderr[-_NOTE_CHARS:])
            raise failure
        return done.stdout

    def json(self, *arguments: str) -> dict[str, Any]:
        """An object or a list of objects, as kubectl prints it."""
        found: dict[str, Any] = json.loads(self.run(*arguments, "-o", "json"))
        return found

    def start(self, *arguments: str, errors: IO[str] | None = None) -> subprocess.Popen[str]:
        """A command whose output is read while it runs. Its errors go into a file, or nowhere."""
        return subprocess.Popen(
            self._command(arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if errors is None else errors,
            encoding="utf-8",
            errors="replace",  # lines of other programs may be anything, and those after them are wanted
            bufsize=1,
        )

    def _command(self, arguments: Sequence[str]) -> list[str]:
        return ["kubectl", "-n", self.namespace, *arguments]


def run_script(script: Path, environment: Mapping[str, str], timeout_s: float) -> str:
    """What an experiment's script prints.

    Raises:
        CommandError: it failed, or took too long.
    """
    with subprocess.Popen(
        ["bash", str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment | {"PARENT": str(os.getpid())},
        start_new_session=True,  # Ctrl-C reaches only this process, which lets the script undo what it did
    ) as running:
        try:
            output, errors = running.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end(running)
            raise CommandError(f"{script} has not ended after {timeout_s:g} s") from None
        except BaseException:
            _end(running)
            raise
    if running.returncode != 0:
        raise CommandError(f"{script} failed: {_last_line(errors) or _last_line(output)}")
    return output


def _end(running: subprocess.Popen[str]) -> None:
    """End a script with what it has started; its EXIT trap has `_UNDO_S` to undo what it did."""
    os.killpg(running.pid, signal.SIGTERM)
    try:
        running.communicate(timeout=_UNDO_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def _last_line(text: str) -> str:
    """What a command said last. After that of a command in a pod, kubectl has a line of its own."""
    lines = text.strip().splitlines()
    if len(lines) > 1 and lines[-1].startswith("command terminated with exit code"):
        lines.pop()
    return lines[-1] if lines else ""
