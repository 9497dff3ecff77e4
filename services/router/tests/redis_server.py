"""A real Redis on a free port of this machine, for tests; it keeps nothing on disk."""

import shutil
import signal
import socket
import subprocess
import time

import pytest

PATIENCE_S = 30.0


class RedisServer:
    """Started at once, on a port that stays the same."""

    def __init__(self, directory, password=None):
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed: limits that routers share are not tested")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        arguments = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._arguments = [*arguments, "--dir", str(directory), *(["--requirepass", password] if password else [])]
        self._process = None
        self.start()

    @property
    def address(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        self._process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + PATIENCE_S
        while True:
            assert self._process.poll() is None, "redis-server has ended"
            assert time.monotonic() < end, "redis-server does not answer"
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.01)

    def kill(self):
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def freeze(self):
        """It keeps its connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._process.send_signal(signal.SIGCONT)
