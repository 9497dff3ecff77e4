"""`prefix_aware`: a stream goes where the beginning of its prompt is cached, unless that worker is too loaded.

Which blocks a worker has is one of its facts: it reports them (`workers.prefix_index`). So routers that have got the
same reports make the same choice, also for a conversation that none of them has seen before.
"""

from collections.abc import Sequence

from lockstep_router.policies.facts import Policy, RequestFacts, WorkerFacts
from lockstep_router.policies.hybrid import within_bound
from lockstep_router.policies.rendezvous import rank

_MIN_SHARE = 0.5
"""Share of the prompt's blocks that must be known on a worker. A short beginning that most prompts have in common, such
as a chat template's, would send all of them to the same worker (SGLang's `cache_threshold`)."""


class PrefixAware(Policy):
    """The longest known prefix among the workers that are within the bound of `hybrid`."""

    uses_prefixes = True

    def __init__(self, load_bound: float) -> None:
        self._load_bound = load_bound

    def choose(self, request: RequestFacts, workers: Sequence[WorkerFacts]) -> str:
        """The worker within the bound that has most of the prompt; of equal ones, the one the session prefers.

        Workers that have less than half of the prompt count as having none of it.
        """
        keys = request.prefix_keys
        least = max(1, _MIN_SHARE * len(keys))
        within = {worker.worker_id: worker.known_blocks(keys) for worker in within_bound(workers, self._load_bound)}
        return max(
            rank(request.session, within),
            key=lambda worker_id: within[worker_id] if within[worker_id] >= least else 0,
        )
