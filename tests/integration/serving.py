"""`lockstep serve` as its users run it: a command with an output, a Ctrl-C, and an exit code."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Self

import httpx
import psutil
from lockstep_tools.debug.local import below
from machine import PATIENCE_S, bury_orphans, descendants, title, wait_for
from system import REFERENCE, System, until_mirrored

COMMAND = (sys.executable, "-m", "lockstep_tools.cli")

START_S = 60.0
END_S = 20.0


class Serve:
    """One `lockstep serve` on a free port, from its start to its end."""

    def __init__(self, directory: Path, *options: str, model: str = str(REFERENCE)) -> None:
        self._out, self._err = directory / "out", directory / "err"
        self._left: list[psutil.Process] = []
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", model, "--port", "0", "--device", "cpu", "--threads", "1", *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that its Ctrl-C does not reach the tests
            )
        self.system = System("", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    @property
    def output(self) -> str:
        """Its output on stdout, for users."""
        return self._out.read_text()

    @property
    def notes(self) -> str:
        """Its output on stderr: logs and errors."""
        return self._err.read_text()

    @property
    def log(self) -> Path:
        """The file that has it."""
        return self._err

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.system.url.rpartition(":")[2])

    def children(self) -> list[psutil.Process]:
        """Every process below it."""
        return descendants(self.pid)

    def titles(self) -> list[str]:
        """What `ps` shows of it and of every process below it, sorted."""
        return sorted(title(process) for process in [psutil.Process(self.pid), *self.children()])

    def ready(self) -> Self:
        """Wait until it says where it serves."""

        def introduced() -> re.Match[str] | None:
            assert self.process.poll() is None, self.notes
            # `stop` is the last row: tests read the others too.
            rows = r"^API +(http://\S+)/v1\nmanage +(http://\S+) .*^stop "
            return re.search(rows, self.output, re.MULTILINE | re.DOTALL)

        match = wait_for(introduced, "lockstep serve is ready", START_S)
        assert match is not None
        self.system = System(match[1], match[2])
        return self

    def routers(self) -> list[str]:
        """The addresses of several routers, without /v1."""
        match = re.search(r"^routers +(\S.*)$", self.output, re.MULTILINE)
        assert match is not None
        return [url.removesuffix("/v1") for url in match[1].split(", ")]

    def until_mirrored(self) -> None:
        """Wait until the state server has all that streams have now: a router that is killed loses nothing then."""
        with httpx.Client(timeout=PATIENCE_S, trust_env=False, verify=False) as client:
            urls = [each.url for each in below(client, self.pid) if each.name.startswith("router")]
        asyncio.run(until_mirrored(urls))

    def interrupt(self, *signals: signal.Signals) -> None:
        """Signals as a terminal or a supervisor sends them."""
        for number in signals:
            self.process.send_signal(number)

    def end(self, within_s: float = END_S) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(within_s)

    def kill(self) -> list[str]:
        """Send SIGKILL; describes the processes that still run 2 s later."""
        others = set(descendants(os.getpid())).difference(self.children())
        self.process.kill()
        self.process.wait()
        return bury_orphans(others)


def run(*arguments: str, within_s: float = 20.0, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """A command's exit code, output and notes."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | (environment or {}),
    )
    return done.returncode, done.stdout, done.stderr


def debug_bundle(path: Path, *arguments: str) -> tuple[str, dict[str, bytes]]:
    """What `lockstep debug` prints, and the parts of its bundle."""
    code, output, notes = run("debug", "--output", str(path), *arguments, within_s=60.0)
    assert code == 0, notes
    with tarfile.open(path) as tar:
        files = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar.getmembers()}
        return output, {name: file.read() for name, file in files.items() if file is not None}


def sentence(notes: str) -> str:
    """The one line that a refused command prints, besides what has become ready until then."""
    lines = [line for line in notes.splitlines() if not line.startswith("✓")]
    assert len(lines) == 1, lines
    return lines[0]
