"""Faults of the Redis behind a state server."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis
from lockstep_common.ports import free_port
from redis_damage import damage_some
from redis_server import RedisSentinels, RedisServer

_PATIENCE_S = 60.0
_DAMAGE_EVERY_S = 0.05


@dataclass(frozen=True)
class Fault:
    """What begins it and what ends it; both may block."""

    begin: Callable[[], object]
    end: Callable[[], object]
    is_noticed: bool = True
    """The state server's callers get failures, so that their breakers open."""
    heals: bool = False
    """The store can be used again before what ends the fault."""


def faults_of(server: RedisServer, seed: int) -> dict[str, Fault]:
    """What can happen to a Redis, by name.

    Args:
        server: the Redis.
        seed: of the choices which values are damaged, and how.
    """
    client = redis.Redis(port=server.port, socket_timeout=_PATIENCE_S)
    damaging = Damaging(client, seed)

    def limit(size: int) -> None:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", size)

    return {
        "redis_killed": Fault(server.kill, server.start),
        "redis_stopped": Fault(server.freeze, server.thaw),
        # It is asked on: that there is no room is an answer, which comes at once, and what is there can be read.
        "redis_full": Fault(lambda: limit(1), lambda: limit(0), is_noticed=False),
        "redis_read_only": Fault(
            lambda: client.replicaof("127.0.0.1", str(free_port())), lambda: client.replicaof("NO", "ONE")
        ),
        "values_damaged": Fault(damaging.begin, damaging.end, is_noticed=False),
    }


def failover_of(sentinels: RedisSentinels) -> Fault:
    """The master is killed, and sentinels make its replica the master; in the end the old one is the replica."""
    return Fault(sentinels.kill_master, sentinels.restore, heals=True)


class Damaging:
    """Damages values, again and again, from `begin` to `end`."""

    def __init__(self, client: Any, seed: int) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread()
        self.count = 0
        """So many were damaged."""

    def begin(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._damage, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(_PATIENCE_S)
        assert self.count, "nothing was damaged"

    def _damage(self) -> None:
        while not self._over.wait(_DAMAGE_EVERY_S):
            self.count += damage_some(self._client, self._random)
