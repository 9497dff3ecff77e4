"""The state server's Prometheus metrics. Labels are few and bounded: no keys, no tenants."""

from lockstep_common.distributions import Distributions
from lockstep_common.telemetry import REGISTRY
from prometheus_client import Counter, Gauge

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

CALLS = Counter(
    "lockstep_state_calls", "Calls that have ended, by method and gRPC status.", ["method", "code"], registry=REGISTRY
)
CALL_SECONDS = Distributions(
    "lockstep_state_call_seconds",
    "From a call's arrival to its end.",
    ["method"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
WRITES = Counter("lockstep_state_writes", "Writes to streams, by outcome.", ["outcome"], registry=REGISTRY)
BLOCKS = Counter(
    "lockstep_state_blocks",
    "Blocks: `stored`, without room (`full`: the tenant's quota, or what is kept for journals), `refused` because the "
    "content is not the header's, found (`hit`), not found (`miss`), or found and damaged (`damaged`).",
    ["outcome"],
    registry=REGISTRY,
)
BLOCK_BYTES = Counter(
    "lockstep_state_block_bytes", "Bytes of blocks, by direction: `in`, `out`.", ["direction"], registry=REGISTRY
)
TRANSFER_BYTES = Gauge(
    "lockstep_state_transfer_bytes",
    "Bytes of blocks that are put or got now (`max_transfer_bytes`).",
    registry=REGISTRY,
)
DAMAGED = Counter(
    "lockstep_state_damaged_values", "Values of the store that were not as they were written.", registry=REGISTRY
)
EVICTIONS = Counter(
    "lockstep_state_evictions", "Entries evicted from memory to make room, by kind.", ["kind"], registry=REGISTRY
)
ENTRIES = Gauge("lockstep_state_entries", "Entries in memory, by kind.", ["kind"], registry=REGISTRY)
MEMORY_BYTES = Gauge("lockstep_state_memory_bytes", "Memory of all entries, about.", registry=REGISTRY)
BLOCK_MEMORY_BYTES = Gauge(
    "lockstep_state_block_memory_bytes", "Of that, memory of KV blocks, which are evicted first.", registry=REGISTRY
)
MEMORY_LIMIT_BYTES = Gauge(
    "lockstep_state_memory_limit_bytes", "The most that all entries may take; 0 with Redis.", registry=REGISTRY
)
STORE_SECONDS = Distributions(
    "lockstep_state_store_seconds",
    "Time of an operation on Redis, failed ones included.",
    ["operation"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
STORE_FAILURES = Counter(
    "lockstep_state_store_failures",
    "Operations on Redis that failed, by reason: `timeout`, `connection`, `login` (it refuses the user or the "
    "password), `full`, `read_only` (a replica), `not_durable` (it cannot save what is written, or has too few "
    "replicas), `error`, `answer` (it cannot be read), `busy` (this process was), or `open` while the breaker is.",
    ["reason"],
    registry=REGISTRY,
)
BREAKER_OPEN = Gauge(
    "lockstep_state_breaker_open", "1 while Redis is not used because it does not answer.", registry=REGISTRY
)
STRANGERS = Counter(
    "lockstep_state_refused_peers",
    "Calls refused because the peer's certificate is not for a router or a worker.",
    registry=REGISTRY,
)
