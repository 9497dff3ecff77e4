"""What a policy chooses for requests, from facts as JSON; as a program it reads them from stdin, for a process whose
hashes have another seed.
"""

import json
import sys
from typing import Any

from lockstep_api.v1 import worker_pb2
from lockstep_router.policies import RequestFacts, WorkerFacts, make_policy
from lockstep_router.settings import RouterSettings
from lockstep_router.workers.prefix_index import PrefixIndex

_MAX_BLOCKS = 10_000


def choices(policy: str, workers: list[dict[str, Any]], requests: list[dict[str, Any]]) -> list[str]:
    """The worker of each request. `reports` of a worker are PrefixReports in hexadecimal."""
    chosen = make_policy(policy, RouterSettings(workers=["host:1"]))
    facts = [_facts(**each) for each in workers]
    return [chosen.choose(RequestFacts(**each), facts) for each in requests]


def _facts(reports: list[str], **others: Any) -> WorkerFacts:
    index = PrefixIndex()
    index.resize(_MAX_BLOCKS)
    for report in reports:
        index.take(worker_pb2.PrefixReport.FromString(bytes.fromhex(report)))
    return WorkerFacts(**others, blocks=index)


if __name__ == "__main__":
    print(json.dumps(choices(**json.load(sys.stdin))))
