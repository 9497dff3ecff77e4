"""Leaves out the workers that new streams avoid, before a policy chooses among the rest.

With rendezvous hashing only the sessions of an avoided worker move, and they return when it is well again. The last
workers are never left out, whatever their problems.
"""

from collections.abc import Sequence

from lockstep_router.policies.facts import WorkerFacts


def without_impaired(workers: Sequence[WorkerFacts], queue_threshold: int) -> Sequence[WorkerFacts]:
    """The workers to choose from: not ejected, then not suspected, if there are any such workers.

    Slow ones are left out too while one of the others has room.

    Args:
        workers: those that may run the stream, at least one.
        queue_threshold: a worker with more queued requests has no room.
    """
    if not any(worker.is_ejected or worker.is_suspected or worker.is_slow for worker in workers):
        return workers
    sound = [worker for worker in workers if not worker.is_ejected] or workers
    sound = [worker for worker in sound if not worker.is_suspected] or sound
    fast = [worker for worker in sound if not worker.is_slow]
    return fast if any(worker.queued <= queue_threshold for worker in fast) else sound
