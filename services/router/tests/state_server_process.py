"""The state server as a process of its own: it can be killed, stopped, and started again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

START_S = 90.0


class StateProcess:
    """One state server on a Unix socket, in memory."""

    def __init__(self, directory, *flags):
        self.target = f"unix:{directory}/state"
        self._log = directory / "state.log"
        self._flags = flags
        self._process = None

    def start(self):
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep_state", "--listen", self.target, *self._flags],
                stderr=output,
                env=os.environ | {"LOCKSTEP_MANAGEMENT_PORT": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        end = time.monotonic() + START_S
        while not any(json.loads(line)["message"] == "listening" for line in self._log.read_text().splitlines()):
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, "the state server does not listen"
            time.sleep(0.02)
        return self

    def stop(self):
        """It keeps its connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def kill(self):
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait(30)
