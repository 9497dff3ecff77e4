"""A policy from another Python package, found by its entry point.

The package declares `NAME = "module:factory"` in the group `lockstep.policies`. The factory takes no arguments and
returns a `Policy`; it is called once for each model.
"""

import logging
from collections.abc import Sequence
from importlib.metadata import entry_points

from lockstep_router import metrics
from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts

logger = logging.getLogger("lockstep.router")

GROUP = "lockstep.policies"


class Custom(Policy):
    """A policy that may fail: then another one chooses, and streams go on."""

    def __init__(self, name: str, policy: Policy, fallback: Policy) -> None:
        self._name = name
        self._policy = policy
        self._fallback = fallback
        self._has_failed = False
        self.uses_prefixes = policy.uses_prefixes

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The policy's choice; the fallback's if it raises or names a worker that is not among these."""
        try:
            chosen = self._policy.choose(request, workers)
            if any(chosen == worker.worker_id for worker in workers):
                return chosen
            self._note_failure(f"chose {chosen!r}, which is not among the workers")
        except Exception as error:  # whatever a foreign policy raises
            self._note_failure(repr(error))
        return self._fallback.choose(request, workers)

    def note_sent(self, request: RequestFacts, worker: WorkerFacts) -> None:
        """Pass it on to the policy."""
        try:
            self._policy.note_sent(request, worker)
        except Exception as error:  # whatever a foreign policy raises
            self._note_failure(repr(error))

    def _note_failure(self, problem: str) -> None:
        metrics.POLICY_FAILURES.inc()
        # Once: a policy that fails may fail for every stream.
        if not self._has_failed:
            self._has_failed = True
            logger.error("routing policy failed: sticky chooses", extra={"policy": self._name, "problem": problem})


def load(name: str) -> Policy:
    """A new policy, from the entry point of this name.

    Raises:
        ValueError: there is no such entry point, there are several, it cannot be loaded, or its factory fails or
            returns no `Policy`.
    """
    found = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not found:
        raise ValueError(f"no package has an entry point {name!r} in the group {GROUP}")
    if len(found) > 1:
        raise ValueError(f"several packages have an entry point {name!r} in the group {GROUP}: {', '.join(found)}")
    ((value, entry),) = found.items()
    try:
        policy = entry.load()()
    except Exception as error:  # whatever a foreign module and its factory raise
        raise ValueError(f"the entry point {name!r} ({value}) fails: {error!r}") from error
    if not isinstance(policy, Policy):
        raise ValueError(f"the entry point {name!r} ({value}) gives {policy!r}, which is no Policy")
    return policy
