"""Runs commands on Redis: in pipelines, within deadlines, behind the breaker. Every failure is a `LockstepError`.

No error's own words are in a log or an error, because they may have values.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep_common.breaker import Breaker
from lockstep_common.errors import LockstepError
from lockstep_common.tls import RELOADS
from redis import exceptions as redis_errors
from redis.asyncio import Redis, RedisCluster

from lockstep_state import metrics
from lockstep_state.errors import full, unavailable
from lockstep_state.redis_backend.connect import (
    RedisOptions,
    close,
    connect,
    parse_address,
    problem_of_files,
    signature,
)
from lockstep_state.redis_backend.scripts import Script

logger = logging.getLogger("lockstep.state")
for _reason in (
    "timeout",
    "connection",
    "login",
    "full",
    "read_only",
    "not_durable",
    "error",
    "answer",
    "busy",
    "open",
):
    metrics.STORE_FAILURES.labels(_reason)  # from 0: of a series that begins at 1, Prometheus sees no increase

PIPELINE = 256
"""Commands sent at a time: a longer batch is sent in parts, so that others get their turns on the server."""
_LOG_EVERY_S = 60.0
_PROBE_TTL_MS = 1000
_CERTIFICATE = "store"
"""Name of Redis' certificates in logs and metrics."""
_PROBES = 3
"""Answers of one probe: the first one may be late because a connection is made."""
_LOGIN = (redis_errors.AuthenticationError, redis_errors.AuthorizationError)
_NOT_DURABLE = ("MISCONF ", "NOREPLICAS ")
"""Redis refuses all writes: it cannot save to its disk, or fewer replicas than `min-replicas-to-write` follow."""
_NO_WRITES = ("read_only", "not_durable")
"""Reasons with which one answer says that no write succeeds, though reads do."""
_UNUSABLE = (
    redis_errors.ConnectionError,
    redis_errors.BusyLoadingError,
    redis_errors.MasterDownError,
    redis_errors.ClusterError,
    redis_errors.ClusterDownError,
    redis_errors.RedisClusterException,
    OSError,
)


@dataclass(frozen=True)
class Command:
    """A script with the keys that it touches, or, without a script, a command of Redis."""

    keys: tuple[str, ...]
    arguments: tuple[str | bytes | int, ...]
    script: Script | None = None

    def words(self, *, by_digest: bool = True) -> tuple[str | bytes | int, ...]:
        """What is sent."""
        if self.script is None:
            name, *rest = self.arguments
            return (name, *self.keys, *rest)
        start = ("EVALSHA", self.script.digest) if by_digest else ("EVAL", self.script.text)
        return (*start, len(self.keys), *self.keys, *self.arguments)


class _BusyError(Exception):
    """The time was over before Redis was asked, or its answer could be read: this process was busy."""


_REASONS: tuple[tuple[tuple[type[Exception], ...], str, str], ...] = (
    ((_BusyError,), "busy", "there is too much to do"),
    ((TimeoutError, redis_errors.TimeoutError), "timeout", "it does not answer in time"),
    (_LOGIN, "login", "it refuses the user or the password"),  # before their parent, ConnectionError
    (_UNUSABLE, "connection", "it cannot be reached"),
    ((redis_errors.ResponseError,), "error", "it refuses the operation"),
)
"""What a failure is called in the metrics, and for callers; the first that fits."""


class Store:
    """One Redis, whatever its form."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._signature = signature(options)
        self._refused = self._signature
        """Of the files that were last found to be unusable."""
        self._client: Redis | RedisCluster = connect(options)
        self._retiring: dict[asyncio.Task[None], Redis | RedisCluster] = {}
        """Former clients, each with what closes it."""
        if self._signature:
            for outcome in ("loaded", "failed"):
                RELOADS.labels(_CERTIFICATE, outcome)
        self._turns = asyncio.Semaphore(options.connections)
        self._breaker = Breaker("redis", options.breaker_failures)
        self._logged_at = -_LOG_EVERY_S
        self._running: set[asyncio.Future[Any]] = set()
        self._checking: asyncio.Task[None] | None = None
        """Finds out whether Redis would have answered a call that its caller has given up."""
        hosts = len(parse_address(options.address).hosts)
        self._probe_timeout_s = options.batch_timeout_s * (hosts + 1)
        """Enough to find out that all hosts but the last one are silent."""

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open."""
        return self._breaker.is_open

    def key(self, kind: str, tag: str, part: str = "") -> str:
        """A key of Redis. Keys of one kind and tag are in one slot of a cluster."""
        return f"{self._options.prefix}{kind}:{{{tag}}}{part}"

    async def one(self, operation: str, command: Command, *, is_batch: bool = False) -> Any:
        """The answer to one command.

        Raises:
            LockstepError: UNAVAILABLE or OVERLOADED.
        """
        (answer,) = await self.many(operation, [command], is_batch=is_batch)
        if isinstance(answer, LockstepError):
            raise answer
        return answer

    async def many(self, operation: str, commands: Sequence[Command], *, is_batch: bool = True) -> list[Any]:
        """The answer to each command, or its `LockstepError`. Raises nothing but cancellation.

        After a part that failed the others are not tried, so that a batch does not wait longer than a part.
        """
        answers: list[Any] = []
        for start in range(0, len(commands), PIPELINE):
            part = commands[start : start + PIPELINE]
            try:
                answers += await self._run(operation, part, is_batch=is_batch)
            except LockstepError as error:
                answers += [error] * (len(commands) - start)
                break
        return answers

    async def run(self) -> None:
        """Probe while the breaker is open, and follow the files for TLS, until cancelled."""
        while True:
            await asyncio.sleep(self._options.probe_s)
            # The client has lost cancellations. In a task of its own that cannot keep this one running.
            doing = asyncio.create_task(self._probe() if self._breaker.is_open else self._follow_files())
            try:
                await asyncio.wait({doing})
            finally:
                doing.cancel()

    async def close(self) -> None:
        """Close the connections."""
        if self._checking is not None:
            self._checking.cancel()
        former = list(self._retiring.values())
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*(close(client) for client in (self._client, *former)))

    async def _run(self, operation: str, commands: Sequence[Command], *, is_batch: bool) -> list[Any]:
        if self._breaker.is_open:
            metrics.STORE_FAILURES.labels("open").inc()
            raise unavailable("it does not answer")
        limit_s = self._options.batch_timeout_s if is_batch else self._options.timeout_s
        began = time.monotonic()
        was_asked = False
        try:
            async with asyncio.timeout(limit_s), self._turns:
                was_asked = True
                answers = await self._send(commands)
        except Exception as error:  # broken answers raise more than the errors of its own
            took_s = time.monotonic() - began
            if isinstance(error, TimeoutError) and (not was_asked or took_s > 2 * limit_s):
                error = _BusyError()
            raise self._failed(error) from None
        except asyncio.CancelledError:
            if was_asked:
                self._check(is_batch=is_batch)
            raise
        finally:
            metrics.STORE_SECONDS.labels(operation).observe(time.monotonic() - began)
        judged = [self._judge(answer) for answer in answers]
        is_late = time.monotonic() - began > self._options.timeout_s
        if not is_late and not any(map(_is_unusable, answers)):
            self._breaker.note_success()
        return judged

    def _check(self, *, is_batch: bool) -> None:
        """Have Redis asked in place of a call that was given up: callers whose deadlines are before those here would
        otherwise hide that it is silent. One at a time: callers that give up early must not add load.
        """
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._note_answer(is_batch=is_batch))

    async def _note_answer(self, *, is_batch: bool) -> None:
        with suppress(LockstepError):  # it is counted
            await self._run("check", [Command((), self._probe_line())], is_batch=is_batch)

    def _probe_line(self) -> tuple[str | int, ...]:
        return "SET", self.key("probe", "probe"), 1, "PX", _PROBE_TTL_MS

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands; those whose script Redis does not know, or that found a key of another type, once more."""
        answers = await self._pipeline([command.words() for command in commands])
        unknown = [at for at, answer in enumerate(answers) if isinstance(answer, redis_errors.NoScriptError)]
        await self._send_again(commands, answers, unknown)
        damaged = [at for at, answer in enumerate(answers) if _is_of_wrong_type(answer)]
        if damaged:
            metrics.DAMAGED.inc(len(damaged))
            await self._pipeline([("UNLINK", *commands[at].keys) for at in damaged])
            await self._send_again(commands, answers, damaged)
        return answers

    async def _send_again(self, commands: Sequence[Command], answers: list[Any], places: Sequence[int]) -> None:
        if places:
            again = await self._pipeline([commands[at].words(by_digest=False) for at in places])
            for at, answer in zip(places, again, strict=True):
                answers[at] = answer

    async def _pipeline(self, lines: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        pipeline: Any = self._client.pipeline(transaction=False)
        for words in lines:
            pipeline.execute_command(*words)
        answers: list[Any]
        if isinstance(self._client, RedisCluster):
            # Its pool would lose a connection for good whose use is cancelled. The timeout of the socket ends it.
            running = asyncio.ensure_future(pipeline.execute(raise_on_error=False))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            answers = await asyncio.shield(running)
        else:
            answers = await pipeline.execute(raise_on_error=False)
        return answers

    def _judge(self, answer: Any) -> Any:
        if not isinstance(answer, Exception):
            return answer
        if _describe(answer)[0] == "full":
            metrics.STORE_FAILURES.labels("full").inc()
            return full()
        return self._failed(answer)

    def _failed(self, error: Exception) -> LockstepError:
        """Count a failure, and translate it."""
        reason, words = _describe(error)
        metrics.STORE_FAILURES.labels(reason).inc()
        if reason not in ("error", "busy") and self._note_failure(reason):
            metrics.BREAKER_OPEN.set(1)
            logger.warning("Redis is not used until it answers")
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            logger.warning("an operation on Redis failed", extra={"reason": reason, "error": type(error).__name__})
        return unavailable(words)

    def _note_failure(self, reason: str) -> bool:
        """Note a failure for the breaker; whether this has opened it. A Redis that takes no writes opens it at once:
        reads succeed in between, so that there are never several failures in a row. In a cluster that is one node.
        """
        has_opened = self._breaker.note_failure()
        if reason in _NO_WRITES and not isinstance(self._client, RedisCluster):
            while not self._breaker.is_open:
                has_opened = self._breaker.note_failure()
        return has_opened

    async def _probe(self) -> None:
        """Find out whether Redis takes writes again, and in time. It connects first: addresses may have changed."""
        line = self._probe_line()
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                if not await self._follow_files():
                    await self._reconnect()
                for _ in range(_PROBES):
                    began = time.monotonic()
                    (answer,) = await self._pipeline([line])
                    if _is_unusable(answer):
                        return
                    if time.monotonic() - began <= self._options.timeout_s:
                        self._breaker.close()
                        metrics.BREAKER_OPEN.set(0)
                        logger.info("Redis is used again")
                        return
        except Exception as error:  # as above; nothing may end the probing
            logger.debug("a probe failed", extra={"error": type(error).__name__})

    async def _reconnect(self) -> None:
        """Have everything that begins from now on run over new connections, with the files for TLS as they are now.

        Calls in progress keep their connections until they end.
        """
        former, self._client = self._client, connect(self._options)
        retiring = asyncio.create_task(self._retire(former))
        self._retiring[retiring] = former
        retiring.add_done_callback(self._retiring.pop)
        if not isinstance(former, RedisCluster):
            pool: Any = former.connection_pool  # its types are incomplete
            await pool.update_active_connections_for_reconnect()  # those in use are closed when they are released
            await pool.disconnect(inuse_connections=False)

    async def _retire(self, client: Redis | RedisCluster) -> None:
        """Close a former client when no call can be using it any more."""
        await asyncio.sleep(2 * self._options.batch_timeout_s)
        await close(client)

    async def _follow_files(self) -> bool:
        """Connect again if the files for TLS have changed; whether it did. Files that cannot be used change nothing."""
        if not self._signature:
            return False
        try:
            found = await asyncio.to_thread(signature, self._options)
            if found == self._signature:
                return False
            problem = await asyncio.to_thread(problem_of_files, self._options)
            if problem is None:
                await self._reconnect()
                self._signature = found
                RELOADS.labels(_CERTIFICATE, "loaded").inc()
                logger.info("certificates reloaded", extra={"certificate": _CERTIFICATE})
                return True
            if found != self._refused and found == await asyncio.to_thread(signature, self._options):
                # A half-finished swap is complete at the next check; any other problem is reported once.
                self._refused = found
                RELOADS.labels(_CERTIFICATE, "failed").inc()
                logger.error("certificates not reloaded: %s", problem, extra={"certificate": _CERTIFICATE})
        except Exception as error:  # e.g. no thread can be started; nothing may end the probing
            logger.debug("certificates not checked", extra={"error": type(error).__name__})
        return False


def _is_unusable(answer: Any) -> bool:
    """Whether an answer says that nothing can be done with Redis, or nothing be written. A full one can be read."""
    return isinstance(answer, Exception) and _describe(answer)[0] not in ("full", "error")


def _describe(error: Exception) -> tuple[str, str]:
    """A failure's reason for the metrics, and the words for callers."""
    if isinstance(error, redis_errors.OutOfMemoryError) or "OOM " in str(error):
        return "full", "it is full"
    if isinstance(error, redis_errors.ReadOnlyError) or "READONLY" in str(error):
        return "read_only", "it takes no writes"
    if any(word in str(error) for word in _NOT_DURABLE):
        return "not_durable", "it takes no writes"
    if isinstance(error.__cause__, _LOGIN):
        error = error.__cause__  # a cluster's client says only that it could not connect
    for kinds, reason, words in _REASONS:
        if isinstance(error, kinds):
            return reason, words
    return "answer", "its answer cannot be read"


def _is_of_wrong_type(answer: Any) -> bool:
    """Whether a key is of another type than ours are: somebody else has written it."""
    return isinstance(answer, redis_errors.ResponseError) and "WRONGTYPE" in str(answer)
