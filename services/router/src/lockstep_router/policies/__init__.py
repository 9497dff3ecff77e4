"""Chooses the worker for a stream. Each policy is a function of facts about the request and about the workers.

No policy asks a worker, a clock or a random generator, so routers that know the same facts make the same choice. One
policy, `round_robin`, also remembers what this router has sent, in a bounded state for each model.
"""

from lockstep_router.policies.facts import KnownBlocks, Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.imbalance import imbalance
from lockstep_router.policies.impaired import without_impaired
from lockstep_router.policies.names import check_policy, make_policy
from lockstep_router.policies.rendezvous import rank

__all__ = [
    "KnownBlocks",
    "Policy",
    "RequestFacts",
    "WorkerFacts",
    "check_policy",
    "imbalance",
    "make_policy",
    "rank",
    "without_impaired",
]
