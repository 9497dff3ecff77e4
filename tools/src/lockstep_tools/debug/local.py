"""The services of a `lockstep serve` on this machine: found by process id or by the address of its router.

A worker's management port is any free one, so it is looked up in /proc: it is the port on which its process listens
and answers operators.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx

from lockstep_tools.debug.process import PartError, Process, fetch
from lockstep_tools.failure import UNUSABLE, CommandError
from lockstep_tools.serving.status import ADDRESS_HINT

_LISTENING = "0A"  # linux/tcp_states.h
_MAX_PROCESSES = 512
_ROUTER_PARENT = "router-parent"


def process_state(pid: int) -> str:
    """What the kernel says of a process: `T (stopped)` and the like; empty: there is none, or it is another user's."""
    try:
        lines = Path("/proc", str(pid), "status").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "")


def from_router(client: httpx.Client, url: str) -> list[Process]:
    """The router with this management address, and its workers that run on this machine.

    Raises:
        CommandError: it does not answer.
    """
    found = [Process("router", url)]
    try:
        status = json.loads(fetch(client, f"{url}/status"))
        workers = [
            # Its name is part of a path in the bundle.
            (re.sub(r"[^\w.-]", "_", str(each["id"])), int(each["pid"] or 0), str(each["target"]))
            for each in status["workers"]
        ]
    except PartError as error:
        raise CommandError(
            f"nothing answers at {url}: {error}. {ADDRESS_HINT}, or use --pid or --release", UNUSABLE
        ) from None
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"{url} is not the management port of a router", UNUSABLE) from None
    for name, pid, target in workers:
        if pid and target.startswith(("unix:", "127.0.0.1:", "localhost:", "[::1]:")):
            found.append(_process(client, f"worker-{name}", pid))
    return found


def below(client: httpx.Client, pid: int) -> list[Process]:
    """The services among a process and its descendants. A router with several processes is one: its parent answers
    for them, and they have no management port of their own.

    Raises:
        CommandError: there is none.
    """
    found = []
    counts: dict[str, int] = {}
    answered_for: set[int] = set()
    for each in process_tree(pid):
        kind, name = _service(each)
        if kind and each not in answered_for:
            if name == _ROUTER_PARENT:
                answered_for |= set(process_tree(each))
            counts[name] = counts.get(name, 0) + 1
            found.append(_process(client, name if counts[name] == 1 else f"{name}-{counts[name]}", each))
    if not found:
        raise CommandError(f"process {pid} is no `lockstep serve` that can be looked into", UNUSABLE)
    return found


def _process(client: httpx.Client, name: str, pid: int) -> Process:
    for port in _ports(pid):
        url = f"http://127.0.0.1:{port}"
        try:
            if "level" in json.loads(fetch(client, f"{url}/loglevel")):
                return Process(name, url, pid)
        except (PartError, ValueError):
            continue
    ports = _ports(pid)
    # It does not answer; if its port is known, each part will say so.
    return Process(name, f"http://127.0.0.1:{ports[-1]}" if ports else "", pid)


def _ports(pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    inodes = set()
    try:
        for descriptor in Path("/proc", str(pid), "fd").iterdir():
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
            except OSError:
                continue
            if match:
                inodes.add(match[1])
        tables = [Path("/proc", str(pid), "net", name).read_text() for name in ("tcp", "tcp6")]
    except OSError:
        return []
    ports = []
    for table in tables:
        for line in table.splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENING and rest[5] in inodes:
                ports.append(int(local.rpartition(":")[2], 16))
    return sorted(set(ports))


def process_tree(pid: int) -> Iterator[int]:
    """A process and its descendants, by their ids."""
    waiting, count = [pid], 0
    while waiting and count < _MAX_PROCESSES:
        each = waiting.pop(0)
        count += 1
        yield each
        for task in Path("/proc", str(each), "task").glob("*/children"):
            try:
                waiting.extend(map(int, task.read_text().split()))
            except OSError:
                continue


def _service(pid: int) -> tuple[str, str]:
    """A process's kind of service and its name; empty for other processes. Services name themselves in `ps`."""
    try:
        title = Path("/proc", str(pid), "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
    except OSError:
        return "", ""
    match = re.fullmatch(r"lockstep: (router|worker|state)( parent| [\w.-]+)?\s*", title)
    if match:
        return match[1], f"{match[1]}-{match[2].strip()}" if match[2] else match[1]
    return "", ""
