"""A real Redis, or a cluster of three, on free ports of this machine, for tests; they keep nothing on disk.

`LOCKSTEP_REDIS_SERVER` is the path of another server to test with, such as `valkey-server`.
"""

import os
import shutil
import signal
import socket
import subprocess
import time

import pytest
from lockstep_common.ports import free_port

PATIENCE_S = 60.0


def program(name):
    """The path of one of Redis' programs."""
    other = os.environ.get("LOCKSTEP_REDIS_SERVER") if name == "redis-server" else None
    if other:
        assert shutil.which(other), f"LOCKSTEP_REDIS_SERVER is no program: {other}"
    path = shutil.which(other or name)
    if path is None:
        pytest.skip(f"{name} is not installed: what is kept in Redis is not tested")
    return path


class RedisServer:
    """Started at once, on a port that stays the same."""

    def __init__(self, directory, password=None, *arguments):
        self.port = free_port()
        directory.mkdir(parents=True, exist_ok=True)
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        secret = ["--requirepass", password] if password else []
        self._arguments = [program("redis-server"), *fixed, "--dir", str(directory), *secret, *arguments]
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


class RedisCluster:
    """Three nodes without replicas."""

    def __init__(self, directory):
        settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        self.nodes = [RedisServer(directory / str(number), None, *settings) for number in range(3)]
        hosts = [f"127.0.0.1:{node.port}" for node in self.nodes]
        self.address = "redis+cluster://" + ",".join(hosts)
        create = [program("redis-cli"), "--cluster", "create", *hosts, "--cluster-yes"]
        try:
            subprocess.run(create, check=True, capture_output=True, timeout=PATIENCE_S)
            for node in self.nodes:
                self._await(node.port)
        except BaseException:
            self.kill()
            raise

    def kill(self):
        self.each("kill")

    def each(self, action):
        """Do something with each node: `freeze`, `thaw`, `kill`, `start`."""
        for node in self.nodes:
            getattr(node, action)()

    @staticmethod
    def _await(port):
        ask = [program("redis-cli"), "-p", str(port), "cluster", "info"]
        end = time.monotonic() + PATIENCE_S
        while b"cluster_state:ok" not in subprocess.check_output(ask, timeout=PATIENCE_S):
            assert time.monotonic() < end, "the cluster is not ready"
            time.sleep(0.05)


class RedisSentinels:
    """A master, its replica and three sentinels that watch them; the name of the master is `main`."""

    def __init__(self, directory):
        self.servers = [RedisServer(directory / "0")]
        self._sentinels = []
        self._dead = None
        try:
            self.servers.append(RedisServer(directory / "1", None, "--replicaof", "127.0.0.1", str(self.master.port)))
            self._sentinels = [self._watch(directory / f"sentinel-{number}") for number in range(3)]
            hosts = ",".join(f"127.0.0.1:{port}" for port, _ in self._sentinels)
            self.address = f"redis+sentinel://{hosts}/0?master=main"
            for port, _ in self._sentinels:
                self._await(port)
        except BaseException:
            self.kill()
            raise

    @property
    def master(self):
        return self.servers[0]

    def kill_master(self):
        """Kill the one that is the master now."""
        port = int(self._ask("get-master-addr-by-name")[1])
        self._dead = next(server for server in self.servers if server.port == port)
        self._dead.kill()

    def restore(self):
        """Start the killed one again, once the other one is the master, and wait until it is its replica."""
        end = time.monotonic() + PATIENCE_S
        while int(self._ask("get-master-addr-by-name")[1]) == self._dead.port:
            assert time.monotonic() < end, "the sentinels have not failed over"
            time.sleep(0.05)
        self._dead.start()
        ask = [program("redis-cli"), "-p", str(self._dead.port), "info", "replication"]
        while b"master_link_status:up" not in subprocess.check_output(ask, timeout=PATIENCE_S):
            assert time.monotonic() < end, "the old master is no replica"
            time.sleep(0.05)

    def _ask(self, question, port=None):
        """The words of a sentinel's answer about the master."""
        ask = [program("redis-cli"), "-p", str(port or self._sentinels[0][0]), "sentinel", question, "main"]
        return subprocess.run(ask, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stdout.split()

    def freeze_sentinel(self, number):
        self._sentinels[number][1].send_signal(signal.SIGSTOP)

    def kill(self):
        for server in self.servers:
            server.thaw()
            server.kill()
        for _, process in self._sentinels:
            process.kill()
            process.wait(PATIENCE_S)

    def _watch(self, directory):
        directory.mkdir(parents=True)
        port = free_port()
        lines = (
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {directory}",
            f"sentinel monitor main 127.0.0.1 {self.master.port} 2",
            "sentinel down-after-milliseconds main 500",
            "sentinel failover-timeout main 3000",
        )
        path = directory / "sentinel.conf"
        path.write_text("\n".join(lines) + "\n")
        command = [program("redis-server"), str(path), "--sentinel"]
        return port, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _await(self, port):
        """Until a sentinel knows the replica and the two others."""
        end = time.monotonic() + PATIENCE_S
        while True:
            words = self._ask("master", port)
            known = dict(zip(words[::2], words[1::2], strict=False))
            if (known.get("num-slaves"), known.get("num-other-sentinels")) == ("1", "2"):
                return
            assert time.monotonic() < end, f"the sentinel does not know the others: {words}"
            time.sleep(0.05)
