"""The tries of one request: which router is next, how long to wait first, and when to give up."""

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

from lockstep_client.errors import (
    ConnectionFailedError,
    DeadlineExceededError,
    LockstepError,
    from_response,
)
from lockstep_client.policy import Policy
from lockstep_client.routers import Router, Routers
from lockstep_client.steps import BrokenError, Head, Outgoing, Pause, Resolve, Send, Steps, read_all

MAX_ERROR_BYTES = 1 << 20
TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TOLD_S = 86_400.0
"""Routers refuse a request that names a longer time."""
_TICK_S = 0.001
"""The resolution of the time that routers are told, and the shortest wait."""

_RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})


class RefusedError(Exception):
    """A router's answer with an error status."""

    def __init__(self, head: Head, content: bytes) -> None:
        super().__init__(f"status {head.status}")
        self.head = head
        self.content = content
        self.error = from_response(head.status, head.headers, content)

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later or elsewhere."""
        # The deadline is the client's own: no time is left. 500 is a defect, which a retry would meet again.
        return self.head.status in _RETRYABLE_STATUSES and self.error.code != "deadline_exceeded"


class Attempts:
    """Rounds through the routers, with a wait before each round but the first."""

    def __init__(self, routers: Routers, policy: Policy, clock: Callable[[], float], random: Random) -> None:
        self.policy = policy
        self.routers = routers
        self._clock = clock
        self._random = random
        self._deadline_s = None if policy.timeout_s is None else clock() + policy.timeout_s
        self._round = 0
        self._tried: set[Router] = set()
        self._failure: RefusedError | LockstepError | None = None
        self._asked_s: float | None = None
        """The shortest wait that routers have asked for in this round."""
        self._must_wait = False
        self._is_cut_short = False
        """The last wait for a router was to be shorter than its limit, because no more time was left."""
        self._rejoined: set[Router] = set()
        self.last_router: Router | None = None
        """The one that was asked last."""

    @property
    def remaining_s(self) -> float | None:
        """The time that is left; None: there is no limit."""
        return None if self._deadline_s is None else self._deadline_s - self._clock()

    def silence_s(self) -> float:
        """The longest wait for the next bytes: the time left is a limit too."""
        return self._wait_s(self.policy.silence_timeout_s)

    def stream_silence_s(self, router: Router) -> float:
        """The longest wait for the next bytes of a stream, or for its head: routers send comments in the meantime."""
        limit_s, router_s = self.policy.silence_timeout_s, self.routers.silence_of(router)
        if router_s is not None and self.policy.keepalive_slack_s is not None:
            limit_s = min(limit_s, router_s + self.policy.keepalive_slack_s)
        return self._wait_s(limit_s)

    def _wait_s(self, limit_s: float) -> float:
        remaining_s = self.remaining_s
        self._is_cut_short = remaining_s is not None and remaining_s < limit_s
        return limit_s if remaining_s is None else max(_TICK_S, min(limit_s, remaining_s))

    @property
    def is_round_over(self) -> bool:
        """Every router has been tried in this round."""
        return self._must_wait or self.routers.pick(self._tried) is None

    def check_deadline(self) -> None:
        """Raise when no time is left.

        Raises:
            DeadlineExceededError: as it says.
        """
        remaining_s = self.remaining_s
        if remaining_s is not None and remaining_s <= 0:
            raise self._too_late()

    def _too_late(self) -> DeadlineExceededError:
        return DeadlineExceededError(f"the answer was not complete after {self.policy.timeout_s:g} s")

    def next(self, prefer: Router | None = None) -> Steps[Router]:
        """The router to ask next: the preferred one, if it has not been tried in this round.

        Raises:
            RefusedError, LockstepError: the last failure, when there were enough tries; DeadlineExceededError.
        """
        self.check_deadline()
        for name in self.routers.take_stale_names():
            addresses: list[str] = yield Resolve(name)
            self.routers.learn(name, addresses)
            self.check_deadline()
        if self.is_round_over:
            yield from self._next_round()
        router = prefer if prefer is not None and prefer not in self._tried else self.routers.pick(self._tried)
        assert router is not None
        self._tried.add(router)
        self.last_router = router
        return router

    def _next_round(self) -> Steps[None]:
        self._round += 1
        wait_s = max(self.policy.backoff(self._round, self._random), self._asked_s or 0.0)
        remaining_s = self.remaining_s
        is_too_long = (self._asked_s or 0.0) > self.policy.max_retry_after_s
        if self._round > self.policy.retries or is_too_long or (remaining_s is not None and wait_s >= remaining_s):
            assert self._failure is not None
            raise self._failure
        yield Pause(wait_s)
        self.begin_round()

    def begin_round(self) -> None:
        """Let every router be asked again, without a wait."""
        self._tried.clear()
        self._rejoined.clear()
        self._asked_s = None
        self._must_wait = False

    def begin_repeat(self, failure: LockstepError | None) -> None:
        """Ask every router again, for a repeat. Without a failure there is no wait: the repeat is the recovery.

        Raises:
            RefusedError, LockstepError: the last failure, when there were enough tries.
        """
        if failure is not None:
            self._failure = failure
            self._tried.update(self.routers.known())
            return
        self._round += 1
        if self._round > self.policy.retries:
            assert self._failure is not None
            raise self._failure
        self.begin_round()

    def progressed(self) -> None:
        """Note that there was something new: the count of rounds begins again."""
        self._round = 0
        self.begin_round()

    def broke(self, router: Router, broken: BrokenError) -> None:
        """Note a failed connection. The router is avoided, unless the deadline alone has ended the wait for it."""
        remaining_s = self.remaining_s
        is_over = remaining_s is not None and remaining_s < _TICK_S
        is_own = is_over and (broken.kind == "late" or (self._is_cut_short and broken.kind != "broken"))
        if not is_own:
            self.routers.failed(router)
        is_late = is_own and broken.kind == "late"
        self._failure = self._too_late() if is_late else ConnectionFailedError(f"{router}: {broken.detail}")

    def failed(self, error: LockstepError) -> None:
        """Note that an answer has failed in its router."""
        self._failure = error

    def refused(self, router: Router, refused: RefusedError) -> None:
        """Note a refusal that may pass."""
        asked_s = refused.error.retry_after_s
        self._failure = refused
        if asked_s is not None:
            self._asked_s = asked_s if self._asked_s is None else min(asked_s, self._asked_s)
        if refused.head.status == 429:
            self._must_wait = True  # the limit is the tenant's: another router is no way around it
            return
        self.routers.failed(router, None if asked_s is None else min(asked_s, self.policy.max_retry_after_s))

    def avoid(self, router: Router) -> None:
        """Ask a router no more in this round, unless it is the only one."""
        if any(each != router and each not in self._tried for each in self.routers.known()):
            self._tried.add(router)

    def wait_longer(self) -> None:
        """Double the longest wait for the next bytes: what cannot be joined begins again with each try."""
        self.policy = replace(self.policy, silence_timeout_s=2 * self.policy.silence_timeout_s)

    def again(self, router: Router) -> None:
        """Let a router be asked again in this round."""
        self._tried.discard(router)

    def rejoin(self, router: Router) -> None:
        """Let a router whose connection broke be asked again at once, but only once in a round."""
        if router not in self._rejoined:
            self._rejoined.add(router)
            self._tried.discard(router)

    def timed(self, request: Outgoing) -> Outgoing:
        """The request with the time that is left for it, so that the router ends it then. A longer time than routers
        accept is not sent: the client alone watches it.
        """
        remaining_s = self.remaining_s
        if remaining_s is None or remaining_s > MAX_TOLD_S:
            return request
        headers = {**request.headers, TIMEOUT_HEADER: f"{max(_TICK_S, remaining_s):.3f}"}
        return replace(request, headers=headers)

    def send(
        self,
        request: Outgoing,
        *,
        prefer: Router | None = None,
        is_repeatable: bool = True,
        is_stream: bool = False,
    ) -> Steps[tuple[Router, Head]]:
        """Ask routers until one answers.

        Args:
            request: for any router.
            prefer: the router to ask first.
            is_repeatable: whether it may be sent again when it may have arrived.
            is_stream: whether its answer is a stream. Routers may have said how long it can be silent.

        Raises:
            RefusedError: an answer with an error status that will not pass, or the last one.
            LockstepError: no router answered.
        """
        while True:
            router = yield from self.next(prefer)
            try:
                silence_s = self.stream_silence_s(router) if is_stream else self.silence_s()
                head: Head = yield Send(router, self.timed(request), silence_s)
                if head.status < 400:
                    self.routers.worked(router)
                    return router, head
                refused = RefusedError(head, (yield from read_all(MAX_ERROR_BYTES, self.check_deadline)))
            except BrokenError as broken:
                self.broke(router, broken)
                if not is_repeatable and broken.kind != "connect":
                    raise ConnectionFailedError(f"{router}: {broken.detail}") from None
                continue
            if not refused.may_pass:
                raise refused
            self.refused(router, refused)


def json_object(content: bytes) -> dict[str, object] | None:
    """The JSON object that bytes hold; None if they hold none."""
    try:
        body = json.loads(content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
