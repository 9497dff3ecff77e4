"""The pods of a release, reached by `kubectl port-forward`: the services take that for a connection from the pod."""

import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from lockstep_tools.chaos.release import ROUTER, STATE, WORKER, Release
from lockstep_tools.debug.process import Process
from lockstep_tools.failure import CommandError

_FORWARD_S = 20.0
_END_S = 5.0
_MAX_ERROR_CHARS = 1000


@contextmanager
def forwarded(release: Release) -> Iterator[tuple[list[Process], dict[str, str]]]:
    """The release's services, and why pods cannot be reached, by pod.

    Raises:
        CommandError: the release has no pods.
    """
    running: list[subprocess.Popen[str]] = []
    found: list[Process] = []
    failed: dict[str, str] = {}
    errors = ExitStack()
    names = {pod.name for pod in release.require() if pod.component in (ROUTER, WORKER, STATE)}
    try:
        for item in release.kubectl.json("get", "pods")["items"]:
            name = item["metadata"]["name"]
            if name not in names:
                continue
            try:
                scheme, port = _management(item)
                said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed with `errors`
                errors.enter_context(said)
                command = ("port-forward", f"pod/{name}", f":{port}", "--address=127.0.0.1")
                process = release.kubectl.start(*command, errors=said)
                running.append(process)
                found.append(Process(f"pod-{name}", f"{scheme}://127.0.0.1:{_local_port(process, said)}"))
            except CommandError as error:
                failed[name] = error.message
        yield found, failed
    finally:
        for process in running:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
        errors.close()


def _management(pod: dict[str, Any]) -> tuple[str, int]:
    """Scheme and port of the management port, as the pod's specification says."""
    for container in pod["spec"].get("containers", []):
        for port in container.get("ports", []):
            if port.get("name") == "management":
                probe = (container.get("livenessProbe") or {}).get("httpGet") or {}
                return str(probe.get("scheme", "HTTP")).lower(), int(port["containerPort"])
    raise CommandError("the pod has no port named management")


def _local_port(process: "subprocess.Popen[str]", errors: IO[str]) -> int:
    """The port that kubectl forwards; it says so in its first line, or writes why not to `errors`."""
    assert process.stdout is not None
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reading.start()
    reading.join(_FORWARD_S)
    match = re.search(r"Forwarding from 127\.0\.0\.1:(\d+)", said[0] if said else "")
    if match is None:
        errors.seek(0)
        reason = errors.read(_MAX_ERROR_CHARS).strip().rpartition("\n")[2]
        raise CommandError(f"kubectl port-forward: {reason or ('it has ended' if said else 'it says nothing')}")
    return int(match[1])
